"""Agreement between ranks: one rank's failure becomes the same error on every rank, and nobody waits for ever.

The ranks first meet in the store of the process group, where whoever is missing can be named. Control messages then
travel over a gloo group of their own, so that they need no GPU memory and never collide with the collectives of the
training. Where that breaks, since a rank has died or does not answer in time, the others meet in the store again and
name it; the next message makes a new group. A thread that works in the background has a group of its own again
(`use_channel`). Every function here is collective unless it says otherwise, and works in a single process without
`torch.distributed` too.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from .errors import AccelFsdpError, RankFailedError, RankMissingError, UsageError
from .meetings import TIMEOUT_VARIABLE, Meeting, find_missing, meet

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 1800.0


def get_timeout_s() -> float:
    """Seconds that a rank waits for the others (environment: ACCEL_FSDP_TOOLS_TIMEOUT_S). Not collective."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = -1.0
    if not timeout_s > 0:
        raise UsageError(f"{TIMEOUT_VARIABLE} is {text!r}; give a positive number of seconds", actual=text)
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


class Channel:
    """What one thread of each rank talks over: a gloo group, and a series of meetings in the store.

    Threads must not share one, or messages of the one would be taken for answers to the other. `use_channel` puts a
    thread on one; all others are on the main one. The store's own connection answers one request at a time, so a
    channel other than the main one gets a connection of its own: else a thread that waits there would keep the
    others of its process from the store, perhaps those that it waits for.
    """

    def __init__(self, name: str = "") -> None:
        # torchrun's agent keeps its store when it restarts the ranks in place, and with it the keys of those before.
        # Where each start has a store of its own there are none, and agents count alone: that of a node which has
        # come back says 0 where the others say 1.
        shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shares_store else "0"
        parts = ["accel_fsdp_tools", *([] if restart == "0" else [f"restart {restart}"]), *([name] if name else [])]
        self.series = "/".join(parts)
        self._owns_store = bool(name)
        self._group: tuple[Any, Any] | None = None  # (the default group it was made under, the group)
        self._store: tuple[Any, Any] | None = None  # likewise
        # Meetings that this process has held. Not started anew with a new process group: that may use the same store
        # again, where keys of the old one lie.
        self._generation = 0
        self._uncleared: list[int] = []
        self._num_breaks = 0  # groups of this channel that have broken: once each, on every rank

    def get_group(self) -> Any:
        """Return the gloo group. The first call makes it, and is collective, on the threads that train.

        Making a group waits half an hour for a rank that does not come, so all ranks meet first.
        """
        import torch.distributed as dist

        default = dist.distributed_c10d._get_default_group()
        if self._group is None or self._group[0] is not default:
            wait_for_ranks("making the group for control messages")
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=get_timeout_s()))
            self._group = (default, group)
        return self._group[1]

    def close(self) -> None:
        """Give the group and the connection up. Not collective; nothing may be under way on them."""
        self._close_group()
        self._store = None

    def _close_group(self) -> None:
        import torch.distributed as dist

        if (
            self._group is not None
            and _is_distributed()
            and self._group[0] is dist.distributed_c10d._get_default_group()
        ):
            dist.destroy_process_group(self._group[1])
        self._group = None

    def call_meeting(self) -> Meeting:
        """Return the next meeting of the series."""
        self._generation += 1
        return Meeting(
            self._get_store(),
            self._generation,
            get_rank(),
            get_world_size(),
            series=self.series,
            uncleared=self._uncleared,
        )

    def explain_break(self, what: str, waited_s: float) -> RankMissingError:
        """Give up the group, which has broken, and find out with the other ranks whose fault it is.

        Every rank comes here once per group: giving it up lets those that still wait on it fail too.
        """
        with contextlib.suppress(RuntimeError):
            self._close_group()  # the connection stays: if the keeper of the store is dead, a new one is tried for long
        self._num_breaks += 1
        series = f"{self.series}/break"
        return find_missing(
            Meeting(self._get_store(), self._num_breaks, get_rank(), get_world_size(), series=series), what, waited_s
        )

    def _get_store(self) -> Any:
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()
        if not self._owns_store:
            return store
        if self._store is None or self._store[0] is not store:
            try:
                self._store = (store, store.clone())
            except RuntimeError:  # a kind of store that cannot: it does not keep connections either
                self._store = (store, store)
        return self._store[1]


_main = Channel()
_channel: ContextVar[Channel] = ContextVar("accel_fsdp_tools_channel", default=_main)  # a new thread: the default


@contextlib.contextmanager
def use_channel(channel: Channel) -> Iterator[None]:
    """Let every function of this module use `channel`, on this thread, for the duration of the context."""
    token = _channel.set(channel)
    try:
        yield
    finally:
        _channel.reset(token)


