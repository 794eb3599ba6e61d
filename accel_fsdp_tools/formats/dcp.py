"""The file `.metadata` of a `torch.distributed.checkpoint` directory: which tensor's bytes are where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import CheckpointIncompleteError, CheckpointNotFoundError, DamagedCheckpointError
from .allowed import DCP_METADATA
from .checkpoint import METADATA_NAME
from .pickled import GlobalRef, PickledObject
from .pickles import load_pickle
from .zips import open_window

_MODULE = "torch.distributed.checkpoint.metadata"
_INT_LIMIT = 1 << 62


@dataclass(frozen=True)
class DcpItem:
    """One item of a `.distcp` file: a whole torch zip, or whatever `transforms` made of one."""

    fqn: str
    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class DcpChunk:
    """A box of a tensor, and the item that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: DcpItem


@dataclass(frozen=True)
class DcpTensor:
    """A tensor as the metadata describes it. Whether its chunks tile it is for others to judge."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class DcpMetadata:
    """What `.metadata` says.

    `tensors` and `blobs` (anything that is not a tensor) are keyed by the flat names of the file; `key_paths` gives
    the place of each in the nested state dict that was saved, such as `("optimizer", "state", "w", "exp_avg")`.
    `items` are all items that the file lists, those that nothing refers to included.
    """

    directory: Path
    tensors: Mapping[str, DcpTensor]
    blobs: Mapping[str, DcpItem]
    items: tuple[DcpItem, ...]
    key_paths: Mapping[str, tuple[str | int, ...]]
    version: str | None = None


def read_dcp_metadata(directory: str | Path, *, name: str = METADATA_NAME) -> DcpMetadata:
    """Read the metadata of a DCP directory without executing anything. Not collective.

    `name` is another one only for directories written without collectives (`__0.metadata`, ...).

    Raises:
        CheckpointNotFoundError: there is no such directory.
        CheckpointIncompleteError: it has no `.metadata`, which is written last: the save did not finish.
        UnsafePickleError: the file names something that DCP does not write.
        DamagedCheckpointError: the file is cut off, contradicts itself, or names files outside the directory.
    """
    directory = Path(directory)
    path = directory / name
    if not path.is_file():
        if not directory.is_dir():
            raise CheckpointNotFoundError(f"{directory} is not a directory", path=str(directory))
        raise CheckpointIncompleteError(
            f"{directory} has no {name}, which torch writes last: the save did not finish, or a copy left hidden "
            "files behind. Use another checkpoint, or copy it again with its hidden files.",
            path=str(path),
        )
    with open_window(path) as window:
        data = window.read(0, window.length)
    root = load_pickle(data, where=str(path), allow=DCP_METADATA, path=str(path))
    try:
        return _build_metadata(directory, root)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{path} does not describe a checkpoint ({type(error).__name__}: {str(error)[:200]}). The file is "
            "damaged or comes from an unknown version of torch; use another checkpoint.",
            path=str(path),
        ) from None


def _build_metadata(directory: Path, root: Any) -> DcpMetadata:
    fields = _get_fields(root, "Metadata")
    stored = _get_stored_items(fields.get("storage_data"))
    tensors: dict[str, DcpTensor] = {}
    blobs: dict[str, DcpItem] = {}
    for fqn, entry in _as_dict(fields["state_dict_metadata"]).items():
        if type(fqn) is not str:
            raise TypeError("a name that is not text")
        if type(entry) is PickledObject and entry.name == f"{_MODULE}.BytesStorageMetadata":
            blobs[fqn] = _find(stored, fqn, None)
        else:
            tensors[fqn] = _build_tensor(fqn, entry, stored)
    planner = fields.get("planner_data")
    return DcpMetadata(
        directory=directory,
        tensors=tensors,
        blobs=blobs,
        items=tuple(stored.values()),
        key_paths={} if planner is None else _build_key_paths(planner),
        version=_as_text(fields["version"]) if fields.get("version") is not None else None,
    )


def _build_tensor(fqn: str, entry: Any, stored: Mapping[_Key, DcpItem]) -> DcpTensor:
    fields = _get_fields(entry, "TensorStorageMetadata")
    dtype, requires_grad = _get_properties(fields["properties"])
    chunks = []
    for chunk in _as_list(fields["chunks"]):
        box = _get_fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _as_sizes(box["offsets"]), _as_sizes(box["sizes"])
        chunks.append(DcpChunk(offsets, sizes, _find(stored, fqn, offsets)))
    return DcpTensor(fqn, dtype, _as_sizes(fields["size"]), tuple(chunks), requires_grad)


def _get_properties(entry: Any) -> tuple[str, bool]:
    if type(entry) is not PickledObject or not entry.name.endswith(".TensorProperties"):
        raise TypeError("a tensor without properties")
    state = entry.state  # (dtype, layout, requires_grad, memory format, pin_memory)
    if type(state) is not tuple or len(state) != 5 or type(state[0]) is not GlobalRef:
        raise TypeError("a tensor without a dtype")
    if state[1] != GlobalRef("torch.strided"):
        raise ValueError("a tensor that is not strided")
    return state[0].name.removeprefix("torch."), bool(state[2])


_Key = tuple[str, tuple[int, ...] | None]


def _get_stored_items(storage: Any) -> dict[_Key, DcpItem]:
    stored: dict[_Key, DcpItem] = {}
    for index, info in _as_dict(storage).items():
        key_fields = _get_fields(index, "MetadataIndex")
        offset = key_fields.get("offset")
        fqn = _as_text(key_fields["fqn"])
        key = (fqn, None if offset is None else _as_sizes(offset))
        if key in stored:
            raise ValueError(f"two items for {fqn[:200]!r}")
        stored[key] = _build_item(fqn, info)
    return stored


def _build_item(fqn: str, info: Any) -> DcpItem:
    if type(info) is not PickledObject or not info.name.endswith("._StorageInfo"):
        raise TypeError("an item without storage")
    fields = info.get_attributes()
    file = _as_text(fields["relative_path"])
    if not _stays_inside(file):
        raise ValueError(f"a file outside the directory: {file[:200]!r}")
    offset, length = _as_sizes((fields["offset"], fields["length"]))
    transforms = fields.get("transform_descriptors") or ()
    return DcpItem(fqn, file, offset, length, tuple(_as_text(name) for name in _as_list(transforms)))


def _stays_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not set("\0\\") & set(file)


def _find(stored: Mapping[_Key, DcpItem], fqn: str, offsets: tuple[int, ...] | None) -> DcpItem:
    item = stored.get((fqn, offsets))
    if item is None:
        raise ValueError(f"nothing is stored for {fqn[:200]!r} at {offsets}")
    return item


def _build_key_paths(planner: Any) -> dict[str, tuple[str | int, ...]]:
    paths: dict[str, tuple[str | int, ...]] = {}
    for fqn, path in _as_dict(planner).items():
        if not path or not all(type(part) in (str, int) for part in _as_list(path)):
            raise TypeError("a malformed key path")
        paths[_as_text(fqn)] = tuple(path)
    return paths


def _get_fields(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not PickledObject or value.name != f"{_MODULE}.{name}":
        raise TypeError(f"{name} expected")
    return value.get_attributes()


def _as_dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError("a dict expected")
    return value


def _as_list(value: Any) -> list[Any] | tuple[Any, ...]:
    if type(value) is not list and type(value) is not tuple:
        raise TypeError("a list expected")
    return value


def _as_text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("text expected")
    return value


def _as_sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(size) is int and 0 <= size < _INT_LIMIT for size in value):
        raise TypeError("sizes expected")
    return value
