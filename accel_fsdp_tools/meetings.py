"""A meeting of all ranks in the store of the process group, where whoever is missing can be named.

One meeting is one generation of `ranks.wait_for_ranks`. Collective, without any collective of `torch.distributed`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from .errors import CallOrderError, RankMissingError

TIMEOUT_VARIABLE = "ACCEL_FSDP_TOOLS_TIMEOUT_S"
_SLICE_S = 30.0  # a longer wait would keep the store from other threads, NCCL's watchdog among them
_LINGER_S = 2.0
_ANSWER_S = 5.0  # beyond the timeout, for the store to answer
BREAK_S = 5.0  # between the first and the last rank that notices that a group is broken


def meet(meeting: Meeting, what: str, seconds: float) -> None:
    """Hold `meeting`, and raise the same on every rank if somebody is missing or makes another call.

    Raises:
        RankMissingError: a rank did not arrive within `seconds`, or the store does not answer.
        CallOrderError: all ranks arrived, with different calls.
    """
    verdict = _ask_store(what, seconds, lambda: meeting.hold(what, seconds))
    if verdict.missing is not None:
        raise _explain_missing(what, verdict, meeting.rank)
    if verdict.calls:
        raise _explain_calls(verdict.calls)


def find_missing(meeting: Meeting, what: str, waited_s: float) -> RankMissingError:
    """Hold `meeting` of the ranks that have seen a process group break, and return what to raise, the same on each.

    Args:
        what: the stage at which it broke, for the message.
        waited_s: how long this rank had waited there. Of ranks that all come, the one that had waited least was late.
    """
    try:
        verdict = _ask_store(what, BREAK_S, lambda: meeting.hold(f"{waited_s:.3f}", BREAK_S))
    except RankMissingError as error:
        return error
    missing = verdict.missing or ()
    late = tuple(verdict.calls[min(verdict.calls, key=float)]) if verdict.calls else ()
    if meeting.rank in missing:
        text = f"this rank, {meeting.rank}, came too late: rank {verdict.decided_by} had given up on it."
    elif missing:
        text = (
            f"{_name_ranks(missing)} did not answer. Look at that rank's log: it has died, or hangs, or had still work "
            "to do when the connection to another was lost."
        )
    elif late:
        text = f"the connection between the ranks broke, and {_name_ranks(late)} had come last. Look at its log."
    else:
        text = "the connection between the ranks broke, although all are alive. Look at the network."
    named = missing or late
    return RankMissingError(
        f"{what}: {text} {TIMEOUT_VARIABLE} sets how long to wait.",
        what=what,
        rank=named[0] if named else None,
        missing_ranks=named,
        failed_ranks=named,
    )


@dataclass(frozen=True)
class Verdict:
    """What a meeting came to. Both are empty if all ranks arrived with the same call."""

    missing: tuple[int, ...] | None = None
    seconds: float = 0.0
    decided_by: int = 0
    calls: dict[str, list[int]] = field(default_factory=dict)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Verdict:
        raw = json.loads(text)
        missing = None if raw["missing"] is None else tuple(raw["missing"])
        return cls(missing, float(raw["seconds"]), int(raw["decided_by"]), raw["calls"])


class Meeting:
    """One generation of `wait_for_ranks`, as keys in a store. Each rank has a handful of requests if all goes well.

    A verdict is written once, by whoever is first: the last rank to arrive, or one whose time is up. So the ranks
    cannot come to different conclusions.

    Args:
        store: of the default process group, or a connection of its own to that store.
        generation: number of the meeting among those of its series; the same on every rank.
        series: begins the names of the keys. Meetings of two series may be under way at the same time.
        uncleared: generations of the series whose keys are still in the store; kept up to date.
    """

    def __init__(
        self,
        store: Any,
        generation: int,
        rank: int,
        world_size: int,
        *,
        series: str = "accel_fsdp_tools",
        uncleared: list[int] | None = None,
    ) -> None:
        self.store, self.generation, self.rank, self.world_size = store, generation, rank, world_size
        self.series, self.uncleared = series, [] if uncleared is None else uncleared
        self.uncleared.append(generation)

    def _key(self, name: str, generation: int | None = None) -> str:
        return f"{self.series}/{self.generation if generation is None else generation}/{name}"

    def hold(self, what: str, seconds: float) -> Verdict:
        deadline = time.monotonic() + seconds
        verdict = self._arrive(what)
        while verdict is None:
            left = deadline - time.monotonic()
            if left <= 0:
                verdict = self._settle(Verdict(self._find_missing(), seconds, self.rank))
            elif self._wait(min(left, _SLICE_S)):
                verdict = Verdict.decode(self.store.get(self._key("verdict")))
        if verdict.missing is None:
            self._clear()
        if verdict.missing is not None or verdict.calls:
            self._linger(self.world_size - len(verdict.missing or ()))
        return verdict

    def _arrive(self, what: str) -> Verdict | None:
        self.store.set(self._key(f"call/{self.rank}"), what)
        if self.store.compare_set(self._key("call"), "", what).decode() != what:
            self.store.set(self._key("differs"), "yes")
        if self.store.add(self._key("count"), 1) < self.world_size:
            return None
        calls: dict[str, list[int]] = {}
        if self.store.check([self._key("differs")]):
            for rank in range(self.world_size):
                calls.setdefault(self.store.get(self._key(f"call/{rank}")).decode(), []).append(rank)
        return self._settle(Verdict(calls=calls))

    def _wait(self, seconds: float) -> bool:
        """Whether there is a verdict, which is waited for."""
        timeout = timedelta(seconds=max(seconds, 0.01))  # stores take less than a millisecond for no timeout at all
        try:
            self.store.wait([self._key("verdict")], timeout)
        except RuntimeError:  # time is up; stores have different classes for it. A store that is gone fails again:
            return bool(self.store.check([self._key("verdict")]))
        return True

    def _settle(self, mine: Verdict) -> Verdict:
        return Verdict.decode(self.store.compare_set(self._key("verdict"), "", mine.encode()))

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
        for generation in [each for each in self.uncleared if each < self.generation]:
            for name in (f"call/{self.rank}", *shared):
                self.store.delete_key(self._key(name, generation))
            self.uncleared.remove(generation)


def _ask_store(what: str, seconds: float, ask: Callable[[], Verdict]) -> Verdict:
    """Run `ask` in a thread: most requests to a store have no timeout, and the process that keeps it may hang."""
    answers: list[Verdict | Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=work, name="accel-fsdp-meeting", daemon=True)
    thread.start()
    thread.join(min(seconds + _ANSWER_S, threading.TIMEOUT_MAX))
    answer = answers[0] if answers else None
    if isinstance(answer, Verdict):
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


def _explain_missing(what: str, verdict: Verdict, rank: int) -> RankMissingError:
    missing = verdict.missing or ()
    named = _name_ranks(missing) if missing else "another rank"
    text = (
        f"{what}: {named} did not arrive within {verdict.seconds:g} s. Look at that rank's log: it has died, hangs, "
        f"or did not make the same call. {TIMEOUT_VARIABLE} sets how long to wait."
    )
    if rank in missing:
        text = (
            f"{what}: this rank, {rank}, came too late: rank {verdict.decided_by} had waited {verdict.seconds:g} s and "
            f"given up. Missing then: {named}. If ranks may be that far apart, set {TIMEOUT_VARIABLE} higher."
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
