"""What an export with merged adapters will hold: the base model's tensors, some of them with adapters added.

As `merge_and_unload` and `save_pretrained` would write it. The base model's weights come from the checkpoint itself,
or from another directory (the checkpoint need hold nothing but the adapter then).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..architecture.facts import ArchitectureFacts, TieFacts
from ..architecture.outputs import OutputFacts
from ..errors import CheckpointIncompleteError, MismatchError, UnsupportedError
from ..extents import DiskTensor, Shape
from ..findings import Finding, Severity
from ..fingerprint import Fingerprint
from .adapters import PREFIX, Adapter, AdapterSet
from .companions import CONFIG_NAME, read_config
from .computed import Source
from .content import Choices, Content, collect_tensors, get_fingerprints, make_reverter
from .foreign import describe_from_config
from .lora import DTYPES, Update, build_updates, check_mergeable, join_updates, sort_out
from .merged import MergedTensor, RearrangedTensor
from .reverting import RevertedTensor, Reverter
from .select import ModelTensors, select_model

_SHOWN = 8


@dataclass(frozen=True)
class _Base:
    """The base model.

    Attributes:
        selection: its tensors, by the names in `facts`.
        facts: what is written of it.
        shapes: of its tensors, by their names in the live model.
        places: from those names to the ones in `facts`: others in a saved model's files, none for converted tensors.
        names: from the names in `facts` to those of the checkpoint that is exported, for what is taken from there.
        ties: for every name of a tied tensor the one that is written.
        is_own: the weights are those in the checkpoint that is exported.
    """

    selection: ModelTensors
    facts: ArchitectureFacts
    shapes: Mapping[str, Shape]
    places: Mapping[str, str]
    names: Mapping[str, str]
    ties: Mapping[str, str]
    is_own: bool


@dataclass(frozen=True)
class Merged:
    """A merged model.

    Attributes:
        content: of its directory.
        facts: what is written of the base model, in terms of the names in `tensors`.
        tensors: the base model's, by those names.
        updates: what is added to which of them.
    """

    content: Content
    facts: ArchitectureFacts
    tensors: Mapping[str, DiskTensor]
    updates: Mapping[str, tuple[Update, ...]]


def collect_merged(
    selection: ModelTensors,
    found: AdapterSet,
    adapters: Sequence[Adapter],
    base: Path | None,
    model: Path | None,
    choices: Choices,
    reverter: Reverter | None = None,
) -> Merged:
    """Return what a merged model's directory will hold.

    Args:
        selection: the checkpoint's model.
        found: its adapters.
        adapters: those to merge, in order.
        base: a directory with the base model's weights and config; None for those in the checkpoint.
        model: a directory with the base model's config.json, for checkpoints that do not say what it is.
        choices: of the caller.
        reverter: for what only transformers can compute; made where it is needed and not given.

    Raises:
        UnsupportedError: an adapter is not plain LoRA, or changes what cannot be merged by itself.
        MismatchError: adapter and base model do not fit.
        CheckpointIncompleteError: the base model is not whole.
    """
    for adapter in adapters:
        check_mergeable(adapter, is_own_base=base is None)
    if base is not None:
        _check_fit(base, found)
    parts = [sort_out(adapter) for adapter in adapters]
    replaced: dict[str, DiskTensor] = {}
    for each in parts:
        replaced = {**each.replaced, **replaced}  # PEFT uses the first active adapter's
    described = _find_base_facts(found, [base, model, selection.assets], choices)
    facts = _untie(described, {name for each in parts for name in each.copied})
    own = (
        _take_own(selection, found, facts, replaced) if base is None else _take_other(base, described, facts, replaced)
    )
    updates = join_updates([build_updates(each, own.shapes) for each in parts], own.shapes)
    recorded = _rename_fingerprints(selection, own)
    reverter = reverter or make_reverter([selection.assets, base, model], own.facts, choices)
    content = collect_tensors(own.selection.tensors, recorded, own.facts, choices, reverter)
    is_untied = facts is not described or _is_untied(found)
    joined = _join_ties(updates, own)
    content = _merge(content, own, joined, selection, adapters, is_untied=is_untied)
    return Merged(content, own.facts, own.selection.tensors, joined)


def _find_base_facts(found: AdapterSet, places: Sequence[Path | None], choices: Choices) -> ArchitectureFacts:
    recorded = None if found.recorded is None else found.recorded.base
    if recorded is not None and recorded.problem is None:
        return recorded
    directory = next((each for each in places if each is not None and (each / CONFIG_NAME).is_file()), None)
    if directory is None:
        why = None if found.recorded is None else found.recorded.problem
        raise UnsupportedError(
            f"Which architecture the base model has is not known{'' if why is None else f' ({why})'}. Give --model a "
            f"directory with its {CONFIG_NAME}, or --merge-adapter the base model's directory.",
            expected=CONFIG_NAME,
        )
    return describe_from_config(directory, trust_remote_code=choices.trust_remote_code)


def _untie(facts: ArchitectureFacts, copied: Collection[str]) -> ArchitectureFacts:
    """Return facts in which tensors that were trained as copies are no longer one with others; the same if none is."""
    ties: list[TieFacts] = []
    outputs = list(facts.outputs)
    num_parameters = facts.num_parameters
    for tie in facts.ties:
        alone = [name for name in tie.names if name in copied]
        together = [name for name in tie.names if name not in copied]
        if not alone or not tie.dropped:
            ties.append(tie)
            continue
        written = [*alone, *together[:1]]
        new = [name for name in written if name != tie.kept]
        outputs += [OutputFacts(name, facts.shapes[name], source=name) for name in new]
        num_parameters += sum(math.prod(facts.shapes[name]) for name in new)
        if len(together) > 1:
            ties.append(TieFacts(together[0], dropped=tuple(together[1:])))
    if len(outputs) == len(facts.outputs):
        return facts
    return dataclasses.replace(facts, outputs=tuple(outputs), ties=tuple(ties), num_parameters=num_parameters)


def _take_own(
    selection: ModelTensors, found: AdapterSet, facts: ArchitectureFacts, replaced: Mapping[str, DiskTensor]
) -> _Base:
    """Take the base model's tensors out of a checkpoint of the whole PEFT model."""
    if not found.has_base:
        raise UnsupportedError(
            f"{selection.path} holds an adapter and no base model. Give --merge-adapter the base model's directory or "
            "hub id.",
            path=str(selection.path),
        )
    tensors: dict[str, DiskTensor] = {}
    if found.recorded is not None and found.recorded.base is not None:
        for name, source in found.recorded.base_names.items():
            module, mark, rest = source.partition(".modules_to_save.")
            if mark and name not in replaced:  # another adapter than the one that was in use
                source = f"{module}.original_module.{rest.partition('.')[2]}"
            if source in selection.tensors:
                tensors[name] = selection.tensors[source]
    else:
        for source, tensor in selection.tensors.items():
            if ".lora_" not in source and ".modules_to_save." not in source:
                name = source.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")
                tensors[name] = tensor
    tensors = {**tensors, **replaced}
    named = {name: dataclasses.replace(tensor, fqn=name) for name, tensor in tensors.items()}
    return _Base(
        selection=dataclasses.replace(selection, tensors=named),
        facts=facts,
        shapes=facts.shapes,
        places={name: name for name in facts.shapes},
        names={name: tensor.fqn for name, tensor in tensors.items()},
        ties=_find_kept(facts),
        is_own=True,
    )


