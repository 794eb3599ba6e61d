"""Agreement between ranks: one rank's failure becomes the same error on every rank, and nobody waits for ever.

Control messages travel over a gloo group of their own, so that they need no GPU memory and never collide with the
collectives of the training. Every function here is collective unless it says otherwise, and works in a single
process without `torch.distributed` too.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from .errors import AccelFsdpError, RankFailedError, RankMissingError, UsageError

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 1800.0
_TIMEOUT_VARIABLE = "ACCEL_FSDP_TOOLS_TIMEOUT_S"


def get_timeout_s() -> float:
    """Seconds that a rank waits for the others (environment: ACCEL_FSDP_TOOLS_TIMEOUT_S). Not collective."""
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = -1.0
    if not timeout_s > 0:
        raise UsageError(f"{_TIMEOUT_VARIABLE} is {text!r}; give a positive number of seconds", actual=text)
    return timeout_s


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What one rank's part of a joint stage came to: a value, or the facts of a failure."""

    rank: int
    value: T | None = None
    error: AccelFsdpError | None = None
    cause_type: str | None = None
    cause_message: str | None = None
    cause_traceback: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or self.cause_type is not None


def _is_distributed() -> bool:
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())


def get_rank() -> int:
    """This process's rank, 0 without `torch.distributed`. Not collective."""
    import torch.distributed as dist

    return int(dist.get_rank()) if _is_distributed() else 0


def get_world_size() -> int:
    """Number of ranks, 1 without `torch.distributed`. Not collective."""
    import torch.distributed as dist

    return int(dist.get_world_size()) if _is_distributed() else 1


_control_group: tuple[Any, Any] | None = None  # (the default group it was made under, the group)


def get_control_group() -> Any:
    """Return the gloo group for control messages and small reductions. Collective on the first call."""
    global _control_group
    import torch.distributed as dist

    default = dist.distributed_c10d._get_default_group()
    if _control_group is None or _control_group[0] is not default:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=get_timeout_s()))
        _control_group = (default, group)
    return _control_group[1]


def wait_for_ranks(what: str, *, timeout_s: float | None = None) -> None:
    """Wait until every rank has called this, or raise on those that did, naming the ranks that are missing.

    Raises:
        RankMissingError: a rank did not arrive within `timeout_s` (default: `get_timeout_s()`).
    """
    if get_world_size() == 1:
        return
    import torch.distributed as dist

    seconds = get_timeout_s() if timeout_s is None else timeout_s
    try:
        dist.monitored_barrier(group=get_control_group(), timeout=timedelta(seconds=seconds), wait_all_ranks=True)
    except RuntimeError as error:
        missing = _parse_missing_ranks(str(error))
        named = f"rank(s) {', '.join(map(str, missing))}" if missing else "another rank"
        raise RankMissingError(
            f"{what}: {named} did not arrive within {seconds:.0f} s. Look at that rank's log: it has died, hangs, "
            f"or did not make the same call. {_TIMEOUT_VARIABLE} sets how long to wait.",
            what=what,
            rank=missing[0] if missing else None,
            missing_ranks=missing,
            failed_ranks=missing,
            cause_type=type(error).__name__,
            cause_message=str(error),
        ) from error


def _parse_missing_ranks(text: str) -> tuple[int, ...]:
    # torch 2.13: "Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms"
    match = re.search(r"[Rr]anks? ([\d, ]+) failed to pass", text)
    return tuple(int(part) for part in re.findall(r"\d+", match.group(1))) if match else ()


def gather_all(value: T) -> list[T]:
    """Return every rank's `value`, in rank order, on every rank. Values must be picklable and small."""
    world_size = get_world_size()
    if world_size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value, group=get_control_group())
    return values


def run_together(what: str, part: Callable[[], T]) -> list[T]:
    """Run `part` on every rank and return all results; if any rank fails, raise the same error on every rank.

    `part` itself must not enter a collective that a failing rank could leave others waiting in. An error of this
    package keeps its class and gains the fact `rank`; any other becomes a `RankFailedError` whose `__cause__` is
    the original on the rank where it happened. Errors that derive from BaseException only are handled as well
    (torch's CheckpointException is one), except KeyboardInterrupt and SystemExit, which are raised at once.
    """
    rank = get_rank()
    original: BaseException | None = None
    outcome: Outcome[T]
    try:
        outcome = Outcome(rank=rank, value=part())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        original = error
        outcome = _describe_failure(rank, error)
    outcomes = gather_all(outcome)
    raise_first_failure(what, outcomes, original)
    return [other.value for other in outcomes]  # type: ignore[misc]


def run_on_main(what: str, part: Callable[[], T]) -> T:
    """Run `part` on rank 0 alone and return its result on every rank; its failure is raised on every rank."""
    rank = get_rank()
    original: BaseException | None = None
    outcome: Outcome[T] | None = None
    if rank == 0:
        try:
            outcome = Outcome(rank=0, value=part())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            original = error
            outcome = _describe_failure(0, error)
    outcome = broadcast(outcome)
    assert outcome is not None  # noqa: S101
    raise_first_failure(what, [outcome], original)
    return outcome.value  # type: ignore[return-value]


def broadcast(value: T) -> T:
    """Return rank 0's `value` on every rank. Values must be picklable and small."""
    if get_world_size() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, group=get_control_group())
    return box[0]


def _describe_failure(rank: int, error: BaseException) -> Outcome[Any]:
    if isinstance(error, AccelFsdpError):
        known = error.rank is not None
        return Outcome(rank=rank, error=error if known else error.with_facts(rank=rank))
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    return Outcome(rank=rank, cause_type=name, cause_message=str(error), cause_traceback=text)


def raise_first_failure(what: str, outcomes: list[Outcome[T]], original: BaseException | None = None) -> None:
    """Raise what the lowest failing rank reported, the same on every rank; return if none failed. Not collective."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        return
    first = failed[0]
    if first.error is not None:
        raise first.error from (original if original is not first.error else None)
    ranks = tuple(outcome.rank for outcome in failed)
    others = f" (ranks {', '.join(map(str, ranks))} failed; this is the first)" if len(ranks) > 1 else ""
    raise RankFailedError(
        f"{what}: rank {first.rank} failed with {first.cause_type}: {first.cause_message}{others}",
        what=what,
        rank=first.rank,
        cause_type=first.cause_type,
        cause_message=first.cause_message,
        cause_traceback=first.cause_traceback,
        failed_ranks=ranks,
    ) from original
