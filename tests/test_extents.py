"""Parts of tensors: intersections, matches and coverage, compared with numpy arrays that spell every element out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fsdp_tools.extents import (
    DTYPE_SIZES,
    Box,
    ByteRange,
    Coverage,
    DiskTensor,
    Extent,
    Part,
    Piece,
    Run,
    check_coverage,
    count_elements,
    get_row_major_strides,
    get_whole,
    intersect,
    is_row_major,
    match_parts,
    split_into_boxes,
    split_into_runs,
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> Part:
    numel = count_elements(shape)
    if draw(st.booleans()):
        start = draw(st.integers(0, numel))
        return Run(start, draw(st.integers(0, numel - start)))
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(0, size - offset)) for offset, size in zip(offsets, shape, strict=True)))


@st.composite
def shapes_with_parts(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Part]]:
    shape = draw(shapes)
    return shape, [draw(parts(shape)) for _ in range(count)]


def flat_indices(part: Part, shape: tuple[int, ...]) -> np.ndarray:
    """The global indices of a part's elements, in the part's order."""
    whole = np.arange(count_elements(shape)).reshape(shape)
    if isinstance(part, Run):
        return whole.reshape(-1)[part.start : part.start + part.length]
    slices = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
    return np.asarray(whole[slices]).reshape(-1)


@given(shapes_with_parts(1))
def test_runs_spell_out_a_part(case: tuple[tuple[int, ...], list[Part]]) -> None:
    shape, (part,) = case
    indices = flat_indices(part, shape)
    found = np.full(len(indices), -1)
    pieces = list(split_into_runs(part, shape))
    for piece in pieces:
        assert piece.length > 0
        assert (found[piece.offset : piece.offset + piece.length] == -1).all()
        found[piece.offset : piece.offset + piece.length] = np.arange(piece.start, piece.start + piece.length)
    assert (found == indices).all()
    assert pieces == sorted(pieces)
    boxes = split_into_boxes(part, shape)
    assert [index for box in boxes for index in flat_indices(box, shape)] == indices.tolist()
    assert len(boxes) <= max(1, 2 * len(shape))


@given(shapes_with_parts(2))
def test_intersection(case: tuple[tuple[int, ...], list[Part]]) -> None:
    shape, (a, b) = case
    common = intersect(a, b, shape)
    found = [index for part in common for index in flat_indices(part, shape)]
    expected = np.intersect1d(flat_indices(a, shape), flat_indices(b, shape))
    assert sorted(found) == expected.tolist()
    assert all(part.numel for part in common)


@given(shapes_with_parts(2))
def test_matches_connect_the_same_elements(case: tuple[tuple[int, ...], list[Part]]) -> None:
    shape, (a, b) = case
    left, right = flat_indices(a, shape), flat_indices(b, shape)
    copied = np.full(len(right), -1)
    for source, target, length in match_parts(a, b, shape):
        assert source >= 0
        assert target >= 0
        copied[target : target + length] = left[source : source + length]
    expected = np.where(np.isin(right, left), right, -1)
    assert (copied == expected).all()


@given(st.integers(0, 7).flatmap(shapes_with_parts))
def test_coverage(case: tuple[tuple[int, ...], list[Part]]) -> None:
    shape, listed = case
    counts = np.zeros(count_elements(shape), dtype=int)
    for part in listed:
        np.add.at(counts, flat_indices(part, shape), 1)
    coverage = check_coverage(shape, listed, limit=10_000)
    assert coverage.num_missing == (counts == 0).sum()
    assert coverage.num_repeated == np.maximum(counts - 1, 0).sum()
    assert coverage.outside == ()
    assert coverage.ok == bool((counts == 1).all())
    holes = [index for box in coverage.holes for index in flat_indices(box, shape)]
    assert sorted(holes) == np.flatnonzero(counts == 0).tolist()
    overlaps = [index for box in coverage.overlaps for index in flat_indices(box, shape)]
    assert sorted(overlaps) == np.flatnonzero(counts > 1).tolist()


@given(shapes, st.data())
def test_cutting_a_tensor_keeps_coverage(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = [get_whole(shape)]
    for _ in range(data.draw(st.integers(0, 8)) if shape else 0):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(0, box.sizes[dim]))
        low = Box(box.offsets, (*box.sizes[:dim], cut, *box.sizes[dim + 1 :]))
        high_offsets = (*box.offsets[:dim], box.offsets[dim] + cut, *box.offsets[dim + 1 :])
        boxes += [low, Box(high_offsets, (*box.sizes[:dim], box.sizes[dim] - cut, *box.sizes[dim + 1 :]))]
    assert check_coverage(shape, boxes) == Coverage()
    if any(box.numel for box in boxes):
        lost = next(box for box in boxes if box.numel)
        assert check_coverage(shape, [box for box in boxes if box is not lost]).num_missing == lost.numel
        assert check_coverage(shape, [*boxes, lost]).num_repeated == lost.numel


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((4,), Box((3,), (2,))),
        ((4,), Box((-1,), (2,))),
        ((4,), Box((0, 0), (1, 1))),
        ((), Box((0,), (1,))),
        ((2, 2), Run(3, 2)),
        ((2, 2), Run(-1, 2)),
        ((0, 3), Box((0, 0), (1, 3))),
        ((), Run(0, 2)),
    ],
)
def test_parts_outside(shape: tuple[int, ...], part: Part) -> None:
    coverage = check_coverage(shape, [get_whole(shape), part])
    assert coverage.outside == (part,)
    assert not coverage.ok
    assert coverage.num_missing == 0


def test_scalars_and_empty_tensors() -> None:
    assert check_coverage((), [Box((), ())]).ok
    assert check_coverage((), [Run(0, 1)]).ok
    assert check_coverage((), []).holes == (Box((), ()),)
    assert check_coverage((), [Box((), ()), Run(0, 1)]).overlaps == (Box((), ()),)
    assert check_coverage((0, 5), []).ok
    assert check_coverage((0, 5), [Box((0, 0), (0, 5))] * 3).ok
    assert check_coverage((4,), [Box((0,), (4,)), Box((4,), (0,))]).ok  # the empty shard of a rank too many
    assert list(split_into_runs(Box((), ()), ())) == [Piece(0, 0, 1)]


def test_huge_shapes_cost_nothing() -> None:
    """No work per element: 2^50 elements, a few or very many parts."""
    shape = (1 << 30, 1 << 20)
    half = 1 << 29
    halves = [Box((0, 0), (half, 1 << 20)), Box((half, 0), (half, 1 << 20))]
    assert check_coverage(shape, halves).ok
    hole = check_coverage(shape, [halves[0], Run(half << 20, (half << 20) - 1)])
    assert hole.holes == (Box((shape[0] - 1, shape[1] - 1), (1, 1)),)
    assert next(split_into_runs(Box((0, 5), (1 << 30, 7)), shape)) == Piece(5, 0, 7)
    assert intersect(Run(3, 1 << 49), Box((0, 0), (1, 4)), shape) == [Box((0, 3), (1, 1))]
    rows = [Box((i, 0), (1, 1 << 20)) for i in range(20_000)]
    assert check_coverage((20_000, 1 << 20), rows).ok
    columns = [Box((0, i), (1 << 20, 1)) for i in range(20_000)]
    assert check_coverage((1 << 20, 20_000), columns).ok
    grid = [Box((i, j), (1, 1)) for i in range(150) for j in range(150)]
    assert check_coverage((150, 150), grid).ok


def test_listed_regions_are_limited_and_counts_are_not() -> None:
    coverage = check_coverage((1000,), [Box((i,), (1,)) for i in range(0, 1000, 2)], limit=10)
    assert len(coverage.holes) == 10
    assert coverage.num_missing == 500


def test_strides() -> None:
    assert get_row_major_strides((2, 3, 4)) == (12, 4, 1)
    assert get_row_major_strides((2, 0, 4)) == (4, 4, 1)
    assert get_row_major_strides(()) == ()
    assert is_row_major((2, 3), (3, 1))
    assert not is_row_major((2, 3), (1, 2))
    assert is_row_major((1, 3), (77, 1))
    assert is_row_major((0, 3), (5, 5))


def test_offsets_and_sizes_of_records() -> None:
    extent = Extent(Run(0, 2), ByteRange("/a", 100, 64, 7), start=16)
    assert extent.offset == 116
    tensor = DiskTensor("w", "bfloat16", (2, 1), (extent,))
    assert (tensor.numel, tensor.size_bytes) == (2, 4)


def test_dtype_sizes_are_those_of_torch() -> None:
    import torch

    for name, size in DTYPE_SIZES.items():
        assert getattr(torch, name).itemsize == size


@given(st.integers(0, 7).flatmap(lambda count: shapes_with_parts(count + 1)))
def test_finding_extents(case: tuple[tuple[int, ...], list[Part]]) -> None:
    shape, (wanted, *listed) = case
    tensor = DiskTensor("w", "uint8", shape, tuple(Extent(part, ByteRange("/a", 0, 1)) for part in listed))
    expected = {
        index: set(flat_indices(part, shape)) & set(flat_indices(wanted, shape)) for index, part in enumerate(listed)
    }
    found = dict(tensor.find_common(wanted))
    assert {index: {i for part in common for i in flat_indices(part, shape)} for index, common in found.items()} == {
        index: indices for index, indices in expected.items() if indices
    }
    assert len(list(tensor.find_extents(wanted))) == len(found)
