"""From the bytes of one extent to their places in a part, whatever the order that the elements are stored in.

The file is read in its own order, in stretches as long as it allows; the rest is a copy in memory. Only where the
elements are not consecutive on both sides (parts cut along different dimensions, column-major parameters, views) is
numpy needed for that copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..extents import Box, Extent, Part, Run, Shape, get_row_major_strides, is_row_major, iterate_indices
from .file_cache import FileCache

_TURN_BYTES = 1 << 20  # at most so much is turned around at once
_MAX_GAP_BYTES = 1 << 12  # elements further apart are read one by one
_NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # numpy copies numbers much faster than bytes


class _Grid(NamedTuple):
    """Where the elements of a tensor are in a part or extent: strides from an origin, less a base, in elements."""

    origin: Shape
    strides: Shape
    base: int = 0

    @classmethod
    def of(cls, part: Part, shape: Shape, strides: Shape | None = None) -> _Grid:
        if isinstance(part, Box):
            return cls(part.offsets, get_row_major_strides(part.sizes) if strides is None else strides)
        return cls((0,) * len(shape), get_row_major_strides(shape), part.start)

    def locate(self, offsets: Shape) -> int:
        places = zip(offsets, self.origin, self.strides, strict=True)
        return sum((offset - origin) * stride for offset, origin, stride in places) - self.base


def gather(
    extent: Extent, common: Part, part: Part, shape: Shape, size: int, target: memoryview, files: FileCache
) -> None:
    """Read the elements that an extent and a part have in common into their places in the part's bytes.

    Args:
        extent: where they are in a file.
        common: one of the parts that `intersect(extent.part, part, shape)` gives.
        part: what `target` holds, in row-major order.
        shape: the whole tensor's.
        size: bytes per element.
        target: filled in place.
        files: open files.

    Memory: 1 MiB where the elements must be turned around, nothing otherwise.
    """
    path, start = extent.bytes.path, extent.offset
    straight = find_straight(extent, common, part, shape)
    if straight is not None or isinstance(common, Run):
        assert straight is not None  # noqa: S101
        at, begin = straight
        files.read_into(path, start + at * size, target[begin * size : (begin + common.numel) * size])
        return
    source, places = _Grid.of(extent.part, shape, extent.strides), _Grid.of(part, shape)
    # In the order of the file: the dimension with the longest steps first.
    order = sorted(range(len(shape)), key=lambda dim: -source.strides[dim])
    back = sorted(range(len(shape)), key=order.__getitem__)
    scratch = memoryview(bytearray(min(_TURN_BYTES, common.numel * size)))
    for piece in _split_box(_permute(common, order), max(1, len(scratch) // size)):
        box = _permute(piece, back)
        block = scratch[: box.numel * size]
        strides = tuple(source.strides[dim] for dim in order)
        position = 0
        for offset, step, count in _find_stretches(piece.sizes, strides):
            at = start + (source.locate(box.offsets) + offset) * size
            _read_stretch(files, path, at, step, size, block[position : position + count * size])
            position += count * size
        _scatter(block, piece.sizes, back, box, places, size, target)


def find_straight(extent: Extent, common: Part, part: Part, shape: Shape) -> tuple[int, int] | None:
    """Return at which element of an extent and of a part their common ones begin, if they are consecutive in both.

    Arguments as for `gather`.
    """
    if isinstance(common, Run):
        # Only two runs meet in a run, and each lies in one piece.
        return common.start - _Grid.of(extent.part, (1,)).base, common.start - _Grid.of(part, (1,)).base
    source, places = _Grid.of(extent.part, shape, extent.strides), _Grid.of(part, shape)
    if is_row_major(common.sizes, source.strides) and is_row_major(common.sizes, places.strides):
        return source.locate(common.offsets), places.locate(common.offsets)
    return None


def _permute(box: Box, order: list[int]) -> Box:
    return Box(tuple(box.offsets[dim] for dim in order), tuple(box.sizes[dim] for dim in order))


def _find_stretches(sizes: Shape, strides: Shape) -> Iterator[tuple[int, int, int]]:
    """Yield offset, step and count of evenly spaced elements that make up a box, in its row-major order."""
    step, count = 1, 1
    outer = len(sizes)
    while outer:
        size, stride = sizes[outer - 1], strides[outer - 1]
        if size > 1:
            if count == 1:
                step = stride
            elif not step or stride != step * count:
                break
            count *= size
        outer -= 1
    for index in iterate_indices(sizes[:outer]):
        yield sum(place * stride for place, stride in zip(index, strides, strict=False)), step, count


def _read_stretch(files: FileCache, path: str, offset: int, step: int, size: int, view: memoryview) -> None:
    """Fill `view` with elements that are `step` elements apart in a file."""
    count = len(view) // size
    if step == 1 or count == 1:
        files.read_into(path, offset, view)
    elif not step:  # an expanded tensor: one element stands for all
        files.read_into(path, offset, view[:size])
        view[:] = bytes(view[:size]) * count
    elif step * size > _MAX_GAP_BYTES:
        for number in range(count):
            files.read_into(path, offset + number * step * size, view[number * size : (number + 1) * size])
    else:
        import numpy as np

        values = np.frombuffer(view, dtype=_NUMBERS[size])
        per_span = max(1, _TURN_BYTES // (step * size))
        for first in range(0, count, per_span):
            wanted = values[first : first + per_span]
            span = bytearray(((len(wanted) - 1) * step + 1) * size)
            files.read_into(path, offset + first * step * size, memoryview(span))
            wanted[...] = np.frombuffer(span, dtype=_NUMBERS[size])[::step]


def _scatter(
    block: memoryview, sizes: Shape, back: list[int], box: Box, places: _Grid, size: int, target: memoryview
) -> None:
    """Copy a block of elements in the order of the file to their places in a part."""
    import numpy as np

    values = np.frombuffer(block, dtype=_NUMBERS[size]).reshape(sizes).transpose(back)
    rest = np.frombuffer(target, dtype=_NUMBERS[size])[places.locate(box.offsets) :]
    strides = [stride * size for stride in places.strides]
    np.lib.stride_tricks.as_strided(rest, box.sizes, strides)[...] = values


def split_part(part: Part, limit: int) -> Iterator[Part]:
    """Yield parts of at most `limit` elements that make up `part`, in its row-major order."""
    if isinstance(part, Box):
        yield from _split_box(part, limit)
        return
    for start in range(0, part.length, limit):
        yield Run(part.start + start, min(limit, part.length - start))


def _split_box(box: Box, limit: int) -> Iterator[Box]:
    if box.numel <= limit:
        if box.numel:
            yield box
        return
    dim = next(index for index, size in enumerate(box.sizes) if size > 1)
    rows = max(1, limit // (box.numel // box.sizes[dim]))
    for start in range(0, box.sizes[dim], rows):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(rows, box.sizes[dim] - start)
        yield from _split_box(Box(tuple(offsets), tuple(sizes)), limit)
