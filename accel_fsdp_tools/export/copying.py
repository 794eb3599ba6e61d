"""Tensors of a checkpoint, streamed into safetensors files at the speed of a file copy.

Every byte passes once through one re-used buffer per thread, where it is checked, cast and summed while it is in the
processor's cache. What was read is compared with the fingerprints of the manifest where there are any, which prove
more, else with the CRCs that the checkpoint stores; what was written is remembered as a CRC per tensor, for `proof`,
and can be read again at once. No torch.

A block of zeros is not written: the files are made of zeros. So what is found at its place when it is read again has
got there by its own write, and was not there before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..crc import combine_crc32, crc32
from ..errors import AccelFsdpError, DamagedCheckpointError
from ..extents import DTYPE_SIZES, ByteRange, DiskTensor, Run
from ..fingerprint import Fingerprint, fingerprint_bytes
from ..formats.reading import FileCache, read_into
from ..meter import Meter, Progress
from .computed import Compute
from .outputs import OutputFile
from .planning import (
    BLOCK_BYTES,
    CopyUnit,
    CrcUnit,
    Job,
    Unit,
    chain_spans,
    cut,
    get_gather_bytes,
    list_jobs,
    name_tensor,
    plan_units,
)
from .source_checks import check_recorded, check_stored, describe_damage
from .workers import count_threads, run_units
from .writing import Writer, create_files, remove_files, sync_files

_ZEROS = bytes(8)


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


class ReadsAgain(Protocol):
    """What looks at the output while it is being written."""

    def open_files(self) -> None:
        """The files are there, and their headers; no tensor is."""

    def enter_reader(self) -> AbstractContextManager[Callable[[str, int, int], None]]:
        """Give one thread what it calls with each range that it has written: name, first element, number of them."""


def copy_tensors(
    files: Sequence[OutputFile],
    directory: Path,
    *,
    num_threads: int | None = None,
    check_crcs: bool = True,
    fingerprints: Mapping[str, Fingerprint] | None = None,
    vouched: Collection[str] = (),
    proven: Collection[str] = (),
    again: ReadsAgain | None = None,
    progress: Progress | None = None,
    sync: bool = True,
) -> CopyResult:
    """Write safetensors files with the tensors of a checkpoint, cast where the plan says so.

    All or nothing: after a failure none of the files is left. Not collective.

    Args:
        files: the plan, from `outputs.split_into_files`.
        directory: exists; holds none of the files.
        num_threads: default: one per processor, at most 16.
        check_crcs: compare every item that is read with the CRC-32 that the checkpoint stores for it, those excepted
            that hold only tensors with fingerprints, or vouched for or proven.
        fingerprints: what the sources of these tensors should be, by the tensors' names in the output.
        vouched: names of tensors of which no CRC is computed, since the proof will compare the output with the
            fingerprint of the live tensor or with the CRC of the stored items, from one end to the other.
        proven: names of tensors whose sources have been compared already (`prove_tensors`).
        again: is told of every range as soon as it is written, by the thread that wrote it.
        progress: called with bytes of source tensors.
        sync: make files and directory durable at the end.

    Returns:
        the counts, and what the proof needs. Peak memory: 3 MB per thread (10 MB where float8 is cast), and
        34 MB for all threads where tensors must be gathered from parts that are cut or stored by columns. What
        computed tensors need comes on top, see there.

    Raises:
        DamagedCheckpointError: a hole or overlap, a file cut off, bytes whose CRC or fingerprint is another.
        CheckpointIncompleteError: a file of the checkpoint is missing.
        StorageError: the output cannot be written, or the storage is full.
        UnsupportedError: a file would need too long a header.
    """
    threads = count_threads(num_threads)
    jobs = list_jobs(files)
    create_files(files, directory)
    try:
        findings = _Findings(
            frozenset(fingerprints or ()), frozenset(vouched), frozenset(proven), check_crcs=check_crcs
        )
        num_bytes_read = sum(job.source.size_bytes for job in jobs)
        meter = Meter(num_bytes_read, progress)

        if again is not None:
            again.open_files()

        @contextmanager
        def enter_copier() -> Iterator[_Copier]:
            reader = nullcontext() if again is None else again.enter_reader()
            with FileCache() as sources, Writer(directory) as writer, reader as read_again:
                yield _Copier(sources, writer, findings, meter, read_again)

        units = plan_units(
            jobs,
            check_crcs=check_crcs,
            gather_bytes=get_gather_bytes(threads),
            settled=findings.settled,
        )
        run_units(units, enter_copier, threads)
        num_checked, num_unchecked = findings.check_items() if check_crcs else (0, len(findings.items))
        tensors = {job.tensor.name: findings.sum_up(job) for job in jobs}
        for job in jobs:
            expected = (fingerprints or {}).get(job.tensor.name)
            if expected is not None:
                _check_sums(job, tensors[job.tensor.name].fingerprint, expected)
        if sync:
            sync_files(files, directory)
    except BaseException:
        remove_files(files, directory)
        raise
    num_bytes_written = sum(job.tensor.size_bytes for job in jobs)
    return CopyResult(tensors, num_checked, num_unchecked, num_bytes_read, num_bytes_written)


def _check_sums(job: Job, actual: Fingerprint | None, expected: Fingerprint) -> None:
    if actual != expected:
        check_stored(job.tensor.name, job.source)
        check_recorded(job.tensor.name, actual, expected)


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


class _Findings:
    """What all threads found; filled under a lock, once per unit."""

    def __init__(
        self,
        fingerprinted: Collection[str],
        vouched: Collection[str],
        proven: Collection[str],
        *,
        check_crcs: bool,
    ) -> None:
        self.fingerprinted = frozenset(fingerprinted)
        self.vouched = frozenset(vouched)
        self.settled = self.fingerprinted.union(vouched, proven)
        """Names of tensors that need no CRCs of what they are read from."""
        self._check_crcs = check_crcs
        self.items: dict[ByteRange, _Item] = {}
        self._lock = threading.Lock()
        self._outputs: dict[Job, _Pieces] = {}
        self._num_overflowed: dict[Job, int] = {}
        self._sums: dict[Job, Fingerprint] = {}

    def needs_crc_in(self, job: Job) -> bool:
        """Whether somebody wants the CRC of what is read: for its item, or because it is that of the output."""
        is_kept = job.tensor.dtype == job.source.dtype
        is_needed = self._check_crcs and job.tensor.name not in self.settled
        return is_needed or (is_kept and job.tensor.name not in self.vouched)

    def add_copy(self, unit: CopyUnit, crc_in: int, crc_out: int, num_overflowed: int, sums: Fingerprint) -> None:
        job = unit.job
        size = DTYPE_SIZES[job.tensor.dtype]
        with self._lock:
            self._outputs.setdefault(job, _Pieces()).add(unit.start * size, unit.length * size, crc_out)
            self._num_overflowed[job] = self._num_overflowed.get(job, 0) + num_overflowed
            self._sums[job] = self._sums.get(job, Fingerprint()) + sums
            if unit.item is not None and job.tensor.name not in self.settled:
                start = unit.offset - unit.item.offset
                length = unit.length * DTYPE_SIZES[job.source.dtype]
                self.items.setdefault(unit.item, _Item(job)).in_passing.add(start, length, crc_in)

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
        crc = self._outputs.get(job, _Pieces()).combine(tensor.size_bytes)
        if crc is None:
            raise AssertionError(f"{tensor.name!r}: the units of a tensor do not make it up")
        return CopiedTensor(
            tensor.name,
            job.file,
            None if tensor.name in self.vouched else crc,
            self._num_overflowed.get(job, 0),
            self._sums.get(job, Fingerprint()) if tensor.name in self.fingerprinted else None,
        )


class _Copier:
    """One thread's buffers and open files."""

    def __init__(
        self,
        sources: FileCache,
        writer: Writer,
        findings: _Findings,
        meter: Meter,
        read_again: Callable[[str, int, int], None] | None,
    ) -> None:
        self._sources = sources
        self._writer = writer
        self._findings = findings
        self._meter = meter
        self._read_again = read_again
        self._buffer = memoryview(bytearray(BLOCK_BYTES))
        self._cast = memoryview(b"")
        self._gathered = memoryview(b"")
        self._computed: tuple[Job, Compute] | None = None

    def __call__(self, unit: Unit) -> None:
        if isinstance(unit, CrcUnit):
            self._read_crc(unit)
        else:
            self._copy(unit)

    def _copy(self, unit: CopyUnit) -> None:
        job = unit.job
        tensor, source = job.tensor, job.source
        size, out_size = DTYPE_SIZES[source.dtype], DTYPE_SIZES[tensor.dtype]
        has_sums = tensor.name in self._findings.fingerprinted
        has_crc = self._findings.needs_crc_in(job)
        out_offset = job.offset + unit.start * out_size
        crc_in = crc_out = num_overflowed = 0
        sums = Fingerprint()
        if unit.item is None:
            self._gather(unit)
        for first, count in cut(unit.length, BLOCK_BYTES // size):
            block = self._get_block(unit, first * size, count * size)
            if has_crc:
                crc_in = crc32(block, crc_in)
            if has_sums:
                sums += fingerprint_bytes(block, source.dtype, Run(unit.start + first, count), source.shape)
            if tensor.dtype != source.dtype:
                from .casting import cast_block  # numpy, which a copy needs not

                out = self._get_cast_buffer(count * out_size)
                num_overflowed += cast_block(block, source.dtype, tensor.dtype, out).num_overflowed
                crc_out = crc32(out, crc_out)
                block = out
            if not _is_zero(block):
                self._writer.write(job.file, out_offset + first * out_size, block)
            self._meter.add(count * size)
        if tensor.dtype == source.dtype:
            crc_out = crc_in
        self._findings.add_copy(unit, crc_in, crc_out, num_overflowed, sums)
        if self._read_again is not None:
            self._read_again(tensor.name, unit.start, unit.length)

    def _get_block(self, unit: CopyUnit, start: int, length: int) -> memoryview:
        if unit.item is None:
            return self._gathered[start : start + length]
        block = self._buffer[:length]
        self._read(unit.job, unit.item.path, unit.offset + start, block)
        return block

    def _get_cast_buffer(self, length: int) -> memoryview:
        if len(self._cast) < length:
            self._cast = memoryview(bytearray(length))
        return self._cast[:length]

    def _gather(self, unit: CopyUnit) -> None:
        source = unit.job.source
        length = unit.length * DTYPE_SIZES[source.dtype]
        if len(self._gathered) < length:
            self._gathered = memoryview(bytearray(length))
        target = self._gathered[:length]
        with _naming(unit.job, "its files"):
            if isinstance(source, DiskTensor):
                assert unit.part is not None  # noqa: S101 - for the type checker
                read_into(source, unit.part, target, files=self._sources)
                return
            if self._computed is None or self._computed[0] is not unit.job:
                self._computed = None  # what was kept for the last tensor goes first
                self._computed = unit.job, source.enter(self._sources)
            self._computed[1](unit.start, unit.length, target)

    def _read_crc(self, unit: CrcUnit) -> None:
        crc = 0
        for start, length in cut(unit.length, BLOCK_BYTES):
            block = self._buffer[:length]
            self._read(unit.job, unit.item.path, unit.item.offset + unit.start + start, block)
            crc = crc32(block, crc)
        self._findings.add_crc(unit, crc)

    def _read(self, job: Job, path: str, offset: int, block: memoryview) -> None:
        with _naming(job, path):
            self._sources.read_into(path, offset, block)


def _is_zero(block: memoryview) -> bool:
    return block[:8] == _ZEROS[: len(block)] and block.tobytes() == bytes(len(block))


@contextmanager
def _naming(job: Job, path: str) -> Iterator[None]:
    """Say which tensor it is that cannot be read."""
    try:
        yield
    except AccelFsdpError as error:
        raise name_tensor(error, job.tensor.name) from error
    except OSError as error:
        raise DamagedCheckpointError(
            f"{job.tensor.name!r}: {path} cannot be read: {error.strerror}. Use another checkpoint, or restore the "
            "file from a copy.",
            path=path,
            fqn=job.tensor.name,
        ) from error
