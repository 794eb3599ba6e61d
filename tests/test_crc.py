"""`crc32` is zlib's, whatever computes it."""

from __future__ import annotations

import sys
import types
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fsdp_tools import crc
from tests.engines import use_engine


@pytest.fixture
def fresh() -> Iterator[None]:
    with use_engine("python"):
        yield


@pytest.mark.usefixtures("engine")
@given(st.integers(0, 100_000), st.integers(0, 7), st.integers(0, 2**32 - 1), st.booleans())
def test_it_is_zlibs_for_any_size_alignment_and_start(size: int, skip: int, before: int, is_frozen: bool) -> None:
    data = bytearray(size + skip)
    data[::7] = bytes(range(256))[:1] * len(data[::7])
    data[::3] = b"x" * len(data[::3])
    view = memoryview(bytes(data) if is_frozen else data)[skip:]
    assert crc.crc32(view, before) == zlib.crc32(view, before)


@pytest.mark.usefixtures("engine")
def test_a_view_that_is_not_in_one_piece_is_refused() -> None:
    """Not read from wherever: zlib says it, and others must."""
    with pytest.raises((TypeError, BufferError)):
        crc.crc32(memoryview(bytearray(1 << 20))[::2])


@pytest.mark.usefixtures("engine")
@given(st.binary(max_size=50), st.binary(max_size=50), st.integers(0, 70_000))
def test_pieces_are_joined(first: bytes, second: bytes, num_zeros: int) -> None:
    second += bytes(num_zeros)
    assert crc.combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def _fake(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    package, module = types.ModuleType("isal"), types.ModuleType("isal.isal_zlib")
    module.crc32 = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "isal", package)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", module)


@pytest.mark.usefixtures("fresh")
def test_a_faster_library_is_used_if_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, lambda block, before: zlib.crc32(block, before))
    assert crc.find_crc32()[0] == "isal"
    block = memoryview(bytearray(100_000))
    assert crc.crc32(block, 5) == zlib.crc32(block, 5)


@pytest.mark.usefixtures("fresh")
def test_one_that_does_not_agree_or_is_not_there_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, lambda block, before: zlib.crc32(block))
    monkeypatch.setattr(crc, "_LIBRARIES", ("libthat_does_not_exist.so", "libc.so.6"))
    monkeypatch.setitem(sys.modules, "zlib_ng", None)
    assert crc.find_crc32() == ("zlib", zlib.crc32)
