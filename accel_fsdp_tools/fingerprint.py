"""Fingerprints of tensors that add up: those of disjoint parts sum to that of the whole, however it was cut.

Two sums over the tensor's bytes, modulo 2^64, one of them weighted by pseudo-random odd numbers that depend on the
place in the whole tensor (`weighted_sums`), and the number of bytes. The same from the CPU, an accelerator and a file.

What it detects, with which probability, and what it costs: docs/fingerprints.md. It is no cryptographic hash.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedError, UsageError
from .extents import DTYPE_SIZES, Box, Part, Run, Shape, get_whole, split_into_runs
from .kernel import find_address, find_kernel

if TYPE_CHECKING:
    import torch

VERSION = 1

_MASK = (1 << 64) - 1

_MIN_RUN_BYTES = 32768  # shorter runs are taken many at a time: a call of numpy costs as much as some kilobytes
_CHUNK_BYTES = 1 << 18  # of short runs at a time
_DEVICE_CHUNK = 1 << 20  # 32-bit words on an accelerator at a time


@dataclass(frozen=True)
class Fingerprint:
    """Two words modulo 2^64 and a number of bytes; `+` joins disjoint parts of one tensor.

    `num_bytes` tells a part that is missing or counted twice even where its elements are zero.
    """

    total: int = 0
    weighted: int = 0
    num_bytes: int = 0

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(
            (self.total + other.total) & _MASK,
            (self.weighted + other.weighted) & _MASK,
            self.num_bytes + other.num_bytes,
        )

    def __str__(self) -> str:
        """Return the form for JSON, such as `1:00..2a:9f..01:4096` (version, the words in hex, bytes in decimal)."""
        return f"{VERSION}:{self.total:016x}:{self.weighted:016x}:{self.num_bytes}"

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Return the fingerprint that `str()` wrote.

        Raises:
            UnsupportedError: it is of another version of the algorithm; nothing can be said about it.
            UsageError: it is no fingerprint.
        """
        version, *fields = text.split(":")
        if version.isdecimal() and int(version) != VERSION:
            raise UnsupportedError(
                f"The fingerprint {text!r} is of version {version}; this accel_fsdp_tools knows version {VERSION}",
                expected=VERSION,
                actual=int(version),
            )
        try:
            total, weighted, num_bytes = fields
            parsed = cls(int(total, 16), int(weighted, 16), int(num_bytes))
        except ValueError:
            parsed = None
        if parsed is None or str(parsed) != text:
            raise UsageError(f"{text!r} is no fingerprint", actual=text)
        return parsed


def combine(parts: Iterable[Fingerprint]) -> Fingerprint:
    """Return the fingerprint of what disjoint parts make up together; that of nothing is zero."""
    return functools.reduce(Fingerprint.__add__, parts, Fingerprint())


