"""What differs between two runs, in the order of cause and effect: the first difference is the one to explain.

Within an update the order is that in which things happen: which samples, the random generators and the batch as the
loader handed it out, the model's inputs, the generators after the forward pass, learning rate, loss, gradients, and
then what the update has made of parameters, optimizer and generators.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from .records import Attempt, Record


class Thing(str, Enum):
    """What can differ, from cause to effect; the values are for people."""

    PARAMETERS_BEFORE = "parameters before the first update"
    OPTIMIZER_BEFORE = "optimizer before the first update"
    SAMPLES = "samples of all ranks"  # on another number of ranks, where each rank has others
    NUM_BATCHES = "number of batches in the update"
    INDICES = "indices of the samples"
    GENERATORS = "random generators at the batch"
    BATCH = "content of the batch"
    INPUTS = "inputs of the model"
    GENERATORS_AFTER_FORWARD = "random generators after the forward pass"
    NUM_UPDATES = "number of updates that optimizers make"  # one, or none where `step()` was called too often
    LEARNING_RATE = "learning rate"
    LOSS = "loss"
    GRADIENTS = "gradients"
    GRADIENT_NORM = "gradient norm"
    PARAMETERS = "parameters after the update"
    OPTIMIZER = "optimizer after the update"
    GENERATORS_AFTER = "random generators after the update"


_SHOWN = (  # others are digests
    Thing.SAMPLES,
    Thing.NUM_BATCHES,
    Thing.NUM_UPDATES,
    Thing.LEARNING_RATE,
    Thing.LOSS,
    Thing.GRADIENT_NORM,
)
_LABELS = {"straight": "without a break", "resumed": "after the resume", "killed": "in the run that is killed"}

ORDER = {thing: number for number, thing in enumerate(Thing)}


@dataclass(frozen=True)
class Difference:
    """One thing that differs at one update on one rank.

    `expected` is what the first of the two runs has, `actual` what the second has; `names` are the tensors, generators
    or options in question.
    """

    step: int
    thing: Thing
    rank: int
    expected: Any = None
    actual: Any = None
    names: tuple[str, ...] = ()

    def describe(self, runs: tuple[str, str]) -> str:
        """Return it in words, given the names of the two runs."""
        where = f"step {self.step}, rank {self.rank}: {self.thing.value}"
        if self.names:
            more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
            return f"{where} ({', '.join(self.names[:3])}{more})"
        if self.thing not in _SHOWN:
            return where
        one, other = (_LABELS.get(run, "in the repeated run") for run in runs)
        return f"{where}: {show(self.expected)} {one}, {show(self.actual)} {other}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "thing": self.thing.name.lower(), "names": list(self.names)}


def show(value: Any) -> str:
    """Return a value as people read it."""
    if value is None or value == []:
        return "nothing"
    if isinstance(value, list):
        return ", ".join(map(show, value))
    return repr(value) if isinstance(value, float) else str(value)


def compare(expected: Attempt, actual: Attempt) -> list[Difference]:
    """Return what differs at the updates that both have, the first and most causal difference first.

    Both ran on the same number of ranks. `actual` may have begun later: its beginning is compared with what `expected`
    was after the same update.
    """
    found = [*compare_beginnings(expected, actual)]
    for step in sorted({step for each in actual.ranks for step in each.steps}):
        pairs = zip(expected.ranks, actual.ranks, strict=False)
        for rank, (first, second) in enumerate(pairs):
            if step in first.steps and step in second.steps:
                found += _compare_step(step, rank, first.steps[step], second.steps[step])
    return sorted(found, key=lambda each: (each.step, ORDER[each.thing], each.rank))


# Learning rates are looked at where they are used.
_NOT_COMPARED = "param_groups.*lr"


def compare_beginnings(expected: Attempt, actual: Attempt) -> Iterator[Difference]:
    """Yield what `actual` has begun with other than `expected` had after the same update."""
    second = actual.begin
    if second is None:
        return
    step = int(second["step"])
    first = expected.begin if step == expected.first_step else next(iter(expected.get_step(step)), None)
    if first is None:
        return
    for thing, key in ((Thing.PARAMETERS_BEFORE, "models"), (Thing.OPTIMIZER_BEFORE, "optimizers")):
        names = _find_different_names(first.get(key), second.get(key))
        if names:
            yield Difference(step + 1, thing, 0, names=names)


def _find_different_names(first: Any, second: Any) -> tuple[str, ...]:
    """Compare lists of fingerprints by name; those of other ranks are not kept, and equal."""
    if first is None or second is None:
        return ()
    names: list[str] = []
    for index in range(max(len(first), len(second))):
        one = first[index] if index < len(first) else {}
        other = second[index] if index < len(second) else {}
        for name in {**one, **other}:
            if one.get(name) != other.get(name) and not fnmatch.fnmatchcase(name, _NOT_COMPARED):
                names.append(name if index == 0 else f"{index}.{name}")
    return tuple(names)


def _compare_step(step: int, rank: int, first: Record, second: Record) -> Iterator[Difference]:
    def make(thing: Thing, key: Callable[[Record], Any]) -> Iterator[Difference]:
        one, other = key(first), key(second)
        if repr(one) != repr(other):  # NaN equals NaN
            yield Difference(step, thing, rank, one, other)

    def make_named(thing: Thing, one: Any, other: Any) -> Iterator[Difference]:
        names = _find_different_generators(one, other)
        if names:
            yield Difference(step, thing, rank, names=names)

    if len(first["batches"]) != len(second["batches"]):
        yield from make(Thing.NUM_BATCHES, lambda each: len(each["batches"]))
    elif len(first["inputs"]) != len(second["inputs"]):
        yield from make(Thing.NUM_BATCHES, lambda each: len(each["inputs"]))
    yield from make(Thing.INDICES, lambda each: [batch["indices"] for batch in each["batches"]])
    yield from make(Thing.BATCH, lambda each: [batch["digest"] for batch in each["batches"]])
    yield from make_named(Thing.GENERATORS, _list_generators(first), _list_generators(second))
    yield from make(Thing.INPUTS, lambda each: each["inputs"])
    yield from make_named(
        Thing.GENERATORS_AFTER_FORWARD, first["generators_after_forward"], second["generators_after_forward"]
    )
    yield from make(Thing.NUM_UPDATES, lambda each: len(each["updates"]))
    yield from make(Thing.LEARNING_RATE, get_lrs)
    yield from make(Thing.LOSS, get_losses)
    yield from make(Thing.GRADIENTS, lambda each: [update["gradients"] for update in each["updates"]])
    yield from make(Thing.GRADIENT_NORM, lambda each: each["gradient_norms"])
    for thing, kind in ((Thing.PARAMETERS, "models"), (Thing.OPTIMIZER, "optimizers")):
        names = _find_different_names(first.get(kind), second.get(kind))
        if names:
            yield Difference(step, thing, rank, names=names)
    yield from make_named(Thing.GENERATORS_AFTER, [first["generators"]], [second["generators"]])


def _list_generators(record: Record) -> list[Mapping[str, str]]:
    return [batch["generators"] for batch in record["batches"]]


def _find_different_generators(first: Sequence[Mapping[str, str]], second: Sequence[Mapping[str, str]]) -> Any:
    pairs = zip(first, second, strict=False)
    return tuple(
        sorted({name for one, other in pairs for name in {**one, **other} if one.get(name) != other.get(name)})
    )


def get_losses(record: Record) -> list[float]:
    """Return the losses of one update: those that the script reported, else those that it went backward from."""
    return list(record["losses"] or record["backward_losses"])


def get_lrs(record: Record) -> list[float]:
    """Return the learning rates that one update was made with, of all optimizers and groups."""
    return [rate for update in record["updates"] for rate in update["lrs"]]


def get_norm(record: Record) -> float | None:
    """Return the gradient norm that clipping has reported, else that of the rank's own share; None without updates."""
    if record["gradient_norms"]:
        return float(record["gradient_norms"][-1])
    return float(sum(update["norm"] ** 2 for update in record["updates"]) ** 0.5) if record["updates"] else None


