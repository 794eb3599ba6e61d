"""The zip that `torch.save` writes, alone in a file or embedded in a larger one, without loading what it holds.

Only what torch writes is accepted: entries stored uncompressed under one root, the central directory and its end
records one after another at the very end. A reader that searches, skips or tolerates would sooner or later see
another entry than torch's reader does. Names are compared, never used as paths.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointIncompleteError, DamagedCheckpointError

ZIP_MAGIC = b"PK\x03\x04"

_TAIL_BYTES = 4096  # holds central directory and end records of a zip with a dozen entries
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_LOCAL_EXTRA_BYTES = 128  # torch pads with up to 64 bytes and a header, to align what follows
_MANY32, _MANY16 = 0xFFFFFFFF, 0xFFFF
_ZIP64_EXTRA = 1
_ENCRYPTED = 1


class Window:
    """A range of an open file, read by position: threads may share it. `label` names it in messages."""

    def __init__(self, descriptor: int, path: Path, offset: int, length: int, label: str) -> None:
        self.descriptor = descriptor
        self.path = path
        self.offset = offset
        self.length = length
        self.label = label

    def read(self, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start` on, both relative to the window.

        Raises:
            DamagedCheckpointError: the range leaves the window, or the file is shorter than it was.
        """
        if start < 0 or length < 0 or start + length > self.length:
            raise self.describe_damage(
                f"refers to bytes {start} to {start + length} of {self.length}", expected=self.length
            )
        parts = []
        position, left = self.offset + start, length
        while left:  # one call reads at most 2 GiB
            part = os.pread(self.descriptor, left, position)
            if not part:
                raise self.describe_damage("is cut off")
            parts.append(part)
            position, left = position + len(part), left - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def map(self) -> tuple[bytes | mmap.mmap, int, int]:
        """Return the file mapped into memory, and where in it the window starts and ends."""
        if not self.length:
            return b"", 0, 0
        return mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ), self.offset, self.offset + self.length

    def narrow(self, start: int, length: int, label: str) -> Window:
        """Return the part of this window that starts at `start`; raises as `read` does where it does not fit."""
        if start < 0 or length < 0 or start + length > self.length:
            raise DamagedCheckpointError(
                f"{label}: recorded at bytes {start} to {start + length} of {self.path.name}, which has "
                f"{self.length} bytes. The file is cut off or belongs to another save; use another checkpoint.",
                path=str(self.path),
                expected=start + length,
                actual=self.length,
            )
        return Window(self.descriptor, self.path, self.offset + start, length, label)

    def describe_damage(self, what: str, **facts: object) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self.label} {what}. The file is damaged or not what torch writes; use another checkpoint or restore "
            "the file from a copy.",
            path=str(self.path),
            **facts,
        )


class MemoryWindow(Window):
    """A window over bytes that are in memory already."""

    def __init__(self, data: bytes, path: Path, label: str) -> None:
        super().__init__(-1, path, 0, len(data), label)
        self._data = data

    def read(self, start: int, length: int) -> bytes:
        return self._data[start : start + length]

    def map(self) -> tuple[bytes, int, int]:
        return self._data, 0, self.length


@contextmanager
def open_window(path: Path) -> Iterator[Window]:
    """Open a file as one window for the duration of the context.

    Raises:
        CheckpointIncompleteError: there is no such file.
        DamagedCheckpointError: it is not a regular file (reading a pipe or a device would never end).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointIncompleteError(
            f"{path} is missing; the checkpoint is incomplete. Use another one, or restore the file from a copy.",
            path=str(path),
        ) from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedCheckpointError(f"{path} is not a regular file; a checkpoint holds none.", path=str(path))
        yield Window(descriptor, path, 0, facts.st_size, str(path))
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class ZipEntry:
    """One entry: its payload's size, and the CRC-32 that the central directory states (None: not computed)."""

    name: str
    header_offset: int
    size_bytes: int
    crc32: int | None


@dataclass(frozen=True)
class Payload:
    """Where an entry's bytes are: absolute offset in the file, size, and CRC-32 if one was stored."""

    offset: int
    size_bytes: int
    crc32: int | None


