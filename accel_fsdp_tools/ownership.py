"""Who is working in a checkpoint root, and whether that run still lives.

A run is known by host, process id and the process's start time. On the same host the process table answers; from
another host only the heartbeat does: the modification time of the owner's file, which a thread renews. Ages are
measured with the file system's own clock, so that hosts need not agree on the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from .errors import LockedError, StorageError
from .files import write_json_durably

HEARTBEAT_S = 5.0
STALE_S = 60.0
LOCK_NAME = ".accel_fsdp_tools.lock"
PARTIAL = ".partial"
OWNER_NAME = "owner.json"
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


@dataclass(frozen=True)
class Owner:
    """One process that owns something in a root. `token` tells apart what one process owns several times."""

    run_id: str
    host: str
    process_id: int
    process_started: float
    token: str = ""

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
        return Owner(
            str(raw["run_id"]),
            str(raw["host"]),
            int(raw["process_id"]),
            float(raw["process_started"]),
            str(raw.get("token", "")),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def explain_unwritable(directory: Path, error: OSError) -> StorageError:
    """Return the error for a directory that cannot be made or written to."""
    return StorageError(
        f"Cannot write into {directory}: {error}. Check that it exists on every node, its permissions and the free "
        "space, and that no file is in the way.",
        path=str(directory),
    )


def read_storage_clock(directory: Path) -> float:
    """Return the time by the clock of the file system that `directory` is on, which modification times are by.

    Raises:
        OSError: nothing can be written there.
    """
    probe = directory / f".clock.{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def measure_age_s(path: Path) -> float:
    """Seconds since `path` was last renewed, by the clock of its file system; infinity if it is gone."""
    try:
        return read_storage_clock(path.parent) - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def is_running(process_id: int, started: float) -> bool:
    """Whether this process of this host, which started then, still runs."""
    try:
        process = psutil.Process(process_id)
        return process.status() != psutil.STATUS_ZOMBIE and bool(abs(process.create_time() - started) < 1.0)
    except psutil.NoSuchProcess:
        return False


def is_alive(path: Path, *, stale_s: float = STALE_S) -> bool:
    """Whether the run that is recorded at `path` still lives.

    On this host the process table decides. For another host, a heartbeat younger than `stale_s` counts as alive.
    An unreadable record counts as alive until it is that old: its writer may be at work on it.
    """
    owner = read_owner(path)
    if owner is not None and owner.host == socket.gethostname():
        return is_running(owner.process_id, owner.process_started)
    return measure_age_s(path) < stale_s


def is_of_this_host(path: Path) -> bool:
    """Whether the run that is recorded at `path` is one of this host, so that `is_alive` knows for certain."""
    owner = read_owner(path)
    return owner is not None and owner.host == socket.gethostname()


class RootLock:
    """The right to save into a root, held by one run at a time. Used by rank 0 only.

    A lock whose run is dead is taken over: at once if it ran on this host, otherwise after its heartbeat has been
    silent for `stale_s`. Within one process the later lock takes over, and the earlier one's `check` says so.
    """

    def __init__(self, root: Path, run_id: str, *, stale_s: float = STALE_S) -> None:
        self.path = root / LOCK_NAME
        self.owner = dataclasses.replace(Owner.current(run_id), token=uuid.uuid4().hex)
        self.stale_s = stale_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, waiting at most `stale_s` for a silent holder on another host.

        Raises:
            LockedError: a live run holds it.
            StorageError: the root cannot be written to.
        """
        try:
            self._acquire()
        except OSError as error:
            raise explain_unwritable(self.path.parent, error) from error
        self._thread = threading.Thread(target=self._beat, name="accel-fsdp-heartbeat", daemon=True)
        self._thread.start()

    def _acquire(self) -> None:
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

    def _try_create(self) -> bool:
        temporary = self.path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex}")
        try:
            write_owner(temporary, self.owner)
            return _place(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _remove_stale(self, judged: Owner | None) -> None:
        """Remove the lock that was judged, and only that one: another run may have replaced it meanwhile."""
        aside = self.path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        if read_owner(aside) != judged:
            _place(aside, self.path)
        aside.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            # A lock that is gone is reported by check() at the next save, on the training thread.
            with contextlib.suppress(OSError):
                if read_owner(self.path) == self.owner:
                    os.utime(self.path)
            with contextlib.suppress(OSError):  # there is one during a save only
                os.utime(self.path.parent / PARTIAL / self.owner.run_id / OWNER_NAME)

    def check(self) -> None:
        """Make sure that the lock is still held.

        Raises:
            LockedError: another run has taken it, or it was removed.
        """
        holder = read_owner(self.path)
        if holder == self.owner:
            return
        if holder is None:
            text = (
                f"{self.path} is gone or unreadable: the root is no longer held by this run. The file was deleted, or "
                "another Checkpointer has taken over the root and given it back."
            )
        elif holder.is_same_process(self.owner):
            text = (
                f"{self.path.parent} was taken over by another Checkpointer of this very process. One at a time may "
                "use a root: close this one before the next is opened, or give each a root of its own."
            )
        else:
            text = (
                f"{self.path} is no longer held by this run but by {_name_holder(holder)}, which has taken over the "
                "root. Stop one of the two, or give each a root of its own."
            )
        raise LockedError(text, path=str(self.path), actual=str(holder))

    def release(self) -> None:
        """Give the lock back; does nothing if it is not held (any more)."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if read_owner(self.path) == self.owner:
                self.path.unlink(missing_ok=True)


def _place(source: Path, target: Path) -> bool:
    """Make `target` with the contents of `source`; False if it exists already.

    Linked, so that it never exists half written. Without hard links it may for a moment, which `is_alive` allows for.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _copy_exclusively(source, target)
    return True


def _copy_exclusively(source: Path, target: Path) -> bool:
    data = source.read_bytes()
    try:
        file = target.open("xb")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return True


def _name_holder(holder: Owner | None) -> str:
    if holder is None:
        return "a run that cannot be identified"
    return f"run {holder.run_id} (process {holder.process_id} on {holder.host})"


def _explain_lock(path: Path, holder: Owner | None) -> str:
    who = _name_holder(holder)
    return (
        f"{path.parent} is in use by {who}. Two runs must not save into one root: give this run another root, or stop "
        f"the other. If you are sure that it no longer runs, delete {path}."
    )
