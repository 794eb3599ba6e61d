"""Loaders of many kinds, saved on some ranks and restored on others: every rank's loader in one process.

Accelerate makes the loader of any rank of any number when asked to, so that the records can be carried over without
process groups; `test_elastic_ranks.py` does it with them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from accel_fsdp_tools.errors import DataProgressError, DataProgressWarning
from accel_fsdp_tools.progress import Carried, Change, DataTracker, LoaderProgress
from accel_fsdp_tools.rng import derive
from tests.loader_kinds import (
    BucketBatchSampler,
    HiddenTorchSampler,
    InPlaceSampler,
    LazyNumpySampler,
    NoisyDataset,
    make_accelerator,
    seed_everything,
    unchanged_process,
)

NUM_EPOCHS = 3
Make = Callable[[int, int, int], DataLoader]


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    with unchanged_process():
        yield


class Ranks:
    """The loaders of all ranks of one run."""

    def __init__(
        self,
        make: Make,
        num_items: int,
        *,
        num_ranks: int,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 1,
        seeds_differ: bool = False,
        **config: Any,
    ) -> None:
        self.num_ranks, self.accumulation = num_ranks, accumulation
        accelerator = make_accelerator()
        self.loaders, self.trackers, self.datasets = [], [], []
        for rank in range(num_ranks):
            seed_everything(seed + (rank if seeds_differ else 0))
            plain = make(num_items, batch_size, seed)
            loader = prepare_data_loader(
                plain, num_processes=num_ranks, process_index=rank, rng_types=["generator"], **config
            )
            tracker = DataTracker(SimpleNamespace(_dataloaders=[loader], gradient_state=accelerator.gradient_state))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DataProgressWarning)
                tracker.follow_new_loaders()
            self.loaders.append(loader)
            self.trackers.append(tracker)
            self.datasets.append(plain.dataset)

    def run(
        self, save_at: int | None = None, *, first_epoch: int = 0, num_epochs: int = NUM_EPOCHS
    ) -> tuple[list[list[int]], list[list[LoaderProgress]]]:
        """The sorted samples of every update, and every rank's records as of update `save_at`."""
        updates: list[list[int]] = []
        saved: list[list[LoaderProgress]] = []

        def save() -> None:
            if len(updates) == save_at and not saved:
                saved.extend(_through_json(tracker.capture()) for tracker in self.trackers)

        save()
        for _ in range(first_epoch, num_epochs):
            window: list[int] = []
            for number, batches in enumerate(zip(*self.loaders, strict=True), start=1):
                window += [sample for batch in batches for sample in batch[:, 0].int().tolist()]
                if number % self.accumulation == 0:
                    updates.append(sorted(window))
                    window = []
                    save()
            if window:
                updates.append(sorted(window))
            save()
        return updates, saved

    def carry(self, saved: list[list[LoaderProgress]], before: Ranks, mode: str, *allow: str) -> list[Carried]:
        change = Change(mode, allow, before.accumulation, self.accumulation, before.num_ranks, self.num_ranks)
        briefs = [self.trackers[0].make_briefs(records, rank) for rank, records in enumerate(saved)]
        return [
            tracker.carry(saved[0], saved[rank] if rank < len(saved) else None, briefs, change=change, rank=rank)[0]
            for rank, tracker in enumerate(self.trackers)
        ]

    def restore(self, carried: list[Carried], *, strict: bool = True) -> list[Any]:
        outcomes = []
        for each, tracker in zip(carried, self.trackers, strict=True):
            records = _through_json([each.record])
            assert tracker.check(records) == []
            (outcome,) = tracker.restore([each.record], strict=strict)
            assert tracker.find_differences([each.record], [outcome]) == []
            outcomes.append(outcome)
        return outcomes

    @property
    def num_reads(self) -> int:
        return sum(dataset.num_reads for dataset in self.datasets)


def _through_json(records: list[LoaderProgress]) -> list[LoaderProgress]:
    return [
        LoaderProgress.from_dict(json.loads(json.dumps(each.to_dict())), each.to_tensors(), rank=0, path="a file")
        for each in records
    ]


def _with_sampler(make_sampler: Callable[[Any, int, int], Any]) -> Make:
    def make(num_items: int, batch_size: int, seed: int) -> DataLoader:
        dataset = NoisyDataset(num_items)
        return DataLoader(dataset, batch_size=batch_size, sampler=make_sampler(dataset, num_items, seed))

    return make


def _plain(**options: Any) -> Make:
    return lambda num_items, batch_size, seed: DataLoader(
        NoisyDataset(num_items), batch_size=batch_size, **{"shuffle": True, **options}
    )


KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "shuffle": (_plain(), {}),
    "sequential": (_plain(shuffle=False), {}),
    "seedable": (_plain(), {"use_seedable_sampler": True, "data_seed": 4}),
    "own_generator": (
        lambda n, b, s: DataLoader(
            NoisyDataset(n), batch_size=b, shuffle=True, generator=torch.Generator().manual_seed(s)
        ),
        {},
    ),
    "weighted": (
        _with_sampler(lambda data, n, s: WeightedRandomSampler([1.0 + i % 3 for i in range(n)], n)),
        {},
    ),
    "replacement": (_with_sampler(lambda data, n, s: RandomSampler(data, replacement=True, num_samples=n + 3)), {}),
    "hidden_torch": (_with_sampler(lambda data, n, s: HiddenTorchSampler(n, s)), {}),
    "lazy_numpy": (_with_sampler(lambda data, n, s: LazyNumpySampler(n, s)), {}),
    "in_place": (_with_sampler(lambda data, n, s: InPlaceSampler(n, s)), {}),
    "drop_last": (_plain(drop_last=True), {}),
    "workers": (_plain(num_workers=1), {}),
}
FAST = [name for name in KINDS if name != "workers"]


def _check(name: str, num_items: int, before: Ranks, now: Ranks, save_at: int, again: Callable[[], Ranks]) -> None:
    whole, saved = before.run(save_at)
    carried = now.carry(saved, before, "exact")
    assert [each.problem for each in carried] == [None] * now.num_ranks
    outcomes = now.restore(carried)
    is_exact = "restored" if name != "workers" or saved[0][0].state != "running" else "approximate"
    assert {outcome.status for outcome in outcomes} == {is_exact}, outcomes[0].reason
    position = now.trackers[0].loaders[0]
    assert position.samples == saved[0][0].samples
    rest, saved_again = now.run(1, first_epoch=position.epoch)
    is_over = position.batch and saved[0][0].state == "exhausted"
    assert rest == whole[save_at:], f"{name}: other samples"
    assert is_over or name == "workers" or now.num_reads == sum(map(len, rest))
    if len(rest) > 1:  # saved on the new ranks, the records are like any others
        same = again()
        for tracker, records in zip(same.trackers, saved_again, strict=True):
            fills = records[0].contract["even_batches"] is not None and same.num_ranks == 1
            if fills:
                (each,) = same.carry([records], now, "exact")
                records = [each.record]
            tracker.restore(records)
        position = same.trackers[0].loaders[0]
        assert same.run(first_epoch=position.epoch)[0] == rest[1:]


