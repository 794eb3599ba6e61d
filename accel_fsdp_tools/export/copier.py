"""One thread of a copy: its buffers, its open files, and what it does with each unit of work.

A range that lies in one piece in its file, and needs no cast or one that the compiled kernel knows, is one call of it.
Everything else, and everything where there is no kernel, goes block by block through Python; so does whatever the
kernel could not read or write, which is how the reason is found and told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from ..crc import crc32
from ..errors import AccelFsdpError, DamagedCheckpointError
from ..extents import DTYPE_SIZES, DiskTensor, Run
from ..fingerprint import Fingerprint, fingerprint_bytes
from ..formats.reading import FileCache, read_into
from ..kernel import CASTS, CRC_READ, CRC_WRITTEN, READ_AGAIN, SUM_AGAIN, SUM_READ, Range, find_address, find_kernel
from ..meter import Meter
from .computed import Compute
from .copied import CopiedUnit, Findings
from .planning import BLOCK_BYTES, CopyUnit, CrcUnit, Job, Unit, cut, name_tensor
from .writing import Writer

_ZEROS = bytes(8)
_KERNEL_BLOCK_BYTES = BLOCK_BYTES // 2
"""The kernel's blocks: one and its pages in the page cache are in a core's cache together when it is read again."""


@dataclass(frozen=True)
class Place:
    """Where one who reads the output finds a tensor: an open file and the offset in it, and how it is compared."""

    descriptor: int
    offset: int
    has_fingerprint: bool


class RangeReader(Protocol):
    """What one thread reads ranges of the output with: name, first element, number of elements."""

    def read(self, name: str, first: int, length: int) -> None:
        """Read a range, and remember what it holds."""

    def find(self, name: str) -> Place:
        """Say where to read a tensor, for one who reads and then tells with `note`."""

    def note(self, name: str, first: int, length: int, crc32: int, sums: Fingerprint) -> None:
        """Remember what was read."""


class ReadsAgain(Protocol):
    """What looks at the output while it is being written."""

    def open_files(self) -> None:
        """The files are there, and their headers; no tensor is."""

    def enter_reader(self) -> AbstractContextManager[RangeReader]:
        """Give one thread what it reads each range with that it has written."""


class Copier:
    """One thread's buffers and open files."""

    def __init__(
        self,
        sources: FileCache,
        writer: Writer,
        findings: Findings,
        meter: Meter,
        reader: RangeReader | None,
    ) -> None:
        self._sources = sources
        self._writer = writer
        self._findings = findings
        self._meter = meter
        self._reader = reader
        self._buffer = memoryview(bytearray(BLOCK_BYTES))
        self._cast = memoryview(b"")
        self._gathered = memoryview(b"")
        self._computed: tuple[Job, Compute] | None = None
        self._kernel = find_kernel()

    def __call__(self, unit: Unit) -> None:
        if isinstance(unit, CrcUnit):
            self._read_crc(unit)
        else:
            self._copy(unit)

    def _copy(self, unit: CopyUnit) -> None:
        found = self._copy_with_kernel(unit)
        self._findings.add_copy(unit, self._copy_blocks(unit) if found is None else found)

    def _copy_with_kernel(self, unit: CopyUnit) -> CopiedUnit | None:
        """Copy a unit and read it again in one go; None where that's not for the kernel to do, or has failed."""
        tensor, source = unit.job.tensor, unit.job.source
        is_cast = tensor.dtype != source.dtype
        cast = CASTS.get((source.dtype, tensor.dtype), 0)
        if self._kernel is None or unit.item is None or (is_cast and not cast):
            return None
        summed, sum_start = self._findings.find_sums(unit)
        what = 0
        what |= CRC_READ if self._findings.needs_crc(unit.job) else 0
        what |= SUM_READ if summed is not None else 0
        what |= CRC_WRITTEN if is_cast else 0
        out_size = DTYPE_SIZES[tensor.dtype]
        order = Range(
            cast=cast,
            target=self._writer.open(unit.job.file),
            target_offset=unit.job.offset + unit.start * out_size,
            source_offset=unit.offset,
            start=unit.start,
            sum_start=sum_start,
            count=unit.length,
            source_size=DTYPE_SIZES[source.dtype],
            target_size=out_size,
            buffer=find_address(self._buffer),
            cast_buffer=find_address(self._get_cast_buffer(_KERNEL_BLOCK_BYTES)) if is_cast else None,
            buffer_size=len(self._buffer),
            block=_KERNEL_BLOCK_BYTES,
        )
        with _naming(unit.job, unit.item.path):
            order.source = self._sources.open(unit.item.path)
        if self._reader is not None:
            place = self._reader.find(tensor.name)
            what |= READ_AGAIN | (SUM_AGAIN if place.has_fingerprint else 0)
            order.again, order.again_offset = place.descriptor, place.offset + unit.start * out_size
        order.what = what
        if not self._kernel.copy(order):
            return None
        if self._reader is not None:
            again = Fingerprint()
            if what & SUM_AGAIN:
                again = Fingerprint(order.sums_again.total, order.sums_again.weighted, unit.length * out_size)
            self._reader.note(tensor.name, unit.start, unit.length, order.crc_again, again)
        num_bytes = unit.length * DTYPE_SIZES[source.dtype]
        self._meter.add(num_bytes)
        sums = Fingerprint()
        if summed is not None:
            sums = Fingerprint(order.sums_read.total, order.sums_read.weighted, num_bytes)
        crc_written = order.crc_written if is_cast else order.crc_read
        return CopiedUnit(order.crc_read, crc_written, order.num_overflowed, summed, sums)

    def _copy_blocks(self, unit: CopyUnit) -> CopiedUnit:
        """Copy a unit block by block, then read all of it again."""
        job = unit.job
        tensor, source = job.tensor, job.source
        size, out_size = DTYPE_SIZES[source.dtype], DTYPE_SIZES[tensor.dtype]
        summed, sum_start = self._findings.find_sums(unit)
        has_crc = self._findings.needs_crc(job)
        out_offset = job.offset + unit.start * out_size
        crc_read = crc_written = num_overflowed = 0
        sums = Fingerprint()
        if unit.item is None:
            self._gather(unit)
        for first, count in cut(unit.length, BLOCK_BYTES // size):
            block = self._get_block(unit, first * size, count * size)
            if has_crc:
                crc_read = crc32(block, crc_read)
            if summed is not None:
                sums += fingerprint_bytes(block, source.dtype, Run(sum_start + first, count), source.shape)
            if tensor.dtype != source.dtype:
                from .casting import cast_block  # numpy, which a copy needs not

                out = self._get_cast_buffer(count * out_size)
                num_overflowed += cast_block(block, source.dtype, tensor.dtype, out).num_overflowed
                crc_written = crc32(out, crc_written)
                block = out
            if not _is_zero(block):
                self._writer.write(job.file, out_offset + first * out_size, block)
            self._meter.add(count * size)
        if self._reader is not None:
            self._reader.read(tensor.name, unit.start, unit.length)
        if tensor.dtype == source.dtype:
            crc_written = crc_read
        return CopiedUnit(crc_read, crc_written, num_overflowed, summed, sums)

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
