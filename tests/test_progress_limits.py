"""What is not exact is said or refused; what is exact stays so in odd situations."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from accel_fsdp_tools.errors import DataProgressError, DataProgressWarning, RngStateError, UsageError
from accel_fsdp_tools.progress import LoaderProgress, track
from accel_fsdp_tools.rng import RngSnapshot
from tests.harness import run_ranks
from tests.loader_kinds import (
    HiddenTorchSampler,
    NoisyDataset,
    digest_rng,
    fork_workers,
    make_accelerator,
    seed_everything,
    unchanged_process,
)


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    with unchanged_process():
        yield


def _prepare(*loaders: DataLoader, seed: int = 1, **config: Any) -> tuple[Any, ...]:
    seed_everything(seed)
    accelerator = make_accelerator(config)
    return (accelerator, *[accelerator.prepare(loader) for loader in loaders])


def _make(num_items: int = 10, batch_size: int = 2, **options: Any) -> DataLoader:
    return DataLoader(NoisyDataset(num_items), batch_size=batch_size, **{"shuffle": True, **options})


def _take(loader: Any, num_batches: int) -> list[list[int]]:
    """The ids of the next batches; leaves the loop by `break`."""
    taken = []
    for batch in loader:
        taken.append(batch[:, 0].int().tolist())
        if len(taken) == num_batches:
            break
    return taken


def _save_midway(loader: Any, tracker: Any, num_batches: int) -> tuple[list[LoaderProgress], list[list[int]]]:
    """Save with `num_batches` handed out, and the ids of the rest of the epoch."""
    saved, rest = None, []
    for number, batch in enumerate(loader, start=1):
        if number > num_batches:
            rest.append(batch[:, 0].int().tolist())
        if number == num_batches:
            saved = tracker.capture()
    assert saved is not None
    return saved, rest


# -- what was not counted -----------------------------------------------------------------------------------------


def test_a_loader_used_before_it_was_followed_is_refused() -> None:
    accelerator, loader = _prepare(_make())
    _take(loader, 2)
    tracker = track(accelerator)
    with pytest.raises(DataProgressError, match=r"iterated before it was followed.*track"):
        tracker.capture()
    (record,) = tracker.capture(strict=False)
    assert (record.restorable, record.exact) == (False, False)
    assert "before it was followed" in str(record.reason)
    list(loader)  # from the next pass on all is known again
    assert tracker.capture()[0].exact


def test_a_loader_that_was_prepared_later_is_followed_unless_it_was_used() -> None:
    accelerator, _ = _prepare(_make())
    tracker = track(accelerator)
    used = accelerator.prepare(_make())
    list(used)
    with pytest.raises(DataProgressError, match="loader 1 was iterated"):
        tracker.capture()
    accelerator._dataloaders.remove(used)
    new = accelerator.prepare(_make())
    assert track(accelerator) is tracker
    _take(new, 1)
    assert [record.epoch for record in tracker.capture()] == [0, 1]


def test_batches_handed_out_by_skip_first_batches_are_refused() -> None:
    accelerator, loader = _prepare(_make())
    tracker = track(accelerator)
    for _ in skip_first_batches(loader, 2):
        with pytest.raises(DataProgressError, match="skip_first_batches"):
            tracker.capture()
        break


@pytest.mark.parametrize("shuffle", [True, False])
def test_skip_first_batches_on_a_restored_loader_is_refused(shuffle: bool) -> None:
    accelerator, loader = _prepare(_make(shuffle=shuffle))
    saved, rest = _save_midway(loader, track(accelerator), 2)
    accelerator, loader = _prepare(_make(shuffle=shuffle), seed=5)
    tracker = track(accelerator)
    tracker.restore(saved)
    with pytest.raises(DataProgressError, match="leave skip_first_batches out"):
        skip_first_batches(loader, 2)
    assert _take(loader, 9) == rest
    assert len(_take(skip_first_batches(loader, 2), 9)) == 3  # the restored position has been used: as ever


def test_a_loader_made_anew_after_the_restore_is_noticed() -> None:
    accelerator, loader = _prepare(_make())
    saved, rest = _save_midway(loader, track(accelerator), 2)
    accelerator, loader = _prepare(_make())
    tracker = track(accelerator)
    tracker.restore(saved)
    for _ in accelerator.prepare(_make()):
        with pytest.warns(DataProgressWarning, match=r"loader 1 was prepared .* loader 0.* waits behind batch 2"):
            assert len(tracker.loaders) == 2
        with pytest.raises(DataProgressError, match="loader 1 was iterated before"):
            tracker.capture()
        break
    assert _take(loader, 9) == rest


@pytest.mark.parametrize("num_batches", [2, 5])
def test_drawing_from_a_restored_sampler_is_noticed_and_seeding_it_is_not(num_batches: int) -> None:
    def make(seed: int) -> DataLoader:
        return DataLoader(NoisyDataset(10), batch_size=2, sampler=HiddenTorchSampler(10, seed))

    accelerator, loader = _prepare(make(1))
    tracker = track(accelerator)
    saved, _ = _save_midway(loader, tracker, num_batches)
    idle = tracker.capture()
    for records in (saved, idle):
        for strict in (True, False):
            accelerator, loader = _prepare(make(2))
            track(accelerator).restore(records, strict=strict)
            next(iter(loader.batch_sampler))  # a look at the order
            if strict:
                with pytest.raises(DataProgressError, match=r"sampler\.parts\.dice.*was drawn from"):
                    next(iter(loader))
            else:
                with pytest.warns(DataProgressWarning, match="was drawn from"):
                    _take(loader, 1)
        accelerator, loader = _prepare(make(2))
        track(accelerator).restore(records)
        loader.batch_sampler.sampler.parts["dice"].manual_seed(3)
        list(loader)


def test_an_order_that_cannot_be_reproduced_is_noticed() -> None:
    class GlobalSampler(HiddenTorchSampler):
        def __iter__(self) -> Iterator[int]:
            order = list(range(self.num_items))
            while order:
                yield order.pop(random.randrange(len(order)))

    def make() -> DataLoader:
        return DataLoader(NoisyDataset(10), batch_size=2, sampler=GlobalSampler(10, 0))

    accelerator, loader = _prepare(make())
    saved, _ = _save_midway(loader, track(accelerator), 3)
    accelerator, loader = _prepare(make())
    track(accelerator).restore(saved)
    with pytest.raises(DataProgressError, match="not those that were handed out"):
        next(iter(loader))
    accelerator, loader = _prepare(make())
    track(accelerator).restore(saved, strict=False)
    with pytest.warns(DataProgressWarning, match="not those that were handed out"):
        _take(loader, 1)


# -- what differs -------------------------------------------------------------------------------------------------

_CHANGES: dict[str, tuple[Callable[[], DataLoader], str]] = {
    "dataset": (lambda: _make(num_items=12), "length of the dataset: saved 10, now 12"),
    "batch size": (lambda: _make(batch_size=5), "batch size: saved 2, now 5"),
    "drop_last": (lambda: _make(drop_last=True), "drop_last: saved False, now True"),
    "order": (lambda: _make(shuffle=False), "class of the sampler: saved 'torch.utils.data.sampler.RandomSampler'"),
}


@pytest.mark.parametrize("name", list(_CHANGES))
def test_a_changed_loader_is_found_before_anything_is_restored(name: str) -> None:
    make, text = _CHANGES[name]
    accelerator, loader = _prepare(_make())
    saved, _ = _save_midway(loader, track(accelerator), 2)
    accelerator, loader = _prepare(make(), _make())[:2]
    tracker = track(accelerator)
    differences = tracker.check(saved)
    assert differences[0] == "number of prepared dataloaders: saved 1, now 2"
    assert any(text in line for line in differences)
    with pytest.raises(DataProgressError, match="Nothing was changed") as caught:
        tracker.restore(saved)
    assert caught.value.actual == differences
    assert tracker.loaders[0].batch == 0
    (outcome,) = tracker.restore(saved, strict=False)
    assert (outcome.status, outcome.epoch, outcome.batch) == ("absent", 0, 0)
    assert text in str(outcome.reason)
    assert len(_take(loader, 9)) == len(loader)


def test_a_sampler_without_the_saved_generator_is_refused() -> None:
    accelerator, loader = _prepare(DataLoader(NoisyDataset(10), sampler=HiddenTorchSampler(10, 1)))
    saved, _ = _save_midway(loader, track(accelerator), 2)
    sampler = HiddenTorchSampler(10, 1)
    sampler.parts = {"other": sampler.parts["dice"]}
    accelerator, loader = _prepare(DataLoader(NoisyDataset(10), sampler=sampler))
    with pytest.raises(DataProgressError, match=r"sampler\.parts\.dice, which is not a place that this"):
        track(accelerator).restore(saved)


def test_train_loader_is_found_or_must_be_named() -> None:
    accelerator, train, evaluation = _prepare(_make(), _make(shuffle=False))
    tracker = track(accelerator)
    assert tracker.find_train_loader() == 0
    assert tracker.find_train_loader(evaluation) == 1
    with pytest.raises(UsageError, match="accelerator prepared"):
        tracker.find_train_loader(_make())
    accelerator.prepare(_make())
    with pytest.raises(UsageError, match="train_dataloader="):
        tracker.find_train_loader()
    assert track(make_accelerator()).find_train_loader() is None
    assert train is not evaluation


# -- passes -------------------------------------------------------------------------------------------------------


def test_positions_count_passes_batches_and_samples() -> None:
    accelerator, loader = _prepare(_make(num_items=7))
    tracker = track(accelerator)
    _take(loader, 1)
    assert tracker.loaders[0].epoch == 1
    tracker.begin_training()  # the look at a batch was no epoch
    positions = [(position.epoch, position.batch, position.samples) for position in tracker.loaders]
    for _ in range(2):
        for _ in loader:
            positions.extend((p.epoch, p.batch, p.samples) for p in tracker.loaders)
    assert positions == [(0, 0, 0), (0, 1, 2), (0, 2, 4), (0, 3, 6), (0, 4, 7), (1, 1, 9), (1, 2, 11), (1, 3, 13),
                         (1, 4, 14)]  # fmt: skip
    assert tracker.loaders[0] == tracker.capture()[0].position
    assert (tracker.loaders[0].epoch, loader.iteration) == (2, 2)


def test_settings_and_object_stay_and_the_next_epoch_is_whole() -> None:
    accelerator, loader = _prepare(_make(drop_last=True), non_blocking=True)
    saved, rest = _save_midway(loader, track(accelerator), 2)
    later = _take(loader, 9)
    accelerator, loader = _prepare(_make(drop_last=True), seed=9, non_blocking=True)
    before = dict(loader.__dict__)
    tracker = track(accelerator)
    tracker.restore(saved)
    assert tracker.loaders[0].batch == 2
    assert _take(loader, 9) == rest
    assert _take(loader, 9) == later
    changed = {name for name, value in loader.__dict__.items() if name not in before or value != before[name]}
    assert changed == {"_accel_fsdp_tools_follower", "iteration", "end_of_dataloader", "remainder"}
    assert loader is accelerator._dataloaders[0]
    assert isinstance(loader, DataLoader)
    assert type(loader).__name__ == "DataLoaderShard"


def test_a_save_right_after_a_restore_saves_the_same_position() -> None:
    accelerator, loader = _prepare(_make())
    saved, rest = _save_midway(loader, track(accelerator), 2)
    accelerator, loader = _prepare(_make(), seed=3)
    tracker = track(accelerator)
    tracker.restore(saved)
    again = tracker.capture()
    assert again == saved
    tracker.restore(again)
    assert _take(loader, 9) == rest


def test_restoring_inside_the_loop_ends_that_loop_with_an_error() -> None:
    accelerator, loader = _prepare(_make())
    tracker = track(accelerator)
    saved, rest = _save_midway(loader, tracker, 2)
    batches = iter(loader)
    next(batches)
    tracker.restore(saved)
    with pytest.raises(DataProgressError, match="Leave the loop"):
        next(batches)
    assert _take(loader, 9) == rest  # rolled back, in the same process


def test_two_iterations_at_once_are_refused() -> None:
    accelerator, loader = _prepare(_make())
    track(accelerator)
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    with pytest.raises(DataProgressError, match="a loader once at a time"):
        next(first)


def test_a_failed_read_does_not_lose_the_batch_before_it() -> None:
    class FragileDataset(NoisyDataset):
        is_broken = True

        def __getitem__(self, index: int) -> torch.Tensor:
            if self.is_broken and self.num_reads == 7:
                raise OSError("no such file")
            return super().__getitem__(index)

    def make() -> DataLoader:
        return DataLoader(FragileDataset(10), batch_size=2, shuffle=True)

    accelerator, loader = _prepare(make())
    loader.dataset.is_broken = False
    expected = _take(loader, 9)
    accelerator, loader = _prepare(make())
    tracker, taken, saved = track(accelerator), [], []
    try:
        for batch in loader:
            taken.append(batch[:, 0].int().tolist())
    except OSError:
        saved = tracker.capture()
    assert (saved[0].state, saved[0].epoch, saved[0].batch) == ("running", 0, len(taken))
    accelerator, loader = _prepare(make(), seed=4)
    loader.dataset.is_broken = False
    track(accelerator).restore(saved)
    assert taken + _take(loader, 9) == expected


class _Saver:
    def __init__(self, save: Callable[[], None]) -> None:
        self.save = save

    def __enter__(self) -> None:
        pass

    def __exit__(self, *facts: object) -> None:
        self.save()


def _fail_in(way: str, accelerator: Any, loader: Any, save: Callable[[], None]) -> None:
    """Raise KeyboardInterrupt with the third batch in hand; `save` is called while it is being handled."""

    def train(batches: Any) -> None:
        for number, _ in enumerate(batches):
            with accelerator.accumulate():
                _fail_at(number)

    if way == "with":
        with _Saver(save):
            train(loader)
    elif way == "finally":
        try:
            for number, _ in enumerate(loader):
                _fail_at(number)
        finally:
            save()
    else:
        try:
            train((batch for batch in loader) if way == "generator" else loader)
        except KeyboardInterrupt:
            save()
            raise


@pytest.mark.parametrize("way", ["except", "finally", "with", "generator"])
def test_an_emergency_save_is_in_the_pass_that_the_exception_left(way: str) -> None:
    accelerator, loader = _prepare(_make())
    tracker = track(accelerator)
    saved: list[LoaderProgress] = []
    with pytest.raises(KeyboardInterrupt):
        _fail_in(way, accelerator, loader, lambda: saved.extend(tracker.capture()))
    assert (saved[0].state, saved[0].epoch, saved[0].batch) == ("running", 0, 3)
    assert tracker.capture()[0].epoch == 1  # outside, the pass has ended


def _fail_at(number: int) -> None:
    if number == 2:
        raise KeyboardInterrupt


def test_a_pass_left_by_break_has_ended_whatever_is_raised_later() -> None:
    accelerator, loader = _prepare(_make())
    tracker = track(accelerator)
    try:
        _take(loader, 2)
        for _ in loader:
            break
        raise ValueError
    except ValueError:
        (record,) = tracker.capture()
    assert (record.state, record.epoch, record.batch) == ("idle", 2, 0)


def test_several_loaders_in_a_pass_go_on_exactly_in_the_same_order_but_are_not_said_to() -> None:
    def alternate(first: Any, second: Any) -> Iterator[Any]:
        for a, b in zip(first, second, strict=True):
            torch.rand(1)
            yield a.tolist(), b.tolist(), digest_rng()

    accelerator, first, second = _prepare(_make(), _make())
    tracker, rest, saved = track(accelerator), [], None
    for number, event in enumerate(alternate(first, second)):
        if number > 1:
            rest.append(event)
        if number == 1:
            with pytest.warns(DataProgressWarning, match="loaders 0, 1 were all in the middle"):
                saved = tracker.capture()
    accelerator, first, second = _prepare(_make(), _make(), seed=3)
    tracker = track(accelerator)
    outcomes = tracker.restore(saved)
    assert all("all in the middle of a pass" in str(outcome.reason) for outcome in outcomes)
    assert [outcome.status for outcome in outcomes] == ["approximate", "approximate"]
    assert list(alternate(first, second)) == rest


# -- kinds that are not exact -------------------------------------------------------------------------------------


def _check_workers(is_persistent: bool) -> None:
    fork_workers()

    def make() -> DataLoader:
        return _make(num_items=20, num_workers=1, persistent_workers=is_persistent)

    def start(seed: int) -> tuple[Any, Any]:
        accelerator, loader = _prepare(make(), seed=seed)
        with pytest.warns(DataProgressWarning, match="workers"):
            return track(accelerator), loader

    tracker, loader = start(1)
    first, _ = _save_midway(loader, tracker, 1)
    saved, rest = _save_midway(loader, tracker, 3)
    idle, rng = tracker.capture(), RngSnapshot.capture()
    later = [batch.tolist() for batch in loader]
    ids = [[int(row[0]) for row in batch] for batch in later]

    tracker, loader = start(4)
    (outcome,) = tracker.restore(saved)
    assert (outcome.status, outcome.epoch, outcome.batch) == ("approximate", 1, 3)
    assert "workers is not saved" in str(outcome.reason)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataProgressWarning)
        assert _take(loader, 99) == rest
        assert _take(loader, 99) == ids
        tracker.restore(first, strict=False)  # in the same process, with the workers running
        assert _take(loader, 99)[2:] == rest_of(first, loader, tracker)[2:]

    tracker, loader = start(5)
    (outcome,) = tracker.restore(idle, strict=not is_persistent)
    assert outcome.status == ("approximate" if is_persistent else "restored")
    rng.restore()
    resumed = [batch.tolist() for batch in loader]
    if is_persistent:
        assert [[int(row[0]) for row in batch] for batch in resumed] == ids
    else:
        assert resumed == later


def rest_of(records: list[LoaderProgress], loader: Any, tracker: Any) -> list[list[int]]:
    """What follows a position, found by restoring it once more."""
    tracker.restore(records, strict=False)
    return _take(loader, 99)


@pytest.mark.parametrize("is_persistent", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_workers_keep_the_order_and_are_exact_between_passes(tmp_path: Path, is_persistent: bool) -> None:
    run_ranks(_check_workers, is_persistent, world_size=1, folder=tmp_path / "ranks")


class _Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def _check_unordered_stream() -> str:
    fork_workers()
    loader = DataLoader(_Stream(), batch_size=2, num_workers=1, in_order=False)
    accelerator, prepared = _prepare(loader, dispatch_batches=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracker = track(accelerator)
        track(accelerator)
    assert [warning.category for warning in caught] == [DataProgressWarning]
    untouched = tracker.capture()
    for number, _ in enumerate(prepared):
        if number == 1:
            saved = tracker.capture()
    assert (saved[0].state, saved[0].epoch, saved[0].batch) == ("running", 0, 2)
    assert (tracker.loaders[0].epoch, prepared.iteration) == (1, 1)
    assert tracker.restore(untouched)[0].status == "restored"
    with pytest.raises(DataProgressError) as refused:
        tracker.restore(saved)
    (outcome,) = tracker.restore(saved, strict=False)
    assert (outcome.status, outcome.epoch, outcome.batch, prepared.iteration) == ("absent", 0, 0, 0)
    return str(refused.value)


def test_an_unordered_stream_is_refused_or_said_to_be_absent(tmp_path: Path) -> None:
    for text in run_ranks(_check_unordered_stream, folder=tmp_path / "ranks"):
        assert "in_order=True is exact" in text


def _save_on_ranks() -> Any:
    accelerator, loader = _prepare(_make())
    saved, _ = _save_midway(loader, track(accelerator), 2)
    return saved[0].to_dict(), saved[0].to_tensors()


def test_another_world_size_is_refused_or_said_to_be_absent(tmp_path: Path) -> None:
    data, tensors = run_ranks(_save_on_ranks, folder=tmp_path / "ranks")[0]
    saved = [LoaderProgress.from_dict(data, tensors)]
    accelerator, _ = _prepare(_make())
    tracker = track(accelerator)
    assert "loader 0: number of data-parallel processes: saved 2, now 1" in tracker.check(saved)
    with pytest.raises(DataProgressError, match="saved 2, now 1"):
        tracker.restore(saved)
    assert tracker.restore(saved, strict=False)[0].status == "absent"


# -- records ------------------------------------------------------------------------------------------------------


def _make_record() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    loader = DataLoader(NoisyDataset(10), batch_size=2, sampler=HiddenTorchSampler(10, 1))
    accelerator, loader = _prepare(loader)
    saved, _ = _save_midway(loader, track(accelerator), 2)
    return json.loads(json.dumps(saved[0].to_dict())), saved[0].to_tensors()


def test_a_record_survives_json_and_tensors() -> None:
    data, tensors = _make_record()
    again = LoaderProgress.from_dict(data, tensors, rank=0, path="file")
    assert again.to_dict() == data
    assert again.to_tensors().keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in again.to_tensors().items())
    assert not any(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_a_record_of_an_earlier_version_is_read() -> None:
    data, tensors = _make_record()
    older = {name: value for name, value in data.items() if name not in ("replayable", "next_digest", "undelivered")}
    older.pop("values")
    assert LoaderProgress.from_dict(older, tensors).to_dict() == data


def _add_scalar(data: dict[str, Any], path: list[Any], value: Any) -> None:
    data["attributes"]["now"]["scalars"].append({"path": path, "value": value})


_FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing count": lambda data: data.pop("batch"),
    "negative count": lambda data: data.update(samples=-1),
    "count beyond any run": lambda data: data.update(iteration=1 << 60),
    "negative number of a batch": lambda data: data.update(undelivered=[-1]),
    "value that is none": lambda data: data.update(values={"stream": {"object": 1}}),
    "negative digest": lambda data: data.update(digest=-1),
    "digest of more than 32 bits": lambda data: data.update(digest=1 << 32),
    "unknown moment": lambda data: data["moments"].update(later=data["moments"]["now"]),
    "no path": lambda data: data["moments"]["now"]["generators"][0].update(path="sampler"),
    "empty path": lambda data: data["moments"]["now"]["generators"][0].update(path=[]),
    "list in a path": lambda data: data["moments"]["now"]["generators"][0].update(path=["sampler", []]),
    "no kind": lambda data: data["moments"]["now"]["generators"][0].pop("kind"),
    "object for a value": lambda data: _add_scalar(data, ["sampler", "num_items"], {"a": 1}),
    "same path twice": lambda data: [_add_scalar(data, ["sampler", "num_items"], value) for value in (1, 2)],
    "bool for a count": lambda data: data.update(epoch=True),
    "unknown state": lambda data: data.update(state="asleep"),
    "contradiction": lambda data: data.update(state="idle"),
    "missing moment": lambda data: data["moments"].pop("before_fetch"),
    "malformed moment": lambda data: data["moments"].update(now=7),
    "malformed attributes": lambda data: data["attributes"].update(now={"scalars": 3}),
}


@pytest.mark.parametrize("name", list(_FAULTS))
def test_a_malformed_record_is_an_error_that_names_rank_and_file(name: str) -> None:
    data, tensors = _make_record()
    _FAULTS[name](data)
    with pytest.raises(DataProgressError) as caught:
        LoaderProgress.from_dict(data, tensors, rank=1, path="progress.json")
    assert caught.value.rank == 1
    assert "progress.json" in str(caught.value)


def test_a_missing_generator_of_a_sampler_is_named() -> None:
    data, tensors = _make_record()
    (name,) = [name for name in tensors if name.endswith("epoch_start/generator/0")]
    del tensors[name]
    with pytest.raises(RngStateError, match=r"batch_sampler\.sampler\.parts\.dice") as caught:
        LoaderProgress.from_dict(data, tensors, rank=1, path="rng.safetensors")
    assert caught.value.rank == 1


# -- the loader as an object --------------------------------------------------------------------------------------


def test_a_followed_loader_can_be_copied_pickled_and_freed() -> None:
    accelerator, loader = _prepare(_make())
    tracker = track(accelerator)
    copies = [copy.deepcopy(loader), copy.copy(loader), pickle.loads(pickle.dumps(loader))]
    for other in copies:
        assert len(_take(other, 9)) == 5
    assert tracker.loaders[0].epoch == 0
    assert len(_take(loader, 9)) == 5
    assert tracker.loaders[0].epoch == 1
    reference = weakref.ref(loader.dataset)
    accelerator.free_memory()
    del loader, copies, other, tracker
    gc.collect()
    assert reference() is None


@settings(max_examples=40, deadline=None)
@given(
    num_items=st.integers(1, 25),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    seedable=st.booleans(),
    kill_at=st.integers(0, 1000),
)
def test_any_length_batch_size_and_kill_step(
    num_items: int, batch_size: int, drop_last: bool, seedable: bool, kill_at: int
) -> None:
    if drop_last and num_items < batch_size:
        return

    def run(seed: int, kill: int | None, saved: Any) -> tuple[list[Any], Any]:
        loader = _make(num_items, batch_size, drop_last=drop_last)
        accelerator, loader = _prepare(loader, seed=seed, use_seedable_sampler=seedable)
        tracker, events = track(accelerator), []
        if saved is not None:
            tracker.restore(saved[0])
            saved[1].restore()
        for epoch in range(tracker.loaders[0].epoch, 3):
            for batch in loader:
                events.append((epoch, batch.tolist(), digest_rng()))
                np.random.rand()
                if len(events) == kill:
                    return events, (tracker.capture(), RngSnapshot.capture())
            events.append((epoch, digest_rng()))
            if len(events) == kill:
                return events, (tracker.capture(), RngSnapshot.capture())
        return events, None

    reference, _ = run(1, None, None)
    kill = 1 + kill_at % len(reference)
    _, saved = run(1, kill, None)
    assert run(2, None, saved)[0] == reference[kill:]