def _take_other(
    base: Path, described: ArchitectureFacts, facts: ArchitectureFacts, replaced: Mapping[str, DiskTensor]
) -> _Base:
    """Take the base model's tensors from another directory: a saved model, or a checkpoint of one.

    `described` is the base model with its ties, `facts` without those that the adapter has cut.
    """
    selection = select_model(base)
    ties = _find_kept(facts)
    known = dict(selection.tensors)
    for name, kept in _find_kept(described).items():
        if kept in known:  # under the only name that was written
            known.setdefault(name, known[kept])
    outputs = {output.name: output for output in facts.outputs}
    is_saved = set(outputs) <= {*known, *replaced}
    if is_saved:
        # Names are those of the files, converted already: taken as they are.
        places = {output.source: output.name for output in facts.outputs if output.source is not None}
        shapes = {name: output.shape for name, output in outputs.items()}
        copies = tuple(OutputFacts(name, shape, source=name) for name, shape in shapes.items())
        taken = dataclasses.replace(facts, shapes=shapes, outputs=copies, ties=(), ignored=())
    else:
        places = {name: name for name in facts.shapes}
        taken = facts
    lost = sorted(name for name in replaced if places.get(ties.get(name, name)) is None)
    if lost:
        raise UnsupportedError(
            f"{lost[0]} was trained with the adapter, and is converted or left out when the base model is saved. Merge "
            "from a checkpoint of the whole model (--merge-adapter checkpoint).",
            fqn=lost[0],
        )
    changed = {places[ties.get(name, name)]: tensor for name, tensor in replaced.items()}
    optional = set(ties) if taken is facts else set()
    missing = sorted(
        name for name in taken.shapes if name not in known and name not in changed and name not in optional
    )
    if missing:
        raise CheckpointIncompleteError(
            f"{base} lacks {len(missing)} tensors of {facts.class_name}, the base model: "
            f"{', '.join(missing[:_SHOWN])}. Give --merge-adapter the model that the adapter was trained on; one with "
            "names of an older version of transformers has to be loaded and saved once.",
            path=str(base),
            actual=tuple(missing),
        )
    tensors = {name: tensor for name, tensor in known.items() if name in taken.shapes} | {
        name: dataclasses.replace(tensor, fqn=name) for name, tensor in changed.items()
    }
    return _Base(
        selection=dataclasses.replace(selection, tensors=tensors, facts=None),
        facts=taken,
        shapes=facts.shapes,
        places=places,
        names={name: tensor.fqn for name, tensor in changed.items()},
        ties=ties,
        is_own=False,
    )


