"""Who is working in a checkpoint root, and whether that run still lives.

A run is known by host, process id and the process's start time. On the same host the process table answers; from
another host only the heartbeat does: the modification time of the owner's file, which a thread renews. Ages are
measured with the file system's own clock, so that hosts need not agree on the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from .errors import LockedError
from .files import write_json_durably

HEARTBEAT_S = 5.0
STALE_S = 60.0
LOCK_NAME = ".accel_fsdp_tools.lock"


@dataclass(frozen=True)
class Owner:
    """One process that owns something in a root."""

    run_id: str
    host: str
    process_id: int
    process_started: float

    @classmethod
    def current(cls, run_id: str) -> Owner:
        process = psutil.Process()
        return cls(run_id, socket.gethostname(), process.pid, process.create_time())

    def is_same_process(self, other: Owner) -> bool:
        return (
            self.host == other.host
            and self.process_id == other.process_id
            and abs(self.process_started - other.process_started) < 1.0
        )


def write_owner(path: Path, owner: Owner) -> None:
    """Record `owner` at `path`, whole or not at all."""
    write_json_durably(path, dataclasses.asdict(owner))


def read_owner(path: Path) -> Owner | None:
    """Return who is recorded at `path`, None if nobody is or the record is unreadable."""
    try:
        raw = json.loads(path.read_bytes())
        return Owner(str(raw["run_id"]), str(raw["host"]), int(raw["process_id"]), float(raw["process_started"]))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def measure_age_s(path: Path) -> float:
    """Seconds since `path` was last renewed, by the clock of its file system; infinity if it is gone."""
    probe = path.with_name(f".clock.{uuid.uuid4().hex}")
    try:
        probe.touch()
        now = probe.stat().st_mtime
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
    finally:
        probe.unlink(missing_ok=True)


def is_alive(path: Path, *, stale_s: float = STALE_S) -> bool:
    """Whether the run that is recorded at `path` still lives.

    On this host the process table decides. For another host, a heartbeat younger than `stale_s` counts as alive.
    An unreadable record counts as alive until it is that old: its writer may be at work on it.
    """
    owner = read_owner(path)
    if owner is not None and owner.host == socket.gethostname():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(owner.process_id)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return bool(abs(process.create_time() - owner.process_started) < 1.0)
        return False
    return measure_age_s(path) < stale_s


class RootLock:
    """The right to save into a root, held by one run at a time. Used by rank 0 only.

    A lock whose run is dead is taken over: at once if it ran on this host, otherwise after its heartbeat has been
    silent for `stale_s`.
    """

    def __init__(self, root: Path, run_id: str, *, stale_s: float = STALE_S) -> None:
        self.path = root / LOCK_NAME
        self.owner = Owner.current(run_id)
        self.stale_s = stale_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, waiting at most `stale_s` for a silent holder on another host.

        Raises:
            LockedError: a live run holds it.
        """
        deadline = time.monotonic() + self.stale_s + 1
        while not self._try_create():
            holder = read_owner(self.path)
            if holder is not None and holder.is_same_process(self.owner):
                self._remove_stale(holder)
                continue
            if not is_alive(self.path, stale_s=self.stale_s):
                self._remove_stale(holder)
                continue
            same_host = holder is not None and holder.host == self.owner.host
            if same_host or time.monotonic() > deadline:
                raise LockedError(_explain_lock(self.path, holder), path=str(self.path), actual=str(holder))
            time.sleep(min(1.0, self.stale_s / 10))
        self._thread = threading.Thread(target=self._beat, name="accel-fsdp-heartbeat", daemon=True)
        self._thread.start()

    def _try_create(self) -> bool:
        # Written aside and linked, so that the lock never exists half written.
        temporary = self.path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex}")
        write_owner(temporary, self.owner)
        try:
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _remove_stale(self, judged: Owner | None) -> None:
        """Remove the lock that was judged, and only that one: another run may have replaced it meanwhile."""
        aside = self.path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        if read_owner(aside) != judged:
            with contextlib.suppress(FileExistsError):
                os.link(aside, self.path)
        aside.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            # A lock that is gone is reported by check() at the next save, on the training thread.
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def check(self) -> None:
        """Make sure that the lock is still held.

        Raises:
            LockedError: another run has taken it, or it was removed.
        """
        holder = read_owner(self.path)
        if holder is None or holder != self.owner:
            raise LockedError(
                f"{self.path} is no longer held by this run but by {holder}. Another run has taken over this root; "
                "stop one of the two, or give each a root of its own.",
                path=str(self.path),
                actual=str(holder),
            )

    def release(self) -> None:
        """Give the lock back; does nothing if it is not held."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if read_owner(self.path) == self.owner:
                self.path.unlink(missing_ok=True)


def _explain_lock(path: Path, holder: Owner | None) -> str:
    who = (
        f"run {holder.run_id} (process {holder.process_id} on {holder.host})"
        if holder is not None
        else "a run that cannot be identified"
    )
    return (
        f"{path.parent} is in use by {who}. Two runs must not save into one root: give this run another root, or stop "
        f"the other. If you are sure that it no longer runs, delete {path}."
    )