@pytest.mark.parametrize(
    ("name", "ranks", "place"),
    [
        pytest.param(name, ranks, place, marks=[pytest.mark.matrix] if name == "workers" and place != 2 else [])
        for name in KINDS
        for ranks, place in (((2, 3), 2), ((3, 1), 5), ((4, 2), 4))
    ],
)
def test_every_kind_goes_on_with_the_same_samples(name: str, ranks: tuple[int, int], place: int) -> None:
    make, config = KINDS[name]
    num_items = 45  # not a multiple of the 12 of an update
    before, now = ((count, 12 // count) for count in ranks)

    def build(setting: tuple[int, int], seed: int) -> Ranks:
        count, batch_size = setting
        if count == 1:
            # One process draws from the global generator unless the sampler has one, which it gets from the record.
            return Ranks(make, num_items, num_ranks=1, batch_size=batch_size, seed=seed, **config)
        return Ranks(make, num_items, num_ranks=count, batch_size=batch_size, seed=seed, **config)

    _check(name, num_items, build(before, 1), build(now, 99), place, lambda: build(now, 1234))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(FAST),
    st.integers(1, 40),
    st.sampled_from([(4, 1, 3), (2, 2, 3), (2, 3, 2), (3, 4, 1), (3, 2, 2), (2, 6, 1), (4, 3, 1)]),
    st.sampled_from([(4, 1, 3), (2, 2, 3), (2, 3, 2), (3, 4, 1), (3, 2, 2), (2, 6, 1), (1, 12, 1), (1, 4, 3)]),
    st.integers(0, 30),
)
def test_random_set_ups(
    name: str, num_items: int, before: tuple[int, int, int], now: tuple[int, int, int], save_at: int
) -> None:
    """Either refused, or every update is the uninterrupted run's; decided before a sample is read."""
    make, config = KINDS[name]

    def build(setting: tuple[int, int, int], seed: int) -> Ranks:
        count, batch_size, accumulation = setting
        return Ranks(
            make,
            num_items,
            num_ranks=count,
            batch_size=batch_size,
            accumulation=accumulation,
            seed=seed,
            **config,
        )

    first, second = build(before, 1), build(now, 99)
    whole, _ = build(before, 1).run()
    save_at %= len(whole) + 1
    same, saved = first.run(save_at)
    assert same == whole
    carried = second.carry(saved, first, "exact")
    problems = {each.problem for each in carried}
    if problems != {None}:
        (problem,) = problems
        assert re.search("its last update is another|short one", str(problem))
        assert second.num_reads == 0
        second = build(now, 99)
        carried = second.carry(saved, first, "allow")
        assert {each.problem for each in carried} == {None}
        outcomes = second.restore(carried)
        assert {each.status for each in outcomes} == {"approximate"}
        assert str(outcomes[0].reason).startswith(str(problem).partition(". Choose")[0])
        return
    second.restore(carried)
    position = second.trackers[0].loaders[0]
    assert second.run(first_epoch=position.epoch)[0] == whole[save_at:]


# -- refusals, and what is approximate ------------------------------------------------------------------------------


def _save(make: Make, num_items: int, save_at: int, **options: Any) -> tuple[Ranks, list[Any], list[Any]]:
    ranks = Ranks(make, num_items, **options)
    whole, saved = ranks.run(save_at)
    return ranks, whole, saved


def _get_problem(carried: list[Carried]) -> str:
    (problem,) = {each.problem for each in carried}
    return str(problem)


def test_whole_batches_of_a_custom_batch_sampler() -> None:
    def make(num_items: int, batch_size: int, seed: int) -> DataLoader:
        return DataLoader(NoisyDataset(num_items), batch_sampler=BucketBatchSampler(num_items, batch_size, seed))

    before, whole, saved = _save(make, 48, 3, num_ranks=4, batch_size=3)
    now = Ranks(make, 48, num_ranks=2, batch_size=3, accumulation=2, seed=99)
    now.restore(now.carry(saved, before, "exact"))
    assert now.run(first_epoch=0)[0] == whole[3:]
    other = Ranks(make, 48, num_ranks=2, batch_size=6, seed=99)
    assert "depends on its batch size" in _get_problem(other.carry(saved, before, "exact"))
    alone = Ranks(make, 48, num_ranks=1, batch_size=3, accumulation=4, seed=99)
    assert "short last batch" in _get_problem(alone.carry(saved, before, "exact"))


def test_one_order_split_between_processes() -> None:
    config = {"split_batches": True}
    before, whole, saved = _save(_plain(), 41, 2, num_ranks=4, batch_size=12, **config)
    now = Ranks(_plain(), 41, num_ranks=3, batch_size=6, accumulation=2, seed=99, **config)
    assert "last update" in _get_problem(now.carry(saved, before, "exact"))
    now = Ranks(_plain(), 41, num_ranks=3, batch_size=12, seed=99, **config)
    now.restore(now.carry(saved, before, "exact"))
    assert now.run()[0] == whole[2:]
    unsplit = Ranks(_plain(), 41, num_ranks=3, batch_size=4, seed=99)
    unsplit.restore(unsplit.carry(saved, before, "exact"))
    assert unsplit.run()[0] == whole[2:]


def test_other_updates_are_refused_with_both_numbers() -> None:
    before, _, saved = _save(_plain(), 48, 2, num_ranks=2, batch_size=4)
    now = Ranks(_plain(), 48, num_ranks=3, batch_size=4, seed=99)
    problem = _get_problem(now.carry(saved, before, "exact"))
    assert "then 2 x 4 x 1 = 8 samples per update; now 3 x 4 x 1 = 12 samples per update" in problem
    assert 'elastic="allow"' in problem
    assert now.num_reads == 0


@pytest.mark.parametrize(
    ("ranks", "batch_size", "repeated"), [(3, 4, 8), (3, 2, 2), (4, 2, 4), (5, 2, 0), (1, 3, 2), (4, 6, 20)]
)
def test_allowed_it_goes_on_at_the_same_sample(ranks: int, batch_size: int, repeated: int) -> None:
    """20 of 46 samples were handed out; a place that is no start of a batch is rounded down, so that none is missed."""
    before, whole, saved = _save(_plain(), 46, 5, num_ranks=2, batch_size=2)
    now = Ranks(_plain(), 46, num_ranks=ranks, batch_size=batch_size, seed=99)
    carried = now.carry(saved, before, "allow")
    outcomes = now.restore(carried)
    assert {each.status for each in outcomes} == {"approximate"}
    if repeated:
        assert f"goes on at sample {20 - repeated} of the epoch, so {repeated} that had been" in str(outcomes[0].reason)
    else:
        assert "goes on at sample 20 of the epoch" in str(outcomes[0].reason)
    assert now.trackers[0].loaders[0].samples == 20 - repeated
    updates, _ = now.run(num_epochs=1)
    seen = {sample for update in whole[:5] for sample in update}
    delivered = [sample for update in updates for sample in update]
    assert set(range(46)) - seen <= set(delivered)
    assert repeated <= len(seen & set(delivered)) <= repeated + max(0, len(delivered) - 26 - repeated)
    second = [sample for update in now.run(num_epochs=1)[0] for sample in update]
    assert set(second) == set(range(46))


def test_allowed_near_the_end_the_epoch_is_over() -> None:
    before, _, saved = _save(_plain(drop_last=True), 23, 5, num_ranks=2, batch_size=2)
    assert saved[0][0].state == "exhausted"
    before, _, saved = _save(_plain(), 23, 5, num_ranks=2, batch_size=2)
    now = Ranks(_plain(drop_last=True), 23, num_ranks=1, batch_size=20, seed=99)
    outcomes = now.restore(now.carry(saved, before, "allow"))
    assert (outcomes[0].epoch, outcomes[0].batch) == (0, 1)
    assert now.run(num_epochs=1)[0] == []
    assert len(now.run(num_epochs=1)[0]) == 1


def test_an_order_from_the_global_generator_is_refused() -> None:
    before, _, saved = _save(_plain(), 24, 3, num_ranks=1, batch_size=4)
    now = Ranks(_plain(), 24, num_ranks=2, batch_size=2, seed=99)
    for mode in ("exact", "allow"):
        assert "global random generator" in _get_problem(now.carry(saved, before, mode))
    carried = now.carry(saved, before, "exact")
    for each, tracker in zip(carried, now.trackers, strict=True):
        with pytest.raises(DataProgressError, match="global random generator"):
            tracker.restore([each.record])
        (outcome,) = tracker.restore([each.record], strict=False)
        assert (outcome.status, outcome.epoch) == ("absent", 0)
    alone = Ranks(_plain(), 24, num_ranks=1, batch_size=2, accumulation=2, seed=99)
    assert "global random generator" in _get_problem(alone.carry(saved, before, "exact"))
    config = {"use_seedable_sampler": True, "data_seed": 4}
    before, whole, saved = _save(_plain(), 24, 3, num_ranks=1, batch_size=4, **config)
    now = Ranks(_plain(), 24, num_ranks=2, batch_size=2, seed=99, **config)
    now.restore(now.carry(saved, before, "exact"))
    assert now.run()[0] == whole[3:]


@pytest.mark.parametrize("save_at", [3, 6])
def test_ranks_that_drew_different_orders_have_no_common_place(save_at: int) -> None:
    before, _, saved = _save(
        _plain(), 24, save_at, num_ranks=2, batch_size=2, seeds_differ=True, use_seedable_sampler=True
    )
    now = Ranks(_plain(), 24, num_ranks=4, batch_size=1, seed=99, use_seedable_sampler=True)
    assert "ranks 0 and 1 of the save drew different orders" in _get_problem(now.carry(saved, before, "exact"))


def test_ranks_at_different_places_have_no_common_place() -> None:
    ranks = Ranks(_plain(), 20, num_ranks=2, batch_size=3, even_batches=False)  # 4 batches and 3
    for loader in ranks.loaders:
        for number, _ in enumerate(loader, start=1):
            if number == 3:
                break
    saved = [_through_json(tracker.capture()) for tracker in ranks.trackers]
    saved[1] = saved[1] if saved[0][0].state != saved[1][0].state else [replace(saved[1][0], iteration=5)]
    now = Ranks(_plain(), 20, num_ranks=3, batch_size=2, seed=99)
    assert "stood at different places" in _get_problem(now.carry(saved, ranks, "allow"))


class ForgetfulSampler(HiddenTorchSampler):
    """Its order depends on what no checkpoint knows."""

    turn = 0

    def __iter__(self) -> Iterator[int]:
        return iter([*range(type(self).turn, self.num_items), *range(type(self).turn)])


def test_another_order_is_noticed_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    make = _with_sampler(lambda data, n, s: ForgetfulSampler(n, s))
    before, _, saved = _save(make, 24, 2, num_ranks=2, batch_size=3)
    monkeypatch.setattr(ForgetfulSampler, "turn", 1)
    now = Ranks(make, 24, num_ranks=3, batch_size=2, seed=99)
    now.restore(now.carry(saved, before, "exact"))
    for loader in now.loaders:
        with pytest.raises(DataProgressError, match="not those that were handed out on rank 0 before the save"):
            next(iter(loader))
    assert now.num_reads == 0
    lenient = Ranks(make, 24, num_ranks=3, batch_size=2, seed=99)
    lenient.restore(lenient.carry(saved, before, "exact"), strict=False)
    with pytest.warns(DataProgressWarning, match="not those"):
        next(iter(lenient.loaders[0]))


def test_saved_again_before_the_first_batch() -> None:
    before, whole, saved = _save(_plain(), 45, 5, num_ranks=2, batch_size=6)
    now = Ranks(_plain(), 45, num_ranks=3, batch_size=4, seed=99)
    now.restore(now.carry(saved, before, "exact"))
    again = [_through_json(tracker.capture()) for tracker in now.trackers]
    same = Ranks(_plain(), 45, num_ranks=3, batch_size=4, seed=1234)
    for tracker, records in zip(same.trackers, again, strict=True):
        assert tracker.restore(records)[0].status == "restored"
    assert same.run(first_epoch=1)[0] == whole[5:]


def test_generators_of_ranks_that_were_and_that_are_new() -> None:
    before, _, saved = _save(_plain(), 45, 2, num_ranks=2, batch_size=6)
    now = Ranks(_plain(), 45, num_ranks=3, batch_size=4, seed=99)
    carried = now.carry(saved, before, "exact")
    for name in ("epoch_start", "before_fetch", "now"):
        rngs = [each.record.moments[name].rng for each in carried]
        expected = [records[0].moments[name].rng for records in saved]
        expected.append(derive(expected[0], 2))
        assert [rng.compute_digest() for rng in rngs] == [rng.compute_digest() for rng in expected]


# -- other settings -------------------------------------------------------------------------------------------------


def test_another_number_of_workers_where_it_is_allowed() -> None:
    before, whole, saved = _save(_plain(), 45, 2, num_ranks=2, batch_size=6)
    now = Ranks(_plain(num_workers=1), 45, num_ranks=2, batch_size=6, seed=99)
    assert "num_workers: saved 0, now 1" in _get_problem(now.carry(saved, before, "exact"))
    outcomes = now.restore(now.carry(saved, before, "refuse", "num_workers"))
    assert {each.status for each in outcomes} == {"approximate"}
    assert "num_workers is 1, it was 0" in str(outcomes[0].reason)
    assert now.run(num_epochs=1)[0] == whole[2:4]


def test_a_longer_dataset_where_it_is_allowed() -> None:
    before, _, saved = _save(_plain(), 45, 2, num_ranks=2, batch_size=6)
    now = Ranks(_plain(), 60, num_ranks=2, batch_size=6, seed=99)
    assert "length of the dataset: saved 45, now 60" in _get_problem(now.carry(saved, before, "exact"))
    outcomes = now.restore(now.carry(saved, before, "exact", "dataset"))
    assert {each.status for each in outcomes} == {"approximate"}
    assert "the dataset has 60 items, it had 45" in str(outcomes[0].reason)
    assert len(now.run(num_epochs=1)[0]) == 3
    refused = Ranks(_plain(), 60, num_ranks=2, batch_size=3, seed=99)
    assert "6 sample(s), it took 12" in _get_problem(refused.carry(saved, before, "exact", "dataset"))


def test_a_kind_that_is_not_restored_keeps_its_epoch_alone() -> None:
    before, _, saved = _save(_plain(), 45, 2, num_ranks=2, batch_size=6)
    saved = [[replace(each, kind="dispatcher", restorable=False) for each in records] for records in saved]
    now = Ranks(_plain(), 45, num_ranks=3, batch_size=4, seed=99)
    carried = now.carry(saved, before, "allow")
    assert "kind 'dispatcher' cannot be carried" in _get_problem(carried)
    assert {each.status for each in now.restore(carried, strict=False)} == {"absent"}


def test_another_fingerprint_of_a_dataset_is_said() -> None:
    def make(num_items: int, batch_size: int, seed: int) -> DataLoader:
        loader = DataLoader(NoisyDataset(num_items), batch_size=batch_size)
        loader.dataset._fingerprint = f"f{seed}"
        return loader

    _, _, saved = _save(make, 24, 2, num_ranks=1, batch_size=6)
    same, other = (Ranks(make, 24, num_ranks=1, batch_size=6, seed=seed) for seed in (1, 2))
    assert same.trackers[0].list_notes(saved[0]) == []
    (note,) = other.trackers[0].list_notes(saved[0])
    assert "fingerprint is f2, it was f1" in note
    assert other.trackers[0].check(saved[0]) == []
