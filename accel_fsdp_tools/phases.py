"""Named points of a save and a load, so that tests and tools can watch or interrupt them.

A point costs one comparison when nobody watches. Names are `<operation>.<point>`, listed in `POINTS`.
Those of a save in the background are reached on its thread, from `save.writing` on, which a save in the foreground has
not. What an observer raises at any of them is an error of that rank, of which all ranks learn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

POINTS: Final[tuple[str, ...]] = (
    "save.begin",
    "save.staged",
    "save.writing",
    "save.delegated",
    "save.fingerprints",
    "save.rng",
    "save.progress",
    "save.synced",
    "save.checksums",
    "save.manifest",
    "save.set_aside",
    "save.renamed",
    "save.committed",
    "prune.begin",
    "prune.set_aside",
    "prune.removed",
)

_observer: Callable[[str], None] | None = None


def set_observer(observer: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Install a function called with each point's name as it is reached; returns the one it replaces."""
    global _observer
    previous, _observer = _observer, observer
    return previous


def reach(point: str) -> None:
    """Tell the observer, if there is one, that this rank has reached `point`."""
    if _observer is not None:
        if point not in POINTS:
            raise ValueError(f"unknown point {point!r}")
        _observer(point)
