"""What an export will hold: which tensors under which names, where they lie, and what is known to be true of them.

Everything that can be refused is refused here, before a byte is written.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..architecture.facts import ArchitectureFacts
from ..errors import CheckpointIncompleteError, MismatchError, UnsupportedError, UsageError
from ..extents import DiskTensor
from ..findings import Finding, Severity
from ..fingerprint import Fingerprint
from ..formats.reading import FileCache, read_blocks
from ..manifest import ModelFacts
from ..opening import open_checkpoint
from .computed import Source
from .foreign import describe_from_config
from .recipes import AppliedRecipes, TieGroup, apply_recipes
from .reverting import Reverter
from .select import CONFIG_NAME, Selection

_SHOWN = 8
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Content:
    """The tensors of an export, before dtypes and files are chosen.

    Attributes:
        outputs: name in the file and where its bytes are, in the order in which they are put into files.
        fingerprints: of live tensors, by the names of outputs that are plain copies of them.
        sources: tensors that converted outputs are made of, by name, with fingerprints where there are any.
        converted: converted outputs that are made of `sources` alone.
        storages: outputs that share memory in transformers, which keeps them in one file.
        num_parameters: as the index states it.
        stem: of the files' names.
        config: content of config.json, where nothing else has it.
        texts: further files to write, by name.
        is_untied: tied weights were found to differ, and are both written.
        first_parameter: the output that decides which dtype the config states.
    """

    outputs: tuple[tuple[str, Source], ...]
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    sources: Mapping[str, tuple[DiskTensor, Fingerprint]] = field(default_factory=dict)
    converted: frozenset[str] = frozenset()
    storages: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    num_parameters: int = 0
    stem: str = "model"
    config: Mapping[str, Any] | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    is_untied: bool = False
    first_parameter: str | None = None
    reverter: Reverter | None = None


@dataclass(frozen=True)
class Choices:
    """What a caller wants or allows. See `export_checkpoint`."""

    untie: bool = False
    allow_missing: bool = False
    allow_unexpected: bool = False
    trust_remote_code: bool = False


def find_facts(selection: Selection, model: Path | None, choices: Choices) -> ArchitectureFacts | None:
    """Return what is known about the architecture: recorded at the save, or worked out from a config.

    Raises:
        UnsupportedError: there is a config, and transformers cannot build its model.
        ManifestError: what was recorded cannot be read.
    """
    recorded = get_recorded(selection)
    if recorded is not None and recorded.problem is None:
        return recorded
    directory = model or selection.assets
    if directory is not None and (directory / CONFIG_NAME).is_file():
        return describe_from_config(directory, trust_remote_code=choices.trust_remote_code)
    return None


def get_recorded(selection: Selection) -> ArchitectureFacts | None:
    """Return the facts in the checkpoint's manifest, if there are any."""
    if selection.facts is None or selection.facts.architecture is None:
        return None
    return ArchitectureFacts.from_dict(selection.facts.architecture, path=str(selection.directory))


def make_reverter(
    directories: Sequence[Path | None], facts: ArchitectureFacts | None, choices: Choices
) -> Reverter | None:
    """Return what computes the outputs that only transformers can compute, if there are any, and a config to do it.

    The config is that of the first of `directories` that has one.
    """
    if facts is None or all(output.operation is None for output in facts.outputs):
        return None
    for directory in directories:
        if directory is not None and (directory / CONFIG_NAME).is_file():
            return Reverter(directory, trust_remote_code=choices.trust_remote_code)
    return None


def collect_model(
    selection: Selection, facts: ArchitectureFacts | None, choices: Choices, reverter: Reverter | None = None
) -> Content:
    """Return the content of a model's export.

    Raises:
        CheckpointIncompleteError: tensors of the architecture are missing.
        MismatchError: there are tensors that the architecture does not have, of other shapes, or tied ones differ.
        UnsupportedError: a conversion cannot be done.
    """
    if facts is None:
        return _collect_as_it_is(selection)
    return collect_tensors(selection.tensors, get_fingerprints(selection.facts), facts, choices, reverter)


