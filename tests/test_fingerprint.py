"""Fingerprints: equal however a tensor is cut, different after any small change, the same by every way of summing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accel_fsdp_tools.errors import UnsupportedError, UsageError
from accel_fsdp_tools.extents import DTYPE_SIZES, Box, Part, Run, get_whole, split_into_runs
from accel_fsdp_tools.fingerprint import (
    Fingerprint,
    combine,
    fingerprint_bytes,
    fingerprint_tensor,
    fingerprint_value,
    iterate_blocks,
)
from accel_fsdp_tools.weighted_sums import MASK, PERIOD, get_multipliers, get_weights, sum_on_device

Shape = tuple[int, ...]

# Sizes that end inside words, cross the block of weights, and have short and long rows.
SHAPES = [(), (1,), (7,), (3, 3), (5, 8), (4, 3, 6), (2, 1, 9), (300, 70), (3, 70_001), (70_001, 2), (20, 64, 128)]

pytestmark = pytest.mark.usefixtures("engine")


def _make_bytes(dtype: str, shape: Shape, seed: int = 0) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(seed)
    high = 2 if dtype == "bool" else 256
    return generator.integers(0, high, math.prod(shape) * DTYPE_SIZES[dtype], dtype=np.uint8)


def _make_tensor(dtype: str, shape: Shape, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(_make_bytes(dtype, shape, seed)).view(getattr(torch, dtype)).reshape(shape)


def _take(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    if isinstance(part, Run):
        return tensor.reshape(-1)[part.start : part.start + part.length]
    return tensor[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))]


def _of(tensor: torch.Tensor) -> Fingerprint:
    return fingerprint_tensor(tensor, get_whole(tuple(tensor.shape)), tuple(tensor.shape))


@st.composite
def _partitions(draw: st.DrawFn, shape: Shape) -> list[Part]:
    """Runs, or boxes cut along every dimension, or boxes with one of them cut into runs; in any order."""
    parts: list[Part]
    if draw(st.booleans()):
        cuts = sorted({0, math.prod(shape), *draw(st.lists(st.integers(0, math.prod(shape)), max_size=5))})
        parts = [Run(a, b - a) for a, b in itertools.pairwise(cuts)]
    else:
        grid = []
        for size in shape:
            cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
            grid.append([(a, b - a) for a, b in itertools.pairwise(cuts)])
        boxes = [Box(tuple(a for a, _ in c), tuple(n for _, n in c)) for c in itertools.product(*grid)]
        parts = list(boxes)
        chosen = draw(st.integers(0, len(boxes)))
        if chosen < len(boxes) and boxes[chosen].numel < 2000:
            parts[chosen : chosen + 1] = [Run(p.start, p.length) for p in split_into_runs(boxes[chosen], shape)]
    return draw(st.permutations(parts))


# The definition


def test_value_is_the_documented_one() -> None:
    """By Python's own integers, from docs/fingerprints.md. A change here is a change of VERSION."""

    def splitmix64(seed: int, index: int) -> int:
        z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    data = _make_bytes("uint8", (4 * (PERIOD + 10) + 3,)).tobytes()
    padded = data + b"\0" * 5
    total = weighted = 0
    for i in range(len(padded) // 4):
        word = int.from_bytes(padded[4 * i : 4 * i + 4], "little")
        total += word << (32 * (i % 2))
        weighted += word * (splitmix64(2, i % PERIOD) | 1) * (splitmix64(3, i // PERIOD) | 1)
    expected = Fingerprint(total & MASK, weighted & MASK, len(data))
    assert fingerprint_bytes(data, "uint8", Run(0, len(data)), (len(data),)) == expected


def test_values_are_kept() -> None:
    tensor = torch.arange(200_000, dtype=torch.float32).reshape(400, 500)
    assert str(_of(tensor)) == "1:b3396d2e6f975800:60b00b75702da480:800000"
    assert str(fingerprint_value({"lr": 1e-3, "betas": (0.9, 0.999)})) == "1:78f8d11a54a2e8b2:5d11eb328d291b9e:136"


def test_any_two_weights_of_a_block_differ_in_their_low_33_bits() -> None:
    # So the swap of two unequal words of one block, or of two at the same place of two blocks, cannot go unseen.
    for words in (get_weights(), get_multipliers(0, PERIOD)):
        assert (words & np.uint64(1)).all()
        assert len(np.unique(words & np.uint64((1 << 33) - 1))) == len(words)


# Equal


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "complex128"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_equal_under_any_partition(dtype: str, shape: Shape, data: st.DataObject) -> None:
    tensor = _make_tensor(dtype, shape)
    expected = _of(tensor)
    parts = data.draw(_partitions(shape))
    assert combine(fingerprint_tensor(_take(tensor, part), part, shape) for part in parts) == expected
    on_device = (
        sum_on_device(_take(tensor, part).contiguous().reshape(-1), part, shape) for part in parts if part.numel
    )
    totals, weighted = zip(*on_device, strict=True)
    assert (sum(totals) & MASK, sum(weighted) & MASK) == (expected.total, expected.weighted)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPE_SIZES)
def test_every_dtype(dtype: str) -> None:
    shape = (6, 10)
    data = _make_bytes(dtype, shape)
    expected = fingerprint_bytes(data, dtype, get_whole(shape), shape)
    assert expected.num_bytes == len(data)
    tensor = torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
    assert _of(tensor) == expected
    assert Fingerprint(*sum_on_device(tensor.reshape(-1), get_whole(shape), shape), len(data)) == expected
    columns = [Box((0, 0), (6, 3)), Box((0, 3), (6, 7))]
    assert combine(fingerprint_tensor(_take(tensor, box).clone(), box, shape) for box in columns) == expected


@pytest.mark.parametrize("offset", range(9))
def test_bytes_at_any_address(offset: int) -> None:
    shape = (5, 20_001)
    data = _make_bytes("bfloat16", shape)
    moved = np.zeros(len(data) + 16, np.uint8)
    moved[offset : offset + len(data)] = data
    view = moved[offset : offset + len(data)]
    for part in (get_whole(shape), Run(3, 5 * 20_001 - 3), Box((0, 1), (5, 20_000)), Box((0, 2), (5, 1024))):
        taken = _take(torch.from_numpy(data).view(torch.bfloat16).reshape(shape), part).contiguous()
        expected = fingerprint_tensor(taken, part, shape)
        start = offset + 6 if isinstance(part, Run) else offset
        if part in (get_whole(shape), Run(3, 5 * 20_001 - 3)):
            buffer = view if start == offset else view[6:]
        else:
            raw = taken.reshape(-1).view(torch.uint8).numpy()
            moved2 = np.zeros(len(raw) + 16, np.uint8)
            moved2[offset : offset + len(raw)] = raw
            buffer = moved2[offset : offset + len(raw)]
        assert fingerprint_bytes(buffer, "bfloat16", part, shape) == expected
    assert fingerprint_bytes(data.tobytes(), "bfloat16", get_whole(shape), shape) == fingerprint_bytes(
        memoryview(view), "bfloat16", get_whole(shape), shape
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    st.sampled_from(["int8", "float16", "float32", "complex64"]),
    st.randoms(),
)
def test_memory_layout_does_not_matter(shape: Shape, dtype: str, random: Any) -> None:
    tensor = _make_tensor(dtype, shape)
    expected = _of(tensor)
    order = random.sample(range(len(shape)), len(shape))
    inverse = [order.index(dim) for dim in range(len(shape))]
    scattered = tensor.permute(order).contiguous().permute(inverse)
    assert _of(scattered) == expected
    spread = torch.empty((*shape, 2), dtype=tensor.dtype)
    spread[..., 0] = tensor
    assert _of(spread[..., 0]) == expected
    whole = Run(0, tensor.numel())
    assert fingerprint_tensor(spread[..., 0], whole, shape) == expected


def test_blocks_of_a_scattered_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_fsdp_tools.fingerprint._DEVICE_CHUNK", 50)
    tensor = _make_tensor("float32", (7, 9, 11))
    assert _of(tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == _of(tensor)
    conjugate = _make_tensor("complex64", (6, 30))
    assert _of(conjugate.conj()) == _of(conjugate.conj().resolve_conj()) != _of(conjugate)


@given(st.lists(st.integers(0, 8), max_size=4).map(tuple), st.integers(1, 60))
def test_blocks_are_consecutive(sizes: Shape, limit: int) -> None:
    position = 0
    for offset, box in iterate_blocks(sizes, limit):
        if box.numel == 0:
            continue
        assert offset == position
        assert box.numel <= limit
        assert [piece[0] for piece in split_into_runs(box, sizes)] == [offset]
        position += box.numel
    assert position == math.prod(sizes)


# Different


SMALL_SHAPES = [(9,), (3, 3), (4, 6), (2, 3, 5)]


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
@given(data=st.data())
def test_any_flipped_bit_is_seen(dtype: str, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SMALL_SHAPES))
    before = _make_bytes(dtype, shape, data.draw(st.integers(0, 5)))
    after = before.copy()
    after[data.draw(st.integers(0, len(before) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    one, other = (fingerprint_bytes(each, dtype, get_whole(shape), shape) for each in (before, after))
    assert one.total != other.total
    assert one.weighted != other.weighted


def test_every_bit_of_a_tensor() -> None:
    before = _make_bytes("float32", (9,))
    whole = Run(0, 9)
    seen = {fingerprint_bytes(before, "float32", whole, (9,))}
    for byte, bit in itertools.product(range(len(before)), range(8)):
        after = before.copy()
        after[byte] ^= 1 << bit
        seen.add(fingerprint_bytes(after, "float32", whole, (9,)))
    assert len(seen) == 1 + 8 * len(before)


@pytest.mark.parametrize("distance", [1, 2, 3, 4096, 32_768, 65_536, 131_072])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_two_swapped_elements_are_seen(distance: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(distance)
    tensor = torch.randn(140_000, generator=generator).to(dtype)
    before = _of(tensor)
    for place in torch.randint(0, 140_000 - distance, (30,), generator=generator).tolist():
        swapped = tensor.clone()
        swapped[[place, place + distance]] = tensor[[place + distance, place]]
        if tensor[place] != tensor[place + distance]:
            assert _of(swapped).weighted != before.weighted


@pytest.mark.parametrize("distance", [1, 2, 4096, 65_536])
def test_swapped_signs_are_seen(distance: int) -> None:
    # The worst change: only the highest bit of two words.
    tensor = torch.full((70_000,), 1.5)
    tensor[100] = -1.5
    swapped = torch.full((70_000,), 1.5)
    swapped[100 + distance] = -1.5
    assert _of(tensor).weighted != _of(swapped).weighted


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=40), st.data())
def test_any_permutation_is_seen(values: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(values))
    assume(other != values)
    assert _of(torch.tensor(values, dtype=torch.float32)) != _of(torch.tensor(other, dtype=torch.float32))


@pytest.mark.parametrize("values", [[0, 3, 1, 2], [1, 2, 2, 1, 5, 0], list(range(1000))], ids=["4", "6", "1000"])
def test_exchanged_shards_are_seen(values: list[int]) -> None:
    # Plain index weights miss [0, 3 | 1, 2]: 0*0 + 3*1 + 1*2 + 2*3 = 1*0 + 2*1 + 0*2 + 3*3.
    half = len(values) // 2
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        tensor = torch.tensor([value % 256 for value in values]).to(dtype)
        exchanged = torch.cat([tensor[half:], tensor[:half]])
        assert _of(tensor) != _of(exchanged)


@pytest.mark.parametrize("size", [2, 3, 5, 64, 300])
def test_transposition_is_seen(size: int) -> None:
    for tensor in (torch.arange(size * size).float().reshape(size, size), torch.randn(size, size)):
        assert _of(tensor) != _of(tensor.t())
        assert _of(tensor.bfloat16()) != _of(tensor.bfloat16().t())


def test_shifts_and_missing_parts_are_seen() -> None:
    tensor = torch.randn(100)
    assert _of(tensor) != _of(tensor.roll(1))
    zeros = torch.zeros(10)
    # All zero: only the number of bytes tells.
    assert fingerprint_tensor(zeros[:5], Run(0, 5), (10,)) != _of(zeros)
    assert combine([_of(zeros), _of(zeros)]) != _of(zeros)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.float8_e4m3fn])
def test_a_cast_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 50).float()
    assert _of(tensor) != _of(tensor.to(dtype))
    there_and_back = (tensor + 0.001).to(torch.bfloat16).float()
    assert _of(tensor + 0.001) != _of(there_and_back)


def test_no_collision_among_similar_tensors() -> None:
    """Tensors that differ in little: every arrangement of small numbers, and of the same numbers."""
    arrangements = [
        np.array(list(itertools.product(range(-2, 3), repeat=6)), np.int32),  # 15 625
        np.array(list(itertools.permutations(range(8))), np.float32),  # 40 320
        np.array(list(itertools.product((-1, 1), repeat=14)), np.float32),  # 16 384, by the highest bit alone
    ]
    for rows in arrangements:
        whole, shape = Run(0, rows.shape[1]), (rows.shape[1],)
        found = {fingerprint_bytes(row, "float32", whole, shape).weighted for row in rows}
        assert len(found) == len(rows)


def test_no_collision_among_random_changes() -> None:
    """By linearity a change goes unseen where its own weighted sum is zero, so that is what is looked at: 600 000."""
    generator = np.random.default_rng(0)
    places = generator.integers(0, 1 << 30, (200_000, 3))
    weights = get_weights()[places % PERIOD] * get_multipliers(0, 1 << 14)[places // PERIOD]
    changes = [
        generator.integers(1, 1 << 32, places.shape, dtype=np.uint64),
        generator.integers(1, 4, places.shape, dtype=np.uint64) << np.uint64(30),  # the highest bits only
        np.broadcast_to(np.array([1 << 31, 1 << 31, 0], np.uint64), places.shape),  # two signs: 33 bits are left of 64
    ]
    assert (places[:, 0] != places[:, 1]).all()
    for change in changes:
        assert np.add.reduce(weights * change, axis=1).all()


def test_single_elements_with_an_odd_stride() -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    for taken in (tensor[1:2, 2], tensor[1:2, 1:2], tensor.t()[0:1, 3:4]):
        assert taken.is_contiguous()
        assert _of(taken) == _of(taken.clone())


# The rest


def test_adding_up() -> None:
    a, b = Fingerprint(MASK, 5, 1), Fingerprint(1, MASK, 2)
    assert a + b == b + a == Fingerprint(0, 4, 3)
    assert combine([]) == Fingerprint()


@given(st.integers(0, MASK), st.integers(0, MASK), st.integers(0, 1 << 50))
def test_text_form(total: int, weighted: int, num_bytes: int) -> None:
    fingerprint = Fingerprint(total, weighted, num_bytes)
    assert Fingerprint.parse(str(fingerprint)) == fingerprint


@pytest.mark.parametrize("text", ["", "1", "1:2", "1:00:00:4", "x:1:2:3", "1:" + "0" * 16 + ":" + "g" * 16 + ":1"])
def test_no_fingerprint(text: str) -> None:
    with pytest.raises(UsageError, match="is no fingerprint"):
        Fingerprint.parse(text)
    with pytest.raises(UnsupportedError, match="version 2"):
        Fingerprint.parse("2:anything")


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="has 16 bytes, not 15"):
        fingerprint_bytes(bytes(15), "float32", Run(0, 4), (4,))
    with pytest.raises(UsageError, match="no known dtype"):
        fingerprint_bytes(b"", "float3", Run(0, 0), (4,))
    with pytest.raises(UsageError, match="is not Box"):
        fingerprint_tensor(torch.zeros(2, 3), Box((0, 0), (3, 2)), (6, 6))
    with pytest.raises(UnsupportedError, match="meta"):
        _of(torch.zeros(2, device="meta"))
    assert _of(torch.zeros(0, 3)) == Fingerprint()


def test_values_that_are_no_tensors() -> None:
    values = [None, True, False, 0, 1, 1.0, 0.0, -0.0, "", "1", b"", b"1", (), {}, (1,), {"a": 1}, {1: "a"}, 1j]
    assert len({fingerprint_value(value) for value in values}) == len(values)
    assert fingerprint_value({"a": 1, "b": (2, 3)}) == fingerprint_value({"b": [2, 3], "a": 1})
    assert fingerprint_value(float("nan")) == fingerprint_value(float("nan"))
    with pytest.raises(UnsupportedError, match="function has no fingerprint"):
        fingerprint_value({"hook": _of})


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_on_an_accelerator(dtype: str, shape: Shape) -> None:
    device = torch.accelerator.current_accelerator()
    tensor = _make_tensor(dtype, shape)
    assert _of(tensor.to(device)) == _of(tensor)
    if len(shape) > 1:
        assert _of(tensor.to(device).transpose(0, 1)) == _of(tensor.transpose(0, 1))
        box = Box((0, *(0,) * (len(shape) - 1)), (shape[0], *shape[1:-1], max(1, shape[-1] // 2)))
        taken = _take(tensor, box)
        assert fingerprint_tensor(taken.to(device), box, shape) == fingerprint_tensor(taken, box, shape)
