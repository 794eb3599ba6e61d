"""`Checkpointer`: which checkpoint it resumes, which it removes, and when it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools import errors
from accel_fsdp_tools.errors import AccelFsdpError
from accel_fsdp_tools.manifest import MANIFEST_PATH, read_manifest
from accel_fsdp_tools.quarantine import QUARANTINE, list_set_aside
from accel_fsdp_tools.records import RECORDS
from tests.harness import RankError, collect, run_ranks, start_ranks
from tests.manifests import make_checkpoint
from tests.training import Setup, build, read_root, train, train_batch

SETUP = Setup(num_items=48, accumulation=1, num_epochs=1, keep_last=9)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with checkpoints after 2, 4, 6 and 8 updates."""
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(train, str(folder / "root"), SETUP, folder=folder / "r")
    assert read_root(folder / "root") == [f"step_0000000{step}" for step in (2, 4, 6, 8)]
    return folder / "root"


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "root"))


def _resume(root: str, *arguments: Any, num_batches: int = 0, save: bool = False, **keywords: Any) -> Any:
    """Resume, train a few batches, perhaps save; returns position and the error, if any, of the resume."""
    from accel_fsdp_tools import Checkpointer

    objects = build(SETUP, seed=3)
    options = keywords.pop("options", {})
    with Checkpointer(objects.accelerator, root, **options) as checkpointer:
        try:
            position = checkpointer.resume(*arguments, **keywords)
        except AccelFsdpError as error:
            return None, error
        iterator = iter(objects.loader) if num_batches else None
        for _ in range(num_batches):
            with objects.accelerator.accumulate(objects.model):
                loss = train_batch(objects, next(iterator))
            checkpointer.step(loss=loss, metrics={"accuracy": 0.5})
        if save:
            checkpointer.save()
    return position, None


def test_an_abandoned_branch_is_not_the_newest(root: Path, tmp_path: Path) -> None:
    position, _ = run_ranks(
        _resume, str(root), str(root / "step_00000004"), num_batches=2, save=True, folder=tmp_path / "a"
    )[0]
    assert (position.step, position.batch) == (4, 4)
    assert read_manifest(root / "step_00000006").lineage.attempt == 2
    assert read_manifest(root / "step_00000006").lineage.parent_id == (
        read_manifest(root / "step_00000004").lineage.checkpoint_id
    )
    position, _ = run_ranks(_resume, str(root), folder=tmp_path / "b")[0]
    assert position.step == 6, "step 8 belongs to the branch that was abandoned"


def test_pruning_follows_the_lineage_and_spares_what_is_not_its_own(root: Path, tmp_path: Path) -> None:
    make_checkpoint(root / "best", step=1)
    make_checkpoint(root / "step_1_keep", step=1)
    (root / "step_00000001" / "pytorch_model_fsdp_0").mkdir(parents=True)
    (root / "notes").mkdir()
    run_ranks(
        _resume,
        str(root),
        str(root / "step_00000002"),
        num_batches=3,
        save=True,
        options={"keep_last": 2},
        folder=tmp_path / "a",
    )
    assert sorted(path.name for path in root.iterdir()) == [
        RECORDS,
        "best",
        "notes",
        "step_00000001",
        "step_00000005",
        "step_00000008",
        "step_1_keep",
    ]


def test_metrics_and_position_are_in_the_manifest(root: Path, tmp_path: Path) -> None:
    run_ranks(_resume, str(root), str(root / "step_00000002"), num_batches=1, save=True, folder=tmp_path / "a")
    manifest = read_manifest(root / "step_00000003")
    assert manifest.extra["metrics"]["accuracy"] == 0.5
    assert 0 < manifest.extra["metrics"]["loss"] < 10
    assert (manifest.step, manifest.epoch) == (3, 0)


def test_what_cannot_be_resumed_is_skipped_with_its_reason(root: Path, tmp_path: Path) -> None:
    shutil.rmtree(root / "step_00000008" / "optimizer_0")
    (root / "step_00000006" / MANIFEST_PATH).write_text("{")
    (root / "step_00000009").mkdir()
    for position, _ in run_ranks(_resume, str(root), folder=tmp_path / "a"):
        assert position.step == 4
        text = str(position.report)
        assert "skipped step_00000008" in text
        assert "optimizer_0" in text
        assert "skipped step_00000006" in text
        assert "skipped step_00000009" in text


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_is_set_aside_and_the_one_before_is_resumed(root: Path, tmp_path: Path) -> None:
    _flip(root / "step_00000008" / "pytorch_model_fsdp_0" / "__1_0.distcp")
    for position, _ in run_ranks(_resume, str(root), folder=tmp_path / "a"):
        assert (position.step, position.report.exact) == (6, True)
        (skipped,) = position.skipped
        assert skipped.name == "step_00000008"
        assert "__1_0.distcp is damaged" in skipped.reason
        assert str(skipped) in position.report.notes
        assert str(skipped) in str(position)
    assert "skipped step_00000008" in (tmp_path / "a" / "log_1.txt").read_text(), "every rank says so"
    assert not (root / "step_00000008").exists()
    (aside,) = list_set_aside(root)
    assert aside.path == root / QUARANTINE / "step_00000008"
    assert "__1_0.distcp is damaged" in aside.reason
    assert read_manifest(aside.path).step == 8, "kept as it was"


def _foreign(root: Path) -> None:
    (root / "checkpoint_3" / "pytorch_model_fsdp_0").mkdir(parents=True)


def _unfinished(root: Path) -> None:
    (root / "step_00000003").mkdir(parents=True)


