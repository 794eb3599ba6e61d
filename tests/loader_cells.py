"""The matrix of loaders: how batches reach a rank x where indices come from x workers x how a resume gets there.

A cell is a `Kind`, and what the report is expected to say of it: "exact" is proven by everything that is delivered,
random numbers included, "approximate" by the ids; "refused" by the error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from tests.loader_kinds import (
    BucketBatchSampler,
    HiddenTorchSampler,
    InPlaceSampler,
    Kind,
    LazyNumpySampler,
    NoisyDataset,
)
from tests.stream_kinds import EpochStream, IteratorStream, NoisyStream, ShuffledStream, StatefulStream, make_hf_loader

# Of the last update 5 samples are left, which 2 and 3 ranks complete alike, also where one of them reads for all.
NUM_ITEMS, NUM_DRAWN = 23, 17
BATCH_SIZE, NUM_RANKS = 3, 2
OTHER_BATCH_SIZE, OTHER_NUM_RANKS = 2, 3
_LENGTHS = [1 + (7 * i) % 10 for i in range(NUM_ITEMS)]


class EpochDataset(NoisyDataset):
    """Adds noise that depends on the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.tensor([0, self.epoch, 0, 0, 0, 0], dtype=torch.float64)


class InfiniteSampler(Sampler):
    """Never ends, and goes on from pass to pass."""

    def __init__(self, num_items: int, seed: int) -> None:
        self.num_items, self.position = num_items, 0
        self.dice = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield (self.position * 5 + self.dice.randrange(3)) % self.num_items


class StatefulSampler(HiddenTorchSampler):
    """Has a state_dict, and continues a permutation where the last pass left it."""

    def __init__(self, num_items: int, seed: int) -> None:
        super().__init__(num_items, seed)
        self.turn = 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        order = list(super().__iter__())
        yield from order[self.turn :] + order[: self.turn]

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn, "dice": self.parts["dice"].get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turn = state["turn"]
        self.parts["dice"].set_state(state["dice"])


def _sampled(make: Callable[[int], Any]) -> Callable[..., DataLoader]:
    return lambda seed, **options: _load(sampler=make(seed), **options)


def _load(dataset: Any = None, **options: Any) -> DataLoader:
    return DataLoader(dataset or NoisyDataset(NUM_ITEMS), **{"batch_size": BATCH_SIZE, **options})


def _load_buckets(seed: int, batch_size: int = BATCH_SIZE, **options: Any) -> DataLoader:
    sampler = BucketBatchSampler(NUM_ITEMS, batch_size, seed)
    return DataLoader(NoisyDataset(NUM_ITEMS), batch_sampler=sampler, **options)


def _seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Callable[..., DataLoader]] = {
    "shuffle=True": lambda seed, **o: _load(shuffle=True, **o),
    "seedable": lambda seed, **o: _load(shuffle=True, **o),
    "sequential": lambda seed, **o: _load(**o),
    "weighted": _sampled(lambda seed: WeightedRandomSampler([1.0 + i % 5 for i in range(NUM_ITEMS)], NUM_DRAWN)),
    "subset": _sampled(lambda seed: SubsetRandomSampler(range(NUM_ITEMS - NUM_DRAWN, NUM_ITEMS))),
    "`DistributedSampler`": _sampled(
        lambda seed: DistributedSampler(NoisyDataset(NUM_ITEMS), num_replicas=1, rank=0, seed=4)
    ),
    "length-grouped": _sampled(lambda seed: LengthGroupedSampler(2, lengths=list(_LENGTHS), generator=_seed(seed))),
    "own torch generator": _sampled(lambda seed: HiddenTorchSampler(NUM_ITEMS, seed)),
    "numpy generators, lazy": _sampled(lambda seed: LazyNumpySampler(NUM_ITEMS, seed)),
    "python generator, in place": _sampled(lambda seed: InPlaceSampler(NUM_ITEMS, seed)),
    "with `state_dict`": _sampled(lambda seed: StatefulSampler(NUM_ITEMS, seed)),
    "infinite": _sampled(lambda seed: InfiniteSampler(NUM_ITEMS, seed)),
    "`BatchSampler` subclass": _load_buckets,
    "dataset with `set_epoch`": lambda seed, **o: _load(EpochDataset(NUM_ITEMS), shuffle=True, **o),
}

_DELIVERIES: dict[str, dict[str, Any]] = {
    "each rank": {"dispatch_batches": False},
    "dispatched": {"dispatch_batches": True},
    "each rank, stateful": {"dispatch_batches": False, "use_stateful_dataloader": True},
    "dispatched, stateful": {"dispatch_batches": True, "use_stateful_dataloader": True},
}

_WORKERS: dict[str, dict[str, Any]] = {
    "0": {},
    "2": {"num_workers": 2},
    "2, persistent": {"num_workers": 2, "persistent_workers": True},
    "2, `in_order=False`": {"num_workers": 2, "in_order": False},
}


def _streamed(cls: Any, *args: Any) -> Callable[..., DataLoader]:
    return lambda seed, **o: DataLoader(cls(NUM_ITEMS, *([seed] * len(args))), batch_size=BATCH_SIZE, **o)


