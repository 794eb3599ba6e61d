"""Digests of what training works on, on this rank: equal digests mean equal bits. Nothing here is collective."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import xxhash

from ..extents import get_whole
from ..fingerprint import fingerprint_tensor, iterate_bytes
from ..progress.batches import digest_batch
from ..rng import RngSnapshot

if TYPE_CHECKING:
    import torch


def digest_generators() -> dict[str, str]:
    """Return a digest of each global random generator of this rank, by name ("python", "torch", ...)."""
    tensors = RngSnapshot.capture().to_tensors("")
    return {name.strip("/"): xxhash.xxh3_64_hexdigest(tensor.numpy().tobytes()) for name, tensor in tensors.items()}


def digest_values(batch: Any) -> str:
    """Return a digest of everything in a batch."""
    return f"{digest_batch(batch, whole=True):08x}"


def digest_samples(batch: Any) -> list[str]:
    """Return a digest of each sample of a batch, in order: of what its tensors hold at the same first index.

    Empty if the parts of the batch don't agree in their number of samples.
    """
    parts = list(_iterate_parts(batch))
    lengths = {len(part) for part in parts}
    if len(lengths) != 1:
        return []
    digests = []
    for index in range(lengths.pop()):
        digest = 0
        for part in parts:
            digest = zlib.crc32(digest_values(part[index]).encode(), digest)
        digests.append(f"{digest:08x}")
    return digests


def _iterate_parts(batch: Any) -> Iterator[Any]:
    import torch

    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _iterate_parts(part)
    elif isinstance(batch, (list, tuple)):
        if batch and all(isinstance(part, str) for part in batch):
            yield batch
        else:
            for part in batch:
                yield from _iterate_parts(part)


def digest_gradients(optimizer: torch.optim.Optimizer) -> tuple[str, float]:
    """Return a digest of what this rank holds of the gradients of an optimizer's parameters, and its 2-norm."""
    import torch

    digest = xxhash.xxh3_64()
    squares = 0.0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                digest.update(b"none")
                continue
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local = local.detach()
            _add_tensor(digest, local)
            squares += float(torch.linalg.vector_norm(local, dtype=torch.float32)) ** 2 if local.numel() else 0.0
    return digest.hexdigest(), squares**0.5


def _add_tensor(digest: Any, tensor: torch.Tensor) -> None:
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.device.type == "cpu":
        for block in iterate_bytes(tensor):
            digest.update(block)
        return
    shape = tuple(tensor.shape)
    digest.update(str(fingerprint_tensor(tensor, get_whole(shape), shape)).encode())
