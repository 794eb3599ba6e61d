"""What every reader answers with: a checkpoint as sections of named tensors, blobs and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..extents import Blob, ByteRange, DiskTensor

MODEL, OPTIMIZER, OTHER = "model", "optimizer", "other"
MODEL_COPY, OPTIMIZER_COPY = "model copy", "optimizer copy"

METADATA_NAME = ".metadata"
"""The file that makes a directory one of `torch.distributed.checkpoint`."""

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Section:
    """One state dict of a checkpoint: a model's, an optimizer's, or what lies beside them.

    Attributes:
        name: unique within the checkpoint: `model`, `model_1`, `optimizer`, ...
        kind: `MODEL`, `OPTIMIZER`, `OTHER`, or the same once more in another format: `MODEL_COPY`, `OPTIMIZER_COPY`.
        index: place among the sections of its kind.
        format: which reader read it, in words.
        path: the file or directory it was read from.
        tensors: by name. A model's names are those of its modules, wrapper prefixes removed; an optimizer's join
            the key path by dots (`state.<parameter>.exp_avg`).
        blobs: what DCP stores that is not a tensor, not unpickled.
        values: what a pickle holds beside tensors (numbers, text, lists), by dotted key path.
        zips: the torch zips, whole, that tensors and values lie in; their directories carry CRCs.
        files: the files that hold any of it, absolute.
        leftovers: files of this kind in the same place that nothing refers to (of an earlier save with more ranks).
        notes: what a reader of a report should know, in words.
        world_size: how many ranks wrote it, if the format says so.
        is_flat: names and shapes are those of FSDP1's flat parameters, not the model's.
    """

    name: str
    kind: str
    index: int
    format: str
    path: str
    tensors: Mapping[str, DiskTensor]
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    zips: tuple[ByteRange, ...] = ()
    files: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    world_size: int | None = None
    is_flat: bool = False


def name_section(kind: str, index: int) -> str:
    """Return a section's name: the kind, and its place if it is not the first."""
    stem = kind.replace(" ", "_")
    return f"{stem}_{index}" if index else stem


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was opened: nothing is loaded, every tensor says where its bytes are."""

    path: Path
    sections: tuple[Section, ...]

    @property
    def format(self) -> str:
        """The formats of its sections, in words."""
        return ", ".join(dict.fromkeys(section.format for section in self.sections))

    @property
    def files(self) -> tuple[str, ...]:
        """All files that hold any of it, absolute, each once."""
        return tuple(sorted({file for section in self.sections for file in section.files}))

    @property
    def tensors(self) -> dict[str, DiskTensor]:
        """All tensors by name: the first model's by its own names, others behind `<section name>.`."""
        return {
            f"{_prefix(section)}{name}": tensor for section in self.sections for name, tensor in section.tensors.items()
        }

    @property
    def blobs(self) -> dict[str, Blob]:
        """All blobs, named as `tensors` are."""
        return {f"{_prefix(section)}{name}": blob for section in self.sections for name, blob in section.blobs.items()}

    @property
    def models(self) -> tuple[Section, ...]:
        return tuple(section for section in self.sections if section.kind == MODEL)

    @property
    def optimizers(self) -> tuple[Section, ...]:
        return tuple(section for section in self.sections if section.kind == OPTIMIZER)

    @property
    def model(self) -> Section:
        """The model.

        Raises:
            UsageError: there is none, or more than one.
        """
        return self._get_only(MODEL, self.models)

    @property
    def optimizer(self) -> Section:
        """The optimizer.

        Raises:
            UsageError: there is none, or more than one.
        """
        return self._get_only(OPTIMIZER, self.optimizers)

    def get_section(self, name: str) -> Section:
        """Return the section called `name`.

        Raises:
            UsageError: there is none of that name; the message lists those there are.
        """
        for section in self.sections:
            if section.name == name:
                return section
        raise UsageError(f"{self.path} has no section {name!r}; it has {self._list_names()}.", path=str(self.path))

    def _get_only(self, kind: str, found: tuple[Section, ...]) -> Section:
        if len(found) == 1:
            return found[0]
        what = f"holds {len(found)} {kind}s; name one" if found else f"holds no {kind}"
        raise UsageError(f"{self.path} {what} (its sections: {self._list_names()}).", path=str(self.path))

    def _list_names(self) -> str:
        return ", ".join(section.name for section in self.sections) or "none"


def _prefix(section: Section) -> str:
    return "" if section.name == MODEL else f"{section.name}."
