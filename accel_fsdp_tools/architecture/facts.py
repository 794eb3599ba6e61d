"""The facts about an architecture, and how they are written as JSON. No torch.

Compact, because they are in every manifest: an output that is a tensor of the checkpoint under the same name is just
that name, so a model without weight conversions costs a list of names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ManifestError, ManifestVersionError
from ..parts import Shape
from .outputs import OutputFacts, read_names, read_outputs, read_shape, write_outputs

VERSION = 1


@dataclass(frozen=True)
class TieFacts:
    """Names that are one tensor in the model. `kept` is written and `dropped` is not.

    Where transformers has not declared the tie (`dropped` is empty, `others` are the further names), it refuses to
    save the model; as separate tensors they can be written all the same.
    """

    kept: str
    dropped: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.kept, *self.dropped, *self.others)


@dataclass(frozen=True)
class AdapterFacts:
    """One adapter of a PEFT model: adapter_config.json, and the tensors of adapter_model.safetensors in order."""

    name: str
    config: Mapping[str, Any]
    outputs: tuple[OutputFacts, ...]


@dataclass(frozen=True)
class PeftFacts:
    """The adapters of a model, and the model that they were put into.

    Attributes:
        adapters: all of them, in PEFT's order.
        active: names of those in use.
        base: the model without adapters: what a merged model is written as, in terms of its own names.
        base_names: from these names to those in the checkpoint, for all tensors of `base`.
        problem: why the adapters or the base could not be described.
    """

    adapters: tuple[AdapterFacts, ...] = ()
    active: tuple[str, ...] = ()
    base: ArchitectureFacts | None = None
    base_names: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None

    @property
    def lacks_adapters(self) -> bool:
        """Whether `problem` is that of an adapter, which is then not among `adapters`."""
        return any(each.startswith("adapter ") for each in (self.problem or "").split("; "))


@dataclass(frozen=True)
class StorageFacts:
    """Outputs that are views of one memory when transformers cuts a state dict into files: it keeps them together.

    Attributes:
        numel: elements of the memory; what it counts for, once.
        runs: start and number of consecutive outputs, in their order.
    """

    numel: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ArchitectureFacts:
    """What `save_pretrained` writes for a model.

    Attributes:
        class_name: of the model itself, no wrapper's.
        shapes: of the tensors of the checkpoint (parameters and persistent buffers), in the model's order.
        outputs: the tensors written, in the order in which they are put into files. For a PEFT model they are the
            tensors under their own names, see `peft`.
        storages: outputs that share memory.
        ties: names that are one tensor.
        ignored: tensors of the checkpoint that are never written (`_keys_to_ignore_on_save`).
        num_parameters: as transformers puts it into an index: ties once, no buffers.
        config: the content of config.json, None where the model has none.
        generation_config: the content of generation_config.json, if one is written.
        is_transformers: whether the model is one of transformers' classes, so that `from_pretrained` knows it.
        is_remote_code: whether its class comes from code beside its weights.
        transformers_version: that worked this out.
        peft: the adapters, if there are any.
        problem: why it could not be described; then `shapes` and `outputs` are names as they are, or empty.
    """

    class_name: str
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    outputs: tuple[OutputFacts, ...] = ()
    storages: tuple[StorageFacts, ...] = ()
    ties: tuple[TieFacts, ...] = ()
    ignored: tuple[str, ...] = ()
    num_parameters: int = 0
    config: Mapping[str, Any] | None = None
    generation_config: Mapping[str, Any] | None = None
    is_transformers: bool = False
    is_remote_code: bool = False
    transformers_version: str | None = None
    peft: PeftFacts | None = None
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON holds them."""
        skipped = ("shapes", "outputs", "storages", "ties", "peft")
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name not in skipped}
        return {
            "version": VERSION,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "outputs": write_outputs(self.outputs),
            "storages": [[each.numel, [list(run) for run in each.runs]] for each in self.storages],
            "ties": [[each.kept, list(each.dropped), list(each.others)] for each in self.ties],
            "peft": None if self.peft is None else _write_peft(self.peft),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, path: str | None = None) -> ArchitectureFacts:
        """Return the facts that JSON holds; keys that this version does not know are passed over.

        Raises:
            ManifestVersionError: a newer version of this package wrote them.
            ManifestError: they are incomplete or of other types.
        """
        try:
            if (version := int(raw["version"])) > VERSION:
                raise ManifestVersionError(
                    f"{path or 'the manifest'}: the facts about the architecture have version {version}; this "
                    f"accel_fsdp_tools reads up to {VERSION}. Upgrade it, or give --model.",
                    path=path,
                    expected=VERSION,
                    actual=version,
                )
            return _read_facts(raw)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError(
                f"{path or 'the manifest'}: the facts about the architecture are incomplete or damaged "
                f"({type(error).__name__}: {error}). Give --model a directory with the model's config.json.",
                path=path,
            ) from error


def _write_peft(peft: PeftFacts) -> dict[str, Any]:
    return {
        "adapters": [
            {"name": each.name, "config": each.config, "outputs": write_outputs(each.outputs)} for each in peft.adapters
        ],
        "active": list(peft.active),
        "base": None if peft.base is None else peft.base.to_dict(),
        "base_names": dict(peft.base_names),
        "problem": peft.problem,
    }


def _read_facts(raw: Mapping[str, Any]) -> ArchitectureFacts:
    shapes = {str(name): read_shape(shape) for name, shape in raw["shapes"].items()}
    peft = raw.get("peft")
    return ArchitectureFacts(
        class_name=str(raw["class_name"]),
        shapes=shapes,
        outputs=read_outputs(raw["outputs"], shapes),
        storages=tuple(
            StorageFacts(int(numel), tuple((int(start), int(count)) for start, count in runs))
            for numel, runs in raw.get("storages", ())
        ),
        ties=tuple(
            TieFacts(str(kept), read_names(dropped), read_names(others)) for kept, dropped, others in raw["ties"]
        ),
        ignored=read_names(raw.get("ignored", ())),
        num_parameters=int(raw.get("num_parameters", 0)),
        config=_read_object(raw.get("config")),
        generation_config=_read_object(raw.get("generation_config")),
        is_transformers=bool(raw.get("is_transformers")),
        is_remote_code=bool(raw.get("is_remote_code")),
        transformers_version=raw.get("transformers_version"),
        peft=None if peft is None else _read_peft(peft, shapes),
        problem=raw.get("problem"),
    )


def _read_peft(raw: Mapping[str, Any], shapes: Mapping[str, Shape]) -> PeftFacts:
    return PeftFacts(
        adapters=tuple(
            AdapterFacts(str(each["name"]), dict(each["config"]), read_outputs(each["outputs"], shapes))
            for each in raw["adapters"]
        ),
        active=read_names(raw.get("active", ())),
        base=None if raw.get("base") is None else _read_facts(raw["base"]),
        base_names={str(name): str(source) for name, source in raw.get("base_names", {}).items()},
        problem=raw.get("problem"),
    )


def _read_object(raw: Any) -> Mapping[str, Any] | None:
    if raw is not None and not isinstance(raw, dict):
        raise TypeError(f"{raw!r} is no object")
    return raw
