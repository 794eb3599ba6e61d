"""Start the script as its user does, wait for it, and leave nothing of it running."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..errors import UsageError

_GRACE_S = 15.0
_ACCELERATE = ("--num_processes", "--num-processes")
_TORCHRUN = ("--nproc-per-node", "--nproc_per_node")
_MODULE = ("-m", "--module")


@dataclass(frozen=True)
class Launch:
    """What became of one start of the script. `exit_code` is None where it had to be stopped."""

    exit_code: int | None
    seconds: float
    log: Path

    def read_tail(self, num_lines: int = 25) -> str:
        """Return the end of what it has printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def launch(command: Sequence[str], environment: Mapping[str, str], log: Path, *, timeout_s: float) -> Launch:
    """Run a command to its end, with all its output in a file, added to what is there.

    Raises:
        UsageError: there is no such program.
    """
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        try:
            process = subprocess.Popen(  # noqa: S603
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}", actual=command[0]) from error
        try:
            exit_code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
            _stop(process)
        except BaseException:
            _stop(process)
            raise
    return Launch(exit_code, time.monotonic() - started, log)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, and the workers that it may leave behind: they have sessions of their own."""
    workers: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also upon a second Ctrl-C
        process.kill()
        process.wait()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


# -- another number of ranks ------------------------------------------------------------------------------------------


def set_num_processes(command: Sequence[str], count: int) -> list[str]:
    """Return a launch command with another number of processes (on this node, for torchrun).

    Raises:
        UsageError: it is neither `accelerate launch` nor `torchrun`.
    """
    words = list(command)
    at, spellings = _find_launcher(words)
    kept: list[str] = []
    index = at
    while index < len(words):
        word = words[index]
        if word in _MODULE or word.endswith(".py"):  # what follows are the script's own arguments
            break
        if word.partition("=")[0] in spellings:
            index += 1 if "=" in word else 2
            continue
        kept.append(word)
        index += 1
    return [*words[:at], spellings[0], str(count), *kept, *words[index:]]


def _find_launcher(words: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Return where the launcher's options begin, and the spellings of the one for the number of processes."""
    for index, word in enumerate(words):
        name = Path(word).name
        if name == "accelerate" and words[index + 1 : index + 2] == ["launch"]:
            return index + 2, _ACCELERATE
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return index + 1, _ACCELERATE
        if name in ("torchrun", "torch.distributed.run"):
            return index + 1, _TORCHRUN
        if word.endswith(".py"):
            break
    raise UsageError(
        "--elastic needs a launch command whose number of processes it can set: `accelerate launch ...` or "
        f"`torchrun ...`, not {' '.join(words[:3])!r}",
        actual=list(words),
    )


def parse_elastic(text: str) -> tuple[int, int]:
    """Return both numbers of ranks of "2:1".

    Raises:
        UsageError: it is not of that form.
    """
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
    if match is None or match[1] == match[2]:
        raise UsageError(f"--elastic is {text!r}; give two different numbers of ranks, such as 2:1", actual=text)
    return int(match[1]), int(match[2])
