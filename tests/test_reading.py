"""Bytes of parts of tensors, read through extents of any shape and stride, compared with numpy."""

from __future__ import annotations

import os
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp_tools.errors import CheckpointIncompleteError, DamagedCheckpointError
from accel_fsdp_tools.extents import (
    Box,
    ByteRange,
    DiskTensor,
    Extent,
    LazyExtents,
    Part,
    Run,
    get_whole,
    is_row_major,
    split_into_runs,
)
from accel_fsdp_tools.formats import reading
from accel_fsdp_tools.formats.reading import (
    FileCache,
    check_item,
    read_array,
    read_blocks,
    read_into,
    read_part,
)

SIZES = {"uint8": 1, "uint16": 2, "int32": 4, "int64": 8, "complex128": 16}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "data.bin"


@dataclass
class Case:
    """A tensor cut into boxes, each stored with its own order of dimensions, gaps, and at any byte."""

    values: np.ndarray
    tensor: DiskTensor
    content: bytes


def _cut(draw: st.DrawFn, box: Box) -> Iterator[Box]:
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not dims or not draw(st.booleans()):
        yield box
        return
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.sizes[dim] - 1))
    for offset, size in ((0, at), (at, box.sizes[dim] - at)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += offset
        sizes[dim] = size
        yield from _cut(draw, Box(tuple(offsets), tuple(sizes)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(list(SIZES)))
    size = SIZES[dtype]
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    numel = int(np.prod(shape))
    values = np.frombuffer(np.random.default_rng(numel).bytes(numel * size), dtype=dtype).reshape(shape)
    content = bytearray(draw(st.integers(0, 9)))
    extents = []
    for box in _cut(draw, get_whole(shape)):
        order = draw(st.permutations(range(len(shape))))
        step = draw(st.sampled_from([1, 1, 3, 2000]))
        strides = [0] * len(shape)
        for dim in reversed(order):
            strides[dim] = step
            step *= box.sizes[dim]
        length = 1 + sum((each - 1) * stride for each, stride in zip(box.sizes, strides, strict=True))
        stored = np.zeros(length, dtype=dtype)
        view = np.lib.stride_tricks.as_strided(stored, box.sizes, [each * size for each in strides])
        view[...] = values[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        skipped = draw(st.integers(0, 3)) * size
        data = bytes(skipped) + stored.tobytes()
        item = ByteRange("", len(content), len(data), zlib.crc32(data))
        kept = None if is_row_major(box.sizes, strides) else tuple(strides)
        extents.append(Extent(box, item, kept, skipped))
        content += data + bytes(draw(st.integers(0, 5)))
    draw(st.randoms()).shuffle(extents)
    return Case(values, DiskTensor("w", dtype, shape, tuple(extents)), bytes(content))


@st.composite
def cases_with_parts(draw: st.DrawFn) -> tuple[Case, Part]:
    case = draw(cases())
    shape = case.values.shape
    if draw(st.booleans()):
        start = draw(st.integers(0, case.values.size))
        return case, Run(start, draw(st.integers(0, case.values.size - start)))
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - offset)) for offset, size in zip(offsets, shape, strict=True))
    return case, Box(offsets, sizes)


def put(case: Case, path: Path) -> DiskTensor:
    """Write the case's bytes and return its tensor with extents in that file."""
    path.write_bytes(case.content)
    extents = tuple(
        Extent(
            each.part,
            ByteRange(str(path), each.bytes.offset, each.bytes.length, each.bytes.crc32),
            each.strides,
            each.start,
        )
        for each in case.tensor.extents
    )
    return DiskTensor("w", case.tensor.dtype, case.tensor.shape, extents)


def expect(case: Case, part: Part) -> bytes:
    flat = case.values.reshape(-1)
    return b"".join(
        flat[piece.start : piece.start + piece.length].tobytes() for piece in split_into_runs(part, case.values.shape)
    )


@given(cases_with_parts())
@settings(deadline=None)
def test_any_part_through_any_extents(scratch: Path, case_and_part: tuple[Case, Part]) -> None:
    case, part = case_and_part
    tensor = put(case, scratch)
    assert read_part(tensor, part) == expect(case, part)
    assert b"".join(bytes(block) for _, block in read_blocks(tensor, part)) == expect(case, part)
    assert all(check_item(extent.bytes) for extent in tensor.extents)


