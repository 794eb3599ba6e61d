"""On another number of ranks: the same samples in the same updates, at the same learning rates. Real processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.training import Setup, build, train_batch

NUM_EPOCHS = 3


@dataclass
class Log:
    """What one rank saw: per update the ids of its samples and the learning rate it was made with."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # updates made when an epoch ended
    report: Any = None
    position: Any = None


class Kept:
    """An object that a script registers; its value may be the rank's own."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def _register(accelerator: Any, *values: int) -> list[Kept]:
    kept = [Kept(value) for value in values]
    accelerator.register_for_checkpointing(*kept)
    return kept


def _train(
    root: str,
    setup: Setup,
    *,
    elastic: str = "refuse",
    save_at: int | None = None,
    stop: bool = False,
    seed: int = 1,
    resume: bool = True,
    **options: Any,
) -> Log:
    """Train to the end, or until the checkpoint of update `save_at` is made, from the newest checkpoint."""
    from accel_fsdp_tools import Checkpointer

    objects = build(setup, seed=seed)
    accelerator = objects.accelerator
    _register(accelerator, 5, 10 + accelerator.process_index)
    log = Log()
    with Checkpointer(accelerator, root, keep_last=None, elastic=elastic, verify="size", **options) as checkpointer:
        position = checkpointer.resume() if resume else checkpointer.resume(fresh=True)
        log.position, log.report = position, position.report
        ids: list[int] = []
        for _ in range(position.epoch, NUM_EPOCHS):
            for batch in objects.loader:
                ids.extend(batch["id"].tolist())
                rate = objects.optimizer.param_groups[0]["lr"]
                with accelerator.accumulate(objects.model):
                    train_batch(objects, batch)
                log.steps.append(accelerator.step)
                checkpointer.step()
                if accelerator.sync_gradients:
                    log.ids[checkpointer.num_steps], ids = ids, []
                    log.rates[checkpointer.num_steps] = float(rate)
                    if checkpointer.num_steps == save_at:
                        checkpointer.save()
                        if stop:
                            return log
            log.ends.append(checkpointer.num_steps)
    return log


def _merge(logs: list[Log], setup: Setup) -> dict[int, list[int]]:
    """The samples of all ranks by update; ranks of a tensor-parallel group have the same."""
    num_equal = setup.mesh[2] if setup.mesh else 1
    for rank, log in enumerate(logs):
        assert log.ids == logs[rank // num_equal * num_equal].ids
    logs = logs[::num_equal]
    for log in logs[1:]:
        assert (log.rates, log.steps, log.ends) == (logs[0].rates, logs[0].steps, logs[0].ends)
    return {step: sorted(sample for log in logs for sample in log.ids[step]) for step in logs[0].ids}


def _set(num_ranks: int, batch_size: int, accumulation: int, num_items: int = 37, **options: Any) -> tuple[int, Setup]:
    return num_ranks, Setup(batch_size=batch_size, accumulation=accumulation, num_items=num_items, **options)


READ_BY_ONE = {"dispatch": True, "seedable": True}
STATEFUL = {**READ_BY_ONE, "stateful": True}
CASES = {
    # 37 items are 3 whole updates and one that is filled up to 12 - or, with accumulation 2, to 6.
    "to-more": (_set(2, 6, 1), _set(3, 4, 1), 5),
    "to-one-filled-up": (_set(2, 6, 1), _set(1, 12, 1), 6),
    "accumulated-instead": (_set(4, 1, 3, 48), _set(2, 3, 2, 48), 6),
    "at-an-epochs-end": (_set(3, 2, 2), _set(2, 3, 2), 4),
    "replicas": (_set(4, 3, 1, mesh=(2, 2, 1)), _set(2, 6, 1), 5),
    "tensor-parallel": (_set(4, 6, 1, mesh=(1, 2, 2)), _set(3, 4, 1), 5),
    "seedable": (_set(2, 2, 3, 41, seedable=True), _set(4, 1, 3, 41, seedable=True), 5),
    # The last update has 6 samples, which both numbers of ranks divide.
    "dispatched": (_set(2, 6, 1, 42, **READ_BY_ONE), _set(3, 4, 1, 42, **READ_BY_ONE), 6),
    # The last update has 11 samples and the epoch's first one, which only the ranks of the save have read.
    "dispatched-completed": (_set(2, 6, 1, 35, **READ_BY_ONE), _set(3, 4, 1, 35, **READ_BY_ONE), 2),
    "stateful": (_set(2, 6, 1, stateful=True), _set(3, 4, 1, stateful=True), 5),
    "stateful-dispatched": (_set(3, 2, 2, 36, **STATEFUL), _set(2, 3, 2, 36, **STATEFUL), 2),
}
COVERED = (
    "accumulated-instead",
    "at-an-epochs-end",
    "seedable",
    "replicas",
    "tensor-parallel",
    "dispatched",
    "stateful",
    "stateful-dispatched",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix) if name in COVERED else name for name in CASES]
)
def test_the_same_samples_in_the_same_updates(tmp_path: Path, name: str) -> None:
    (before, setup), (now, other), save_at = CASES[name]
    root = tmp_path / "c"
    whole = run_ranks(_train, str(root), setup, save_at=save_at, world_size=before, folder=tmp_path / "r0")
    # Again from its checkpoint, so that a second change of the ranks begins at another place: back to the first set-up.
    resumed = run_ranks(
        _train, str(root), other, elastic="exact", seed=77, save_at=save_at + 3, world_size=now, folder=tmp_path / "r1"
    )
    expected, actual = _merge(whole, setup), _merge(resumed, other)
    assert list(actual) == list(range(save_at + 1, max(expected) + 1))
    assert actual == {step: expected[step] for step in actual}
    assert resumed[0].ends[-1] == whole[0].ends[-1]
    rates = {step: whole[0].rates[step] for step in actual}
    assert resumed[0].rates == pytest.approx(rates, rel=1e-12)
    assert len(set(rates.values())) > 5
    for log in resumed:
        report = log.report
        assert report.data.status.value == "restored", str(report)
        assert report.scheduler.exact, str(report)
        assert not report.rng.exact
        assert not report.exact
        assert "as in this script" not in str(report)
        assert any("samples per update" in note for note in report.notes), str(report)

    if name == "to-more":
        return  # the way back is another case's
    again = run_ranks(_train, str(root), setup, elastic="exact", seed=5, world_size=before, folder=tmp_path / "r2")
    assert again[0].position.step == save_at + 3
    last = _merge(again, setup)
    assert last == {step: expected[step] for step in range(save_at + 4, max(expected) + 1)}
    assert again[0].rates == pytest.approx({step: whole[0].rates[step] for step in last}, rel=1e-12)


def _attempt(path: str, setup: Setup, attempts: list[dict[str, Any]], *, seed: int = 2) -> tuple[list[str], Any, Any]:
    """Load with each set of options until one is accepted: the errors, the report, what tells the random states."""
    import torch

    from accel_fsdp_tools import load_state
    from accel_fsdp_tools.errors import MismatchError

    objects = build(setup, seed=seed)
    kept = _register(objects.accelerator, -1, -1)
    before = torch.get_rng_state()
    errors, report = [], None
    for options in attempts:
        try:
            report = load_state(objects.accelerator, path, **options)
        except MismatchError as error:
            assert report is None
            assert torch.equal(torch.get_rng_state(), before), "a refused load has changed something"
            errors.append(str(error))
    values = [each.value for each in kept]
    return errors, report, (objects.accelerator.step, torch.rand(2).tolist(), values)


def _save(path: str, setup: Setup) -> None:
    """Save within the second epoch."""
    assert list(_train(path, setup, save_at=5, stop=True).ids) == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of two ranks that take 2 x 6 samples per update, within the second epoch."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_save, str(folder / "c"), Setup(batch_size=6, accumulation=1), folder=folder / "r0")
    return str(folder / "c" / "step_00000005")


def test_refused_with_both_numbers_or_allowed(tmp_path: Path, path: str) -> None:
    """3 x 6 samples per update don't agree. Every rank says so, and nothing was loaded."""
    attempts: list[dict[str, Any]] = [{}, {"elastic": "exact"}, {"elastic": "allow"}]
    loaded = run_ranks(
        _attempt, path, Setup(batch_size=6, accumulation=1), attempts, world_size=3, folder=tmp_path / "r1"
    )
    for rank, (errors, report, _) in enumerate(loaded):
        plain, exact = errors
        assert 'this run has 3 rank(s), the checkpoint was saved by 2 (see elastic="exact")' in plain
        assert "then 2 x 6 x 1 = 12 samples per update; now 3 x 6 x 1 = 18 samples per update" in exact
        assert 'elastic="allow"' in exact
        assert report.data.status.value == "approximate", rank
        text = str(report)
        assert "an update takes 18 sample(s), it took 12 at the save" in text
        assert "goes on at sample 0 of the epoch, so 12 that had been handed out come again" in text
        assert "rank 2 did not exist at the save: derived from rank 0's generators" in text
        assert report.scheduler.exact
        assert "scheduler 0 goes on with 2 step(s) per update, as at the save, where Accelerate would make 3" in text
        assert "registered objects differed between the ranks of the save" in text
    assert len({repr(drawn) for _, _, (_, drawn, _) in loaded}) == 3
    assert len({step for _, _, (step, _, _) in loaded}) == 1
    assert [values for _, _, (_, _, values) in loaded] == [[5, 10], [5, 11], [5, 10]]


