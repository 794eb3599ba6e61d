"""The hang watchdog: a rank that makes no progress for too long prints every thread's stack and ends.

It is the standard library's `faulthandler.dump_traceback_later(exit=True)`, armed anew at every step: a thread in C
that needs no GIL, so that it works whatever Python is doing. A process has one such timer. Others that use it (pytest's
`faulthandler_timeout`) and this one replace each other's. The stacks go to the process's standard error, which
launchers collect, and to no file: the storage may be what hangs, and a write that hangs would keep the process alive.
"""

from __future__ import annotations

import faulthandler
import os
from dataclasses import dataclass, fields
from typing import Any

from ..arguments import check_positive
from ..errors import UsageError

LOADING, FIRST_STEP, STEP, SAVING, EVALUATION, EXPORTING, ENDING = (
    "loading",
    "first step",
    "step",
    "saving",
    "evaluation",
    "exporting",
    "ending",
)
_LONGER = 10  # times the limit of a step, for what has no limit of its own
_LEAST_S = 1800.0  # and never less than this
_MOST_S = 365 * 86400.0  # faulthandler refuses more than it can count in its unit
_STDERR = 2  # the descriptor: `sys.stderr` may be anything


@dataclass(frozen=True)
class HangLimits:
    """Seconds without progress after which a rank ends, by what it does. One not given is ten steps, at least 1800 s.

    Args:
        step_s: from one `step()` to the next, evaluation and saving excepted.
        first_step_s: from the resume to the first `step()`: compilation, warm-up, the first batches.
        saving_s: one save, reading back and pruning included, or one export.
        evaluation_s: one `phase(...)`; the Trainer's `evaluate` and `predict`.
        loading_s: one resume.
    """

    step_s: float
    first_step_s: float | None = None
    saving_s: float | None = None
    evaluation_s: float | None = None
    loading_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            check_positive(f"HangLimits.{field.name}", value, (int, float))
            if value is not None and value > _MOST_S:
                raise UsageError(f"HangLimits.{field.name} is {value!r}; give at most a year", actual=value)
        if self.step_s is None:
            raise UsageError("HangLimits.step_s is None; give the seconds that one step may take", actual=None)

    def get_limit_s(self, phase: str) -> float:
        """Return the limit of a phase; one that is not known has that of an evaluation."""
        given = {
            STEP: self.step_s,
            FIRST_STEP: self.first_step_s,
            SAVING: self.saving_s,
            EXPORTING: self.saving_s,
            LOADING: self.loading_s,
        }.get(phase, self.evaluation_s)
        return float(given if given is not None else max(_LONGER * self.step_s, _LEAST_S))


def make_limits(given: Any) -> HangLimits | None:
    """Return the limits that a `Checkpointer` was given as None, a number of seconds, or `HangLimits`.

    Raises:
        UsageError: it is something else.
    """
    if given is None or isinstance(given, HangLimits):
        return given
    check_positive("hang_limits", given, (int, float))
    return HangLimits(float(given))


class Watchdog:
    """Armed for one stretch of work at a time. Not collective."""

    def __init__(self) -> None:
        self._is_armed = False

    def arm(self, limit_s: float) -> None:
        """From now on this process has `limit_s` seconds until the next call."""
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
        self._is_armed = True

    def cancel(self) -> None:
        """Let the process live; leaves alone what others have set since, if this one never was armed."""
        if self._is_armed:
            self._is_armed = False
            faulthandler.cancel_dump_traceback_later()


def dump_stacks() -> None:
    """Print every thread's stack to standard error."""
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)


def tell(text: str) -> None:
    """Write a line to the process's standard error, past all buffers and locks: for a process that may hang."""
    try:
        os.write(_STDERR, f"{text}\n".encode())
    except OSError:  # closed: there is nobody to tell
        return
