"""Reading the parts of a pickle: bounded by its end, and strict about how numbers and text are spelled."""

from __future__ import annotations

import mmap
import re
import struct

from ..errors import DamagedCheckpointError

Buffer = bytes | mmap.mmap

_MAX_LINE_BYTES = 1 << 20


class PickleReader:
    """A position in a buffer. `where` says in messages which file and entry it is, `path` is attached to errors."""

    def __init__(self, data: Buffer, start: int, end: int, *, where: str, path: str | None) -> None:
        self.data = data
        self.position = start
        self.end = end
        self.where = where
        self.path = path

    def describe_damage(self, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self.where}: the pickle {what} (at byte {self.position}). The file is damaged or not what its name "
            "says; use another checkpoint or restore the file from a copy.",
            path=self.path,
        )

    def take(self, count: int) -> bytes:
        start = self.position
        if count > self.end - start:
            raise self.describe_damage("is cut off")
        self.position = start + count
        return self.data[start : start + count]

    def take_byte(self) -> int:
        position = self.position
        if position >= self.end:
            raise self.describe_damage("is cut off")
        self.position = position + 1
        return self.data[position]

    def take_sized(self, size_bytes: int) -> bytes:
        return self.take(int.from_bytes(self.take(size_bytes), "little"))

    def take_line(self) -> bytes:
        start = self.position
        newline = self.data.find(b"\n", start, min(self.end, start + _MAX_LINE_BYTES))
        if newline < 0:
            raise self.describe_damage("is cut off in the middle of a line")
        self.position = newline + 1
        return self.data[start:newline]


def parse_number(line: bytes) -> int:
    if not re.fullmatch(rb"-?[0-9]{1,4000}", line):
        raise ValueError("a malformed number")
    return int(line)


def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def decode_signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def decode_unsigned(data: bytes) -> int:
    return int.from_bytes(data, "little")


def decode_float(data: bytes) -> float:
    return float(struct.unpack(">d", data)[0])
