"""Reads each file once, and computes in passing all that was asked for: checksum, CRCs, values, fingerprints.

A file is read range by range, so that a tensor's elements begin at the start of the buffer and are aligned there,
wherever they lie in the file. The buffer is re-used: first touch of fresh memory is slow on virtual machines.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

from ..crc import crc32
from ..errors import DamagedCheckpointError
from ..extents import DTYPE_SIZES, Box, Part, Run
from ..fingerprint import Fingerprint, fingerprint_bytes, iterate_blocks
from ..formats.zips import open_window
from ..meter import Meter, Progress
from .plans import FilePlan, Key, Span, Use, list_spans
from .subject import PARSING_ERRORS
from .values import SCANNED_DTYPES, Values

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """What to compute. Checksums are computed wherever there is one to compare with."""

    crcs: bool = True
    values: bool = False
    fingerprints: frozenset[Key] = frozenset()


@dataclass
class FileResult:
    """What one file's bytes told."""

    plan: FilePlan
    num_bytes: int = 0
    checksum: str | None = None
    num_crcs: int = 0
    num_without_crc: int = 0
    bad_entries: list[Span] = field(default_factory=list)
    values: dict[Key, Values] = field(default_factory=dict)
    fingerprints: dict[Key, Fingerprint] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)


def read_files(
    plans: tuple[FilePlan, ...], wanted: Wanted, *, num_threads: int, progress: Progress | None = None
) -> list[FileResult]:
    """Read all files, the largest first, in `num_threads` threads; results are in the order of `plans`.

    Memory: one buffer of 1 MiB per thread, and what numpy needs for one block.
    """
    meter = Meter(sum(plan.file.size_bytes for plan in plans), progress)
    buffers = threading.local()

    def read(plan: FilePlan) -> FileResult:
        if not hasattr(buffers, "own"):
            buffers.own = bytearray(BLOCK_BYTES)
        result = FileResult(plan)
        try:
            _Reader(result, wanted, memoryview(buffers.own), meter).run()
        except PARSING_ERRORS as error:
            result.errors.append(error)
        return result

    order = sorted(range(len(plans)), key=lambda index: -plans[index].file.size_bytes)
    with ThreadPoolExecutor(num_threads) as pool:
        running = {index: pool.submit(read, plans[index]) for index in order}
        return [running[index].result() for index in range(len(plans))]


class _Reader:
    """One file's way through the buffer."""

    def __init__(self, result: FileResult, wanted: Wanted, buffer: memoryview, meter: Meter) -> None:
        self.result = result
        self.plan = result.plan
        self.wanted = wanted
        self.buffer = buffer
        self.meter = meter
        self.digest = xxhash.xxh3_128() if self.plan.checksum is not None else None
        self.descriptor = -1

    def run(self) -> None:
        with open_window(self.plan.file.path) as window:
            self.descriptor = window.descriptor
            spans = list_spans(self.plan, window, self.result.errors)
            position = 0
            for span in spans:
                self._skip(position, span.offset)
                self._read_span(span)
                position = span.end
            self._skip(position, window.length)
            self.result.num_bytes = window.length
        if self.digest is not None:
            self.result.checksum = self.digest.hexdigest()

    def _skip(self, start: int, end: int) -> None:
        """Pass over bytes that mean nothing but to the checksum."""
        if self.digest is None:
            self.meter.add(end - start)
            return
        for block in self._read(start, end):
            self.digest.update(block)

    def _read(self, start: int, end: int) -> Iterator[memoryview]:
        while start < end:
            block = self._fill(start, min(len(self.buffer), end - start))
            yield block
            start += len(block)

    def _fill(self, start: int, length: int) -> memoryview:
        block = self.buffer[:length]
        position = 0
        while position < length:
            count = os.preadv(self.descriptor, [block[position:]], start + position)
            if not count:
                path = str(self.plan.file.path)
                raise DamagedCheckpointError(f"{path} became shorter while it was read.", path=path)
            position += count
        self.meter.add(length)
        return block

    def _read_span(self, span: Span) -> None:
        has_crc = self.wanted.crcs and span.crc32 is not None
        self.result.num_without_crc += span.is_entry and span.crc32 is None
        if self.digest is None and not has_crc and not any(map(self._concerns, span.uses)):
            self.meter.add(span.length)
            return
        found = 0
        for block, see in self._iterate(span):
            if self.digest is not None:
                self.digest.update(block)
            if has_crc:
                found = crc32(block, found)
            if see is not None:
                see(block)
        if has_crc:
            self.result.num_crcs += 1
            if found != span.crc32:
                self.result.bad_entries.append(span)

    def _concerns(self, use: Use) -> bool:
        scans = self.wanted.values and use.dtype in SCANNED_DTYPES
        return scans or not self.wanted.fingerprints.isdisjoint(use.keys)

    def _iterate(self, span: Span) -> Iterator[tuple[memoryview, Callable[[memoryview], None] | None]]:
        """Yield the blocks of a span, each with what looks at its elements, if anything does."""
        position = span.offset
        for use in span.uses:
            if not self._concerns(use):
                continue
            for block in self._read(position, use.offset):
                yield block, None
            yield from self._iterate_use(use)
            position = use.end
        for block in self._read(position, span.end):
            yield block, None

    def _iterate_use(self, use: Use) -> Iterator[tuple[memoryview, Callable[[memoryview], None]]]:
        size = DTYPE_SIZES[use.dtype]
        scans = self.wanted.values and use.dtype in SCANNED_DTYPES
        keys = [key for key in use.keys if key in self.wanted.fingerprints] if use.in_order else []
        values = Values()
        total = Fingerprint()
        parts: list[Part] = []

        def see(block: memoryview) -> None:
            nonlocal total
            if scans:
                values.look(block, use.dtype)
            if keys:
                total += fingerprint_bytes(block, use.dtype, parts[-1], use.shape)

        position = use.offset
        for part in split_part(use.part, use.shape, len(self.buffer) // size):
            parts[:] = [part]
            length = part.numel * size
            yield self._fill(position, length), see
            position += length
        if scans:
            for key in use.keys:
                self.result.values.setdefault(key, Values()).add(values)
        for key in keys:
            self.result.fingerprints[key] = self.result.fingerprints.get(key, Fingerprint()) + total


def split_part(part: Part, shape: tuple[int, ...], limit: int) -> Iterator[Part]:
    """Yield parts of at most `limit` elements that lie one after another as `part` does in row-major order."""
    if isinstance(part, Run):
        for start in range(0, part.length, limit):
            yield Run(part.start + start, min(limit, part.length - start))
        return
    for _, inner in iterate_blocks(part.sizes, limit):
        yield Box(tuple(map(int.__add__, part.offsets, inner.offsets)), inner.sizes)
