"""Which element of an output tensor is which element of a source: moves, and what views and copies do to them.

A move is a rectangular family of elements. Each of its axes steps along one dimension of the output and along one
dimension of the source, so that slicing, permuting, splitting and joining stay arithmetic on a few integers, whatever
the size of the tensors. No torch, nothing is allocated per element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..parts import Shape, get_row_major_strides

MAX_MOVES = 1 << 16  # a rearrangement into more pieces than this is no longer worth describing


class TooManyMovesError(ValueError):
    """A rearrangement falls into more than `MAX_MOVES` pieces."""


class Axis(NamedTuple):
    """`size` elements that are `target_step` apart along one dimension of the output, and so in the source."""

    size: int
    target_dim: int
    target_step: int
    source_dim: int
    source_step: int


@dataclass(frozen=True)
class Move:
    """Elements of `source` and where they go: the first one's coordinates on both sides, and axes from there."""

    source: str
    target: Shape
    origin: Shape
    axes: tuple[Axis, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def narrow(self, position: int, start: int, count: int) -> Move:
        """Return the elements `start` to `start + count` along one axis; an axis of one element is left out."""
        axis = self.axes[position]
        target, origin = list(self.target), list(self.origin)
        target[axis.target_dim] += start * axis.target_step
        origin[axis.source_dim] += start * axis.source_step
        kept = (axis._replace(size=count),) if count > 1 else ()
        axes = self.axes[:position] + kept + self.axes[position + 1 :]
        return Move(self.source, tuple(target), tuple(origin), axes)


@dataclass(frozen=True)
class Arrangement:
    """A tensor as a shape and the moves that fill it, each element once."""

    shape: Shape
    moves: tuple[Move, ...]

    def is_copy(self, source: str, shape: Shape) -> bool:
        """Whether this is an unchanged copy of all of a source of `shape`."""
        return self == arrange_source(source, shape) and bool(self.moves)


def arrange_source(name: str, shape: Shape) -> Arrangement:
    """Return the arrangement of a source itself."""
    if not math.prod(shape):
        return Arrangement(shape, ())
    axes = tuple(Axis(size, dim, 1, dim, 1) for dim, size in enumerate(shape) if size > 1)
    return Arrangement(shape, (Move(name, (0,) * len(shape), (0,) * len(shape), axes),))


def cut_target(move: Move, dim: int, start: int, end: int) -> Iterator[Move]:
    """Yield the parts of a move that lie at `start` to `end` along a dimension of the output."""
    steps = [(position, axis.target_step) for position, axis in enumerate(move.axes) if axis.target_dim == dim]
    yield from _cut(move, move.target[dim], steps, start, end, is_source=False, dim=dim)


def cut_source(move: Move, dim: int, start: int, end: int) -> Iterator[Move]:
    """Yield the parts of a move that lie at `start` to `end` along a dimension of the source."""
    steps = [(position, axis.source_step) for position, axis in enumerate(move.axes) if axis.source_dim == dim]
    yield from _cut(move, move.origin[dim], steps, start, end, is_source=True, dim=dim)


def _cut(
    move: Move, first: int, steps: list[tuple[int, int]], start: int, end: int, *, is_source: bool, dim: int
) -> Iterator[Move]:
    last = first + sum((move.axes[position].size - 1) * step for position, step in steps)
    if first >= start and last < end:
        yield move
        return
    if last < start or first >= end:
        return
    # Along the axis with the longest steps, some indices lie inside as a whole and some only in part.
    position, step = max(steps, key=lambda each: each[1])
    size = move.axes[position].size
    rest = last - first - (size - 1) * step
    inside_from = min(max(0, -(-(start - first) // step)), size)
    inside_to = max(min(size, (end - 1 - rest - first) // step + 1), inside_from)
    touched_from = max(0, -(-(start - rest - first) // step))
    touched_to = min(size, (end - 1 - first) // step + 1)
    cut = cut_source if is_source else cut_target
    for index in range(touched_from, inside_from):
        yield from cut(move.narrow(position, index, 1), dim, start, end)
    if inside_from < inside_to:
        yield move.narrow(position, inside_from, inside_to - inside_from)
    for index in range(max(inside_to, inside_from), touched_to):
        yield from cut(move.narrow(position, index, 1), dim, start, end)


def permute(value: Arrangement, order: Sequence[int]) -> Arrangement:
    """Return the tensor with its dimensions in another order, as `Tensor.permute`."""
    places = {old: new for new, old in enumerate(order)}
    moves = (
        Move(move.source, tuple(move.target[old] for old in order), move.origin, _rename_dims(move.axes, places))
        for move in value.moves
    )
    return Arrangement(tuple(value.shape[old] for old in order), tuple(moves))


def _rename_dims(axes: tuple[Axis, ...], places: Mapping[int, int]) -> tuple[Axis, ...]:
    return tuple(Axis(size, places[dim], step, *source) for size, dim, step, *source in axes)


def narrow(value: Arrangement, dim: int, start: int, count: int) -> Arrangement:
    """Return the part at `start` to `start + count` along a dimension."""
    shape = (*value.shape[:dim], count, *value.shape[dim + 1 :])
    moves = (_shift(part, dim, -start) for move in value.moves for part in cut_target(move, dim, start, start + count))
    return Arrangement(shape, _limit(moves))


def take_every(value: Arrangement, dim: int, step: int) -> Arrangement:
    """Return every `step`-th index along a dimension, from the first."""
    parts = [select(value, dim, index) for index in range(0, value.shape[dim], step)]
    return stack(parts, dim) if parts else narrow(value, dim, 0, 0)


def select(value: Arrangement, dim: int, index: int) -> Arrangement:
    """Return one index along a dimension, which is dropped."""
    return drop_dim(narrow(value, dim, index, 1), dim)


def drop_dim(value: Arrangement, dim: int) -> Arrangement:
    """Return the tensor without a dimension of size 1."""
    places = {old: old - (old > dim) for old in range(len(value.shape))}
    moves = (
        Move(move.source, _drop(move.target, dim), move.origin, _rename_dims(move.axes, places)) for move in value.moves
    )
    return Arrangement(_drop(value.shape, dim), tuple(moves))


def _drop(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def add_dim(value: Arrangement, dim: int) -> Arrangement:
    """Return the tensor with a new dimension of size 1."""
    places = {old: old + (old >= dim) for old in range(len(value.shape))}
    moves = (
        Move(
            move.source,
            (*move.target[:dim], 0, *move.target[dim:]),
            move.origin,
            _rename_dims(move.axes, places),
        )
        for move in value.moves
    )
    return Arrangement((*value.shape[:dim], 1, *value.shape[dim:]), tuple(moves))


def concatenate(values: Sequence[Arrangement], dim: int) -> Arrangement:
    """Return tensors joined along a dimension."""
    moves: list[Move] = []
    offset = 0
    for value in values:
        moves += [_shift(move, dim, offset) for move in value.moves]
        offset += value.shape[dim]
    first = values[0].shape
    return Arrangement((*first[:dim], offset, *first[dim + 1 :]), _limit(moves))


def stack(values: Sequence[Arrangement], dim: int) -> Arrangement:
    """Return tensors joined along a new dimension."""
    return concatenate([add_dim(value, dim) for value in values], dim)


def _shift(move: Move, dim: int, by: int) -> Move:
    if not by:
        return move
    target = (*move.target[:dim], move.target[dim] + by, *move.target[dim + 1 :])
    return Move(move.source, target, move.origin, move.axes)


def reshape(value: Arrangement, shape: Shape) -> Arrangement:
    """Return the elements in the same row-major order in another shape."""
    old, new = get_row_major_strides(value.shape), get_row_major_strides(shape)
    moves: list[Move] = []
    for move in value.moves:
        start = sum(place * stride for place, stride in zip(move.target, old, strict=True))
        # Steps in the row-major order of all elements, whichever the shape.
        flat = replace(
            move, axes=tuple(axis._replace(target_step=axis.target_step * old[axis.target_dim]) for axis in move.axes)
        )
        moves += _place(flat, start, shape, new)
        if len(moves) > MAX_MOVES:
            raise TooManyMovesError
    return Arrangement(shape, _limit(merge_axes(move) for move in moves))


def _place(move: Move, start: int, shape: Shape, strides: Shape) -> Iterator[Move]:
    """Yield a move whose target steps count elements, and starts at `start`, in coordinates of `shape`."""
    pending = [(move, start)]
    while pending:
        move, start = pending.pop()
        coordinates = _decode(start, strides)
        dims = [_find_dim(axis.target_step, strides) for axis in move.axes]
        uneven = next((at for at, axis in enumerate(move.axes) if axis.target_step % strides[dims[at]]), None)
        if uneven is not None:
            pending += _take_apart(move, start, uneven, [(at, 1) for at in range(move.axes[uneven].size)])
            continue
        ends = list(coordinates)
        for axis, dim in zip(move.axes, dims, strict=True):
            ends[dim] += (axis.size - 1) * (axis.target_step // strides[dim])
        over = next((dim for dim in reversed(range(len(shape))) if ends[dim] >= shape[dim]), None)
        if over is None:
            axes = (
                axis._replace(target_dim=dim, target_step=axis.target_step // strides[dim])
                for axis, dim in zip(move.axes, dims, strict=True)
            )
            yield Move(move.source, coordinates, move.origin, tuple(axes))
            continue
        pending += _split_axis(move, start, over, dims, shape, strides)


def _split_axis(
    move: Move, start: int, dim: int, dims: list[int], shape: Shape, strides: Shape
) -> list[tuple[Move, int]]:
    """Cut a move where it runs over the end of a dimension: into two axes where they are even, else into parts."""
    inside = [at for at, each in enumerate(dims) if each == dim]
    position = max(inside, key=lambda at: move.axes[at].target_step)
    axis = move.axes[position]
    step = axis.target_step // strides[dim]
    first = _decode(start, strides)[dim]
    rest = sum(
        (move.axes[at].size - 1) * (move.axes[at].target_step // strides[dim]) for at in inside if at != position
    )
    count, remainder = divmod(shape[dim], step)
    if not remainder and first + rest < step and axis.size > count:
        if uneven := axis.size % count:
            return _take_apart(move, start, position, [(0, axis.size - uneven), (axis.size - uneven, uneven)])
        outer = axis._replace(
            size=axis.size // count, target_step=axis.target_step * count, source_step=axis.source_step * count
        )
        inner = (axis._replace(size=count),) if count > 1 else ()
        axes = (*move.axes[:position], outer, *inner, *move.axes[position + 1 :])
        return [(replace(move, axes=axes), start)]
    fitting = min(axis.size, max(0, (shape[dim] - 1 - rest - first) // step + 1))
    if not fitting:
        return _take_apart(move, start, position, [(0, 1), (1, axis.size - 1)])
    # The index that follows begins in this row, or in the next one where it can be split evenly.
    crossing = first + fitting * step < shape[dim]
    parts = [(0, fitting), (fitting, 1), (fitting + 1, axis.size - fitting - 1)]
    if not crossing:
        parts = [(0, fitting), (fitting, axis.size - fitting)]
    return _take_apart(move, start, position, parts)


def _take_apart(move: Move, start: int, position: int, parts: list[tuple[int, int]]) -> list[tuple[Move, int]]:
    axis = move.axes[position]
    if len(parts) > MAX_MOVES:
        raise TooManyMovesError
    return [
        (_narrow_flat(move, position, at, count), start + at * axis.target_step)
        for at, count in parts
        if count and at < axis.size
    ]


def _narrow_flat(move: Move, position: int, start: int, count: int) -> Move:
    axis = move.axes[position]
    origin = list(move.origin)
    origin[axis.source_dim] += start * axis.source_step
    kept = (axis._replace(size=count),) if count > 1 else ()
    return replace(move, origin=tuple(origin), axes=(*move.axes[:position], *kept, *move.axes[position + 1 :]))


def _decode(position: int, strides: Shape) -> Shape:
    coordinates = []
    for stride in strides:
        place, position = divmod(position, stride)
        coordinates.append(place)
    return tuple(coordinates)


def _find_dim(step: int, strides: Shape) -> int:
    """Return the dimension along which a step of so many elements goes, never one of size 1 behind it."""
    largest = max(stride for stride in strides if stride <= step)
    return strides.index(largest)


def merge_axes(move: Move) -> Move:
    """Return the move with axes joined that step on evenly along the same dimensions of both sides."""
    axes = sorted(move.axes, key=lambda axis: (axis.target_dim, -axis.target_step))
    merged: list[Axis] = []
    for axis in axes:
        before = merged[-1] if merged else None
        if (
            before is not None
            and (before.target_dim, before.source_dim) == (axis.target_dim, axis.source_dim)
            and before.target_step == axis.size * axis.target_step
            and before.source_step == axis.size * axis.source_step
        ):
            merged[-1] = axis._replace(size=before.size * axis.size)
        else:
            merged.append(axis)
    return replace(move, axes=tuple(merged))


def _limit(moves: Iterable[Move]) -> tuple[Move, ...]:
    found = tuple(moves)
    if len(found) > MAX_MOVES:
        raise TooManyMovesError
    return found
