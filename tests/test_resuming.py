"""Falling back from damaged checkpoints: what counts as damage, what all ranks see, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools import errors, records
from accel_fsdp_tools.errors import AccelFsdpError
from accel_fsdp_tools.manifest import DIRECTORY, MANIFEST_PATH, read_manifest
from accel_fsdp_tools.quarantine import QUARANTINE, list_set_aside
from accel_fsdp_tools.records import CHECKSUMS, read_record
from accel_fsdp_tools.survey import list_facts
from tests.harness import run_ranks
from tests.manifests import edit_manifest
from tests.training import Log, Setup, assert_continues, build, read_root, train, train_batch

SETUP = Setup(num_items=48, accumulation=1, num_epochs=1, keep_last=9)
LAST = "step_00000008"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Log]]:
    """A root with checkpoints after 2, 4, 6 and 8 updates, all read back."""
    folder = tmp_path_factory.mktemp("trained")
    logs = run_ranks(train, str(folder / "root"), SETUP, folder=folder / "r")
    assert [each.is_verified for each in list_facts(folder / "root")] == [True] * 4
    return folder / "root", logs


@pytest.fixture
def root(trained: tuple[Path, list[Log]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "root"))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _change_fingerprint(path: Path) -> None:
    """Let the manifest say that something else was in memory at the save: the files are whole, the load is not it."""

    def change(raw: dict[str, Any]) -> None:
        tensor = raw["models"][0]["tensors"][-1]
        tensor["fingerprint"] = tensor["fingerprint"][::-1]

    edit_manifest(path, change)


def _resume(roots: list[str], options: dict[str, Any] | None = None) -> list[Any]:
    """Resume from one root after another with the same objects; position or error of each."""
    from accel_fsdp_tools import Checkpointer, views

    views.VISIBILITY_S = 1.0
    objects = build(SETUP, seed=3)
    outcomes = []
    for root in roots:
        with Checkpointer(objects.accelerator, root, **(options or {})) as checkpointer:
            try:
                outcomes.append(checkpointer.resume())
            except AccelFsdpError as error:
                outcomes.append(error)
            else:
                break  # the objects are no longer as at the start
    return outcomes


# -- damage to the newest: every kind of file, one at a time --------------------------------------------------------


def _list_kinds() -> dict[str, str]:
    return {
        "model": "pytorch_model_fsdp_0/__1_0.distcp",
        "model metadata": "pytorch_model_fsdp_0/.metadata",
        "optimizer": "optimizer_0/__0_0.distcp",
        "optimizer metadata": "optimizer_0/.metadata",
        "scheduler": "scheduler.bin",
        "accelerate's rng": "random_states_1.pkl",
        "digests": f"{DIRECTORY}/digests_rank_00001.json",
        "rng": f"{DIRECTORY}/rng_rank_00001.safetensors",
        "progress": f"{DIRECTORY}/progress_rank_00000.json",
        "config": f"{DIRECTORY}/model_0/config.json",
        "generation config": f"{DIRECTORY}/model_0/generation_config.json",
        "manifest": MANIFEST_PATH,
    }


def _resume_with_all_faults(root: str, folder: str) -> dict[str, Any]:
    """Damage each kind of file in turn, by a flip or by removal, and ask what a resume would fall back to.

    Nothing is loaded: the load of an older checkpoint is stood in for, so that one process can try all faults.
    """
    from accel_fsdp_tools import Checkpointer
    from accel_fsdp_tools import run_loads as module
    from accel_fsdp_tools.ranks import run_on_main

    objects = build(SETUP, seed=3)
    load = module.load_checkpoint
    results = {}

    class _EnoughError(Exception):
        pass

    def load_newest_only(accelerator: Any, path: Any, notes: Any, **options: Any) -> Any:
        if Path(path).name != LAST:
            raise _EnoughError(path)
        return load(accelerator, path, notes, **options)

    module.load_checkpoint = load_newest_only
    for kind, name in _list_kinds().items():
        for fault in ("flip", "remove", "truncate"):
            target = Path(folder) / f"{kind} {fault}"

            def prepare(target: Path = target, name: str = name, fault: str = fault) -> None:
                shutil.copytree(root, target)
                path = target / LAST / name
                if fault == "flip":
                    _flip(path)
                elif fault == "remove":
                    path.unlink()
                else:
                    os.truncate(path, path.stat().st_size // 2)

            run_on_main("preparing", prepare)
            with Checkpointer(objects.accelerator, target) as checkpointer:
                try:
                    checkpointer.resume()
                except _EnoughError as enough:
                    results[kind, fault] = Path(str(enough)).name
            objects.accelerator.wait_for_everyone()  # the other rank's last heartbeat may be on its way
            run_on_main("removing", lambda target=target: shutil.rmtree(target))
    return results


def test_damage_to_any_file_of_the_newest_leads_to_the_one_before(root: Path, tmp_path: Path) -> None:
    for results in run_ranks(_resume_with_all_faults, str(root), str(tmp_path), folder=tmp_path / "r"):
        assert len(results) == 3 * len(_list_kinds())
        assert set(results.values()) == {"step_00000006"}, results
    names = {path.relative_to(root / LAST).as_posix() for path in (root / LAST).rglob("*") if path.is_file()}
    damaged = {re.sub(r"\d+", "N", name) for name in _list_kinds().values()}
    assert {re.sub(r"\d+", "N", name) for name in names} == damaged, "every kind of file has been damaged"


# -- a load that fails half-way -------------------------------------------------------------------------------------


def _train_with_a_disk_that_fails(root: str, setup: Setup) -> Log:
    """Resume while the disk goes bad in the middle of the first load: the model is loaded, the optimizer half."""
    from accel_fsdp_tools import load_objects

    load_optimizer = load_objects.load_optimizer
    calls = []

    def fail_once(accelerator: Any, index: int, directory: Path, **keywords: Any) -> Any:
        result = load_optimizer(accelerator, index, directory, **keywords)
        calls.append(directory)
        if len(calls) == 1:
            if accelerator.is_main_process:
                _flip(directory / "optimizer_0" / "__1_0.distcp")
            accelerator.wait_for_everyone()
            raise RuntimeError("no more bytes")
        return result

    load_objects.load_optimizer = fail_once
    log = train(root, setup, seed=9, perturb=True)
    assert [path.name for path in calls] == ["step_00000004", "step_00000002"]
    return log


@pytest.mark.parametrize(
    ("version", "failure"),
    [
        (1, "in the middle"),
        (2, "at the end"),
        pytest.param(1, "at the end", marks=pytest.mark.matrix),
        pytest.param(2, "in the middle", marks=pytest.mark.matrix),
    ],
)
def test_the_run_goes_on_bit_for_bit_after_a_load_that_failed(tmp_path: Path, version: int, failure: str) -> None:
    setup = Setup(num_items=30, accumulation=1, num_epochs=1, keep_last=9, fsdp_version=version, unused_parameter=True)
    reference = run_ranks(train, str(tmp_path / "whole"), setup, folder=tmp_path / "r0")
    root = tmp_path / "root"
    for step in (2, 4):
        shutil.copytree(tmp_path / "whole" / f"step_0000000{step}", root / f"step_0000000{step}")
    if failure == "at the end":
        _change_fingerprint(root / "step_00000004")
        resumed = run_ranks(train, str(root), setup, seed=9, perturb=True, folder=tmp_path / "r1")
    else:
        resumed = run_ranks(_train_with_a_disk_that_fails, str(root), setup, folder=tmp_path / "r1")
    assert_continues(reference, resumed)
    for log in resumed:
        assert log.position.step == 2
        (skipped,) = log.position.skipped
        expected = "is not what was in memory" if failure == "at the end" else "__1_0.distcp is damaged"
        assert expected in skipped.reason
    assert read_root(root) == read_root(tmp_path / "whole"), "step 4 was saved again"
    assert [each.path.name for each in list_set_aside(root)] == ["step_00000004"]


# -- what is no damage ----------------------------------------------------------------------------------------------


def _resume_with_other_faults(root: str) -> list[Any]:
    """Faults of the run, the machine or the mounts, one after another; nothing is loaded in any."""
    from accel_fsdp_tools import Checkpointer, files, load, resuming, views

    views.VISIBILITY_S = 0.5
    objects = build(SETUP, seed=3)
    accelerator, rank = objects.accelerator, objects.accelerator.process_index
    outcomes: list[Any] = []

    def attempt() -> None:
        with Checkpointer(accelerator, root) as checkpointer:
            try:
                outcomes.append(checkpointer.resume())
            except AccelFsdpError as error:
                outcomes.append(error)

    accelerator.register_for_checkpointing(objects.scheduler.scheduler)  # one object more than was saved
    attempt()
    accelerator._custom_objects.clear()

    compute_checksum = files.compute_checksum
    for who in (1, 0):
        files.compute_checksum = lambda path, who=who: (
            (path.stat().st_size, "0" * 32) if rank == who else compute_checksum(path)
        )
        attempt()
    files.compute_checksum = compute_checksum

    find_fault = resuming.find_fault
    resuming.find_fault = lambda candidate: "a file is missing"
    find_fault_here = views._find_fault
    views._find_fault = lambda path: "a file is missing" if rank == 0 else find_fault_here(path)
    attempt()
    resuming.find_fault, views._find_fault = find_fault, find_fault_here

    scan_checkpoint = load.scan_checkpoint

    def run_out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory")

    load.scan_checkpoint = run_out_of_memory
    attempt()
    load.scan_checkpoint = scan_checkpoint

    list_committed = views.list_committed
    for who in (0, 1):
        views.list_committed = lambda root, who=who: list_committed(root)[: -1 if rank == who else None]
        attempt()
    views.list_committed = list_committed

    read = views.read_manifest
    views.read_manifest = lambda path: read(Path(path).parent / "step_00000006" if rank == 1 else path)
    attempt()
    views.read_manifest = read

    if rank == 1:  # both late, and in time
        looks = iter(range(5))
        views.list_committed = lambda root: list_committed(root)[: -1 if next(looks) < 1 else None]
        more = iter(range(5))
        views.read_manifest = lambda path: read(Path(path).parent / "step_00000006" if next(more) < 1 else path)
    attempt()
    return outcomes


def test_what_is_no_damage_costs_no_checkpoint(root: Path, tmp_path: Path) -> None:
    before = sorted(str(path) for path in root.rglob("*"))
    for outcomes in run_ranks(_resume_with_other_faults, str(root), folder=tmp_path / "r"):
        mismatch, bad_1, bad_0, stale, memory, late_0, late_1, other, position = outcomes
        assert isinstance(mismatch, errors.MismatchError)
        for rank, bad in enumerate((bad_0, bad_1)):
            assert isinstance(bad, errors.StorageError)
            assert bad.rank == rank
            assert f"rank {1 - rank} can: the checkpoint is good" in str(bad)
        assert isinstance(stale, errors.StorageError)
        assert f"rank 0 does not see {LAST} as other ranks do" in str(stale)
        assert isinstance(memory, errors.RankFailedError)
        assert memory.cause_type == "MemoryError"
        assert isinstance(late_0, errors.StorageError)
        assert f"rank 1 sees {LAST}" in str(late_0)
        assert isinstance(late_1, errors.StorageError)
        assert f"rank 1 does not see {LAST}" in str(late_1)
        assert isinstance(other, errors.StorageError)
        assert "rank 1 sees another checkpoint" in str(other)
        assert position.step == 8, "what is late and comes in time is waited for"
        assert position.skipped == ()
    after = sorted(str(path) for path in root.rglob("*") if not path.name.endswith(".resumed.json"))
    assert after == before
    resumed = read_record(root, read_manifest(root / LAST).lineage.checkpoint_id).num_resumes
    assert resumed == 1, "an error that is not the checkpoint's fault does not count"


# -- nothing left ---------------------------------------------------------------------------------------------------


def _damage_all(root: Path) -> None:
    for path in sorted(root.glob("step_*")):
        _flip(path / "optimizer_0" / "__1_0.distcp")


def test_damage_to_all_is_no_silent_fresh_start(root: Path, tmp_path: Path) -> None:
    _damage_all(root)
    before = read_root(root)
    for (error,) in run_ranks(_resume, [str(root)], folder=tmp_path / "a"):
        assert isinstance(error, errors.CheckpointIncompleteError)
        for name in before:
            assert f"skipped {name}" in str(error)
        assert "optimizer_0/__1_0.distcp is damaged" in str(error)
    assert read_root(root) == before, "nothing is moved where nothing takes its place"
    assert not (root / QUARANTINE).exists()
    for (position,) in run_ranks(_resume, [str(root)], {"on_damage": "fresh"}, folder=tmp_path / "b"):
        assert position.fresh
        assert {each.name for each in position.skipped} == set(before)
    assert read_root(root) == []
    assert [each.path.name for each in list_set_aside(root)] == before
    for (error,) in run_ranks(_resume, [str(root)], folder=tmp_path / "c"):
        assert isinstance(error, errors.CheckpointIncompleteError)
        assert "set aside earlier" in str(error)


def test_stop_and_what_was_half_loaded(root: Path, tmp_path: Path) -> None:
    roots = [Path(shutil.copytree(root, tmp_path / name)) for name in ("stop", "manifest", "foreign", "half")]
    _flip(roots[0] / LAST / "scheduler.bin")
    (roots[1] / "step_00000002" / MANIFEST_PATH).unlink()
    (error, second) = run_ranks(
        _resume, [str(each) for each in roots[:2]], {"on_damage": "stop"}, folder=tmp_path / "a"
    )[1]
    assert isinstance(error, errors.DamagedCheckpointError)
    assert "forbids to fall back" in str(error)
    assert "step_00000002" in str(second)
    assert [len(read_root(each)) for each in roots[:2]] == [4, 4]
    for path in (roots[2], roots[3]):
        for each in ("step_00000002", "step_00000004", "step_00000006"):
            shutil.rmtree(path / each)
    _flip(roots[2] / LAST / "scheduler.bin")
    (roots[2] / "checkpoint_3" / "pytorch_model_fsdp_0").mkdir(parents=True)
    _change_fingerprint(roots[3] / LAST)
    for foreign, half in run_ranks(
        _resume, [str(each) for each in roots[2:]], {"on_damage": "fresh"}, folder=tmp_path / "b"
    ):
        assert isinstance(foreign, errors.CheckpointIncompleteError), "what others wrote is not thrown away"
        assert isinstance(half, errors.CheckpointIncompleteError)
        assert "this process cannot start anew" in str(half)


# -- crash loops ----------------------------------------------------------------------------------------------------


def _resume_and_train(root: str, num_batches: int, options: dict[str, Any]) -> Any:
    from accel_fsdp_tools import Checkpointer

    objects = build(SETUP, seed=3)
    with Checkpointer(objects.accelerator, root, save_every=1, **options) as checkpointer:
        position = checkpointer.resume()
        iterator = iter(objects.loader)
        for _ in range(num_batches):
            with objects.accelerator.accumulate(objects.model):
                train_batch(objects, next(iterator))
            checkpointer.step()
    return position


def test_a_crash_loop_ends_with_the_one_before(root: Path, tmp_path: Path) -> None:
    shutil.rmtree(root / LAST)
    checkpoint_id = read_manifest(root / "step_00000006").lineage.checkpoint_id
    options = {"max_resumes": 2}
    for number in range(2):
        position = run_ranks(_resume_and_train, str(root), 0, options, folder=tmp_path / f"r{number}")[0]
        assert position.step == 6
        assert read_record(root, checkpoint_id).num_resumes == number + 1
    position = run_ranks(_resume_and_train, str(root), 1, options, folder=tmp_path / "last")[1]
    assert position.step == 4
    assert "2 run(s) began with it and ended before they saved again" in position.skipped[0].reason
    assert [each.path.name for each in list_set_aside(root)] == ["step_00000006"]
    assert read_record(root, checkpoint_id) == records.Record(), "moved back by hand it starts anew"
    resumed_from = read_manifest(root / "step_00000004").lineage.checkpoint_id
    assert read_record(root, resumed_from).num_resumes == 0, "a save has been reached"
    assert read_manifest(root / "step_00000005").lineage.attempt == 4 - 2, "attempts count those that saved"


# -- retention in a run ---------------------------------------------------------------------------------------------


def _train_steps(root: str, num_steps: int, options: dict[str, Any]) -> tuple[int, list[str]]:
    """Resume and make some updates, each with a save; the first with a metric that is the best."""
    from accel_fsdp_tools import Checkpointer

    objects = build(SETUP, seed=3)
    saved = []
    with Checkpointer(objects.accelerator, root, save_every=1, **options) as checkpointer:
        position = checkpointer.resume()
        iterator = iter(objects.loader)
        for _ in range(num_steps):
            with objects.accelerator.accumulate(objects.model):
                train_batch(objects, next(iterator))
            path = checkpointer.step(metrics={"score": 1.0 / (1 + checkpointer.num_steps)})
            saved.append(path.name)
    return position.step, saved


@pytest.mark.matrix
def test_two_of_three_and_three_after_a_restart(tmp_path: Path) -> None:
    root = tmp_path / "root"
    options = {"keep_last": 2}
    assert run_ranks(_train_steps, str(root), 3, options, folder=tmp_path / "a")[0][0] == 0
    assert read_root(root) == ["step_00000002", "step_00000003"]
    for number, path in enumerate(sorted(root.glob("step_*"))):
        os.utime(path, (1e9 - number, 1e9 - number))
    (root / "step_00000003_merged").mkdir()
    step, saved = run_ranks(_train_steps, str(root), 3, options, folder=tmp_path / "b")[0]
    assert (step, saved) == (3, ["step_00000004", "step_00000005", "step_00000006"]), "no name is used again"
    assert read_root(root) == ["step_00000003_merged", "step_00000005", "step_00000006"]
    assert run_ranks(_train_steps, str(root), 0, options, folder=tmp_path / "c")[0][0] == 6


def test_rules_of_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep_last": 1, "keep_every": 3, "keep_best": ("score", "max")}
    run_ranks(_train_steps, str(tmp_path / "root"), 5, options, folder=tmp_path / "a")
    assert read_root(tmp_path / "root") == [f"step_0000000{step}" for step in (1, 3, 5)]
    run_ranks(_train_steps, str(tmp_path / "off"), 3, {"keep_last": 1, "verify": "off"}, folder=tmp_path / "b")
    assert read_root(tmp_path / "off") == ["step_00000003"]
    (facts,) = list_facts(tmp_path / "off")
    assert not facts.is_verified, "nothing is recorded that was not looked at"
    run_ranks(_train_steps, str(tmp_path / "all"), 3, {"keep_last": None}, folder=tmp_path / "c")
    assert len(read_root(tmp_path / "all")) == 3


def _use_policies(root: str) -> dict[str, Any]:
    from accel_fsdp_tools import Checkpointer
    from accel_fsdp_tools.retention import KeepEvery, KeepLast

    objects = build(SETUP, seed=1)
    results: dict[str, Any] = {}
    for name, options in {
        "both": {"retention": KeepLast(1), "keep_every": 3},
        "no policy": {"retention": 3},
        "best": {"keep_best": "loss"},
        "on_damage": {"on_damage": "ignore"},
        "max_resumes": {"max_resumes": 0},
    }.items():
        try:
            Checkpointer(objects.accelerator, root, **options)
        except AccelFsdpError as error:
            results[name] = error
    iterator = iter(objects.loader)
    with Checkpointer(objects.accelerator, root, retention=KeepLast(1) | KeepEvery(4)) as checkpointer:
        checkpointer.resume()
        for step in range(1, 6):
            with objects.accelerator.accumulate(objects.model):
                train_batch(objects, next(iterator))
            checkpointer.step()
            checkpointer.save(pinned=step == 2)
    return results


def test_a_policy_of_ones_own_and_pins(tmp_path: Path) -> None:
    for results in run_ranks(_use_policies, str(tmp_path / "root"), folder=tmp_path / "a"):
        assert len(results) == 5
        assert all(isinstance(error, errors.UsageError) for error in results.values())
    assert read_root(tmp_path / "root") == [f"step_0000000{step}" for step in (2, 4, 5)]


# -- storage that is not shared -------------------------------------------------------------------------------------


def _use_own_disks(folder: str, do: str) -> Any:
    """Every rank has a disk of its own at the same path: /proc/self/cwd stands for a node's local mount."""
    from accel_fsdp_tools import Checkpointer, save_checks, views

    views.VISIBILITY_S = save_checks.VISIBILITY_S = 0.5
    objects = build(SETUP, seed=1)
    mine = Path(folder) / f"node{objects.accelerator.process_index}"
    mine.mkdir()
    os.chdir(mine)
    outcomes = []
    for root in ("/proc/self/cwd/root", f"{mine}/root"):
        try:
            with Checkpointer(objects.accelerator, root) as checkpointer:
                getattr(checkpointer, do)()
        except AccelFsdpError as error:
            outcomes.append(error)
    return outcomes


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")
@pytest.mark.parametrize("do", ["resume", "save"])
def test_disks_that_are_not_shared_are_noticed_at_once(tmp_path: Path, do: str) -> None:
    for disks, paths in run_ranks(_use_own_disks, str(tmp_path), do, folder=tmp_path / "r"):
        assert isinstance(disks, errors.StorageError)
        assert disks.rank == 1
        assert "rank 1 does not see the lock" in str(disks)
        assert "shared file system" in str(disks)
        assert isinstance(paths, errors.UsageError)
        assert paths.rank == 1
        assert "Ranks were given different roots" in str(paths)


def test_a_resume_records_that_all_files_were_read(trained: tuple[Path, list[Log]], root: Path, tmp_path: Path) -> None:
    shutil.rmtree(root / records.RECORDS)
    assert run_ranks(_resume, [str(root)], folder=tmp_path / "a")[0][0].step == 8
    assert [each.step for each in list_facts(root) if each.is_verified] == [8]
    record = json.loads(next((root / records.RECORDS).glob("*.verified.json")).read_text())
    assert record["how"] == CHECKSUMS
