"""One file or item that `torch.save` wrote: its nested value, and where the bytes of its tensors are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import DamagedCheckpointError, UnsupportedError
from ..extents import DTYPE_SIZES, Box, ByteRange, DiskTensor, Extent, Part, get_whole, is_row_major
from .checkpoint import KeyPath
from .pickled import PickledObject, TensorRef
from .pickles import load_pickle
from .zips import ZIP_MAGIC, Payload, TorchZip, Window, open_torch_zip, open_window

_MAX_ENTRIES = 5_000_000
_MAX_DEPTH = 64


class StateFile:
    """What one torch zip holds. The file is closed again; only positions are kept.

    Memory: the pickle (names, shapes, numbers), never tensor bytes.
    """

    def __init__(self, window: Window) -> None:
        archive = _open_zip(window)
        self.label = window.label
        self.range = ByteRange(str(window.path), window.offset, window.length)
        self.value = _load(archive.read("data.pkl"), window)
        self._payloads = _locate_storages(archive, self.value)

    @property
    def path(self) -> str:
        return self.range.path

    def make_extent(self, tensor: TensorRef, part: Part | None = None, *, skip: int = 0) -> Extent:
        """Return where a tensor's bytes are, as `part` (default: all) of the whole tensor.

        A run, or a box that is smaller than the stored tensor, starts `skip` elements of the storage into it.
        """
        payload = self._payloads[tensor.storage.key]
        part = get_whole(tensor.shape) if part is None else part
        strides = None
        if isinstance(part, Box) and not is_row_major(part.sizes, tensor.strides):
            strides = tensor.strides
        item = ByteRange(self.path, payload.offset, payload.size_bytes, payload.crc32)
        return Extent(part, item, strides, (tensor.offset + skip) * DTYPE_SIZES[tensor.dtype])


def open_state_file(path: str | Path) -> StateFile:
    """Read what a file written by `torch.save` holds, without executing it.

    Raises:
        CheckpointIncompleteError: there is no such file.
        DamagedCheckpointError, UnsafePickleError: see `load_pickle` and `open_torch_zip`.
        UnsupportedError: torch's format before 1.6, or big-endian numbers.
    """
    with open_window(Path(path).absolute()) as window:
        return StateFile(window)


_MAX_KNOWN = 1000
_known: dict[bytes, TensorRef] = {}


def _load(data: bytes, window: Window) -> Any:
    """Return what a pickle holds. That of a lone tensor is kept: those of tensors of one shape are the same bytes."""
    if data in _known:
        return _known[data]
    value = load_pickle(data, where=f"{window.label}, entry data.pkl", path=str(window.path))
    if type(value) is TensorRef and len(_known) < _MAX_KNOWN:
        _known[data] = value
    return value


def _open_zip(window: Window) -> TorchZip:
    if window.length >= 4 and window.read(0, 4) != ZIP_MAGIC and window.read(0, 1) == b"\x80":
        raise UnsupportedError(
            f"{window.label} is in torch's format from before version 1.6, or a plain pickle: its tensors can't be "
            "found without loading it. Load it with torch.load(..., weights_only=True) and save it with torch.save.",
            path=str(window.path),
        )
    archive = open_torch_zip(window)
    if "byteorder" in archive.entries and archive.read("byteorder") != b"little":
        raise UnsupportedError(
            f"{window.label} was written on a big-endian machine. Load and save it again on a little-endian one.",
            path=str(window.path),
        )
    return archive


def _locate_storages(archive: TorchZip, value: Any) -> dict[str, Payload]:
    payloads: dict[str, Payload] = {}
    for tensor in _iterate_tensors(value):
        storage = tensor.storage
        if storage.key not in payloads:
            payload = archive.locate(f"data/{storage.key}")
            if payload.size_bytes < storage.size_bytes:
                raise archive.window.describe_damage(
                    f"has an entry 'data/{storage.key}' too short for its storage",
                    expected=storage.size_bytes,
                    actual=payload.size_bytes,
                )
            payloads[storage.key] = payload
    return payloads


def _iterate_tensors(root: Any) -> Iterator[TensorRef]:
    seen: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if type(value) is TensorRef:
            yield value
        elif isinstance(value, dict | list | tuple | PickledObject) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                todo += value.values()
            elif isinstance(value, PickledObject):
                todo += [*value.args, value.state]
            else:
                todo += value


def is_tensor(value: Any) -> bool:
    """Whether a pickled value is a tensor, whole or sharded."""
    return type(value) is TensorRef or (type(value) is PickledObject and value.name.endswith(("Tensor",)))


def flatten_state(value: Any, *, where: str) -> tuple[dict[KeyPath, Any], dict[KeyPath, Any]]:
    """Return tensors and other values of a nested state dict, each by its key path.

    A list or tuple without tensors in it is one value (a parameter group's names, betas).

    Raises:
        DamagedCheckpointError: a dict contains itself, or containers within containers multiply without end.
    """
    tensors: dict[KeyPath, Any] = {}
    values: dict[KeyPath, Any] = {}
    todo: list[tuple[KeyPath, Any]] = [((), value)]
    for _ in range(_MAX_ENTRIES):
        if not todo:
            return tensors, values
        path, each = todo.pop()
        if len(path) > _MAX_DEPTH:
            break
        if is_tensor(each):
            tensors[path] = each
        elif isinstance(each, dict) and (each or path):
            todo += [((*path, _as_key(key)), inner) for key, inner in reversed(each.items())]
        elif isinstance(each, list | tuple) and next(_iterate_tensors(each), None) is not None:
            todo += [((*path, index), inner) for index, inner in reversed(list(enumerate(each)))]
        elif path:
            values[path] = each
    raise DamagedCheckpointError(
        f"{where}: the state dict is nested without end. The file is damaged; use another checkpoint.", path=where
    )


def _as_key(key: Any) -> str | int:
    return key if type(key) in (str, int) else repr(key)


def join_path(path: KeyPath) -> str:
    """Return a key path as one name."""
    return ".".join(map(str, path))


def make_whole_tensor(file: StateFile, name: str, tensor: TensorRef, path: KeyPath) -> DiskTensor:
    """Return a tensor that lies in one file as a whole."""
    return DiskTensor(
        fqn=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        extents=(file.make_extent(tensor),) if all(tensor.shape) else (),
        key_path=path,
        requires_grad=tensor.requires_grad,
    )


def name_values(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Return values by their joined names."""
    return {join_path(path): value for path, value in values.items()}
