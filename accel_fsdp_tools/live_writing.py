"""This rank's part of a live model, written to its places in safetensors files that all ranks fill together.

Piece by piece through small blocks: what lies in CPU memory row by row is written from where it lies, the rest passes
through a buffer. A converted tensor (an expert that is cut out of a fused parameter) is fed from the pieces that this
rank holds, each pushed through the moves of `architecture`. Nothing here is collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .architecture.moves import Move
from .architecture.outputs import OutputFacts
from .errors import CallOrderError, RankMismatchError
from .export.casting import cast_block
from .export.planning import BLOCK_BYTES, Job, get_gather_bytes
from .export.recipes import push_box
from .export.workers import count_threads, run_units
from .export.writing import Writer
from .extents import DTYPE_SIZES, Box, ByteRange, Part, Run, get_row_major_strides, split_into_boxes, split_into_runs
from .files import fsync_file
from .fingerprint import Fingerprint, fingerprint_bytes, iterate_blocks, view_bytes
from .shards import OUTSIDE, WHOLE, LocalShard

if TYPE_CHECKING:
    import torch

_NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # numpy copies numbers much faster than bytes
_DEVICE_BLOCK_BYTES = 1 << 23  # a copy from an accelerator takes a while to start


@dataclass(frozen=True)
class Holdings:
    """Which copies a rank has: its share of each way of cutting, and the tensors of which it holds nothing.

    Ranks tell each other; small.
    """

    indices: Mapping[str, tuple[int, ...]]
    outside: frozenset[str]


def list_holdings(shards: Sequence[LocalShard]) -> Holdings:
    """Return what this rank tells the others. Not collective."""
    layouts = {shard.layout for shard in shards} - {WHOLE, OUTSIDE}
    return Holdings(
        {str(layout.scheme): layout.index for layout in layouts},
        frozenset(shard.fqn for shard in shards if shard.layout == OUTSIDE),
    )


def choose_mine(shards: Sequence[LocalShard], holdings: Sequence[Holdings], rank: int) -> list[LocalShard]:
    """Return the shards that this rank writes. Of each share one of the ranks that hold it does, in turn by bytes.

    Every holder of a share comes to the same conclusion by itself: it sees the same tensors in the same order.

    Args:
        shards: all of this rank, in the model's order.
        holdings: of all ranks.
        rank: this one.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    mine = []
    for shard in shards:
        layout = shard.layout
        if layout == OUTSIDE or not shard.parts:
            continue
        if layout == WHOLE:
            holders = tuple(number for number, each in enumerate(holdings) if shard.fqn not in each.outside)
        else:
            scheme = str(layout.scheme)
            holders = tuple(number for number, each in enumerate(holdings) if each.indices.get(scheme) == layout.index)
        if rank not in holders:
            raise RankMismatchError(f"{shard.fqn}: rank {rank} holds a share that it did not tell of", fqn=shard.fqn)
        load = loads.setdefault(holders, [0] * len(holders))
        chosen = load.index(min(load))
        load[chosen] += sum(part.numel for part in shard.parts) * DTYPE_SIZES[shard.dtype]
        if holders[chosen] == rank:
            mine.append(shard)
    return mine


class Feed(NamedTuple):
    """One output that a tensor goes into: as it is (`moves` is None), or by moves."""

    job: Job
    moves: tuple[Move, ...] | None


def list_feeds(jobs: Sequence[Job], outputs: Sequence[OutputFacts], owners: Mapping[str, str]) -> dict[str, list[Feed]]:
    """Return the outputs that each live tensor goes into, by its first name; those that are computed are left out.

    Args:
        jobs: of all files.
        outputs: what each tensor in the files is made of.
        owners: from each name of a live tensor to its first.
    """
    places = {job.tensor.name: job for job in jobs}
    feeds: dict[str, list[Feed]] = {}
    for output in outputs:
        job = places[output.name]
        if output.operation is not None:
            continue
        if output.source is not None:
            feeds.setdefault(owners[output.source], []).append(Feed(job, None))
            continue
        for source in output.needed:
            moves = tuple(move for move in output.moves if move.source == source)
            feeds.setdefault(owners[source], []).append(Feed(job, moves))
    return feeds


