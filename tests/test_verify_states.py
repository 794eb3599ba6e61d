"""After a load: scheduler, grad scaler, random generators and data progress are compared, and every fault is named."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from accel_fsdp_tools.disk_values import Numbers, Opaque, iterate_differences, read_values, simplify
from accel_fsdp_tools.errors import AccelFsdpError, DamagedCheckpointError
from tests.harness import run_ranks
from tests.training import Objects, Setup, build, train_batch

BASE = Setup(num_items=24, accumulation=1)
SETUPS = {"fsdp2": BASE, "fsdp1": dataclasses.replace(BASE, fsdp_version=1)}


def _build(setup: Setup, seed: int) -> Objects:
    objects = build(setup, seed=seed)
    objects.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    return objects


def _save(path: str, setup: Setup, num_batches: int, *, is_plain: bool = False) -> None:
    from accel_fsdp_tools import save_state, track

    objects = _build(setup, seed=1)
    track(objects.accelerator)
    scaler = objects.accelerator.scaler
    objects.accelerator.scaler = None  # on the CPU it would be in the way of the update
    for number, batch in enumerate(objects.loader, 1):
        with objects.accelerator.accumulate(objects.model):
            train_batch(objects, batch)
        if number == num_batches:
            break
    objects.accelerator.scaler = scaler
    if is_plain:
        objects.accelerator.save_state(path)
    else:
        save_state(objects.accelerator, path)


def _draw_from_sampler(objects: Objects) -> None:
    from accel_fsdp_tools.progress.generators import find_generators

    next(each.generator for each in find_generators(objects.loader) if each.decides_order).manual_seed(123)


def _lose_position(objects: Objects) -> None:
    from accel_fsdp_tools.progress.follow import get_follower

    follower = get_follower(objects.loader)
    assert follower is not None
    if getattr(follower, "_waiting", None) is not None:
        follower._waiting = dataclasses.replace(follower._waiting, batch=1)  # type: ignore[attr-defined]
    else:
        follower.num_passes += 1


def _change_scheduler(objects: Objects) -> None:
    objects.scheduler.scheduler.last_epoch += 1


def _change_scaler(objects: Objects) -> None:
    scaler = objects.accelerator.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})


def _advance_iteration(objects: Objects) -> None:
    objects.loader.iteration += 1


FAULTS: dict[str, tuple[Callable[[Objects], Any], str, str]] = {
    "scheduler": (_change_scheduler, "scheduler", "last_epoch"),
    "scaler": (_change_scaler, "scaler", "scale"),
    "python": (lambda objects: __import__("random").random(), "rng", "python"),
    "numpy": (lambda objects: np.random.random(), "rng", "numpy"),
    "torch": (lambda objects: torch.rand(1), "rng", "torch"),
    "position": (_lose_position, "data", "batch|epoch"),
    "iteration": (_advance_iteration, "data", "iteration"),
    "sampler": (_draw_from_sampler, "data", "generator"),
}


def _load_with_faults(path: str, setup: Setup, faults: list[str]) -> dict[str, Any]:
    """Load again and again, each time with one state spoiled on rank 1 behind the restore, before the comparison."""
    from accel_fsdp_tools import load, load_state

    objects = _build(setup, seed=2)
    original = load.restore_rank_part

    def load_again(**arguments: Any) -> Any:
        # Under FSDP2 Accelerate cannot load into a scaler that was loaded before.
        objects.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        return load_state(objects.accelerator, path, allow_after_step=True, **arguments)

    results: dict[str, Any] = {"clean": load_again()}
    for name in faults:

        def restore(*args: Any, plant: Callable[[Objects], Any] = FAULTS[name][0], **kwargs: Any) -> Any:
            outcomes = original(*args, **kwargs)
            if objects.accelerator.process_index == 1:
                plant(objects)
            return outcomes

        with mock.patch.object(load, "restore_rank_part", restore):
            try:
                results[name] = load_again()
            except AccelFsdpError as error:
                results[name] = error
    results["files only"] = load_again(verify="files")
    results["undone"] = load_again(verify="fingerprint")
    return results


# In the middle of an epoch, and with its last batch in hand.
@pytest.mark.parametrize(("name", "num_batches"), [("fsdp2", 2), pytest.param("fsdp1", 4, marks=pytest.mark.matrix)])
def test_every_state_is_compared_and_every_fault_is_named(tmp_path: Path, name: str, num_batches: int) -> None:
    setup, path = SETUPS[name], str(tmp_path / "c")
    run_ranks(_save, path, setup, num_batches, folder=tmp_path / "r0")
    faults = [*FAULTS]
    ranks = run_ranks(_load_with_faults, path, setup, faults, folder=tmp_path / "r1")
    for results in ranks:
        for key in ("clean", "undone"):
            report = results[key]
            assert report.exact, str(report)
            assert (
                "compared with the checkpoint after the restore, on all ranks: scheduler (2 comparisons), scaler (2 "
                "comparisons), rng (2 comparisons), data (2 comparisons)"
            ) in str(report)
        assert "after the restore" not in str(results["files only"])
        for fault in faults:
            error, (_, state, key) = results[fault], FAULTS[fault]
            assert isinstance(error, DamagedCheckpointError), f"{fault}: {error}"
            assert error.rank == 1, f"{fault}: {error}"
            assert any(each in str(error.fqn) for each in key.split("|")), f"{fault}: {error.fqn}"
            assert f"failure {state} " in " ".join(str(error).split()), f"{fault}: {error}"
            assert error.expected != error.actual
            assert str(error) == str(ranks[0][fault]), "the same on every rank"


def _load_plain(path: str, setup: Setup, draws: bool) -> Any:
    from accel_fsdp_tools import load, load_state

    objects = _build(setup, seed=2)
    original = load.restore_rank_part

    def restore(*args: Any, **kwargs: Any) -> Any:
        outcomes = original(*args, **kwargs)
        if draws and objects.accelerator.process_index == 0:
            torch.rand(1)
        return outcomes

    with mock.patch.object(load, "restore_rank_part", restore):
        try:
            return load_state(objects.accelerator, path)
        except AccelFsdpError as error:
            return error


@pytest.mark.parametrize("name", SETUPS)
def test_random_states_of_a_checkpoint_by_accelerate(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "c")
    run_ranks(_save, path, SETUPS[name], 2, is_plain=True, folder=tmp_path / "r0")
    for report in run_ranks(_load_plain, path, SETUPS[name], False, folder=tmp_path / "r1"):
        assert "scheduler (2 comparisons), scaler (2 comparisons), rng (2 comparisons)" in str(report)
    for error in run_ranks(_load_plain, path, SETUPS[name], True, folder=tmp_path / "r2"):
        assert isinstance(error, DamagedCheckpointError), error
        assert (error.rank, error.fqn) == (0, "rng.torch_manual_seed")


def test_another_number_of_ranks_is_compared_as_far_as_it_can_be(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(_save, path, BASE, 2, folder=tmp_path / "r0")
    for report in run_ranks(_load_more_ranks, path, BASE, world_size=3, folder=tmp_path / "r1"):
        assert "scheduler (3 comparisons), scaler (3 comparisons), rng (3 comparisons)" in str(report)
        assert "data (" not in str(report), "no rank's is restored"


def _load_more_ranks(path: str, setup: Setup) -> Any:
    from accel_fsdp_tools import load_state

    return load_state(_build(setup, seed=2).accelerator, path, strict=False)


# -- plain values ---------------------------------------------------------------------------------------------------


def test_values_come_back_from_a_file_as_they_are_in_memory(tmp_path: Path) -> None:
    value = {
        "number": 3,
        "rate": 0.1,
        "nan": float("nan"),
        "tuple": (1, [2.5, None], True),
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "zero": torch.tensor(2.5),
        "array": np.arange(4, dtype=np.uint32),
        "counter": Counter({3: 1, 5: 2}),
        7: "seven",
    }
    torch.save(value, tmp_path / "state.bin")
    saved = read_values(tmp_path / "state.bin")
    assert list(iterate_differences(saved, simplify(value))) == []
    assert list(iterate_differences(saved, simplify({**value, "new": 1}))) == []
    assert isinstance(saved["tensor"], Numbers)


@pytest.mark.parametrize(
    ("saved", "live", "key"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b"),
        ({"a": [1, 2.0]}, {"a": [1, 2.5]}, "a.1"),
        ({"a": [1]}, {"a": [1, 2]}, "a"),
        ({"a": 1, "b": 2}, {"a": 1}, "b"),
        ({"a": None}, {"a": 0.0}, "a"),
        ({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, 2.5])}, "a"),
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0], dtype=torch.float64)}, "a"),
        ({"a": torch.tensor(1.0)}, {"a": 2.0}, "a"),
        ({1: {"x": "y"}}, {1: {"x": "z"}}, "1.x"),
    ],
)
def test_what_differs_is_named(saved: Any, live: Any, key: str) -> None:
    assert [name for name, _, _ in iterate_differences(simplify(saved), simplify(live))] == [key]


def test_what_is_no_plain_value_is_not_called_different() -> None:
    assert simplify(object()) == Opaque("object")
    assert list(iterate_differences(simplify({"f": object()}), simplify({"f": 3}))) == []
    assert list(iterate_differences(simplify(torch.tensor(2.0)), 2.0)) == []
