"""The adapters of a checkpoint: PEFT's names for their tensors, their configs, and where their values lie.

Recorded at the save by this package; for other checkpoints, adapter_config.json says what they are and their names
say the rest. A checkpoint may hold the whole model with its adapters, or the adapters alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..architecture.facts import ArchitectureFacts, PeftFacts
from ..errors import CheckpointIncompleteError, DamagedCheckpointError, UnsupportedError, UsageError
from ..extents import DiskTensor
from ..fingerprint import Fingerprint
from .companions import read_config
from .content import Content, get_fingerprints, get_recorded
from .recipes import locate_outputs
from .select import Selection

CONFIG_NAME = "adapter_config.json"
STEM = "adapter_model"
DEFAULT = "default"
"""PEFT's name for the adapter that is saved into the directory itself; all others go into one of their own."""

PREFIX = "base_model.model."
_LORA = re.compile(
    r"(?P<module>.*)\.(?P<part>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))(?:\.(?P<rest>.*))?"
)
_MATRIX_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_EMBEDDINGS = ("embed_tokens", "lm_head")  # as PEFT calls them


@dataclass(frozen=True)
class Adapter:
    """One adapter.

    Attributes:
        name: in the run; "default" unless somebody chose another.
        config: content of adapter_config.json.
        tensors: by their names in adapter_model.safetensors.
        fingerprints: of live tensors, by the same names, of those that are plain copies.
        sources: what tensors that are no plain copies are made of, with fingerprints.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, DiskTensor]
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    sources: Mapping[str, tuple[DiskTensor, Fingerprint]] = field(default_factory=dict)


@dataclass(frozen=True)
class AdapterSet:
    """All adapters of a checkpoint.

    Attributes:
        active: names of those in use at the save.
        recorded: what this package recorded, None for checkpoints of others.
        has_base: whether the base model's weights are in the checkpoint, too.
        has_ties: whether some of the recorded model's tensors are one.
    """

    adapters: tuple[Adapter, ...]
    active: tuple[str, ...]
    recorded: PeftFacts | None = None
    has_base: bool = False
    has_ties: bool = False

    def choose(self, name: str | None) -> tuple[Adapter, ...]:
        """Return all adapters, or the one called `name`.

        Raises:
            UsageError: there is none of that name.
        """
        if name is None:
            return self.adapters
        found = tuple(each for each in self.adapters if each.name == name)
        if not found:
            names = ", ".join(each.name for each in self.adapters)
            raise UsageError(f"There is no adapter {name!r}; the checkpoint has {names}.", expected=name, actual=names)
        return found


def find_adapters(selection: Selection, model: Path | None, name: str | None = None) -> AdapterSet | None:
    """Return the adapters of a checkpoint; None where it holds no PEFT model.

    Args:
        selection: the model.
        model: a directory that may hold adapter_config.json.
        name: the only adapter that is wanted, if it is known already: no other needs to be complete.

    Raises:
        CheckpointIncompleteError: an adapter has no tensors, or lacks some.
        DamagedCheckpointError: an adapter's matrices are pieces of matrices, or a config is no JSON.
        UnsupportedError: nothing says what the adapters are.
        UsageError: an adapter's name is no name of a directory.
    """
    found = _find_recorded(selection, name) or _find_foreign(selection, model)
    for adapter in found.adapters if found is not None else ():
        _check_adapter(adapter, selection)
    return found


def _find_recorded(selection: Selection, name: str | None) -> AdapterSet | None:
    raw = None if selection.facts is None else selection.facts.architecture
    if raw is None or raw.get("peft") is None:
        return None
    facts = get_recorded(selection)
    assert facts is not None and facts.peft is not None  # noqa: S101, PT018 - for the type checker
    peft = facts.peft
    known = {each.name for each in peft.adapters}
    if peft.problem is not None and (not known or (peft.lacks_adapters if name is None else name not in known)):
        raise UnsupportedError(
            f"What PEFT would write for this model could not be worked out when it was saved: {peft.problem}. Load the "
            "checkpoint into the model and use its save_pretrained.",
            path=str(selection.path),
            actual=peft.problem,
        )
    fingerprints = get_fingerprints(selection.facts)
    adapters = tuple(
        _locate_adapter(each.name, each.config, facts, peft, selection, fingerprints)
        for each in peft.adapters
        if name in (None, each.name) or name not in known
    )
    return AdapterSet(adapters, peft.active, peft, has_base=True, has_ties=bool(facts.ties))


def _locate_adapter(
    name: str,
    config: Mapping[str, Any],
    facts: ArchitectureFacts,
    peft: PeftFacts,
    selection: Selection,
    fingerprints: Mapping[str, Fingerprint],
) -> Adapter:
    outputs = next(each.outputs for each in peft.adapters if each.name == name)
    tensors = selection.tensors
    missing = sorted({source for output in outputs for source in output.needed if source not in tensors})
    if missing:
        raise CheckpointIncompleteError(
            f"{len(missing)} tensors of the adapter {name!r} are not in {selection.path}: {', '.join(missing[:8])}. "
            "Use another checkpoint.",
            path=str(selection.path),
            actual=tuple(missing),
        )
    located = dict(locate_outputs(outputs, tensors, facts))
    plain = {output.name: output.source for output in outputs if output.source is not None}
    needed = {source for output in outputs if output.source is None for source in output.needed}
    return Adapter(
        name,
        config,
        # Under the checkpoint's names, by which they are proven; the output's are the keys.
        {output: tensors[plain[output]] if output in plain else tensor for output, tensor in located.items()},
        {output: fingerprints[source] for output, source in plain.items() if source in fingerprints},
        {source: (tensors[source], fingerprints[source]) for source in sorted(needed) if source in fingerprints},
    )


def _find_foreign(selection: Selection, model: Path | None) -> AdapterSet | None:
    tensors = selection.tensors
    is_file = Path(selection.section.path).name.startswith(STEM)
    places = [each for each in (model, selection.directory, selection.directory.parent) if each is not None]
    if tensors and not is_file and not all(name.startswith("base_model.") for name in tensors):
        return None
    if not tensors and not any((place / CONFIG_NAME).is_file() for place in places):
        return None
    names = tuple(dict.fromkeys(filter(None, map(_find_name, tensors))))
    if not names:
        config = _find_config(places, DEFAULT, selection, is_only=True)
        has_base = config.get("peft_type") != "LORA" and any(".base_layer.weight" in name for name in tensors)
        if has_base and not is_file:
            raise UnsupportedError(
                f"{selection.path} holds a whole model with {config.get('peft_type')} adapters, and only PEFT knows "
                "which of its tensors are the adapters'. Load it into the model and use its save_pretrained; "
                "checkpoints that accel_fsdp_tools saved know.",
                path=str(selection.path),
                actual=config.get("peft_type"),
            )
        if not is_file and not any(_LORA.fullmatch(name) for name in tensors) and config.get("peft_type") == "LORA":
            tensors = {}
        return AdapterSet((Adapter(DEFAULT, config, tensors),), (DEFAULT,))
    adapters = []
    for name in names:
        config = _find_config(places, name, selection, is_only=len(names) == 1)
        if config.get("peft_type") != "LORA":
            raise UnsupportedError(
                f"The names in {selection.path} are those of LoRA adapters, and {CONFIG_NAME} is of "
                f"{config.get('peft_type')}. Give --model the directory of the config that they were trained with.",
                path=str(selection.path),
                expected="LORA",
                actual=config.get("peft_type"),
            )
        adapters.append(Adapter(name, config, dict(_select_lora(tensors, name, config))))
    has_base = any(".base_layer.weight" in name for name in tensors)
    return AdapterSet(tuple(adapters), names if len(names) == 1 else (), has_base=has_base)


def _find_name(key: str) -> str | None:
    """Return the name of the adapter in a name; None where there is none, as PEFT writes them into files."""
    match = _LORA.fullmatch(key)
    rest = None if match is None else match["rest"]
    return None if rest in (None, "weight", "bias") else str(rest).split(".")[0]


def _find_config(places: Sequence[Path], name: str, selection: Selection, *, is_only: bool) -> Mapping[str, Any]:
    folders = [place if name == DEFAULT else place / name for place in places]
    for folder in [*folders, *(places if is_only else ())]:
        if (folder / CONFIG_NAME).is_file():
            return {**read_config(folder / CONFIG_NAME), "inference_mode": True}
    raise UnsupportedError(
        f"{selection.path} holds the tensors of a PEFT model, and nothing says what its adapter {name!r} is (kind, "
        f"rank, scaling): {CONFIG_NAME} is missing. Give --model a directory that has it"
        f"{'' if is_only else f', in a directory {name} inside'}; checkpoints that accel_fsdp_tools saved need none.",
        path=str(selection.path),
        expected=CONFIG_NAME,
    )


def _select_lora(
    tensors: Mapping[str, DiskTensor], name: str, config: Mapping[str, Any]
) -> Iterator[tuple[str, DiskTensor]]:
    """Yield what PEFT saves of a whole model for one LoRA adapter, under its names."""
    modules = {match["module"] for key in tensors if (match := _LORA.fullmatch(key)) and _find_name(key) == name}
    for key, tensor in tensors.items():
        match = _LORA.fullmatch(key)
        if match is not None:
            if _find_name(key) == name:
                tail = match["rest"].removeprefix(name)
                if match["part"] == "lora_magnitude_vector":
                    tail = tail.removesuffix(".weight")
                yield f"{match['module']}.{match['part']}{tail}", tensor
            continue
        module, mark, rest = key.partition(f".modules_to_save.{name}.")
        if mark:
            yield f"{module}.{rest}", tensor
            continue
        module, mark, rest = key.partition(".base_layer.")
        is_bias = key.endswith(".bias") and ".modules_to_save." not in key
        bias = config.get("bias")
        if (
            (bias == "all" and is_bias)
            or (bias == "lora_only" and mark and rest == "bias" and module in modules)
            or (mark and module in modules and _saves_embedding(module, config))
        ):
            yield key, tensor


def _saves_embedding(module: str, config: Mapping[str, Any]) -> bool:
    targets = config.get("target_modules")
    path = module.removeprefix(PREFIX)
    if path.rpartition(".")[2] not in _EMBEDDINGS or config.get("trainable_token_indices") is not None:
        return False
    if isinstance(targets, str):
        return targets != "all-linear" and re.fullmatch(targets, path) is not None
    return any(each in (targets or ()) for each in _EMBEDDINGS)


def check_name(name: str) -> None:
    """Make sure that an adapter's name is that of a directory.

    Raises:
        UsageError: it is not.
    """
    if name != Path(name).name or name in (".", ".."):
        raise UsageError(
            f"The adapter {name!r} cannot be written into a directory of that name. Give it another one.", actual=name
        )


def _check_adapter(adapter: Adapter, selection: Selection) -> None:
    check_name(adapter.name)
    if not adapter.tensors:
        raise CheckpointIncompleteError(
            f"{selection.path}: the adapter {adapter.name!r} has no tensors. What was trained is not in this "
            "checkpoint (some versions of PEFT and Accelerate save an empty adapter under FSDP); use another one.",
            path=str(selection.path),
            actual=adapter.name,
        )
    for name, tensor in adapter.tensors.items():
        match = _LORA.fullmatch(name)
        if match is None or match["part"] not in _MATRIX_PARTS or match["rest"] == "bias":
            continue
        if len(tensor.shape) < 2 or not tensor.numel:
            raise DamagedCheckpointError(
                f"{selection.path}: {name} of the adapter {adapter.name!r} has the shape {list(tensor.shape)}: it is a "
                "piece of a sharded matrix, saved without being gathered. Use another checkpoint.",
                path=str(selection.path),
                fqn=name,
                actual=tensor.shape,
            )


def collect_adapter(adapter: Adapter) -> Content:
    """Return the content of an adapter's directory."""
    return Content(
        outputs=tuple(adapter.tensors.items()),
        fingerprints=adapter.fingerprints,
        sources=adapter.sources,
        num_parameters=sum(tensor.numel for tensor in adapter.tensors.values()),
        stem=STEM,
        # As PEFT writes it: no newline at the end.
        texts={CONFIG_NAME: json.dumps(adapter.config, indent=2, sort_keys=True)},
    )


def parse_lora_name(name: str) -> tuple[str, str, str] | None:
    """Return module, part (`lora_A`, ...) and what follows, of a LoRA tensor's name in a file; None for others."""
    match = _LORA.fullmatch(name)
    return None if match is None else (match["module"].removeprefix(PREFIX), match["part"], match["rest"] or "")
