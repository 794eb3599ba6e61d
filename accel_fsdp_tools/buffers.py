"""What FSDP1's mixed precision makes of buffers in state dicts, which is not what it makes of them in memory.

At the first forward or state dict FSDP1 casts a model's floating buffers to `buffer_dtype` for good. A state dict,
sharded or full, has them in their original dtype again if any unit around them has parameters of its own
(`_common_unshard_post_state_dict_hook` of torch 2.13). So of two buffers that are alike in memory one may be float32 in
a checkpoint, and the other, beside units that hold all parameters, bfloat16.

Not collective, nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

Place = tuple[int, str]
"""Where a buffer is registered: id of the module, and name."""


@dataclass(frozen=True)
class BufferCast:
    """How FSDP1 casts one buffer: for computing, and for a state dict.

    `memory` is the dtype it has in memory from the first forward on; `is_pending` while that is still to come. `saved`
    is that of a state dict; None where it is left as it is in memory.
    """

    original: torch.dtype
    memory: torch.dtype
    is_pending: bool
    saved: torch.dtype | None = None

    def apply(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return what a state dict would hold: the buffer itself, or a copy."""
        result = buffer
        for dtype in (self.memory if self.is_pending else None, self.saved):
            if dtype is not None and result.dtype != dtype:
                result = result.detach().to(dtype)
        return result

    def get_saved_dtype(self, buffer: torch.Tensor) -> torch.dtype:
        """Return the dtype of what `apply` returns."""
        if self.saved is not None:
            return self.saved
        return self.memory if self.is_pending else buffer.dtype

    def explains(self, buffer: torch.Tensor, dtype: str) -> bool:
        """Whether `dtype` is not the buffer's own in a state dict, but its other one: of a model wrapped otherwise."""
        saved, known = self.get_saved_dtype(buffer), (self.original, self.memory)
        return saved in known and dtype in (str(each).removeprefix("torch.") for each in known if each != saved)


def find_buffer_casts(model: torch.nn.Module) -> dict[Place, BufferCast]:
    """Return how FSDP1 casts the floating buffers of a prepared model, those that it leaves alone not included."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    casts: dict[Place, BufferCast] = {}
    visited: set[int] = set()
    for unit in reversed(units):  # innermost first: the nearest unit says how to compute
        for name, place, buffer in _iterate_buffers(unit):
            dtype = unit.mixed_precision.buffer_dtype
            if dtype is None or name in unit._ignored_buffer_names or not buffer.is_floating_point():
                visited.add(id(buffer))
                continue
            original = unit._buffer_name_to_orig_dtype.get(name, buffer.dtype)
            if id(buffer) not in visited:
                visited.add(id(buffer))
                # Set by the first forward or state dict, on every unit.
                casts[place] = BufferCast(original, dtype, unit._is_root is None)
            # Whoever is farther out comes later and has the last word.
            if unit._handle is not None and name in unit._buffer_name_to_orig_dtype:
                known = casts.get(place, BufferCast(original, buffer.dtype, False))
                casts[place] = BufferCast(known.original, known.memory, known.is_pending, original)
    return casts


def _iterate_buffers(unit: FullyShardedDataParallel) -> Iterator[tuple[str, Place, torch.Tensor]]:
    """Yield each buffer of a unit once, under the name by which FSDP1 knows it."""
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    seen: set[int] = set()
    for module_name, module in unit.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                full_name = f"{module_name}.{name}" if module_name else name
                yield clean_tensor_name(full_name), (id(module), name), buffer
