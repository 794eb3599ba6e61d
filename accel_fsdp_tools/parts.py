"""Parts of tensors: boxes and runs of elements, cut, intersected, matched and checked to tile a whole.

All in the coordinates of the whole tensor, by arithmetic on offsets and sizes: nothing is allocated per element, so
shapes may be as large as they like.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: first index and number of indices per dimension. 0-d: both are empty."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a tensor, counted in its row-major order."""

    start: int
    length: int

    @property
    def numel(self) -> int:
        return self.length


Part = Box | Run


class Piece(NamedTuple):
    """Consecutive elements of a part: where they start in the whole tensor, where in the part, and how many."""

    start: int
    offset: int
    length: int


class Match(NamedTuple):
    """Elements that two parts have in common, consecutive in both: where they start in each, and how many."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Coverage:
    """How parts cover a tensor. The regions listed may be cut off (`limit`); the counts of elements are exact.

    `outside` are parts that reach beyond the shape, or have another number of dimensions.
    """

    holes: tuple[Box, ...] = ()
    overlaps: tuple[Box, ...] = ()
    outside: tuple[Part, ...] = ()
    num_missing: int = 0
    num_repeated: int = 0

    @property
    def ok(self) -> bool:
        """Whether the parts tile the tensor exactly once."""
        return not (self.num_missing or self.num_repeated or self.outside)


def count_elements(sizes: Sequence[int]) -> int:
    """Return the number of elements of a shape or box; 1 for 0-d."""
    return math.prod(sizes)


def get_whole(shape: Sequence[int]) -> Box:
    """Return the part that is the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def get_row_major_strides(sizes: Sequence[int]) -> Shape:
    """Return the strides, in elements, of a contiguous tensor (torch's: an empty dimension counts as one)."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements with these strides lie one after another; strides of dimensions of size 1 don't matter."""
    if 0 in sizes:
        return True
    expected = get_row_major_strides(sizes)
    return all(size == 1 or a == b for size, a, b in zip(sizes, strides, expected, strict=True))


def get_span(part: Part, shape: Shape) -> tuple[int, int]:
    """Return the row-major positions of a part's first element and behind its last; equal for an empty part."""
    if isinstance(part, Run):
        return part.start, part.start + max(part.length, 0)
    strides = get_row_major_strides(shape)
    start = _dot(part.offsets, strides)
    return start, start + _dot((size - 1 for size in part.sizes), strides) + 1 if part.numel else start


def split_into_boxes(part: Part, shape: Shape) -> list[Box]:
    """Return disjoint boxes that make up `part` of a tensor of `shape`, in row-major order; empty ones left out.

    A run falls into at most two boxes per dimension: what is left of the first row, whole rows, a begun row.
    """
    if isinstance(part, Box):
        return [part] if part.numel else []
    return list(_iterate_boxes(part.start, part.length, shape))


def _iterate_boxes(start: int, length: int, shape: Shape) -> Iterator[Box]:
    if length <= 0 or 0 in shape:
        return
    if not shape:
        yield Box((), ())
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, skipped = divmod(start, row)
    if skipped:
        count = min(length, row - skipped)
        yield from (_prepend(first, 1, box) for box in _iterate_boxes(skipped, count, inner))
        first, length = first + 1, length - count
    rows, rest = divmod(length, row)
    if rows:
        yield Box((first, *(0,) * len(inner)), (rows, *inner))
    if rest:
        yield from (_prepend(first + rows, 1, box) for box in _iterate_boxes(0, rest, inner))


def _prepend(offset: int, size: int, box: Box) -> Box:
    return Box((offset, *box.offsets), (size, *box.sizes))


def intersect(a: Part, b: Part, shape: Shape) -> list[Part]:
    """Return the disjoint parts of a tensor of `shape` that `a` and `b` have in common; empty if none."""
    if isinstance(a, Run) and isinstance(b, Run):
        start, end = max(a.start, b.start), min(a.start + a.length, b.start + b.length)
        return [Run(start, end - start)] if start < end else []
    found: list[Part] = []
    for one in split_into_boxes(a, shape):
        found += [common for other in split_into_boxes(b, shape) if (common := _intersect_boxes(one, other))]
    return found


def _intersect_boxes(a: Box, b: Box) -> Box | None:
    if len(a.sizes) != len(b.sizes):
        return None  # damaged metadata: a box of another tensor
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def split_into_runs(part: Part, shape: Shape) -> Iterator[Piece]:
    """Yield the longest consecutive runs of a part, in row-major order; nothing for an empty part.

    Lazily: a box that is cut along the last dimension of a huge tensor has one run per row.
    """
    if isinstance(part, Run):
        if part.length > 0:
            yield Piece(part.start, 0, part.length)
        return
    for match in match_parts(part, Run(0, math.prod(shape)), shape):
        yield Piece(match.target, match.source, match.length)


def match_parts(source: Part, target: Part, shape: Shape) -> Iterator[Match]:
    """Yield what `source` and `target` have in common as consecutive elements of both.

    Offsets count elements from the start of each part, in the part's own row-major order. This is all that copying
    or comparing needs: bytes of one, bytes of the other, and how many.
    """
    for common in intersect(source, target, shape):
        if isinstance(common, Run):
            assert isinstance(source, Run) and isinstance(target, Run)  # noqa: S101, PT018 - only runs meet in a run
            yield Match(common.start - source.start, common.start - target.start, common.length)
        else:
            yield from _match_box(common, _Frame.of(source, shape), _Frame.of(target, shape))


