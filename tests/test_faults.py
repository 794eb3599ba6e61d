"""Faults from the field that a run must survive, refuse, or at least not call exact."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools import errors, verify_checkpoint
from accel_fsdp_tools.errors import AccelFsdpError
from accel_fsdp_tools.manifest import DIRECTORY, read_manifest
from tests.harness import collect, run_ranks, start_ranks
from tests.manifests import edit_manifest
from tests.training import Setup, build, read_root, train, train_batch

SMALL = Setup(num_items=48, accumulation=1, num_epochs=1, keep_last=None)


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except AccelFsdpError as error:
        return error


def _save_on_a_full_disk(root: str, setup: Setup, victim: int) -> tuple[Any, Any]:
    """Save once, then with a limit on file sizes on one rank (a real EFBIG), then without it again."""
    import signal

    from accel_fsdp_tools import Checkpointer

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    objects = build(setup, seed=1)
    with Checkpointer(objects.accelerator, root) as checkpointer:
        checkpointer.resume()
        batches = iter(objects.loader)
        outcomes = []
        for limit in (None, 20_000, None):
            with objects.accelerator.accumulate(objects.model):
                train_batch(objects, next(batches))
            checkpointer.step()
            old = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limit is not None and objects.accelerator.process_index == victim:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
            outcomes.append(_attempt(checkpointer.save))
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
    return tuple(outcomes)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_full_disk_fails_on_every_rank_and_keeps_the_old_checkpoint(
    tmp_path: Path, version: int, kind: str, victim: int
) -> None:
    if kind == "FULL_STATE_DICT" and victim == 1:
        victim = 0  # rank 0 alone writes full files
    setup = Setup(num_items=48, accumulation=1, fsdp_version=version, state_dict_type=kind)
    root = tmp_path / "root"
    processes = start_ranks(_save_on_a_full_disk, str(root), setup, victim, folder=tmp_path / "r")
    outcomes = collect(processes, folder=tmp_path / "r", timeout_s=60)
    for outcome in outcomes:
        assert outcome.finished, f"rank {outcome.rank} hung or died: {outcome.error_text}"
        first, second, third = outcome.value
        assert isinstance(second, errors.RankFailedError), second
        assert (first.name, third.name) == ("step_00000001", "step_00000003")
    assert read_root(root) == ["step_00000001", "step_00000003"]
    assert not (root / ".partial").exists()


def _fill_a_small_disk(folder: str) -> list[Any]:
    """Save, fill the disk but for a few kilobytes, save, prune where nothing is left at all, make room, save again."""
    import os

    from accel_fsdp_tools import Checkpointer
    from accel_fsdp_tools.commit import delete_checkpoint

    objects = build(SMALL, seed=1)
    outcomes: list[Any] = []
    filler = Path(folder) / "filler"
    for name, async_save, left_bytes in (("a", False, 100_000), ("b", True, 100_000), ("c", False, 0)):
        with Checkpointer(
            objects.accelerator, f"{folder}/{name}", keep_last=None, async_save=async_save
        ) as checkpointer:
            checkpointer.resume()
            for room in (True, False, True):
                train_batch(objects, next(iter(objects.loader)))
                checkpointer.step()
                objects.accelerator.wait_for_everyone()
                if not room and objects.accelerator.is_main_process:
                    with filler.open("wb") as file:
                        free = os.statvfs(folder)
                        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - left_bytes)
                    if not left_bytes:
                        (old,) = Path(folder, name).glob("step_*")
                        assert delete_checkpoint(old, "another process")
                        filler.unlink()
                objects.accelerator.wait_for_everyone()
                outcomes.append(_attempt(lambda checkpointer=checkpointer: [checkpointer.save(), checkpointer.wait()]))
                objects.accelerator.wait_for_everyone()
                if objects.accelerator.is_main_process:
                    filler.unlink(missing_ok=True)
                objects.accelerator.wait_for_everyone()
    return outcomes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here; a limit on file sizes stands in for it elsewhere")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_no_space_left_on_a_real_file_system(small_disk: Path, tmp_path: Path) -> None:
    for outcomes in run_ranks(_fill_a_small_disk, str(small_disk), folder=tmp_path / "r"):
        for number, outcome in enumerate(outcomes):
            if number in (1, 4):
                assert isinstance(outcome, errors.RankFailedError), outcome
                assert "space" in str(outcome), outcome
            else:
                assert isinstance(outcome, list), outcome
        saved = [outcome[0] for outcome in outcomes if isinstance(outcome, list)]
    left = sorted(small_disk.glob("*/step_*"))
    assert left == [*saved[:4], *saved[5:]], "what was saved, but for the one that was pruned"
    assert all(verify_checkpoint(path).ok for path in left)
    for name in "abc":
        assert not (small_disk / name / ".partial").exists()


def _train_without_resume(root: str) -> Any:
    from accel_fsdp_tools import Checkpointer

    objects = build(SMALL, seed=1)
    with Checkpointer(objects.accelerator, root, save_every=1, keep_last=1) as checkpointer:
        for batch in objects.loader:
            with objects.accelerator.accumulate(objects.model):
                train_batch(objects, batch)
            outcome = _attempt(checkpointer.step)
            if isinstance(outcome, Exception):
                return outcome
    return None


def test_forgetting_resume_does_not_prune_the_old_run(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run_ranks(_train_without_resume, str(root), folder=tmp_path / "r0") == [None, None]
    before = read_root(root)
    for error in run_ranks(_train_without_resume, str(root), folder=tmp_path / "r1"):
        assert isinstance(error, errors.CallOrderError)
        assert "resume()" in str(error)
    assert read_root(root) == before


def _train_with_other_passes(root: str, stop: bool) -> tuple[int, int, int]:
    """Look at a batch after the resume and pass over the training data after each epoch."""
    from accel_fsdp_tools import Checkpointer

    objects = build(Setup(num_items=24, accumulation=1), seed=1)
    with Checkpointer(objects.accelerator, root) as checkpointer:
        position = checkpointer.resume()
        if position.fresh:
            next(iter(objects.loader))
        for epoch in range(position.epoch, 3):
            for batch in objects.loader:
                with objects.accelerator.accumulate(objects.model):
                    train_batch(objects, batch)
                checkpointer.step()
                if stop and checkpointer.num_steps == 6:
                    checkpointer.save()
                    return position.epoch, epoch, checkpointer.num_steps
            for _ in objects.loader:
                pass
    return position.epoch, 3, checkpointer.num_steps


def test_other_passes_over_the_training_data_are_no_epochs(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    assert run_ranks(_train_with_other_passes, root, stop=True, folder=tmp_path / "r0") == [(0, 1, 6)] * 2
    assert run_ranks(_train_with_other_passes, root, stop=False, folder=tmp_path / "r1") == [(1, 3, 12)] * 2


def _use_odd_objects(path: str) -> dict[str, Any]:
    """An infinity in the config, gradients accumulated by hand, and no prepared dataloader, one after another."""
    import torch

    from accel_fsdp_tools import save_state

    objects = build(SMALL, seed=1)
    accelerator = objects.accelerator
    accelerator._dataloaders.clear()
    objects.model.config.time_limit = [0.001, float("inf")]
    save_state(accelerator, f"{path}/a")
    tokens = torch.ones(1, 4, dtype=torch.int64)
    for _ in range(2):
        accelerator.backward(objects.model(input_ids=tokens, labels=tokens).loss)
    objects.optimizer.step()
    accelerator.backward(objects.model(input_ids=tokens, labels=tokens).loss)
    save_state(accelerator, f"{path}/b")
    return {}


def _load_odd_objects(path: str) -> Any:
    from accel_fsdp_tools import load_state

    objects = build(SMALL, seed=2)
    objects.accelerator._dataloaders.clear()
    return load_state(objects.accelerator, path)


def test_what_is_not_known_is_not_called_exact(tmp_path: Path) -> None:
    run_ranks(_use_odd_objects, str(tmp_path), folder=tmp_path / "r0")
    config = read_manifest(tmp_path / "a").models[0].config
    assert config is not None
    assert config["time_limit"] == [0.001, "inf"]
    for report in run_ranks(_load_odd_objects, str(tmp_path / "b"), folder=tmp_path / "r1"):
        assert not report.exact
        assert "no dataloader was prepared" in str(report)
        assert "1 backward pass(es)" in str(report)


def _adagrad(root: str) -> Any:
    import torch
    from accelerate import Accelerator

    from accel_fsdp_tools import Checkpointer

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adagrad(model.parameters()))
    with Checkpointer(accelerator, root) as checkpointer:
        position = checkpointer.resume()
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        checkpointer.step()
        checkpointer.save()
    return position.step


def test_an_optimizer_that_has_state_from_the_start_resumes(tmp_path: Path) -> None:
    assert run_ranks(_adagrad, str(tmp_path / "root"), folder=tmp_path / "r0") == [0, 0]
    assert run_ranks(_adagrad, str(tmp_path / "root"), folder=tmp_path / "r1") == [1, 1]


ODD_MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "infinite size": lambda raw: raw["files"][0].update(size_bytes=float("inf")),
    "negative size": lambda raw: raw["files"][0].update(size_bytes=-1),
    "attempt as text": lambda raw: raw["lineage"].update(attempt="7"),
    "no attempt": lambda raw: raw["lineage"].update(attempt=None),
    "long name": lambda raw: raw["files"].append({"path": "x" * 300, "size_bytes": 1, "checksum": "x"}),
    "directory": lambda raw: raw["files"].append({"path": "optimizer_0", "size_bytes": 4096, "checksum": "x"}),
    "list for object": lambda raw: raw.update(accelerate=[]),
}


def _resume_steps(roots: list[str]) -> dict[str, Any]:
    from accel_fsdp_tools import Checkpointer

    objects = build(SMALL, seed=3)
    results = {}
    for root in roots:
        with Checkpointer(objects.accelerator, root) as checkpointer:
            position = checkpointer.resume()
        results[root] = (position.step, str(position.report))
        for optimizer in objects.accelerator._optimizers:
            optimizer.optimizer.state.clear()
        from accel_fsdp_tools.steps import follow_steps

        follow_steps(objects.accelerator).count = 0
    return results


def test_one_odd_manifest_does_not_block_the_root(tmp_path: Path) -> None:
    import shutil

    run_ranks(train, str(tmp_path / "root"), SMALL, folder=tmp_path / "r0")
    roots = []
    for name, change in ODD_MANIFESTS.items():
        root = tmp_path / name
        shutil.copytree(tmp_path / "root", root)
        edit_manifest(root / "step_00000008", change)
        roots.append(str(root))
    for results in run_ranks(_resume_steps, roots, folder=tmp_path / "r1"):
        for root in roots:
            assert results[root][0] == 6, root
            assert "skipped step_00000008" in results[root][1], root


def _save_in_mid_epoch(path: str) -> None:
    from accel_fsdp_tools import save_state, track

    objects = build(SMALL, seed=1)
    track(objects.accelerator)
    for number, batch in enumerate(objects.loader):
        with objects.accelerator.accumulate(objects.model):
            train_batch(objects, batch)
        if number == 2:
            break
    iterator = iter(objects.loader)
    next(iterator)
    save_state(objects.accelerator, path)


def _load_leniently(path: str, verify: str) -> Any:
    from accel_fsdp_tools import load_state, track

    objects = build(SMALL, seed=2)
    report = load_state(objects.accelerator, path, strict=False, verify=verify)
    return report, [position.batch for position in track(objects.accelerator).loaders]


@pytest.mark.parametrize("gone", ["rng_rank_00001.safetensors", "progress_rank_00001.json"])
def test_one_ranks_missing_state_leaves_all_ranks_at_the_same_place(tmp_path: Path, gone: str) -> None:
    path = tmp_path / "c"
    run_ranks(_save_in_mid_epoch, str(path), folder=tmp_path / "r0")
    (path / DIRECTORY / gone).unlink()
    for verify in ("off", "auto"):
        for report, batches in run_ranks(_load_leniently, str(path), verify, folder=tmp_path / verify):
            assert report.data.status == "absent"
            assert report.rng.status == "absent"
            assert batches == [0]


def _use_ignored_module(path: str, version: int, save: bool) -> tuple[Any, bool, str]:
    """A module that FSDP ignores: each rank trains its own, and one rank's values are saved."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from accel_fsdp_tools import enable_cpu_fsdp, load_state, save_state

    enable_cpu_fsdp()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="no_wrap",
        ignored_modules=[model[0]],
        state_dict_type="SHARDED_STATE_DICT",
        **({"use_orig_params": True, "sync_module_states": False} if version == 1 else {}),
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    report = None
    if save:
        torch.manual_seed(accelerator.process_index)
        accelerator.backward(model(torch.randn(4, 5)).sum())
        optimizer.step()
        save_state(accelerator, path)
    else:
        report = load_state(accelerator, path)
    states = [
        {key: value.tolist() for key, value in state.items() if value.shape == (7, 5)}
        for state in optimizer.optimizer.state.values()
        if type(state["exp_avg"]) is torch.Tensor
    ]
    return [state for state in states if state], report is not None and report.exact, str(report)


@pytest.mark.parametrize("version", [1, 2])
def test_ignored_modules_are_whole_and_not_called_exact(tmp_path: Path, version: int) -> None:
    path = str(tmp_path / "c")
    saved = run_ranks(_use_ignored_module, path, version, True, folder=tmp_path / "r0")
    loaded = run_ranks(_use_ignored_module, path, version, False, folder=tmp_path / "r1")
    assert saved[0][0] != saved[1][0]
    for states, exact, report in loaded:
        for number, state in enumerate(states):
            for key, value in state.items():
                assert value in (saved[0][0][number][key], saved[1][0][number][key]), f"{key}: one rank's, whole"
        assert not exact
        assert "differed between ranks" in report
