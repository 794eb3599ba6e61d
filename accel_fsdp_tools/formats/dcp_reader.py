"""A `torch.distributed.checkpoint` directory as sections: `.metadata` says which part of a tensor is in which item."""

from __future__ import annotations

from pathlib import Path

from ..errors import DamagedCheckpointError, UnsupportedError
from ..extents import DTYPE_SIZES, Blob, Box, ByteRange, DiskTensor, Extent, LazyExtents
from ..names import clean_names
from .checkpoint import METADATA_NAME, MODEL, OPTIMIZER, OTHER, KeyPath, Section, name_section
from .dcp import DcpChunk, DcpItem, DcpMetadata, DcpTensor, read_dcp_metadata
from .pickled import TensorRef
from .state_files import StateFile, join_path
from .zips import open_window

FORMAT = "dcp"

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state", "optimizer_state_dict", "optim_state_dict")


def read_dcp(directory: str | Path, *, kind: str | None = None, index: int = 0) -> list[Section]:
    """Read a DCP directory, as Accelerate, the Trainer, torchtitan and plain `dcp.save` write it.

    Key paths tell model and optimizer apart: `{"model": ...}`, `{"app": {"model": ..., "optimizer": ...}}`, or names
    without any nesting, which are a model's. The items of tensors are not opened here but when an extent is asked for.

    Args:
        directory: holds `.metadata`.
        kind: what a state dict without such keys is (`MODEL` unless told otherwise by the directory's name).
        index: the sections' place among those of their kind.

    Raises:
        CheckpointNotFoundError, CheckpointIncompleteError, DamagedCheckpointError, UnsafePickleError: see
            `read_dcp_metadata`; a file that the metadata names is missing.
        UnsupportedError: a dtype or a stream transform (compression, encryption) that can't be read here.
    """
    directory = Path(directory).absolute()
    metadata = read_dcp_metadata(directory)
    places = _find_places(metadata, kind or MODEL)
    sections = []
    for each in dict.fromkeys(section for section, _ in places.values()) or [kind or MODEL]:
        named = {name: path for name, (section, path) in places.items() if section == each}
        sections.append(_build_section(metadata, named, each, index if each != OTHER else 0))
    return sections


def _find_places(metadata: DcpMetadata, default: str) -> dict[str, tuple[str, KeyPath]]:
    """Return the kind of section of each entry and its key path there."""
    paths = {name: metadata.key_paths.get(name, (name,)) for name in (*metadata.tensors, *metadata.blobs)}
    found = {name: _find_named_place(path) for name, path in paths.items()}
    kinds = {place[0] for place in found.values() if place is not None}
    places: dict[str, tuple[str, KeyPath]] = {}
    for name, path in paths.items():
        place = found[name]
        if place is not None:
            places[name] = place
        elif not kinds:
            places[name] = (default, path)
        else:  # torchtitan lays the model's tensors flat beside an "optimizer" key
            is_flat_model = MODEL not in kinds and len(path) == 1 and name in metadata.tensors
            places[name] = (MODEL if is_flat_model else OTHER, path)
    return places


def _find_named_place(path: KeyPath) -> tuple[str, KeyPath] | None:
    for depth in (0, 1):  # {"model": ...} or {"app": {"model": ...}}
        if len(path) > depth + 1:
            if path[depth] in MODEL_KEYS:
                return MODEL, path[depth + 1 :]
            if path[depth] in OPTIMIZER_KEYS:
                return OPTIMIZER, path[depth + 1 :]
    return None


