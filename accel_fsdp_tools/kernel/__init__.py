"""The compiled kernel: sums, casts and copies without the interpreter, several times as fast as numpy.

Optional. It is compiled when the package is installed, where there is a C compiler (`building`), and everything that it
does has a twin in Python that is used instead where it is missing. `find_kernel` gives it out only if it was compiled
of the source that lies beside it and gives the checksums of a sample. `ACCEL_FSDP_TOOLS_KERNEL=off` leaves it out.

Calls release the interpreter's lock for all of their time.
"""

from __future__ import annotations

import ctypes
import functools
import os
import zlib
from dataclasses import dataclass
from typing import Any

from .building import get_library

VARIABLE = "ACCEL_FSDP_TOOLS_KERNEL"
CASTS = {("float32", "bfloat16"): 1, ("bfloat16", "float32"): 2}
"""Pairs of dtypes that the kernel casts, with its numbers for them; 0 leaves elements as they are."""

_U64 = ctypes.c_uint64
_SAMPLE = bytes(range(251)) * 9
_SAMPLE_POSITION = (1 << 18) - 1001  # under two multipliers, from an odd byte to an odd byte
_SAMPLE_SUMS = (0x997A5B3C1CFED92F, 0x6097D51D94551F1D)
"""The sample's sums there, as weighted_sums.py has them: wrong ones would be recorded in manifests."""


CRC_READ, SUM_READ, CRC_WRITTEN, READ_AGAIN, SUM_AGAIN = 1, 2, 4, 8, 16
"""What to do with the elements of a range beside copying them: flags for `Range.what`."""


class _Sums(ctypes.Structure):
    _fields_ = (("total", _U64), ("weighted", _U64))
    total: int
    weighted: int


class Range(ctypes.Structure):
    """A range of elements to copy, as the kernel takes it, and what it found; `struct range` of copy.c.

    Descriptors and offsets in bytes say where elements lie, are written to, and are read again from.
    """

    _fields_ = (
        *((name, _U64) for name in ("what", "cast")),
        *((name, _U64) for name in ("source", "source_offset", "target", "target_offset", "again", "again_offset")),
        *((name, _U64) for name in ("start", "sum_start", "count", "source_size", "target_size")),
        ("buffer", ctypes.c_void_p),
        ("cast_buffer", ctypes.c_void_p),
        ("buffer_size", _U64),
        ("block", _U64),
        *((name, _U64) for name in ("crc_read", "crc_written", "crc_again", "num_overflowed")),
        ("sums_read", _Sums),
        ("sums_again", _Sums),
    )
    source: int
    source_offset: int
    again: int
    again_offset: int
    what: int
    crc_read: int
    crc_written: int
    crc_again: int
    num_overflowed: int
    sums_read: _Sums
    sums_again: _Sums


@dataclass(frozen=True)
class Kernel:
    """The library's functions.

    Attributes:
        num_bits: of the widest registers that it uses: 256 or 512.
    """

    library: Any
    num_bits: int

    def compute_crc32(self, address: int, num_bytes: int, before: int) -> int:
        """Return the CRC-32 of bytes in memory that follow on others whose CRC-32 is `before`."""
        return int(self.library.kernel_crc32(before, address, num_bytes))

    def compute_sums(self, position: int, address: int, num_bytes: int) -> tuple[int, int]:
        """Return both sums of a fingerprint over bytes in memory that start `position` bytes into a tensor."""
        sums = _Sums()
        self.library.kernel_sum(position, address, num_bytes, ctypes.byref(sums))
        return sums.total, sums.weighted

    def compute_row_sums(self, positions: int, count: int, address: int, num_bytes: int) -> tuple[int, int]:
        """Return both sums over `count` rows in memory, one after another, of `num_bytes` each.

        `positions` is the address of as many 64-bit numbers: how many bytes into the tensor each row starts.
        """
        sums = _Sums()
        self.library.kernel_sum_rows(positions, count, address, num_bytes, ctypes.byref(sums))
        return sums.total, sums.weighted

    def combine_crc32(self, first: int, second: int, second_bytes: int) -> int:
        """Return the CRC-32 of two pieces, one after the other, from that of each."""
        return int(self.library.kernel_combine_crc32(first, second, second_bytes))

    def cast(self, cast: int, source: int, target: int, count: int) -> int:
        """Cast `count` elements from one address to another; return how many finite values became infinite."""
        return int(self.library.kernel_cast(cast, source, target, count))

    def copy(self, what: Range) -> bool:
        """Copy a range; False where something could not be read or written, whatever it was. Results are in `what`."""
        return not self.library.kernel_copy(ctypes.byref(what))