class _Frame(NamedTuple):
    """How coordinates of the tensor become an offset in a part: row-major in a grid, from an origin."""

    origin: Shape
    sizes: Shape
    base: int

    @classmethod
    def of(cls, part: Part, shape: Shape) -> _Frame:
        if isinstance(part, Run):
            return cls((0,) * len(shape), shape, part.start)
        return cls(part.offsets, part.sizes, 0)


def _match_box(common: Box, source: _Frame, target: _Frame) -> Iterator[Match]:
    sizes = common.sizes
    # Dimensions behind `split` are whole in both parts, so one step along `split` crosses consecutive elements.
    split = len(sizes)
    length = 1
    while split:
        split -= 1
        length *= sizes[split]
        if not sizes[split] == source.sizes[split] == target.sizes[split]:
            break
    starts, steps = [], []
    for frame in (source, target):
        strides = get_row_major_strides(frame.sizes)
        starts.append(_dot(map(int.__sub__, common.offsets, frame.origin), strides) - frame.base)
        steps.append(strides)
    if not split:
        yield Match(starts[0], starts[1], length)
        return
    for index in iterate_indices(sizes[:split]):
        yield Match(starts[0] + _dot(index, steps[0]), starts[1] + _dot(index, steps[1]), length)


def iterate_indices(sizes: Shape) -> Iterator[Shape]:
    """Yield every index of a box of these sizes, last dimension fastest; `itertools.product` would store the ranges."""
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in iterate_indices(sizes[1:]):
            yield (first, *rest)


def _dot(index: Iterable[int], strides: Shape) -> int:
    return sum(position * stride for position, stride in zip(index, strides, strict=False))


def check_coverage(shape: Shape, parts: Iterable[Part], *, limit: int = 100) -> Coverage:
    """Return whether `parts` tile a tensor of `shape` exactly once, and where they don't.

    A sweep over the dimensions, one after the other: n parts cut along one dimension cost n log n, whatever the
    sizes. At most `limit` holes, overlaps and parts outside are listed; elements are counted exactly.
    """
    boxes: list[Box] = []
    outside: list[Part] = []
    numel = math.prod(shape)
    for part in parts:
        if not _lies_inside(part, shape, numel):
            outside.append(part)
        boxes += _clip(part, shape, numel)
    sweep = _Sweep(shape, limit)
    if numel:
        sweep.run((), boxes)
    return Coverage(
        tuple(sweep.holes), tuple(sweep.overlaps), tuple(outside[:limit]), sweep.num_missing, sweep.num_repeated
    )


def _lies_inside(part: Part, shape: Shape, numel: int) -> bool:
    if isinstance(part, Run):
        return part.start >= 0 and part.length >= 0 and part.start + part.length <= numel
    if len(part.offsets) != len(shape) or len(part.sizes) != len(shape):
        return False
    return all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(part.offsets, part.sizes, shape, strict=True)
    )


def _clip(part: Part, shape: Shape, numel: int) -> list[Box]:
    if isinstance(part, Run):
        start, end = max(part.start, 0), min(part.start + part.length, numel)
        return split_into_boxes(Run(start, end - start), shape) if start < end else []
    if len(part.offsets) != len(shape) or len(part.sizes) != len(shape):
        return []
    inside = _intersect_boxes(part, get_whole(shape))
    return [inside] if inside is not None else []


class _Sweep:
    """Walks slabs between the cuts along one dimension, and inside each the next dimension."""

    def __init__(self, shape: Shape, limit: int) -> None:
        self.shape = shape
        self.limit = limit
        self.holes: list[Box] = []
        self.overlaps: list[Box] = []
        self.num_missing = 0
        self.num_repeated = 0

    def run(self, slabs: tuple[tuple[int, int], ...], active: Sequence[Box]) -> None:
        """Look at the region that `slabs` (start and end of the leading dimensions) cuts out, in which `active` lie."""
        depth = len(slabs)
        if not active:
            self.num_missing += self._note(self.holes, slabs)
        elif depth == len(self.shape):
            if len(active) > 1:
                self.num_repeated += self._note(self.overlaps, slabs) * (len(active) - 1)
        elif len(active) > 1 or active[0].sizes[depth:] != self.shape[depth:]:
            self._run_along(depth, slabs, active)

    def _run_along(self, depth: int, slabs: tuple[tuple[int, int], ...], active: Sequence[Box]) -> None:
        events: dict[int, tuple[list[int], list[int]]] = {0: ([], []), self.shape[depth]: ([], [])}
        for index, box in enumerate(active):
            start = box.offsets[depth]
            events.setdefault(start, ([], []))[0].append(index)
            events.setdefault(start + box.sizes[depth], ([], []))[1].append(index)
        current: dict[int, Box] = {}
        previous = 0
        for position in sorted(events):
            if position > previous:
                self.run((*slabs, (previous, position)), list(current.values()))
            starting, ending = events[position]
            for index in ending:
                del current[index]
            for index in starting:
                current[index] = active[index]
            previous = position

    def _note(self, regions: list[Box], slabs: tuple[tuple[int, int], ...]) -> int:
        rest = self.shape[len(slabs) :]
        box = Box(
            tuple(start for start, _ in slabs) + (0,) * len(rest), tuple(end - start for start, end in slabs) + rest
        )
        if len(regions) < self.limit:
            regions.append(box)
        return box.numel