def collect_tensors(
    tensors: Mapping[str, DiskTensor],
    fingerprints: Mapping[str, Fingerprint],
    facts: ArchitectureFacts,
    choices: Choices,
    reverter: Reverter | None = None,
) -> Content:
    """Return the content of the export of a model that consists of `tensors`.

    Args:
        tensors: by their names in the model.
        fingerprints: what is known of the live tensors, by the same names.
        facts: about the model's architecture.
        reverter: for what only transformers can compute; without it that is refused.

    Raises as `collect_model` does.
    """
    applied = apply_recipes(tensors, facts, reverter)
    findings = [*_judge_missing(applied, facts, choices), *_judge_unexpected(applied, facts, choices)]
    outputs = list(applied.outputs)
    if choices.allow_unexpected:
        outputs += [(name, tensors[name]) for name in applied.unexpected]
    outputs, is_untied, more = _settle_ties(outputs, applied.ties, tensors, fingerprints, choices)
    findings += more
    plain = {output.name: output.source for output in facts.outputs if output.source is not None}
    names = {name: plain.get(name, name) for name, _ in outputs if name not in applied.converted}
    needed = {source for sources in applied.converted.values() for source in sources}
    return Content(
        outputs=tuple(outputs),
        fingerprints={name: fingerprints[source] for name, source in names.items() if source in fingerprints},
        sources={name: (tensors[name], fingerprints[name]) for name in sorted(needed) if name in fingerprints},
        converted=frozenset(
            name for name, sources in applied.converted.items() if sources and fingerprints.keys() >= set(sources)
        ),
        storages=applied.storages,
        num_parameters=facts.num_parameters,
        config=facts.config,
        texts=_write_generation_config(facts),
        findings=tuple(findings),
        is_untied=is_untied,
        first_parameter=_find_first(facts, outputs),
        reverter=reverter,
    )


def _write_generation_config(facts: ArchitectureFacts) -> dict[str, str]:
    if facts.generation_config is None:
        return {}
    return {"generation_config.json": json.dumps(facts.generation_config, indent=2, sort_keys=True) + "\n"}


def _collect_as_it_is(selection: Selection) -> Content:
    """Take the names of the checkpoint: what transformers would call the tensors is not known."""
    if not selection.tensors:
        raise CheckpointIncompleteError(f"{selection.path} holds a model without tensors.", path=str(selection.path))
    recorded = get_fingerprints(selection.facts)
    message = (
        "nothing says which architecture this is (no manifest, no config.json): tensors have the names that they have "
        "in the checkpoint, ties and conversions are not undone. Give --model a directory with the model's config.json"
    )
    return Content(
        outputs=tuple(selection.tensors.items()),
        fingerprints={name: recorded[name] for name in selection.tensors if name in recorded},
        num_parameters=sum(tensor.numel for tensor in selection.tensors.values()),
        findings=(Finding("architecture", Severity.HINT, message, path=str(selection.path)),),
        first_parameter=next((n for n, t in selection.tensors.items() if t.dtype in FLOATS), None),
    )


FLOATS = ("float64", "float32", "float16", "bfloat16")
"""What a cast applies to: eight-bit floats are quantised values that mean nothing without their scales."""


def _find_first(facts: ArchitectureFacts, outputs: list[tuple[str, Source]]) -> str | None:
    """Return the output by whose dtype transformers names a model's: that of its first floating parameter."""
    by_source = {output.needed[0]: output.name for output in reversed(facts.outputs) if output.needed}
    dtypes = {name: tensor.dtype for name, tensor in outputs}
    for source in facts.shapes:
        name = by_source.get(source)
        if name is not None and dtypes.get(name) in FLOATS:
            return name
    return next((name for name, dtype in dtypes.items() if dtype in FLOATS), None)


def get_fingerprints(facts: ModelFacts | None) -> dict[str, Fingerprint]:
    """Return the fingerprints of live tensors that a manifest recorded, those that this version can compare."""
    found = {}
    for tensor in facts.tensors if facts is not None else ():
        if tensor.fingerprint is not None:
            try:
                found[tensor.fqn] = Fingerprint.parse(tensor.fingerprint)
            except UnsupportedError:
                continue  # of a newer version; the report counts what was compared
    return found


