"""The main promise: killed in the middle of an epoch, started anew, and bit for bit the run that never stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness import collect, run_ranks, start_ranks
from tests.training import Setup, assert_continues, read_root, train

# A rank's epoch has 7 batches: 4 updates with accumulation (the last window is short), 7 without. The kill comes in
# the middle of the second epoch, one update after a checkpoint.

SETUPS = {
    "fsdp2-sharded": Setup(),
    "fsdp2-full": Setup(state_dict_type="FULL_STATE_DICT"),
    "fsdp1-sharded": Setup(fsdp_version=1),
    "fsdp1-full": Setup(fsdp_version=1, state_dict_type="FULL_STATE_DICT"),
    "fsdp1-flat-sharded": Setup(fsdp_version=1, use_orig_params=False),
    "fsdp1-flat-full": Setup(fsdp_version=1, use_orig_params=False, state_dict_type="FULL_STATE_DICT"),
    "fsdp2-bf16-seedable": Setup(mixed_precision="bf16", seedable=True),
    "fsdp1-bf16-tied": Setup(fsdp_version=1, mixed_precision="bf16", tie=True),
    "fsdp2-unused-frozen": Setup(unused_parameter=True, frozen=True),
    "fsdp2-full-unused-tied": Setup(state_dict_type="FULL_STATE_DICT", unused_parameter=True, tie=True),
    "fsdp1-unused-frozen": Setup(fsdp_version=1, unused_parameter=True, frozen=True),
    "fsdp1-full-unused": Setup(fsdp_version=1, state_dict_type="FULL_STATE_DICT", unused_parameter=True),
    "fsdp2-momentum-no-accumulation": Setup(optimizer="momentum", accumulation=1),
    "fsdp2-sgd": Setup(optimizer="SGD", save_every=3),
}


# These cover the rest together; the default run has to stay short.
DEFAULT = (
    "fsdp2-sharded",
    "fsdp1-flat-sharded",
    "fsdp2-full-unused-tied",
    "fsdp2-bf16-seedable",
)


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.matrix) for name in SETUPS]
)
def test_killed_and_resumed_is_the_run_that_never_stopped(tmp_path: Path, name: str) -> None:
    setup = SETUPS[name]
    kill_at = 7 if setup.accumulation == 2 else 11
    reference = run_ranks(train, str(tmp_path / "whole"), setup, folder=tmp_path / "r0")
    root = tmp_path / "killed"
    outcomes = collect(
        start_ranks(train, str(root), setup, kill_at_step=kill_at, folder=tmp_path / "r1"), folder=tmp_path / "r1"
    )
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
    resumed = run_ranks(train, str(root), setup, seed=77, perturb=True, folder=tmp_path / "r2")
    assert_continues(reference, resumed)
    position = resumed[0].position
    assert position.step == kill_at - 1
    assert (position.epoch, position.batch) == ((1, 4) if setup.accumulation == 2 else (1, 3))
    assert position.samples == 37 + 2 * setup.batch_size * position.batch
    assert read_root(root) == read_root(tmp_path / "whole")


def test_resumed_twice(tmp_path: Path) -> None:
    setup = Setup(save_every=3)
    reference = run_ranks(train, str(tmp_path / "whole"), setup, folder=tmp_path / "r0")
    root = str(tmp_path / "killed")
    for seed, kill_at_step in ((1, 4), (2, 11)):
        folder = tmp_path / f"k{seed}"
        collect(start_ranks(train, root, setup, seed=seed, kill_at_step=kill_at_step, folder=folder), folder=folder)
    resumed = run_ranks(train, root, setup, seed=5, perturb=True, folder=tmp_path / "r2")
    assert resumed[0].position.step == 9
    assert_continues(reference, resumed)
