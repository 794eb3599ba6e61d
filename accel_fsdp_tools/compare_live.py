"""Compare one rank's share of a live tensor with the bytes of a checkpoint, block by block.

The bytes come through this package's own readers, never through the loader that has just filled the memory. Values
are compared as integers of their width: NaNs equal themselves, zero and minus zero differ, and it is several times
faster than comparing floats. Not collective.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .extents import DTYPE_SIZES, Box, DiskTensor, Part, Run, Shape
from .findings import Finding, Severity
from .fingerprint import is_plain, view_bytes
from .formats.reading import FileCache, find_stretches, read_into

if TYPE_CHECKING:
    import torch

    from .local_digests import ShareDigest
    from .shards import LocalShard

_BLOCK_BYTES = 1 << 20  # read and compared at once, while it is in the processor's cache


@dataclass(frozen=True)
class Tolerance:
    """How far a floating-point number in memory may be from the saved one: `atol + rtol * abs(saved)`."""

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.atol == 0 and self.rtol == 0


EXACT = Tolerance()


class Reader:
    """Open files and one buffer for all tensors: fresh memory for every block would cost more than the comparison."""

    def __init__(self, files: FileCache) -> None:
        self.files = files
        self._buffer = bytearray(_BLOCK_BYTES)
        self._block = memoryview(bytearray(_BLOCK_BYTES))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._block))

    def read_bytes(self, path: str, offset: int, count: int) -> int:
        """Return the address of at most a block of a file's bytes, in memory that the next call uses again."""
        self.files.read_into(path, offset, self._block[:count])
        return self._address

    def read(self, disk: DiskTensor, part: Part) -> torch.Tensor:
        """Return a part of a tensor as one dimension, in memory that the next call uses again."""
        import torch

        size_bytes = part.numel * DTYPE_SIZES[disk.dtype]
        if size_bytes > len(self._buffer):  # one row of a tensor of long rows
            self._buffer = bytearray(size_bytes)
        view = memoryview(self._buffer)[:size_bytes]
        read_into(disk, part, view, files=self.files)
        return torch.frombuffer(view, dtype=getattr(torch, disk.dtype))


@dataclass
class _Tally:
    """What the comparison of one tensor has found so far."""

    num_different: int = 0
    num_near: int = 0  # different, and within the tolerance
    first: tuple[Shape, Any, Any] | None = None
    deviation: float = 0.0  # the largest within the tolerance, and where it is
    index: Shape = ()
    is_finite: bool = True
    is_zero: bool = True

    @property
    def is_odd(self) -> bool:
        return not self.is_finite or self.is_zero


def compare_shard(
    name: str,
    shard: LocalShard,
    disk: DiskTensor,
    *,
    reader: Reader,
    only_ends: bool = False,
    tolerance: Tolerance = EXACT,
    odd: set[str] | None = None,
    digest: ShareDigest | None = None,
) -> list[Finding]:
    """Return what differs between this rank's share of a tensor and the checkpoint: shape, dtype, values.

    A tensor that the model holds in another floating type was cast by the load; its bytes are cast in the same way
    before they are compared, and the cast itself is a hint (case V04). So is that of a buffer which FSDP1 gives state
    dicts in a wider type than it has in memory, unless the bytes are equal as they are.

    Args:
        only_ends: compare the first and the last elements of each part only.
        tolerance: values this near to the saved ones count as equal, and NaN equals NaN; a hint says how far the
            farthest is. Whole numbers are always compared exactly.
        odd: `name` is added if the share in memory holds NaN or infinity, or nothing but zeros.
        digest: fed with the share's bytes while they are at hand, if they equal the disk's.

    Memory: two blocks of 1 MiB, or of one row; with a tolerance about ten for a block that differs.
    """
    if tuple(disk.shape) != tuple(shard.shape):
        message = f"{name} has shape {list(shard.shape)} in memory and {list(disk.shape)} in the checkpoint"
        facts: dict[str, Any] = {"expected": list(disk.shape), "actual": list(shard.shape)}
        return [Finding("shape", Severity.FAILURE, message, fqn=name, facts=facts)]
    findings = []
    if disk.dtype != shard.dtype:
        message = f"{name} is {shard.dtype} in memory and {disk.dtype} in the checkpoint: the load has cast it"
        facts = {"expected": disk.dtype, "actual": shard.dtype}
        findings.append(Finding("dtype", Severity.HINT, message, fqn=name, facts=facts))
    tally = _Tally()
    if _is_rounded(shard, disk, reader, only_ends=only_ends):
        return compare_shard(name, shard.as_in_memory(), disk, reader=reader, only_ends=only_ends, odd=odd)
    for part, tensor in shard.iterate_pieces():
        if not only_ends and _is_equal(part, tensor, disk, reader, None if odd is None else tally, digest):
            continue
        for block, view in _iterate_blocks(part, tensor, DTYPE_SIZES[disk.dtype], only_ends=only_ends):
            _compare_block(block, view, disk, reader, tolerance, tally)
            if odd is not None:
                _look_at_values(view, tally)
    if odd is not None and tally.is_odd:
        odd.add(name)
    if tally.num_near:
        message = (
            f"{name}: {tally.num_near} element(s) differ from the checkpoint within the tolerance, by at most "
            f"{tally.deviation:g} at {list(tally.index)}"
        )
        facts = {"deviation": tally.deviation, "num_near": tally.num_near, "index": list(tally.index)}
        findings.append(Finding("deviation", Severity.HINT, message, fqn=name, facts=facts))
    if tally.first is not None:
        index, expected, actual = tally.first
        message = (
            f"{name}: {tally.num_different} element(s) in memory differ from the checkpoint, first at {list(index)}: "
            f"{expected!r} is saved, {actual!r} is in memory"
        )
        facts = {"num_different": tally.num_different, "index": list(index), "expected": expected, "actual": actual}
        findings.append(Finding("value", Severity.FAILURE, message, fqn=name, facts=facts))
    return findings


