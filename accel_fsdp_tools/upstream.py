"""Workarounds for three faults of torch 2.13 on CPU ranks, applied by `enable_cpu_fsdp`.

Each function acts on torch or on the interpreter for the rest of the process, may be called more than once, is not
collective, and changes nothing for tensors of an accelerator.

`tests/test_upstream.py` also runs each fault *without* its workaround and expects it to be there: when torch is
repaired, that test fails, and the workaround can go.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

_MARK = "_accel_fsdp_tools_patch"
_EXIT_PAUSE_S = 0.1


def keep_cpu_flat_params() -> None:
    """Stop `state_dict()` of an FSDP1 model on the CPU from reading freed memory.

    With `FULL_STATE_DICT` and `offload_to_cpu=True` (which `accelerator.save_state` always sets) torch moves the
    gathered flat parameter to the CPU and frees the original. On the CPU nothing was moved, so it frees the very
    memory that it reads next, and the process dies of a segmentation fault. With the patch, a flat parameter that
    is on the CPU already stays where it is.

    Where: `FlatParamHandle.to_cpu`, torch 2.13. Repaired upstream once a plain full state dict of an FSDP1 model on
    two gloo ranks no longer kills the process.
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
    """Stop a full optimizer state dict of FSDP1 on the CPU from mixing up its entries.

    With `use_orig_params=True` torch gathers one state after the other (`exp_avg`, then `exp_avg_sq`) into the same
    buffer and hands out views of it, "offloaded" by a `.cpu()` that copies nothing on a CPU. All of them end up
    with what was gathered last, and the file is wrong without any error. With the patch, each gathered state is
    copied before the buffer is used again. (Setting `offload_to_cpu=False` in the plugin's
    `optim_state_dict_config` avoids it too, for one plugin at a time.)

    Where: `torch.distributed.fsdp._optim_utils._unflatten_orig_param_states`, torch 2.13. Repaired upstream once
    `FSDP.optim_state_dict` with `offload_to_cpu=True` on gloo ranks keeps `exp_avg` and `exp_avg_sq` apart.
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
        gathered = {name: states[state_name] for name, states in output_states.items()}
        original(fsdp_param_info, output_states, state_name, shard_state, to_save, cpu_offload)
        for name, states in output_states.items():
            value, source = states[state_name], gathered[name]
            if type(value) is not torch.Tensor or type(source) is not torch.Tensor:
                continue  # a sharded state is a copy
            if value.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                states[state_name] = value.clone()

    setattr(unflatten, _MARK, True)
    _optim_utils._unflatten_orig_param_states = unflatten


def let_gloo_finish_before_exit() -> None:
    """Keep a process that ends right after a collective from aborting at exit.

    A thread of gloo that has finished a collective drops its tensors. If it holds the last reference, it needs the
    interpreter's lock for that; if the interpreter has begun to shut down meanwhile, CPython ends the thread in the
    middle of a C++ destructor and the process aborts: "terminate called without an active exception", exit code
    134, after all work was done. `end_training()` does not prevent it where anything (a device mesh, an FSDP module)
    still refers to the group, since gloo's threads live as long as the group.

    The workaround is a pause of 0.1 s, with the lock released, in an exit handler. It is enough for collectives
    that are over, as those of a training are; one that nobody waited for can still be under way after it. It is
    bounded on purpose: destroying the group there would wait for collectives that a failed peer never joins.

    Where: `ProcessGroupGloo::runLoop`, torch 2.13 with Python 3.11. Repaired upstream once a script that ends on an
    unawaited `all_reduce` exits with 0 every time. (From 3.14 on CPython hangs such threads instead of ending them.)
    """
    atexit.unregister(_pause)
    atexit.register(_pause)


def _pause() -> None:
    time.sleep(_EXIT_PAUSE_S)