STREAMS: dict[str, Callable[..., DataLoader]] = {
    "Python": _streamed(NoisyStream),
    "Python, own buffer and generator": _streamed(ShuffledStream, "seed"),
    "Python, `set_epoch`": _streamed(EpochStream),
    "`state_dict`": _streamed(StatefulStream),
    "`state_dict` on the iterator": _streamed(IteratorStream),
    "`datasets`": make_hf_loader("plain"),
    "`datasets`, shuffle buffer": make_hf_loader("shuffled"),
    "`datasets`, interleaved": make_hf_loader("interleaved"),
    "`datasets`, batched map": make_hf_loader("mapped"),
    "`datasets`, `split_dataset_by_node`": make_hf_loader("split"),
    "`datasets`, `with_format`": make_hf_loader("numpy"),
}


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    source: str
    delivery: str
    workers: str
    data_resume: str
    is_stream: bool

    @property
    def name(self) -> str:
        return f"{self.source} / {self.delivery} / {self.workers} / {self.data_resume}"

    @property
    def kind(self) -> Kind:
        """The loader on `NUM_RANKS` ranks."""
        return self._make_kind({})

    @property
    def other_kind(self) -> Kind:
        """The loader on `OTHER_NUM_RANKS` ranks, with as many samples per batch of all ranks."""
        return self._make_kind({} if self.is_stream else {"batch_size": OTHER_BATCH_SIZE})

    def _make_kind(self, more: dict[str, Any]) -> Kind:
        make = (STREAMS if self.is_stream else SAMPLERS)[self.source]
        options = _WORKERS[self.workers]
        config = dict(_DELIVERIES[self.delivery])
        if self.source == "seedable":
            config["use_seedable_sampler"] = True
        is_stateful = "stateful" in self.delivery
        return Kind(
            lambda seed: make(seed, **options, **more),
            config,
            break_after=3 if self.source == "infinite" else None,
            num_epochs=2,
            data_resume=self.data_resume,
            counts_reads=False,
            is_unchanged=not (is_stateful and options),
        )


def list_cells() -> list[Cell]:
    """All of the matrix. What a choice of `data_resume` cannot change is there once."""
    cells = []
    for sources, is_stream in ((SAMPLERS, False), (STREAMS, True)):
        for source in sources:
            for delivery in _DELIVERIES:
                for workers in _WORKERS:
                    for choice in ("skip", "replay", "refuse"):
                        cell = Cell(source, delivery, workers, choice, is_stream)
                        if _is_of_interest(cell):
                            cells.append(cell)
    return cells


_WITH_WORKERS = ("shuffle=True", "seedable", "numpy generators, lazy", "`BatchSampler` subclass")
_STATEFUL = ("shuffle=True", "numpy generators, lazy", "with `state_dict`")
_STREAMS_WITH_WORKERS = ("Python, own buffer and generator", "`datasets`", "`datasets`, shuffle buffer")
_STATEFUL_STREAMS = ("Python", "`state_dict`", "`datasets`")


def _is_of_interest(cell: Cell) -> bool:
    """Not everything: what is the same code in two columns is run in one of them."""
    is_stateful, has_workers = "stateful" in cell.delivery, cell.workers != "0"
    if cell.is_stream:
        if is_stateful:
            chosen, is_varied = _STATEFUL_STREAMS, has_workers and cell.source != "Python"
            choices = ("skip", "replay") if is_varied else ("skip",)
            return cell.workers in ("0", "2") and cell.source in chosen and cell.data_resume in choices
        if not has_workers:
            return True
        if cell.workers == "2":
            return cell.source in _STREAMS_WITH_WORKERS and cell.data_resume != "replay"
        return cell.source == "Python, own buffer and generator" and cell.data_resume == "skip"
    if cell.data_resume == "refuse" or (cell.data_resume == "replay" and not has_workers):
        return False  # nothing is read again
    if is_stateful:
        return cell.source in (_STATEFUL if not has_workers else _STATEFUL[:1]) and cell.workers in ("0", "2")
    if cell.workers not in ("0", "2"):
        return cell.source == "shuffle=True"
    return not has_workers or cell.source in _WITH_WORKERS


def choose_sample(cells: list[Cell], seed: int = 6) -> list[Cell]:
    """A few cells in which values of different columns meet pairwise, as far as it goes; few have workers."""
    dice = random.Random(seed)
    missing = {pair for cell in cells for pair in _list_pairs(cell)}
    chosen = [Cell("shuffle=True", "each rank", "2", "skip", False)]  # the one that is not exact
    missing -= set(_list_pairs(chosen[0]))
    cells = [cell for cell in cells if cell.workers != "2, persistent"]  # they take longest to stop
    for num_cells, has_workers in ((1, True), (12, False)):
        mine = [cell for cell in cells if (cell.workers != "0") == has_workers]
        for _ in range(num_cells):
            chosen.append(max(dice.sample(mine, len(mine)), key=lambda cell: len(missing & set(_list_pairs(cell)))))
            missing -= set(_list_pairs(chosen[-1]))
    return chosen


def _list_pairs(cell: Cell) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    values = list(enumerate((cell.source, cell.delivery, cell.workers, cell.data_resume)))
    return [(a, b) for number, a in enumerate(values) for b in values[number + 1 :]]