def fingerprint_bytes(buffer: Any, dtype: str, part: Part, shape: Shape) -> Fingerprint:
    """Return the fingerprint of one part of a tensor from its bytes.

    Reads the bytes once, in blocks that stay in a core's cache, and releases the interpreter's lock meanwhile. A box
    of short rows (cut along the last dimension) is several times slower than consecutive bytes.

    Args:
        buffer: the part's elements one after another in the part's row-major order, little-endian; anything with the
            buffer protocol (bytes, mmap, memoryview, numpy array), aligned or not.
        dtype: the name without `torch.`, a key of `extents.DTYPE_SIZES`.
        part: which part of the tensor these elements are.
        shape: the shape of the whole tensor.

    Returns:
        the summand of this part. Not collective. Peak memory: 11 MB, whatever the size.

    Raises:
        UsageError: the dtype is unknown, or the buffer has not the size of the part.
    """
    size = _get_element_size(dtype)
    if isinstance(part, Run) and (kernel := find_kernel()) is not None:
        view = memoryview(buffer)
        address = find_address(view)
        if address is not None:
            _check_size(view.nbytes, part, size)
            return Fingerprint(*kernel.compute_sums(part.start * size, address, view.nbytes), view.nbytes)

    import numpy as np  # here: who handles recorded fingerprints, or has the kernel, does not wait for numpy

    from .weighted_sums import Sums, list_rows

    data = np.frombuffer(buffer, np.uint8) if memoryview(buffer).nbytes else np.empty(0, np.uint8)
    _check_size(data.size, part, size)
    sums = Sums()
    runs = split_into_runs(part, shape)
    first = next(runs, None)
    if first is None:
        return Fingerprint()
    if isinstance(part, Run) or first.length == part.numel or first.length * size >= _MIN_RUN_BYTES:
        for start, offset, length in itertools.chain((first,), runs):
            sums.add_run(start * size, data[offset * size : (offset + length) * size])
    else:
        for offset, inner in iterate_blocks(part.sizes, _CHUNK_BYTES // size):
            starts, length = list_rows(_shift(part, inner), shape)
            chunk = data[offset * size : (offset + inner.numel) * size]
            sums.add_rows(starts * size, chunk.reshape(len(starts), length * size), min(size, 4))
    return Fingerprint(sums.total & _MASK, sums.weighted & _MASK, data.size)


def fingerprint_tensor(tensor: torch.Tensor, part: Part, shape: Shape) -> Fingerprint:
    """Return the fingerprint of one part of a tensor from memory, the same value as from its bytes.

    On the CPU the elements are read where they lie. On an accelerator they are summed there, with 64-bit integers,
    and three numbers come back.

    Args:
        tensor: the part's elements: of the box's shape, or (for a run) of any shape with as many elements. Need not
            be contiguous. Not a DTensor: give its local tensor.
        part: which part of the whole tensor this is.
        shape: the shape of the whole tensor.

    Returns:
        the summand of this part. Not collective. Peak memory: 15 MB on the CPU, 80 MB on an accelerator.

    Raises:
        UsageError: the tensor has not the size of the part.
        UnsupportedError: its elements cannot be read (a meta or sparse tensor, an unknown dtype).
    """
    import torch

    from .weighted_sums import sum_on_device

    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta or tensor.layout != torch.strided or dtype not in DTYPE_SIZES:
        raise UnsupportedError(f"A tensor on {tensor.device}, {tensor.layout}, {tensor.dtype} has no fingerprint")
    _check_size(tensor.numel() * tensor.element_size(), part, tensor.element_size())
    tensor = tensor.detach()
    if isinstance(part, Box) and tuple(tensor.shape) != part.sizes:
        raise UsageError(f"A tensor of shape {tuple(tensor.shape)} is not {part}", expected=part.sizes)
    if tensor.numel() == 0:
        return Fingerprint()
    if tensor.device.type == "cpu" and is_plain(tensor):
        return fingerprint_bytes(view_bytes(tensor), dtype, part, shape)
    result = Fingerprint()
    for offset, inner, block in _iterate_plain_blocks(tensor):
        here = Run(part.start + offset, inner.numel) if isinstance(part, Run) else _shift(part, inner)
        if tensor.device.type == "cpu":
            result += fingerprint_bytes(view_bytes(block), dtype, here, shape)
        else:
            flat = _flatten(block)
            result += Fingerprint(*sum_on_device(flat, here, shape), flat.numel() * flat.element_size())
    return result


def iterate_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in host memory in its row-major order: where they lie, or in copies of 4 MiB.

    A copy lasts until the next one. Not collective.

    Raises:
        UnsupportedError: its elements cannot be read (a sparse tensor).
    """
    import torch

    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise UnsupportedError(f"The bytes of a tensor on {tensor.device}, {tensor.layout} cannot be read")
    tensor = tensor.detach()
    if is_plain(tensor):
        yield view_bytes(tensor)
        return
    for _, _, block in _iterate_plain_blocks(tensor):
        yield view_bytes(block)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory one after another, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _iterate_plain_blocks(tensor: torch.Tensor) -> Iterator[tuple[int, Box, torch.Tensor]]:
    """Cut a tensor into blocks as `iterate_blocks` does, each with a plain tensor of its elements."""
    import torch

    limit = _DEVICE_CHUNK * 4 // max(4, tensor.element_size())
    scratch = None
    if not is_plain(tensor):
        scratch = torch.empty(min(limit, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
    for offset, inner in iterate_blocks(tuple(tensor.shape), limit):
        block = _narrow(tensor, inner)
        if scratch is not None:  # re-used: fresh memory is slow to touch
            block = scratch[: inner.numel].view(block.shape).copy_(block)
        yield offset, inner, block


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as 1-D with stride 1 (`reshape` keeps the stride of a single element)."""
    return tensor.as_strided((tensor.numel(),), (1,))


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy. Keep the tensor alive as long as you use it.

    Not by `tensor.numpy()`: from then on torch refuses to resize the storage, and FSDP1 resizes the storages of its
    flat parameters in every step. Not collective.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_uint8 * num_bytes).from_address(tensor.data_ptr())).cast("B")


