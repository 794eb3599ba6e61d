"""How a run that is stopped leaves: what `step` raises on every rank, and the exit codes that a scheduler acts on.

    0       the training is over
    69      unhealthy: a health check failed on some rank; everything is saved, this node should be replaced
    75      preempted: a signal asked the run to stop; everything is saved, start the same command again
    128+N   stopped at once by a repeated signal N; what was in flight is gone, earlier checkpoints are whole
    1       an error, or the hang watchdog

69 and 75 are EX_UNAVAILABLE and EX_TEMPFAIL of sysexits.h. torchrun and `accelerate launch` end with 1 whatever their
workers end with, so a scheduler sees them only of processes that it has started itself; the log and the heartbeats have
them in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

EXIT_UNHEALTHY = 69
EXIT_PREEMPTED = 75
EXIT_SIGNAL = 128  # and the signal's number


def _rebuild(cls: type[RunStopped], message: str, step: int, path: Path | None) -> RunStopped:
    return cls(message, step=step, path=path)


class RunStopped(SystemExit):
    """All ranks have saved at the same step and leave. A `SystemExit`: `with` and `finally` run, then the process ends.

    Attributes:
        message: who asked for it, and what was saved.
        step: updates made.
        path: the checkpoint to go on from; None where nothing has been trained yet.
    """

    exit_code: ClassVar[int]
    state: ClassVar[str]  # of the heartbeats

    def __init__(self, message: str, *, step: int, path: Path | None = None) -> None:
        super().__init__(self.exit_code)
        self.message, self.step, self.path = message, step, path

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild, (type(self), self.message, self.step, self.path)


class Preempted(RunStopped):
    """A signal asked the run to stop (exit code 75): start it again, anywhere."""

    exit_code = EXIT_PREEMPTED
    state = "preempted"


class Unhealthy(RunStopped):
    """A health check failed (exit code 69): start it again, on another node."""

    exit_code = EXIT_UNHEALTHY
    state = "unhealthy"