class TorchZip:
    """The entries of one zip, by their names below the zip's root (`data.pkl`, `data/0`, ...)."""

    def __init__(self, window: Window, root: str, entries: Mapping[str, ZipEntry], tail: tuple[int, bytes]) -> None:
        self.window = window
        self.root = root
        self.entries = entries
        self._tail_start, self._tail = tail

    def locate(self, name: str) -> Payload:
        """Return where the payload of an entry is, from its local header.

        Raises:
            DamagedCheckpointError: no such entry, or its header does not fit.
        """
        entry, start, _ = self._read_header(name, 0)
        return Payload(self.window.offset + start, entry.size_bytes, entry.crc32)

    def read(self, name: str) -> bytes:
        """Return an entry's bytes, checked against the stored CRC-32.

        Raises:
            DamagedCheckpointError: no such entry, it reaches beyond the zip, or its CRC-32 differs.
        """
        entry, data = self.read_unchecked(name)
        self.check(entry, data)
        return data

    def read_unchecked(self, name: str) -> tuple[ZipEntry, bytes]:
        """Return an entry and its bytes, which `check` compares with the stored CRC-32."""
        size_bytes = self.entries[name].size_bytes if name in self.entries else 0
        entry, start, data = self._read_header(name, size_bytes)
        return entry, data if len(data) == size_bytes else self._read(start, size_bytes)

    def check(self, entry: ZipEntry, data: bytes) -> None:
        """Raise if `data` is not what the entry's stored CRC-32 was computed from; without one nothing is known."""
        crc32 = zlib.crc32(data)
        if entry.crc32 is not None and crc32 != entry.crc32:
            raise self.window.describe_damage(
                f"has an entry {entry.name!r} whose bytes do not match their CRC-32",
                expected=entry.crc32,
                actual=crc32,
            )

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return part of an entry's bytes, unchecked (a CRC-32 covers the whole entry)."""
        entry, payload_start, _ = self._read_header(name, 0)
        if start < 0 or length < 0 or start + length > entry.size_bytes:
            raise self.window.describe_damage(
                f"has an entry {name!r} of {entry.size_bytes} bytes, too short for bytes {start} to {start + length}"
            )
        return self._read(payload_start + start, length)

    def _read(self, start: int, length: int) -> bytes:
        if start >= self._tail_start:
            begin = start - self._tail_start
            data = self._tail[begin : begin + length]
            if len(data) == length:
                return data
        return self.window.read(start, length)

    def _read_header(self, name: str, wanted: int) -> tuple[ZipEntry, int, bytes]:
        """Return the entry, where its payload starts, and as much of `wanted` bytes of it as came along."""
        entry = self.entries.get(name)
        if entry is None:
            raise self.window.describe_damage(f"has no entry {name!r}")
        # Header, padding and a small payload in one read.
        length = _LOCAL.size + len(entry.name) + _LOCAL_EXTRA_BYTES + (wanted if wanted < 1 << 16 else 0)
        head = self._read(entry.header_offset, min(length, self.window.length - entry.header_offset))
        if len(head) < _LOCAL.size:
            raise self.window.describe_damage(f"ends inside the header of entry {name!r}")
        magic, _, flags, method, *_, name_size, extra_size = _LOCAL.unpack_from(head)
        stored_name = head[_LOCAL.size : _LOCAL.size + name_size]
        if magic != ZIP_MAGIC or method != 0 or flags & _ENCRYPTED or stored_name != entry.name.encode():
            raise self.window.describe_damage(f"has no proper header for entry {name!r}")
        offset = _LOCAL.size + name_size + extra_size
        start = entry.header_offset + offset
        if start + entry.size_bytes > self.window.length:
            raise self.window.describe_damage(f"ends inside entry {name!r}")
        return entry, start, head[offset : offset + entry.size_bytes]


def open_torch_zip(window: Window) -> TorchZip:
    """Read the directory of the zip that fills `window` exactly.

    Raises:
        DamagedCheckpointError: not such a zip, cut off, or unlike what torch writes (compressed entries, a comment,
            two roots, two entries with one name).
    """
    tail_start = max(0, window.length - _TAIL_BYTES)
    tail = window.read(tail_start, window.length - tail_start)
    count, size, offset = _parse_end(window, tail_start, tail)
    if offset >= tail_start:
        directory = tail[offset - tail_start : offset - tail_start + size]
    else:
        directory = window.read(offset, size)
    entries = list(_parse_directory(window, directory, count))
    root, _, _ = entries[0].name.partition("/")
    named: dict[str, ZipEntry] = {}
    seen: set[str] = set()
    for entry in entries:
        name = entry.name.removeprefix(f"{root}/")
        # torch looks names up without regard to case, so two that differ in case only are one name twice.
        if name == entry.name or name.lower() in seen:
            raise window.describe_damage(f"has a misplaced or repeated entry {entry.name!r}")
        seen.add(name.lower())
        named[name] = entry
    return TorchZip(window, root, named, (tail_start, tail))