@dataclass
class Written:
    """What this rank read and wrote.

    Attributes:
        outputs: of the outputs that were to be summed: the fingerprints of what it wrote of them.
        sources: of the live tensors that were to be summed: the fingerprints of what it read of them.
        num_overflowed: finite values that a cast made infinite, by output; none is left out.
        num_bytes: written.
    """

    outputs: dict[str, Fingerprint] = field(default_factory=dict)
    sources: dict[str, Fingerprint] = field(default_factory=dict)
    num_overflowed: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0

    def add_outputs(self, other: Written) -> None:
        """Take over what was written of other outputs."""
        self.outputs |= other.outputs
        self.num_overflowed |= other.num_overflowed
        self.num_bytes += other.num_bytes


def write_shards(
    shards: Sequence[LocalShard],
    feeds: Mapping[str, Sequence[Feed]],
    directory: Path,
    *,
    summed: frozenset[str],
    merges: Mapping[str, Callable[[Part, memoryview], memoryview]] | None = None,
    num_threads: int | None = None,
    sync: bool = True,
) -> Written:
    """Write what this rank has to write of a live model into files that exist at their full size.

    Live memory is read only: no gradients, no random numbers, no change of what FSDP has gathered.

    Args:
        shards: from `choose_mine`.
        feeds: from `list_feeds`.
        directory: where the files are.
        summed: outputs (cast, converted or merged ones) whose bytes are summed on their way, and whose sources are.
        merges: of live tensors that adapters are merged into: from a part's bytes to those that are written.
        num_threads: default: one per processor, at most 16.
        sync: make it durable; without that the caller has to.

    Returns:
        the sums. Not collective. Peak memory: 3 MB per thread; where tensors are converted, 100 MB for all threads;
        from an accelerator 16 MB per thread.

    Raises:
        StorageError: the output cannot be written.
    """
    threads = count_threads(num_threads)
    written, lock = Written(), threading.Lock()
    synchronize(shards)

    @contextmanager
    def enter_worker() -> Iterator[Callable[[_Block], None]]:
        with Writer(directory) as writer:
            yield _Worker(writer, summed, merges or {}, written, lock)

    run_units(_list_blocks(shards, feeds, summed, threads), enter_worker, threads)
    if sync:
        for name in sorted({feed.job.file for shard in shards for feed in feeds.get(shard.fqn, ())}):
            fsync_file(directory / name)
    return written


def synchronize(shards: Sequence[LocalShard]) -> None:
    """Wait for what accelerators are still computing: other threads do not queue up behind it by themselves."""
    import torch

    for device in {shard.tensor.device for shard in shards if shard.tensor is not None}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


def check_unchanged(name: str, found: Fingerprint, expected: Fingerprint) -> None:
    """Compare what all ranks have read of a live tensor for an export with what it was when the export began.

    Raises:
        CallOrderError: it is another.
    """
    if found != expected:
        raise CallOrderError(
            f"{name} changed while it was exported (its fingerprint was {expected} and is {found}). Call export_model "
            "where nothing updates the model: no other thread, no asynchronous update.",
            fqn=name,
            expected=str(expected),
            actual=str(found),
        )


class _Block(NamedTuple):
    """Elements of a live tensor that follow one another in its part, and where they go."""

    shard: LocalShard
    part: Part
    tensor: torch.Tensor
    feeds: Sequence[Feed]
    is_summed: bool


def _list_blocks(
    shards: Sequence[LocalShard], feeds: Mapping[str, Sequence[Feed]], summed: frozenset[str], threads: int
) -> Iterator[_Block]:
    for shard in shards:
        targets = feeds.get(shard.fqn, ())
        if not targets:
            continue
        is_summed = any(feed.job.tensor.name in summed for feed in targets)
        limit_bytes = BLOCK_BYTES
        if any(feed.moves is not None for feed in targets):
            limit_bytes = get_gather_bytes(threads)  # what is turned needs many rows for long writes
        elif shard.tensor is not None and shard.tensor.device.type != "cpu":
            limit_bytes = _DEVICE_BLOCK_BYTES
        for part, tensor in shard.iterate_pieces():
            for here, slices in cut_part(part, limit_bytes // DTYPE_SIZES[shard.dtype]):
                yield _Block(shard, here, tensor[slices], targets, is_summed)


def cut_part(part: Part, limit: int) -> Iterator[tuple[Part, tuple[slice, ...]]]:
    """Cut a part into blocks of at most `limit` elements, which follow one another in it.

    Yields each block as a part of the whole tensor, and where it is in `part`.
    """
    for offset, box in iterate_blocks(part.sizes if isinstance(part, Box) else (part.length,), limit):
        slices = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        if isinstance(part, Box):
            yield Box(tuple(map(int.__add__, part.offsets, box.offsets)), box.sizes), slices
        else:
            yield Run(part.start + offset, box.numel), slices


class _Worker:
    """One thread's buffers and open file."""

    def __init__(
        self,
        writer: Writer,
        summed: frozenset[str],
        merges: Mapping[str, Callable[[Part, memoryview], memoryview]],
        written: Written,
        lock: threading.Lock,
    ) -> None:
        self._writer = writer
        self._summed = summed
        self._merges = merges
        self._written = written
        self._lock = lock
        self._scratch: torch.Tensor | None = None
        self._turned = memoryview(b"")
        self._cast = memoryview(b"")

    def __call__(self, block: _Block) -> None:
        shard = block.shard
        data = self._read(block.tensor)
        if block.is_summed:
            found = fingerprint_bytes(data, shard.dtype, block.part, shard.shape)
            with self._lock:
                sums = self._written.sources
                sums[shard.fqn] = sums.get(shard.fqn, Fingerprint()) + found
        if shard.fqn in self._merges:
            data = self._merges[shard.fqn](block.part, data)
        for feed in block.feeds:
            if feed.moves is None:
                self._write(feed.job, shard.dtype, block.part, data)
                continue
            for part, turned in self._turn(block, feed, data):
                self._write(feed.job, shard.dtype, part, turned)

    def _read(self, tensor: torch.Tensor) -> memoryview:
        """Return the bytes of a block, from where they lie if possible."""
        import torch

        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return view_bytes(tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        if self._scratch is None or self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        copy = self._scratch[:num_bytes].view(tensor.dtype).view(tensor.shape)
        return view_bytes(copy.copy_(tensor))

    def _turn(self, block: _Block, feed: Feed, data: memoryview) -> Iterator[tuple[Part, memoryview]]:
        """Yield the parts of a converted output that a block fills, each with its bytes in its own order."""
        size, shape = DTYPE_SIZES[block.shard.dtype], feed.job.tensor.shape
        whole = ByteRange("memory", 0, len(data))
        position = 0
        for box in split_into_boxes(block.part, block.shard.shape):
            strides = get_row_major_strides(box.sizes)
            for move in feed.moves or ():
                for extent in push_box(move, whole, box, strides, position, shape, size):
                    assert isinstance(extent.part, Box)  # noqa: S101 - a move fills boxes
                    yield extent.part, self._gather(data, extent.part, extent.strides, extent.start, size)
            position += box.numel * size

    def _gather(self, data: memoryview, box: Box, strides: tuple[int, ...] | None, start: int, size: int) -> memoryview:
        num_bytes = box.numel * size
        if strides is None:
            return data[start : start + num_bytes]
        if len(self._turned) < num_bytes:
            self._turned = memoryview(bytearray(num_bytes))
        target = self._turned[:num_bytes]
        values: Any = np.frombuffer(data[start:], _NUMBERS[size])
        view = np.lib.stride_tricks.as_strided(
            values, box.sizes, tuple(stride * size for stride in strides), writeable=False
        )
        np.copyto(np.frombuffer(target, _NUMBERS[size]).reshape(box.sizes), view)
        return target

    def _write(self, job: Job, dtype: str, part: Part, data: memoryview) -> None:
        """Cast, sum and write one part of an output."""
        tensor = job.tensor
        size = DTYPE_SIZES[tensor.dtype]
        num_overflowed = 0
        if tensor.dtype != dtype:
            num_bytes = part.numel * size
            if len(self._cast) < num_bytes:
                self._cast = memoryview(bytearray(num_bytes))
            out = self._cast[:num_bytes]
            num_overflowed = cast_block(data, dtype, tensor.dtype, out).num_overflowed
            data = out
        sums = None
        if tensor.name in self._summed:
            sums = fingerprint_bytes(data, tensor.dtype, part, tensor.shape)
        for start, offset, length in split_into_runs(part, tensor.shape):
            self._writer.write(job.file, job.offset + start * size, data[offset * size : (offset + length) * size])
        with self._lock:
            written = self._written
            written.num_bytes += len(data)
            if sums is not None:
                written.outputs[tensor.name] = written.outputs.get(tensor.name, Fingerprint()) + sums
            if num_overflowed:
                written.num_overflowed[tensor.name] = written.num_overflowed.get(tensor.name, 0) + num_overflowed
