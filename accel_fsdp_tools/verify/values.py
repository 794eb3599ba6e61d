"""NaN, infinity and zeros in the bytes of a tensor, at the speed of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Patterns without the sign: of infinity, above which lie the NaNs. None: the format has no infinity.
_INFINITY = {
    "bfloat16": ("uint16", 0x7F80),
    "float16": ("uint16", 0x7C00),
    "complex32": ("uint16", 0x7C00),
    "float8_e5m2": ("uint8", 0x7C),
}
_ONLY_NAN = {"float8_e4m3fn": 0x7F}  # pattern without the sign
_FLOATS = {"float32": "float32", "float64": "float64", "complex64": "float32", "complex128": "float64"}

SCANNED_DTYPES = frozenset({*_INFINITY, *_ONLY_NAN, *_FLOATS})
"""Dtypes in which NaN can be told from numbers; others are left alone."""


@dataclass
class Values:
    """What was seen of a tensor so far. `num_elements` counts numbers: two for a complex element."""

    num_elements: int = 0
    num_nan: int = 0
    num_inf: int = 0
    is_zero: bool = True

    def add(self, other: Values) -> None:
        """Join what was seen of another part."""
        self.num_elements += other.num_elements
        self.num_nan += other.num_nan
        self.num_inf += other.num_inf
        self.is_zero = self.is_zero and other.is_zero

    def look(self, block: memoryview, dtype: str) -> None:
        """Look at the bytes of whole elements, in any order. Memory: little more than the block, if it has NaNs."""
        if not len(block):
            return
        if dtype in _FLOATS:
            self._look_at_floats(np.frombuffer(block, _FLOATS[dtype]))
        elif dtype in _INFINITY:
            word, infinity = _INFINITY[dtype]
            self._look_at_patterns(np.frombuffer(block, word), infinity, infinity)
        else:
            self._look_at_patterns(np.frombuffer(block, "uint8"), None, _ONLY_NAN[dtype] - 1)

    def _look_at_floats(self, numbers: Any) -> None:
        self.num_elements += numbers.size
        with np.errstate(all="ignore"):
            low, high = numbers.min(), numbers.max()  # a NaN anywhere comes out of both
        if np.isfinite(low) and np.isfinite(high):
            self.is_zero = self.is_zero and low == 0 and high == 0
            return
        self.is_zero = False
        self.num_nan += int(np.count_nonzero(np.isnan(numbers)))
        self.num_inf += int(np.count_nonzero(np.isinf(numbers)))

    def _look_at_patterns(self, patterns: Any, infinity: int | None, largest: int) -> None:
        """`largest` is the greatest pattern that is no NaN."""
        self.num_elements += patterns.size
        bits = patterns.dtype.itemsize * 8
        sign = 1 << (bits - 1)
        # As signed numbers the greatest is the greatest positive one, as unsigned the greatest negative one, if any.
        positive = int(patterns.view(f"int{bits}").max())
        negative = int(patterns.max())
        top = max(positive, negative - sign if negative >= sign else 0, 0)
        self.is_zero = self.is_zero and top == 0
        if top > largest or top == infinity:
            bare = patterns & patterns.dtype.type(sign - 1)
            self.num_nan += int(np.count_nonzero(bare > largest))
            if infinity is not None:
                self.num_inf += int(np.count_nonzero(bare == infinity))
