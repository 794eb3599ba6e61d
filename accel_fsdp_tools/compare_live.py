"""Compare one rank's share of a live tensor with the bytes of a checkpoint, block by block.

The bytes come through this package's own readers, never through the loader that has just filled the memory. Values
are compared as integers of their width: NaNs equal themselves, zero and minus zero differ, and it is several times
faster than comparing floats. Not collective.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .extents import DTYPE_SIZES, Box, DiskTensor, Part, Run, Shape
from .findings import Finding, Severity
from .formats.reading import FileCache, read_part

if TYPE_CHECKING:
    import torch

    from .shards import LocalShard

_BLOCK_BYTES = 8 << 20  # the largest piece that is read and compared at once


def compare_shard(
    name: str, shard: LocalShard, disk: DiskTensor, *, files: FileCache, only_ends: bool = False
) -> list[Finding]:
    """Return what differs between this rank's share of a tensor and the checkpoint: shape, dtype, values.

    A tensor that the model holds in another floating type was cast by the load; its bytes are cast in the same way
    before they are compared, and the cast itself is a hint (case V04).

    Args:
        only_ends: compare the first and the last elements of each part only.

    Memory: two blocks of 8 MiB.
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
    num_different, first = 0, None
    for part, tensor in shard.iterate_pieces():
        for block, view in _iterate_blocks(part, tensor, DTYPE_SIZES[disk.dtype], only_ends=only_ends):
            different, place = _compare_block(block, view, disk, files)
            num_different += different
            if first is None and place is not None:
                first = place
    if first is not None:
        index, expected, actual = first
        message = (
            f"{name}: {num_different} element(s) in memory differ from the checkpoint, first at {list(index)}: "
            f"{expected!r} is saved, {actual!r} is in memory"
        )
        facts = {"num_different": num_different, "index": list(index), "expected": expected, "actual": actual}
        findings.append(Finding("value", Severity.FAILURE, message, fqn=name, facts=facts))
    return findings


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
    part: Part, view: torch.Tensor, disk: DiskTensor, files: FileCache
) -> tuple[int, tuple[Shape, Any, Any] | None]:
    """Return how many elements differ, and the first with its index in the whole tensor and both values."""
    import torch

    sizes = (part.length,) if isinstance(part, Run) else part.sizes
    saved = torch.frombuffer(read_part(disk, part, files=files), dtype=getattr(torch, disk.dtype)).reshape(sizes)
    if saved.dtype != view.dtype:
        saved = saved.to(view.dtype)
    live = view.detach().reshape(sizes)
    saved = saved.to(live.device)
    a, b = _as_words(saved), _as_words(live)
    if torch.equal(a, b):
        return 0, None
    different = (a != b).reshape(-1) if a.numel() == saved.numel() else (a != b).reshape(saved.numel(), -1).any(1)
    position = int(different.nonzero()[0])
    index = _get_index(part, position, disk.shape)
    values = saved.reshape(-1)[position].item(), live.reshape(-1)[position].item()
    return int(different.sum()), (index, *values)


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