@given(cases_with_parts(), st.integers(1, 4))
@settings(deadline=None)
def test_blocks_of_any_size(scratch: Path, case_and_part: tuple[Case, Part], num_elements: int) -> None:
    case, part = case_and_part
    size = SIZES[case.tensor.dtype]
    tensor = put(case, scratch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_BYTES", num_elements * size)
        patch.setattr(reading, "STRIDED_BLOCK_BYTES", num_elements * size)
        blocks = [(piece, bytes(block)) for piece, block in read_blocks(tensor, part)]
    assert all(0 < len(block) <= num_elements * size for _, block in blocks)
    assert all(block == expect(case, piece) for piece, block in blocks)
    assert b"".join(block for _, block in blocks) == expect(case, part)


def test_holes_and_overlaps_that_cancel_out(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(8)))
    item = ByteRange(str(path), 0, 8)
    parts = [Box((0,), (2,)), Box((0,), (2,))]
    tensor = DiskTensor("w", "uint8", (4,), tuple(Extent(part, item) for part in parts))
    with pytest.raises(DamagedCheckpointError, match="hole or overlap") as caught:
        read_part(tensor)
    assert caught.value.fqn == "w"
    assert read_part(DiskTensor("w", "uint8", (4,), tensor.extents[:1]), Run(0, 2)) == b"\0\1"


def test_a_target_of_the_wrong_length(tmp_path: Path) -> None:
    tensor = DiskTensor("w", "int32", (2,), (Extent(get_whole((2,)), ByteRange(str(tmp_path), 0, 8)),))
    with FileCache() as files, pytest.raises(ValueError, match="7 bytes for 2 elements of 4"):
        read_into(tensor, Run(0, 2), memoryview(bytearray(7)), files=files)


def test_missing_and_short_files(tmp_path: Path) -> None:
    item = ByteRange(str(tmp_path / "x"), 2, 8)
    tensor = DiskTensor("w", "uint8", (8,), (Extent(get_whole((8,)), item),))
    with pytest.raises(CheckpointIncompleteError, match="missing"):
        read_part(tensor)
    (tmp_path / "x").write_bytes(bytes(9))
    with pytest.raises(DamagedCheckpointError, match="ends before byte 10") as caught:
        read_part(tensor)
    assert caught.value.path == str(tmp_path / "x")


def test_a_cache_keeps_few_files_open(tmp_path: Path) -> None:
    tensors = []
    for number in range(10):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]))
        tensors.append(DiskTensor("w", "uint8", (), (Extent(Box((), ()), ByteRange(str(path), 0, 1)),)))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with FileCache(limit=3) as files:
        assert [read_part(tensor, files=files)[0] for tensor in tensors * 2] == [*range(10)] * 2
        assert len(os.listdir("/proc/self/fd")) <= before + 3  # noqa: PTH208
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_lazy_extents_are_looked_up_once(tmp_path: Path) -> None:
    asked: list[int] = []
    parts = [Box((start,), (2,)) for start in range(0, 10, 2)]

    def resolve(index: int) -> Extent:
        asked.append(index)
        return Extent(parts[index], ByteRange("/none", index, 2))

    tensor = DiskTensor("w", "uint8", (10,), LazyExtents(parts, resolve))
    assert tensor.parts == tuple(parts)
    assert asked == []
    found = list(tensor.find_extents(Run(3, 3)))
    assert [extent.part for extent in found] == parts[1:3]
    assert tensor.extents[1:3] == found
    assert tensor.extents[-1].bytes.offset == 4
    assert asked == [1, 2, 4]
    with pytest.raises(IndexError):
        _ = tensor.extents[5]
    assert len(list(tensor.extents)) == 5


def test_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(16)))

    def read(dtype: str, shape: tuple[int, ...], part: Part | None = None) -> np.ndarray:
        array = read_array(
            DiskTensor("w", dtype, shape, (Extent(get_whole(shape), ByteRange(str(path), 0, 16)),)), part
        )
        assert isinstance(array, np.ndarray)
        return array

    assert read("int32", (2, 2)).tolist() == np.arange(16, dtype=np.uint8).view("<i4").reshape(2, 2).tolist()
    assert read("bfloat16", (8,)).dtype == np.uint16
    assert read("float8_e4m3fn", (4, 4), Box((1, 0), (1, 4))).tolist() == [[4, 5, 6, 7]]
    assert read("bool", (16,), Run(2, 2)).dtype == np.bool_
    assert read("complex64", (2,)).dtype == np.complex64


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(1 << 28)
    shape = (1 << 13, 1 << 13)
    tensor = DiskTensor("w", "float32", shape, (Extent(get_whole(shape), ByteRange(str(path), 0, 1 << 28, 0)),))
    tracemalloc.start()
    try:
        assert sum(len(block) for _, block in read_blocks(tensor)) == 1 << 28
        check_item(tensor.extents[0].bytes)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
