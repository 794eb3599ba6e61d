"""Sums over ranks of what each holds of every tensor, copies counted once and compared.

Two reductions of a few integers per tensor. So the traffic grows with the number of tensors, not with that times the
number of ranks, and rank 0 does nothing special. Copies come in two kinds:

- A tensor that ranks hold whole (unsharded parameters, buffers, NO_SHARD, `step`): the largest and the smallest of
  each word over the ranks that have it must be equal.
- Copies of shards (HSDP, or a parameter that tensor parallelism leaves alone): the ranks have told each other which
  share of each way of cutting they have (`shards.Layout`, a handful). The first rank of each share counts. Each copy
  also enters a second sum with a factor; the factors of one share add up to zero, so equal copies cancel.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import RankMismatchError, UnsupportedError
from .fingerprint import Fingerprint
from .ranks import get_control_group, get_rank, get_world_size, naming_missing
from .shards import OUTSIDE, WHOLE, Layout
from .statistics import TensorStatistics
from .weighted_sums import MASK, get_multipliers

Key = tuple[str, str]  # the tensor's name, and the state's ("" for the model's own)
Indices = Mapping[str, tuple[int, ...]]  # one rank's share of each way of cutting, by scheme


@dataclass(frozen=True)
class Entry:
    """This rank's sum over one tensor."""

    key: Key
    fingerprint: Fingerprint
    layout: Layout
    num_bytes: int
    kind: str  # dtype and shape
    statistics: TensorStatistics | None = None


