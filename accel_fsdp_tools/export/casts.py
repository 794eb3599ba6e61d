"""Which dtypes can be cast to which. To know that takes no numpy, which takes as long to load as all the rest."""

from __future__ import annotations

TARGET_DTYPES = ("float32", "bfloat16", "float16")
SOURCE_DTYPES = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def can_cast(source_dtype: str, target_dtype: str) -> bool:
    """Whether `casting.cast_block` knows this pair: any floating dtype to itself or to one of `TARGET_DTYPES`."""
    return source_dtype in SOURCE_DTYPES and (target_dtype in TARGET_DTYPES or target_dtype == source_dtype)
