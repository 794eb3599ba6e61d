"""The lock of a root: one live run, and dead ones do not hold it."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_fsdp_tools.errors import LockedError, StorageError
from accel_fsdp_tools.ownership import (
    LOCK_NAME,
    OWNER_NAME,
    PARTIAL,
    Owner,
    RootLock,
    is_alive,
    read_owner,
    write_owner,
)


def test_acquire_and_release(tmp_path: Path) -> None:
    lock = RootLock(tmp_path, "a")
    lock.acquire()
    lock.check()
    assert is_alive(tmp_path / LOCK_NAME)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    lock.release()


def test_the_same_process_may_take_its_root_again(tmp_path: Path) -> None:
    first = RootLock(tmp_path, "a")
    first.acquire()
    second = RootLock(tmp_path, "b")
    second.acquire()
    second.check()
    with pytest.raises(LockedError, match="this very process"):
        first.check()
    second.release()


@pytest.mark.parametrize("run_id", ["a", "b"])
def test_the_earlier_lock_of_a_process_leaves_the_later_alone(tmp_path: Path, run_id: str) -> None:
    first, second = RootLock(tmp_path, "a"), RootLock(tmp_path, run_id)
    first.acquire()
    second.acquire()
    first.release()
    second.check()
    second.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    lock = RootLock(tmp_path, "a")
    lock.acquire()
    lock.check()
    other = RootLock(tmp_path, "b")
    assert not other._try_create()
    other._remove_stale(other.owner)  # judged wrongly: it comes back
    lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_root_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="permissions"):
        RootLock(tmp_path / "missing", "a").acquire()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match="bad disk") as caught:
        RootLock(tmp_path, "a").acquire()
    assert caught.value.path == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_live_run_on_this_host_is_respected(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from accel_fsdp_tools.ownership import RootLock;"
        f"RootLock(Path({str(tmp_path)!r}), 'other').acquire(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match="run other") as caught:
            RootLock(tmp_path, "mine").acquire()
        assert caught.value.path == str(tmp_path / LOCK_NAME)
        process.kill()
    RootLock(tmp_path, "mine").acquire()


def _write_foreign(path: Path) -> Owner:
    owner = dataclasses.replace(Owner.current("far"), host="another-host")
    write_owner(path, owner)
    return owner


def test_a_silent_run_of_another_host_is_waited_for_then_replaced(tmp_path: Path) -> None:
    _write_foreign(tmp_path / LOCK_NAME)
    started = time.monotonic()
    lock = RootLock(tmp_path, "mine", stale_s=1.0)
    lock.acquire()
    assert time.monotonic() - started >= 0.5
    lock.release()


def test_a_beating_run_of_another_host_is_respected(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    _write_foreign(path)
    future = time.time() + 3600
    os.utime(path, (future, future))  # renewed all the time
    with pytest.raises(LockedError, match="another-host"):
        RootLock(tmp_path, "mine", stale_s=0.5).acquire()
    assert read_owner(path) is not None


def _wait_for_beat(*paths: Path) -> bool:
    """Whether all of `paths`, made old, are renewed."""
    for path in paths:
        os.utime(path, (1, 1))
    deadline = time.monotonic() + 10
    while any(path.stat().st_mtime == 1 for path in paths) and time.monotonic() < deadline:
        time.sleep(0.01)
    return all(path.stat().st_mtime != 1 for path in paths)


def test_heartbeat_renews_the_lock_and_the_run_s_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_fsdp_tools.ownership.HEARTBEAT_S", 0.02)
    lock = RootLock(tmp_path, "a")
    lock.acquire()
    assert _wait_for_beat(lock.path)
    partial = tmp_path / PARTIAL / "a" / OWNER_NAME
    partial.parent.mkdir(parents=True)
    write_owner(partial, lock.owner)
    assert _wait_for_beat(lock.path, partial)
    lock.release()


def test_heartbeat_does_not_keep_a_lock_of_others_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_fsdp_tools.ownership.HEARTBEAT_S", 0.02)
    lock = RootLock(tmp_path, "a")
    lock.acquire()
    _write_foreign(lock.path)
    os.utime(lock.path, (1, 1))
    time.sleep(0.2)
    assert lock.path.stat().st_mtime == 1
    with pytest.raises(LockedError, match="another-host"):
        lock.check()
    lock.release()
    assert lock.path.exists()


def test_a_lost_lock_is_noticed(tmp_path: Path) -> None:
    lock = RootLock(tmp_path, "a")
    lock.acquire()
    lock.path.unlink()
    with pytest.raises(LockedError, match="no longer held"):
        lock.check()
    lock.release()


def test_garbage_in_the_lock_counts_as_alive_until_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    path.write_text("{half")
    assert is_alive(path)
    os.utime(path, (1, 1))
    assert not is_alive(path)
