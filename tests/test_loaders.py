"""Dispatched batches, streams and stateful loaders: what is read, what is refused, and where a loader says it is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_fsdp_tools.errors import DataProgressError, DataProgressWarning, UsageError
from accel_fsdp_tools.progress import LoaderProgress, track
from accel_fsdp_tools.progress.batches import digest_batch
from accel_fsdp_tools.progress.values import PlainValue
from tests.harness import run_ranks, run_ranks_expecting
from tests.loader_kinds import (
    Kind,
    LazyNumpySampler,
    NoisyDataset,
    Program,
    fork_workers,
    make_accelerator,
    seed_everything,
    unchanged_process,
)
from tests.stream_kinds import KINDS, IteratorStream, NoisyStream, ShuffledStream, StatefulStream


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    with unchanged_process():
        yield


def _prepare(
    dataset: Any, *, seed: int = 1, batch_size: int = 3, config: Any = None, **options: Any
) -> tuple[Any, Any]:
    seed_everything(seed)
    accelerator = make_accelerator(config)
    return accelerator, accelerator.prepare(DataLoader(dataset, batch_size=batch_size, **options))


def _save(dataset: Any, num_batches: int, **options: Any) -> tuple[list[LoaderProgress], list[Any]]:
    """Save with so many batches handed out; returns the rest of the pass, too."""
    accelerator, loader = _prepare(dataset, **options)
    tracker, saved, rest = track(accelerator), None, []
    for number, batch in enumerate(loader, start=1):
        if number > num_batches:
            rest.append(batch.tolist())
        if number == num_batches:
            saved = tracker.capture()
    assert saved is not None
    record = json.loads(json.dumps(saved[0].to_dict()))
    return [LoaderProgress.from_dict(record, saved[0].to_tensors(), rank=0, path="file")], rest


def _drain(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


# -- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_dispatched", [False, True])
@pytest.mark.parametrize("cls", [StatefulStream, IteratorStream])
def test_a_stream_with_a_state_is_not_read_again(cls: Any, is_dispatched: bool) -> None:
    config = {"dispatch_batches": is_dispatched}
    saved, rest = _save(cls(20), 4, config=config)
    for choice, num_reads in (("skip", 8), ("refuse", 8), ("replay", 20)):
        stream = cls(20)
        accelerator, loader = _prepare(stream, seed=5, config=config)
        (outcome,) = track(accelerator).restore(saved, data_resume=choice)
        assert (outcome.status, outcome.batch) == ("restored", 4)
        assert _drain(loader) == rest
        assert stream.num_reads == num_reads
        assert len(_drain(loader)) == 7  # the next pass is whole


@pytest.mark.parametrize("config", [{}, {"dispatch_batches": True}])
def test_a_million_samples_are_skipped_without_reading_one(config: dict[str, Any]) -> None:
    saved, rest = _save(_Counted(1_000_000), 998, config=config, batch_size=1000, shuffle=True)
    dataset = _Counted(1_000_000)
    accelerator, loader = _prepare(dataset, seed=5, config=config, batch_size=1000, shuffle=True)
    tracker = track(accelerator)
    tracker.restore(saved)
    assert tracker.loaders[0].samples == 998_000
    assert _drain(loader) == rest
    assert dataset.num_reads == 2000


class _Counted(torch.utils.data.Dataset):
    def __init__(self, num_items: int) -> None:
        self.num_items, self.num_reads = num_items, 0

    def __len__(self) -> int:
        return self.num_items

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.num_reads += len(indices)
        return indices


# -- what is refused ------------------------------------------------------------------------------------------------


def test_refuse_raises_where_a_stream_would_be_read_again_before_anything_is_changed() -> None:
    saved, rest = _save(ShuffledStream(20, 1), 2)
    accelerator, loader = _prepare(ShuffledStream(20, 2), seed=5)
    tracker = track(accelerator)
    (problem,) = tracker.list_problems(saved, data_resume="refuse")
    assert 'behind 2 batches, can only be reached by reading them again, which data_resume="refuse" forbids' in problem
    with pytest.raises(DataProgressError, match="Nothing was changed"):
        tracker.restore(saved, data_resume="refuse")
    assert tracker.restore(saved, data_resume="refuse", strict=False)[0].status == "absent"
    assert tracker.list_problems(saved) == []
    tracker.restore(saved)
    assert _drain(loader) == rest


def test_an_unknown_choice_is_refused() -> None:
    accelerator, _ = _prepare(NoisyStream(9))
    with pytest.raises(UsageError, match="use one of skip, replay, refuse"):
        track(accelerator).restore([], data_resume="again")


@pytest.mark.parametrize("num_items", [3, 12])
def test_a_stream_that_ends_while_it_is_skipped_is_an_error_and_no_early_end(num_items: int) -> None:
    saved, _ = _save(NoisyStream(20), 4)
    accelerator, loader = _prepare(NoisyStream(num_items))
    track(accelerator).restore(saved)
    with pytest.raises(DataProgressError, match=r"ended after (1 fetches|4 batches)"):
        _drain(loader)


def _resume_a_shorter_stream() -> None:
    saved, _ = _save(NoisyStream(30), 3)
    accelerator, loader = _prepare(NoisyStream(8))
    track(accelerator).restore(saved)
    _drain(loader)


def test_all_ranks_are_told_that_a_dispatched_stream_ended(tmp_path: Path) -> None:
    errors = run_ranks_expecting(DataProgressError, _resume_a_shorter_stream, folder=tmp_path / "ranks")
    assert [error.rank for error in errors] == [0, 0]
    assert all("ended after 3 fetches" in str(error) for error in errors)


class _Forgetful(StatefulStream):
    """Has a buffer that its state does not tell of, as Hugging Face's shuffled streams have."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[torch.Tensor] = []
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) == 3:
                yield buffer.pop(1)
        yield from buffer


