"""Weights with adapters merged into them, computed block by block while they are written. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..architecture.moves import Move
from ..extents import DTYPE_SIZES, Box, DiskTensor, Shape, count_elements, get_row_major_strides, get_whole
from ..formats.reading import FileCache, read_into
from .casting import cast_block
from .computed import Compute, iterate_source, list_inputs
from .lora import Update

Array = npt.NDArray[np.float32]

_BLOCK_NUMEL = 1 << 20  # of a weight, at a time; always the same, so that the product's last bits are
_TILE = 500_000  # multiplications; from 524,288 on OpenBLAS uses threads of its own
_UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, eq=False)
class MergedTensor:
    """A weight and what is added to it: `computed.ComputedTensor`.

    Rows are computed in blocks of a million elements (or one row, where that is longer). Memory per thread: 16 MB, and
    the two matrices of the adapter in float32.
    """

    fqn: str
    base: DiskTensor
    updates: Sequence[Update]

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def numel(self) -> int:
        return self.base.numel

    @property
    def size_bytes(self) -> int:
        return self.base.size_bytes

    @property
    def inputs(self) -> tuple[DiskTensor, ...]:
        return (self.base, *(each for update in self.updates for each in update.inputs))

    @property
    def block_numel(self) -> int:
        row = count_elements(self.shape[1:])
        return max(1, _BLOCK_NUMEL // row) * row

    def enter(self, files: FileCache) -> Compute:
        """Read the adapters' matrices, and return the function that computes rows."""
        deltas = [Delta(update, self.dtype, lambda tensor: _read(tensor, files)) for update in self.updates]
        row = count_elements(self.shape[1:])
        # Filled again for every block: fresh memory is slow.
        size = min(self.block_numel, self.numel)
        added = np.empty(size, np.float32)
        widened = np.empty(size if self.dtype != "float32" else 0, np.float32)

        def compute(start: int, length: int, target: memoryview) -> None:
            first, count = start // row, length // row
            rows = Box((first, *(0 for _ in self.shape[1:])), (count, *self.shape[1:]))
            read_into(self.base, rows, target, files=files)
            for delta in deltas:
                delta.compute(first, count, added[:length])
                add_to(target, self.dtype, added[:length], widened)

        return compute


def add_to(target: memoryview, dtype: str, added: Array, widened: Array) -> None:
    """Add to weights in place, in their dtype, in which PEFT keeps a weight between two adapters.

    `widened` is room for as many elements, not used for float32.
    """
    if dtype == "float32":
        values: Array = np.frombuffer(target, np.float32)
        values += added
        return
    values = widened[: added.size]
    cast_block(target, dtype, "float32", _get_bytes(values))
    values += added
    cast_block(_get_bytes(values), "float32", dtype, target)


class Delta:
    """One update of a weight of `dtype`, with its matrices in memory: in float32, as `read` returns them."""

    def __init__(self, update: Update, dtype: str, read: Callable[[DiskTensor], Array]) -> None:
        self._scaling = np.float32(update.scaling)
        self._is_transposed = update.is_transposed
        dtypes = (update.b.dtype, *([dtype] if update.is_rounded else []))
        self._dtypes = [each for each in dtypes if each != "float32"]
        b = read(update.b)
        self._b = b if update.a is None else b.reshape(update.b.shape[:2])
        self._a = None if update.a is None else read(update.a).reshape(update.a.shape[0], -1)

    def compute(self, first: int, count: int, out: Array, columns: slice = slice(None)) -> None:
        """Fill `out` with what is added to `count` rows of the weight from `first` on, to some columns of them."""
        rows = slice(first, first + count)
        if self._a is None:
            np.multiply(self._b[rows], self._scaling, out=out)
        elif self._is_transposed:
            b = self._b[columns]
            product: Array = np.empty((len(b), count), np.float32)
            _multiply(b, self._a[:, rows], product)
            np.multiply(product.T, self._scaling, out=out.reshape(count, -1))
        else:
            _multiply(self._b[rows], self._a[:, columns], out.reshape(count, -1))
            out *= self._scaling
        for dtype in self._dtypes:
            rounded = memoryview(bytearray(out.size * DTYPE_SIZES[dtype]))
            cast_block(_get_bytes(out), "float32", dtype, rounded)
            cast_block(rounded, dtype, "float32", _get_bytes(out))


