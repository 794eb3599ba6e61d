"""Loaders of many kinds, and a training-like program that records all that they deliver.

Every dataset draws from Python's, numpy's and torch's generators while items are read, so that a single random
number too many or too few anywhere changes what follows.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from accel_fsdp_tools.errors import DataProgressError
from accel_fsdp_tools.progress import Change, LoaderOutcome, track
from accel_fsdp_tools.rank_state import read_rank_state, write_rank_state
from accel_fsdp_tools.rng import RngSnapshot, derive


class NoisyDataset(Dataset):
    """Items (id, python noise, numpy noise, torch noise); counts the reads."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.num_reads = 0

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_reads += 1
        noise = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]
        return torch.tensor([index, *noise], dtype=torch.float64)


class ListDataset(NoisyDataset):
    """Reads a whole batch of indices at once."""

    def __getitem__(self, indices: list[int]) -> torch.Tensor:  # type: ignore[override]
        return torch.stack([super(ListDataset, self).__getitem__(index) for index in indices])


class OwnNoiseDataset(NoisyDataset):
    """Draws from generators of its own, one of them inside a transform."""

    def __init__(self, num_items: int, seed: int) -> None:
        super().__init__(num_items)
        self.noise = np.random.default_rng(seed)
        self.transforms = [Jitter(seed)]

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([super().__getitem__(index), self.transforms[0](self.noise.normal())])


class Jitter:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def __call__(self, value: float) -> torch.Tensor:
        return torch.tensor([value, self.dice.random()], dtype=torch.float64)


class LateCollator:
    """Makes its generator when it is first called, as some masking collators do."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator: torch.Generator | None = None

    def __call__(self, items: list[torch.Tensor]) -> torch.Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(self.seed)
        batch = torch.stack(items)
        noise = torch.rand((len(items), 1), generator=self.generator, dtype=torch.float64)
        return torch.cat([batch, noise], dim=1)


class HiddenTorchSampler(Sampler):
    """Draws its whole order in `__iter__`, from a generator under a name of its own."""

    def __init__(self, num_items: int, seed: int) -> None:
        self.num_items = num_items
        self.parts = {"dice": torch.Generator().manual_seed(seed)}

    def __len__(self) -> int:
        return self.num_items

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.num_items, generator=self.parts["dice"]).tolist())


class LazyNumpySampler(HiddenTorchSampler):
    """Draws each index when it is asked for, from two numpy generators."""

    def __init__(self, num_items: int, seed: int) -> None:
        self.num_items = num_items
        self.new, self.old = np.random.default_rng(seed), np.random.RandomState(seed)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.num_items):
            yield int(self.new.integers(self.num_items) + self.old.randint(self.num_items)) % self.num_items


class InPlaceSampler(HiddenTorchSampler):
    """Shuffles one list again and again and counts its own epochs: state besides the generator."""

    def __init__(self, num_items: int, seed: int) -> None:
        self.order = list(range(num_items))
        self.num_items = num_items
        self.times = 0
        self.dice = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        self.dice.shuffle(self.order)
        self.times += 1
        start = self.times * 5 % self.num_items
        return iter(self.order[start:] + self.order[:start])


class BucketBatchSampler(BatchSampler):
    """A user's batch sampler without an inner sampler, shuffling whole buckets, with `set_epoch`."""

    def __init__(self, num_items: int, batch_size: int, seed: int) -> None:
        self.buckets = [list(range(i, min(i + batch_size, num_items))) for i in range(0, num_items, batch_size)]
        self.batch_size, self.drop_last = batch_size, False
        self.seed, self.epoch = 3, 0
        self.dice = np.random.RandomState(seed)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.buckets)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.dice.permutation(len(self.buckets) - 1).tolist()
        turn = (self.seed + self.epoch) % len(order)
        for number in [*order[turn:], *order[:turn], len(self.buckets) - 1]:
            yield list(self.buckets[number])


@dataclass
class Kind:
    """How to build one kind of loader, and how the program uses it."""

    make: Callable[[int], DataLoader]
    config: dict[str, Any] = field(default_factory=dict)
    make_eval: Callable[[int], DataLoader] | None = None
    break_after: int | None = None
    num_epochs: int = 2
    min_ranks: int = 1
    data_resume: str = "skip"
    is_unchanged: bool = True  # whether a followed run is the run that nobody follows
    counts_reads: bool = True  # whether every rank reads what it is handed, and nothing else


def _make(num_items: int = 23, **options: Any) -> Callable[[int], DataLoader]:
    return lambda seed: DataLoader(NoisyDataset(num_items), **{"batch_size": 3, "shuffle": True, **options})


