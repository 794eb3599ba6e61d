"""Loaders of many kinds, saved on some ranks and restored on others: every rank's loader in one process.

Accelerate makes the loader of any rank of any number when asked to, so that the records can be carried over without
process groups; `test_elastic_ranks.py` does it with them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from accel_fsdp_tools.errors import DataProgressWarning
from accel_fsdp_tools.progress import Carried, Change, DataTracker, LoaderProgress
from accel_fsdp_tools.rng import RngSnapshot
from tests.loader_kinds import (
    HiddenTorchSampler,
    InPlaceSampler,
    LazyNumpySampler,
    NoisyDataset,
    make_accelerator,
    seed_everything,
)

NUM_EPOCHS = 3
Make = Callable[[int, int, int], DataLoader]


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    before = RngSnapshot.capture()
    yield
    before.restore()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("ranks", "place"), [((2, 3), 2), ((3, 1), 5), ((4, 2), 4)])
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
