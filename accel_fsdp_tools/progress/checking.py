"""After a restore: do the loaders stand where the records say? A second look that draws and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..rng import RngSnapshot
from .attributes import AttributeStates
from .follow import Follower
from .generators import format_path, identify_kind, read_state
from .places import Places
from .records import LoaderOutcome, LoaderProgress

_OF_POSITION = ("state", "epoch", "batch", "samples", "samples_before_epoch", "iteration", "digest")
_OF_EPOCH = ("epoch", "samples_before_epoch", "iteration")


@dataclass(frozen=True)
class ProgressDifference:
    """Something of one loader that is not what its record says."""

    index: int
    key: str
    expected: Any
    actual: Any


def find_differences(
    followers: Sequence[Follower], saved: Sequence[LoaderProgress], outcomes: Sequence[LoaderOutcome]
) -> Iterator[ProgressDifference]:
    """Yield what differs between the records and the loaders that they were restored into.

    Of a loader whose pass begins anew only the epoch counts. What is put back when the loader is iterated (the
    random state in the middle of a pass) is not there yet: its record must be what the loader waits with.
    """
    rng = RngSnapshot.capture()
    for item, outcome, follower in zip(saved, outcomes, followers, strict=False):
        is_absent = outcome.status == "absent"
        present = follower.record(item.index) if is_absent else follower.capture(item.index, rng)
        for name in _OF_EPOCH if is_absent else _OF_POSITION:
            expected, actual = getattr(item, name), getattr(present, name)
            if expected != actual:
                yield ProgressDifference(item.index, name, expected, actual)
        iteration = getattr(follower.loader, "iteration", item.iteration)
        if iteration != item.iteration and present.iteration == item.iteration:
            yield ProgressDifference(item.index, "iteration", item.iteration, iteration)
        if not is_absent and item.restorable:
            yield from _compare_states(item, follower.loader)


def _compare_states(item: LoaderProgress, loader: Any) -> Iterator[ProgressDifference]:
    places = Places(loader)
    for path, state in item.moments["now"].generators.items():
        place = places.find(path)
        value = None if place is None else place.value
        if identify_kind(value) is None or not read_state(value).is_same(state):
            yield ProgressDifference(item.index, format_path(path), "the saved generator's state", "another state")
    if item.state != "running":  # else they are put back, as of the pass's beginning, when it goes on
        yield from _compare_attributes(item, places)


def _compare_attributes(item: LoaderProgress, places: Places) -> Iterator[ProgressDifference]:
    for path, expected, actual in item.attributes.get("now", AttributeStates()).list_differences(places):
        yield ProgressDifference(item.index, format_path(path), expected, actual)
