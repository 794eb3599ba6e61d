"""Saves in the background: the same checkpoint, of the moment of the call, whatever the training does meanwhile."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_fsdp_tools import errors, open_checkpoint, phases
from accel_fsdp_tools.commit import PARTIAL
from accel_fsdp_tools.errors import AccelFsdpError
from accel_fsdp_tools.formats.reading import read_part
from accel_fsdp_tools.manifest import read_manifest
from tests.harness import collect, find_free_port, run_ranks, start_ranks
from tests.training import (
    Log,
    Objects,
    Setup,
    assert_continues,
    build,
    digest_model,
    digest_optimizer,
    read_root,
    train,
    train_batch,
)

# One epoch of 8 updates.
SETUP = Setup(num_items=48, accumulation=1, num_epochs=1, keep_last=None, save_every=1, async_save=True)
SETUPS = {
    "fsdp2-sharded": SETUP,
    "fsdp2-full": dataclasses.replace(SETUP, state_dict_type="FULL_STATE_DICT"),
    "fsdp1-sharded": dataclasses.replace(SETUP, fsdp_version=1, tie=True),
}


def _assert_same_checkpoint(found: Path, expected: Path) -> None:
    """Require the same files, names, keys and bits; ids, times and Accelerate's count of saves may differ."""
    ours, theirs = read_manifest(found), read_manifest(expected)
    assert [each.path for each in ours.files] == [each.path for each in theirs.files]
    assert (ours.models, ours.optimizers, ours.states) == (theirs.models, theirs.optimizers, theirs.states)
    assert ours.models[0].tensors[0].fingerprint is not None
    checksums = {each.path: each.checksum for each in theirs.files}
    for each in ours.files:
        if each.path.endswith(".safetensors"):  # the order of their metadata is not fixed
            tensors, others = load_file(found / each.path), load_file(expected / each.path)
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items()), each.path
        elif not each.path.endswith((".distcp", ".metadata")):  # in which torch writes the path
            assert each.checksum == checksums[each.path], each.path
    sections = zip(open_checkpoint(found).sections, open_checkpoint(expected).sections, strict=True)
    for section, other in sections:
        assert sorted(section.tensors) == sorted(other.tensors)
        for name, tensor in section.tensors.items():
            assert (tensor.dtype, tensor.shape) == (other.tensors[name].dtype, other.tensors[name].shape)
            assert read_part(tensor) == read_part(other.tensors[name]), name


def _write_small_files_later() -> None:
    """The models here are so small that their full files would be written at once."""
    from accel_fsdp_tools import delegate

    delegate._SMALL_BYTES = 256


def _train(root: str, setup: Setup) -> Log:
    _write_small_files_later()
    return train(root, setup)


FIRST = [name if number == 0 else pytest.param(name, marks=pytest.mark.matrix) for number, name in enumerate(SETUPS)]
LAST = [name if number == 2 else pytest.param(name, marks=pytest.mark.matrix) for number, name in enumerate(SETUPS)]


@pytest.mark.parametrize("name", LAST)
def test_saving_at_every_update_changes_neither_the_run_nor_the_checkpoint(tmp_path: Path, name: str) -> None:
    setup = SETUPS[name]
    plain = dataclasses.replace(setup, async_save=False, save_every=8)
    reference: list[Log] = run_ranks(train, str(tmp_path / "sync"), plain, folder=tmp_path / "r0")
    root = tmp_path / "async"
    logs: list[Log] = run_ranks(_train, str(root), setup, folder=tmp_path / "r1")
    for whole, log in zip(reference, logs, strict=True):
        assert (log.losses, log.parameters, log.optimizer) == (whole.losses, whole.parameters, whole.optimizer)
    assert read_root(root) == [f"step_0000000{step}" for step in range(1, 9)]
    assert not (root / PARTIAL).exists()
    _assert_same_checkpoint(root / "step_00000008", tmp_path / "sync" / "step_00000008")
    manifests = [read_manifest(root / each) for each in read_root(root)]
    assert [each.lineage.parent_id for each in manifests] == [
        None,
        *(each.lineage.checkpoint_id for each in manifests[:-1]),
    ]
    for step in (6, 7, 8):
        shutil.rmtree(root / f"step_0000000{step}")
    resumed = run_ranks(train, str(root), setup, seed=7, perturb=True, folder=tmp_path / "r2")
    assert resumed[0].position.step == 5
    assert_continues(reference, resumed)


# -- the snapshot ---------------------------------------------------------------------------------------------------


