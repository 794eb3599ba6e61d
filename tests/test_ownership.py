"""The lock of a root: one live run, and dead ones do not hold it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_fsdp_tools.errors import LockedError
from accel_fsdp_tools.ownership import LOCK_NAME, Owner, RootLock, is_alive, read_owner, write_owner


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
    with pytest.raises(LockedError):
        first.check()
    second.release()


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


def test_heartbeat_renews_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_fsdp_tools.ownership.HEARTBEAT_S", 0.02)
    lock = RootLock(tmp_path, "a")
    lock.acquire()
    os.utime(lock.path, (1, 1))
    deadline = time.monotonic() + 5
    while lock.path.stat().st_mtime == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lock.path.stat().st_mtime != 1
    lock.release()


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