def _multiply(b: Array, a: Array, out: Array) -> None:
    """Fill `out` with `b @ a`, in tiles too small for BLAS to start threads.

    Its threads and ours would wait for each other: twenty times slower on a busy machine.
    """
    rank = max(1, len(a))
    columns = min(a.shape[1], max(64, _TILE // (8 * rank)))
    rows = max(1, _TILE // (rank * columns))
    for first in range(0, len(b), rows):
        for start in range(0, a.shape[1], columns):
            tile = out[first : first + rows, start : start + columns]
            np.matmul(b[first : first + rows], a[:, start : start + columns], out=tile)


def _read(tensor: DiskTensor, files: FileCache) -> Array:
    """Return a tensor in float32, which holds the values of all dtypes that are merged."""
    buffer = memoryview(bytearray(tensor.size_bytes))
    read_into(tensor, get_whole(tensor.shape), buffer, files=files)
    return widen(buffer, tensor)


def widen(buffer: memoryview, tensor: DiskTensor) -> Array:
    """Return a tensor's bytes as an array in float32."""
    values: Array = np.empty(tensor.shape, np.float32)
    cast_block(buffer, tensor.dtype, "float32", _get_bytes(values.reshape(-1)))
    return values


def _get_bytes(values: Array) -> memoryview:
    return memoryview(values.data).cast("B")


@dataclass(frozen=True, eq=False)
class RearrangedTensor:
    """An output that transformers makes of parts of several weights, some of which are merged first.

    Computed as a whole by one thread. Memory: the output and the weights that it is made of.
    """

    fqn: str
    dtype: str
    shape: Shape
    moves: Sequence[Move]
    sources: Mapping[str, DiskTensor | MergedTensor]

    @property
    def numel(self) -> int:
        return count_elements(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * DTYPE_SIZES[self.dtype]

    @property
    def inputs(self) -> tuple[DiskTensor, ...]:
        return list_inputs(self.sources.values())

    @property
    def block_numel(self) -> int:
        return self.numel

    def enter(self, files: FileCache) -> Compute:
        """Return the function that computes all of it."""

        def compute(start: int, length: int, target: memoryview) -> None:
            uint = _UINTS[DTYPE_SIZES[self.dtype]]
            result = np.frombuffer(target, uint)
            for name, source in self.sources.items():
                whole = np.frombuffer(_read_source(source, files), uint)
                for move in self.moves:
                    if move.source == name:
                        _view(result, move, self.shape, is_target=True)[...] = _view(
                            whole, move, source.shape, is_target=False
                        )

        return compute


def _read_source(source: DiskTensor | MergedTensor, files: FileCache) -> memoryview:
    data = memoryview(bytearray(source.size_bytes))
    if isinstance(source, DiskTensor):
        read_into(source, get_whole(source.shape), data, files=files)
        return data
    position = 0
    for block in iterate_source(source, files):
        data[position : position + len(block)] = block
        position += len(block)
    return data


def _view(flat: npt.NDArray[Any], move: Move, shape: Shape, *, is_target: bool) -> npt.NDArray[Any]:
    """Return the elements of a move on one side, one dimension per axis."""
    strides = get_row_major_strides(shape)
    first = sum(at * step for at, step in zip(move.target if is_target else move.origin, strides, strict=True))
    steps = [
        axis.target_step * strides[axis.target_dim] if is_target else axis.source_step * strides[axis.source_dim]
        for axis in move.axes
    ]
    return np.lib.stride_tricks.as_strided(
        flat[first:], [axis.size for axis in move.axes], [step * flat.itemsize for step in steps], writeable=is_target
    )
