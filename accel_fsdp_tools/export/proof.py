"""Proof that the files of an export hold what was read: they are read again, as any reader would find the tensors.

Headers are parsed anew and tensors are looked up by name, so a value written to a wrong place is found as one that
was changed on the way. What one process copies is read range by range, right after each was written: while one thread
waits for its turn to write, the other one reads. What several processes write is read when all have ended. From the
page cache, mostly: this proves what was written, not that the storage will keep it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from .copied import CopyResult
from .copier import Place
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


def list_expected(
    result: CopyResult,
    fingerprints: Mapping[str, Fingerprint] | None = None,
    stored_crcs: Mapping[str, int] | None = None,
) -> dict[str, Expected]:
    """Return what the proof should find: what was written, or (stronger) what was recorded or stored at the save.

    Args:
        result: of the copy.
        fingerprints: of live tensors, by the tensors' names in the output; only of those whose dtype was kept.
        stored_crcs: of what the checkpoint holds, likewise (`find_stored_crc`).
    """
    known, stored = fingerprints or {}, stored_crcs or {}
    return {name: Expected(stored.get(name, copied.crc32), known.get(name)) for name, copied in result.tensors.items()}


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


class _Range(NamedTuple):
    """A range of a tensor's elements."""

    name: str
    start: int
    length: int


class _Piece(NamedTuple):
    """What one range of a tensor holds in the output: in bytes, where; its CRC or its fingerprint."""

    start: int
    length: int
    crc32: int
    sums: Fingerprint


class OutputProof:
    """Reads ranges of an output, in any order and while it is being written, and judges at the end.

    Implements `copier.ReadsAgain`. Each range is to be read once, by any thread, after its last write.
    """

    def __init__(
        self,
        directory: Path,
        files: Sequence[OutputFile],
        fingerprinted: Collection[str],
        progress: Progress | None = None,
    ) -> None:
        self._directory = directory
        self._files = files
        self._fingerprinted = frozenset(fingerprinted)
        self._meter = Meter(sum(tensor.size_bytes for file in files for tensor in file.tensors), progress)
        self._tensors: dict[str, DiskTensor] = {}
        self._found: dict[str, list[_Piece]] = {}
        self._lock = threading.Lock()

    def open_files(self) -> None:
        """Find all tensors in the files' headers, as any reader would.

        Raises:
            DamagedCheckpointError, CheckpointIncompleteError: they are not those of the plan.
        """
        found = [tensor for file in self._files for tensor in _check_header(self._directory / file.name, file)]
        self._tensors = {tensor.fqn: tensor for tensor in found}
        self._found = {tensor.fqn: [] for tensor in found}

    @contextmanager
    def enter_reader(self) -> Iterator[_Reader]:
        """Give one thread what reads ranges. 1 MB."""
        with FileCache() as cache:
            yield _Reader(self, cache)

    def find(self, name: str) -> DiskTensor:
        """Return a tensor as the header of its file describes it."""
        return self._tensors[name]

    def is_fingerprinted(self, name: str) -> bool:
        return name in self._fingerprinted

    def add(self, name: str, piece: _Piece) -> None:
        with self._lock:
            self._found[name].append(piece)
        self._meter.add(piece.length)

    def read_share(self, index: int = 0, count: int = 1, *, num_threads: int | None = None) -> None:
        """Read share number `index` of `count` of the whole output, in threads; by default all of it."""
        ranges = (
            _Range(name, *each)
            for name, tensor in self._tensors.items()
            for each in cut(tensor.numel, UNIT_BYTES // DTYPE_SIZES[tensor.dtype])
        )

        @contextmanager
        def enter_reader() -> Iterator[Callable[[_Range], None]]:
            with self.enter_reader() as reader:
                yield lambda each: reader.read(*each)

        own = (each for number, each in enumerate(ranges) if number % count == index)
        run_units(own, enter_reader, count_threads(num_threads))

    def sum_up(self) -> dict[str, Fingerprint]:
        """Return the fingerprint of what was read, by tensor."""
        return {name: combine(each.sums for each in pieces) for name, pieces in self._found.items()}

    def conclude(self, expected: Mapping[str, Expected]) -> ProofResult:
        """Compare what was read with what should be there, and the headers and sizes of the files once more.

        Where a tensor is another, the checkpoint is looked at again, to tell whether it is the source that is wrong.

        Args:
            expected: of every tensor, see `list_expected`.

        Raises:
            DamagedCheckpointError: something differs; names the tensor and the file.
            CheckpointIncompleteError: a file is missing.
        """
        sources = {tensor.name: tensor.source for file in self._files for tensor in file.tensors}
        for name, tensor in self._tensors.items():
            _compare(tensor, expected[name], self._found[name], self._directory, sources[name])
        for file in self._files:
            _check_header(self._directory / file.name, file)
        num_fingerprints = sum(expected[name].fingerprint is not None for name in self._tensors)
        num_bytes = sum(tensor.size_bytes for tensor in self._tensors.values())
        return ProofResult(len(self._tensors), num_fingerprints, num_bytes)


class _Reader:
    """Reads ranges in one thread. Implements `copier.RangeReader`."""

    def __init__(self, proof: OutputProof, files: FileCache) -> None:
        self._proof = proof
        self._files = files
        self._buffer = memoryview(b"")

    def read(self, name: str, first: int, length: int) -> None:
        tensor = self._proof.find(name)
        size, extent = DTYPE_SIZES[tensor.dtype], tensor.extents[0]
        has_fingerprint = self._proof.is_fingerprinted(name)
        self._buffer = self._buffer or memoryview(bytearray(BLOCK_BYTES))
        crc, sums = 0, Fingerprint()
        for ahead, count in cut(length, BLOCK_BYTES // size):
            start = first + ahead
            block = self._buffer[: count * size]
            self._files.read_into(extent.bytes.path, extent.offset + start * size, block)
            if has_fingerprint:
                sums += fingerprint_bytes(block, tensor.dtype, Run(start, count), tensor.shape)
            else:
                crc = crc32(block, crc)
        self.note(name, first, length, crc, sums)

    def find(self, name: str) -> Place:
        extent = self._proof.find(name).extents[0]
        return Place(self._files.open(extent.bytes.path), extent.offset, self._proof.is_fingerprinted(name))

    def note(self, name: str, first: int, length: int, crc32: int, sums: Fingerprint) -> None:
        size = DTYPE_SIZES[self._proof.find(name).dtype]
        self._proof.add(name, _Piece(first * size, length * size, crc32, sums))


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
        DamagedCheckpointError: a header or a file's size differs; CheckpointIncompleteError: a file is missing.
    """
    proof = OutputProof(directory, files, {tensor.name for file in files for tensor in file.tensors})
    proof.open_files()
    proof.read_share(index, count, num_threads=num_threads)
    return proof.sum_up()


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


def _compare(
    tensor: DiskTensor,
    expected: Expected,
    found: list[_Piece],
    directory: Path,
    source: Source,
) -> None:
    wanted: object
    actual: object
    if expected.fingerprint is not None:
        wanted, actual = expected.fingerprint, combine(each.sums for each in found)
    else:
        crc = 0
        for each in sorted(found, key=lambda piece: piece.start):
            crc = combine_crc32(crc, each.crc32, each.length)
        if expected.crc32 is None:
            raise ValueError(f"{tensor.fqn!r} is to be compared, and there is nothing to compare it with")
        wanted, actual = f"{expected.crc32:08x}", f"{crc:08x}"
    if wanted != actual:
        if expected.fingerprint is not None and isinstance(source, DiskTensor):
            prove_tensors([replace(source, fqn=tensor.fqn)], {tensor.fqn: expected.fingerprint})
        elif tensor.dtype == source.dtype:  # the CRC may be that of the stored items
            check_stored(tensor.fqn, source)
        path = tensor.extents[0].bytes.path if tensor.extents else str(directory)
        raise DamagedCheckpointError(
            f"{path}: {tensor.fqn!r} is not what was read from the checkpoint (its "
            f"{'CRC-32' if expected.fingerprint is None else 'fingerprint'} is {actual}, expected {wanted}). {_ADVICE}",
            path=path,
            fqn=tensor.fqn,
            expected=str(wanted),
            actual=str(actual),
        )