def test_an_order_of_rank_0s_global_generator_is_kept_for_the_epoch_alone(tmp_path: Path) -> None:
    """What training draws between two epochs depends on the number of ranks, and the next order comes from there."""
    setup, other = (
        Setup(batch_size=6, accumulation=1, dispatch=True),
        Setup(batch_size=3, accumulation=1, dispatch=True),
    )
    root = str(tmp_path / "c")
    whole = run_ranks(_train, root, setup, save_at=5, folder=tmp_path / "r0")
    attempts: list[dict[str, Any]] = [{"elastic": "exact"}, {"elastic": "allow"}]
    loaded = run_ranks(_attempt, f"{root}/step_00000005", other, attempts, world_size=4, folder=tmp_path / "r1")
    for errors, report, _ in loaded:
        assert len(errors) == 1
        assert "its last update is another" in errors[0]
        assert report.data.status.value == "approximate"
        assert "this epoch goes on in its order, later ones are in others" in str(report)
        assert "drawn from the global random generator" in str(report)
    resumed = run_ranks(_train, root, other, elastic="allow", seed=9, world_size=4, folder=tmp_path / "r2")
    expected, actual = _merge(whole, setup), _merge(resumed, other)
    assert [actual[6], actual[7]] == [expected[6], expected[7]]
    # One sample is left for the last update: two ranks complete it with one of the epoch's first, four with three.
    assert (len(expected[8]), len(actual[8])) == (2, 4)
    assert set(expected[8]) <= set(actual[8]) <= {*expected[8], *expected[5]}
    assert {sample for step in range(9, 13) for sample in actual[step]} == set(range(37))
    assert max(actual) == 12


