"""Tensors of an export that lie nowhere in a checkpoint: their values are computed while they are written.

The seam between copying, which knows nothing but this, and what computes (`merging`). What is computed is read again
and compared like all that is copied, and what it is computed from is checked as all sources are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from ..extents import DTYPE_SIZES, DiskTensor, Shape
from ..formats.reading import FileCache, read_blocks

Compute = Callable[[int, int, memoryview], None]
"""Fills a view with the row-major bytes of elements: which is the first, and how many."""


class ComputedTensor(Protocol):
    """A tensor with values that are made of other tensors'.

    Attributes:
        fqn, dtype, shape, numel, size_bytes: as those of a tensor on disk.
        inputs: all tensors that it is made of; that they are whole, and their stored items' CRCs, is checked.
        block_numel: elements to ask for at a time. Ranges begin at multiples of it, whatever the number of threads,
            so that what comes out does not depend on that.
    """

    @property
    def fqn(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def numel(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def inputs(self) -> Sequence[DiskTensor]: ...
    @property
    def block_numel(self) -> int: ...

    def enter(self, files: FileCache) -> Compute:
        """Return the function that computes, for one thread; it may keep what it has read until it is dropped."""


Source = DiskTensor | ComputedTensor
"""Where the values of an output come from."""


def list_inputs(sources: Iterable[Source]) -> tuple[DiskTensor, ...]:
    """Return all tensors that `sources` are, or are made of."""
    return tuple(
        each for source in sources for each in ((source,) if isinstance(source, DiskTensor) else source.inputs)
    )


def iterate_source(source: Source, files: FileCache) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order, computed where they are. A block lasts until the next."""
    if isinstance(source, DiskTensor):
        for _, block in read_blocks(source, files=files):
            yield block
        return
    compute, size = source.enter(files), DTYPE_SIZES[source.dtype]
    room = memoryview(bytearray(min(source.block_numel, source.numel) * size))
    for start in range(0, source.numel, source.block_numel):
        count = min(source.block_numel, source.numel - start)
        compute(start, count, room[: count * size])
        yield room[: count * size]