def find_shift(expected: Attempt, actual: Attempt, step: int, rank: int) -> int | None:
    """Return by how many batches what `actual` trains on is ahead of `expected` from an update on.

    Negative where it lags behind; None if its batches are not found there. Where they cannot be recognised by what the
    model has taken, since that is drawn anew, they are by what the loaders have handed out.
    """
    shifts = (_find_shift(get, expected, actual, step, rank) for get in (_get_inputs, _get_batches))
    return next((shift for shift in shifts if shift is not None), None)


_Get = Callable[[Record], list[str]]


def _get_inputs(record: Record) -> list[str]:
    return list(record["inputs"])


def _get_batches(record: Record) -> list[str]:
    return [batch["digest"] for batch in record["batches"]]


def _find_shift(get: _Get, expected: Attempt, actual: Attempt, step: int, rank: int) -> int | None:
    at, all_expected = _list_digests(get, expected, step, rank)
    start, all_actual = _list_digests(get, actual, step, rank)
    tail = all_actual[start:]
    for shift in sorted(range(-at, len(all_expected) - at), key=abs):
        there = all_expected[at + shift :][: len(tail)]
        if shift and len(there) >= min(2, len(tail)) > 0 and there == tail[: len(there)]:
            return shift
    return None


def _list_digests(get: _Get, attempt: Attempt, step: int, rank: int) -> tuple[int, list[str]]:
    """Return the digests of all batches of a rank, and the number of those before an update."""
    steps = attempt.ranks[rank].steps
    digests = [(number, digest) for number in sorted(steps) for digest in get(steps[number])]
    return sum(number < step for number, _ in digests), [digest for _, digest in digests]
