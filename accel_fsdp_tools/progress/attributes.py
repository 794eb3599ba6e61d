"""What samplers keep besides generators: counters and orders that they change as epochs go by.

A sampler that counts its own epochs, or shuffles a list in place, depends on more than a generator. Which of its
attributes are state and which are settings can't be told by looking, so every number, text and numeric sequence in
a user's sampler is watched from the first call on: one that has *changed* is state, is saved, and is put back.
Settings are never saved, so a changed setting in the new run is not overwritten.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataProgressError
from .generators import Path, follow_path, walk

if TYPE_CHECKING:
    from torch import Tensor

_SCALARS = (bool, int, float, str, type(None))
_NUM_SAMPLED = 1 << 16
_LIBRARIES = ("torch.", "accelerate.")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class AttributeStates:
    """Values of attributes by path: scalars as they are, sequences as arrays with the name of their container."""

    scalars: Mapping[Path, Any] = field(default_factory=dict)
    arrays: Mapping[Path, tuple[str, np.ndarray[Any, Any]]] = field(default_factory=dict)

    def restore(self, loader: Any) -> None:
        """Put the values back; sequences in place, because other objects may share them."""
        for path, value in self.scalars.items():
            setattr(follow_path(loader, path[:-1]), str(path[-1]), value)
        for path, (container, array) in self.arrays.items():
            owner = follow_path(loader, path[:-1])
            present = getattr(owner, str(path[-1]), None)
            if container == "list" and isinstance(present, list):
                present[:] = array.tolist()
            elif container == "array" and isinstance(present, np.ndarray) and present.shape == array.shape:
                present[...] = array
            else:
                setattr(owner, str(path[-1]), _rebuild(container, array))

    def to_dict(self) -> dict[str, Any]:
        """What is not a tensor, for JSON."""
        return {
            "scalars": [{"path": list(path), "value": value} for path, value in self.scalars.items()],
            "arrays": [{"path": list(path), "container": value[0]} for path, value in self.arrays.items()],
        }

    def to_tensors(self, prefix: str) -> dict[str, Tensor]:
        """The sequences, named `<prefix>/attribute/<number>`."""
        import torch

        return {
            f"{prefix}/attribute/{number}": torch.from_numpy(np.array(array))
            for number, (_, array) in enumerate(self.arrays.values())
        }

    @classmethod
    def from_dict(
        cls, data: Any, tensors: Mapping[str, Tensor], prefix: str, *, rank: int | None, path: Any
    ) -> AttributeStates:
        """Rebuild from JSON and tensors. Raises DataProgressError naming rank and file."""
        try:
            scalars = {tuple(item["path"]): item["value"] for item in data["scalars"]}
            arrays = {
                tuple(item["path"]): (str(item["container"]), tensors[f"{prefix}/attribute/{number}"].numpy())
                for number, item in enumerate(data["arrays"])
            }
        except (KeyError, TypeError) as error:
            raise DataProgressError(
                f"rank {rank}: the sampler state {prefix} in {path} is not whole ({error!r}); resume from another "
                "checkpoint",
                rank=rank,
                path=path,
            ) from error
        return cls(scalars, arrays)


class AttributeWatch:
    """Knows which attributes of a loader's samplers have changed since it was made."""

    def __init__(self, loader: Any) -> None:
        self._first = {path: _fingerprint(value) for path, value in _list_attributes(loader)}
        self._moving: set[Path] = set()

    def expect(self, states: AttributeStates) -> None:
        """Count what a checkpoint holds as state too, although in this process it has not moved yet."""
        self._moving.update(states.scalars, states.arrays)

    def read(self, loader: Any) -> AttributeStates:
        """The present values of all attributes that have ever moved, and of seeds that are drawn at random."""
        scalars: dict[Path, Any] = {}
        arrays: dict[Path, tuple[str, np.ndarray[Any, Any]]] = {}
        for path, value in _list_attributes(loader):
            moved = path in self._moving or path[-1] == "initial_seed"
            if not moved:
                moved = self._first.get(path, _MISSING) != _fingerprint(value)
            if not moved:
                continue
            self._moving.add(path)
            array = _to_array(value)
            if array is None:
                scalars[path] = value
            else:
                arrays[path] = array[0], array[1].copy()
        return AttributeStates(scalars, arrays)

    def complete(self, states: AttributeStates, later: AttributeStates) -> AttributeStates:
        """Add to `states` the first values of scalars that began to move between then and `later`."""
        known = {path: self._first[path] for path in later.scalars if path in self._first}
        return AttributeStates({**known, **states.scalars}, states.arrays)


def _list_attributes(loader: Any) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    for path, owner, in_sampler in walk(loader):
        if not in_sampler:
            break  # samplers come first
        attributes = getattr(owner, "__dict__", None)
        if not isinstance(attributes, dict) or path == ("generator",):
            continue
        is_seedable = type(owner).__name__ == "SeedableRandomSampler"
        if type(owner).__module__.startswith(_LIBRARIES) and not is_seedable:
            continue
        for name, value in attributes.items():
            if isinstance(name, str) and (isinstance(value, _SCALARS) or _to_array(value) is not None):
                found.append(((*path, name), value))
    return found


def _to_array(value: Any) -> tuple[str, np.ndarray[Any, Any]] | None:
    """The container's name and the values of a numeric sequence; None for anything else."""
    import torch

    if isinstance(value, torch.Tensor):
        return ("tensor", value.detach().cpu().numpy()) if value.dtype != torch.bfloat16 else None
    if isinstance(value, np.ndarray):
        return ("array", value) if value.dtype.kind in "iufb" else None
    if isinstance(value, list) and value and isinstance(value[0], (int, float, np.number)):
        try:
            array = np.asarray(value)
        except ValueError:  # rows of different lengths
            return None
        return ("list", array) if array.dtype.kind in "iufb" and array.ndim == 1 else None
    return None


def _fingerprint(value: Any) -> Any:
    if isinstance(value, _SCALARS):
        return value
    array = _to_array(value)
    if array is None:
        return None
    flat = array[1].reshape(-1)
    # A sample of a long sequence is enough to see that it was shuffled.
    sample = np.ascontiguousarray(flat[:: max(1, flat.size // _NUM_SAMPLED)])
    return array[0], array[1].shape, zlib.crc32(sample.tobytes())


def _rebuild(container: str, array: np.ndarray[Any, Any]) -> Any:
    import torch

    if container == "list":
        return array.tolist()
    return torch.from_numpy(array.copy()) if container == "tensor" else array.copy()
