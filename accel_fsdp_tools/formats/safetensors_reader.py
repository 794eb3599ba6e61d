"""safetensors: one file, or several with an index. Names, dtypes, shapes and offsets are in a JSON header."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..errors import CheckpointIncompleteError, DamagedCheckpointError, UnsupportedError
from ..extents import DTYPE_SIZES, ByteRange, DiskTensor, Extent, get_whole
from ..files import resolve_inside
from ..names import clean_names
from .checkpoint import MODEL, Section, name_section
from .zips import Window, open_window

FORMAT = "safetensors"

_MAX_HEADER_BYTES = 100_000_000  # as in the reference implementation
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F4": "float4_e2m1fn_x2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_DCP_SHARDS = "DCP_SHARDING_INFO"


def read_safetensors(path: str | Path, *, kind: str = MODEL, index: int = 0) -> Section:
    """Read one `.safetensors` file, or all that a `.safetensors.index.json` names.

    Raises:
        CheckpointIncompleteError: a file that the index names is missing, or lacks a tensor.
        DamagedCheckpointError: a header that contradicts itself or the file's size, a name twice.
        UnsupportedError: a dtype that torch lacks, or a file of shards whose index DCP keeps elsewhere.
    """
    path = Path(path).absolute()
    files = _read_index(path) if path.name.endswith(".json") else {path: None}
    tensors: dict[str, DiskTensor] = {}
    for file, expected in files.items():
        with open_window(file) as window:
            found = _read_header(window)
        missing = sorted((expected or set()) - found.keys())
        if missing:
            raise CheckpointIncompleteError(
                f"{file} lacks {missing[0]!r}"
                + (f" and {len(missing) - 1} more" if missing[1:] else "")
                + ", which the "
                "index says it holds. The files are not of one save; restore them from a copy.",
                path=str(file),
                fqn=missing[0],
            )
        for name in found.keys() & tensors.keys():
            raise DamagedCheckpointError(f"{file}: {name!r} is in another file, too.", path=str(file), fqn=name)
        tensors.update(found)
    shown = clean_names(tensors, path=str(path)) if kind == MODEL else {name: name for name in tensors}
    named = {
        shown[name]: DiskTensor(shown[name], each.dtype, each.shape, each.extents, key_path=(name,))
        for name, each in tensors.items()
    }
    used = sorted({str(file) for file in (*files, path)})
    return Section(name_section(kind, index), kind, index, FORMAT, str(path), named, files=tuple(used))


def _read_index(path: Path) -> dict[Path, set[str] | None]:
    """Return the files that an index names, each with the names that it says are there."""
    return {file: set(names) for file, names in read_weight_map(path).items()}


def read_weight_map(path: Path) -> dict[Path, list[str]]:
    """Return the files that a `*.index.json` names, each with the tensors that it says are there.

    Raises:
        DamagedCheckpointError: it is no index, or names files outside its directory.
    """
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path} is no index of weights ({type(error).__name__}: {str(error)[:100]}). Restore it from a copy.",
            path=str(path),
        ) from None
    files: dict[Path, list[str]] = {}
    for name, file in pairs:
        files.setdefault(resolve_inside(path.parent, file), []).append(name)
    return files


def _read_header(window: Window) -> dict[str, DiskTensor]:
    if window.length < 8:
        raise window.describe_damage("is too short for a safetensors file")
    size = int.from_bytes(window.read(0, 8), "little")
    if size > min(_MAX_HEADER_BYTES, window.length - 8):
        raise window.describe_damage(f"states a header of {size} bytes")
    try:
        header = json.loads(window.read(8, size), object_pairs_hook=_refuse_repeated)
        metadata = header.pop("__metadata__", None) or {}
        if _DCP_SHARDS in metadata:
            raise UnsupportedError(
                f"{window.label} holds the shards of one rank, written by torch.distributed.checkpoint with "
                "HuggingFaceStorageWriter(save_distributed=True). Consolidate them with torch first "
                "(consolidate_safetensors_files_on_every_rank).",
                path=str(window.path),
            )
        return {name: _read_entry(window, name, entry, 8 + size) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise window.describe_damage(f"has no proper header ({type(error).__name__}: {str(error)[:100]})") from None


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _read_entry(window: Window, name: str, entry: dict[str, Any], data_start: int) -> DiskTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise UnsupportedError(
            f"{window.label}: {name!r} has the dtype {entry['dtype']!r}, which is not known here.",
            path=str(window.path),
            fqn=name,
        )
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise TypeError(f"sizes of {name[:100]!r}")
    if dtype == "float4_e2m1fn_x2" and shape:  # torch counts pairs
        shape = (*shape[:-1], shape[-1] // 2)
    if end - begin != math.prod(shape) * DTYPE_SIZES[dtype] or data_start + end > window.length:
        raise ValueError(f"{name[:100]!r} does not fit its range of bytes, or the file")
    item = ByteRange(str(window.path), data_start + begin, end - begin)
    extents = (Extent(get_whole(shape), item),) if all(shape) else ()
    return DiskTensor(name, dtype, shape, extents)