class _Different(IterableDataset):
    """Delivers in another order whenever it is iterated, and nobody knows why."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.tensor(random.SystemRandom().sample(range(1000), 20))


def test_a_state_that_does_not_say_all_is_noticed_and_reading_again_is_exact() -> None:
    saved, rest = _save(_Forgetful(20), 3)
    accelerator, loader = _prepare(_Forgetful(20), seed=4)
    track(accelerator).restore(saved)
    with pytest.raises(DataProgressError, match=r'its state does not say all. Pass data_resume="replay"'):
        _drain(loader)
    accelerator, loader = _prepare(_Forgetful(20), seed=4)
    track(accelerator).restore(saved, data_resume="replay")
    assert _drain(loader) == rest


def test_a_stream_that_is_not_the_same_again_is_noticed() -> None:
    saved, _ = _save(_Different(), 2)
    accelerator, loader = _prepare(_Different())
    track(accelerator).restore(saved)
    with pytest.raises(DataProgressError, match="it does not deliver the same when it is iterated again"):
        _drain(loader)
    accelerator, loader = _prepare(_Different())
    track(accelerator).restore(saved, strict=False)
    with pytest.warns(DataProgressWarning, match="another batch came"):
        _drain(loader)


class _Opaque(StatefulStream):
    """Its state holds an object, which could be saved only by a pickle."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "what": random.Random(1)}


def test_a_state_that_needs_a_pickle_is_not_saved_and_the_stream_is_read_again() -> None:
    saved, rest = _save(_Opaque(20), 3)
    assert saved[0].values == {}
    stream = _Opaque(20)
    accelerator, loader = _prepare(stream, seed=4)
    track(accelerator).restore(saved)
    assert _drain(loader) == rest
    assert stream.num_reads == 20


# -- positions ------------------------------------------------------------------------------------------------------

_COUNTED = {  # samples of a pass, repeats left out
    "dispatch": 23,
    "dispatch_remainder": 20,
    "dispatch_batch_sampler": 23,
    "dispatch_split_uneven": 21,
    "stream_dispatched": 22,
    "stream_own": 22,
    "stream_drop_last_own": 18,
    "hf_own": 24,
}


def _count_samples() -> dict[str, list[tuple[int, int, int]]]:
    positions = {}
    for name in _COUNTED:
        program = Program(KINDS[name], 1)
        program.run()
        assert program.tracker is not None
        position = program.tracker.loaders[0]
        positions[name] = [(position.epoch, position.batch, position.samples)]
    return positions


def test_samples_are_counted_without_repeats_and_alike_on_all_ranks(tmp_path: Path) -> None:
    counts = run_ranks(_count_samples, folder=tmp_path / "ranks")
    assert counts[0] == counts[1]
    num_epochs = {name: KINDS[name].num_epochs for name in _COUNTED}
    assert counts[0] == {name: [(num_epochs[name], 0, num_epochs[name] * n)] for name, n in _COUNTED.items()}


