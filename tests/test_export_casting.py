"""Casts without torch against torch's, bit for bit: all 16-bit and 8-bit inputs, edges and random ones of others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp_tools.errors import UnsupportedError
from accel_fsdp_tools.export.casting import CastCounts, cast_block
from accel_fsdp_tools.export.casts import SOURCE_DTYPES, TARGET_DTYPES, can_cast
from tests.checkpoints import get_bytes

pytestmark = pytest.mark.usefixtures("engine")

PAIRS = [(source, target) for source in SOURCE_DTYPES for target in TARGET_DTYPES if source != target]
FLOAT8 = [name for name in SOURCE_DTYPES if name.startswith("float8")]


def _view(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bits.tobytes()), dtype=getattr(torch, dtype))


def _cast(values: torch.Tensor, target: str) -> tuple[torch.Tensor, int]:
    out = bytearray(values.numel() * getattr(torch, target).itemsize)
    counts = cast_block(memoryview(get_bytes(values)), str(values.dtype)[6:], target, memoryview(out))
    return torch.frombuffer(out, dtype=getattr(torch, target)), counts.num_overflowed


def _check(values: torch.Tensor, target: str) -> None:
    """Require torch's bits, and a count of what became infinite. NaNs of float64: any NaN, torch mixes two."""
    expected = values.to(getattr(torch, target))
    found, num_overflowed = _cast(values, target)
    if (values.dtype, target) == (torch.float64, "bfloat16"):
        assert torch.equal(found.isnan(), expected.isnan())
        found, expected = (
            found.nan_to_num(7.0, posinf=torch.inf, neginf=-torch.inf),
            expected.nan_to_num(7.0, posinf=torch.inf, neginf=-torch.inf),
        )
    assert get_bytes(found) == get_bytes(expected)
    assert num_overflowed == int((expected.double().isinf() & values.double().isfinite()).sum())


def _list_edges(dtype: str) -> np.ndarray:
    """Bits around every power of two and every tie between neighbours of the target dtypes."""
    bits, unsigned, fraction = (64, np.uint64, 52) if dtype == "float64" else (32, np.uint32, 23)
    exponents = np.arange(0, 1 << (bits - 1 - fraction), dtype=unsigned) << unsigned(fraction)
    tails = [0, 1, (1 << fraction) - 1]
    for kept in (7, 10, 23):  # bits of the fraction in bfloat16, float16, float32
        if kept < fraction:
            step = 1 << (fraction - kept)
            ties = [step // 2, step + step // 2, (1 << fraction) - step // 2]
            tails += [step, *(tie + off for tie in ties for off in (-1, 0, 1) if tie + off < 1 << fraction)]
    for drop in range(1, 12):  # ties of the targets' subnormals
        tails += [(1 << (fraction - 10 + drop)) // 2 * odd for odd in (1, 3) if 0 <= fraction - 10 + drop <= fraction]
    positive = (exponents[:, None] | np.array(tails, unsigned) & unsigned((1 << fraction) - 1)).reshape(-1)
    return np.concatenate([positive, positive | unsigned(1 << (bits - 1))])


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] in ("float16", "bfloat16")])
def test_all_16_bit_values(source: str, target: str) -> None:
    _check(_view(np.arange(65536, dtype=np.uint16), source), target)


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] in FLOAT8])
def test_all_8_bit_values(source: str, target: str) -> None:
    codes = _view(np.arange(256, dtype=np.uint8), source)
    found, num_overflowed = _cast(codes, target)
    expected = codes.to(getattr(torch, target))
    assert get_bytes(found) == get_bytes(expected)
    assert num_overflowed == int((expected.isinf() & codes.float().isfinite()).sum())


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] in ("float32", "float64")])
def test_edges_and_random_bits(source: str, target: str) -> None:
    edges = _list_edges(source)
    _check(_view(edges, source), target)
    random = np.random.default_rng(5)
    anywhere = random.integers(0, 1 << (8 * edges.itemsize) - 1, 300_000, dtype=edges.dtype, endpoint=True)
    _check(_view(anywhere, source), target)
    usual = random.standard_normal(300_000) * 10.0 ** random.integers(-48, 48, 300_000)
    _check(torch.from_numpy(usual).to(getattr(torch, source)), target)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40), st.sampled_from(["bfloat16", "float16"])
)
def test_numbers_round_as_in_torch(values: list[float], target: str) -> None:
    _check(torch.tensor(values, dtype=torch.float32), target)


@pytest.mark.parametrize("count", [0, 1, 65535, 65536, 65537, 200_001])
def test_blocks_of_any_length_and_alignment(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    data = bytearray(b"xyz") + bytearray(get_bytes(values))
    out = bytearray(2 * count + 1)
    counts = cast_block(memoryview(data)[3:], "float32", "bfloat16", memoryview(out)[1:])
    assert counts == CastCounts(0)
    assert bytes(out[1:]) == get_bytes(values.bfloat16())


def test_overflow_is_counted_and_infinities_are_not() -> None:
    values = torch.tensor([65504.0, 65519.9, 65520.0, -1e9, torch.inf, -torch.inf, torch.nan])
    assert _cast(values, "float16")[1] == 2
    assert _cast(torch.tensor([1e300, -1e300, 1.0], dtype=torch.float64), "bfloat16")[1] == 2
    assert _cast(torch.tensor([1e300, 1e30], dtype=torch.float64), "float16")[1] == 2
    assert CastCounts(1) + CastCounts(2) == CastCounts(3)


def test_same_dtype_is_a_copy() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    for dtype in ("float16", "bfloat16"):
        assert get_bytes(_cast(_view(bits, dtype), dtype)[0]) == bits.tobytes()


@pytest.mark.parametrize(
    ("source", "target"), [("int64", "float32"), ("bool", "float16"), ("float32", "int8"), ("complex64", "float32")]
)
def test_only_floating_dtypes_are_cast(source: str, target: str) -> None:
    assert not can_cast(source, target)
    with pytest.raises(UnsupportedError, match="stay as they are"):
        cast_block(memoryview(bytearray(8)), source, target, memoryview(bytearray(8)))


def test_buffers_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="do not become"):
        cast_block(memoryview(bytearray(8)), "float32", "bfloat16", memoryview(bytearray(5)))