def _is_rounded(shard: LocalShard, disk: DiskTensor, reader: Reader, *, only_ends: bool) -> bool:
    """Whether a buffer that FSDP1 casts for state dicts has what the checkpoint has in its dtype in memory only."""
    return (
        shard.memory is not None
        and not _is_same(shard, disk, reader, only_ends=only_ends)
        and _is_same(shard.as_in_memory(), disk, reader, only_ends=only_ends)
    )


def _is_same(shard: LocalShard, disk: DiskTensor, reader: Reader, *, only_ends: bool) -> bool:
    """Whether this rank's share is what the checkpoint has, in the share's dtype."""
    tally = _Tally()
    for part, tensor in shard.iterate_pieces():
        for block, view in _iterate_blocks(part, tensor, DTYPE_SIZES[disk.dtype], only_ends=only_ends):
            _compare_block(block, view, disk, reader, EXACT, tally)
    return tally.first is None


def _is_equal(
    part: Part, tensor: torch.Tensor, disk: DiskTensor, reader: Reader, tally: _Tally | None, digest: ShareDigest | None
) -> bool:
    """Whether a part in host memory has the bytes on disk; False as well if that can't be told the fast way."""
    if tensor.device.type != "cpu" or not is_plain(tensor) or str(tensor.dtype) != f"torch.{disk.dtype}":
        return False
    stretches = find_stretches(disk, part)
    if stretches is None:
        return False
    flat = tensor.detach().reshape(-1)
    size, address, data = flat.element_size(), flat.data_ptr(), view_bytes(flat)
    for path, offset, begin, length in sorted(stretches, key=lambda each: each.begin):
        for start in range(0, length, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, length - start)
            first = begin + start
            if _memcmp(reader.read_bytes(path, offset + start, count), address + first, count):
                return False
            if digest is not None:
                digest.update(data[first : first + count])
            if tally is not None:
                _look_at_values(flat[first // size : (first + count) // size], tally)
    return True


def is_odd(shard: LocalShard) -> bool:
    """Whether the share in memory holds NaN or infinity, or nothing but zeros."""
    tally = _Tally()
    for part, tensor in shard.iterate_pieces():
        for _, view in _iterate_blocks(part, tensor, tensor.element_size(), only_ends=False):
            _look_at_values(view, tally)
    return tally.is_odd


def _iterate_blocks(
    part: Part, tensor: torch.Tensor, size: int, *, only_ends: bool
) -> Iterator[tuple[Part, torch.Tensor]]:
    """Yield pieces of a part that are small enough, each with the view of memory that holds it."""
    limit = max(1, _BLOCK_BYTES // size)
    if isinstance(part, Run):
        flat, step = tensor.reshape(-1), 1
    elif not part.sizes:
        yield part, tensor
        return
    else:
        flat, step = tensor, max(1, part.numel // max(1, part.sizes[0]))
    num_rows = part.length if isinstance(part, Run) else part.sizes[0]
    if num_rows == 0 or part.numel == 0:
        return
    per_block = max(1, limit // step)
    starts = range(0, num_rows, per_block)
    if only_ends:
        per_block = 1
        starts_kept = sorted({0, num_rows - 1})
    else:
        starts_kept = list(starts)
    for start in starts_kept:
        count = min(per_block, num_rows - start)
        if isinstance(part, Run):
            yield Run(part.start + start, count), flat[start : start + count]
        else:
            inner = Box((part.offsets[0] + start, *part.offsets[1:]), (count, *part.sizes[1:]))
            yield inner, flat[start : start + count]


def _compare_block(
    part: Part, view: torch.Tensor, disk: DiskTensor, reader: Reader, tolerance: Tolerance, tally: _Tally
) -> None:
    """Add to `tally` how many elements differ, and the first with its index in the whole tensor and both values."""
    import torch

    sizes = (part.length,) if isinstance(part, Run) else part.sizes
    saved = reader.read(disk, part).reshape(sizes)
    if saved.dtype != view.dtype:
        saved = saved.to(view.dtype)
    live = view.detach().reshape(sizes)
    if live.device.type == "cpu" and _have_equal_bytes(saved, live):
        return
    saved = saved.to(live.device)
    a, b = _as_words(saved), _as_words(live)
    if torch.equal(a, b):
        return
    different = (a != b).reshape(-1) if a.numel() == saved.numel() else (a != b).reshape(saved.numel(), -1).any(1)
    if not tolerance.is_exact and (saved.is_floating_point() or saved.is_complex()):
        different = _look_closer(part, saved.reshape(-1), live.reshape(-1), different, disk.shape, tolerance, tally)
        if not different.any():
            return
    position = int(different.nonzero()[0])
    if tally.first is None:
        values = saved.reshape(-1)[position].item(), live.reshape(-1)[position].item()
        tally.first = (_get_index(part, position, disk.shape), *values)
    tally.num_different += int(different.sum())


def _have_equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors in host memory hold the same bytes; several times as fast as `torch.equal`."""
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    num_bytes = a.numel() * a.element_size()
    return num_bytes == b.numel() * b.element_size() and not _memcmp(a.data_ptr(), b.data_ptr(), num_bytes)


_memcmp = ctypes.CDLL(None).memcmp  # lets other threads run meanwhile
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _look_at_values(view: torch.Tensor, tally: _Tally) -> None:
    """Note whether a block has NaN or infinity, and whether all that was seen so far is zero."""
    if not view.numel() or not (tally.is_finite or tally.is_zero):
        return
    if not view.is_floating_point() or view.element_size() == 1:
        tally.is_zero = False  # of whole numbers and eight-bit floats nothing is odd
        return
    view = view.detach()
    if view.device.type == "cpu" and view.element_size() >= 4 and view.is_contiguous():
        # Twice as fast as a search. A sum of squares is no number if one of them is none, and zero if all are; it may
        # also overflow or vanish, so only what lies between says something.
        flat = view.reshape(-1)
        squares = float(flat.dot(flat))
        if 0 < squares < math.inf:
            tally.is_zero = False
            return
    low, high = (each.item() for each in view.aminmax())  # NaN if there is any
    tally.is_finite = tally.is_finite and math.isfinite(low) and math.isfinite(high)
    tally.is_zero = tally.is_zero and low == 0 and high == 0


def _look_closer(
    part: Part,
    saved: torch.Tensor,
    live: torch.Tensor,
    different: torch.Tensor,
    shape: Shape,
    tolerance: Tolerance,
    tally: _Tally,
) -> torch.Tensor:
    """Return which of the elements that differ in a bit differ by more than the tolerance."""
    import torch

    wide = torch.complex128 if saved.is_complex() else torch.float64
    a, b = saved.to(wide), live.to(wide)
    deviations = (a - b).abs()
    is_same = (a == b) | (a.isnan() & b.isnan())  # zero and minus zero, NaNs of other bits, infinities
    is_near = is_same | (deviations <= tolerance.atol + tolerance.rtol * a.abs())
    is_near &= is_same | (a.isfinite() & b.isfinite())  # rtol times infinity would admit everything
    near = different & is_near
    if near.any():
        deviations = torch.where(near & ~is_same, deviations, 0.0)
        position = int(deviations.argmax()) if deviations.any() else int(near.nonzero()[0])
        if not tally.num_near or float(deviations[position]) > tally.deviation:
            tally.deviation, tally.index = float(deviations[position]), _get_index(part, position, shape)
        tally.num_near += int(near.sum())
    return different & ~near


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bits as integers."""
    import torch

    if tensor.dtype == torch.bool:
        return tensor.contiguous().view(torch.uint8)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    contiguous = tensor.contiguous()
    if contiguous.dim() == 0:
        contiguous = contiguous.reshape(1)
    return contiguous.view(words.get(tensor.element_size(), torch.int64))


def _get_index(part: Part, position: int, shape: Shape) -> Shape:
    """Return the index in the whole tensor of the element at `position` in the part's row-major order."""
    if isinstance(part, Run):
        sizes, offsets, position = shape, (0,) * len(shape), part.start + position
    else:
        sizes, offsets = part.sizes, part.offsets
    strides = [functools.reduce(lambda a, b: a * b, sizes[dim + 1 :], 1) for dim in range(len(sizes))]
    return tuple(
        offset + position // stride % size for offset, stride, size in zip(offsets, strides, sizes, strict=True)
    )