def test_other_settings_are_refused_unless_they_are_named(tmp_path: Path, path: str) -> None:
    other = Setup(batch_size=3, accumulation=2, mixed_precision="bf16", num_items=40)
    attempts: list[dict[str, Any]] = [
        {},
        {"elastic": "exact"},
        {"elastic": "exact", "allow": ["mixed_precision"]},
        {"elastic": "exact", "allow": ["mixed_precision", "dataset"]},
    ]
    loaded = run_ranks(_attempt, path, other, attempts, folder=tmp_path / "r1")
    for rank, (errors, report, (step, _, values)) in enumerate(loaded):
        assert values == [5, 10 + rank]
        assert 'mixed precision is bf16, it was no at the save (see allow=["mixed_precision"])' in errors[0]
        assert 'gradient accumulation is 2, it was 1 at the save (see elastic="exact")' in errors[0]
        assert "mixed precision" in errors[1]
        assert "accumulation" not in errors[1]
        assert "length of the dataset: saved 37, now 40" in errors[2]
        assert len(errors) == 3
        assert "mixed precision is bf16, it was no at the save" in report.model.reasons
        assert "the dataset has 40 items, it had 37" in str(report)
        assert "dropout and augmentation hit other samples" in str(report.rng.reasons)
        assert step == 2  # one update in the second epoch, of two micro-batches now
