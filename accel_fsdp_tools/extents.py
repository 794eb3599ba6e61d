"""The vocabulary of the package: a tensor on disk is a name and a list of extents.

An extent says which part of a tensor lies at which bytes. A part is a box (FSDP2, DCP) or a flat run of elements
(FSDP1), both in the coordinates of the whole tensor, so that parts cut in different ways can be intersected; the
arithmetic of that is in `parts` and can be imported from here, too. Nothing here touches a file or imports torch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from .parts import (
    Box,
    Coverage,
    Match,
    Part,
    Piece,
    Run,
    Shape,
    check_coverage,
    count_elements,
    get_row_major_strides,
    get_span,
    get_whole,
    intersect,
    is_row_major,
    iterate_indices,
    match_parts,
    split_into_boxes,
    split_into_runs,
)

__all__ = [
    "DTYPE_SIZES",
    "Blob",
    "Box",
    "ByteRange",
    "Coverage",
    "DiskTensor",
    "Extent",
    "LazyExtents",
    "Match",
    "Part",
    "Piece",
    "Run",
    "Shape",
    "check_coverage",
    "count_elements",
    "get_row_major_strides",
    "get_whole",
    "intersect",
    "is_row_major",
    "iterate_indices",
    "match_parts",
    "split_into_boxes",
    "split_into_runs",
]

DTYPE_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of every torch dtype that a tensor in a checkpoint may have, by its name without `torch.`."""


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file, and the CRC-32 that the file format stores for exactly these bytes.

    `path` is always absolute. `crc32` None means "not computed by the writer": nothing is known, it is no failure.
    """

    path: str
    offset: int
    length: int
    crc32: int | None = None


@dataclass(frozen=True)
class Extent:
    """Which part of a tensor lies at which bytes.

    `bytes` is the whole stored item that a CRC covers (a storage, of which this extent may use only some: views,
    tied tensors). The extent's first element lies `start` bytes into it. `strides` counts elements per step along
    each dimension of the part's box; None means that the part's elements lie one after another in row-major order.
    A run never has strides.
    """

    part: Part
    bytes: ByteRange
    strides: Shape | None = None
    start: int = 0

    @property
    def offset(self) -> int:
        """Where in the file the first element lies."""
        return self.bytes.offset + self.start


class LazyExtents(Sequence[Extent]):
    """Extents whose parts are known and whose bytes are looked up when asked for, once.

    A DCP directory of many ranks has tens of thousands of items, each with a zip directory of its own to read; a
    rank that needs its own part of each tensor looks at its own.
    """

    def __init__(self, parts: Sequence[Part], resolve: Callable[[int], Extent]) -> None:
        self.parts = tuple(parts)
        self.resolve = resolve
        self._known: dict[int, Extent] = {}

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> Extent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Extent]: ...
    def __getitem__(self, index: int | slice) -> Extent | Sequence[Extent]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position not in self._known:
            self._known[position] = self.resolve(position)
        return self._known[position]


@dataclass(frozen=True)
class DiskTensor:
    """One tensor of a checkpoint.

    `extents` should tile it exactly once (`check_coverage` says whether they do). `replicas` are further copies of
    parts that other ranks wrote; they don't count in coverage, and should hold the same bytes. `key_path` is its
    place in the nested state dict of its section, such as `("state", "layers.0.weight", "exp_avg")`.
    """

    fqn: str
    dtype: str
    shape: Shape
    extents: Sequence[Extent]
    replicas: Sequence[Extent] = ()
    key_path: tuple[str | int, ...] = ()
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        return count_elements(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * DTYPE_SIZES[self.dtype]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all extents, without looking their bytes up."""
        if isinstance(self.extents, LazyExtents):
            return self.extents.parts
        return tuple(extent.part for extent in self.extents)

    def find_common(self, part: Part) -> Iterator[tuple[int, list[Part]]]:
        """Yield the index of every extent that has elements in common with `part`, and which these are.

        Reading a tensor block by block asks this for every block, so extents elsewhere are passed over unseen.
        """
        first, last = get_span(part, self.shape)
        starts, ends, order = self._spans
        # Sorted by start; each end is the greatest so far, so that both bounds can be bisected.
        for position in range(bisect.bisect_right(ends, first), bisect.bisect_left(starts, last)):
            index = order[position]
            common = intersect(self.parts[index], part, self.shape)
            if common:
                yield index, common

    def find_extents(self, part: Part) -> Iterator[Extent]:
        """Yield the extents that have elements in common with `part`; the bytes of others are not looked up."""
        for index, _ in self.find_common(part):
            yield self.extents[index]

    @cached_property
    def _spans(self) -> tuple[list[int], list[int], list[int]]:
        spans = [get_span(part, self.shape) for part in self.parts]
        order = sorted(range(len(spans)), key=lambda index: spans[index])
        ends = itertools.accumulate((spans[index][1] for index in order), max)
        return [spans[index][0] for index in order], list(ends), order


@dataclass(frozen=True)
class Blob:
    """What is stored beside tensors: a pickled object or plain bytes, as they lie in the file."""

    name: str
    bytes: ByteRange
    key_path: tuple[str | int, ...] = ()
