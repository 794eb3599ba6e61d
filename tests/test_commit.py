"""Commit, replacement, recovery, sweeping, and deletions, without any training."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_fsdp_tools import phases
from accel_fsdp_tools.commit import (
    FOREIGN_PARTIAL_STALE_S,
    OWNER_NAME,
    PARTIAL,
    Staging,
    check_target,
    commit_staging,
    delete_checkpoint,
    discard_staging,
    find_checkpoints,
    make_root,
    open_staging,
    recover,
)
from accel_fsdp_tools.errors import CheckpointNotFoundError, ManifestError, StorageError, UsageError
from accel_fsdp_tools.manifest import DIRECTORY, MANIFEST_PATH, read_manifest, write_manifest
from accel_fsdp_tools.retention import KeepLast, choose_deletions
from accel_fsdp_tools.survey import list_facts
from tests.manifests import make_checkpoint, make_manifest


def _stage(final: Path, *, step: int, run_id: str = "me") -> Staging:
    staging = open_staging(final, run_id)
    (staging.partial / DIRECTORY).mkdir()
    write_manifest(staging.partial, make_manifest(step=step))
    return staging


def test_commit_leaves_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    commit_staging(_stage(root / "step_1", step=1))
    assert [path.name for path in root.iterdir()] == ["step_1"]
    assert read_manifest(root / "step_1").step == 1


def test_replacement_swaps(tmp_path: Path) -> None:
    commit_staging(_stage(tmp_path / "last", step=1))
    (tmp_path / "last" / "only_old").touch()
    commit_staging(_stage(tmp_path / "last", step=2))
    assert read_manifest(tmp_path / "last").step == 2
    assert not (tmp_path / "last" / "only_old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


class _Crash(BaseException):
    pass


def _die_of_it(root: Path) -> None:
    """Make the owner of what lies in `.partial` look dead."""
    for owner in (root / PARTIAL).glob(f"*/{OWNER_NAME}"):
        raw = json.loads(owner.read_text())
        raw["process_started"] -= 1000
        owner.write_text(json.dumps(raw))


@pytest.mark.parametrize(("point", "survivor"), [("save.set_aside", 1), ("save.renamed", 2)])
def test_a_crash_in_a_replacement_leaves_old_or_new(tmp_path: Path, point: str, survivor: int) -> None:
    commit_staging(_stage(tmp_path / "last", step=1))

    def observe(reached: str) -> None:
        if reached == point:
            raise _Crash

    staging = _stage(tmp_path / "last", step=2)
    phases.set_observer(observe)
    try:
        with pytest.raises(_Crash):
            commit_staging(staging)
    finally:
        phases.set_observer(None)
    if survivor == 1:
        assert read_manifest(tmp_path / "last").step == 1, "an interrupt puts it back"
        (tmp_path / "last").rename(staging.set_aside)  # a crash does not
    assert recover(tmp_path) == [], "a run that lives is left alone"
    _die_of_it(tmp_path)
    done = recover(tmp_path)
    assert done
    assert read_manifest(tmp_path / "last").step == survivor
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_sweeping_removes_dead_partials_only(tmp_path: Path) -> None:
    _stage(tmp_path / "step_1", step=1, run_id="dead")
    _die_of_it(tmp_path)
    _stage(tmp_path / "step_2", step=2, run_id="alive")
    assert any("dead" in line for line in recover(tmp_path))
    assert [path.name for path in (tmp_path / PARTIAL).iterdir()] == ["alive"]


def test_a_run_that_died_while_it_put_down_its_name_is_swept_once_it_is_quiet(tmp_path: Path) -> None:
    left = tmp_path / PARTIAL / "dead" / f".{OWNER_NAME}.123.tmp"
    left.parent.mkdir(parents=True)
    left.touch()
    recover(tmp_path)
    assert left.exists(), "it may be one that is just beginning"
    old = time.time() - 1000
    os.utime(left.parent, (old, old))
    recover(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_counts_as_dead(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from accel_fsdp_tools.commit import open_staging;"
        f"open_staging(Path({str(tmp_path)!r}) / 'step_1', 'victim'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (tmp_path / PARTIAL / "victim").is_dir()
    recover(tmp_path)
    assert list(tmp_path.iterdir()) == []


def _move_to_another_host(root: Path, *, age_s: float) -> None:
    """Make the owners of what lies in `.partial` look like runs elsewhere that were last heard of `age_s` ago."""
    when = time.time() - age_s
    for owner in (root / PARTIAL).glob(f"*/{OWNER_NAME}"):
        raw = json.loads(owner.read_text())
        raw["host"] = "another-host"
        owner.write_text(json.dumps(raw))
        os.utime(owner, (when, when))
        os.utime(owner.parent, (when, when))


def test_a_partial_of_another_host_is_left_for_a_day(tmp_path: Path) -> None:
    _stage(tmp_path / "step_1", step=1)
    _move_to_another_host(tmp_path, age_s=FOREIGN_PARTIAL_STALE_S - 3600)
    assert recover(tmp_path) == []
    assert (tmp_path / PARTIAL / "me" / "step_1").is_dir()
    _move_to_another_host(tmp_path, age_s=FOREIGN_PARTIAL_STALE_S + 3600)
    assert any("step_1" in line for line in recover(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_another_host_set_aside_is_put_back_sooner(tmp_path: Path) -> None:
    commit_staging(_stage(tmp_path / "last", step=1))
    staging = _stage(tmp_path / "last", step=2)
    staging.final.rename(staging.set_aside)
    _move_to_another_host(tmp_path, age_s=5)
    assert recover(tmp_path) == [], "it may be in the middle of it"
    _move_to_another_host(tmp_path, age_s=600)
    assert any("put last back" in line for line in recover(tmp_path))
    assert read_manifest(tmp_path / "last").step == 1
    assert staging.partial.is_dir()


def test_making_the_root(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    make_root(root)
    make_root(root)
    assert root.is_dir()
    file = tmp_path / "file"
    file.touch()
    for bad in (file, file / "below", Path("/proc/nothing/here")):
        with pytest.raises(StorageError, match="permissions") as caught:
            make_root(bad)
        assert caught.value.path == str(bad)


def test_discarding_removes_the_partial(tmp_path: Path) -> None:
    staging = _stage(tmp_path / "step_1", step=1)
    discard_staging(staging)
    assert list(tmp_path.iterdir()) == []


def test_targets_that_must_not_be_replaced(tmp_path: Path) -> None:
    foreign = tmp_path / "mine"
    foreign.mkdir()
    check_target(foreign, overwrite=False)
    (foreign / "notes.txt").write_text("dear to me")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        check_target(foreign, overwrite=False)
    check_target(foreign, overwrite=True)
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    link.symlink_to(foreign)
    for bad in (file, link, tmp_path / PARTIAL / "x", file / "below"):
        with pytest.raises(UsageError):
            check_target(bad, overwrite=True)


def test_unwritable_root_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).write_text("in the way")
    with pytest.raises(StorageError, match="Cannot write"):
        open_staging(tmp_path / "step_1", "me")


def test_finding_tells_committed_from_the_rest(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "step_00000002", step=2)
    broken = make_checkpoint(tmp_path / "step_00000003", step=3)
    (broken / MANIFEST_PATH).write_text("{")
    (tmp_path / "step_00000004").mkdir()
    (tmp_path / "checkpoint_1" / "pytorch_model_fsdp_0").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").touch()
    found = {each.path.name: each for each in find_checkpoints(tmp_path)}
    assert set(found) == {"step_00000002", "step_00000003", "step_00000004", "checkpoint_1"}
    assert found["step_00000002"].order == (1, 2)
    assert isinstance(found["step_00000003"].error, ManifestError)
    assert "no manifest" in str(found["checkpoint_1"].problem)
    with pytest.raises(ValueError, match="no place"):
        _ = found["step_00000004"].order
    assert find_checkpoints(tmp_path / "nothing") == []
    with pytest.raises(CheckpointNotFoundError):
        find_checkpoints(tmp_path / "notes.txt")


def test_deletion_is_never_seen_half_done(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "step_00000001", step=1)

    def observe(point: str) -> None:
        if point == "prune.set_aside":
            assert not path.exists()
            raise _Crash

    phases.set_observer(observe)
    try:
        with pytest.raises(_Crash):
            delete_checkpoint(path, "me")
    finally:
        phases.set_observer(None)
    _die_of_it(tmp_path)
    recover(tmp_path)
    assert list(tmp_path.iterdir()) == []
    delete_checkpoint(path, "me")  # gone already: another process was faster


def test_a_full_disk_does_not_keep_an_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "step_00000001", step=1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", refuse)
    seen: list[tuple[str, list[str]]] = []
    previous = phases.set_observer(
        lambda point: seen.append((point, [each.problem or "whole" for each in find_checkpoints(tmp_path)]))
    )
    try:
        assert delete_checkpoint(tmp_path / "step_00000001", "run")
    finally:
        phases.set_observer(previous)
    assert [point for point, _ in seen] == ["prune.set_aside", "prune.removed"]
    assert "whole" not in seen[0][1], "never half a checkpoint"
    assert not delete_checkpoint(tmp_path / "step_00000001", "run"), "another process was first"
    assert list(tmp_path.iterdir()) == []


def test_retention_follows_the_lineage(tmp_path: Path) -> None:
    for step, attempt in ((500, 1), (700, 1), (900, 1), (600, 2)):
        path = make_checkpoint(tmp_path / f"step_{step:08d}", step=step, attempt=attempt)
        os.utime(path, (step % 7, step % 7))  # time stamps say nothing
    found = list_facts(tmp_path, trust="all")
    assert [each.name for each in choose_deletions(found, KeepLast(2))] == ["step_00000500", "step_00000700"]
    assert choose_deletions(found, None) == []
    assert choose_deletions(found, KeepLast(9)) == []
    assert len(choose_deletions(found, KeepLast(1))) == 3
    shutil.rmtree(tmp_path / "step_00000900")
