"""Saved under one FSDP and number of ranks, loaded under another: weights and optimizer are equal, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.training import Objects, Setup, build, digest_tensors, train_batch

SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
SETUP = Setup(accumulation=1, num_items=48)


def _gather(objects: Objects) -> dict[str, str]:
    """Digests of all whole tensors of model and optimizer (on rank 0)."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(objects.model, objects.optimizer.optimizer, options=options)
    digests = {name: digest_tensors({"": tensor}) for name, tensor in model.items()}
    for name, state in optimizer.get("state", {}).items():
        digests |= {f"{name}.{key}": digest_tensors({"": value}) for key, value in state.items()}
    return digests


def _save(path: str, setup: Setup) -> dict[str, str]:
    from accel_fsdp_tools import save_state, track

    objects = build(setup, seed=1)
    track(objects.accelerator)
    for number, batch in enumerate(objects.loader):
        with objects.accelerator.accumulate(objects.model):
            train_batch(objects, batch)
        if number == 3:
            break
    save_state(objects.accelerator, path)
    return _gather(objects)


def _load(path: str, setup: Setup) -> tuple[dict[str, str], Any]:
    from accel_fsdp_tools import load_state

    objects = build(setup, seed=2)
    report = load_state(objects.accelerator, path, strict=False)
    return _gather(objects), report


@pytest.mark.parametrize(
    ("kind", "versions", "world_sizes", "use_orig_params"),
    [
        (SHARDED, (1, 2), (2, 2), True),
        (SHARDED, (2, 1), (2, 2), False),
        (FULL, (1, 2), (2, 3), True),
        pytest.param(SHARDED, (2, 2), (2, 3), True, marks=pytest.mark.matrix),
        pytest.param(SHARDED, (1, 1), (3, 2), False, marks=pytest.mark.matrix),
        pytest.param(SHARDED, (2, 2), (3, 1), True, marks=pytest.mark.matrix),
        pytest.param(FULL, (2, 1), (2, 2), True, marks=pytest.mark.matrix),
    ],
)
def test_weights_and_optimizer_are_equal(
    tmp_path: Path, kind: str, versions: tuple[int, int], world_sizes: tuple[int, int], use_orig_params: bool
) -> None:
    before, after = (
        dataclasses.replace(
            SETUP,
            fsdp_version=version,
            state_dict_type=kind,
            use_orig_params=use_orig_params,
            unused_parameter=versions == (2, 2),  # FSDP1 gives every parameter of a unit that is used some state
        )
        for version in versions
    )
    path = str(tmp_path / "c")
    saved = run_ranks(_save, path, before, world_size=world_sizes[0], folder=tmp_path / "r0")[0]
    loaded = run_ranks(_load, path, after, world_size=world_sizes[1], folder=tmp_path / "r1")
    _check(saved, loaded, versions, world_sizes)


def _check(
    saved: dict[str, str],
    loaded: list[tuple[dict[str, str], Any]],
    versions: tuple[int, int],
    world_sizes: tuple[int, int],
) -> None:
    assert len(saved) > 80
    has_state = [name for name in saved if not name.startswith("unused") or name.count(".") == 1]
    assert {name: loaded[0][0].get(name) for name in has_state} == {name: saved[name] for name in has_state}
    for _, report in loaded:
        assert report.optimizer.status == "restored"
        assert report.scheduler.exact
        assert report.exact == (versions[0] == versions[1] and world_sizes[0] == world_sizes[1])
        if versions[0] != versions[1]:
            assert f"saved under FSDP {versions[0]}, loaded under FSDP {versions[1]}" in str(report)
        if world_sizes[1] > world_sizes[0]:
            assert f"rank {world_sizes[1] - 1} did not exist at the save" in str(report)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [SHARDED, FULL])
@pytest.mark.parametrize("versions", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("num_saved", [1, 2, 3, 4])
def test_every_number_of_ranks_on_every_other(
    tmp_path: Path, kind: str, versions: tuple[int, int], num_saved: int
) -> None:
    before, after = (
        dataclasses.replace(SETUP, fsdp_version=version, state_dict_type=kind, unused_parameter=versions == (2, 2))
        for version in versions
    )
    path = str(tmp_path / "c")
    saved = run_ranks(_save, path, before, world_size=num_saved, folder=tmp_path / "r0")[0]
    for num_ranks in (1, 2, 3, 4):
        loaded = run_ranks(_load, path, after, world_size=num_ranks, folder=tmp_path / f"r{num_ranks}")
        _check(saved, loaded, versions, (num_saved, num_ranks))
