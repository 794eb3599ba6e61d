"""What all threads of a copy find out, put together: which items are as they were stored, and what was written."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..crc import combine_crc32
from ..extents import DTYPE_SIZES, ByteRange
from ..fingerprint import Fingerprint
from .passing import PassingSources
from .planning import CopyUnit, CrcUnit, Job, chain_spans
from .source_checks import describe_damage


@dataclass(frozen=True)
class CopiedTensor:
    """What was written of one tensor.

    Attributes:
        crc32: of all its bytes in the output, as they left this process; None where something else vouches for it.
        num_overflowed: finite values that the cast made infinite.
        fingerprint: of its source, summed from the bytes read; None where none was wanted.
    """

    name: str
    file: str
    crc32: int | None
    num_overflowed: int = 0
    fingerprint: Fingerprint | None = None


@dataclass(frozen=True)
class CopyResult:
    """What `copy_tensors` did.

    Attributes:
        tensors: by name, in the order in which they were written.
        num_items_checked: stored items that were compared with their CRC.
        num_items_without_crc: items whose writer computed none (or that were not to be checked).
        num_bytes_read, num_bytes_written: of tensors; headers and bytes read for a CRC alone not counted.
    """

    tensors: Mapping[str, CopiedTensor]
    num_items_checked: int
    num_items_without_crc: int
    num_bytes_read: int
    num_bytes_written: int

    @property
    def num_overflowed(self) -> int:
        return sum(tensor.num_overflowed for tensor in self.tensors.values())


@dataclass(frozen=True)
class CopiedUnit:
    """What one thread found while it copied one unit.

    Attributes:
        crc_read, crc_written: of the elements before and after a cast; 0 where nobody wants them.
        num_overflowed: finite values that the cast made infinite.
        summed: what the sums belong to, see `Findings.find_sums`; None where none are wanted.
        sums: of what was read.
    """

    crc_read: int
    crc_written: int
    num_overflowed: int
    summed: Job | str | None
    sums: Fingerprint


class _Pieces:
    """CRCs of ranges that together make up something; found in any order."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.crcs: list[int] = []

    def add(self, start: int, length: int, crc: int) -> None:
        self.spans.append((start, length))
        self.crcs.append(crc)

    def combine(self, length: int) -> int | None:
        """Return the CRC of all `length` bytes; None where the pieces don't make them up."""
        chain = chain_spans(self.spans, length)
        if chain is None:
            return None
        whole = 0
        for index in chain:
            whole = combine_crc32(whole, self.crcs[index], self.spans[index][1])
        return whole


class _Item:
    """What is known about a stored item: in passing, and from reading it for its CRC alone."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.in_passing = _Pieces()
        self.on_purpose = _Pieces()


class Findings:
    """What all threads found; filled under a lock, once per unit."""

    def __init__(
        self,
        fingerprinted: Collection[str],
        vouched: Collection[str],
        proven: Collection[str],
        passing: PassingSources | None = None,
        *,
        check_crcs: bool,
    ) -> None:
        self.fingerprinted = frozenset(fingerprinted)
        self.vouched = frozenset(vouched)
        self.settled = self.fingerprinted.union(vouched, proven)
        """Names of tensors that need no CRCs of what they are read from."""
        self._passing = passing
        self._check_crcs = check_crcs
        self.items: dict[ByteRange, _Item] = {}
        self._lock = threading.Lock()
        self._outputs: dict[Job, _Pieces] = {}
        self._num_overflowed: dict[Job, int] = {}
        self._sums: dict[Job | str, Fingerprint] = {}

    def needs_crc(self, job: Job) -> bool:
        """Whether somebody wants the CRC of what is read: for its item, or because it is that of the output."""
        is_kept = job.tensor.dtype == job.source.dtype
        is_needed = self._check_crcs and job.tensor.name not in self.settled
        return is_needed or (is_kept and job.tensor.name not in self.vouched)

    def find_sums(self, unit: CopyUnit) -> tuple[Job | str | None, int]:
        """Return what the sums of a unit's elements belong to (its own tensor, or a source that it is cut out of), None
        where nobody wants them; and which element of that is the unit's first."""
        if unit.job.tensor.name in self.fingerprinted:
            return unit.job, unit.start
        return (None, 0) if self._passing is None else self._passing.find(unit)

    def get_sums(self, key: Job | str) -> Fingerprint:
        """Return what was summed up of a tensor, or of a source by its name."""
        return self._sums.get(key, Fingerprint())

    def add_copy(self, unit: CopyUnit, found: CopiedUnit) -> None:
        job = unit.job
        size = DTYPE_SIZES[job.tensor.dtype]
        with self._lock:
            self._outputs.setdefault(job, _Pieces()).add(unit.start * size, unit.length * size, found.crc_written)
            self._num_overflowed[job] = self._num_overflowed.get(job, 0) + found.num_overflowed
            if found.summed is not None:
                self._sums[found.summed] = self.get_sums(found.summed) + found.sums
            if unit.item is not None and job.tensor.name not in self.settled:
                start = unit.offset - unit.item.offset
                length = unit.length * DTYPE_SIZES[job.source.dtype]
                self.items.setdefault(unit.item, _Item(job)).in_passing.add(start, length, found.crc_read)

    def add_crc(self, unit: CrcUnit, crc: int) -> None:
        with self._lock:
            self.items.setdefault(unit.item, _Item(unit.job)).on_purpose.add(unit.start, unit.length, crc)

    def check_items(self) -> tuple[int, int]:
        """Compare all items with their CRCs; return how many were, and how many have none."""
        num_checked = 0
        for item, found in self.items.items():
            if item.crc32 is None:
                continue
            actual = found.in_passing.combine(item.length)
            actual = found.on_purpose.combine(item.length) if actual is None else actual
            name = found.job.tensor.name
            if actual is None:
                raise AssertionError(f"{name!r}: the units of an item do not make it up")
            if actual != item.crc32:
                raise describe_damage(name, item, actual)
            num_checked += 1
        return num_checked, len(self.items) - num_checked

    def sum_up(self, job: Job) -> CopiedTensor:
        tensor = job.tensor
        is_vouched = tensor.name in self.vouched
        crc = 0 if is_vouched else self._outputs.get(job, _Pieces()).combine(tensor.size_bytes)
        if crc is None:
            raise AssertionError(f"{tensor.name!r}: the units of a tensor do not make it up")
        return CopiedTensor(
            tensor.name,
            job.file,
            None if is_vouched else crc,
            self._num_overflowed.get(job, 0),
            self.get_sums(job) if tensor.name in self.fingerprinted else None,
        )
