"""SIGKILL at any moment of a save leaves the old checkpoint or the new one, whole, and the next start uses it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.commit import PARTIAL
from accel_fsdp_tools.manifest import read_manifest
from tests.harness import collect, run_ranks, start_ranks
from tests.training import Log, Setup, assert_continues, read_root, train

# Small on purpose: one epoch of 8 updates, saves after 2, 4, 6 and 8; the kill comes in the save after 4.
SETUP = Setup(num_items=48, accumulation=1, num_epochs=1, keep_last=1)
KILL_STEP = 4

# point -> the step that the next start must find: the old checkpoint before the rename, the new one after it
POINTS = {
    "save.begin": 2,
    "save.staged": 2,
    "between files": 2,
    "save.delegated": 2,
    "save.fingerprints": 2,
    "save.progress": 2,
    "save.checksums": 2,
    "save.manifest": 2,
    "save.set_aside": 2,
    "save.renamed": 4,
    "save.committed": 4,
    "prune.begin": 4,
    "prune.set_aside": 4,
}
# Points that every rank passes; the others exist on rank 0 alone.
ON_RANK_1 = ("save.staged", "between files", "save.progress", "save.checksums")
# In every run of the tests: the moments at which something else is on disk than a moment before, and one on each rank
# while files are written. The rest belongs to the matrix; `test_fault_matrix.py` and `test_soak.py` kill ranks too.
ALWAYS = {
    ("between files", 0),
    ("save.set_aside", 0),
    ("save.renamed", 0),
    ("prune.set_aside", 0),
    ("save.checksums", 1),
}
KILLS = [*((point, 0) for point in POINTS), *((point, 1) for point in ON_RANK_1)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Log]:
    folder = tmp_path_factory.mktemp("whole")
    return run_ranks(train, str(folder / "root"), SETUP, folder=folder / "r")


def _train_and_die(root: str, point: str, victim: int) -> Any:
    import accelerate.accelerator as upstream

    rank = int(os.environ["RANK"])
    kill_at_point = (KILL_STEP, point) if rank == victim else None
    if point == "between files" and rank == victim:
        save_optimizer = upstream.save_fsdp_optimizer
        saves = iter(range(100))

        def die_in_the_second_save(*args: Any, **kwargs: Any) -> Any:
            if next(saves) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return save_optimizer(*args, **kwargs)

        upstream.save_fsdp_optimizer = die_in_the_second_save
    return train(root, SETUP, kill_at_point=kill_at_point)


@pytest.mark.parametrize(
    ("point", "victim"), [kill if kill in ALWAYS else pytest.param(*kill, marks=pytest.mark.matrix) for kill in KILLS]
)
def test_old_or_new_and_nothing_else(tmp_path: Path, reference: list[Log], point: str, victim: int) -> None:
    root = tmp_path / "root"
    folder = tmp_path / "r1"
    outcomes = collect(start_ranks(_train_and_die, str(root), point, victim, folder=folder), folder=folder, grace_s=3.0)
    assert outcomes[victim].exit_code == -signal.SIGKILL, "the kill never came"
    assert not any(outcome.finished for outcome in outcomes)
    for path in root.iterdir():
        if path.name.startswith("step_"):
            assert read_manifest(path).step in (2, KILL_STEP)
    resumed = run_ranks(train, str(root), SETUP, seed=9, perturb=True, folder=tmp_path / "r2")
    # Once every rank has agreed that its files are written, rank 0 needs no other to commit.
    either = point == "save.checksums" and victim == 1
    assert resumed[0].position.step in ((2, KILL_STEP) if either else (POINTS[point],))
    assert_continues(reference, resumed)
    assert read_root(root) == ["step_00000008"]
    assert not (root / PARTIAL).exists()
