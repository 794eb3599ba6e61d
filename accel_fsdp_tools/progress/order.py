"""Prove, on another number of ranks, that the global order is the saved one.

Every rank of the save recorded a checksum of the indices that it had handed out. Dealt out once more as at the save,
the order that the loader draws here must give all of them; then what this rank skips is what was handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..errors import DataProgressError
from .contract import get_index_sampler
from .feed import extend_digest


@dataclass(frozen=True)
class Dealing:
    """How a global order is dealt out: `batch_size` for each process, or split between them."""

    unit: str
    batch_size: int
    num_processes: int
    is_split: bool

    @classmethod
    def from_contract(cls, contract: Mapping[str, Any], unit: str) -> Dealing:
        """The dealing that a contract describes."""
        return cls(unit, contract["batch_size"], contract["num_processes"], bool(contract.get("split_batches")))

    @classmethod
    def from_reader(cls, contract: Mapping[str, Any]) -> Dealing:
        """That of the one process which reads for all."""
        return cls("sample", contract["batch_size"], 1, False)

    def deal(self, units: Sequence[Any], process: int, num_micro: int) -> Iterator[Any]:
        """Yield the first whole batches of one process."""
        for number in range(num_micro):
            if self.is_split:
                size = self.batch_size // self.num_processes
                whole = units[number] if self.unit == "batch" else self._cut(units, number)
                yield whole[size * process : size * (process + 1)]
            else:
                place = number * self.num_processes + process
                yield units[place] if self.unit == "batch" else self._cut(units, place)

    def _cut(self, units: Sequence[Any], number: int) -> Any:
        return units[number * self.batch_size : (number + 1) * self.batch_size]

    def compute_digest(self, units: Sequence[Any], process: int, num_micro: int) -> int:
        """The checksum of the first batches of one process."""
        digest = 0
        for batch in self.deal(units, process, num_micro):
            digest = extend_digest(digest, batch)
        return digest


@dataclass(frozen=True)
class OrderProof:
    """What every rank of the save had handed out of an epoch, and what this rank is to skip of it.

    Attributes:
        before, now: how the order was and is dealt out.
        num_micro: micro-batches handed out at the save.
        num_units: length of the order up to there.
        digests: checksums by process of the save.
        process, num_micro_now: this process, and how many of its batches are skipped.
    """

    before: Dealing
    now: Dealing
    num_micro: int
    num_units: int
    digests: Mapping[int, int] = field(default_factory=dict)
    process: int = 0
    num_micro_now: int = 0

    def prove(self, loader: Any, *, draws_seed: bool) -> int:
        """Draw the order from the loader's sampler, which then has to be put back, and compare.

        Args:
            draws_seed: the pass begins with the draw of a seed for workers, as it does unless they run already.

        Returns:
            The checksum of what this rank is to skip.

        Raises:
            DataProgressError: the order is another one.
        """
        units = list(islice(_iterate_order(loader, self.before.unit, draws_seed), self.num_units))
        if len(units) < self.num_units:
            raise DataProgressError(
                f"the sampler ended after {len(units)} {self.before.unit}(s), but {self.num_units} were handed out "
                "before the save: the dataset or the sampler is not the one that was saved",
                expected=self.num_units,
                actual=len(units),
            )
        for process, expected in self.digests.items():
            actual = self.before.compute_digest(units, process, self.num_micro)
            if actual != expected:
                raise DataProgressError(
                    f"the first {self.num_micro} batches of the epoch are not those that were handed out on rank "
                    f"{process} before the save: the order depends on something that is not saved, or that is not the "
                    "same on all ranks. Draw it from a generator kept as an attribute of the sampler (or set "
                    "DataLoaderConfiguration(use_seedable_sampler=True) and the same seed on every rank), and keep the "
                    "dataset as it was.",
                    expected=expected,
                    actual=actual,
                    rank=process,
                )
        return self.now.compute_digest(units, self.process, self.num_micro_now)


def find_inner_sampler(loader: Any) -> Any:
    """The batch sampler that Accelerate deals out (or the sampler, without automatic batching)."""
    inner = get_index_sampler(loader)
    while hasattr(inner, "batch_sampler"):
        inner = inner.batch_sampler
    return inner


def _iterate_order(loader: Any, unit: str, draws_seed: bool) -> Iterator[Any]:
    """Begin the order as a DataLoader does: a seed may come from the very generator that it is drawn from."""
    import torch

    inner = find_inner_sampler(loader)
    base = loader.base_dataloader
    is_lazy = unit == "sample" or inner is not get_index_sampler(loader)  # batch samplers begin with their first batch
    indices: Iterator[Any] | None = None if is_lazy else iter(inner)
    if draws_seed:
        torch.empty((), dtype=torch.int64).random_(generator=base.generator)
    if indices is None or base.num_workers > 0:  # with workers a sampler is asked twice
        indices = iter(inner.sampler if unit == "sample" else inner)
    return indices
