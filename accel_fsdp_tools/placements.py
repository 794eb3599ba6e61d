"""From the placements of a DTensor to the boxes of the whole tensor that one rank holds. Plain arithmetic.

torch's own `compute_local_shape_and_global_offset` returns one offset, so it is silently wrong for a strided shard
that is several boxes. Here every dimension is a list of intervals, cut the way torch cuts: `ceil(size / n)` each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .errors import UnsupportedError
from .extents import Box, Shape

Intervals = list[tuple[int, int]]  # (start, length), in the order in which they follow each other in memory


@dataclass(frozen=True)
class Cut:
    """How one mesh dimension cuts a tensor dimension: into `count` shards, of which `index` is held here.

    With `split_factor` above 1 (torch's `_StridedShard`) each of so many equal ranges is cut by itself.
    """

    dim: int
    count: int
    index: int
    split_factor: int = 1


def compute_boxes(shape: Shape, cuts: Sequence[Cut], local_shape: Shape) -> tuple[Box, ...]:
    """Return the boxes that make up the local tensor, in its row-major order; none if it is empty.

    FSDP on top of tensor parallelism cuts from right to left (first by the last mesh dimension), and says so by a
    strided shard before the plain ones; a tensor distributed by hand was cut from left to right. Where sizes are
    uneven the two can differ, and the shape of the local tensor tells which it was.

    Args:
        shape: the whole tensor's.
        cuts: one for each mesh dimension that shards, in mesh order.
        local_shape: the shape of the tensor that this rank holds.

    Raises:
        UnsupportedError: no way of cutting leads to `local_shape`, or two do, to different boxes.
    """
    found: list[list[Intervals]] = []
    for order in (cuts, _turn_around(shape, cuts)):
        if order is None:
            continue
        intervals = _cut(shape, order)
        sizes = tuple(sum(length for _, length in each) for each in intervals)
        if sizes == local_shape and intervals not in found:
            found.append(intervals)
    if 0 in local_shape and found:
        return ()
    if len(found) != 1:
        what = "in more than one way" if found else "in no way"
        raise UnsupportedError(
            f"A local tensor of shape {local_shape} fits the placements {list(cuts)} of a tensor of shape {shape} "
            f"{what}; which part of the tensor it is cannot be told",
            expected=shape,
            actual=local_shape,
        )
    return tuple(
        Box(tuple(start for start, _ in chosen), tuple(length for _, length in chosen))
        for chosen in itertools.product(*found[0])
    )


def iterate_local_boxes(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield every box with its place in the local tensor that `compute_boxes` described by them."""
    if not boxes:
        return
    places: list[dict[int, int]] = [{} for _ in boxes[0].sizes]
    ends = [0] * len(places)
    for box in boxes:
        for dim, offset in enumerate(box.offsets):
            if offset not in places[dim]:
                places[dim][offset] = ends[dim]
                ends[dim] += box.sizes[dim]
    for box in boxes:
        yield box, Box(tuple(places[dim][offset] for dim, offset in enumerate(box.offsets)), box.sizes)


def _turn_around(shape: Shape, cuts: Sequence[Cut]) -> list[Cut] | None:
    """Return the plain cuts from right to left that strided ones stand for, None where they stand for none.

    A strided shard stands for plain ones to its right, on the same dimension, whose counts multiply to its factor.
    (In torch's own terms an even cut is the same in both directions.)
    """
    if all(cut.split_factor == 1 for cut in cuts):
        return None
    for place, cut in enumerate(cuts):
        later = [other for other in cuts[place + 1 :] if other.dim == cut.dim]
        is_strided = cut.split_factor > 1
        if is_strided and math.prod(other.count for other in later) != cut.split_factor:
            return None
        if not is_strided and any(other.split_factor > 1 for other in later):
            return None
    return [Cut(cut.dim, cut.count, cut.index) for cut in reversed(cuts)]


def _cut(shape: Shape, cuts: Sequence[Cut]) -> list[Intervals]:
    intervals: list[Intervals] = [[(0, size)] for size in shape]
    for cut in cuts:
        current = intervals[cut.dim]
        pieces: Intervals = []
        for start, end in _divide(sum(length for _, length in current), cut.split_factor):
            first, last = list(_divide(end - start, cut.count))[cut.index]
            pieces += _slice(current, start + first, start + last)
        intervals[cut.dim] = _merge(pieces)
    return intervals


def _divide(size: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of `count` chunks, the last of which may be short or empty, as `torch.chunk` makes them."""
    step = -(-size // count)
    for index in range(count):
        yield min(index * step, size), min((index + 1) * step, size)


def _slice(intervals: Intervals, first: int, last: int) -> Intervals:
    """Return positions `first` to `last` of what the intervals list one after another."""
    found = []
    position = 0
    for start, length in intervals:
        begin, end = max(first - position, 0), min(last - position, length)
        if begin < end:
            found.append((start + begin, end - begin))
        position += length
    return found


def _merge(pieces: Intervals) -> Intervals:
    merged: Intervals = []
    for start, length in pieces:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged
