"""Proof that the files of an export hold what was read: they are read again, as any reader would find the tensors.

Headers are parsed anew and tensors are looked up by name, so a value written to a wrong place is found as one that
was changed on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..crc import combine_crc32, crc32
from ..errors import AccelFsdpError, DamagedCheckpointError
from ..extents import DTYPE_SIZES, DiskTensor, Part, Run, get_whole
from ..fingerprint import Fingerprint, combine, fingerprint_bytes
from ..formats.checkpoint import OTHER
from ..formats.gathering import split_part
from ..formats.reading import FileCache, read_blocks
from ..formats.safetensors_reader import read_safetensors
from ..meter import Meter, Progress
from .computed import Source
from .copying import CopyResult
from .outputs import OutputFile
from .planning import BLOCK_BYTES, UNIT_BYTES, cut, find_start, get_gather_bytes
from .source_checks import check_recorded, check_stored
from .workers import count_threads, run_units

_ADVICE = "The storage does not keep what is written, or something else writes there. Export again, to another place."


@dataclass(frozen=True)
class Expected:
    """What a tensor's bytes in the output should be: a fingerprint where there is one, else a CRC-32."""

    crc32: int | None
    fingerprint: Fingerprint | None = None


@dataclass(frozen=True)
class ProofResult:
    """What was read again and found right: tensors, those of them compared by fingerprint, and bytes."""

    num_tensors: int
    num_fingerprints: int
    num_bytes: int


def list_expected(result: CopyResult, fingerprints: Mapping[str, Fingerprint] | None = None) -> dict[str, Expected]:
    """Return what `prove_output` should find: what was written, or (stronger) what the manifest recorded.

    Args:
        result: of the copy.
        fingerprints: of live tensors, by the tensors' names in the output; only of those whose dtype was kept.
    """
    known = fingerprints or {}
    return {name: Expected(copied.crc32, known.get(name)) for name, copied in result.tensors.items()}


