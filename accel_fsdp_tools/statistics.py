"""Statistics of tensors that add up over disjoint parts: count, sums, NaN, infinity; so mean, deviation and norm.

Weaker than fingerprints by far: another tensor with nearly the same sums is not told apart. But they say in numbers
that a person can read whether anything was loaded at all, and what. Sums are made in float64 over the finite numbers;
their last digits depend on the order, so on the sharding: compare with `is_close`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ManifestError
from .extents import DTYPE_SIZES
from .fingerprint import iterate_blocks, view_bytes

if TYPE_CHECKING:
    import torch

RELATIVE_TOLERANCE = 1e-10
"""Sums of the same numbers in another order differ by less: of the sum relative to that of the absolute values."""

_BLOCK = 1 << 16  # elements at a time: with their float64 copies they stay in a core's cache
_DEVICE_BLOCK = 1 << 20  # elements at a time on an accelerator
_PRECISION = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class TensorStatistics:
    """What the numbers of a tensor come to; `+` joins disjoint parts.

    A complex element counts as two numbers. `total`, `total_squares` and `abs_max` are of the finite numbers.
    """

    count: int = 0
    num_nonzero: int = 0
    num_nan: int = 0
    num_inf: int = 0
    total: float = 0.0
    total_squares: float = 0.0
    abs_max: float = 0.0

    @property
    def num_finite(self) -> int:
        return self.count - self.num_nan - self.num_inf

    @property
    def mean(self) -> float:
        return self.total / self.num_finite if self.num_finite else math.nan

    @property
    def std(self) -> float:
        """Standard deviation of the finite numbers (of the population, not corrected)."""
        if not self.num_finite:
            return math.nan
        return math.sqrt(max(0.0, self.total_squares / self.num_finite - self.mean**2))

    @property
    def norm(self) -> float:
        return math.sqrt(self.total_squares)

    def __add__(self, other: TensorStatistics) -> TensorStatistics:
        return TensorStatistics(
            self.count + other.count,
            self.num_nonzero + other.num_nonzero,
            self.num_nan + other.num_nan,
            self.num_inf + other.num_inf,
            self.total + other.total,
            self.total_squares + other.total_squares,
            max(self.abs_max, other.abs_max),
        )

    def is_close(self, other: TensorStatistics, *, precision: float = 0.0) -> bool:
        """Whether both can be of the same numbers, added up in another order.

        Args:
            precision: relative rounding of each number, where one side was cast to a narrower type; what small
                numbers become then (zero, infinity) is left open.
        """
        if self.count != other.count or self.num_nan != other.num_nan:
            return False
        if not precision:
            counts = (self.num_nonzero, self.num_inf, self.abs_max) == (
                other.num_nonzero,
                other.num_inf,
                other.abs_max,
            )
            if not counts:
                return False
        elif not _is_near(self.abs_max, other.abs_max, 2 * precision * self.abs_max):
            return False
        tolerance = max(RELATIVE_TOLERANCE, 2 * precision)
        squares = max(self.total_squares, other.total_squares)
        scale = math.sqrt(max(1, self.count)) * math.sqrt(squares)  # at least the sum of the absolute values
        return _is_near(self.total, other.total, tolerance * scale) and _is_near(
            self.total_squares, other.total_squares, 2 * tolerance * squares
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the form for JSON, which has no infinity: a sum that overflows is null."""
        return {
            "count": self.count,
            "nonzero": self.num_nonzero,
            "nan": self.num_nan,
            "inf": self.num_inf,
            "sum": _to_json(self.total),
            "sum_squares": _to_json(self.total_squares),
            "abs_max": self.abs_max,
        }

    @classmethod
    def parse(cls, raw: Mapping[str, Any], name: str) -> TensorStatistics:
        """Return what `to_dict()` wrote.

        Raises:
            ManifestError: it is something else; `name` says whose statistics it was to be.
        """
        try:
            counts = [raw[key] for key in ("count", "nonzero", "nan", "inf")]
            sums = [math.inf if raw[key] is None else float(raw[key]) for key in ("sum", "sum_squares", "abs_max")]
            if not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError(f"counts are {counts}")
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(
                f"The statistics recorded for {name} are malformed ({type(error).__name__}: {error}). Use another "
                "checkpoint, or mode='full'.",
                fqn=name,
            ) from error
        return cls(*counts, *sums)

    def describe(self) -> dict[str, Any]:
        """Return what a person reads: the numbers of a row of a table, as plain values."""
        return {
            "count": self.count,
            "mean": self.mean,
            "std": self.std,
            "norm": self.norm,
            "abs_max": self.abs_max,
            "zeros": self.count - self.num_nonzero,
            "nan": self.num_nan,
            "inf": self.num_inf,
        }


