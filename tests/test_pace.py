"""The learning rate of every update is the planned one on any number of ranks, whatever a schedule is made of."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import lr_scheduler
from transformers import get_cosine_schedule_with_warmup

from accel_fsdp_tools.pace import PACES, PLANS, describe_plans, get_paces, restore_paces

NUM_UPDATES = 12
Make = Callable[[Any, int], Any]


@pytest.fixture(autouse=True)
def _accelerate() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    Accelerator(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Run:
    """One rank's optimizer and scheduler, as on a number of ranks."""

    def __init__(self, make: Make, num_ranks: int, *, length: int | None = None, **options: Any) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        raw = torch.optim.SGD(
            [{"params": [parameter]}, {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.3}], lr=0.1
        )
        self.optimizer = SimpleNamespace(optimizer=raw, step_was_skipped=False)
        self.scheduler = AcceleratedScheduler(make(raw, length or NUM_UPDATES * num_ranks), [self.optimizer], **options)
        self.num_ranks = num_ranks
        self.accelerator = SimpleNamespace(num_processes=num_ranks, _schedulers=[self.scheduler])

    def run(self, monkeypatch: pytest.MonkeyPatch, num_updates: int) -> list[list[float]]:
        rates = []
        state = SimpleNamespace(num_processes=self.num_ranks)
        monkeypatch.setattr("accelerate.scheduler.AcceleratorState", lambda: state)
        for _ in range(num_updates):
            rates.append([float(group["lr"]) for group in self.optimizer.optimizer.param_groups])
            self.optimizer.optimizer.step()
            self.scheduler.step()
        return rates

    def save(self) -> tuple[Any, Any, dict[str, Any]]:
        facts = {PACES: get_paces(self.accelerator), PLANS: describe_plans(self.accelerator)}
        state = copy.deepcopy((self.scheduler.state_dict(), self.optimizer.optimizer.state_dict()))
        return *state, json.loads(json.dumps(facts))

    def load(self, saved: tuple[Any, Any, dict[str, Any]], num_ranks_before: int) -> list[Any]:
        state, optimizer, facts = copy.deepcopy(saved)
        self.optimizer.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(state)
        return restore_paces(self.accelerator, facts, num_ranks_before)


