"""What a checkpoint holds beside its tensors, as plain values that can be compared with those in memory.

Read without executing anything. Numbers in tensors and arrays become `Numbers`, what is no plain value `Opaque`: it
cannot be compared, and is not called different.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .extents import DiskTensor
from .fingerprint import view_bytes
from .formats.checkpoint import Section
from .formats.pickled import ArrayRef, TensorRef
from .formats.reading import read_part
from .formats.state_files import StateFile, make_whole_tensor, open_state_file
from .formats.zips import open_window
from .names import clean_fqn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ARRAY_KINDS = {"f": "float", "u": "uint", "i": "int", "c": "complex"}


@dataclass(frozen=True)
class Numbers:
    """A tensor's or array's numbers: dtype without `torch.`, shape, row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Opaque:
    """Something that is no plain value."""

    name: str


def read_values(path: Path) -> Any:
    """Return what a small file of `torch.save` holds, plain. Memory: all of it.

    Raises:
        CheckpointIncompleteError, DamagedCheckpointError, UnsafePickleError: as `open_state_file`.
    """
    file = open_state_file(path)
    return _simplify(file.value, file)


def simplify(value: Any) -> Any:
    """Return what is in memory in the form that `read_values` gives to what is in a file."""
    return _simplify(value, None)


def _simplify(value: Any, file: StateFile | None) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: _simplify(each, file) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_simplify(each, file) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_simplify(each, file) for each in value), key=repr)
    if isinstance(value, TensorRef) and file is not None:
        return Numbers(value.dtype, value.shape, bytes(read_part(make_whole_tensor(file, "", value, ()))))
    if isinstance(value, ArrayRef):
        array = np.frombuffer(value.data, value.dtype.order.replace("|", "") + value.dtype.code)
        return _simplify(array.reshape(value.shape, order="F" if value.fortran else "C"), file)
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        name = f"{_ARRAY_KINDS[value.dtype.kind]}{value.dtype.itemsize * 8}"
        return Numbers(name, value.shape, np.ascontiguousarray(value).tobytes())
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "untyped_storage"):
        tensor = value.detach().cpu().contiguous()
        return Numbers(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytes(view_bytes(tensor)))
    return Opaque(type(value).__qualname__)


def iterate_differences(saved: Any, live: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two plain values differ, by dotted key, with both values; None stands for a key that is not there.

    Keys that only the live value has are no difference: newer libraries have more. NaN equals NaN.
    """
    if isinstance(saved, Opaque) or isinstance(live, Opaque):
        return
    if isinstance(saved, dict) and isinstance(live, dict):
        for name, value in saved.items():
            inner = f"{key}.{name}" if key else str(name)
            if name in live:
                yield from iterate_differences(value, live[name], inner)
            else:
                yield inner, value, None
        return
    if isinstance(saved, list) and isinstance(live, list) and len(saved) == len(live):
        for number, (a, b) in enumerate(zip(saved, live, strict=True)):
            yield from iterate_differences(a, b, f"{key}.{number}" if key else str(number))
        return
    if not _is_same(_unpack(saved), _unpack(live)):
        yield key, saved, live


def _unpack(value: Any) -> Any:
    """Return the number of a 0-d tensor of a type that numpy knows."""
    if isinstance(value, Numbers) and value.shape == () and value.dtype.startswith(("float32", "float64", "int")):
        return np.frombuffer(value.data, value.dtype)[0].item()
    return value


def _is_same(saved: Any, live: Any) -> bool:
    if isinstance(saved, float) and isinstance(live, float) and math.isnan(saved):
        return math.isnan(live)
    return bool(saved == live)


def read_parameter_groups(section: Section) -> dict[str, Any]:
    """Return the options of an optimizer's parameter groups by name (`param_groups.0.lr`).

    `param_groups.0.params` are the parameters' names in alphabetical order (FSDP1 flattens them in one of its own);
    left out where the file has numbers.

    Raises:
        DamagedCheckpointError, UnsafePickleError: an item cannot be read.
    """
    values: dict[str, Any] = {}
    for name, blob in section.blobs.items():
        if name.startswith("param_groups."):
            with open_window(Path(blob.bytes.path)) as window:
                part = window.narrow(blob.bytes.offset, blob.bytes.length, f"{window.label}, item {name!r}")
                file = StateFile(part)
                values[name] = _simplify(file.value, file)
    for name, tensor in section.tensors.items():
        if name.startswith("param_groups."):
            values[name] = _read_tensor(tensor)
    groups = section.values.get("param_groups")
    for number, group in enumerate(groups if isinstance(groups, list) else ()):
        if isinstance(group, dict):
            for option, value in group.items():
                values.setdefault(f"param_groups.{number}.{option}", _simplify(value, None))
    found: dict[str, Any] = {}
    for name, value in values.items():
        value = _unpack(value)
        if isinstance(value, Opaque):
            continue
        if name.endswith(".params"):
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                continue
            value = sorted(map(clean_fqn, value))
        found[name] = value
    return found


def _read_tensor(tensor: DiskTensor) -> Numbers:
    return Numbers(tensor.dtype, tensor.shape, bytes(read_part(tensor)))
