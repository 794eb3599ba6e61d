"""Run a launcher so that whoever started it can steer it by signals, and reads in its exit code how the run ended.

Between a scheduler and the ranks stands torchrun's agent (or `accelerate launch`, which runs it). It passes SIGTERM on,
but dies of SIGUSR1 and leaves its ranks behind; and it ends with 1 whatever they end with. Here every signal that asks
a run to stop becomes a SIGTERM to the launcher, and the exit code is that of the ranks, as their heartbeats tell.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from .exits import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNHEALTHY
from .judging import RunHealth, Tolerance, judge_run
from .launcher import OWN_STORE
from .signals import REPEAT_S
from .watchdog import tell

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_MOST_REQUESTS = 2  # a third one makes torchrun's agent, which is ending its ranks, hang for ever if it has `--tee`
_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def supervise(command: Sequence[str], root: Path, *, grace_s: int | None = None) -> int:
    """Run a launcher to its end, and return the exit code of its ranks.

    Made to be all that a process does: from the main thread, and signals that would stop it are ignored afterwards.

    Args:
        command: the launcher with its arguments.
        root: where the run keeps its checkpoints.
        grace_s: how long the ranks get to save after a SIGTERM, before the launcher kills them.

    Returns:
        0, 69, 75 as in `exits`; otherwise the launcher's, or 128 and the signal's number if one has killed it.

    Raises:
        OSError: the launcher cannot be started.
    """
    return _Supervisor(command, root, grace_s).run()


class _Supervisor:
    def __init__(self, command: Sequence[str], root: Path, grace_s: int | None) -> None:
        self._command, self._root = list(command), root
        self._environment = {OWN_STORE: "1", **os.environ}
        if grace_s is not None:
            self._environment[_GRACE] = str(grace_s)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._asked_at: float | None = None
        self._num_requests = 0
        self._waiting: signal.Signals | None = None  # came before there was a launcher

    def run(self) -> int:
        before = judge_run(self._root, Tolerance()).run_id
        for each in STOPPING:
            if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN:  # under nohup it stays
                signal.signal(each, self._pass_on)
        code = self._start().wait()
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN)  # srun ends the other nodes after the first: their code must stay
        return self._judge(code, before)

    def _start(self) -> subprocess.Popen[bytes]:
        # In a session of its own: what is sent to a whole process group, as by Ctrl-C, reaches it once, from here.
        self._launcher = launcher = subprocess.Popen(  # noqa: S603 - the command that the user gave
            self._command,
            env=self._environment,
            start_new_session=True,
            preexec_fn=_ignore_what_torchrun_dies_of,
        )
        if self._waiting is not None:
            self._pass_on(self._waiting, None)
        return launcher

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Ask the launcher to stop; again only if this is another request, and not the same on another way."""
        received, now = signal.Signals(number), time.monotonic()
        if self._launcher is None:
            self._waiting = received
        elif self._asked_at is None or now > self._asked_at + REPEAT_S:
            self._asked_at = now
            self._num_requests += 1
            if self._num_requests > _MOST_REQUESTS:
                tell(f"accel-fsdp supervise: {received.name} came; the launcher is ending its ranks already")
                return
            tell(f"accel-fsdp supervise: {received.name} came; the launcher gets a SIGTERM")
            self._launcher.send_signal(signal.SIGTERM)

    def _judge(self, code: int, before: str | None) -> int:
        try:
            health = judge_run(self._root, Tolerance())
        except OSError as error:  # the storage is gone: the launcher's word has to do
            tell(f"accel-fsdp supervise: the heartbeats can't be read: {error}")
            health = RunHealth(ok=False, summary="", run_id=before)
        if health.run_id != before and health.exit_code == EXIT_UNHEALTHY:
            return _say(EXIT_UNHEALTHY, "a health check failed; everything is saved")
        if health.run_id != before and health.exit_code == EXIT_PREEMPTED:
            return _say(EXIT_PREEMPTED, "the run was asked to stop; everything is saved")
        if code == 0:  # not before: a script may have caught what was raised to end it
            return 0
        # Asked to stop before it had begun, too: a scheduler also asks so when another node has failed.
        return _say(code if code > 0 else EXIT_SIGNAL - code, "the run failed")


def _ignore_what_torchrun_dies_of() -> None:
    """The ranks install handlers of their own."""
    for each in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)


def _say(code: int, text: str) -> int:
    tell(f"accel-fsdp supervise: {text} (exit code {code})")
    return code
