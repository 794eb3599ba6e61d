"""Which checkpoints may go: pure functions from facts about what there is to what may be deleted.

A policy names what it keeps; several together keep what any of them keeps. Two kinds of checkpoints: those that have
been read back from disk against their checksums (verified) and those that have not. Only verified ones count: "the
last three" is as many as it takes to have three verified ones. One that is not verified takes no other's place, and is
itself kept wherever it would be if it were verified. So a disk that spoils what is written to it never costs an older,
good checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from .errors import UsageError


@dataclass(frozen=True)
class CheckpointFacts:
    """What policies may know about one committed checkpoint.

    `order` is its place in the lineage (attempt, then recorded step): never names or the file system's time stamps.
    `created_at` is in seconds since the epoch, as recorded at the save.
    """

    name: str
    order: tuple[int, int]
    created_at: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    size_bytes: int = 0
    checkpoint_id: str = ""
    is_verified: bool = True
    is_pinned: bool = False

    @property
    def step(self) -> int:
        return self.order[1]


@runtime_checkable
class RetentionPolicy(Protocol):
    """Anything that can say which checkpoints stay."""

    def choose_kept(self, checkpoints: Sequence[CheckpointFacts]) -> frozenset[str]:
        """Return the names of those to keep. Pure: the same facts, in whatever order, give the same answer."""
        ...


class _Combinable:
    """`a | b` keeps what either keeps."""

    def __or__(self, other: RetentionPolicy) -> KeepAny:
        mine: Any = self
        return KeepAny((mine, other))


@dataclass(frozen=True)
class KeepAny(_Combinable):
    """Keeps what any of its policies keeps."""

    policies: tuple[RetentionPolicy, ...]

    def choose_kept(self, checkpoints: Sequence[CheckpointFacts]) -> frozenset[str]:
        return frozenset().union(*(policy.choose_kept(checkpoints) for policy in self.policies))


@dataclass(frozen=True)
class KeepLast(_Combinable):
    """Keeps the newest `count` verified ones along the lineage, and whatever is newer than the last of these."""

    count: int

    def __post_init__(self) -> None:
        if not _is_whole(self.count) or self.count < 1:
            raise UsageError(
                f"keep_last is {self.count!r}; at least the newest checkpoint has to stay. Use None to keep all.",
                actual=self.count,
            )

    def choose_kept(self, checkpoints: Sequence[CheckpointFacts]) -> frozenset[str]:
        return _take_first(sorted(checkpoints, key=_by_order, reverse=True), self.count)


@dataclass(frozen=True)
class KeepEvery(_Combinable):
    """Keeps those whose step is a multiple of `num_steps`, for good."""

    num_steps: int

    def __post_init__(self) -> None:
        if not _is_whole(self.num_steps) or self.num_steps < 1:
            raise UsageError(f"keep_every is {self.num_steps!r}; give a number of steps", actual=self.num_steps)

    def choose_kept(self, checkpoints: Sequence[CheckpointFacts]) -> frozenset[str]:
        return frozenset(each.name for each in checkpoints if each.step > 0 and each.step % self.num_steps == 0)


@dataclass(frozen=True)
class KeepBest(_Combinable):
    """Keeps the `count` verified ones with the best value of a metric, as recorded at their save.

    Checkpoints without that metric, or with NaN or an infinity for it, are never among the best. Of equal values the
    newer one is the better.
    """

    metric: str
    mode: str
    count: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise UsageError(f"keep_best: mode is {self.mode!r}; use 'min' or 'max'", actual=self.mode)
        if not self.metric or not isinstance(self.metric, str):
            raise UsageError(f"keep_best: {self.metric!r} is no name of a metric", actual=self.metric)
        if not _is_whole(self.count) or self.count < 1:
            raise UsageError(f"keep_best: {self.count!r} is no number of checkpoints", actual=self.count)

    def choose_kept(self, checkpoints: Sequence[CheckpointFacts]) -> frozenset[str]:
        sign = 1 if self.mode == "max" else -1
        known = [each for each in checkpoints if _is_finite(each.metrics.get(self.metric))]
        best = sorted(known, key=lambda each: (sign * each.metrics[self.metric], *_by_order(each)), reverse=True)
        return _take_first(best, self.count)


@dataclass(frozen=True)
class KeepSpaced(_Combinable):
    """Keeps at most one per `seconds`, for good: the first, and each that was made so long after the one before it.

    Counted from the oldest, so that what is kept once stays, whatever comes later.
    """

    seconds: float

    def __post_init__(self) -> None:
        if isinstance(self.seconds, bool) or not _is_finite(self.seconds) or self.seconds <= 0:
            raise UsageError(f"keep_every_s is {self.seconds!r}; give a number of seconds", actual=self.seconds)

    def choose_kept(self, checkpoints: Sequence[CheckpointFacts]) -> frozenset[str]:
        kept = set()
        due = -math.inf
        for each in sorted(checkpoints, key=lambda each: (each.created_at, *_by_order(each))):
            if each.created_at >= due:
                kept.add(each.name)
                if each.is_verified:
                    due = each.created_at + self.seconds
        return frozenset(kept)


@dataclass(frozen=True)
class KeepPinned(_Combinable):
    """Keeps those of the given steps or ids (`lineage.checkpoint_id` of the manifest)."""

    steps: tuple[int, ...] = ()
    ids: tuple[str, ...] = ()

    def choose_kept(self, checkpoints: Sequence[CheckpointFacts]) -> frozenset[str]:
        return frozenset(each.name for each in checkpoints if each.step in self.steps or each.checkpoint_id in self.ids)


def choose_deletions(checkpoints: Sequence[CheckpointFacts], policy: RetentionPolicy | None) -> list[CheckpointFacts]:
    """Return those that may go, oldest first; without a policy none may.

    Whatever the policy says, these stay: the newest verified one, everything newer than it along the lineage, and
    those that are pinned. Where nothing is verified nothing may go.
    """
    good = [each.order for each in checkpoints if each.is_verified]
    if policy is None or not good:
        return []
    kept, newest_good = policy.choose_kept(checkpoints), max(good)
    condemned = [
        each for each in checkpoints if each.name not in kept and not each.is_pinned and each.order < newest_good
    ]
    return sorted(condemned, key=_by_order)


def make_policy(
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: KeepBest | Sequence[Any] | None = None,
    keep_every_s: float | None = None,
) -> RetentionPolicy | None:
    """Return the policy that keeps what any of the given rules keeps; None if none is given.

    Args:
        keep_best: a `KeepBest`, or its arguments: ("loss", "min") or ("loss", "min", 3).

    Raises:
        UsageError: a rule makes no sense.
    """
    policies: list[RetentionPolicy] = []
    if keep_last is not None:
        policies.append(KeepLast(keep_last))
    if keep_every is not None:
        policies.append(KeepEvery(keep_every))
    if keep_best is not None:
        policies.append(keep_best if isinstance(keep_best, KeepBest) else _parse_best(keep_best))
    if keep_every_s is not None:
        policies.append(KeepSpaced(keep_every_s))
    return KeepAny(tuple(policies)) if policies else None


def _parse_best(given: Sequence[Any]) -> KeepBest:
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise UsageError(
            f"keep_best is {given!r}; give a metric's name, 'min' or 'max', and how many: ('loss', 'min', 3)",
            actual=given,
        )
    return KeepBest(*given)


def _take_first(ranked: Iterable[CheckpointFacts], count: int) -> frozenset[str]:
    """Return the names up to the `count`-th verified one; all, if there are fewer."""
    kept = set()
    num_verified = 0
    for each in ranked:
        if num_verified == count:
            break
        kept.add(each.name)
        num_verified += each.is_verified
    return frozenset(kept)


def _by_order(each: CheckpointFacts) -> tuple[int, int, str]:
    return (*each.order, each.name)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