def _find_kept(facts: ArchitectureFacts) -> dict[str, str]:
    """Return for every name of a tied tensor the one that is written."""
    return {name: tie.kept for tie in facts.ties if tie.dropped for name in tie.names}


def _join_ties(updates: Mapping[str, tuple[Update, ...]], base: _Base) -> dict[str, tuple[Update, ...]]:
    """Return updates by the names in `base.facts`. What is added to one of tied weights is added to all."""
    joined: dict[str, tuple[Update, ...]] = {}
    for name, each in updates.items():
        kept = base.places.get(base.ties.get(name, name))
        if kept is None:
            raise UnsupportedError(
                f"{name}, which the adapter changes, is converted by transformers when it is saved, and the base "
                "model's files hold it converted. Merge from a checkpoint of the whole model (--merge-adapter "
                "checkpoint), or export the adapter and merge it with PEFT.",
                fqn=name,
            )
        joined[kept] = (*joined.get(kept, ()), *each)
    return joined


def _rename_fingerprints(selection: ModelTensors, base: _Base) -> dict[str, Fingerprint]:
    recorded = get_fingerprints(selection.facts)
    return {name: recorded[source] for name, source in base.names.items() if source in recorded}


def _merge(
    content: Content,
    base: _Base,
    updates: Mapping[str, tuple[Update, ...]],
    selection: ModelTensors,
    adapters: Sequence[Adapter],
    *,
    is_untied: bool,
) -> Content:
    """Replace the weights that adapters change by merged ones."""
    known = dict(content.outputs)
    plain = {output.source: output.name for output in base.facts.outputs if output.source is not None}
    merged: dict[str, MergedTensor] = {}
    for name, each in updates.items():
        tensor = base.selection.tensors.get(name) or known[plain[name]]
        assert isinstance(tensor, DiskTensor)  # noqa: S101 - nothing is merged yet
        if tensor.dtype not in DTYPES:
            raise UnsupportedError(
                f"{name} has the dtype {tensor.dtype}; weights of {', '.join(DTYPES)} are merged. Export the adapter, "
                "and merge it into the base model that is not quantized.",
                fqn=name,
                actual=tensor.dtype,
            )
        merged[name] = MergedTensor(plain.get(name, name), tensor, each)
    changed: dict[str, Source] = {plain[name]: tensor for name, tensor in merged.items() if name in plain}
    for output in base.facts.outputs:
        if output.source is None and any(name in merged for name in output.needed):
            parts = {name: merged.get(name, base.selection.tensors[name]) for name in output.needed}
            source = known[output.name]
            if isinstance(source, RevertedTensor):
                changed[output.name] = dataclasses.replace(source, sources=parts)
                continue
            dtype = next(iter(parts.values())).dtype
            changed[output.name] = RearrangedTensor(output.name, dtype, output.shape, output.moves, parts)
    message = (
        f"adapter {', '.join(each.name for each in adapters)} merged into {len(updates)} tensors of "
        f"{base.facts.class_name}, {'in this checkpoint' if base.is_own else f'in {base.selection.path}'}"
    )
    return dataclasses.replace(
        content,
        outputs=tuple((name, changed.get(name, tensor)) for name, tensor in content.outputs),
        fingerprints={name: each for name, each in content.fingerprints.items() if name not in changed},
        converted=content.converted - changed.keys(),
        sources=_list_sources(content, changed, base, selection, adapters),
        findings=(*content.findings, Finding("merged", Severity.NOTE, message), *_judge_ties(updates, base)),
        is_untied=content.is_untied or is_untied,
    )


