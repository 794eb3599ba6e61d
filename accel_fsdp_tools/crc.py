"""CRC-32, the one that zip files store, as fast as this machine has it.

Python's zlib reaches 4 GB/s per core, less than half of what reading from the page cache does, so that it decides how
long a verification takes. The processor's carry-less multiplication makes 38 GB/s of it in the compiled kernel, 11 to
15 GB/s in other libraries. None of them is required: whichever is there is used (the kernel, the Python packages isal
and zlib-ng, or the system's libdeflate), once it has been seen to agree with zlib.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable
from importlib import import_module

from .kernel import find_address, find_kernel

Crc32 = Callable[[memoryview, int], int]
"""Given bytes and the CRC of those before, return the CRC of all."""

_MODULES = ("isal.isal_zlib", "zlib_ng.zlib_ng")
_LIBRARIES = ("libdeflate.so.0", "libdeflate.0.dylib", "libdeflate.dylib")
_SMALL_BYTES = 1 << 13  # below, a call through ctypes costs more than it saves
_SAMPLE = bytes(range(256)) * 65


def crc32(block: memoryview, before: int = 0) -> int:
    """Return the CRC-32 of `block`, following on bytes whose CRC-32 is `before`. Releases the interpreter's lock.

    `block` may be of any alignment; a read-only one is as fast as zlib only.
    """
    if block.nbytes < _SMALL_BYTES or block.readonly:
        return zlib.crc32(block, before)
    return find_crc32()[1](block, before)


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two pieces, one after the other, from that of each and the length of the second.

    So a long item can be read in pieces by several threads, in any order. Takes microseconds.
    """
    kernel = find_kernel()
    if kernel is not None:
        return kernel.combine_crc32(first, second, second_bytes)
    return _multiply(_shift_by(second_bytes), first) ^ second


_POLYNOMIAL = 0xEDB88320  # bits reflected: the highest bit is the coefficient of x^0


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2) modulo that of the CRC."""
    product = 0
    for place in range(31, -1, -1):
        if a >> place & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=256)
def _shift_by(num_bytes: int) -> int:
    """Return x^(8 * num_bytes), what so many zero bytes do to the CRC of the bytes before them."""
    power, square = 1 << 31, 1 << 23  # x^0, x^8
    while num_bytes:
        if num_bytes & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        num_bytes >>= 1
    return power


@functools.cache
def find_crc32() -> tuple[str, Crc32]:
    """Return the name of the fastest implementation on this machine, and the function."""
    function = _from_kernel()
    if function is not None and _agrees(function):
        return "kernel", function
    for name in _MODULES:
        function = _from_module(name)
        if function is not None and _agrees(function):
            return name.partition(".")[0], function
    for name in _LIBRARIES:
        function = _from_library(name)
        if function is not None and _agrees(function):
            return "libdeflate", function
    return "zlib", zlib.crc32


def _from_kernel() -> Crc32 | None:
    kernel = find_kernel()
    if kernel is None:
        return None

    def compute(block: memoryview, before: int) -> int:
        address = find_address(block)
        if address is None:  # not in one piece, which zlib says, or read-only
            return zlib.crc32(block, before)
        return kernel.compute_crc32(address, block.nbytes, before)

    return compute


def _from_module(name: str) -> Crc32 | None:
    try:
        function: Crc32 = import_module(name).crc32
    except (ImportError, AttributeError):
        return None
    return function


def _from_library(name: str) -> Crc32 | None:
    try:
        function = ctypes.CDLL(name).libdeflate_crc32
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_uint32
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)

    def compute(block: memoryview, before: int) -> int:
        first = ctypes.c_char.from_buffer(block)
        return int(function(before, ctypes.addressof(first), block.nbytes))

    return compute


def _agrees(function: Crc32) -> bool:
    """Whether it is the same CRC as zlib's, of aligned and of unaligned bytes, in one go and continued."""
    view = memoryview(bytearray(_SAMPLE))
    whole = zlib.crc32(view)
    return all(function(view[at:], function(view[:at], 0)) == whole for at in (1, 64, 8191, len(view) - 1))
