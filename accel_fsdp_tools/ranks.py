"""Agreement between ranks: one rank's failure becomes the same error on every rank, and nobody waits for ever.

The ranks first meet in the store of the process group, where whoever is missing can be named. Control messages then
travel over a gloo group of their own, so that they need no GPU memory and never collide with the collectives of the
training. Every function here is collective unless it says otherwise, and works in a single process without
`torch.distributed` too.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

from .errors import AccelFsdpError, CallOrderError, RankFailedError, RankMissingError, UsageError

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 1800.0
_TIMEOUT_VARIABLE = "ACCEL_FSDP_TOOLS_TIMEOUT_S"
_SLICE_S = 30.0  # a longer wait would keep the store from other threads, NCCL's watchdog among them
_LINGER_S = 2.0
_ANSWER_S = 5.0  # beyond the timeout, for the store to answer


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
    """Return the gloo group for control messages and small reductions.

    The first call makes it, and is collective. Making a group waits half an hour for a rank that does not come, so
    all ranks meet first.
    """
    global _control_group
    import torch.distributed as dist

    default = dist.distributed_c10d._get_default_group()
    if _control_group is None or _control_group[0] is not default:
        wait_for_ranks("making the group for control messages")
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=get_timeout_s()))
        _control_group = (default, group)
    return _control_group[1]


# Calls of `wait_for_ranks` that this process has made. It is not started anew with a new process group: that may use
# the same store again, where keys of the old one lie.
_generation = 0
_uncleared: list[int] = []  # generations whose keys are still in the store


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
    global _generation
    world_size = get_world_size()
    if world_size == 1:
        return
    import torch.distributed as dist

    seconds = get_timeout_s() if timeout_s is None else timeout_s
    _generation += 1
    meeting = _Meeting(dist.distributed_c10d._get_default_store(), _generation, get_rank(), world_size)
    _uncleared.append(_generation)
    verdict = _ask_store(what, seconds, lambda: meeting.hold(what, seconds))
    if verdict.missing is not None:
        raise _explain_missing(what, verdict, meeting.rank)
    if verdict.calls:
        raise _explain_calls(verdict.calls)


@dataclass(frozen=True)
class _Verdict:
    """What a meeting came to. Both are empty if all ranks arrived with the same call."""

    missing: tuple[int, ...] | None = None
    seconds: float = 0.0
    decided_by: int = 0
    calls: dict[str, list[int]] = field(default_factory=dict)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> _Verdict:
        raw = json.loads(text)
        missing = None if raw["missing"] is None else tuple(raw["missing"])
        return cls(missing, float(raw["seconds"]), int(raw["decided_by"]), raw["calls"])


class _Meeting:
    """One generation of `wait_for_ranks`, as keys in a store. Each rank has a handful of requests if all goes well.

    A verdict is written once, by whoever is first: the last rank to arrive, or one whose time is up. So the ranks
    cannot come to different conclusions.
    """

    def __init__(self, store: Any, generation: int, rank: int, world_size: int) -> None:
        self.store, self.generation, self.rank, self.world_size = store, generation, rank, world_size

    def _key(self, name: str, generation: int | None = None) -> str:
        return f"accel_fsdp_tools/{self.generation if generation is None else generation}/{name}"

    def hold(self, what: str, seconds: float) -> _Verdict:
        deadline = time.monotonic() + seconds
        verdict = self._arrive(what)
        while verdict is None:
            left = deadline - time.monotonic()
            if left <= 0:
                verdict = self._settle(_Verdict(self._find_missing(), seconds, self.rank))
            elif self._wait(min(left, _SLICE_S)):
                verdict = _Verdict.decode(self.store.get(self._key("verdict")))
        if verdict.missing is None:
            self._clear()
        if verdict.missing is not None or verdict.calls:
            self._linger(self.world_size - len(verdict.missing or ()))
        return verdict

    def _arrive(self, what: str) -> _Verdict | None:
        self.store.set(self._key(f"call/{self.rank}"), what)
        if self.store.compare_set(self._key("call"), "", what).decode() != what:
            self.store.set(self._key("differs"), "yes")
        if self.store.add(self._key("count"), 1) < self.world_size:
            return None
        calls: dict[str, list[int]] = {}
        if self.store.check([self._key("differs")]):
            for rank in range(self.world_size):
                calls.setdefault(self.store.get(self._key(f"call/{rank}")).decode(), []).append(rank)
        return self._settle(_Verdict(calls=calls))

    def _wait(self, seconds: float) -> bool:
        """Whether there is a verdict, which is waited for."""
        timeout = timedelta(seconds=max(seconds, 0.01))  # stores take less than a millisecond for no timeout at all
        try:
            self.store.wait([self._key("verdict")], timeout)
        except RuntimeError:  # time is up; stores have different classes for it. A store that is gone fails again:
            return bool(self.store.check([self._key("verdict")]))
        return True

    def _settle(self, mine: _Verdict) -> _Verdict:
        return _Verdict.decode(self.store.compare_set(self._key("verdict"), "", mine.encode()))

    def _find_missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if not self.store.check([self._key(f"call/{rank}")]))

    def _linger(self, num_present: int) -> None:
        """Let all ranks read a bad verdict before rank 0, which often keeps the store, can end of it."""
        num_seen = self.store.add(self._key("seen"), 1)
        deadline = time.monotonic() + _LINGER_S
        while self.rank == 0 and num_seen < num_present and time.monotonic() < deadline:
            time.sleep(0.02)
            num_seen = self.store.add(self._key("seen"), 0)

    def _clear(self) -> None:
        """Remove the keys of earlier generations: that all ranks are here means that they have left those."""
        shared = ("call", "differs", "count", "verdict", "seen") if self.rank == 0 else ()
        for generation in [each for each in _uncleared if each < self.generation]:
            for name in (f"call/{self.rank}", *shared):
                self.store.delete_key(self._key(name, generation))
            _uncleared.remove(generation)


def _ask_store(what: str, seconds: float, ask: Callable[[], _Verdict]) -> _Verdict:
    """Run `ask` in a thread: most requests to a store have no timeout, and the process that keeps it may hang."""
    answers: list[_Verdict | Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=work, name="accel-fsdp-meeting", daemon=True)
    thread.start()
    thread.join(min(seconds + _ANSWER_S, threading.TIMEOUT_MAX))
    answer = answers[0] if answers else None
    if isinstance(answer, _Verdict):
        return answer
    if answer is not None and not isinstance(answer, RuntimeError):
        raise answer
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    missing = () if of_agent else (0,)
    keeper = "torchrun's agent on the first node" if of_agent else "rank 0"
    raise RankMissingError(
        f"{what}: the store of the process group does not answer. The process that keeps it, {keeper}, has died or "
        "hangs, or the network is down. Look at its log.",
        what=what,
        rank=None if of_agent else 0,
        missing_ranks=missing,
        failed_ranks=missing,
        cause_type=None if answer is None else type(answer).__name__,
        cause_message=None if answer is None else str(answer),
    ) from answer


def _explain_missing(what: str, verdict: _Verdict, rank: int) -> RankMissingError:
    missing = verdict.missing or ()
    named = _name_ranks(missing) if missing else "another rank"
    text = (
        f"{what}: {named} did not arrive within {verdict.seconds:g} s. Look at that rank's log: it has died, hangs, "
        f"or did not make the same call. {_TIMEOUT_VARIABLE} sets how long to wait."
    )
    if rank in missing:
        text = (
            f"{what}: this rank, {rank}, came too late: rank {verdict.decided_by} had waited {verdict.seconds:g} s and "
            f"given up. Missing then: {named}. If ranks may be that far apart, set {_TIMEOUT_VARIABLE} higher."
        )
    return RankMissingError(
        text, what=what, rank=missing[0] if missing else None, missing_ranks=missing, failed_ranks=missing
    )


def _explain_calls(calls: dict[str, list[int]]) -> CallOrderError:
    made = "; ".join(f"{_name_ranks(ranks)}: {call}" for call, ranks in calls.items())
    first, other = list(calls.items())[:2]  # by rank: the first is rank 0's
    return CallOrderError(
        f"The ranks made different calls at the same time ({made}). Every rank has to make the same calls in the same "
        "order; look for a condition around them that depends on the rank.",
        rank=other[1][0],
        expected=first[0],
        actual=other[0],
        calls=calls,
    )


def _name_ranks(ranks: Iterable[int]) -> str:
    return f"rank(s) {', '.join(map(str, ranks))}"


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
