"""Whether a tensor's values in the checkpoint are those that were saved, and which file it is if not."""

from __future__ import annotations

from ..crc import combine_crc32
from ..errors import DamagedCheckpointError
from ..extents import DTYPE_SIZES, ByteRange, DiskTensor
from ..fingerprint import Fingerprint
from ..formats.reading import FileCache, compute_crc32
from .computed import Source, list_inputs
from .planning import find_start


def find_stored_crc(source: Source) -> int | None:
    """Return the CRC-32 that a tensor's bytes have if those of the stored items are right.

    None where it cannot be said: it is computed, or does not consist of whole items that have CRCs, one after another.
    """
    if not isinstance(source, DiskTensor) or not source.numel:
        return None
    pieces = []
    for extent in source.extents:
        item, start = extent.bytes, find_start(extent, source)
        is_whole = extent.offset == item.offset and item.length == extent.part.numel * DTYPE_SIZES[source.dtype]
        if start is None or item.crc32 is None or not is_whole:
            return None
        pieces.append((start, item.length, item.crc32))
    crc = 0
    for _, length, each in sorted(pieces):
        crc = combine_crc32(crc, each, length)
    return crc


def check_recorded(name: str, actual: Fingerprint | None, expected: Fingerprint) -> None:
    """Compare a tensor's values in the checkpoint with what was recorded of the live one.

    Raises:
        DamagedCheckpointError: they differ.
    """
    if actual != expected:
        raise DamagedCheckpointError(
            f"{name!r}: what the checkpoint's files hold is not what was in memory when it was saved (its fingerprint "
            f"is {actual}, {expected} was recorded). Use another checkpoint.",
            fqn=name,
            expected=str(expected),
            actual=str(actual),
        )


def check_stored(name: str, source: Source) -> None:
    """Compare all items that hold a tensor with their CRCs: which file is it that has changed since it was written?

    Raises:
        DamagedCheckpointError: an item has another CRC; CheckpointIncompleteError: a file is missing.
    """
    with FileCache() as files:
        for item in dict.fromkeys(extent.bytes for each in list_inputs([source]) for extent in each.extents):
            actual = item.crc32 if item.crc32 is None else compute_crc32(item, files=files)
            if actual != item.crc32:
                raise describe_damage(name, item, actual)


def describe_damage(name: str, item: ByteRange, actual: int | None) -> DamagedCheckpointError:
    """Return what to tell about a stored item, which holds a tensor, that has the CRC `actual`."""
    return DamagedCheckpointError(
        f"{item.path} is damaged: bytes {item.offset} to {item.offset + item.length}, which hold {name!r}, have the "
        f"CRC-32 {actual:08x}, {item.crc32:08x} was written. Use another checkpoint, or restore the file from a copy.",
        path=item.path,
        fqn=name,
        expected=item.crc32,
        actual=actual,
    )