def _make_with(sampler: Callable[[Dataset, int], Any], num_items: int = 23) -> Callable[[int], DataLoader]:
    def make(seed: int) -> DataLoader:
        dataset = NoisyDataset(num_items)
        return DataLoader(dataset, batch_size=3, sampler=sampler(dataset, seed))

    return make


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


_WEIGHTS = [1.0 + i % 5 for i in range(23)]

KINDS: dict[str, Kind] = {
    "shuffle": Kind(_make(), num_epochs=3),
    "seedable": Kind(_make(), {"use_seedable_sampler": True}, num_epochs=3),
    "seedable_data_seed": Kind(_make(), {"use_seedable_sampler": True, "data_seed": 11}),
    "sequential": Kind(_make(shuffle=False)),
    "own_generator": Kind(
        lambda seed: DataLoader(NoisyDataset(23), batch_size=3, shuffle=True, generator=_seeded(seed))
    ),
    "weighted": Kind(_make_with(lambda data, seed: WeightedRandomSampler(_WEIGHTS, 19))),
    "weighted_own_generator": Kind(
        _make_with(lambda data, seed: WeightedRandomSampler(_WEIGHTS, 19, generator=_seeded(seed)))
    ),
    "replacement": Kind(_make_with(lambda data, seed: RandomSampler(data, replacement=True, num_samples=45))),
    "replacement_own_generator": Kind(
        _make_with(lambda data, seed: RandomSampler(data, replacement=True, num_samples=45, generator=_seeded(seed)))
    ),
    "hidden_torch": Kind(_make_with(lambda data, seed: HiddenTorchSampler(23, seed))),
    "lazy_numpy": Kind(_make_with(lambda data, seed: LazyNumpySampler(23, seed))),
    "in_place": Kind(_make_with(lambda data, seed: InPlaceSampler(23, seed))),
    "batch_sampler": Kind(lambda seed: DataLoader(NoisyDataset(23), batch_sampler=BucketBatchSampler(23, 3, seed))),
    "sampler_is_batch_sampler": Kind(
        lambda seed: DataLoader(
            ListDataset(23), sampler=BatchSampler(HiddenTorchSampler(23, seed), 3, False), batch_size=None
        ),
        min_ranks=2,  # in one process Accelerate drops the sampler
    ),
    "split_batches": Kind(_make(batch_size=6), {"split_batches": True}),
    # 7 batches: one rank has 4, the other 3; a save after 3 finds one at its end and the other not.
    "uneven_count": Kind(_make(num_items=20), {"even_batches": False}),
    "uneven_size": Kind(_make(num_items=16), {"even_batches": False}),
    "drop_last": Kind(_make(drop_last=True)),
    "one_batch_epochs": Kind(_make(num_items=5), num_epochs=5),
    "tiny": Kind(_make(num_items=1), num_epochs=4),
    "breaks": Kind(_make(), break_after=3, num_epochs=3),
    "breaks_seedable": Kind(_make(), {"use_seedable_sampler": True}, break_after=3, num_epochs=3),
    "with_eval": Kind(_make(), make_eval=_make(num_items=7)),
    "with_seedable_eval": Kind(_make(), {"use_seedable_sampler": True}, make_eval=_make(num_items=7)),
    "own_noise": Kind(lambda seed: DataLoader(OwnNoiseDataset(23, seed), batch_size=3, shuffle=True)),
    "late_collator": Kind(
        lambda seed: DataLoader(NoisyDataset(23), batch_size=3, shuffle=True, collate_fn=LateCollator(5))
    ),
    "torch_synchronised": Kind(_make(), {"rng_types": ["torch", "generator"]}),
    "uneven_torch_synchronised": Kind(
        _make(num_items=20), {"rng_types": ["torch", "generator"], "even_batches": False}
    ),
}


