"""Bytes of any part of a tensor, read through its extents in bounded memory.

Everything is read by position into one re-used buffer, so the memory needed does not grow with the tensor. Bytes in
checkpoints are not aligned (items of a `.distcp` start anywhere), which reading into a buffer of our own makes
irrelevant.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import DamagedCheckpointError
from ..extents import DTYPE_SIZES, Box, ByteRange, DiskTensor, Part, check_coverage, get_whole
from .file_cache import FileCache
from .gathering import find_straight, gather, split_part

__all__ = [
    "BLOCK_BYTES",
    "FileCache",
    "Stretch",
    "check_item",
    "compute_crc32",
    "find_stretches",
    "read_array",
    "read_blocks",
    "read_into",
    "read_part",
]

BLOCK_BYTES = 1 << 20
STRIDED_BLOCK_BYTES = 1 << 24  # of what is stored column by column, few rows would be many short stretches


def read_part(tensor: DiskTensor, part: Part | None = None, *, files: FileCache | None = None) -> bytearray:
    """Return the row-major bytes of `part` (default: all) of a tensor. Memory: the part itself and 1 MiB.

    Raises:
        DamagedCheckpointError: the extents leave part of it out, hold part of it twice, or a file is cut off.
        CheckpointIncompleteError: a file is missing.
    """
    part = get_whole(tensor.shape) if part is None else part
    found = _find_tiles(tensor, part)  # first: damaged metadata may claim any size
    result = bytearray(part.numel * DTYPE_SIZES[tensor.dtype])
    with FileCache() as own:
        _fill(tensor, part, found, memoryview(result), own if files is None else files)
    return result


def read_into(tensor: DiskTensor, part: Part, target: memoryview, *, files: FileCache) -> None:
    """Fill `target`, a view of just the right number of bytes, with the row-major bytes of `part`.

    Raises:
        DamagedCheckpointError, CheckpointIncompleteError: as `read_part`.
    """
    size = DTYPE_SIZES[tensor.dtype]
    if len(target) != part.numel * size:
        raise ValueError(f"{len(target)} bytes for {part.numel} elements of {size}")
    _fill(tensor, part, _find_tiles(tensor, part), target, files)


class Stretch(NamedTuple):
    """Bytes of a file that are consecutive bytes of a part, too, from byte `begin` of it on."""

    path: str
    offset: int
    begin: int
    length: int


def find_stretches(tensor: DiskTensor, part: Part) -> list[Stretch] | None:
    """Return the few stretches that a part's row-major bytes lie in; None if they are scattered.

    Raises:
        DamagedCheckpointError: as `read_part`.
    """
    size = DTYPE_SIZES[tensor.dtype]
    stretches = []
    for index, commons in _find_tiles(tensor, part):
        extent = tensor.extents[index]
        for common in commons:
            straight = find_straight(extent, common, part, tensor.shape)
            if straight is None:
                return None
            at, begin = straight
            stretches.append(Stretch(extent.bytes.path, extent.offset + at * size, begin * size, common.numel * size))
    return stretches


def _fill(
    tensor: DiskTensor, part: Part, found: list[tuple[int, list[Part]]], target: memoryview, files: FileCache
) -> None:
    for index, commons in found:
        for common in commons:
            gather(tensor.extents[index], common, part, tensor.shape, DTYPE_SIZES[tensor.dtype], target, files)


def _find_tiles(tensor: DiskTensor, part: Part) -> list[tuple[int, list[Part]]]:
    """Return which extents hold what of a part, having checked that they hold each element once."""
    found = list(tensor.find_common(part))
    tiles = [common for _, each in found for common in each]
    num_found = sum(each.numel for each in tiles)
    if num_found != part.numel or (len(tiles) > 1 and check_coverage(tensor.shape, tiles).num_repeated):
        raise DamagedCheckpointError(
            f"{tensor.fqn!r}: the checkpoint holds {num_found} elements of a part of {part.numel}. Its chunks leave a "
            "hole or overlap; use another checkpoint.",
            fqn=tensor.fqn,
            expected=part.numel,
            actual=num_found,
        )
    return found


def read_blocks(
    tensor: DiskTensor, part: Part | None = None, *, files: FileCache | None = None, buffer: bytearray | None = None
) -> Iterator[tuple[Part, memoryview]]:
    """Yield a part (default: all) piece by piece in its row-major order: where each piece is, and its bytes.

    The bytes lie in one buffer that is used again for the next piece: copy what must last. Memory: the buffer given,
    or one of 1 MiB (16 MiB where a parameter is stored column by column), and 1 MiB where parts must be turned.

    Raises:
        DamagedCheckpointError, CheckpointIncompleteError: as `read_part`.
    """
    part = get_whole(tensor.shape) if part is None else part
    size = DTYPE_SIZES[tensor.dtype]
    if buffer is None:
        is_strided = any(extent.strides for extent in tensor.find_extents(part))
        buffer = bytearray(min(STRIDED_BLOCK_BYTES if is_strided else BLOCK_BYTES, max(part.numel, 1) * size))
    view = memoryview(buffer)
    with FileCache() as own:
        for piece in split_part(part, max(1, len(view) // size)):
            block = view[: piece.numel * size]
            read_into(tensor, piece, block, files=own if files is None else files)
            yield piece, block


def check_item(item: ByteRange, *, files: FileCache | None = None, buffer: bytearray | None = None) -> bool | None:
    """Compare a whole stored item with its CRC-32: True if equal, False if not, None if none was computed.

    Memory: one block of 1 MiB, or the `buffer` that is given to be re-used.

    Raises:
        CheckpointIncompleteError, DamagedCheckpointError: the file is missing or cut off.
    """
    return None if item.crc32 is None else compute_crc32(item, files=files, buffer=buffer) == item.crc32


def compute_crc32(item: ByteRange, *, files: FileCache | None = None, buffer: bytearray | None = None) -> int:
    """Return the CRC-32 of a whole stored item. Memory and exceptions: as `check_item`."""
    buffer = bytearray(min(BLOCK_BYTES, max(item.length, 1))) if buffer is None else buffer
    view = memoryview(buffer)
    crc32 = 0
    with FileCache() as own:
        cache = own if files is None else files
        for start in range(0, item.length, len(buffer)):
            block = view[: min(len(buffer), item.length - start)]
            cache.read_into(item.path, item.offset + start, block)
            crc32 = zlib.crc32(block, crc32)
    return crc32


_NUMPY_DTYPES = {"bfloat16": "uint16", "complex32": "uint32"}


def read_array(tensor: DiskTensor, part: Part | None = None) -> Any:
    """Return a part as a numpy array: of its box's shape, of one dimension for a run.

    Dtypes that numpy lacks (bfloat16, float8, complex32) come as unsigned integers of the same bits.
    """
    import numpy as np

    part = get_whole(tensor.shape) if part is None else part
    name = _NUMPY_DTYPES.get(tensor.dtype, "uint8" if tensor.dtype.startswith(("float8", "float4")) else tensor.dtype)
    array = np.frombuffer(read_part(tensor, part), dtype=name)
    return array.reshape(part.sizes) if isinstance(part, Box) else array
