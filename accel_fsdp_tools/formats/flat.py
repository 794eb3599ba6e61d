"""FSDP1's flat parameters: which elements of them are which parameter, once the model's shapes are known.

A LOCAL_STATE_DICT holds what each rank had in memory: for every wrapped module its shard of one flat tensor. With
`use_orig_params` there is for every parameter the piece of it that lies in the rank's shard, too: a view of the same
storage, whose offset says where in the flat tensor it is. Neither says what the parameters' shapes are, so the names
and shapes of the model's parameters, in the order of `named_parameters()`, are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MismatchError, UnsupportedError
from ..extents import DTYPE_SIZES, DiskTensor, Extent, Part, Run, Shape, count_elements, intersect, split_into_runs
from ..names import clean_fqn
from .checkpoint import KeyPath
from .pickled import TensorRef
from .rank_files import RankState
from .sharded import get_storage_starts
from .state_files import join_path

Layout = Mapping[str, Shape]
"""Names and whole shapes of a model's parameters and buffers, in the model's order, ties left out."""


def is_flat_name(name: str | int) -> bool:
    """Whether a tensor of this name is a wrapped module's flat parameter."""
    return str(name).rpartition(".")[2] in ("_flat_param", "flat_param")


def explain_missing_layout(path: str, names: Iterable[str]) -> UnsupportedError:
    """Return the error for flat parameters of a model that nothing is known about."""
    listed = list(names)
    shown = ", ".join(map(repr, listed[:3])) + (", ..." if listed[3:] else "")
    return UnsupportedError(
        f"{Path(path).parent} holds FSDP1's flat parameters (LOCAL_STATE_DICT: {shown}), which do not say which "
        "parameters of which shapes they consist of. Needed: the names and shapes of the model's parameters in the "
        "order of named_parameters(), from the model's config (export --config DIR) or open_checkpoint(path, "
        "layout={name: shape, ...}). Or load it where it was trained and save again with SHARDED_STATE_DICT.",
        path=path,
    )


def map_flat_tensors(flat: Mapping[str, DiskTensor], layout: Layout) -> dict[str, DiskTensor]:
    """Return the parameters that flat tensors of wrapped modules consist of; tensors that are not flat stay.

    A parameter belongs to the innermost wrapped module around it, in the layout's order.

    Raises:
        MismatchError: the sizes don't add up to those of the flat tensors: another model, or another wrapping.
    """
    units = {name: clean_fqn(name.rpartition(".")[0]) for name in flat if is_flat_name(name)}
    mapped = {name: tensor for name, tensor in flat.items() if name not in units}
    for unit, prefix in units.items():
        others = [other for other in units.values() if other != prefix and _is_inside(other, prefix)]
        members = [
            name
            for name in layout
            if name not in flat and _is_inside(name, prefix) and not any(_is_inside(name, each) for each in others)
        ]
        mapped |= _cut_flat_tensor(flat[unit], {name: layout[name] for name in members})
    return mapped


def _is_inside(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}.")


def _cut_flat_tensor(flat: DiskTensor, members: Layout) -> dict[str, DiskTensor]:
    num_needed = sum(map(math.prod, members.values()))
    num_shards = max(len(flat.extents), 1)
    num_padded = -(-num_needed // num_shards) * num_shards  # the last shard is filled up
    if flat.numel != num_padded:
        raise MismatchError(
            f"The flat parameter {flat.fqn!r} has {flat.numel} elements; the layout gives it {len(members)} parameters "
            f"of {num_needed} elements ({num_padded} with padding). Give the layout of the model that was saved, tied "
            "parameters once and frozen ones included.",
            fqn=flat.fqn,
            expected=num_padded,
            actual=flat.numel,
        )
    size = DTYPE_SIZES[flat.dtype]
    tensors: dict[str, DiskTensor] = {}
    begin = 0
    for name, shape in members.items():
        whole = Run(begin, math.prod(shape))
        extents = []
        for extent in flat.extents:
            for common in intersect(extent.part, whole, flat.shape):
                (piece,) = split_into_runs(common, flat.shape)
                (shard,) = split_into_runs(extent.part, flat.shape)
                skip = (piece.start - shard.start) * size
                part = Run(piece.start - begin, piece.length)
                extents.append(Extent(part, extent.bytes, start=extent.start + skip))
        tensors[name] = DiskTensor(
            name, flat.dtype, shape, tuple(extents), key_path=flat.key_path, requires_grad=flat.requires_grad
        )
        begin += whole.length
    return tensors


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a parameter: where in the flat tensor, and the stored view."""

    position: int
    tensor: TensorRef


def find_pieces(state: RankState) -> dict[KeyPath, dict[int, Piece]]:
    """Return the parameters of which ranks hold pieces: views of the storages that flat parameters lie in.

    Raises:
        DamagedCheckpointError: a flat parameter is not what torch writes.
    """
    pieces: dict[KeyPath, dict[int, Piece]] = {}
    for rank, tensors in state.tensors.items():
        shards: dict[str, int] = {}  # where in the flat tensor the first element of a storage is
        for path, value in tensors.items():
            if is_flat_name(path[-1]):
                shards |= get_storage_starts(state.files[rank], join_path(path), value)
        for path, value in tensors.items():
            if type(value) is TensorRef and value.storage.key in shards and count_elements(value.shape):
                position = shards[value.storage.key] + value.offset
                pieces.setdefault(path, {})[rank] = Piece(position, value)
    return pieces


def join_pieces(
    state: RankState, names: Mapping[KeyPath, str], pieces: Mapping[KeyPath, Mapping[int, Piece]], layout: Layout
) -> dict[str, DiskTensor]:
    """Return the parameters that pieces make up. Pieces at one place, as hybrid sharding leaves, are copies.

    Raises:
        MismatchError: the layout lacks a parameter, or gives it another number of elements.
    """
    tensors: dict[str, DiskTensor] = {}
    for path, by_rank in pieces.items():
        name = names[path]
        shape = layout.get(name)
        begin = min(piece.position for piece in by_rank.values())
        extents: dict[Part, Extent] = {}
        replicas: list[Extent] = []
        for rank, piece in sorted(by_rank.items()):
            part = Run(piece.position - begin, math.prod(piece.tensor.shape))
            extent = state.files[rank].make_extent(piece.tensor, part)
            if part in extents:
                replicas.append(extent)
            extents.setdefault(part, extent)
        found: int = sum(part.numel for part in extents)
        if shape is None or count_elements(shape) != found:
            raise MismatchError(
                f"{Path(state.path).parent}: the pieces of {name!r} have {found} elements, "
                + (f"its shape in the layout, {shape}, is another number. " if shape else "and the layout lacks it. ")
                + "Give the layout of the model that was saved.",
                path=state.path,
                fqn=name,
                expected=shape,
                actual=found,
            )
        first = next(iter(by_rank.values())).tensor
        tensors[name] = DiskTensor(
            name, first.dtype, shape, tuple(extents.values()), tuple(replicas), path, first.requires_grad
        )
    return tensors
