"""Copies of a run's tensors in host memory, so that training can go on while they are written.

The memory is used again by the next snapshot: the first touch of fresh memory costs more than the copy. Where the
tensors are on a GPU it is pinned. Not collective.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Name = tuple[Any, ...]
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class HostCopies:
    """Takes snapshots, one at a time; the copies of one are valid until the next begins.

    Tensors in the CPU's memory are copied too, for the next update changes them in place. Tensors that are the same
    memory have one copy, so that ties and the sizes of files stay what they are. What FSDP has gathered for this call
    alone may be kept as it is.

    Peak memory: one copy of what is on this rank, from the first snapshot on.
    """

    def __init__(self) -> None:
        self._buffers: dict[Name, tuple[Any, torch.Tensor]] = {}
        # Of the snapshot that is being taken. The originals are held so that their addresses stay theirs.
        self._done: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._used: set[Name] = set()
        self._devices: set[torch.device] = set()
        self._live: set[int] = set()  # addresses

    @contextlib.contextmanager
    def taking(self, live: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Take one snapshot within the context. What the one before held is overwritten; at the end all is there.

        Args:
            live: what the training goes on with, so that it is never kept.
        """
        self._done, self._used, self._devices = {}, set(), set()
        self._live = {each.untyped_storage().data_ptr() for each in live}
        try:
            yield
            self._finish_transfers()
        finally:
            self._done = {}
            for name in self._buffers.keys() - self._used:
                del self._buffers[name]

    def _finish_transfers(self) -> None:
        import torch

        for device in self._devices:
            torch.accelerator.synchronize(device)

    def release(self) -> None:
        """Give the memory back."""
        self._buffers.clear()

    def copy_tree(self, name: Name, value: Any, *, is_gathered: bool = False) -> Any:
        """Return `value` with all its tensors copied and its containers new; other objects are deep copies.

        Args:
            name: tells it apart from what else is in the snapshot; the same for the same thing in the next one.
            is_gathered: it was made for this call. Tensors that are neither live nor referred to by others are kept.
        """
        import torch

        if isinstance(value, torch.Tensor):
            # What modules hand out beside tensors that FSDP knows may be their own.
            return self.copy_tensor(name, value, is_gathered=is_gathered and not str(name[-1:]).count("_extra_state"))
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, dict):
            made = copy.copy(value)  # keeps the class, and a state dict's metadata
            for key, each in value.items():
                made[key] = self.copy_tree((*name, key), each, is_gathered=is_gathered)
            return made
        if type(value) in (list, tuple):
            return type(value)(
                self.copy_tree((*name, index), each, is_gathered=is_gathered) for index, each in enumerate(value)
            )
        return copy.deepcopy(value)

    def copy_tensor(self, name: Name, tensor: torch.Tensor, *, is_gathered: bool = False) -> torch.Tensor:
        """Return a copy of `tensor` in host memory; of the local part alone, where it is sharded. See `copy_tree`."""
        import torch

        if type(tensor) is torch.Tensor:
            return self._copy_plain(name, tensor, is_gathered)
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed._shard.sharded_tensor import ShardedTensor
        from torch.distributed.tensor import DTensor
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        with torch.no_grad():
            if isinstance(tensor, AsyncCollectiveTensor):
                tensor = tensor.wait()
            if isinstance(tensor, ShardedTensor):
                return self._copy_sharded(name, tensor, is_gathered)
            if isinstance(tensor, DTensor):
                local = self.copy_tensor((*name, "local"), tensor._local_tensor, is_gathered=is_gathered)
                return DTensor(local, tensor._spec, requires_grad=False)
            if is_traceable_wrapper_subclass(tensor):  # quantised weights
                parts, context = tensor.__tensor_flatten__()
                held = {part: getattr(tensor, part) for part in parts}
                inner = {part: self.copy_tree((*name, part), each) for part, each in held.items()}
                made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
                return made
            return self._copy_plain(name, tensor, is_gathered)

    def _copy_sharded(self, name: Name, tensor: Any, is_gathered: bool) -> Any:
        """Copy this rank's shards in a state dict of FSDP1, whose shards are as a rule made for it and kept."""
        from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

        if any(shard.tensor.device.type != "cpu" for shard in tensor.local_shards()):
            tensor = tensor.cpu()
        shards = tensor.local_shards()
        copies = [
            self.copy_tensor((*name, index), shard.tensor, is_gathered=is_gathered)
            for index, shard in enumerate(shards)
        ]
        if all(each is shard.tensor for each, shard in zip(copies, shards, strict=True)):
            return tensor
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(each, shard.metadata) for each, shard in zip(copies, shards, strict=True)],
            copy.deepcopy(tensor.metadata()),
            process_group=tensor._process_group,
        )

    def _copy_plain(self, name: Name, tensor: torch.Tensor, is_gathered: bool) -> torch.Tensor:
        is_in_host = tensor.device.type == "cpu"
        is_own = is_gathered and tensor.untyped_storage().data_ptr() not in self._live and _is_held_by_one(tensor)
        if is_own and is_in_host and not tensor.requires_grad:
            return tensor
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if place in self._done and tensor.numel():
            return self._done[place][1]
        target = self._get_buffer(name, tensor)
        target.copy_(tensor.detach(), non_blocking=not is_in_host and target.is_pinned())
        if not is_in_host:
            self._devices.add(tensor.device)
        if not is_own:  # else nothing leads to it again, and holding it would keep a GPU's memory
            self._done[place] = (tensor, target)
        return target

    def _get_buffer(self, name: Name, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        self._used.add(name)
        wanted = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type)
        known = self._buffers.get(name)
        if known is not None and known[0] == wanted:
            return known[1]
        made = torch.empty_like(
            tensor, device="cpu", requires_grad=False, pin_memory=tensor.device.type == "cuda" and tensor.numel() > 0
        )
        self._buffers[name] = (wanted, made)
        return made


def _is_held_by_one(tensor: torch.Tensor) -> bool:
    """Whether no other tensor has the memory of this one. Where torch does not tell, it is not so.

    Who else holds this very tensor, the object, cannot be told.
    """
    import torch

    storage = tensor.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    # One is the tensor, one the storage object. Memory that torch has not allocated (an array of numpy) has an owner
    # that is not counted; it cannot be resized either.
    return bool(count is not None and storage.resizable() and count(storage._cdata) <= 2)


def weigh_tensors(value: Any) -> int | None:
    """Return how many bytes of tensors `value` holds; None if it holds objects beyond containers and plain values."""
    import torch

    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    if isinstance(value, _PLAIN):
        return 0
    if isinstance(value, Mapping):
        parts = [*value.values(), *value.keys()]
    elif type(value) in (list, tuple):
        parts = list(value)
    else:
        return None
    total = 0
    for part in parts:
        size_bytes = weigh_tensors(part)
        if size_bytes is None:
            return None
        total += size_bytes
    return total