def make_accelerator(config: dict[str, Any] | None = None) -> Any:
    """A new Accelerator on CPU ranks; earlier ones of this process are forgotten."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    settings = dict(config or {})
    rng_types = settings.pop("rng_types", None)
    return Accelerator(cpu=True, rng_types=rng_types, dataloader_config=DataLoaderConfiguration(**settings))


def fork_workers() -> None:
    """Start the loaders' workers by forking this rank, as Linux does by default: ranks of the harness would start a
    server for them, which imports everything once more."""
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)


def digest_rng() -> tuple[int, int, int]:
    """The global generators' states in three numbers, the same in every process."""
    _, words, position, *_ = numpy_state = np.random.get_state()
    numbers = zlib.crc32(words.tobytes()), hash((position, *numpy_state[3:])), hash(random.getstate())
    return numbers[0] ^ numbers[1], numbers[2], zlib.crc32(torch.get_rng_state().numpy().tobytes())


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Leave random generators and Accelerate's shared state as they were: for tests in the process of pytest."""
    from accelerate.state import AcceleratorState, GradientState

    before = RngSnapshot.capture()
    yield
    before.restore()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Program:
    """Trains with a kind of loader, recording every batch; can be saved at any point and started from one."""

    def __init__(self, kind: Kind, seed: int, *, is_tracked: bool = True) -> None:
        self.kind = kind
        self.accelerator = make_accelerator(kind.config)
        self.rank = self.accelerator.process_index
        seed_everything(seed + 100 * self.rank)
        loaders = [kind.make(seed)] + ([kind.make_eval(seed)] if kind.make_eval else [])
        self.datasets = [loader.dataset for loader in loaders]
        prepared = [self.accelerator.prepare(loader) for loader in loaders]
        self.train, self.evaluation = prepared[0], prepared[1] if len(prepared) > 1 else None
        self.tracker = track(self.accelerator) if is_tracked else None
        self.log: list[Any] = []
        self.outcomes: list[LoaderOutcome] | None = None
        self.first_epoch = self.first_batch = 0

    def save(self, folder: Path, num_events: int) -> None:
        """Save; `num_events` is how much of the reference's log lies before."""
        assert self.tracker is not None
        loaders = self.tracker.capture()
        extra = {"num_events": num_events}
        write_rank_state(folder, self.rank, rng=RngSnapshot.capture(), loaders=loaders, extra=extra)

    def load(self, folder: Path, statuses: tuple[str, ...] = ("restored",)) -> int:
        """Restore; return how much of the reference's log lies before."""
        assert self.tracker is not None
        state = read_rank_state(folder, self.rank)
        outcomes = self.tracker.restore(state.loaders, data_resume=self.kind.data_resume)
        self.outcomes = outcomes
        assert {outcome.status for outcome in outcomes} <= set(statuses), outcomes
        assert state.rng.restore() == ()
        position = self.tracker.loaders[0]
        self.first_epoch, self.first_batch = position.epoch, position.batch
        return int(state.extra["num_events"])

    def load_from(self, folder: Path, num_ranks: int) -> None:
        """Restore what another number of ranks has saved."""
        assert self.tracker is not None
        states = [read_rank_state(folder, rank) for rank in range(num_ranks)]
        own = states[self.rank] if self.rank < num_ranks else None
        carried = self.tracker.carry(
            states[0].loaders,
            None if own is None else own.loaders,
            [self.tracker.make_briefs(state.loaders, rank) for rank, state in enumerate(states)],
            change=Change("exact", (), 1, 1, num_ranks, self.accelerator.num_processes),
            rank=self.rank,
        )
        problems = [each.problem for each in carried if each.problem is not None]
        if problems:
            raise DataProgressError("; ".join(problems))
        self.outcomes = self.tracker.restore([each.record for each in carried], data_resume=self.kind.data_resume)
        (derive(states[0].rng, self.rank) if own is None else own.rng).restore()
        position = self.tracker.loaders[0]
        self.first_epoch, self.first_batch = position.epoch, position.batch

    def record(self, *event: Any) -> None:
        self.log.append((*event, digest_rng()))

    def run(self, reach: Callable[[str], None] = lambda name: None) -> list[Any]:
        """Run to the end; `reach` is called at every point where a run can be saved, with a name for it."""
        if self.first_epoch == 0 and self.first_batch == 0:
            reach("0.0")
        for epoch in range(self.first_epoch, self.kind.num_epochs):
            number = self.first_batch if epoch == self.first_epoch else 0
            for batch in self.train:
                self.record("train", epoch, batch.tolist(), self.accelerator.gradient_state.end_of_dataloader)
                torch.rand(2), random.random(), np.random.rand(3)
                if isinstance(self.datasets[0], OwnNoiseDataset):
                    self.datasets[0].noise.random()  # training and reading share a generator
                number += 1
                if number == self.kind.break_after:
                    break
                if self.evaluation is not None and number % 3 == 0:
                    self.run_evaluation(epoch)
                reach(f"{epoch}.{number}")
            self.record("end", epoch, self.train.iteration)
            torch.rand(1)
            reach(f"{epoch + 1}.0")
        return self.log

    def run_evaluation(self, epoch: int) -> None:
        for batch in self.evaluation:
            self.record("evaluate", epoch, batch.tolist())

    @property
    def num_reads(self) -> int:
        return sum(dataset.num_reads for dataset in self.datasets)


def count_items(log: list[Any]) -> int:
    """How many items the batches of a log hold."""
    return sum(len(event[2]) for event in log if event[0] in ("train", "evaluate"))