def _list(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _judge_missing(applied: AppliedRecipes, facts: ArchitectureFacts, choices: Choices) -> list[Finding]:
    missing = applied.missing or applied.lost
    if not missing:
        return []
    what = f"{len(missing)} tensors of {facts.class_name} are not in the checkpoint: {_list(missing)}"
    if not choices.allow_missing:
        raise CheckpointIncompleteError(
            f"{what}. The checkpoint is of another model, or not whole; --allow-missing exports what there is.",
            expected=tuple(facts.shapes),
            actual=tuple(missing),
        )
    message = f"{what}. They were left out as --allow-missing allows: who loads this gets random values for them"
    return [Finding("missing", Severity.HINT, message, facts={"missing": list(missing)})]


def _judge_unexpected(applied: AppliedRecipes, facts: ArchitectureFacts, choices: Choices) -> list[Finding]:
    names = applied.unexpected
    if not names:
        return []
    what = f"{len(names)} tensors of the checkpoint are not tensors of {facts.class_name}: {_list(names)}"
    if not choices.allow_unexpected:
        raise MismatchError(
            f"{what}. Give --model the config that the model was trained with, or write them too with "
            "--allow-unexpected.",
            actual=tuple(names),
        )
    message = f"{what}. They are written under these names, and transformers will pass over them"
    return [Finding("unexpected", Severity.HINT, message, facts={"unexpected": list(names)})]


def _settle_ties(
    outputs: list[tuple[str, Source]],
    ties: tuple[TieGroup, ...],
    tensors: Mapping[str, DiskTensor],
    fingerprints: Mapping[str, Fingerprint],
    choices: Choices,
) -> tuple[list[tuple[str, Source]], bool, list[Finding]]:
    """Drop the further names of tied tensors once they are proven equal; keep them where they differ and may.

    Those that were equal in memory are: the one that is written will be proven to be what was there.
    """
    findings, is_untied = [], False
    for tie in ties:
        kept = tensors[tie.source]
        for name in tie.dropped:
            live = fingerprints.get(tie.source)
            if (live is not None and live == fingerprints.get(name)) or are_equal(kept, tensors[name]):
                continue
            if not choices.untie:
                raise MismatchError(
                    f"{name} and {tie.source} are one tensor in the model and differ in the checkpoint: dropping one "
                    "of them would lose trained weights. Write both, and a config that says so, with --untie.",
                    fqn=name,
                )
            is_untied = True
            outputs.append((name, tensors[name]))
            message = f"{name} differs from {tie.source}, which it was tied to: both are written"
            findings.append(Finding("untied", Severity.HINT, message, fqn=name))
    return outputs, is_untied, findings


def are_equal(a: DiskTensor, b: DiskTensor) -> bool:
    """Whether two tensors of a checkpoint hold the same bytes. Memory: two blocks of 1 MiB."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if list(a.parts) == list(b.parts) and all(
        (x.bytes, x.start, x.strides) == (y.bytes, y.start, y.strides)
        for x, y in zip(a.extents, b.extents, strict=True)
    ):
        return True  # one storage in the file
    with FileCache() as files:
        blocks = (
            read_blocks(each, files=files, buffer=bytearray(min(_COMPARED_BYTES, max(each.size_bytes, 16))))
            for each in (a, b)
        )
        return all(x == y for (_, x), (_, y) in zip(*blocks, strict=True))


def take_from_base(content: Content, base: Path, pattern: str) -> Content:
    """Replace all but the outputs that match `pattern` by those of another model: a partial update.

    Raises:
        MismatchError: the two models have other names, or a tensor has another shape in them.
        UsageError: nothing matches.
    """
    other = open_checkpoint(base).model.tensors
    names = [name for name, _ in content.outputs]
    chosen = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
    if not chosen:
        raise UsageError(f"--only {pattern!r} matches no tensor; there are {_list(names)}.", actual=pattern)
    missing = [name for name in names if name not in other and name not in chosen]
    left_over = [name for name in other if name not in names]
    shapes = [name for name, tensor in content.outputs if name in other and other[name].shape != tensor.shape]
    for wrong, what in ((missing, "lacks"), (left_over, "has, and the checkpoint lacks,"), (shapes, "has otherwise")):
        if wrong:
            raise MismatchError(
                f"{base} {what} {len(wrong)} tensors: {_list(wrong)}. A partial update needs two models of one shape.",
                path=str(base),
                actual=tuple(wrong),
            )
    message = f"{len(chosen)} of {len(names)} tensors are the checkpoint's ({pattern}), the others those of {base}"
    return replace(
        content,
        outputs=tuple((name, tensor if name in chosen else other[name]) for name, tensor in content.outputs),
        fingerprints={name: each for name, each in content.fingerprints.items() if name in chosen},
        converted=content.converted & chosen,
        findings=(*content.findings, Finding("base", Severity.NOTE, message, path=str(base))),
    )


def collect_optimizer(selection: Selection) -> Content:
    """Return the tensors of an optimizer's state as they are, and its other values as JSON."""
    facts = None
    if selection.manifest is not None and selection.section.index < len(selection.manifest.optimizers):
        facts = selection.manifest.optimizers[selection.section.index]
    recorded = {} if facts is None else facts.fingerprints
    known = {name: recorded[name] for name, tensor in selection.tensors.items() if name in recorded and tensor.shape}
    values = {name: value for name, value in selection.section.values.items() if _is_plain(value)}
    return Content(
        outputs=tuple(sorted(selection.tensors.items())),
        fingerprints={name: Fingerprint.parse(text) for name, text in known.items()},
        stem="optimizer",
        texts={"optimizer.json": json.dumps(values, indent=1, sort_keys=True) + "\n"} if values else {},
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)
