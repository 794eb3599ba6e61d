"""Workarounds for two faults of torch's FSDP1 with full state dicts on CPU ranks.

Both come from the same assumption, true on a GPU only: that `.to("cpu")` and `.cpu()` copy. On a CPU tensor they
return the tensor itself. Nothing here changes what happens to tensors of an accelerator. The patches act on torch's
classes for the rest of the process; applying one twice is harmless.

Observed with torch 2.13. `tests/test_upstream.py` runs each fault without its workaround and expects it to be there:
when torch is repaired, that test fails, and the workaround can go.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

_MARK = "_accel_fsdp_tools_patch"


def keep_cpu_flat_params() -> None:
    """Stop `state_dict()` of an FSDP1 model on the CPU from reading freed memory. Not collective.

    With `FULL_STATE_DICT` and `offload_to_cpu=True` (which `accelerator.save_state` always sets) torch moves the
    gathered flat parameter to the CPU and frees the original. On the CPU nothing was moved, so what it frees is the
    parameter it is about to read: the process dies of a segmentation fault in the state-dict hook. With the patch,
    a flat parameter that is on the CPU already stays where it is.

    torch 2.13: `FlatParamHandle.to_cpu`. Repaired upstream once a plain full state dict of an FSDP1 model on gloo
    ranks no longer kills the process.
    """
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    original = FlatParamHandle.to_cpu
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    @contextlib.contextmanager
    def to_cpu(self: Any) -> Iterator[None]:
        if self.flat_param.device.type == "cpu":
            yield
        else:
            with original(self):
                yield

    setattr(to_cpu, _MARK, True)
    FlatParamHandle.to_cpu = to_cpu


def copy_gathered_optimizer_states() -> None:
    """Stop an FSDP1 full optimizer state dict on the CPU from mixing up its entries. Not collective.

    With `use_orig_params=True` torch gathers one state after the other (`exp_avg`, then `exp_avg_sq`) into the same
    buffer and hands out views of it, "offloaded" by a `.cpu()` that copies nothing. All of them end up with what was
    gathered last, and the file is wrong without any error. With the patch, each gathered state is copied before the
    buffer is used again.

    torch 2.13: `torch.distributed.fsdp._optim_utils._unflatten_orig_param_states`. Repaired upstream once
    `FSDP.optim_state_dict` with `offload_to_cpu=True` on gloo ranks gives `exp_avg` and `exp_avg_sq` that differ.
    """
    import torch
    from torch.distributed.fsdp import _optim_utils

    original = _optim_utils._unflatten_orig_param_states
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def unflatten(
        fsdp_param_info: Any,
        output_states: dict[str, dict[str, Any]],
        state_name: str,
        shard_state: bool,
        to_save: bool,
        cpu_offload: bool,
    ) -> None:
        gathered = {name: states.get(state_name) for name, states in output_states.items()}
        original(fsdp_param_info, output_states, state_name, shard_state, to_save, cpu_offload)
        for name, states in output_states.items():
            value, source = states.get(state_name), gathered[name]
            plain = type(value) is torch.Tensor and type(source) is torch.Tensor
            if plain and value.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                states[state_name] = value.clone()

    setattr(unflatten, _MARK, True)
    _optim_utils._unflatten_orig_param_states = unflatten
