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
from .generators import Path, is_dunder, walk
from .places import (
    MISSING,
    Place,
    Places,
    classify,
    get_attributes,
    is_plain_dtype,
    keeps_state,
    make_place_error,
    parse_path,
)

if TYPE_CHECKING:
    from torch import Tensor

_SCALARS = (bool, int, float, str, type(None))
_NUM_SAMPLED = 1 << 16
_CONTAINERS = ("list", "array", "tensor")


@dataclass(frozen=True, slots=True)
class AttributeStates:
    """Values of attributes by path: scalars as they are, sequences as arrays with the name of their container."""

    scalars: Mapping[Path, Any] = field(default_factory=dict)
    arrays: Mapping[Path, tuple[str, np.ndarray[Any, Any]]] = field(default_factory=dict)

    def validate(self, places: Places) -> None:
        """Raise DataProgressError unless each of these is an attribute here with a value alike; changes nothing."""
        self._find_all(places)

    def restore(self, loader: Any) -> None:
        """Put the values back; sequences in place, because other objects may share them."""
        for place, value in self._find_all(Places(loader)):
            if not isinstance(value, tuple):
                place.put(value)
                continue
            container, array = value
            present = place.value
            if container == "list" and isinstance(present, list):
                present[:] = array.tolist()
            elif (
                container == "array"
                and isinstance(present, np.ndarray)
                and (present.shape, present.dtype) == (array.shape, array.dtype)
                and present.flags.writeable
            ):
                present[...] = array
            else:
                place.put(_rebuild(container, array))

    def _find_all(self, places: Places) -> list[tuple[Place, Any]]:
        return [(_find(places, path, classify(value)), value) for path, value in self.scalars.items()] + [
            (_find(places, path, "sequence"), value) for path, value in self.arrays.items()
        ]

    def list_differences(self, places: Places) -> list[tuple[Path, Any, Any]]:
        """The attributes whose values are not these, with both values (of sequences, words); changes nothing."""
        found: list[tuple[Path, Any, Any]] = []
        for path, value in self.scalars.items():
            place = places.find_attribute(path)
            present = MISSING if place is None else place.value
            if type(present) is not type(value) or (present != value and value == value):
                found.append((path, value, None if present is MISSING else present))
        for path, (_, array) in self.arrays.items():
            place = places.find_attribute(path)
            here = None if place is None or place.value is MISSING else _to_array(place.value)
            if here is None or not np.array_equal(here[1], array, equal_nan=array.dtype.kind == "f"):
                found.append((path, "the saved sequence", "another sequence"))
        return found

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
            scalars = {parse_path(item["path"]): item["value"] for item in data["scalars"]}
            if not all(isinstance(value, _SCALARS) for value in scalars.values()):
                raise TypeError("a value is not a number, a text or null")
            arrays = {
                parse_path(item["path"]): _parse_array(item["container"], tensors[f"{prefix}/attribute/{number}"])
                for number, item in enumerate(data["arrays"])
            }
            if len({*scalars, *arrays}) != len(data["scalars"]) + len(data["arrays"]):
                raise ValueError("a path is there twice")
        except (KeyError, TypeError, ValueError) as error:
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
                moved = self._first.get(path, MISSING) != _fingerprint(value)
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
        known = {
            path: self._first[path] for path in later.scalars if isinstance(self._first.get(path, MISSING), _SCALARS)
        }
        return AttributeStates({**known, **states.scalars}, states.arrays)


def _find(places: Places, path: Path, kind: str | None) -> Place:
    """The place of an attribute that may take a value of this kind."""
    place = places.find_attribute(path)
    if place is None:
        raise make_place_error(path, "a value")
    if place.value is MISSING:
        # Made in `__iter__`, as `self.order = torch.randperm(n)` is. A text could mean anything to whoever reads it.
        if kind is None or kind == "text":
            raise make_place_error(path, "a value")
        return place
    present = classify(place.value)
    if kind is None or present is None or (kind != present and "nothing" not in (kind, present)):
        what = f"a {kind}" if kind not in (None, "nothing") else "a value"
        raise make_place_error(path, what, f"where this loader has a {type(place.value).__name__}")
    return place


def _list_attributes(loader: Any) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    for path, owner, in_sampler in walk(loader):
        if not in_sampler:
            break  # samplers come first
        if not keeps_state(path, owner):
            continue
        for name, value in (get_attributes(owner) or {}).items():
            if not isinstance(name, str) or not name.isidentifier() or is_dunder(name):
                continue
            if isinstance(value, _SCALARS) or _name_container(value) is not None:
                found.append(((*path, name), value))
    return found


def _name_container(value: Any) -> str | None:
    """The container's name of a numeric sequence that is saved; None for anything else."""
    import torch

    if isinstance(value, torch.Tensor):
        return "tensor" if is_plain_dtype(value.dtype) else None
    if isinstance(value, np.ndarray):
        return "array" if value.dtype.kind in "iufb" else None
    return "list" if isinstance(value, list) and _read_list(value) is not None else None


def _read_list(value: list[Any]) -> np.ndarray[Any, Any] | None:
    if not value or not isinstance(value[0], (int, float, np.number)):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # rows of different lengths
        return None
    return array if array.dtype.kind in "iufb" and array.ndim == 1 else None


def _to_array(value: Any) -> tuple[str, np.ndarray[Any, Any]] | None:
    """The container's name and the values of a numeric sequence, copied from tensors; None for anything else."""
    container = _name_container(value)
    if container is None:
        return None
    if container == "tensor":
        return container, _copy_tensor(value)
    return container, value if container == "array" else np.asarray(value)


def _copy_tensor(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor in memory of their own: torch never again resizes memory that numpy has looked at."""
    array: np.ndarray[Any, Any] = tensor.detach().clone().cpu().numpy()
    return array


def _fingerprint(value: Any) -> Any:
    if isinstance(value, _SCALARS):
        return value
    container = _name_container(value)
    if container is None:
        return None
    # A sample of a long sequence is enough to see that it was shuffled.
    if container == "tensor":
        flat = value.detach().reshape(-1)
        sample = _copy_tensor(flat[:: max(1, flat.numel() // _NUM_SAMPLED)])
        shape, dtype = tuple(value.shape), str(value.dtype)
    else:
        array = np.asarray(value)
        flat = array.reshape(-1)
        sample = np.ascontiguousarray(flat[:: max(1, flat.size // _NUM_SAMPLED)])
        shape, dtype = array.shape, array.dtype.str
    return container, shape, dtype, zlib.crc32(sample.tobytes())


def _parse_array(container: Any, tensor: Tensor) -> tuple[str, np.ndarray[Any, Any]]:
    if container not in _CONTAINERS or not is_plain_dtype(tensor.dtype):
        raise ValueError(f"{container!r} of {tensor.dtype} is no numeric sequence")
    if container == "list" and tensor.dim() != 1:
        raise ValueError(f"a list has {tensor.dim()} dimensions")
    return container, _copy_tensor(tensor)


def _rebuild(container: str, array: np.ndarray[Any, Any]) -> Any:
    import torch

    if container == "list":
        return array.tolist()
    return torch.from_numpy(array.copy()) if container == "tensor" else array.copy()
