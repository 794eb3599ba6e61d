"""The tensors that an export writes, each a copy or made of parts, and their compact JSON. No torch.

An output that is a tensor of the checkpoint under the same name is just that name, and the experts that were cut out of
one tensor, whose names count up, are one entry: tens of thousands of outputs stay a few hundred kilobytes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..parts import Shape
from .moves import Axis, Move

_NUMBER = re.compile(r"\d+")
_MAX_SERIES = 1 << 20  # a damaged count must not fill the memory


@dataclass(frozen=True)
class OutputFacts:
    """One tensor that `save_pretrained` writes: a copy of one tensor of the checkpoint, or made of parts of several.

    Attributes:
        name: in the file.
        shape: of the whole tensor.
        source: the tensor of the checkpoint that it is a copy of, None where it is not a plain copy.
        moves: otherwise, the parts that it is made of.
        operation: what makes it of `sources` where moves cannot say it (arithmetic, casts): only torch can.
    """

    name: str
    shape: Shape
    source: str | None = None
    moves: tuple[Move, ...] = ()
    operation: str | None = None
    sources: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the tensors that it is made of."""
        if self.source is not None:
            return (self.source,)
        return self.sources or tuple(dict.fromkeys(move.source for move in self.moves))


def write_outputs(outputs: Sequence[OutputFacts]) -> list[Any]:
    """Return outputs as JSON holds them."""
    written: list[Any] = []
    position = 0
    while position < len(outputs):
        first = outputs[position]
        series = _find_series(outputs, position)
        body = _write_output(first)
        if series is not None:
            body["series"] = [series.place, series.count]
            body["steps"] = series.steps
        written.append(body)
        position += 1 if series is None else series.count
    return written


def read_outputs(raw: Sequence[Any], shapes: Mapping[str, Shape]) -> tuple[OutputFacts, ...]:
    """Return the outputs that JSON holds.

    Args:
        raw: what `write_outputs` returned.
        shapes: of the tensors of the checkpoint.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: something is missing or cannot be right.
    """
    return tuple(output for each in raw for output in _read_entry(each, shapes))


@dataclass(frozen=True)
class _Series:
    """Outputs in a row that differ by one number in their names, and by even steps in where they come from."""

    place: int  # of the number among those in the name
    count: int
    steps: list[list[int]]  # per move and dimension of its source


def _find_series(outputs: Sequence[OutputFacts], position: int) -> _Series | None:
    if position + 1 >= len(outputs) or not outputs[position].moves:
        return None
    first, second = outputs[position], outputs[position + 1]
    place = next(
        (at for at in range(len(_NUMBER.findall(first.name))) if _count_up(first.name, at, 1) == second.name), None
    )
    steps = _find_steps(first, second)
    if place is None or steps is None:
        return None
    count = 2
    while position + count < len(outputs) and outputs[position + count] == _advance(first, place, count, steps):
        count += 1
    return _Series(place, count, steps)


def _find_steps(first: OutputFacts, second: OutputFacts) -> list[list[int]] | None:
    if first.shape != second.shape or len(first.moves) != len(second.moves):
        return None
    for one, other in zip(first.moves, second.moves, strict=True):
        if dataclasses.replace(other, origin=one.origin) != one:
            return None
    return [
        [b - a for a, b in zip(one.origin, other.origin, strict=True)]
        for one, other in zip(first.moves, second.moves, strict=True)
    ]


def _advance(first: OutputFacts, place: int, number: int, steps: Sequence[Sequence[int]]) -> OutputFacts:
    """Return the output that stands `number` places behind the first of a series."""
    moves = (
        Move(move.source, move.target, tuple(a + number * b for a, b in zip(move.origin, step, strict=True)), move.axes)
        for move, step in zip(first.moves, steps, strict=True)
    )
    return OutputFacts(_count_up(first.name, place, number), first.shape, moves=tuple(moves))


def _count_up(name: str, place: int, by: int) -> str:
    match = list(_NUMBER.finditer(name))[place]
    return f"{name[: match.start()]}{int(match[0]) + by}{name[match.end() :]}"


def _write_output(output: OutputFacts) -> Any:
    if output.source is not None:
        return output.name if output.source == output.name else [output.name, output.source]
    body: dict[str, Any] = {"name": output.name, "shape": list(output.shape)}
    if output.operation is not None:
        return {**body, "operation": output.operation, "sources": list(output.sources)}
    moves = (
        [each.source, list(each.target), list(each.origin), [list(axis) for axis in each.axes]] for each in output.moves
    )
    return {**body, "moves": list(moves)}


def _read_entry(raw: Any, shapes: Mapping[str, Shape]) -> Iterator[OutputFacts]:
    if isinstance(raw, str):
        yield OutputFacts(raw, shapes[raw], source=raw)
        return
    if isinstance(raw, list):
        name, source = raw
        yield OutputFacts(str(name), shapes[source], source=str(source))
        return
    name, shape = str(raw["name"]), read_shape(raw["shape"])
    if "operation" in raw:
        yield OutputFacts(name, shape, operation=str(raw["operation"]), sources=read_names(raw["sources"]))
        return
    first = OutputFacts(name, shape, moves=tuple(_read_move(each) for each in raw["moves"]))
    _check_moves(first, shapes)
    yield first
    if "series" in raw:
        place, count = (int(each) for each in raw["series"])
        steps = [[int(each) for each in step] for step in raw["steps"]]
        if not 1 < count <= _MAX_SERIES:
            raise ValueError(f"{count} outputs after {name!r}")
        _check_moves(_advance(first, place, count - 1, steps), shapes)
        yield from (_advance(first, place, number, steps) for number in range(1, count))


def _read_move(raw: Sequence[Any]) -> Move:
    source, target, origin, axes = raw
    return Move(str(source), read_shape(target), read_shape(origin), tuple(Axis(*map(int, axis)) for axis in axes))


def _check_moves(output: OutputFacts, shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError unless all moves stay inside both tensors: what a damaged one addresses are other bytes."""
    for move in output.moves:
        last_target, last_origin = list(move.target), list(move.origin)
        for axis in move.axes:
            if min(axis) < 0 or not (axis.size and axis.target_step and axis.source_step):
                raise ValueError(f"{axis} of {move.source!r}")
            last_target[axis.target_dim] += (axis.size - 1) * axis.target_step
            last_origin[axis.source_dim] += (axis.size - 1) * axis.source_step
        for start, last, whole in (
            (move.target, last_target, output.shape),
            (move.origin, last_origin, shapes[move.source]),
        ):
            inside = len(last) == len(whole) and all(place < size for place, size in zip(last, whole, strict=True))
            if not inside or min(start, default=0) < 0:
                raise ValueError(f"a part of {move.source!r} reaches beyond {whole}")


def read_names(raw: Sequence[Any]) -> tuple[str, ...]:
    """Return a list of names."""
    if isinstance(raw, str):
        raise TypeError(f"{raw!r} is no list")
    return tuple(str(each) for each in raw)


def read_shape(raw: Sequence[Any]) -> Shape:
    """Return a shape (or coordinates): no number in it is negative."""
    shape = tuple(int(size) for size in raw)
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape}")
    return shape