def _parse_end(window: Window, tail_start: int, tail: bytes) -> tuple[int, int, int]:
    """Return number of entries, size and offset of the central directory, which must lie where it is expected."""
    if len(tail) < _END.size:
        raise window.describe_damage("is too short for a zip")
    end_at = len(tail) - _END.size
    magic, disk, directory_disk, here, count, size, offset, comment = _END.unpack_from(tail, end_at)
    if magic != b"PK\x05\x06" or comment or disk or directory_disk or here != count:
        raise window.describe_damage("does not end as a zip does")
    records_at = end_at
    locator_at = end_at - _LOCATOR64.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        _, _, end64_offset, _ = _LOCATOR64.unpack_from(tail, locator_at)
        records_at = locator_at - _END64.size
        if records_at < 0 or end64_offset != tail_start + records_at:
            raise window.describe_damage("has a zip64 record where none belongs")
        magic, record_size, _, _, disk, directory_disk, here, count64, size64, offset64 = _END64.unpack_from(
            tail, records_at
        )
        if magic != b"PK\x06\x06" or record_size != _END64.size - 12 or disk or directory_disk or here != count64:
            raise window.describe_damage("has a malformed zip64 record")
        short = (count, size, offset)
        full = (count64, size64, offset64)
        limits = (_MANY16, _MANY32, _MANY32)
        if any(a != b and a != limit for a, b, limit in zip(short, full, limits, strict=True)):
            raise window.describe_damage("has two directories that contradict each other")
        count, size, offset = full
    if offset + size != tail_start + records_at or count * _ENTRY.size > size or not count:
        raise window.describe_damage("has its directory in the wrong place")
    return count, size, offset


def _parse_directory(window: Window, data: bytes, count: int) -> Iterator[ZipEntry]:
    position = 0
    for _ in range(count):
        if position + _ENTRY.size > len(data):
            raise window.describe_damage("has a directory that ends too early")
        fields = _ENTRY.unpack_from(data, position)
        magic, _, _, flags, method, _, _, crc, stored, size, name_size, extra_size, comment_size = fields[:13]
        header_offset = fields[16]
        if magic != b"PK\x01\x02":
            raise window.describe_damage("has a malformed directory")
        position += _ENTRY.size
        raw_name = data[position : position + name_size]
        extra = data[position + name_size : position + name_size + extra_size]
        position += name_size + extra_size + comment_size
        try:
            name = raw_name.decode("ascii")
        except UnicodeDecodeError:
            raise window.describe_damage(f"has an entry with the name {raw_name[:80]!r}") from None
        size, stored, header_offset = _apply_zip64(window, extra, size, stored, header_offset)
        if method != 0 or flags & _ENCRYPTED or stored != size:
            raise window.describe_damage(f"has a compressed or encrypted entry {name!r}, which torch never writes")
        if header_offset + _LOCAL.size + size > window.length:
            raise window.describe_damage(f"has an entry {name!r} beyond its end")
        # CRC-32 switched off (torch.serialization.set_crc32_options) leaves 0; so does an empty entry.
        yield ZipEntry(name, header_offset, size, crc or None)
    if position != len(data):
        raise window.describe_damage("has a directory with something behind it")


def _apply_zip64(window: Window, extra: bytes, *short: int) -> tuple[int, int, int]:
    """Replace sizes and offset that did not fit into 32 bits by those of the zip64 field."""
    values = list(short)
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        field = extra[position + 4 : position + 4 + length]
        position += 4 + length
        if kind != _ZIP64_EXTRA:
            continue
        numbers = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
        values = [next(numbers, value) if value == _MANY32 else value for value in values]
        break
    if _MANY32 in values:
        raise window.describe_damage("has an entry whose size is not stated")
    return values[0], values[1], values[2]
