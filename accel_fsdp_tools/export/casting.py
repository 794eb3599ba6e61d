"""Casts between floating dtypes, block by block, to the bits that torch's `.to()` gives.

numpy knows neither bfloat16 nor float8, and importing torch costs more than exporting a small model, so the casts
are made of integer operations on the bits. All round to the nearest, ties to even, and what lies beyond the target's
range becomes infinite, which is counted: it is the one thing that a cast can break.

torch keeps its word on every number, but not on the bits of a NaN: they depend on the instructions it was compiled
for and on where in the tensor the NaN stands. Here they are those of its vector code (a long tensor on x86).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError
from ..extents import DTYPE_SIZES
from ..kernel import CASTS, find_kernel
from .casts import TARGET_DTYPES, can_cast

_BLOCK = 1 << 18  # elements at a time: smaller ones stay in the cache, and threads wait more for the interpreter

Array = npt.NDArray[Any]
Cast = Callable[[Array, Array], int]
"""Takes and fills arrays of unsigned integers, the bits, and returns how many values overflowed."""


@dataclass(frozen=True)
class CastCounts:
    """What a cast did to the values: how many finite ones became infinite."""

    num_overflowed: int = 0

    def __add__(self, other: CastCounts) -> CastCounts:
        return CastCounts(self.num_overflowed + other.num_overflowed)


def cast_block(source: memoryview, source_dtype: str, target_dtype: str, out: memoryview) -> CastCounts:
    """Cast consecutive elements, with the interpreter's lock released for most of the time.

    Args:
        source: the elements' bytes, little-endian; aligned ones are faster.
        source_dtype: one of `casts.SOURCE_DTYPES`.
        target_dtype: one of `casts.TARGET_DTYPES`, or the source's own.
        out: filled in place; of just the right number of bytes.

    Returns:
        how many finite values became infinite. Peak memory: 2 MB per thread, kept for the next call.

    Raises:
        UnsupportedError: a pair of dtypes that is not known; integers, bools and complex numbers are never cast.
    """
    if not can_cast(source_dtype, target_dtype):
        raise UnsupportedError(
            f"{source_dtype} is not cast to {target_dtype}. Floating tensors are cast to one of "
            f"{', '.join(TARGET_DTYPES)}; others stay as they are.",
            expected=target_dtype,
            actual=source_dtype,
        )
    count, rest = divmod(len(source), DTYPE_SIZES[source_dtype])
    if rest or len(out) != count * DTYPE_SIZES[target_dtype]:
        raise ValueError(f"{len(source)} bytes of {source_dtype} do not become {len(out)} of {target_dtype}")
    if source_dtype == target_dtype:
        out[:] = source
        return CastCounts()
    if not count:
        return CastCounts()
    values = np.frombuffer(source, _BITS[DTYPE_SIZES[source_dtype]])
    result = np.frombuffer(out, _BITS[DTYPE_SIZES[target_dtype]])
    kernel, number = find_kernel(), CASTS.get((source_dtype, target_dtype))
    if kernel is not None and number is not None:
        return CastCounts(kernel.cast(number, values.ctypes.data, result.ctypes.data, count))
    cast = _CASTS.get((source_dtype, target_dtype)) or functools.partial(_look_up, source_dtype, target_dtype)
    num_overflowed = 0
    with np.errstate(all="ignore"):
        for start in range(0, count, _BLOCK):
            num_overflowed += cast(values[start : start + _BLOCK], result[start : start + _BLOCK])
    return CastCounts(num_overflowed)


_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIXTEEN = np.uint32(16)
_ONE = np.uint32(1)
_HALF = np.uint32(0x7FFF)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.rounded = np.empty(_BLOCK, np.uint32)
        self.between = np.empty(_BLOCK, np.uint32)


_scratch = _Scratch()


def _reaches(bits: Array, limit: int) -> bool:
    """Whether any value's bits without the sign are `limit` or more: too large, infinite or NaN."""
    sign = 1 << (8 * bits.itemsize - 1)
    signed: Array = bits.view(f"i{bits.itemsize}")
    # The largest as a signed number is the largest positive value, as an unsigned one the most negative.
    return int(np.maximum.reduce(signed)) >= limit or int(np.maximum.reduce(bits)) >= sign + limit


def _count_between(bits: Array, first: int, last: int) -> int:
    """Count the values whose bits without the sign are from `first` to `last`, without `last`."""
    magnitude = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    return int(np.count_nonzero((magnitude >= first) & (magnitude < last)))


def _find_nans(bits: Array, infinity: int) -> Array:
    found: Array = np.flatnonzero((bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)) > infinity)
    return found


_FLOAT32_INFINITY = 0x7F800000
_BFLOAT16_LIMIT = 0x7F7F8000  # in float32: half a step above the largest bfloat16
_FLOAT16_LIMIT = 0x477FF000
_FLOAT32_LIMIT = 0x47EFFFFFF0000000  # in float64
_FLOAT64_INFINITY = 0x7FF0000000000000


def _float32_to_bfloat16(x: Array, out: Array, *, nan: int = 0xFFFF) -> int:
    y = _scratch.rounded[: x.size]
    np.right_shift(x, _SIXTEEN, out=y)
    np.bitwise_and(y, _ONE, out=y)
    np.add(y, _HALF, out=y)
    np.add(y, x, out=y)
    np.right_shift(y, _SIXTEEN, out=y)
    np.copyto(out, y, casting="unsafe")
    if not _reaches(x, _BFLOAT16_LIMIT):
        return 0
    out[_find_nans(x, _FLOAT32_INFINITY)] = nan
    return _count_between(x, _BFLOAT16_LIMIT, _FLOAT32_INFINITY)


def _float32_to_float16(x: Array, out: Array) -> int:
    np.copyto(out.view(np.float16), x.view(np.float32), casting="unsafe")
    if not _reaches(x, _FLOAT16_LIMIT):
        return 0
    nans = _find_nans(x, _FLOAT32_INFINITY)
    bits = x[nans]
    out[nans] = (bits >> _SIXTEEN & np.uint32(0x8000)) | np.uint32(0x7E00) | (bits >> np.uint32(13) & np.uint32(0x3FF))
    return _count_between(x, _FLOAT16_LIMIT, _FLOAT32_INFINITY)


def _float64_to_float32(x: Array, out: Array) -> int:
    np.copyto(out.view(np.float32), x.view(np.float64), casting="unsafe")
    if not _reaches(x, _FLOAT32_LIMIT):
        return 0
    return _count_between(x, _FLOAT32_LIMIT, _FLOAT64_INFINITY)


def _float16_to_float32(x: Array, out: Array) -> int:
    np.copyto(out.view(np.float32), x.view(np.float16), casting="unsafe")
    if _reaches(x, 0x7C01):
        out[_find_nans(x, 0x7C00)] |= np.uint32(0x400000)  # made quiet, as processors do
    return 0


def _bfloat16_to_float32(x: Array, out: Array) -> int:
    np.copyto(out, x)
    np.left_shift(out, _SIXTEEN, out=out)
    return 0


def _through_float32(first: Cast, second: Cast) -> Cast:
    """As torch does, even where that rounds twice."""

    def cast(x: Array, out: Array) -> int:
        y = _scratch.between[: x.size]
        return first(x, y) + second(y, out)

    return cast


_TO_FLOAT32: dict[str, Cast] = {
    "float64": _float64_to_float32,
    "float16": _float16_to_float32,
    "bfloat16": _bfloat16_to_float32,
}
_to_bfloat16_one_by_one = functools.partial(_float32_to_bfloat16, nan=0x7FC0)  # torch has no vector code for these

_CASTS: dict[tuple[str, str], Cast] = {
    ("float32", "bfloat16"): _float32_to_bfloat16,
    ("float32", "float16"): _float32_to_float16,
    **{(name, "float32"): cast for name, cast in _TO_FLOAT32.items()},
    ("float64", "bfloat16"): _through_float32(_float64_to_float32, _float32_to_bfloat16),
    ("float64", "float16"): _through_float32(_float64_to_float32, _float32_to_float16),
    ("float16", "bfloat16"): _through_float32(_float16_to_float32, _to_bfloat16_one_by_one),
    ("bfloat16", "float16"): _through_float32(_bfloat16_to_float32, _float32_to_float16),
}


def _look_up(source_dtype: str, target_dtype: str, x: Array, out: Array) -> int:
    values, overflows = _get_table(source_dtype, target_dtype)
    np.take(values, x, out=out, mode="clip")
    return int(np.count_nonzero(overflows[x])) if overflows.any() else 0


@functools.cache
def _get_table(source_dtype: str, target_dtype: str) -> tuple[Array, Array]:
    """Return what each of the 256 codes of a float8 becomes, and which of them overflow."""
    codes = np.arange(256, dtype=np.uint16)
    bits = np.empty(256, np.uint32)
    _FLOAT8[source_dtype](codes, bits)
    if target_dtype == "float32":
        return bits, np.zeros(256, bool)
    cast: Cast = _to_bfloat16_one_by_one if target_dtype == "bfloat16" else _float32_to_float16
    result = np.empty(256, np.uint16)
    counts = [cast(bits[code : code + 1], result[code : code + 1]) for code in range(256)]
    return result, np.array(counts) > 0


def _decode_e5m2(codes: Array, out: Array) -> int:
    return _float16_to_float32(codes << np.uint16(8), out)  # the upper half of a float16


def _decode_e8m0(codes: Array, out: Array) -> int:
    out.view(np.float32)[:] = np.ldexp(1.0, codes.astype(np.int32) - 127)
    out[255] = 0x7F800001
    return 0


def _decode_e4m3fn(codes: Array, out: Array) -> int:
    _decode(codes, out, num_fraction_bits=3, bias=7)
    out[[0x7F, 0xFF]] = 0x7FF00000, 0xFFF00000
    return 0


def _decode_e4m3fnuz(codes: Array, out: Array) -> int:
    return _decode(codes, out, num_fraction_bits=3, bias=8, has_negative_zero=False)


def _decode_e5m2fnuz(codes: Array, out: Array) -> int:
    return _decode(codes, out, num_fraction_bits=2, bias=16, has_negative_zero=False)


def _decode(codes: Array, out: Array, *, num_fraction_bits: int, bias: int, has_negative_zero: bool = True) -> int:
    exponent = (codes.astype(np.int32) & 0x7F) >> num_fraction_bits
    fraction = (codes & ((1 << num_fraction_bits) - 1)) / (1 << num_fraction_bits)
    magnitude = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - bias)
    out.view(np.float32)[:] = np.copysign(magnitude, np.where(codes & 0x80, -1.0, 1.0))
    if not has_negative_zero:
        out[0x80] = 0x7F800001  # its code is the one NaN
    return 0


_FLOAT8: dict[str, Cast] = {
    "float8_e4m3fn": _decode_e4m3fn,
    "float8_e4m3fnuz": _decode_e4m3fnuz,
    "float8_e5m2": _decode_e5m2,
    "float8_e5m2fnuz": _decode_e5m2fnuz,
    "float8_e8m0fnu": _decode_e8m0,
}