# -- any numbers ------------------------------------------------------------------------------------------------------


def _make_random_kind(dice: random.Random) -> tuple[Kind, str]:
    num_items, batch_size = dice.randint(1, 40), dice.randint(1, 5)
    config: dict[str, Any] = {"dispatch_batches": dice.random() < 0.7}
    if dice.random() < 0.3:
        config["split_batches"], batch_size = True, 2 * batch_size
    options = {"batch_size": batch_size, "drop_last": dice.random() < 0.3}
    if options["drop_last"] and num_items < 2 * batch_size:
        options["drop_last"] = False
    name = dice.choice(["indices", "shuffled", "stateful", "iterator"])
    makers: dict[str, Any] = {
        "indices": lambda seed: DataLoader(NoisyDataset(num_items), shuffle=True, **options),
        "shuffled": lambda seed: DataLoader(ShuffledStream(num_items, seed), **options),
        "stateful": lambda seed: DataLoader(StatefulStream(num_items), **options),
        "iterator": lambda seed: DataLoader(IteratorStream(num_items), **options),
    }
    return Kind(makers[name], config), f"{name}, {num_items} items, {config}, {options}"


def _resume_at_random(folder: Path, first_seed: int, num_kinds: int) -> list[str]:
    failures = []
    for seed in range(first_seed, first_seed + num_kinds):
        dice = random.Random(seed)
        kind, text = _make_random_kind(dice)
        points: list[str] = []
        program = Program(kind, 1)

        def save(point: str, program: Program = program, points: list[str] = points, seed: int = seed) -> None:
            points.append(point)
            program.save(folder / f"{seed}_{point}", len(program.log))

        reference = program.run(save)
        for point in dice.sample(points, min(2, len(points))):
            resumed = Program(kind, 9)
            start = resumed.load(folder / f"{seed}_{point}")
            if resumed.run() != reference[start:]:
                failures.append(f"{text}, saved at {point}")
    return failures


@pytest.mark.parametrize(("first_seed", "num_kinds"), [(0, 25), pytest.param(1000, 400, marks=pytest.mark.matrix)])
def test_any_length_batch_size_and_place_on_two_ranks(tmp_path: Path, first_seed: int, num_kinds: int) -> None:
    outcomes = run_ranks(
        _resume_at_random, tmp_path / "saved", first_seed, num_kinds, folder=tmp_path / "ranks", timeout_s=280
    )
    assert outcomes == [[], []]


# -- workers --------------------------------------------------------------------------------------------------------


def _check_disorder() -> None:
    fork_workers()

    def make() -> DataLoader:
        return DataLoader(_Slow(24), batch_size=2, shuffle=True, num_workers=2, in_order=False)

    seed_everything(1)
    accelerator = make_accelerator()
    loader = accelerator.prepare(make())
    with pytest.warns(DataProgressWarning, match="in_order=False"):
        tracker = track(accelerator)
    first, rest, saved = [], [], []
    for number, batch in enumerate(loader, start=1):
        (rest if saved else first).append(tuple(batch.tolist()))
        if number == 3:
            saved = tracker.capture()
    assert saved[0].undelivered, "the slow batch was to be passed by"
    seed_everything(2)
    accelerator = make_accelerator()
    loader = accelerator.prepare(make())
    with pytest.warns(DataProgressWarning, match="in_order=False"):
        tracker = track(accelerator)
    (outcome,) = tracker.restore(saved)
    assert (outcome.status, outcome.batch) == ("approximate", 3)
    resumed = [tuple(batch.tolist()) for batch in loader]
    assert sorted(resumed) == sorted(rest)
    assert sorted(itertools.chain(*first, *resumed)) == list(range(24))


class _Slow(NoisyDataset):
    """The first item that one of the workers reads takes long."""

    def __getitem__(self, index: int) -> Any:
        import time

        info = torch.utils.data.get_worker_info()
        if info.id == 0 and self.num_reads == 0:
            time.sleep(1.5)
        self.num_reads += 1
        return index


def test_without_an_order_no_batch_is_lost_or_repeated(tmp_path: Path) -> None:
    run_ranks(_check_disorder, world_size=1, folder=tmp_path / "ranks")


