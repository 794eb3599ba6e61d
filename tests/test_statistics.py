"""Statistics of tensors: right for every dtype and layout, and the same however a tensor is cut."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from accel_fsdp_tools.errors import ManifestError
from accel_fsdp_tools.statistics import (
    TensorStatistics,
    can_measure,
    get_cast_precision,
    measure_on_device,
    measure_tensor,
)

DTYPES = ["float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "int64", "int8", "uint8", "bool", "complex64"]


def _make(dtype: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(*shape, generator=generator) * 3
    if dtype == "complex64":
        return torch.complex(values, values.flip(0))
    return values.abs().to(getattr(torch, dtype)) if dtype in ("uint8", "bool") else values.to(getattr(torch, dtype))


def _expect(tensor: torch.Tensor) -> TensorStatistics:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers = np.array(real.to(torch.float64).reshape(-1).tolist())
    finite = numbers[np.isfinite(numbers)]
    return TensorStatistics(
        numbers.size,
        int(np.count_nonzero(numbers)),
        int(np.isnan(numbers).sum()),
        int(np.isinf(numbers).sum()),
        math.fsum(finite),
        math.fsum(finite**2),
        float(np.abs(finite).max()) if finite.size else 0.0,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (3, 70_001)])
def test_every_dtype_and_size(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = _make(dtype, *shape) if shape else _make(dtype, 1).reshape(())
    expected = _expect(tensor)
    assert measure_tensor(tensor).is_close(expected)
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    assert measure_on_device(plain).is_close(expected), "the operations that accelerators make"


def test_memory_that_is_not_in_one_piece() -> None:
    tensor = _make("float32", 300, 400)
    for view in (tensor.T, tensor[:, 3:77], tensor[::7], tensor.as_strided((50_000,), (2,))):
        assert not view.is_contiguous()
        assert measure_tensor(view).is_close(_expect(view))
    assert measure_tensor(torch.empty(0, 5)) == TensorStatistics()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_and_infinity_are_counted_and_left_out_of_the_sums(dtype: str) -> None:
    tensor = _make(dtype, 70_000)
    tensor[5], tensor[66_000], tensor[66_001], tensor[9] = math.nan, math.inf, -math.inf, 0
    seen = measure_tensor(tensor)
    assert (seen.num_nan, seen.num_inf) == (1, 2)
    assert seen.is_close(_expect(tensor))
    assert measure_on_device(tensor).is_close(seen)
    assert math.isfinite(seen.mean)


def test_moments() -> None:
    seen = measure_tensor(torch.tensor([1.0, 2.0, 3.0, 0.0, -0.0]))
    assert (seen.mean, seen.norm, seen.num_nonzero, seen.abs_max) == (1.2, math.sqrt(14), 3, 3.0)
    assert seen.std == pytest.approx(math.sqrt(14 / 5 - 1.44))
    nothing = measure_tensor(torch.full((3,), math.nan))
    assert math.isnan(nothing.mean)
    assert math.isnan(nothing.std)


@pytest.mark.parametrize("num_parts", [1, 2, 5, 11])
def test_parts_add_up_to_the_whole(num_parts: int) -> None:
    tensor = _make("float32", 91_003)
    whole = measure_tensor(tensor)
    parts = sum((measure_tensor(part) for part in tensor.tensor_split(num_parts)), TensorStatistics())
    assert parts.is_close(whole)
    assert parts.count == whole.count


@pytest.mark.parametrize("change", ["zeroed", "nan", "scaled", "one larger", "shifted"])
def test_changes_that_show(change: str) -> None:
    tensor = _make("float32", 10_000)
    saved = measure_tensor(tensor)
    match change:
        case "zeroed":
            tensor[17] = 0
        case "nan":
            tensor[17] = math.nan
        case "scaled":
            tensor *= 1.0001
        case "one larger":
            tensor[17] += 0.001
        case "shifted":
            tensor += 1e-5
    assert not saved.is_close(measure_tensor(tensor))


def test_a_cast_is_allowed_for_and_nothing_else_is() -> None:
    tensor = _make("float32", 10_000)
    saved, precision = measure_tensor(tensor), get_cast_precision("float32", "bfloat16")
    cast = measure_tensor(tensor.bfloat16())
    assert not saved.is_close(cast)
    assert saved.is_close(cast, precision=precision)
    assert not saved.is_close(measure_tensor(tensor.bfloat16() * 1.5), precision=precision)
    assert get_cast_precision("bfloat16", "bfloat16") == 0


def test_json_and_what_is_no_such_thing() -> None:
    seen = measure_tensor(_make("float32", 100))
    assert TensorStatistics.parse(json.loads(json.dumps(seen.to_dict(), allow_nan=False)), "a") == seen
    overflown = measure_tensor(torch.full((3,), 1e300, dtype=torch.float64))
    again = TensorStatistics.parse(json.loads(json.dumps(overflown.to_dict(), allow_nan=False)), "a")
    assert math.isinf(again.total_squares)
    assert again.is_close(overflown)
    for raw in ({}, {**seen.to_dict(), "count": -1}, {**seen.to_dict(), "nan": True}, {**seen.to_dict(), "sum": "x"}):
        with pytest.raises(ManifestError, match=r"layer\.weight"):
            TensorStatistics.parse(raw, "layer.weight")
    assert not can_measure("float4_e2m1fn_x2")