def prove_tensors(
    tensors: Sequence[DiskTensor],
    fingerprints: Mapping[str, Fingerprint],
    *,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Read tensors of a checkpoint and compare them with the fingerprints of the live ones. Nothing is written.

    For those whose values go into the output in another arrangement, so that neither their own fingerprints nor the
    output's can be summed while copying. However a tensor is cut or stored, it is read in its row-major order.

    Args:
        tensors: those of them are read whose `fqn` has a fingerprint.
        fingerprints: by `fqn`.
        num_threads: default: one per processor, at most 16.
        progress: called with bytes of tensors.

    Returns:
        how many tensors were compared. Not collective. Peak memory: 2 MB per thread, and 32 MB for all threads where
        tensors must be gathered.

    Raises:
        DamagedCheckpointError: one differs, has a hole or is cut off; `CheckpointIncompleteError`: a file is missing.
    """
    known = [tensor for tensor in tensors if tensor.fqn in fingerprints]
    meter = Meter(sum(tensor.size_bytes for tensor in known), progress)
    threads = count_threads(num_threads)
    sums: dict[str, Fingerprint] = {tensor.fqn: Fingerprint() for tensor in known}
    lock = threading.Lock()

    @contextmanager
    def enter_reader() -> Iterator[Callable[[tuple[DiskTensor, Part]], None]]:
        buffers: dict[int, bytearray] = {}

        def read(unit: tuple[DiskTensor, Part]) -> None:
            tensor, part = unit
            size = _find_block_bytes(tensor, threads)
            buffer = buffers.get(size) or buffers.setdefault(size, bytearray(size))
            for piece, block in read_blocks(tensor, part, files=cache, buffer=buffer):
                found = fingerprint_bytes(block, tensor.dtype, piece, tensor.shape)
                meter.add(len(block))
                with lock:
                    sums[tensor.fqn] += found

        with FileCache() as cache:
            yield read

    units = (
        (tensor, part)
        for tensor in known
        for part in split_part(get_whole(tensor.shape), UNIT_BYTES // DTYPE_SIZES[tensor.dtype])
    )
    run_units(units, enter_reader, threads)
    for tensor in known:
        if sums[tensor.fqn] != fingerprints[tensor.fqn]:
            check_stored(tensor.fqn, tensor)
        check_recorded(tensor.fqn, sums[tensor.fqn], fingerprints[tensor.fqn])
    return len(known)


def _find_block_bytes(tensor: DiskTensor, threads: int) -> int:
    is_plain = all(find_start(extent, tensor) is not None for extent in tensor.extents if extent.part.numel)
    return BLOCK_BYTES if is_plain else get_gather_bytes(threads)


class _Unit(NamedTuple):
    """A range of a tensor's elements."""

    tensor: DiskTensor
    start: int
    length: int


def prove_output(
    directory: Path,
    files: Sequence[OutputFile],
    expected: Mapping[str, Expected],
    *,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> ProofResult:
    """Read all files again and compare names, dtypes, shapes and values with what they should be.

    From the page cache, mostly: it proves what was written, not that the storage will keep it. Where a fingerprint is
    another, the checkpoint is looked at again, to tell whether it is the source that is wrong. Not collective.

    Args:
        directory: where they are.
        files: the plan.
        expected: of every tensor, see `list_expected`.
        num_threads: default: one per processor, at most 16.
        progress: called with bytes of the output.

    Returns:
        the counts. Peak memory: 2 MB per thread.

    Raises:
        DamagedCheckpointError: something differs; names the tensor and the file.
        CheckpointIncompleteError: a file is missing.
    """
    tensors = [tensor for file in files for tensor in _check_header(directory / file.name, file)]
    meter = Meter(sum(tensor.size_bytes for tensor in tensors), progress)
    found: dict[str, list[tuple[int, int, int, Fingerprint]]] = {tensor.fqn: [] for tensor in tensors}
    lock = threading.Lock()

    @contextmanager
    def enter_reader() -> Iterator[_Reader]:
        with FileCache() as cache:
            yield _Reader(cache, expected, meter, found, lock)

    run_units(_plan(tensors), enter_reader, count_threads(num_threads))
    sources = {tensor.name: tensor.source for file in files for tensor in file.tensors}
    for tensor in tensors:
        _compare(tensor, expected[tensor.fqn], found[tensor.fqn], directory, sources[tensor.fqn])
    num_fingerprints = sum(expected[tensor.fqn].fingerprint is not None for tensor in tensors)
    return ProofResult(len(tensors), num_fingerprints, sum(tensor.size_bytes for tensor in tensors))


def sum_output(
    directory: Path, files: Sequence[OutputFile], *, index: int = 0, count: int = 1, num_threads: int | None = None
) -> dict[str, Fingerprint]:
    """Read a share of all files again, and return the fingerprint of what it holds of each tensor.

    For several processes that prove one output together: their shares add up. Names, dtypes and shapes are compared
    with the plan by each of them. Not collective.

    Args:
        directory: where they are.
        files: the plan.
        index, count: this is the share number `index` of `count`.
        num_threads: default: one per processor, at most 16.

    Returns:
        a summand for every tensor, by name. Peak memory: 2 MB per thread.

    Raises:
        DamagedCheckpointError, CheckpointIncompleteError: as `prove_output`.
    """
    tensors = [tensor for file in files for tensor in _check_header(directory / file.name, file)]
    wanted = {tensor.fqn: Expected(0, Fingerprint()) for tensor in tensors}
    found: dict[str, list[tuple[int, int, int, Fingerprint]]] = {tensor.fqn: [] for tensor in tensors}
    lock = threading.Lock()

    @contextmanager
    def enter_reader() -> Iterator[_Reader]:
        with FileCache() as cache:
            yield _Reader(cache, wanted, Meter(0, None), found, lock)

    units = (unit for number, unit in enumerate(_plan(tensors)) if number % count == index)
    run_units(units, enter_reader, count_threads(num_threads))
    return {name: combine(sums for *_, sums in each) for name, each in found.items()}


def _check_header(path: Path, file: OutputFile) -> list[DiskTensor]:
    """Parse a file's header, compare it with the plan, and return its tensors."""

    def fail(what: str, name: str | None = None) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{path} is not what was written: {what}. {_ADVICE}", path=str(path), fqn=name)

    try:
        found = read_safetensors(path, kind=OTHER).tensors
        with path.open("rb") as stream:
            header = stream.read(len(file.header))
    except OSError as error:
        if isinstance(error, AccelFsdpError):
            raise
        raise fail(f"it cannot be read ({error.strerror})") from error
    if path.stat().st_size != file.size_bytes:
        raise fail(f"it has {path.stat().st_size} bytes instead of {file.size_bytes}")
    for tensor in file.tensors:
        other = found.get(tensor.name)
        if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            raise fail(f"its header does not describe {tensor.name!r} as {tensor.dtype} {tensor.shape}", tensor.name)
    if len(found) != len(file.tensors) or header != file.header:
        raise fail("its header is another")
    return [found[tensor.name] for tensor in file.tensors]


def _plan(tensors: Sequence[DiskTensor]) -> Iterator[_Unit]:
    for tensor in tensors:
        for start, length in cut(tensor.numel, UNIT_BYTES // DTYPE_SIZES[tensor.dtype]):
            yield _Unit(tensor, start, length)


class _Reader:
    """One thread's buffer and open files."""

    def __init__(
        self,
        cache: FileCache,
        expected: Mapping[str, Expected],
        meter: Meter,
        found: dict[str, list[tuple[int, int, int, Fingerprint]]],
        lock: threading.Lock,
    ) -> None:
        self._cache = cache
        self._expected = expected
        self._meter = meter
        self._found = found
        self._lock = lock
        self._buffer = memoryview(bytearray(BLOCK_BYTES))

    def __call__(self, unit: _Unit) -> None:
        tensor = unit.tensor
        size = DTYPE_SIZES[tensor.dtype]
        extent = tensor.extents[0]
        has_fingerprint = self._expected[tensor.fqn].fingerprint is not None
        crc, sums = 0, Fingerprint()
        for first, count in cut(unit.length, len(self._buffer) // size):
            start = unit.start + first
            block = self._buffer[: count * size]
            self._cache.read_into(extent.bytes.path, extent.offset + start * size, block)
            if has_fingerprint:
                sums += fingerprint_bytes(block, tensor.dtype, Run(start, count), tensor.shape)
            else:
                crc = crc32(block, crc)
            self._meter.add(len(block))
        with self._lock:
            self._found[tensor.fqn].append((unit.start, unit.length * size, crc, sums))


def _compare(
    tensor: DiskTensor,
    expected: Expected,
    found: list[tuple[int, int, int, Fingerprint]],
    directory: Path,
    source: Source,
) -> None:
    wanted: object
    actual: object
    if expected.fingerprint is not None:
        wanted, actual = expected.fingerprint, combine(sums for *_, sums in found)
    else:
        crc = 0
        for _, length, each, _ in sorted(found, key=lambda one: one[0]):
            crc = combine_crc32(crc, each, length)
        if expected.crc32 is None:
            raise ValueError(f"{tensor.fqn!r} is to be compared, and there is nothing to compare it with")
        wanted, actual = f"{expected.crc32:08x}", f"{crc:08x}"
    if wanted != actual:
        if expected.fingerprint is not None and isinstance(source, DiskTensor):
            prove_tensors([replace(source, fqn=tensor.fqn)], {tensor.fqn: expected.fingerprint})
        path = tensor.extents[0].bytes.path if tensor.extents else str(directory)
        raise DamagedCheckpointError(
            f"{path}: {tensor.fqn!r} is not what was read from the checkpoint (its "
            f"{'CRC-32' if expected.fingerprint is None else 'fingerprint'} is {actual}, expected {wanted}). {_ADVICE}",
            path=path,
            fqn=tensor.fqn,
            expected=str(wanted),
            actual=str(actual),
        )
