"""Kinds of loaders beyond a sampler per rank: dispatched batches, streams, workers, stateful loaders."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets.distributed
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.loader_kinds import (
    BucketBatchSampler,
    Kind,
    LateCollator,
    LazyNumpySampler,
    NoisyDataset,
    OwnNoiseDataset,
    _make,
)


def _draw(index: int) -> torch.Tensor:
    noise = [random.random(), np.random.rand(), float(torch.rand(()))]
    return torch.tensor([index, *noise], dtype=torch.float64)


class NoisyStream(IterableDataset):
    """Items in order, with noise from the global generators; like `NoisyDataset`, without indices."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.reads: set[object] = set()  # a number would be a counter of the stream's own, and put back

    @property
    def num_reads(self) -> int:
        return len(self.reads)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in self.list_order():
            self.reads.add(object())
            yield _draw(index)

    def list_order(self) -> list[int]:
        return list(range(self.num_items))


class ShuffledStream(NoisyStream):
    """Shuffles by a generator of its own, in a small buffer, and counts its passes."""

    def __init__(self, num_items: int, seed: int) -> None:
        super().__init__(num_items)
        self.dice = random.Random(seed)
        self.num_passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.num_passes += 1
        buffer: list[int] = []
        for index in range(self.num_items):
            buffer.append((index + self.num_passes) % self.num_items)
            if len(buffer) == 4:
                yield _draw(buffer.pop(self.dice.randrange(4)))
        while buffer:
            yield _draw(buffer.pop(self.dice.randrange(len(buffer))))