def _damaged(root: Path) -> None:
    path = make_checkpoint(root / "step_00000003", step=3)
    (path / MANIFEST_PATH).write_text(json.dumps({"format": "accel_fsdp_tools.manifest", "version": 1}))


@pytest.mark.parametrize("fill", [_foreign, _unfinished, _damaged])
def test_a_root_without_anything_to_resume_is_no_silent_fresh_start(
    tmp_path: Path, fill: Callable[[Path], None]
) -> None:
    root = tmp_path / "root"
    fill(root)
    for _, error in run_ranks(_resume, str(root), folder=tmp_path / "a"):
        assert isinstance(error, errors.CheckpointIncompleteError)
        assert "fresh=True" in str(error)
    for position, _ in run_ranks(_resume, str(root), fresh=True, folder=tmp_path / "b"):
        assert position.fresh


def test_an_empty_root_is_a_fresh_start(tmp_path: Path) -> None:
    for position, _ in run_ranks(_resume, str(tmp_path / "new"), folder=tmp_path / "a"):
        assert (position.fresh, position.epoch, position.step, position.batch) == (True, 0, 0, 0)
        assert str(position) == "fresh start"


def _hold(root: str, ready: str) -> None:
    import time

    from accel_fsdp_tools import Checkpointer

    objects = build(SETUP, seed=1)
    checkpointer = Checkpointer(objects.accelerator, root)
    checkpointer.resume()
    Path(ready).touch()
    deadline = time.monotonic() + 60
    while not Path(f"{ready}.done").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_root_belongs_to_one_live_run(tmp_path: Path) -> None:
    import time

    root, ready = tmp_path / "root", tmp_path / "ready"
    holders = start_ranks(_hold, str(root), str(ready), world_size=1, folder=tmp_path / "a")
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for _, error in run_ranks(_resume, str(root), folder=tmp_path / "b"):
        assert isinstance(error, errors.LockedError)
        assert "in use by run" in str(error)
    (tmp_path / "ready.done").touch()
    collect(holders, folder=tmp_path / "a")
    for position, _ in run_ranks(_resume, str(root), folder=tmp_path / "c"):
        assert position.fresh, "the holder has ended without close(), and is known to be dead"


def _spoil_after_the_commit(root: str) -> Any:
    from accel_fsdp_tools import Checkpointer, phases

    objects = build(SETUP, seed=3)

    def spoil(point: str) -> None:
        if point == "prune.begin" and objects.accelerator.is_main_process:
            path = Path(root) / "step_00000009" / "scheduler.bin"
            path.write_bytes(path.read_bytes()[:-1])

    phases.set_observer(spoil)
    with Checkpointer(objects.accelerator, root, keep_last=1) as checkpointer:
        checkpointer.resume()
        checkpointer._counter.step = 9
        try:
            checkpointer.save()
        except AccelFsdpError as error:
            return error
    return None


def test_nothing_old_goes_before_the_new_one_was_read_back(root: Path, tmp_path: Path) -> None:
    before = read_root(root)
    for error in run_ranks(_spoil_after_the_commit, str(root), folder=tmp_path / "a"):
        assert isinstance(error, errors.DamagedCheckpointError)
    assert read_root(root) == [*before, "step_00000009"]


def _in_the_loop(root: str) -> dict[str, Any]:
    """Accumulation, time-based saving and wrong arguments, in one process."""
    from torch.utils.data import DataLoader

    from accel_fsdp_tools import Checkpointer

    results: dict[str, Any] = {}
    objects = build(Setup(num_items=48, accumulation=2), seed=1)
    accelerator = objects.accelerator

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            results[name] = call()
        except AccelFsdpError as error:
            results[name] = error

    for name, arguments in (
        ("keep_last", {"keep_last": 0}),
        ("save_every", {"save_every": 0}),
        ("save_every bool", {"save_every": True}),
        ("save_every_s", {"save_every_s": float("nan")}),
        ("verify", {"verify": "maybe"}),
        ("train_dataloader", {"train_dataloader": DataLoader([1])}),
    ):
        attempt(name, lambda arguments=arguments: Checkpointer(accelerator, root, **arguments))
    file = Path(root).parent / "file"
    file.touch()
    attempt("file", lambda: Checkpointer(accelerator, file))
    saved = []
    with Checkpointer(accelerator, root, save_every_s=1e-6 if accelerator.is_main_process else 1e6) as checkpointer:
        checkpointer.resume()
        attempt("both", lambda: checkpointer.resume(root, fresh=True))
        for batch in objects.loader:
            with accelerator.accumulate(objects.model):
                train_batch(objects, batch)
            saved.append(checkpointer.step() is not None)
            if len(saved) == 3:
                attempt("save in the middle", checkpointer.save)
            if len(saved) == 4:
                break
    results["saved"] = saved
    return results


def test_the_loop(tmp_path: Path) -> None:
    for results in run_ranks(_in_the_loop, str(tmp_path / "root"), folder=tmp_path / "a"):
        for name in ("keep_last", "save_every", "save_every bool", "save_every_s", "verify", "train_dataloader"):
            assert type(results[name]) is errors.UsageError, f"{name}: {results[name]!r}"
        assert type(results["file"]) is type(results["both"]) is errors.UsageError
        assert results["saved"] == [False, True, False, True], "only at boundaries, and rank 0's clock decides"
        assert type(results["save in the middle"]) is errors.CallOrderError


def _too_early(root: str) -> None:
    from accel_fsdp_tools import Checkpointer
    from tests.training import build_accelerator

    Checkpointer(build_accelerator(SETUP), root)


def test_before_prepare_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_too_early, str(tmp_path / "root"), folder=tmp_path / "a")
    assert all(isinstance(error, errors.CallOrderError) for error in caught.value.errors.values())
