"""Which checkpoints may go: pure functions from what there is to what may be deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from .errors import UsageError


class Ordered(Protocol):
    """Anything with a place in the lineage, oldest first."""

    @property
    def order(self) -> tuple[int, int]: ...


C = TypeVar("C", bound=Ordered)


def choose_deletions(checkpoints: Sequence[C], *, keep_last: int | None) -> list[C]:
    """Return those that are not among the newest `keep_last`, oldest first; `None` keeps all.

    The order is that of the lineage (attempt, then recorded step), never time stamps or names. The newest one is
    never returned.

    Raises:
        UsageError: `keep_last` is below 1.
    """
    if keep_last is None:
        return []
    if keep_last < 1:
        raise UsageError(
            f"keep_last is {keep_last}; at least the newest checkpoint has to stay. Use None to keep all.",
            actual=keep_last,
        )
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.order)[:-keep_last]
