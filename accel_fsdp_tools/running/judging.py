"""What the heartbeats of a run say: which rank makes progress, which does not, since when. Nothing here is collective.

Ages are modification times against the clock of the file system itself, so that hosts and whoever looks need not agree
on the time. Where nothing can be written beside the heartbeats, this host's clock has to do.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..ownership import is_running, read_storage_clock
from .exits import Preempted, Unhealthy
from .heartbeat import FAILED, FINISHED, RUNNING, Beat, get_directory, get_namespace, list_beats
from .watchdog import STEP

GOOD, STARTING, STALE, GONE, ENDED, OVER, MISSING = "good", "starting", "stale", "gone", "ended", "over", "missing"
MAX_AGE_S, MAX_PHASE_AGE_S, STARTUP_GRACE_S = 120.0, 1800.0, 300.0
_GOES_WELL = (GOOD, STARTING, OVER)


@dataclass(frozen=True)
class Tolerance:
    """How long a rank may be silent.

    Attributes:
        step_s: between steps.
        phase_s: in a phase that is no step, where the run has no limit of its own for it.
        startup_s: before there are heartbeats, and after a process has ended that may be started again.
    """

    step_s: float = MAX_AGE_S
    phase_s: float = MAX_PHASE_AGE_S
    startup_s: float = STARTUP_GRACE_S

    def get_limit_s(self, beat: Beat, *, has_ended: bool) -> float:
        if has_ended:
            return max(self.step_s, self.startup_s)
        if beat.phase == STEP:
            return self.step_s
        return max(self.step_s, self.phase_s if beat.limit_s is None else beat.limit_s)


@dataclass(frozen=True)
class RankHealth:
    """One rank: good; starting (its process has ended a short while ago, and may be started again); stale; gone (the
    process has ended without a word); ended (it has said why); over (finished or preempted); or missing."""

    rank: int
    verdict: str
    beat: Beat | None = None
    age_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        beat = self.beat
        facts = ("host", "process_id", "state", "phase", "step", "restart", "note")
        told = {} if beat is None else {name: getattr(beat, name) for name in facts}
        age_s = None if self.age_s is None else round(self.age_s, 1)
        return {"rank": self.rank, "verdict": self.verdict, "age_s": age_s, **told}


@dataclass(frozen=True)
class RunHealth:
    """What is known of a run.

    Attributes:
        ok: every rank makes progress, or the run is over and needs nobody's help.
        summary: that in a sentence, or which rank is behind and since when.
        num_left_over: heartbeats of other runs.
        uses_own_clock: ages are by this host's clock, which may differ from that of the storage.
    """

    ok: bool
    summary: str
    ranks: tuple[RankHealth, ...] = ()
    run_id: str | None = None
    attempt: int | None = None
    num_left_over: int = 0
    uses_own_clock: bool = False

    @property
    def exit_code(self) -> int:
        """What the run has ended with, by what its ranks say; 1 where they do not say, or still run."""
        states = {FAILED if each.beat is None else each.beat.state for each in self.ranks}
        for kind in (Unhealthy, Preempted):  # a rank that came late may have ended otherwise
            if kind.state in states:
                return kind.exit_code
        return 0 if states == {FINISHED} else 1

    def to_dict(self) -> dict[str, Any]:
        names = ("ok", "summary", "run_id", "attempt", "num_left_over", "uses_own_clock")
        return {**{name: getattr(self, name) for name in names}, "ranks": [each.to_dict() for each in self.ranks]}


def judge_run(root: Path, tolerance: Tolerance, *, this_host: bool = False) -> RunHealth:
    """Judge the run that has written its heartbeats last.

    Args:
        this_host: only its ranks on this host; whether some are missing is then not known.
    """
    now, uses_own_clock = _read_clock(root)
    found = []
    for path, beat in list_beats(root):
        try:
            found.append((max(now - path.stat().st_mtime, 0.0), beat))
        except FileNotFoundError:  # a new run begins
            continue
    host = socket.gethostname()
    if not found:
        return _judge_silence("there are no heartbeats", tolerance)
    newest = min(found, key=lambda each: each[0])[1]
    own = [each for each in found if each[1].run_id == newest.run_id]
    chosen = [each for each in own if each[1].host == host or not this_host]
    if not chosen:
        return _judge_silence(f"no rank of the run is on this host, {host}", tolerance)
    ranks = [RankHealth(beat.rank, _judge(beat, age_s, tolerance, host), beat, age_s) for age_s, beat in chosen]
    if not this_host:
        absent = set(range(newest.world_size)) - {each.rank for each in ranks}
        ranks += [RankHealth(rank, MISSING) for rank in sorted(absent)]
    ranks.sort(key=lambda each: each.rank)
    return RunHealth(
        ok=all(each.verdict in _GOES_WELL for each in ranks),
        summary=_summarize(ranks),
        ranks=tuple(ranks),
        run_id=newest.run_id,
        attempt=newest.attempt,
        num_left_over=len(found) - len(own),
        uses_own_clock=uses_own_clock,
    )


def _read_clock(root: Path) -> tuple[float, bool]:
    try:
        return read_storage_clock(get_directory(root)), False
    except OSError:
        return time.time(), True


def _judge_silence(what: str, tolerance: Tolerance) -> RunHealth:
    """In a container, process 1 tells how long it runs already."""
    age_s = time.time() - psutil.Process(1).create_time()
    if age_s < tolerance.startup_s:
        return RunHealth(ok=True, summary=f"{what} yet; this machine or container runs for {age_s:.0f} s")
    return RunHealth(ok=False, summary=f"{what}: the run has not begun to load, or another folder is its root")


def _judge(beat: Beat, age_s: float, tolerance: Tolerance, host: str) -> str:
    if beat.state in (FINISHED, Preempted.state):
        return OVER
    is_seen = (beat.host, beat.namespace) == (host, get_namespace())
    is_gone = is_seen and not is_running(beat.process_id, beat.process_started)
    has_ended = beat.state != RUNNING or is_gone
    if age_s <= tolerance.get_limit_s(beat, has_ended=has_ended):
        return STARTING if has_ended else GOOD
    if not has_ended:
        return STALE
    return ENDED if beat.state != RUNNING else GONE


def _summarize(ranks: list[RankHealth]) -> str:
    bad = [each for each in ranks if each.verdict not in _GOES_WELL]
    if not bad:
        verdicts = {each.verdict for each in ranks}
        if verdicts == {OVER}:
            return f"the run is over: {', '.join(sorted({each.beat.state for each in ranks if each.beat}))}"
        return "some processes have ended and may be starting again" if STARTING in verdicts else "all ranks go on"
    missing = [each for each in bad if each.beat is None]
    heard = [(each.beat, each.age_s or 0.0, each.verdict) for each in bad if each.beat is not None]
    parts = []
    if missing:
        parts.append(f"nothing was heard of rank(s) {', '.join(str(each.rank) for each in missing)}")
    if heard:
        steps = sorted({beat.step for beat, _, _ in heard})
        behind = [each for each in heard if each[0].step == steps[0]]
        beat, age_s, verdict = max(behind, key=lambda each: each[1])
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age_s))
        what = "has made no progress" if verdict == STALE else "has been gone"
        where = f"step {beat.step}, phase {beat.phase}"
        parts.append(f"rank {beat.rank} on {beat.host} {what} since {since} ({age_s:.0f} s): {where}")
        if len(heard) > 1 and len(behind) == len(heard):
            parts.append(f"{len(heard) - 1} more stand at the same step")
        elif len(heard) > 1:
            parts.append(f"{len(heard) - len(behind)} others stand at up to step {steps[-1]}")
    return "; ".join(parts)