def _check_prefetch() -> None:
    fork_workers()
    rests = []
    saved: Any = None
    for factor in (2, 4):
        seed_everything(factor)
        accelerator = make_accelerator()
        sampler = LazyNumpySampler(30, factor)
        options = {"batch_size": 2, "num_workers": 1, "prefetch_factor": factor, "sampler": sampler}
        loader = accelerator.prepare(DataLoader(NoisyDataset(30), **options))
        with pytest.warns(DataProgressWarning, match="workers is not saved"):
            tracker = track(accelerator)
        if saved is not None:
            tracker.restore(saved)
        rest = []
        for _ in range(2):
            for batch in loader:
                rest.append(batch[:, 0].tolist())
                if saved is None and len(rest) == 4:
                    saved, rest = tracker.capture(), []
        rests.append(rest)
    assert rests[0] == rests[1]


def test_the_prefetch_factor_may_change(tmp_path: Path) -> None:
    run_ranks(_check_prefetch, world_size=1, folder=tmp_path / "ranks")


# -- stateful loaders -----------------------------------------------------------------------------------------------


def test_a_stateful_record_says_what_a_run_without_torchdata_lacks() -> None:
    saved, _ = _save(NoisyStream(20), 2)
    accelerator, _ = _prepare(NoisyStream(20))
    record = dataclasses.replace(saved[0], kind="stateful_stream")
    (difference,) = track(accelerator).check([record])
    assert "use_stateful_dataloader=True (pip install 'accel-fsdp-tools[stateful]')" in difference


# -- values ---------------------------------------------------------------------------------------------------------

_VALUE = {
    "a": [1, 2.5, True, None, "text", (1, (2,))],
    3: {"nested": {1, 2}},
    ("x", 1): 1 << 100,
    "bytes": b"abc",
    "no bytes": b"",
    "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "number": np.float32(1.5),
    "tensor": torch.ones(2, dtype=torch.bfloat16),
}


def test_plain_values_survive_json_and_tensors() -> None:
    encoded = PlainValue.encode(_VALUE)
    data = json.loads(json.dumps(encoded.data))
    again = PlainValue.from_dict(data, encoded.to_tensors("v"), "v", rank=0, path="file").decode()
    assert again.keys() == _VALUE.keys()
    for key, value in _VALUE.items():
        if isinstance(value, (np.ndarray, torch.Tensor)):
            assert again[key].dtype == value.dtype
            assert again[key].tolist() == value.tolist()
        else:
            assert (type(again[key]), again[key]) == (type(value), value)


@pytest.mark.parametrize("value", [object(), [lambda: 1], {"a": random.Random(1)}, np.array(["a"]), 1j])
def test_what_is_not_plain_is_not_encoded(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be saved without pickle"):
        PlainValue.encode(value)


@pytest.mark.parametrize(
    "data", [{"tensor": 1}, {"tensor": True}, {"object": []}, {"dict": [[1]]}, {"dict": [[[1], 2]]}, {"tuple": 3}, {},
             {"a": 1, "b": 2}, {"bytes": -1}],
)  # fmt: skip
def test_a_malformed_value_is_an_error_that_names_rank_and_file(data: Any) -> None:
    with pytest.raises(DataProgressError, match=r"rank 3.*file\.json"):
        PlainValue.from_dict(data, {"v/0": torch.ones(1)}, "v", rank=3, path="file.json")


def test_a_deeply_nested_value_is_refused() -> None:
    data: Any = []
    for _ in range(500):
        data = [data]
    with pytest.raises(DataProgressError, match="nested too deeply"):
        PlainValue.from_dict(data, {}, "v", rank=0, path="file.json")


def test_batches_are_told_apart() -> None:
    large = torch.zeros(5000)
    batches = [torch.ones(2), torch.ones(1, 2), [torch.ones(2)], {"a": torch.ones(2)}, ("x", 1), ["x", 2], large,
               large.index_fill(0, torch.tensor([4999]), 1), np.ones(2), np.array(["a"], dtype=object)]  # fmt: skip
    assert len({digest_batch(batch) for batch in batches}) == len(batches)
    assert digest_batch(batches[0], digest_batch(batches[1])) != digest_batch(batches[1], digest_batch(batches[0]))
