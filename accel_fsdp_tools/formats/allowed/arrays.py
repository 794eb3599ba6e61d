"""Numpy's arrays, scalars and dtypes: plain numbers and text only.

numpy believes what a pickled dtype says about itself. One whose flags or fields claim that bytes are Python objects
turns those bytes into pointers, so a dtype passes only if its state is the one that numpy writes.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from ..pickled import ArrayRef, GlobalRef, NumpyDtype
from .rules import RefusedError, Rule, Spend

_CODE = re.compile(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SU]\d{1,9}")
_SCALARS = {"f2": "e", "f4": "f", "f8": "d", "c8": "2f", "c16": "2d"}


def _dtype(args: tuple[Any, ...], spend: Spend) -> NumpyDtype:
    code, *flags = args
    if type(code) is not str or not _CODE.fullmatch(code):
        raise RefusedError("numpy.dtype of something else than numbers or text")
    if len(flags) > 2 or not all(flag in (0, 1) for flag in flags):
        raise TypeError("a malformed dtype")
    return NumpyDtype(code)


def set_dtype_state(dtype: NumpyDtype, state: Any) -> None:
    """Take the byte order of a pickled dtype's state, refusing a state that numpy would not write."""
    kind, size_bytes = dtype.code[0], dtype.size_bytes
    layout = {"U": (size_bytes, 4, 8), "S": (size_bytes, 1, 0)}.get(kind, (-1, -1, 0))
    order = state[1] if type(state) is tuple and len(state) == 8 else None
    if type(order) is not str or order not in ("<", ">", "|"):
        raise RefusedError("numpy.dtype with a forged state")
    if state != (3, order, None, None, None, *layout):
        raise RefusedError("numpy.dtype with a forged state")
    object.__setattr__(dtype, "order", order)


def _reconstruct(args: tuple[Any, ...], spend: Spend) -> ArrayRef:
    if len(args) != 3 or args[0] != GlobalRef("numpy.ndarray") or args[1] != (0,) or args[2] not in (b"b", "b"):
        raise RefusedError("numpy._core.multiarray._reconstruct of something else than an array")
    return ArrayRef()


def set_array_state(array: ArrayRef, state: Any) -> None:
    """Fill a pickled array from its state (version, shape, dtype, column-major, bytes)."""
    _, shape, dtype, fortran, data = state
    _fill(array, dtype, shape, bool(fortran), data)


def _fill(array: ArrayRef, dtype: Any, shape: Any, fortran: bool, data: Any) -> None:
    if type(dtype) is not NumpyDtype or type(data) is not bytes:
        raise RefusedError("a numpy array of Python objects")
    if type(shape) is not tuple or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise TypeError("an array without a proper shape")
    if math.prod(shape) * dtype.size_bytes != len(data):
        raise ValueError("an array whose bytes do not fit its shape")
    for name, value in (("dtype", dtype), ("shape", shape), ("fortran", fortran), ("data", data)):
        object.__setattr__(array, name, value)


def _from_buffer(args: tuple[Any, ...], spend: Spend) -> ArrayRef:
    data, dtype, shape, order = args
    if order not in ("C", "F"):
        raise TypeError("an array in an unknown order")
    if type(data) is bytearray:
        spend(len(data))
        data = bytes(data)
    array = ArrayRef()
    _fill(array, dtype, shape, order == "F", data)
    return array


def _scalar(args: tuple[Any, ...], spend: Spend) -> Any:
    dtype, data = args
    array = ArrayRef()
    _fill(array, dtype, (), False, data)
    kind, code = dtype.code[0], dtype.code
    is_big = dtype.order == ">"
    if kind == "b":
        return data != b"\0"
    if kind in "iu":
        return int.from_bytes(data, "big" if is_big else "little", signed=kind == "i")
    if kind == "S":
        return bytes(data).rstrip(b"\0")
    if kind == "U":
        return data.decode("utf-32-be" if is_big else "utf-32-le").rstrip("\0")
    if code not in _SCALARS:
        return array  # no such number in Python (long double)
    numbers = struct.unpack((">" if is_big else "<") + _SCALARS[code], data)
    return complex(*numbers) if kind == "c" else numbers[0]


ARRAYS: dict[str, Rule] = {
    "numpy.dtype": Rule(_dtype),
    "numpy.ndarray": Rule(),
    "numpy._core.multiarray._reconstruct": Rule(_reconstruct),
    "numpy._core.multiarray.scalar": Rule(_scalar),
    "numpy._core.numeric._frombuffer": Rule(_from_buffer),
}