def fingerprint_value(value: Any) -> Fingerprint:
    """Return a fingerprint of something that is no tensor: numbers, strings, bytes, None, and containers of them.

    The fingerprint of the value's canonical text. Equal for equal values: an int is not the float of the same value,
    a tuple counts as a list (checkpoint formats turn one into the other), the order of a dict's keys doesn't matter.
    Not collective.

    Raises:
        UnsupportedError: the value holds an object of another type.
    """
    text = json.dumps(_canonicalize(value), sort_keys=True, separators=(",", ":")).encode()
    return fingerprint_bytes(text, "uint8", Run(0, len(text)), (len(text),))


def _canonicalize(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return ["int", str(value)]
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, (list, tuple)):
        return ["list", *map(_canonicalize, value)]
    if isinstance(value, dict):
        items = [[_canonicalize(key), _canonicalize(item)] for key, item in value.items()]
        return ["dict", sorted(items, key=lambda item: json.dumps(item[0]))]
    raise UnsupportedError(f"A {type(value).__qualname__} has no fingerprint; tensors have", actual=repr(value)[:100])


def iterate_blocks(sizes: Shape, limit: int) -> Iterator[tuple[int, Box]]:
    """Cut an array into boxes of at most `limit` elements that are each consecutive in its row-major order.

    Yields the number of elements before each box, and the box, in order.
    """
    if not sizes or math.prod(sizes) <= limit:
        yield 0, get_whole(sizes)
        return
    row = math.prod(sizes[1:])
    if row <= limit:
        step = limit // row
        for index in range(0, sizes[0], step):
            count = min(step, sizes[0] - index)
            yield index * row, Box((index, *(0,) * (len(sizes) - 1)), (count, *sizes[1:]))
        return
    for index in range(sizes[0]):
        for offset, box in iterate_blocks(sizes[1:], limit):
            yield index * row + offset, Box((index, *box.offsets), (1, *box.sizes))


def _get_element_size(dtype: str) -> int:
    if dtype not in DTYPE_SIZES:
        raise UsageError(f"{dtype!r} is no known dtype; known are {', '.join(DTYPE_SIZES)}", actual=dtype)
    return DTYPE_SIZES[dtype]


def _check_size(num_bytes: int, part: Part, element_size: int) -> None:
    expected = part.numel * element_size
    if num_bytes != expected:
        raise UsageError(f"{part} has {expected} bytes, not {num_bytes}", expected=expected, actual=num_bytes)


def _shift(part: Box, inner: Box) -> Box:
    """Return the box that is `inner` of `part`, in the coordinates of the whole tensor."""
    return Box(tuple(map(int.__add__, part.offsets, inner.offsets)), inner.sizes)


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]