class _Average:
    """A registered object of some size, which is updated in place: an array of numpy behind a tensor."""

    def __init__(self) -> None:
        import numpy as np

        self.array = np.zeros(1 << 18)

    def state_dict(self) -> dict[str, Any]:
        return {"average": torch.from_numpy(self.array), "step": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.array = state["average"].numpy()


def _spoil(objects: Objects, average: _Average) -> None:
    """Change everything in place, as an update would."""
    with torch.no_grad():
        for parameter in objects.model.parameters():
            getattr(parameter, "_local_tensor", parameter).add_(1)
        for state in objects.optimizer.optimizer.state.values():
            for value in state.values():
                getattr(value, "_local_tensor", value).add_(1)
    objects.optimizer.param_groups[0]["lr"] = 7.0
    objects.scheduler.scheduler.last_epoch += 100
    torch.rand(3)
    average.array += 1


def _save_and_spoil(folder: str, setup: Setup) -> list[tuple[str, str, float]]:
    from accel_fsdp_tools import save_state, track

    _write_small_files_later()
    objects, average = build(setup, seed=1), _Average()
    objects.accelerator.register_for_checkpointing(average)
    track(objects.accelerator)
    batches = iter(objects.loader)
    held = []
    for name in ("a", "b"):
        train_batch(objects, next(batches))
        held.append((digest_model(objects.model), digest_optimizer(objects.optimizer), float(average.array[0])))
        gate = _Gate("save.writing", rank=objects.accelerator.process_index)  # nothing is written before all is spoilt
        phases.set_observer(gate)
        pending = save_state(objects.accelerator, f"{folder}/{name}", async_save=True)
        _spoil(objects, average)
        gate.opened.set()
    objects.accelerator.end_training()  # waits: afterwards there is no group to write over
    assert pending.done
    assert pending.is_committed
    return held


def _load(path: str, setup: Setup, plain: bool) -> Any:
    from accel_fsdp_tools import load_state

    objects, average = build(setup, seed=2), _Average()
    objects.accelerator.register_for_checkpointing(average)
    report = None
    if plain:
        objects.accelerator.load_state(path)
    else:
        report = load_state(objects.accelerator, path)
    digests = digest_model(objects.model), digest_optimizer(objects.optimizer), float(average.array[0])
    return digests, report, objects.scheduler.scheduler.last_epoch


@pytest.mark.parametrize("name", FIRST)
def test_changes_after_the_call_are_not_saved_and_two_saves_follow_each_other(tmp_path: Path, name: str) -> None:
    """A04, and the copies: everything is changed in place before anything is written."""
    setup = SETUPS[name]
    held = run_ranks(_save_and_spoil, str(tmp_path), setup, folder=tmp_path / "r0")
    for index, path in enumerate((tmp_path / "a", tmp_path / "b")):
        # Plain Accelerate leaves FSDP1's optimizer empty, and makes lists of tuples in a full one of FSDP2.
        plain = index == 1 and name == "fsdp2-sharded"
        loaded = run_ranks(_load, str(path), setup, plain, folder=tmp_path / f"r{index + 1}")
        for before, (digests, report, last_epoch) in zip(held, loaded, strict=True):
            assert digests == before[index], path
            assert report is None or report.exact, str(report)
            assert last_epoch == (2, 104)[index]


# -- one in flight --------------------------------------------------------------------------------------------------


class _Gate:
    """Holds the thread of this rank's save at a point until it is opened."""

    def __init__(self, point: str, rank: int) -> None:
        self.point, self.is_here = point, int(os.environ["RANK"]) == rank
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.reached.set()
            if self.is_here and not self.opened.wait(60):
                raise TimeoutError("nobody opened the gate")


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except AccelFsdpError as error:
        return error


def _save_while_busy(root: str) -> dict[str, Any]:
    from accel_fsdp_tools import Checkpointer, load_state

    objects = build(SETUP, seed=1)
    gate = _Gate("save.writing", rank=1)
    results: dict[str, Any] = {}
    with Checkpointer(
        objects.accelerator, root, save_every=1, keep_last=1, async_save=True, when_busy="skip"
    ) as checkpointer:
        checkpointer.resume()
        batches = iter(objects.loader)
        phases.set_observer(gate)
        paths = []
        for _ in range(3):
            train_batch(objects, next(batches))
            paths.append(checkpointer.step())
        results["while busy"] = [None if path is None else path.name for path in paths]
        timer = threading.Timer(0.3, gate.opened.set)
        timer.start()
        # Loading waits for the very checkpoint that is being written (A02).
        report = load_state(objects.accelerator, str(paths[0]), allow_after_step=True)
        timer.join()
        phases.set_observer(None)
        results["loaded"] = report.step, report.exact
        results["waited"] = checkpointer.wait(), checkpointer.wait()
        results["saved"] = checkpointer.save()
        results["pinned"] = checkpointer.save(pinned=True)
        checkpointer.wait()
        train_batch(objects, next(iter(objects.loader)))
        results["stepped"] = checkpointer.step()
    results["closed"] = sorted(read_root(Path(root)))
    return results


def test_a_save_is_skipped_while_one_is_in_flight_and_loading_waits(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for results in run_ranks(_save_while_busy, str(root), folder=tmp_path / "r"):
        assert results["while busy"] == ["step_00000001", None, None]
        assert results["loaded"] == (1, True)
        assert results["waited"] == (root / "step_00000001", None)
        assert results["saved"] == root / "step_00000003"
        assert results["pinned"] in (None, root / "step_00000003"), "skipped unless the one before had ended"
        assert results["stepped"] == root / "step_00000004"
        assert results["closed"] == (
            ["step_00000004"] if results["pinned"] is None else ["step_00000003", "step_00000004"]
        )


# -- failures -------------------------------------------------------------------------------------------------------

# where it fails -> on which rank
FAILURES = {
    "save.writing": 1,
    "save.delegated": 0,
    "save.fingerprints": 1,
    "save.synced": 1,
    "save.manifest": 0,
    "save.committed": 1,
    "prune.begin": 1,
}
CALLS = ("step", "save", "wait")


def _fail_in_turns(root: str) -> tuple[dict[str, Any], str]:
    from accel_fsdp_tools import Checkpointer

    objects = build(SETUP, seed=1)
    outcomes: dict[str, Any] = {}
    with Checkpointer(objects.accelerator, root, async_save=True) as checkpointer:
        checkpointer.resume()
        batches = iter(objects.loader)
        for index, (place, victim) in enumerate(FAILURES.items()):
            train_batch(objects, next(batches))
            checkpointer.step()

            def observe(point: str, place: str = place, victim: int = victim) -> None:
                if point == place and int(os.environ["RANK"]) == victim:
                    raise OSError(28, "No space left on device")

            phases.set_observer(observe)
            checkpointer.save()
            call = CALLS[index % len(CALLS)]
            if call == "step":
                # The next step may come before the end; some later one tells.
                while not isinstance(outcome := _attempt(checkpointer.step), Exception):
                    pass
            else:
                outcome = _attempt(getattr(checkpointer, call))
            phases.set_observer(None)
            outcomes[place] = outcome
        train_batch(objects, next(batches))
        checkpointer.step()
        checkpointer.save()
        last = checkpointer.wait()
    assert last is not None
    return outcomes, last.name


def test_an_error_in_the_background_is_raised_on_every_rank_and_the_next_save_works(tmp_path: Path) -> None:
    root = tmp_path / "root"
    results = run_ranks(_fail_in_turns, str(root), folder=tmp_path / "r")
    assert results[0][1] == results[1][1]
    for outcomes, _ in results:
        for place, victim in FAILURES.items():
            error = outcomes[place]
            assert isinstance(error, errors.RankFailedError), (place, error)
            assert error.rank == victim, place
            assert "No space left on device" in str(error), place
            is_committed = place in ("save.committed", "prune.begin")
            assert ("was written, but then" in str(error)) == is_committed, place
    assert str(results[0][0]["save.synced"]) == str(results[1][0]["save.synced"])
    assert len(read_root(root)) == 3, "two were committed before the error, and the last"
    manifests = [read_manifest(root / name) for name in read_root(root)]
    assert manifests[2].lineage.parent_id == manifests[1].lineage.checkpoint_id
    assert not (root / PARTIAL).exists()


def _fill_the_disk(root: str, victim: int) -> tuple[Any, Any, Any]:
    """Save once, then with a limit on file sizes on one rank (a real EFBIG), then without it again."""
    from accel_fsdp_tools import Checkpointer

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    objects = build(SETUP, seed=1)
    gate = _Gate("save.writing", rank=victim)
    outcomes = []
    with Checkpointer(objects.accelerator, root, async_save=True) as checkpointer:
        checkpointer.resume()
        batches = iter(objects.loader)
        for limit in (None, 20_000, None):
            train_batch(objects, next(batches))
            checkpointer.step()
            phases.set_observer(gate)
            checkpointer.save()
            old = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limit is not None and gate.is_here:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
            gate.opened.set()
            outcomes.append(_attempt(checkpointer.wait))
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            gate.opened.clear()
    return outcomes[0], outcomes[1], outcomes[2]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_disk_that_is_full_in_the_background(tmp_path: Path, victim: int) -> None:
    root = tmp_path / "root"
    for first, second, third in run_ranks(_fill_the_disk, str(root), victim, folder=tmp_path / "r"):
        assert isinstance(second, errors.RankFailedError), second
        assert "could not be written in the background" in str(second)
        assert (first.name, third.name) == ("step_00000001", "step_00000003")
    assert read_root(root) == ["step_00000001", "step_00000003"]
    assert not (root / PARTIAL).exists()


# -- ends -----------------------------------------------------------------------------------------------------------


def _die_in_the_second_save(root: str, victim: int) -> Any:
    saves = iter(range(100))

    def observe(point: str) -> None:
        if point == "save.delegated" and int(os.environ["RANK"]) == victim and next(saves) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    phases.set_observer(observe)
    from accel_fsdp_tools import Checkpointer

    objects = build(SETUP, seed=1)
    with Checkpointer(objects.accelerator, root, save_every=3, async_save=True) as checkpointer:
        checkpointer.resume()
        for batch in objects.loader:
            train_batch(objects, batch)
            checkpointer.step()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Log]:
    folder = tmp_path_factory.mktemp("whole")
    return run_ranks(train, str(folder / "root"), SETUP, folder=folder / "r")


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_killed_while_writing_in_the_background(tmp_path: Path, reference: list[Log], victim: int) -> None:
    root, folder = tmp_path / "root", tmp_path / "r1"
    outcomes = collect(start_ranks(_die_in_the_second_save, str(root), victim, folder=folder), folder=folder, grace_s=3)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    assert read_root(root) == ["step_00000003"]
    resumed = run_ranks(train, str(root), SETUP, seed=9, perturb=True, folder=tmp_path / "r2")
    assert resumed[0].position.step == 3
    assert_continues(reference, resumed)
    assert not (root / PARTIAL).exists()


class _UsersError(Exception):
    pass


def _leave(root: str, how: str) -> tuple[str | None, list[str]]:
    from accel_fsdp_tools import Checkpointer

    objects = build(SETUP, seed=1)
    gate = _Gate("save.writing", rank=1)
    phases.set_observer(gate)
    raised = None
    try:
        with Checkpointer(objects.accelerator, root, async_save=True) as checkpointer:
            checkpointer.resume()
            train_batch(objects, next(iter(objects.loader)))
            checkpointer.step()
            checkpointer.save()
            if how == "discard":
                gate.reached.wait(60)
                threading.Timer(0.2, gate.opened.set).start()
                checkpointer.close(discard=True)
            else:
                gate.opened.set()
                if how == "error":
                    raise _UsersError
    except _UsersError as error:
        raised = type(error).__name__
    return raised, read_root(Path(root))


@pytest.mark.parametrize("how", ["discard", "error", "end"])
def test_leaving_while_a_save_is_in_flight(tmp_path: Path, how: str) -> None:
    root = tmp_path / "root"
    results = run_ranks(_leave, str(root), how, folder=tmp_path / "r")
    assert [raised for raised, _ in results] == ["_UsersError" if how == "error" else None] * 2
    assert read_root(root) == ([] if how == "discard" else ["step_00000001"])
    assert not (root / PARTIAL).exists()


SCRIPT = """
import os, sys, time
from accel_fsdp_tools import phases, save_state
from tests.training import Setup, build

def observe(point):
    if point == "save.writing":
        time.sleep(1)
    if point == "save.synced" and sys.argv[2] == "fail":
        raise OSError("disk gone")

if __name__ == "__main__":
    phases.set_observer(observe)
    objects = build(Setup(), seed=1)
    save_state(objects.accelerator, sys.argv[1], async_save=True)
    sys.exit(5)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("outcome", ["succeed", "fail"])
def test_a_process_that_ends_finishes_its_save_first(tmp_path: Path, outcome: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    path = tmp_path / "root" / "checkpoint"
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(path), outcome],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [5, 5], texts
    if outcome == "succeed":
        assert read_manifest(path).step == 0
    else:
        assert not path.exists()
        assert all("was not saved: " in text and "disk gone" in text for text in texts), texts
    assert not (tmp_path / "root" / PARTIAL).exists()