def get_cast_precision(saved: str, live: str) -> float:
    """Return the relative rounding of a cast between two dtypes; 0 for the same dtype."""
    if saved == live:
        return 0.0
    return max(_PRECISION.get(saved, 1.0), _PRECISION.get(live, 1.0))


def _is_near(a: float, b: float, tolerance: float) -> bool:
    return a == b or abs(a - b) <= tolerance  # infinities (overflown sums) are equal, and near nothing


def _to_json(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Scratch(threading.local):
    def __init__(self) -> None:
        import torch

        # Of our own, so numpy may look at them. FSDP's memory it may not: see `fingerprint.view_bytes`.
        self.wide = torch.empty(_BLOCK, dtype=torch.float64)
        self.narrow = torch.empty(_BLOCK, dtype=torch.float32)
        self.flags = np.empty(_BLOCK, np.bool_)


_scratch: list[_Scratch] = []


def can_measure(dtype: str) -> bool:
    """Whether a tensor of this dtype (without `torch.`) consists of numbers that can be added up."""
    return dtype in DTYPE_SIZES and not dtype.startswith("float4")


def measure_tensor(tensor: torch.Tensor) -> TensorStatistics:
    """Return the statistics of a local tensor of any layout, dtype and device (see `can_measure`).

    Not collective. Reads the memory once. Peak memory: 1 MB on the CPU, 50 MB on an accelerator, whatever the size.
    """
    import torch

    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    on_cpu = tensor.device.type in ("cpu", "mps")  # mps has no float64
    limit = _BLOCK if on_cpu else _DEVICE_BLOCK
    result = TensorStatistics()
    if tensor.numel() == 0:
        return result
    if tensor.is_contiguous():
        flat = tensor.as_strided((tensor.numel(),), (1,))
        blocks = (flat[start : start + limit] for start in range(0, flat.numel(), limit))
    else:
        blocks = (
            tensor[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
            for _, box in iterate_blocks(tuple(tensor.shape), limit)
        )
    with np.errstate(all="ignore"):
        for block in blocks:
            result += _measure_block(block.cpu()) if on_cpu else measure_on_device(block)
    return result


def _measure_block(block: torch.Tensor) -> TensorStatistics:
    if not _scratch:
        _scratch.append(_Scratch())
    scratch, count = _scratch[0], block.numel()
    numbers = scratch.wide[:count].numpy()
    # What float32 holds exactly is looked at in float32, which is faster, and only summed in float64.
    plain = _as_plain(block, scratch)
    numbers[:] = plain
    squares = float(np.dot(numbers, numbers))
    if not math.isfinite(squares):
        return _measure_odd(numbers)
    low, high = float(plain.min()), float(plain.max())
    if low > 0 or high < 0:
        num_nonzero = count
    elif low == high:
        num_nonzero = 0
    else:
        num_nonzero = int(np.count_nonzero(np.not_equal(plain, 0, out=scratch.flags[:count])))
    total = float(np.add.reduce(numbers))
    return TensorStatistics(count, num_nonzero, 0, 0, total, squares, max(-low, high, 0.0))


def _as_plain(block: torch.Tensor, scratch: _Scratch) -> Any:
    """Return the numbers of a block as an array of float32, or of float64 where that is not exact."""
    if block.dtype == scratch.narrow.dtype and block.is_contiguous():
        return np.frombuffer(view_bytes(block), np.float32)
    is_narrow = block.is_floating_point() and block.element_size() <= 4
    target = (scratch.narrow if is_narrow else scratch.wide)[: block.numel()]
    target.view(block.shape).copy_(block)
    return target.numpy()


def _measure_odd(numbers: Any) -> TensorStatistics:
    """Measure a block with NaN or infinity, or whose squares are beyond float64."""
    finite = numbers[np.isfinite(numbers)]
    num_nan = int(np.count_nonzero(np.isnan(numbers)))
    return TensorStatistics(
        count=numbers.size,
        num_nonzero=int(np.count_nonzero(numbers)),
        num_nan=num_nan,
        num_inf=numbers.size - finite.size - num_nan,
        total=float(np.add.reduce(finite)),
        total_squares=float(np.dot(finite, finite)),
        abs_max=float(np.abs(finite).max()) if finite.size else 0.0,
    )


def measure_on_device(block: torch.Tensor) -> TensorStatistics:
    """Return the statistics of a block by operations of its own device; seven numbers come back.

    For accelerators. Works on the CPU as well, more slowly; that is how it is tested.
    """
    import torch

    numbers = block.reshape(-1).to(torch.float64)
    nan, inf = numbers.isnan(), numbers.isinf()
    counts = torch.stack([numbers.count_nonzero(), nan.sum(), inf.sum()]).tolist()
    numbers = numbers.masked_fill(nan | inf, 0.0)
    sums = torch.stack([numbers.sum(), numbers.square().sum(), numbers.abs().max()]).tolist()
    return TensorStatistics(block.numel(), *counts, *sums)