def _build_section(metadata: DcpMetadata, named: dict[str, KeyPath], kind: str, index: int) -> Section:
    path = str(metadata.directory)
    joined = {name: join_path(key_path) for name, key_path in named.items()}
    shown = clean_names(joined.values(), path=path) if kind == MODEL else {each: each for each in joined.values()}
    if kind == OPTIMIZER:
        named = {name: _split_flat_state(key_path) for name, key_path in named.items()}
    tensors: dict[str, DiskTensor] = {}
    blobs: dict[str, Blob] = {}
    for name, key_path in named.items():
        title = shown[joined[name]]
        if name in metadata.blobs:
            item = metadata.blobs[name]
            _check_item(metadata.directory, item)
            blobs[title] = Blob(title, _get_range(metadata.directory, item), key_path)
        else:
            tensors[title] = _build_tensor(metadata.directory, metadata.tensors[name], title, key_path)
    chunks = [chunk for name in named if name in metadata.tensors for chunk in metadata.tensors[name].chunks]
    zips = dict.fromkeys(_get_range(metadata.directory, chunk.item) for chunk in chunks)
    used = {each.path for each in zips} | {blob.bytes.path for blob in blobs.values()}
    known = {str(metadata.directory / item.file) for item in metadata.items}
    leftovers = {str(file) for file in metadata.directory.glob("*.distcp")} - known
    return Section(
        name=name_section(kind, index),
        kind=kind,
        index=index,
        format=FORMAT,
        path=path,
        tensors=tensors,
        blobs=blobs,
        zips=tuple(zips),
        files=(str(metadata.directory / METADATA_NAME), *sorted(used)),
        leftovers=tuple(sorted(leftovers)),
    )


def _split_flat_state(path: KeyPath) -> KeyPath:
    """Undo `flatten_optimizer_state_dict`: `state.<parameter>.exp_avg` as one key."""
    name = path[0]
    if len(path) == 1 and isinstance(name, str) and name.startswith(("state.", "param_groups.")):
        head, _, rest = name.partition(".")
        parameter, _, state = rest.rpartition(".")
        return head, parameter, state
    return path


def _build_tensor(directory: Path, tensor: DcpTensor, title: str, key_path: KeyPath) -> DiskTensor:
    if tensor.dtype not in DTYPE_SIZES:
        raise UnsupportedError(
            f"{directory}: {tensor.fqn!r} has the dtype {tensor.dtype}, which is not known here.",
            path=str(directory),
            fqn=tensor.fqn,
            actual=tensor.dtype,
        )
    chunks = tuple(chunk for chunk in tensor.chunks if 0 not in chunk.sizes)
    for chunk in chunks:
        _check_item(directory, chunk.item)
    return DiskTensor(
        fqn=title,
        dtype=tensor.dtype,
        shape=tensor.shape,
        extents=LazyExtents(
            [Box(chunk.offsets, chunk.sizes) for chunk in chunks], _Resolver(directory, tensor, chunks)
        ),
        key_path=key_path,
        requires_grad=tensor.requires_grad,
    )


def _check_item(directory: Path, item: DcpItem) -> None:
    if item.transforms:
        raise UnsupportedError(
            f"{directory / item.file}, item {item.fqn!r} went through {', '.join(item.transforms)[:200]}, which can't "
            "be undone here. Save the checkpoint without that extension.",
            path=str(directory / item.file),
            fqn=item.fqn,
        )


def _get_range(directory: Path, item: DcpItem) -> ByteRange:
    return ByteRange(str(directory / item.file), item.offset, item.length)


class _Resolver:
    """Finds the bytes of one chunk of a tensor by reading its item's zip directory."""

    def __init__(self, directory: Path, tensor: DcpTensor, chunks: tuple[DcpChunk, ...]) -> None:
        self.directory = directory
        self.tensor = tensor
        self.chunks = chunks

    def __call__(self, index: int) -> Extent:
        chunk = self.chunks[index]
        path = self.directory / chunk.item.file
        label = f"{path}, item {chunk.item.fqn!r}"
        with open_window(path) as window:
            file = StateFile(window.narrow(chunk.item.offset, chunk.item.length, label))
        stored = file.value
        if type(stored) is not TensorRef or (stored.shape, stored.dtype) != (chunk.sizes, self.tensor.dtype):
            actual = f"a {stored.dtype} of {stored.shape}" if type(stored) is TensorRef else "something else"
            raise DamagedCheckpointError(
                f"{label}: the metadata describes a {self.tensor.dtype} of {chunk.sizes}, the file holds {actual}. The "
                "file belongs to another save, or is damaged; use another checkpoint.",
                path=str(path),
                fqn=self.tensor.fqn,
                expected=(self.tensor.dtype, chunk.sizes),
                actual=actual,
            )
        return file.make_extent(stored, Box(chunk.offsets, chunk.sizes))
