"""The places of a loader that a checkpoint may write to.

A record names generators and attributes by path. It comes from a file that anybody may have changed, so its paths are
never followed: the live loader is walked, as it was at the save, every place that the walk meets is noted under its
path, and a path of the record is looked up among those. What isn't there is refused, and so is a value of another
kind than what is there. Nothing outside of the walk (classes, functions, modules, dunder attributes) has a place.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DataProgressError
from ..ranks import get_rank
from .generators import MAX_DEPTH, Path, format_path, get_parts, has_parts, is_dunder, list_children, walk

MISSING: Any = object()

_LIBRARIES = ("torch.", "accelerate.", "datasets.")


@dataclass(frozen=True, slots=True)
class Place:
    """One slot of a live object: `owner`'s attribute or item `step`, and what is in it now (or `MISSING`)."""

    owner: Any
    step: str | int
    value: Any

    @property
    def is_writable(self) -> bool:
        """Whether something else can be put here."""
        if isinstance(self.owner, (dict, list, deque)):
            return True
        return isinstance(self.step, str) and get_attributes(self.owner) is not None

    def put(self, value: Any) -> None:
        """Replace what is here."""
        if isinstance(self.owner, (dict, list, deque)):
            self.owner[self.step] = value  # type: ignore[index]
        else:
            self.owner.__dict__[self.step] = value  # where the walk read it; runs no code of the owner's class


class Places:
    """All places of one loader, as it is now."""

    def __init__(self, loader: Any) -> None:
        walked = list(walk(loader))
        first = {id(value): path for path, value, _ in walked}
        self._places: dict[Path, Place] = {}
        self._aliases: dict[Path, Path] = {}  # other ways to an object, and the one under which its parts are noted
        self._samplers = {path: value for path, value, in_sampler in walked if in_sampler and keeps_state(path, value)}
        for name, part in get_parts(loader).items():
            self._note((name,), Place(None, name, part), first)
        for path, value, _ in walked:
            if has_parts(path, value):
                for step, part in list_children(value):
                    self._note((*path, step), Place(value, step, part), first)

    def _note(self, path: Path, place: Place, first: dict[int, Path]) -> None:
        self._places[path] = place
        known = first.get(id(place.value), path)
        if known != path:
            self._aliases[path] = known

    def find(self, path: Path) -> Place | None:
        """The place of an object on the walk, for generators; None if this loader has no such place."""
        return self._places.get((*self._resolve(path[:-1]), path[-1])) if path else None

    def find_attribute(self, path: Path) -> Place | None:
        """The place of an attribute that a sampler keeps; None if no sampler here can have it.

        An attribute that the sampler doesn't have yet is `MISSING` (some are made in `__iter__`); then there is
        nothing of that name in its class either.
        """
        name = path[-1] if path else None
        owner = self._samplers.get(self._resolve(path[:-1]), MISSING)
        if owner is MISSING or not isinstance(name, str) or not name.isidentifier() or is_dunder(name):
            return None
        attributes = get_attributes(owner) or {}
        return Place(owner, name, attributes[name] if name in attributes else _read_class(owner, name))

    def is_shared(self, path: Path) -> bool:
        """Whether the object at `path` is reached in other ways too."""
        return path in self._aliases.values()

    def _resolve(self, path: Path) -> Path:
        known: Path = ()
        for step in path:
            known = (*known, step)
            known = self._aliases.get(known, known)
        return known


def _read_class(owner: Any, name: str) -> Any:
    """What the class says under a name: a default that instances overwrite, or something that isn't data."""
    return inspect.getattr_static(type(owner), name, MISSING)


def get_attributes(owner: Any) -> dict[Any, Any] | None:
    """The attributes of an instance; None if it has none of its own."""
    if isinstance(owner, (types.MethodType, functools.partial)):
        return None  # a method shows those of its function
    attributes = getattr(owner, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def keeps_state(path: Path, owner: Any) -> bool:
    """Whether the attributes of an object that was reached through a sampler may be a sampler's state."""
    if get_attributes(owner) is None or path == ("generator",):
        return False
    is_seedable = type(owner).__name__ == "SeedableRandomSampler"
    return is_seedable or not type(owner).__module__.startswith(_LIBRARIES)


def classify(value: Any) -> str | None:
    """The plain kind of a value: "flag", "number", "text", "nothing", "sequence" (of numbers); None if it isn't plain.

    Values of the same kind may take each other's place. So may anything plain and None, which stands for "not yet".
    """
    if value is None:
        return "nothing"
    for kind, classes in (("flag", (bool, np.bool_)), ("number", (int, float, np.number)), ("text", (str,))):
        if isinstance(value, classes):
            return kind
    return "sequence" if _is_sequence(value) else None


def _is_sequence(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return is_plain_dtype(value.dtype)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iufb"
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (int, float, np.number)) for item in value)
    return isinstance(value, range)


def is_plain_dtype(dtype: Any) -> bool:
    """Whether tensors of this dtype are integers, floats or booleans that numpy knows too."""
    import torch

    with contextlib.suppress(TypeError, RuntimeError):
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype.kind in "iufb"
    return False


def parse_path(value: Any) -> Path:
    """A path as JSON holds it; raises ValueError if it is none. Says nothing about whether any loader has it."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_DEPTH + 2:
        raise ValueError(f"{_shorten(value)} is no path")
    if not all(isinstance(step, (str, int)) and not isinstance(step, bool) for step in value):
        raise ValueError(f"{_shorten(value)} is no path")
    return tuple(value)


def make_place_error(path: Sequence[str | int], what: str, why: str | None = None) -> DataProgressError:
    """The error for a path of the record that cannot be used, saying on which rank."""
    rank, name = get_rank(), format_path(path)
    reason = why or "which is not a place that this loader has"
    return DataProgressError(
        f"rank {rank}: the checkpoint has {what} for {name}, {reason}. Build samplers and datasets as in the run that "
        "was saved; if they are, the checkpoint's data progress has been changed since it was saved.",
        rank=rank,
        path=name,
    )


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
