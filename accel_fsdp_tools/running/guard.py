"""`RunGuard`: what watches over a run while it trains, in one object for `Checkpointer` and the Trainer's callback.

It takes signals and health checks to all ranks, so that all leave at the same step, keeps the watchdog armed, and
writes the heartbeats. It never saves: its owner does when `step` says so, and then calls `leave`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..errors import AccelFsdpError
from ..ownership import is_running
from ..ranks import gather_all, get_rank, get_world_size, run_on_main, wait_for_ranks
from .agreement import Agreement
from .exits import Preempted, RunStopped, Unhealthy
from .health import Health, HealthCheck, check_health
from .heartbeat import FAILED, FINISHED, RUNNING, STOPPED, Beat, Heartbeat, clear_beats
from .launcher import end_agent, explain_broken_restarts
from .signals import DEFAULT_SIGNALS, SignalWatch, parse_signals
from .watchdog import ENDING, FIRST_STEP, STEP, HangLimits, Watchdog, make_limits

logger = logging.getLogger(__name__)

_LEAVE_S = 10.0
_GO_ON, _PREEMPTED, _UNHEALTHY = 0, 1, 2  # the largest of all ranks' counts


@dataclass(frozen=True)
class Watching:
    """What a `Checkpointer` or the callback was given; see there. Checked when made."""

    on_signal: Sequence[str] = DEFAULT_SIGNALS
    hang_limits: HangLimits | float | None = None
    health: Health = None
    health_every: int = 100
    health_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        parse_signals(self.on_signal)
        make_limits(self.hang_limits)
        check_health(self.health, self.health_every, self.health_timeout_s)


@dataclass(frozen=True)
class Stop:
    """What all ranks have agreed on: to save at this step, and leave.

    Attributes:
        kind: what is raised then.
        reason: which ranks asked for it, and why.
        ends_agent: torchrun's agent does not know, and would start all ranks anew. It knows of a SIGTERM: it sends one
            when it ends the ranks, or begins again with more of them.
    """

    kind: type[RunStopped]
    reason: str
    ends_agent: bool = False


class RunGuard:
    """From `begin` to `close`, or to the end of the process."""

    def __init__(self, root: Path, watching: Watching) -> None:
        self._root, self._watching = root, watching
        self._limits = make_limits(watching.hang_limits)
        self._watchdog = Watchdog()
        self._agreement = Agreement()
        self._signals = SignalWatch(
            parse_signals(watching.on_signal), find_lost=self._find_lost, clean_up=self._clean_up
        )
        self._health: HealthCheck | None = None
        self._heartbeat: Heartbeat | None = None
        self._peers: list[Beat] = []  # the other ranks of this host whose processes can be seen
        self._phases: list[tuple[str, float | None]] = []
        self._problem: str | None = None
        self._left: RunStopped | None = None
        self._is_closed = False

    @property
    def is_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._heartbeat is not None

    # -- life ---------------------------------------------------------------------------------------------------

    def begin(self, run_id: str, attempt: int) -> None:
        """Begin to watch. The root is held. Collective; does nothing if it has begun.

        The watchdog begins with the first phase.
        """
        if self.is_begun:
            return
        beat = Beat.begin(get_rank(), get_world_size(), run_id, attempt)
        before = run_on_main("clearing old heartbeats", lambda: clear_beats(self._root))
        if get_rank() == 0 and (text := _describe_end(before)):
            logger.warning("%s", text)
        if get_rank() == 0 and (text := explain_broken_restarts()):
            logger.warning("%s", text)
        on_host = [each for each in gather_all(beat, "getting to know the ranks") if each.host == beat.host]
        self._peers = [each for each in on_host if each.rank != beat.rank and each.namespace == beat.namespace]
        self._health = HealthCheck(
            self._watching.health,
            every=self._watching.health_every,
            timeout_s=self._watching.health_timeout_s,
            is_first_of_node=on_host[0].rank == beat.rank,
        )
        self._heartbeat = Heartbeat(self._root, beat)
        atexit.register(self._tell_at_exit)
        self._signals.install()

    def begin_training(self, step: int) -> Stop | None:
        """Everything is loaded, and the first step begins. Collective.

        Returns:
            What to do instead, if a signal came meanwhile; there is nothing to save.
        """
        if self._heartbeat is not None:
            self._heartbeat.tell_step(step)
        self.enter(FIRST_STEP)
        return self.ask()

    def close(self, error: BaseException | None = None) -> None:
        """Stop watching, put signals' handlers back, and tell how the run ended. Not collective."""
        if self._is_closed or self._heartbeat is None:
            return
        self._is_closed = True
        atexit.unregister(self._tell_at_exit)
        self._watchdog.cancel()
        self._signals.restore()
        self._agreement.close(wait=error is None)
        if self._health is not None:
            self._health.close()
        self._tell_end(error)

    def _tell_end(self, error: BaseException | None) -> None:
        if self._heartbeat is None:
            return
        if error is None:
            self._heartbeat.finish(FINISHED)
        elif isinstance(error, RunStopped):
            self._heartbeat.finish(error.state, error.message)
        else:
            self._heartbeat.finish(FAILED, f"{type(error).__name__}: {error}"[:500])

    def _tell_at_exit(self) -> None:
        """Nobody has closed this: tell what is known."""
        self._watchdog.cancel()
        if self._health is not None:
            self._health.close()
        self._tell_end(self._left or getattr(sys, "last_value", None))

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, step: int) -> Stop | None:
        """An update was made. Collective where signals or a health check are watched; they cost some microseconds.

        Returns:
            What all ranks are to do at this step, if that is to stop.
        """
        if self._heartbeat is not None:
            self._heartbeat.tell_step(step)
        self.enter(STEP)
        if self._health is not None and self._signals.received is None:  # what asks a job to stop kills the command too
            self._problem = self._health.check(step) or self._problem
        return self._explain(self._agreement.exchange(self._get_number())) if self._agrees else None

    def ask(self) -> Stop | None:
        """Ask all ranks at once, after something that took its time. Collective."""
        return self._explain(self._agreement.ask(self._get_number())) if self._agrees else None

    @property
    def _agrees(self) -> bool:
        return bool(self._watching.on_signal) or self._watching.health is not None

    def _get_number(self) -> int:
        if self._problem is not None:
            return _UNHEALTHY
        return _GO_ON if self._signals.received is None else _PREEMPTED

    def _explain(self, agreed: int) -> Stop | None:
        """Find out whose signal or check it was. Collective if it was any."""
        if agreed == _GO_ON:
            return None
        received = self._signals.received
        own = (socket.gethostname(), None if received is None else received.name, self._problem)
        parts, ends_agent = [], False
        for rank, (host, name, problem) in enumerate(gather_all(own, "stopping together")):
            ends_agent |= problem is not None or name not in (None, signal.SIGTERM.name)
            told = problem if agreed == _UNHEALTHY else name and f"{name} came"
            if told:
                parts.append(f"rank {rank} on {host}: {told}")
        return Stop(Unhealthy if agreed == _UNHEALTHY else Preempted, "; ".join(parts), ends_agent)

    def leave(self, stop: Stop, *, step: int, path: Path | None) -> NoReturn:
        """Everything is saved: end this rank with the exit code for it. Collective.

        Raises:
            Preempted, Unhealthy: always.
        """
        saved = f"saved {path}" if path is not None else "nothing was trained since the load, so nothing is saved"
        error = stop.kind(f"{stop.reason}; {saved}; ends with exit code {stop.kind.exit_code}", step=step, path=path)
        if get_rank() == 0:
            logger.warning("%s", error)
        self._signals.begin_to_leave(error.exit_code)
        self.enter(ENDING)
        self._left = error
        if stop.ends_agent:
            try:
                wait_for_ranks("leaving together", timeout_s=_LEAVE_S)
            except AccelFsdpError as missing:  # nothing is lost: all is saved
                logger.warning("%s", missing)
            end_agent()
        raise error

    # -- phases -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str, *, limit_s: float | None = None) -> Iterator[None]:
        """Do something that is no step, with a limit of its own. Not collective. Before `begin` it does nothing."""
        if not self.is_begun or self._is_closed:
            yield
            return
        before = self._phases[-1] if self._phases else None
        self._phases.append((name, limit_s))
        self._arm(name, limit_s)
        try:
            yield
        finally:
            self._phases.pop()
            self._agreement.forget_time()
            if before is None:  # nothing is known to come: a load has failed, perhaps
                self._watchdog.cancel()
            elif not self._is_closed:
                self._arm(*before)

    def rest(self) -> None:
        """Between steps, where nobody knows what comes: the limit of an evaluation. Until `go_on`, or the next step."""
        self._agreement.forget_time()
        self.enter(ENDING)

    def go_on(self) -> None:
        """The next step begins, if `rest` was the last that was said."""
        if self._phases == [(ENDING, None)]:
            self.enter(STEP)

    def enter(self, phase: str) -> None:
        """From now on this is what the run does, until something else is said."""
        self._phases[:1] = [(phase, None)]
        self._arm(*self._phases[-1])

    def _arm(self, phase: str, limit_s: float | None) -> None:
        if self._limits is not None:
            limit_s = self._limits.get_limit_s(phase) if limit_s is None else limit_s
            self._watchdog.arm(limit_s)
        if self._heartbeat is not None:
            self._heartbeat.tell_phase(phase, limit_s)

    # -- on the thread that hears of signals ----------------------------------------------------------------------

    def _find_lost(self) -> str | None:
        for each in self._peers:
            if not is_running(each.process_id, each.process_started):
                return f"rank {each.rank} (process {each.process_id}) has ended"
        return None

    def _clean_up(self, code: int, text: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.finish(STOPPED, text, timeout_s=0.5)


def _describe_end(beats: list[Beat]) -> str:
    """Say which ranks of the run before ended without a word, and where they stood."""
    silent = [each for each in beats if each.state == RUNNING]
    if not silent:
        return ""
    shown = ", ".join(
        f"rank {each.rank} on {each.host} at step {each.step} in phase {each.phase!r}" for each in silent[:8]
    )
    more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
    return f"the run before this one ended without saying so (killed, or hung): {shown}{more}"