class EpochStream(NoisyStream):
    """Shuffles by the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def list_order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(self.num_items), self.num_items)


class StatefulStream(NoisyStream):
    """Knows where it is, and goes there; counts what it reads."""

    def __init__(self, num_items: int) -> None:
        super().__init__(num_items)
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.place = self.place, 0
        for index in range(start, self.num_items):
            self.reads.add(object())
            self.place = index + 1
            yield _draw((index * 7) % self.num_items)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "key": ("any", np.int64(3), torch.ones(2))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["key"][:2] == ("any", 3)
        self.place = state["place"]


class IteratorStream(NoisyStream):
    """Its iterator has the state."""

    def __iter__(self) -> Any:
        return _StatefulIterator(self)


class _StatefulIterator:
    def __init__(self, stream: NoisyStream) -> None:
        self.stream, self.place = stream, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> torch.Tensor:
        if self.place == self.stream.num_items:
            raise StopIteration
        self.place += 1
        self.stream.reads.add(object())
        return _draw(self.place - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def _generate(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for row in range(6):
            yield {"id": 6 * shard + row}


def _collate(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([_draw(int(row["id"])) for row in rows])


def make_hf(num_shards: int = 4) -> Any:
    """A Hugging Face stream of shards of 6 rows."""
    return datasets.IterableDataset.from_generator(_generate, gen_kwargs={"shards": list(range(num_shards))})


def _hf(change: Callable[[Any], Any] = lambda stream: stream, **options: Any) -> Callable[[int], DataLoader]:
    def make(seed: int) -> DataLoader:
        stream = change(make_hf())
        stream.num_reads = 0
        return DataLoader(stream, batch_size=3, collate_fn=_collate, **options)

    return make


def _interleave(stream: Any) -> Any:
    return datasets.interleave_datasets([stream, make_hf(2)], probabilities=[0.7, 0.3], seed=5)


def _split(stream: Any) -> Any:
    from accelerate.state import PartialState

    state = PartialState()
    return datasets.distributed.split_dataset_by_node(stream, rank=state.process_index, world_size=state.num_processes)


def make_hf_loader(name: str) -> Callable[..., DataLoader]:
    """Loaders over one kind of Hugging Face stream; keywords go to the DataLoader."""
    change = _CHANGES[name]
    return lambda seed, **options: _hf(change, **options)(seed)


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda stream: stream,
    "shuffled": lambda stream: stream.shuffle(seed=3, buffer_size=5),
    "interleaved": _interleave,
    "mapped": lambda stream: stream.map(_double, batched=True, batch_size=4),
    "numpy": lambda stream: stream.with_format("numpy"),
    "split": _split,
}


def _double(rows: dict[str, Any]) -> dict[str, Any]:
    return {"id": [2 * number for number in rows["id"]]}


def _stream(cls: Any, *args: Any, num_items: int = 22, **options: Any) -> Callable[[int], DataLoader]:
    return lambda seed: DataLoader(cls(num_items, *(seed if a is ... else a for a in args)), batch_size=3, **options)


_DISPATCH = {"dispatch_batches": True}

KINDS: dict[str, Kind] = {
    "dispatch": Kind(_make(), _DISPATCH, num_epochs=3),  # the last group is (3, 2): completed by the first samples
    "dispatch_remainder": Kind(_make(num_items=20), _DISPATCH),  # the last group is (2,)
    "dispatch_even": Kind(_make(num_items=24), _DISPATCH),
    "dispatch_seedable": Kind(_make(), {**_DISPATCH, "use_seedable_sampler": True}),
    "dispatch_split": Kind(_make(batch_size=6), {**_DISPATCH, "split_batches": True}),
    "dispatch_split_uneven": Kind(_make(num_items=21, batch_size=6), {**_DISPATCH, "split_batches": True}),
    "dispatch_drop_last": Kind(_make(drop_last=True), _DISPATCH),
    "dispatch_breaks": Kind(_make(), _DISPATCH, break_after=3, num_epochs=3),
    "dispatch_batch_sampler": Kind(
        lambda seed: DataLoader(NoisyDataset(23), batch_sampler=BucketBatchSampler(23, 3, seed)), _DISPATCH
    ),
    "dispatch_own_noise": Kind(
        lambda seed: DataLoader(OwnNoiseDataset(23, seed), batch_size=3, shuffle=True), _DISPATCH
    ),
    "dispatch_late_collator": Kind(
        lambda seed: DataLoader(NoisyDataset(23), batch_size=3, shuffle=True, collate_fn=LateCollator(5)), _DISPATCH
    ),
    "dispatch_with_eval": Kind(_make(), _DISPATCH, make_eval=_make(num_items=7)),
}

_OWN = {"dispatch_batches": False}  # each rank reads for itself

for _name, _make_loader in {
    "stream": _stream(NoisyStream),
    "stream_shuffled": _stream(ShuffledStream, ...),
    "stream_epochs": _stream(EpochStream),
    "stream_stateful": _stream(StatefulStream),
    "stream_iterator": _stream(IteratorStream),
    "stream_drop_last": _stream(StatefulStream, drop_last=True),
    "hf": _hf(),
    "hf_shuffled": _hf(_CHANGES["shuffled"]),
    "hf_interleaved": _hf(_CHANGES["interleaved"]),
    "hf_mapped": _hf(_CHANGES["mapped"]),
    "hf_arrow": _hf(_CHANGES["numpy"]),
}.items():
    KINDS[f"{_name}_dispatched"] = Kind(_make_loader)
    KINDS[f"{_name}_own"] = Kind(_make_loader, _OWN)
KINDS["hf_split"] = Kind(_hf(_CHANGES["split"]), _OWN)
KINDS["stream_split"] = Kind(
    lambda seed: DataLoader(StatefulStream(22), batch_size=6), {"split_batches": True, "dispatch_batches": False}
)
KINDS["stream_breaks"] = Kind(_stream(StatefulStream), break_after=2, num_epochs=3)

_REPLAY = {"data_resume": "replay"}
_STATEFUL = {"use_stateful_dataloader": True}
for _number in (1, 2):
    _loaders = {
        "workers": Kind(_make(num_workers=_number), **_REPLAY),
        "workers_seedable": Kind(_make(num_workers=_number), {"use_seedable_sampler": True}, **_REPLAY),
        "workers_prefetch": Kind(_make(num_workers=_number, prefetch_factor=3), **_REPLAY),
        "workers_dispatched": Kind(_make(num_workers=_number), _DISPATCH, **_REPLAY),
        "workers_lazy": Kind(
            lambda seed, n=_number: DataLoader(
                NoisyDataset(23), batch_size=3, sampler=LazyNumpySampler(23, seed), num_workers=n
            ),
            **_REPLAY,
        ),
        "workers_stream_dispatched": Kind(_stream(ShuffledStream, ..., num_workers=_number)),
        "workers_stream_own": Kind(_stream(EpochStream, num_workers=_number), _OWN),
        "workers_hf_own": Kind(_hf(num_workers=_number), _OWN),
    }
    KINDS |= {f"{name}_{_number}": kind for name, kind in _loaders.items()}

KINDS |= {
    "stateful": Kind(_make(), _STATEFUL),
    "stateful_seedable": Kind(_make(), {**_STATEFUL, "use_seedable_sampler": True}),
    "stateful_dispatched": Kind(_make(), {**_STATEFUL, **_DISPATCH}),
    "stateful_stream_dispatched": Kind(_stream(StatefulStream), _STATEFUL),
    "stateful_stream_own": Kind(_stream(StatefulStream), {**_STATEFUL, **_OWN}),
    "stateful_hf_own": Kind(_hf(), {**_STATEFUL, **_OWN}),
    "stateful_workers": Kind(_make(num_workers=2), _STATEFUL, **_REPLAY),
    "stateful_workers_stream": Kind(_stream(EpochStream, num_workers=2), {**_STATEFUL, **_OWN}, **_REPLAY),
    "stateful_workers_hf_own": Kind(_hf(num_workers=2), {**_STATEFUL, **_OWN}, **_REPLAY),
    "stateful_workers_hf_dispatched": Kind(_hf(num_workers=2), _STATEFUL, **_REPLAY),
}

for _name, _kind in KINDS.items():
    _kind.counts_reads = False
    # Workers that were started while the loader was prepared are given up, and others have other seeds.
    _kind.is_unchanged = not _name.startswith("stateful_workers")
