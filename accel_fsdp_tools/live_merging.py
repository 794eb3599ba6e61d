"""Adapters merged into a live model's weights while these are exported. The model itself is not touched.

Every rank adds to the parts that it holds. For that it needs an adapter's matrices whole: they are small, and are
exchanged; of the weights nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from .errors import CallOrderError
from .export.lora import Update
from .export.merged import Delta, add_to, widen
from .extents import DTYPE_SIZES, Box, DiskTensor, Part, Shape, count_elements, get_whole, split_into_runs
from .fingerprint import Fingerprint, fingerprint_bytes, iterate_bytes
from .ranks import gather_all, run_on_each
from .shards import LocalShard

_EXCHANGED_BYTES = 1 << 26  # at a time


class WeightMerge:
    """What is added to one weight: given a part of it, the same part merged. For any thread."""

    def __init__(self, dtype: str, shape: Shape, deltas: Sequence[Delta]) -> None:
        self._dtype = dtype
        self._shape = shape
        self._deltas = deltas

    def __call__(self, part: Part, data: memoryview) -> memoryview:
        """Return a copy of the bytes of a part with everything added."""
        target = memoryview(bytearray(data))
        size = DTYPE_SIZES[self._dtype]
        for first, count, column, length, position in _list_rectangles(part, self._shape):
            numel = count * length
            added: Any = np.empty(numel, np.float32)
            widened: Any = np.empty(numel if self._dtype != "float32" else 0, np.float32)
            inside = target[position * size : (position + numel) * size]
            for delta in self._deltas:
                delta.compute(first, count, added, slice(column, column + length))
                add_to(inside, self._dtype, added, widened)
        return target


def _list_rectangles(part: Part, shape: Shape) -> Iterator[tuple[int, int, int, int, int]]:
    """Cut a part of a weight, taken as a matrix, into rectangles whose elements follow one another in the part.

    Yields first row, number of rows, first column, number of columns, and where in the part it begins.
    """
    if isinstance(part, Box) and len(shape) == 2:
        if part.numel:
            yield part.offsets[0], part.sizes[0], part.offsets[1], part.sizes[1], 0
        return
    row = count_elements(shape[1:])
    for start, offset, length in split_into_runs(part, shape):
        end = start + length
        while start < end:
            first, column = divmod(start, row)
            is_whole = not column and end - start >= row
            count = (end - start) // row if is_whole else 1
            columns = row if is_whole else min(row - column, end - start)
            yield first, count, column, columns, offset
            start, offset = start + count * columns, offset + count * columns


def gather_merges(
    updates: Mapping[str, Sequence[Update]],
    weights: Mapping[str, LocalShard],
    mine: Sequence[LocalShard],
    fingerprints: Mapping[str, Fingerprint],
) -> dict[str, WeightMerge]:
    """Exchange the adapters' matrices, and return what is added to which live weight. Collective.

    Args:
        updates: by the weight's first name in the live model. The bytes of their tensors lie "in" the live tensor whose
            first name is the path.
        weights: the live tensors by their first names.
        mine: from `choose_mine`.
        fingerprints: of the live tensors.

    Memory: the matrices in float32, and 64 MB.

    Raises:
        CallOrderError: a matrix is not what it was when its fingerprint was taken.
    """
    needed = {_get_owner(each): each for every in updates.values() for update in every for each in update.inputs}
    own = {shard.fqn: shard for shard in mine if shard.fqn in needed}
    matrices: dict[str, Any] = {}
    for names in _group(needed):
        read = partial(_read_all, [own[name] for name in names if name in own])
        everyone = gather_all(run_on_each("reading the adapters", read), "exchanging the adapters")
        join = partial(_join_all, {name: needed[name] for name in names}, everyone, fingerprints)
        matrices |= run_on_each("joining the adapters", join)

    def find(tensor: DiskTensor) -> Any:
        return matrices[_get_owner(tensor)]

    return {
        name: WeightMerge(
            weights[name].dtype, weights[name].shape, [Delta(each, weights[name].dtype, find) for each in every]
        )
        for name, every in updates.items()
    }


def _get_owner(tensor: DiskTensor) -> str:
    return tensor.extents[0].bytes.path


def _group(needed: Mapping[str, DiskTensor]) -> Iterator[list[str]]:
    group: list[str] = []
    num_bytes = 0
    for name in sorted(needed):
        if group and num_bytes + needed[name].size_bytes > _EXCHANGED_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(name)
        num_bytes += needed[name].size_bytes
    if group:
        yield group


_Pieces = dict[str, list[tuple[Part, bytes]]]


def _read_all(shards: Sequence[LocalShard]) -> _Pieces:
    return {
        shard.fqn: [
            (part, b"".join(iterate_bytes(tensor.detach().to("cpu")))) for part, tensor in shard.iterate_pieces()
        ]
        for shard in shards
    }


def _join_all(
    tensors: Mapping[str, DiskTensor], everyone: Sequence[_Pieces], fingerprints: Mapping[str, Fingerprint]
) -> dict[str, Any]:
    return {name: _join(name, tensor, everyone, fingerprints[name]) for name, tensor in tensors.items()}


def _join(name: str, tensor: DiskTensor, everyone: Sequence[_Pieces], expected: Fingerprint) -> Any:
    """Return a matrix in float32, of the pieces that all ranks have."""
    size = DTYPE_SIZES[tensor.dtype]
    whole = memoryview(bytearray(tensor.size_bytes))
    for pieces in everyone:
        for part, data in pieces.get(name, ()):
            for start, offset, length in split_into_runs(part, tensor.shape):
                whole[start * size : (start + length) * size] = data[offset * size : (offset + length) * size]
    found = fingerprint_bytes(whole, tensor.dtype, get_whole(tensor.shape), tensor.shape)
    if found != expected:
        raise CallOrderError(
            f"{name} changed while it was exported (its fingerprint was {expected} and is {found}). Call export_model "
            "where nothing updates the model: no other thread, no asynchronous update.",
            fqn=name,
            expected=str(expected),
            actual=str(found),
        )
    return widen(whole, tensor)
