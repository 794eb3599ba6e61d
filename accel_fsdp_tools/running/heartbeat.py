"""One small file per rank that says how far it is.

    <root>/.accel_fsdp_tools/heartbeats/rank_00001.json

The training's thread only says what is so; a thread beside it writes that, when it has changed, at most once a second
and at once when the phase does. So a slow or hanging storage never keeps a step waiting, a rank that hangs is silent
from its last step on, and what its file says is that very step. Not synced: after a crash of the machine nobody asks.
Writing never fails the training; the first failure is logged.

A run's ranks write anew from the start: rank 0 removes what an earlier run has left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..records import RECORDS

logger = logging.getLogger(__name__)

HEARTBEATS = "heartbeats"
EVERY_S = 1.0
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"  # beside those of `exits`
_LAST_WRITE_S = 5.0
_NAME = re.compile(r"rank_(\d{5,})\.json")
_VERSION = 1
_MOST_RANKS, _MOST_BYTES = 2**20, 2**16  # more is no heartbeat, whatever it says


@dataclass(frozen=True)
class Beat:
    """What one rank says of itself. Times are seconds since 1970 by its host's clock.

    Attributes:
        state: running; or how the run ended on this rank: finished, preempted, unhealthy, stopped, failed.
        phase: what it is doing: loading, first step, step, saving, evaluation, exporting, ending.
        step: updates made.
        progress_at: when it made the last one, or began the phase.
        limit_s: after how long without progress the watchdog ends it; None without a watchdog.
        note: why it ended, if that was not by itself.
    """

    rank: int
    world_size: int
    host: str
    process_id: int
    process_started: float
    run_id: str
    attempt: int
    namespace: str = ""  # of process ids: they mean nothing to another container of this host
    restart: int = 0
    state: str = RUNNING
    phase: str = "loading"
    step: int = 0
    progress_at: float = 0.0
    limit_s: float | None = None
    note: str = ""

    def encode(self) -> bytes:
        return json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, text: bytes) -> Beat:
        """Rebuild a beat.

        Raises:
            ValueError, TypeError: it is none.
        """
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise TypeError("no object")
        kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(cls)}
        values = {name: raw[name] for name in kinds if name in raw}
        for name, value in values.items():
            wanted = kinds[name].split(" | ")
            if not (
                (isinstance(value, bool) is False and type(value).__name__ in wanted)
                or (isinstance(value, int) and not isinstance(value, bool) and "float" in wanted)
                or (value is None and "None" in wanted)
            ):
                raise TypeError(f"{name} is {value!r}")
        beat = cls(**values)
        if not 0 <= beat.rank < beat.world_size <= _MOST_RANKS or not 0 < beat.process_id < 2**63:
            raise ValueError(f"rank {beat.rank} of {beat.world_size}, process {beat.process_id}")
        return beat

    @classmethod
    def begin(cls, rank: int, world_size: int, run_id: str, attempt: int) -> Beat:
        """Return this process's first beat."""
        process = psutil.Process()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            process_id=process.pid,
            process_started=process.create_time(),
            run_id=run_id,
            attempt=attempt,
            namespace=get_namespace(),
            restart=int(restart) if restart.isdecimal() else 0,
            progress_at=time.time(),
        )


def get_namespace() -> str:
    """Return what tells apart the processes of a host that can see each other; empty where that is not known."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def get_directory(root: Path) -> Path:
    """Return where the heartbeats of a root lie."""
    return root / RECORDS / HEARTBEATS


def list_beats(root: Path) -> list[tuple[Path, Beat]]:
    """Return all heartbeats of a root with their files, by rank; what is none is left out."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(get_directory(root).iterdir()):
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                    found.append((path, Beat.decode(_read(path))))
    return sorted(found, key=lambda each: each[1].rank)


def _read(path: Path) -> bytes:
    """Read what may be a heartbeat.

    Raises:
        OSError, ValueError: it can't be read, or is none: nobody is to wait for a pipe, or read a disk.
    """
    state = path.stat()
    if not stat.S_ISREG(state.st_mode) or state.st_size > _MOST_BYTES:
        raise ValueError(f"{path} is no heartbeat")
    return path.read_bytes()


def clear_beats(root: Path) -> list[Beat]:
    """Remove the heartbeats of earlier runs and return them. Done by rank 0, whose run holds the root; never raises."""
    beats: list[Beat] = []
    try:
        beats += [beat for _, beat in list_beats(root)]
        directory = get_directory(root)
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            if path.is_symlink() or not path.is_dir():  # a folder is nobody's heartbeat
                path.unlink(missing_ok=True)  # a probe beside this one removes what it made
    except OSError as error:
        logger.warning("heartbeats of an earlier run could not be removed from %s: %s", root, error)
    return beats


@dataclass(frozen=True)
class _Told:
    """What changes while a run goes on; see `Beat`."""

    phase: str
    limit_s: float | None
    state: str = RUNNING
    note: str = ""


class Heartbeat:
    """Writes the heartbeats of this rank, from its making to `finish`. Not collective."""

    def __init__(self, root: Path, beat: Beat) -> None:
        self._path = get_directory(root) / f"rank_{beat.rank:05d}.json"
        self._first = beat
        # Each is replaced as a whole, by the training: the thread never sees half of a change.
        self._told, self._progress = _Told(beat.phase, beat.limit_s), (beat.step, beat.progress_at)
        self._wake, self._stop = threading.Event(), threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name="accel-fsdp-beats", daemon=True)
        self._wake.set()
        self._thread.start()

    @property
    def beat(self) -> Beat:
        """What was said last."""
        step, when = self._progress
        return dataclasses.replace(self._first, **dataclasses.asdict(self._told), step=step, progress_at=when)

    def tell_step(self, step: int) -> None:
        """An update was made."""
        self._progress = (step, time.time())

    def tell_phase(self, phase: str, limit_s: float | None) -> None:
        """This phase begins, or makes progress; another one is written at once."""
        self._progress = (self._progress[0], time.time())
        if (phase, limit_s) != (self._told.phase, self._told.limit_s):
            self._told = dataclasses.replace(self._told, phase=phase, limit_s=limit_s)  # it may have ended already
            self._wake.set()

    def finish(self, state: str, note: str = "", *, timeout_s: float = _LAST_WRITE_S) -> None:
        """The run is over on this rank: write that, and stop. Waits at most `timeout_s` for the storage."""
        self._told = dataclasses.replace(self._told, state=state, note=note)
        self._progress = (self._progress[0], time.time())
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        written: Beat | None = None
        while True:
            is_last = self._stop.is_set()
            self._wake.clear()
            beat = self.beat
            if beat != written:
                self._write(beat)
                written = beat
            if is_last:
                return
            self._wake.wait(EVERY_S)

    def _write(self, beat: Beat) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{beat.process_id}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(beat.encode())
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self._has_failed:
                self._has_failed = True
                logger.warning("rank %d cannot write its heartbeat to %s: %s", beat.rank, self._path, error)
