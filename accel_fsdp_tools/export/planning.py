"""What has to be copied, cut into units of work of a bounded size.

A unit fills a consecutive range of one output tensor, so that its bytes are written in one place and checksums of
neighbours can be joined. Where a range lies in one stretch of a file too (chunks of whole rows, in row-major order:
nearly everything that FSDP saves) it is read as it lies, and its CRC is part of the stored item's. What is cut or
stored otherwise is gathered, and its items are read once more for their CRCs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import AccelFsdpError, DamagedCheckpointError
from ..extents import DTYPE_SIZES, ByteRange, DiskTensor, Extent, Part, Run, check_coverage, get_whole, is_row_major
from ..formats.gathering import split_part
from ..parts import get_span
from .computed import ComputedTensor, Source, list_inputs
from .outputs import OutputFile, OutputTensor

BLOCK_BYTES = 1 << 20
"""Read, looked at and written at a time, in a buffer that is used again and stays in a core's cache."""

UNIT_BYTES = 1 << 22  # of what is copied as it lies: still in the processor's cache when it is read again
_GATHER_BYTES = 1 << 25  # of all threads together


def get_gather_bytes(num_threads: int) -> int:
    """Return the bytes that each thread may gather at a time: of what is cut by columns, many rows for long reads."""
    return max(BLOCK_BYTES, min(_GATHER_BYTES // num_threads, _GATHER_BYTES // 2))


@dataclass(frozen=True, eq=False)
class Job:
    """One tensor and its place: the name of the file and the offset there."""

    tensor: OutputTensor
    file: str
    offset: int

    @property
    def source(self) -> Source:
        return self.tensor.source


class CopyUnit(NamedTuple):
    """A consecutive range of a tensor's elements: `item` and `offset` say where they lie, `part` what to gather.

    With neither, the elements are computed.
    """

    job: Job
    start: int
    length: int
    item: ByteRange | None = None
    offset: int = 0
    part: Part | None = None


class CrcUnit(NamedTuple):
    """A range of a stored item that is read for nothing but the item's CRC."""

    job: Job
    item: ByteRange
    start: int
    length: int


Unit = CopyUnit | CrcUnit


@dataclass
class _Ledger:
    """Which ranges (start, length) of the stored items are copied as they lie, and for which tensor first."""

    covered: dict[ByteRange, list[tuple[int, int]]] = field(default_factory=dict)
    jobs: dict[ByteRange, Job] = field(default_factory=dict)

    def note(self, job: Job, item: ByteRange) -> list[tuple[int, int]]:
        self.jobs.setdefault(item, job)
        return self.covered.setdefault(item, [])


def list_jobs(files: Sequence[OutputFile]) -> list[Job]:
    """Return all tensors, in the order of their bytes, having checked that the checkpoint holds each element once.

    Raises:
        DamagedCheckpointError: the chunks of a tensor leave a hole, overlap or reach beyond it.
    """
    jobs = []
    for file in files:
        for tensor, offset in zip(file.tensors, file.offsets[:-1], strict=True):
            _check_coverage(tensor)
            jobs.append(Job(tensor, file.name, offset))
    return jobs


def name_tensor(error: AccelFsdpError, name: str) -> AccelFsdpError:
    """Return the error with the tensor's name in front and among the facts."""
    return type(error)(f"{name!r}: {error.message}", **{**error.facts, "fqn": name})


def _check_coverage(tensor: OutputTensor) -> None:
    for source in list_inputs([tensor.source]):
        _check_source(tensor, source)


def _check_source(tensor: OutputTensor, source: DiskTensor) -> None:
    coverage = check_coverage(source.shape, source.parts)
    if not coverage.ok:
        what = [
            f"lack {coverage.num_missing} elements" if coverage.num_missing else "",
            f"hold {coverage.num_repeated} elements twice" if coverage.num_repeated else "",
            f"reach beyond its shape {list(source.shape)}" if coverage.outside else "",
        ]
        raise DamagedCheckpointError(
            f"{tensor.name!r} is not whole: the chunks in the checkpoint {', '.join(filter(None, what))}. A rank's "
            "file may be missing or of another save; use another checkpoint.",
            fqn=tensor.name,
            expected=source.numel,
            actual=source.numel - coverage.num_missing + coverage.num_repeated,
        )


def plan_units(
    jobs: Sequence[Job], *, check_crcs: bool, gather_bytes: int, settled: Container[str] = ()
) -> Iterator[Unit]:
    """Yield the units of all tensors, then those that only complete the CRCs (but for tensors in `settled`).

    In the order of the output, so that what is written next lies beside what was written last. Units are small
    enough for the threads to end together whatever the tensors' sizes. An iterator: the bytes of chunks are
    looked up while others are copied.
    """
    ledger = _Ledger()
    unchecked = _Ledger()
    for job in jobs:
        try:
            yield from _plan_tensor(job, unchecked if job.tensor.name in settled else ledger, gather_bytes)
        except AccelFsdpError as error:  # of looking an item up
            raise name_tensor(error, job.tensor.name) from error
    if check_crcs:
        for item, spans in ledger.covered.items():
            if item.crc32 is not None and chain_spans(spans, item.length) is None:
                for start, length in cut(item.length, UNIT_BYTES):
                    yield CrcUnit(ledger.jobs[item], item, start, length)


def _plan_tensor(job: Job, ledger: _Ledger, gather_bytes: int) -> Iterator[Unit]:
    source = job.source
    if not source.numel:
        return
    if not isinstance(source, DiskTensor):
        yield from _plan_computed(job, source, ledger)
        return
    extents = [extent for extent in source.extents if extent.part.numel]
    starts = [find_start(extent, source) for extent in extents]
    size = DTYPE_SIZES[source.dtype]
    if all(start is not None for start in starts):
        for start, extent in sorted(zip(starts, extents, strict=True), key=lambda pair: pair[0] or 0):
            spans = ledger.note(job, extent.bytes)
            for first, length in _cut_at_blocks(job, start or 0, extent.part.numel):
                spans.append((extent.start + first * size, length * size))
                offset = extent.offset + first * size
                yield CopyUnit(job, (start or 0) + first, length, extent.bytes, offset)
        return
    for extent in extents:
        ledger.note(job, extent.bytes)
    position = 0
    for part in split_part(get_whole(source.shape), max(1, gather_bytes // size)):
        yield CopyUnit(job, position, part.numel, part=part)
        position += part.numel


def _cut_at_blocks(job: Job, start: int, numel: int) -> Iterator[tuple[int, int]]:
    """Cut elements from `start` on into units that end where blocks of the output do.

    The page cache takes a block that it has to itself in one piece, others in ten.
    """
    size = DTYPE_SIZES[job.tensor.dtype]
    limit = UNIT_BYTES // max(size, DTYPE_SIZES[job.source.dtype])
    head = min(numel, -(job.offset + start * size) % BLOCK_BYTES // size)
    if head:
        yield 0, head
    for first, length in cut(numel - head, limit):
        yield head + first, length


def _plan_computed(job: Job, source: ComputedTensor, ledger: _Ledger) -> Iterator[Unit]:
    for tensor in source.inputs:
        for extent in tensor.extents:
            if extent.part.numel:
                ledger.note(job, extent.bytes)
    for start, length in cut(source.numel, source.block_numel):
        yield CopyUnit(job, start, length)


def find_start(extent: Extent, tensor: DiskTensor) -> int | None:
    """Return where in the tensor an extent begins whose elements lie one after another in both; None otherwise."""
    part = extent.part
    if isinstance(part, Run):
        return part.start
    first, last = get_span(part, tensor.shape)
    if last - first != part.numel or not (extent.strides is None or is_row_major(part.sizes, extent.strides)):
        return None
    return first


def cut(count: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of consecutive ranges of at most `limit`."""
    for start in range(0, count, limit):
        yield start, min(limit, count - start)


def chain_spans(spans: Sequence[tuple[int, int]], length: int) -> list[int] | None:
    """Return the indices of spans (start, length) that lie end to end and make up `length` bytes; None if none do."""
    by_start = {start: index for index, (start, _) in enumerate(spans)}
    chain, position = [], 0
    while position < length:
        index = by_start.get(position)
        if index is None:
            return None
        chain.append(index)
        position += spans[index][1]
    return chain if position == length else None