def get_control_group() -> Any:
    """Return the gloo group for control messages and small reductions. Collective on a channel's first call."""
    return _channel.get().get_group()


def wait_for_ranks(what: str, *, timeout_s: float | None = None) -> None:
    """Wait until every rank has called this with the same `what`, or raise the same on every rank that has.

    The ranks meet in the store of the default process group, before any collective: so a missing rank, rank 0 as
    well as any other, is named on all the others at the same time, and ranks that make different calls learn of it.
    The first rank whose time is up decides for all; one that comes later raises too.

    Args:
        what: the call that is made, for messages; it must be the same on every rank.
        timeout_s: how long to wait (default: `get_timeout_s()`).

    Raises:
        RankMissingError: a rank did not arrive within `timeout_s`.
        CallOrderError: all ranks arrived, with different calls.
    """
    if get_world_size() == 1:
        return
    meet(_channel.get().call_meeting(), what, get_timeout_s() if timeout_s is None else timeout_s)


@contextlib.contextmanager
def naming_missing(what: str) -> Iterator[None]:
    """For a collective over the control group: whoever has died, or does not answer in time, is named to the others.

    Raises:
        RankMissingError: somebody has not. Those that are still at work when another dies may be named with it.
    """
    started = time.monotonic()
    try:
        yield
    except AccelFsdpError:  # the group was to be made, and could not
        raise
    except RuntimeError as error:  # gloo's, of whatever class: time is up, or a connection was closed
        raise _channel.get().explain_break(what, time.monotonic() - started) from error


def gather_all(value: T, what: str = "exchanging messages") -> list[T]:
    """Return every rank's `value`, in rank order, on every rank. Values must be picklable and small.

    Raises:
        RankMissingError: a rank has died, or did not come within `get_timeout_s()`.
    """
    world_size = get_world_size()
    if world_size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world_size
    with naming_missing(what):
        dist.all_gather_object(values, value, group=get_control_group())
    return values


def run_together(what: str, part: Callable[[], T]) -> list[T]:
    """Run `part` on every rank and return all results; if any rank fails, raise the same error on every rank.

    `part` itself must not enter a collective that a failing rank could leave others waiting in. An error of this
    package keeps its class and gains the fact `rank`; any other becomes a `RankFailedError` whose `__cause__` is
    the original on the rank where it happened. A rank that dies, or does not come within `get_timeout_s()`, is named
    by a `RankMissingError` on the others, and on itself should it come later. Errors that derive from BaseException
    only are handled as well (torch's CheckpointException is one), except KeyboardInterrupt and SystemExit, which are
    raised at once.
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
    outcomes = gather_all(outcome, what)
    raise_first_failure(what, outcomes, original)
    return [other.value for other in outcomes]  # type: ignore[misc]


def run_on_each(what: str, part: Callable[[], T]) -> T:
    """Run `part` on every rank as `run_together` does, and return this rank's own result alone."""
    results: list[T] = []
    run_together(what, lambda: results.append(part()))
    return results[0]


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
    outcome = broadcast(outcome, what)
    assert outcome is not None  # noqa: S101
    raise_first_failure(what, [outcome], original)
    return outcome.value  # type: ignore[return-value]


def broadcast(value: T, what: str = "hearing from rank 0") -> T:
    """Return rank 0's `value` on every rank. Values must be picklable and small.

    Raises:
        RankMissingError: a rank has died, or did not come within `get_timeout_s()`.
    """
    if get_world_size() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    with naming_missing(what):
        dist.broadcast_object_list(box, src=0, group=get_control_group())
    return box[0]


def _describe_failure(rank: int, error: BaseException) -> Outcome[Any]:
    if isinstance(error, AccelFsdpError):
        known = error.rank is not None
        return Outcome(rank=rank, error=error if known else error.with_facts(rank=rank))
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    rank, error = _unwrap(rank, error)
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    return Outcome(rank=rank, cause_type=name, cause_message=str(error), cause_traceback=text)


def _unwrap(rank: int, error: BaseException) -> tuple[int, BaseException]:
    """Return whose error it is and the error itself: DCP raises one of its own on every rank, which holds them."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        first = min(failures)
        inner = failures[first][0] if isinstance(failures[first], tuple) else failures[first]
        if isinstance(first, int) and isinstance(inner, BaseException):
            return first, inner
    return rank, error


def raise_first_failure(what: str, outcomes: list[Outcome[T]], original: BaseException | None = None) -> None:
    """Raise what the lowest failing rank reported, the same on every rank; return if none failed. Not collective."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        return
    first = min(failed, key=lambda outcome: outcome.rank)
    if first.error is not None:
        raise first.error from (original if original is not first.error else None)
    ranks = tuple(sorted({outcome.rank for outcome in failed}))
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
