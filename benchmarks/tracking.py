"""What it costs per batch that a loader is followed, and how long a million samples take to skip.

    python benchmarks/tracking.py
    python benchmarks/tracking.py --batches 20000 --rounds 9 --json

The same prepared loader is iterated with nobody following it and followed, in turn, round after round; each figure is
the difference of the best times. The dataset does nothing, so that nothing hides the difference. One process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone is measured without being installed

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_fsdp_tools.progress import track

BATCH_SIZE = 8
_ITEM = torch.zeros(4)


class Nothing(Dataset):
    """Items that cost nothing; counts what is read."""

    def __init__(self, num_items: int) -> None:
        self.num_items, self.num_reads = num_items, 0

    def __len__(self) -> int:
        return self.num_items

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.num_reads += len(indices)
        return [_ITEM] * len(indices)


class Stream(IterableDataset):
    """The same without indices, with a state."""

    def __init__(self, num_items: int) -> None:
        self.num_items, self.place = num_items, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.place, self.num_items):
            self.place = index + 1
            yield _ITEM
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def take_first(items: list[torch.Tensor]) -> torch.Tensor:
    """Collate without copying."""
    return items[0]


def prepare(dataset: Any, *, is_followed: bool, dispatch: bool = False, **options: Any) -> tuple[Any, Any]:
    """A prepared loader, and its tracker if it is followed."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(dataset, batch_size=BATCH_SIZE, collate_fn=take_first, **options))
    return loader, track(accelerator) if is_followed else None


def time_pass(loader: Any) -> float:
    """Seconds of one pass."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def measure(make: Callable[[bool], Any], num_batches: int, rounds: int) -> dict[str, float]:
    """Microseconds per batch: plain, followed, and the difference."""
    loaders = {followed: make(followed) for followed in (False, True)}
    best = dict.fromkeys(loaders, float("inf"))
    for _ in range(rounds):
        for followed, loader in loaders.items():
            best[followed] = min(best[followed], time_pass(loader))
    plain, followed = (best[key] / num_batches * 1e6 for key in (False, True))
    return {"plain_us": plain, "followed_us": followed, "overhead_us": followed - plain}


def measure_skip(num_samples: int, *, shuffle: bool) -> dict[str, float]:
    """Seconds from the first `next` to the batch behind `num_samples` samples, and the items read for it."""
    num_items = num_samples + 2 * BATCH_SIZE
    loader, tracker = prepare(Nothing(num_items), is_followed=True, shuffle=shuffle)
    saved = None
    for number, _ in enumerate(loader, start=1):
        if number == num_samples // BATCH_SIZE:
            saved = tracker.capture()
    dataset = Nothing(num_items)
    loader, tracker = prepare(dataset, is_followed=True, shuffle=shuffle)
    tracker.restore(saved)
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    return {"skip_s": time.perf_counter() - start, "items_read": dataset.num_reads - 2 * BATCH_SIZE}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    num_items = arguments.batches * BATCH_SIZE
    ways: dict[str, Callable[[bool], Any]] = {
        "indices, num_workers=0: generators remembered per fetch": lambda followed: prepare(
            Nothing(num_items), is_followed=followed, shuffle=True
        )[0],
        "indices, num_workers=1: nothing to remember": lambda followed: prepare(
            Nothing(num_items), is_followed=followed, shuffle=True, num_workers=1, persistent_workers=True
        )[0],
        "dispatched, num_workers=0": lambda followed: prepare(
            Nothing(num_items), is_followed=followed, shuffle=True, dispatch=True
        )[0],
        "stream with a state, num_workers=0": lambda followed: prepare(Stream(num_items), is_followed=followed)[0],
    }
    results: dict[str, dict[str, float]] = {
        name: measure(make, arguments.batches, arguments.rounds) for name, make in ways.items()
    }
    for order in ("shuffled", "sequential"):
        results[f"skip {arguments.samples:,} samples, {order}"] = measure_skip(
            arguments.samples, shuffle=order == "shuffled"
        )
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    for name, figures in results.items():
        print(f"{name:<58}", "  ".join(f"{key} {value:9.2f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
