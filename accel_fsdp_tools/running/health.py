"""The health check of a run: a command per node, or a function per rank, every so many steps.

A command runs beside the training, and what came of it is looked at after later steps. A function runs in the step: it
may use the GPU. Nothing here is collective: one rank's verdict travels with the signals' flag.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from ..arguments import check_positive
from ..errors import UsageError

_SHOWN = 500  # characters of a command's output
Health = str | Sequence[str] | Callable[[], Any] | None


class HealthCheck:
    """Called at every step; says what is wrong once something is.

    Args:
        health: a command (a string is for the shell), or a function: None or true is healthy, false is not, nor is
            raising. A command is healthy if it ends with 0 within `timeout_s`.
        every: updates between two checks.
        timeout_s: what a command may take.
        is_first_of_node: whether this rank runs the command for its node.
    """

    def __init__(self, health: Health, *, every: int, timeout_s: float, is_first_of_node: bool) -> None:
        self._function = health if callable(health) else None
        self._command: str | list[str] | None = None
        if health is not None and not callable(health) and is_first_of_node:
            self._command = health if isinstance(health, str) else list(health)
        self._every, self._timeout_s = every, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._began = 0.0

    def check(self, step: int) -> str | None:
        """Return what is wrong with this rank's node, None if nothing is known to be."""
        problem = self._poll() if self._process is not None else None
        if problem is None and step % self._every == 0:
            if self._function is not None:
                return self._call(self._function)
            if self._command is not None and self._process is None:
                return self._start(self._command)
        return problem

    def close(self) -> None:
        """Stop a command that is still running."""
        if self._process is not None:
            self._kill(self._process)
            self._forget()

    def _call(self, function: Callable[[], Any]) -> str | None:
        name = getattr(function, "__name__", repr(function))
        try:
            value = function()
        except Exception as error:
            return f"the health check {name} raised {type(error).__name__}: {error}"[:_SHOWN]
        return None if value is None or bool(value) else f"the health check {name} returned {value!r}"[:_SHOWN]

    def _start(self, command: str | list[str]) -> str | None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would block a command that says much
        try:
            self._process = subprocess.Popen(  # noqa: S603 - it is the user's own
                command,
                shell=isinstance(command, str),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._forget()
            return f"the health check {_show(command)} could not be started: {error}"
        self._began = time.monotonic()
        return None

    def _poll(self) -> str | None:
        process, command = self._process, self._command
        if process is None or command is None:
            return None
        code = process.poll()
        if code is None:
            if time.monotonic() - self._began < self._timeout_s:
                return None
            self._kill(process)
            what = f"did not end within {self._timeout_s:g} s"
        else:
            what = f"ended with {code}"
        output = self._read_output()
        self._forget()
        if code == 0:
            return None
        return f"the health check {_show(command)} {what}" + (f": {output}" if output else "")

    def _read_output(self) -> str:
        if self._output is None:
            return ""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace").strip()[-_SHOWN:]
        return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a broken device can't be killed
            process.wait(1.0)

    def _forget(self) -> None:
        if self._output is not None:
            self._output.close()
        self._process = self._output = None


def check_health(health: Any, every: Any, timeout_s: Any) -> None:
    """Make sure that these can be the arguments of a `HealthCheck`.

    Raises:
        UsageError: they can't, or the command is not there.
    """
    check_positive("health_every", every, int)
    check_positive("health_timeout_s", timeout_s, (int, float))
    if every is None or timeout_s is None:
        raise UsageError("health_every and health_timeout_s need a number; leave them out for their defaults")
    if health is None or callable(health):
        return
    words = health
    if isinstance(health, str):
        words = [health] if health.strip() else []
    if not isinstance(words, Sequence) or not words or not all(isinstance(each, str) for each in words):
        raise UsageError(
            f"health is {health!r}; give a command (a string for the shell, or a list of words) or a function",
            actual=health,
        )
    if not isinstance(health, str) and shutil.which(words[0]) is None:
        raise UsageError(
            f"health is the command {_show(health)}, and there is no {words[0]} on this machine; install it, or give "
            "its whole path",
            actual=health,
        )


def _show(command: Any) -> str:
    return command if isinstance(command, str) else shlex.join(command)