def _lambda(optimizer: Any, length: int) -> Any:
    return get_cosine_schedule_with_warmup(optimizer, length // 4, length)


def _sequential(optimizer: Any, length: int) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, length // 3), lr_scheduler.CosineAnnealingLR(optimizer, length)]
    return lr_scheduler.SequentialLR(optimizer, parts, [length // 3])


KINDS: dict[str, Make] = {
    "lambda": _lambda,
    "cosine": lambda optimizer, length: lr_scheduler.CosineAnnealingLR(optimizer, length),
    "one_cycle": lambda optimizer, length: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.3], length),
    "step": lambda optimizer, length: lr_scheduler.StepLR(optimizer, 6),
    "sequential": _sequential,
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR itself
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [(2, 3), (4, 1), (1, 2)])
@pytest.mark.parametrize("save_at", [0, 5])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_the_planned_rates(
    kind: str, ranks: tuple[int, int], save_at: int, is_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_scaled`: the script counts its schedule's length anew from the number of ranks."""
    before, now = ranks
    length = None if is_scaled else NUM_UPDATES * before
    first = Run(KINDS[kind], before)
    whole = first.run(monkeypatch, save_at)
    saved = first.save()
    whole += first.run(monkeypatch, NUM_UPDATES - save_at)
    second = Run(KINDS[kind], now, length=length)
    (outcome,) = second.load(saved, before)
    assert outcome.is_exact
    assert str(before) in outcome.text
    assert str(now) in outcome.text
    half = 3
    actual = second.run(monkeypatch, half)
    again = second.save()
    third = Run(KINDS[kind], now, length=length)  # the pace is part of what is saved
    outcomes = third.load(again, now)
    assert all(each.is_exact for each in outcomes)
    assert len(outcomes) == (0 if kind == "lambda" and is_scaled else 1)
    actual += third.run(monkeypatch, NUM_UPDATES - save_at - half)
    assert actual == [pytest.approx(rates, rel=1e-9, abs=1e-12) for rates in whole[save_at:]]
    assert len({tuple(rates) for rates in whole}) > (1 if kind == "step" else 8)


def test_an_old_checkpoint_says_nothing_of_paces(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(_lambda, 2)
    whole = first.run(monkeypatch, 5)
    state, optimizer, _ = first.save()
    whole += first.run(monkeypatch, 7)
    for length in (NUM_UPDATES * 2, None):
        second = Run(_lambda, 3, length=length)
        (outcome,) = second.load((state, optimizer, {}), 2)
        assert outcome.is_exact
        assert second.run(monkeypatch, 7) == [pytest.approx(rates, rel=1e-9) for rates in whole[5:]]


def test_a_manifest_that_says_nonsense_is_as_one_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(_lambda, 2)
    whole = first.run(monkeypatch, 12)
    again = Run(_lambda, 2)
    again.run(monkeypatch, 5)
    state, optimizer, _ = again.save()
    for facts in ({PACES: ["2"], PLANS: [[1, 2]]}, {PACES: [0], PLANS: ["x"]}, {PACES: 3, PLANS: [[["a"]]]}):
        second = Run(_lambda, 3, length=24)
        (outcome,) = second.load((state, optimizer, facts), 2)
        assert outcome.is_exact
        assert second.run(monkeypatch, 7) == [pytest.approx(rates, rel=1e-9) for rates in whole[5:]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_another_schedule_of_the_script_is_told_with_both_numbers(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(_lambda, 2)
    first.run(monkeypatch, 5)
    second = Run(_lambda, ranks, length=100)
    (outcome,) = second.load(first.save(), 2)
    assert not outcome.is_exact
    assert "0 update(s) from here the learning rate is 0.04, it was to be 0.0" in outcome.text


def test_split_batches_and_schedules_of_the_script_have_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(_lambda, 2, length=12, split_batches=True)
    whole = first.run(monkeypatch, 4)
    saved = first.save()
    whole += first.run(monkeypatch, 8)
    second = Run(_lambda, 3, length=12, split_batches=True)
    assert second.load(saved, 2) == []
    assert second.run(monkeypatch, 8) == whole[4:]
    alone = Run(_lambda, 2, length=12, step_with_optimizer=False)
    alone.run(monkeypatch, 4)
    other = Run(_lambda, 3, length=12, step_with_optimizer=False)
    assert other.load(alone.save(), 2) == []
    assert other.run(monkeypatch, 8) == whole[4:]
    (outcome,) = Run(_lambda, 3, length=12).load(alone.save(), 2)
    assert not outcome.is_exact
    assert "was stepped by the script" in outcome.text
    joined = Run(_lambda, 3, length=12)
    (outcome,) = joined.load(saved, 2)
    assert outcome.is_exact
    assert joined.run(monkeypatch, 8) == whole[4:]


def test_a_kept_pace_steps_as_accelerate_does(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(_lambda, 4)
    saved = first.save()
    second = Run(_lambda, 2, length=48)
    second.load(saved, 4)
    raw = second.scheduler.scheduler
    second.optimizer.step_was_skipped = True
    second.scheduler.step()
    assert raw.last_epoch == 0
    second.optimizer.step_was_skipped = False
    second.scheduler.gradient_state._set_sync_gradients(False)
    second.scheduler.step()
    second.scheduler.gradient_state._set_sync_gradients(True)
    assert raw.last_epoch == 0
    second.run(monkeypatch, 1)
    assert raw.last_epoch == 4


def test_a_function_that_ends_leaves_nothing_known_ahead() -> None:
    run = Run(lambda optimizer, length: lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5][step]), 1)
    assert describe_plans(run.accelerator) == [None]