@functools.cache
def find_kernel() -> Kernel | None:
    """Return the kernel if it is there, matches its source and gives the right checksums; else None."""
    kernel, _ = _load()
    return kernel


def describe_kernel() -> tuple[bool, str]:
    """Return whether the kernel is in use, and a sentence for people: with what registers, or why it is not."""
    kernel, problem = _load()
    if kernel is None:
        return False, problem
    return True, f"The compiled kernel is in use ({kernel.num_bits} bits)."


def forget_kernel() -> None:
    """Look for the kernel anew the next time that it is asked for."""
    find_kernel.cache_clear()
    _load.cache_clear()


def is_left_out() -> bool:
    """Whether the environment says that the kernel is not to be used."""
    return os.environ.get(VARIABLE, "").lower() in ("off", "0")


@functools.cache
def _load(*, is_narrow: bool = False) -> tuple[Kernel | None, str]:
    if is_left_out():
        return None, f"The compiled kernel is not used: {VARIABLE} says so."
    try:
        library = ctypes.CDLL(str(get_library()))
        _declare(library)
    except (OSError, AttributeError):
        return None, "There is no compiled kernel of this source; `python -m accel_fsdp_tools.kernel` compiles it."
    kernel = Kernel(library, int(library.kernel_prepare(int(is_narrow))))
    if not kernel.num_bits:
        return None, "The compiled kernel is not used: the processor has no AVX2 or carry-less multiplication."
    if not _agrees(kernel):
        return None, "The compiled kernel is not used: its checksums are wrong on this processor."
    return kernel, ""


def _declare(library: Any) -> None:
    size, address = ctypes.c_uint64, ctypes.c_void_p
    library.kernel_prepare.argtypes = (ctypes.c_int,)
    library.kernel_crc32.argtypes = (ctypes.c_uint32, address, size)
    library.kernel_crc32.restype = ctypes.c_uint32
    library.kernel_combine_crc32.argtypes = (ctypes.c_uint32, ctypes.c_uint32, size)
    library.kernel_combine_crc32.restype = ctypes.c_uint32
    library.kernel_sum.argtypes = (size, address, size, address)
    library.kernel_sum.restype = None
    library.kernel_sum_rows.argtypes = (address, size, address, size, address)
    library.kernel_sum_rows.restype = None
    library.kernel_cast.argtypes = (ctypes.c_int, address, address, size)
    library.kernel_cast.restype = size
    library.kernel_copy.argtypes = (address,)


def _agrees(kernel: Kernel) -> bool:
    """Whether its CRC is that of zlib, of aligned and unaligned bytes, in one go, continued and combined; and its sums
    are those that are known of the sample."""
    sample = bytearray(_SAMPLE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(sample))
    whole = zlib.crc32(sample)
    for at in (0, 1, 64, 700):
        before, rest = kernel.compute_crc32(start, at, 0), len(sample) - at
        second = kernel.compute_crc32(start + at, rest, 0)
        if (
            kernel.compute_crc32(start + at, rest, before) != whole
            or kernel.combine_crc32(before, second, rest) != whole
        ):
            return False
    return kernel.compute_sums(_SAMPLE_POSITION, start, len(sample)) == _SAMPLE_SUMS


def find_address(block: memoryview) -> int | None:
    """Return where the bytes of a buffer lie, None where ctypes does not say (of a read-only one).

    The buffer must live, and keep its size, for as long as the address is used.
    """
    if block.readonly or not block.nbytes or not block.contiguous:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