def list_indices(entries: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
    """Return this rank's share of each way of cutting. Not collective."""
    indices: dict[str, tuple[int, ...]] = {}
    for layout in {entry.layout for entry in entries} - {WHOLE, OUTSIDE}:
        if indices.setdefault(str(layout.scheme), layout.index) != layout.index:
            raise UnsupportedError("Two process groups that overlap in an irregular way cut this model's tensors")
    return indices


@dataclass(frozen=True)
class Row:
    """What the reduction says about one tensor."""

    is_whole: bool
    is_cut: bool
    is_same_kind: bool
    is_equal: bool | None  # None: no rank has it
    fingerprint: Fingerprint
    num_bytes: int

    def get_fingerprint(self, what: str, name: str) -> Fingerprint:
        """Return the tensor's fingerprint.

        Raises:
            RankMismatchError: what the ranks hold is not one tensor, or not all of it.
        """
        problem = ""
        if not self.is_same_kind:
            problem = "has another dtype or shape on some ranks than on others"
        elif self.is_whole and self.is_cut:
            problem = "is whole on some ranks and cut into shards on others"
        elif self.fingerprint.num_bytes != self.num_bytes:
            problem = f"has {self.num_bytes} bytes, and its shards on all ranks have {self.fingerprint.num_bytes}"
        if problem:
            raise RankMismatchError(
                f"{what}: {name} {problem}. All ranks must prepare the same model in the same way.",
                fqn=name,
                expected=self.num_bytes,
                actual=self.fingerprint.num_bytes,
            )
        return self.fingerprint


_NOTHING = -(1 << 63)  # the smallest of the numbers whose largest is sought
_HELD_WHOLE, _HELD_CUT, _TOTAL, _WEIGHTED, _NUM_BYTES, _KIND = range(6)


def add_up(keys: Sequence[Key], entries: Mapping[Key, Entry], indices: Sequence[Indices]) -> list[Row]:
    """Add up the sums of all ranks, copies once, and compare copies.

    Args:
        keys: the same list on every rank.
        entries: what this rank has of them.
        indices: what `list_indices` returned, of every rank.

    Returns:
        a row per key, the same on every rank. Collective.
    """
    # Per key: total, weighted and number of bytes; both words again, times a factor that makes copies cancel.
    sums = np.zeros((len(keys), 5), np.uint64)
    # The largest of some numbers, and of their complements (so, the smallest); absent numbers never win.
    extremes = np.full((len(keys), 2, 6), _NOTHING, np.int64)
    places = {layout: _find_place(layout, indices) for layout in {entry.layout for entry in entries.values()}}
    for row, key in enumerate(keys):
        entry = entries.get(key)
        if entry is None or entry.layout == OUTSIDE:
            continue
        fingerprint = entry.fingerprint
        words = np.array([fingerprint.total, fingerprint.weighted], np.uint64)
        facts = np.array([entry.num_bytes, _digest(entry.kind)], np.uint64).view(np.int64)
        if entry.layout == WHOLE:
            numbers = np.concatenate(([1], words.view(np.int64), facts))
            columns = [_HELD_WHOLE, _TOTAL, _WEIGHTED, _NUM_BYTES, _KIND]
        else:
            is_first, factor = places[entry.layout]
            if is_first:
                sums[row, :3] = fingerprint.total, fingerprint.weighted, fingerprint.num_bytes
            sums[row, 3:] = words * np.uint64(factor)
            numbers, columns = np.concatenate(([1], facts)), [_HELD_CUT, _NUM_BYTES, _KIND]
        extremes[row, 0, columns], extremes[row, 1, columns] = numbers, ~numbers
    reduce_array(sums.view(np.int64), "SUM")
    reduce_array(extremes, "MAX")
    return [_read_row(added, both[0], ~both[1]) for added, both in zip(sums, extremes, strict=True)]


def add_up_statistics(
    keys: Sequence[Key], entries: Mapping[Key, Entry], indices: Sequence[Indices]
) -> list[TensorStatistics | None]:
    """Add up the statistics of all ranks, copies once. The same on every rank; None for what no rank has any of.

    Copies are taken to be equal, which `add_up` finds out. Arguments are those of `add_up`. Collective.
    """
    sums = np.zeros((len(keys), 6), np.float64)
    # Whether any rank has it whole, and in shards; the numbers of what ranks have whole; the largest number.
    extremes = np.full((len(keys), 9), -np.inf, np.float64)
    places = {layout: _find_place(layout, indices) for layout in {entry.layout for entry in entries.values()}}
    for row, key in enumerate(keys):
        entry = entries.get(key)
        if entry is None or entry.statistics is None or entry.layout == OUTSIDE:
            continue
        *numbers, abs_max = dataclasses.astuple(entry.statistics)
        extremes[row, 8] = abs_max
        if entry.layout == WHOLE:
            extremes[row, 0], extremes[row, 2:8] = 1, numbers
        else:
            extremes[row, 1] = 1
            if places[entry.layout][0]:
                sums[row] = numbers
    reduce_array(sums, "SUM", is_exact=False)
    reduce_array(extremes, "MAX")
    results: list[TensorStatistics | None] = []
    for added, largest in zip(sums, extremes, strict=True):
        if max(largest[:2]) < 1:
            results.append(None)
            continue
        numbers = (largest[2:8] if largest[0] == 1 else added).tolist()
        count, num_nonzero, num_nan, num_inf, total, total_squares = numbers
        results.append(
            TensorStatistics(
                int(count), int(num_nonzero), int(num_nan), int(num_inf), total, total_squares, float(largest[8])
            )
        )
    return results


def _read_row(added: Any, largest: Any, smallest: Any) -> Row:
    is_whole, is_cut = bool(largest[_HELD_WHOLE] == 1), bool(largest[_HELD_CUT] == 1)
    is_same = largest == smallest
    if is_whole:
        words = largest[[_TOTAL, _WEIGHTED, _NUM_BYTES]].view(np.uint64)
        is_equal = bool(is_same[_TOTAL] and is_same[_WEIGHTED])
    else:
        words, is_equal = added[:3], not added[3:].any()
    return Row(
        is_whole=is_whole,
        is_cut=is_cut,
        is_same_kind=bool(is_same[_NUM_BYTES] and is_same[_KIND]),
        is_equal=is_equal if is_whole or is_cut else None,
        fingerprint=Fingerprint(*words.tolist()),
        num_bytes=int(largest[_NUM_BYTES]),
    )


def _find_place(layout: Layout, indices: Sequence[Indices]) -> tuple[bool, int]:
    """Return whether this rank is the first of those with its share, and its factor; the factors add up to zero."""
    if layout in (WHOLE, OUTSIDE):
        return False, 0
    holders = [rank for rank, each in enumerate(indices) if each.get(str(layout.scheme)) == layout.index]
    number = holders.index(get_rank())
    factors = get_multipliers(0, len(holders)).tolist()
    return number == 0, factors[number] if number else -sum(factors[1:]) & MASK


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def reduce_array(array: Any, operation: str, *, is_exact: bool = True) -> None:
    """Reduce an array over all ranks, in place: the same result on every rank. Collective.

    Args:
        operation: "SUM", "MAX" or "MIN".
        is_exact: the order of operations makes no difference.
    """
    if get_world_size() == 1 or not array.size:
        return
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(array)
    with naming_missing("adding up fingerprints"):
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation), group=get_control_group())
        if not is_exact:  # the order of additions is the back end's affair, a verdict must be every rank's
            dist.broadcast(tensor, 0, group=get_control_group())