def _judge_ties(updates: Mapping[str, Sequence[Update]], base: _Base) -> list[Finding]:
    """Point at weights that PEFT's merge changes in two places, although training changed one."""
    findings = []
    for name, kept in base.ties.items():
        if name != kept and base.places.get(kept) in updates:
            message = (
                f"{kept} and {name} are one tensor, which the adapter changed in one of its two places. Merged, it is "
                "changed in both, as merge_and_unload does it: the merged model computes something else than the model "
                "with its adapter. Export the adapter instead"
            )
            findings.append(Finding("tied", Severity.HINT, message, fqn=kept))
    return findings


def _list_sources(
    content: Content,
    changed: Mapping[str, Source],
    base: _Base,
    selection: ModelTensors,
    adapters: Sequence[Adapter],
) -> dict[str, tuple[DiskTensor, Fingerprint]]:
    """Return what merged weights are made of, as far as fingerprints of it were recorded."""
    recorded = get_fingerprints(selection.facts)
    sources = dict(content.sources)
    for source in changed.values():
        for tensor in () if isinstance(source, DiskTensor) else source.inputs:
            origin = base.names.get(tensor.fqn, tensor.fqn)
            if origin in recorded and origin in selection.tensors:
                sources[origin] = (selection.tensors[origin], recorded[origin])
    for adapter in adapters:
        sources |= adapter.sources
    return sources


def _is_untied(found: AdapterSet) -> bool:
    """Whether the run trained a copy of a tied weight: then the config must not say that they are tied."""
    base = None if found.recorded is None else found.recorded.base
    if base is None or base.ties:
        return False
    return found.has_ties or bool((base.config or {}).get("tie_word_embeddings"))


def _check_fit(base: Path, found: AdapterSet) -> None:
    """Make sure that a base directory is no other kind of model than the recorded one.

    Raises:
        MismatchError: it is.
    """
    recorded = None if found.recorded is None else found.recorded.base
    path = base / CONFIG_NAME
    if recorded is None or recorded.config is None or not path.is_file():
        return
    wanted, actual = recorded.config.get("model_type"), read_config(path).get("model_type")
    if wanted != actual:
        raise MismatchError(
            f"{base} is a {actual} model, and the adapter was trained on a {wanted} model.",
            path=str(base),
            expected=wanted,
            actual=actual,
        )
