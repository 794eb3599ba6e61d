"""Real FSDP on ranks without a GPU: one explicit switch, the training script unchanged.

Accelerate turns FSDP on for accelerator backends only. On a CPU it ignores the FSDP plugin without a word, and
under `accelerate launch` or torchrun even starts independent processes that all believe to be the main one.
PyTorch's FSDP itself, 1 and 2, works on a CPU under gloo. `enable_cpu_fsdp` closes the gap, so that examples, tests
and first experiments run the same code on a laptop as later on a cluster. It is meant for that, not for speed.

How: where FSDP was asked for, `PartialState` is made to join one gloo group of all launched processes, and
`AcceleratorState` is shown a distributed type that its own FSDP branch accepts, so that the decision, the checks
and the mixed precision settings remain Accelerate's.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from .errors import CallOrderError, UnsupportedError, UsageError

_PRECISIONS = ("no", "bf16")
_enabled = False


def enable_cpu_fsdp() -> None:
    """Let FSDP 1 and 2 run on CPU processes under gloo, for everything that Accelerate sets up from now on.

    Call it once at the top of the script, on every rank, before the first `Accelerator`, `PartialState` or
    `TrainingArguments`. It is not collective, and further calls do nothing. Nothing changes where FSDP was not asked
    for. It was asked for if the process was launched with an FSDP config (`accelerate launch`, or
    `ACCELERATE_USE_FSDP=true`), if a `FullyShardedDataParallelPlugin` is passed to `Accelerator`, or by
    `TrainingArguments(fsdp=True)`. Then:

    - all processes of one launch (`accelerate launch`, torchrun, mpirun) are the ranks of one gloo group; a process
      that no launcher started is the only rank of a group of one;
    - `accelerator.distributed_type` is `FSDP`, its device is `cpu`, and mixed precision may be "no" or "bf16";
    - `TrainingArguments` behave as with `use_cpu=True`;
    - three faults of torch on CPU ranks are worked around (`accel_fsdp_tools.upstream`).

    What cannot work on a CPU, or would do something else than asked, is refused with a `UsageError` when the
    Accelerator is built: fp16 and fp8; FSDP1 with `sync_module_states` or `cpu_ram_efficient_loading` (it broadcasts
    from GPU memory); FSDP1 with hybrid sharding (it counts the GPUs of a node; use FSDP2 with a
    `ParallelismConfig`); parameter offload.

    Raises:
        UsageError: an accelerator is visible to this process (FSDP would use it, whatever Accelerate is told, so
            `ACCELERATE_USE_CPU` does not help), or this torch has no gloo.
        CallOrderError: Accelerate's state exists already.
    """
    global _enabled
    if _enabled:
        return
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, PartialState

    from . import upstream

    if torch.accelerator.is_available():
        found = str(torch.accelerator.current_accelerator())
        raise UsageError(
            f"enable_cpu_fsdp(): this process sees an accelerator ({found}), and FSDP would use it. Call this only "
            "`if not torch.accelerator.is_available()`, or hide the accelerator from the whole process before it "
            "starts (CUDA_VISIBLE_DEVICES='' for Nvidia).",
            actual=found,
        )
    if not (dist.is_available() and dist.is_gloo_available()):
        raise UsageError("enable_cpu_fsdp(): this build of torch has no gloo backend; install one that has")
    if PartialState._shared_state or AcceleratorState._shared_state:
        raise CallOrderError(
            "enable_cpu_fsdp() came too late: an Accelerator, PartialState or TrainingArguments exists already. "
            "Make it the first call of the script."
        )
    upstream.keep_cpu_flat_params()
    upstream.copy_gathered_optimizer_states()
    _patch_plugin()
    _patch_partial_state()
    _patch_accelerator_state()
    _patch_training_arguments()
    _enabled = True


def _is_fsdp_requested() -> bool:
    # Accelerator sets this variable too, when it is given a plugin, before it builds its state.
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def _wrap(cls: Any, name: str, wrapper: Callable[..., None]) -> None:
    """Replace the method `name` of `cls` by `wrapper(original, self, *args, **kwargs)`."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        wrapper(original, self, *args, **kwargs)

    setattr(cls, name, method)


def _patch_plugin() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    def post_init(original: Callable[..., None], self: Any) -> None:
        try:
            original(self)
        except RuntimeError as error:
            # `sync_module_states` is what looks for a device there, and finds none.
            if not (self.fsdp_version == 1 and self.sync_module_states):
                raise
            raise UsageError(
                "FSDP1 cannot synchronize module states on a CPU. In an Accelerate config set "
                "`fsdp_sync_module_states: false` and `fsdp_cpu_ram_efficient_loading: false`; in the `fsdp_config` "
                'of TrainingArguments set `"sync_module_states": False` (it is on unless said otherwise); or use '
                "FSDP2. Every rank must then load or initialise the same weights itself.",
                expected=False,
                actual=True,
            ) from error

    _wrap(FullyShardedDataParallelPlugin, "__post_init__", post_init)


def _check_plugin(plugin: Any) -> None:
    """Refuse what FSDP would crash on, or do otherwise than asked, on a CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy

    strategy = plugin.sharding_strategy
    if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        raise UsageError(
            f"FSDP1 takes the number of GPUs of a node for the size of the shard groups of {strategy.name}. On a "
            "CPU that is 1, and nothing would be sharded. Use FULL_SHARD, or FSDP2 with a parallelism config.",
            actual=strategy.name,
        )
    offload = plugin.cpu_offload
    if isinstance(offload, CPUOffloadPolicy) or getattr(offload, "offload_params", False):
        raise UsageError("The parameters are on the CPU already: set `fsdp_offload_params: false` (`cpu_offload`)")


def _check_precision(mixed_precision: str | None, plugin: Any) -> None:
    import torch

    asked = (mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
    if torch.float16 in [getattr(plugin.mixed_precision_policy, field, None) for field in fields]:
        asked = "fp16"
    if asked not in _PRECISIONS:
        raise UsageError(
            f'FSDP on a CPU runs with mixed precision "no" or "bf16", not with {asked!r}: fp16 would train without '
            "a gradient scaler, which Accelerate has for accelerators only, and fp8 needs a GPU.",
            expected=_PRECISIONS,
            actual=asked,
        )


def _patch_partial_state() -> None:
    import torch
    import torch.distributed as dist
    from accelerate.state import PartialState

    from . import upstream

    def init(original: Callable[..., None], self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if PartialState._shared_state or not _is_fsdp_requested():
            original(self, cpu, **kwargs)
            return
        # A group that the script made itself; made without naming a backend, it has gloo for the CPU too.
        if dist.is_initialized() and "cpu:gloo" not in dist.get_backend_config():
            backend = dist.get_backend_config()
            raise UsageError(f"FSDP on a CPU needs gloo; the process group has {backend}", actual=backend)
        if not _is_launched():
            _become_only_rank()
        # Neither nccl, which a script may ask for, nor mpi, which Accelerate prefers where torch has it.
        kwargs["backend"] = "gloo"
        original(self, True, **kwargs)
        # Accelerate says "cpu:0", and FSDP1 compares with "cpu".
        PartialState._shared_state["device"] = torch.device("cpu")
        upstream.let_gloo_finish_before_exit()

    _wrap(PartialState, "__init__", init)


def _is_launched() -> bool:
    from accelerate.utils import get_int_from_env

    sizes = ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE"]
    return int(os.environ.get("LOCAL_RANK", "-1")) != -1 or int(get_int_from_env(sizes, 1)) > 1


def _become_only_rank() -> None:
    """Form a group of one process, without a port, and say so where Accelerate looks for it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(dist.get_rank())
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"] = str(dist.get_world_size())


def _patch_accelerator_state() -> None:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    signature = inspect.signature(AcceleratorState.__init__)

    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        plugin = given.arguments.get("fsdp_plugin")
        if AcceleratorState._shared_state or plugin is None or not _is_fsdp_requested():
            original(self, *args, **kwargs)
            return
        _check_precision(given.arguments.get("mixed_precision"), plugin)
        _check_plugin(plugin)
        PartialState(cpu=True, **given.arguments.get("kwargs", {}))
        if PartialState._shared_state["distributed_type"] != DistributedType.MULTI_CPU:
            raise CallOrderError(
                "FSDP was asked for by a plugin after a PartialState or TrainingArguments had been built without "
                "it, so the processes of this launch do not form a group. Build the Accelerator first, or set "
                "ACCELERATE_USE_FSDP=true for the process (`accelerate launch` with an FSDP config does)."
            )
        given.arguments["cpu"] = True
        # Any type for which Accelerate considers FSDP; it replaces it by FSDP.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        try:
            original(*given.args, **given.kwargs)
            if self.distributed_type != DistributedType.FSDP:
                raise UnsupportedError(
                    f"Accelerate answered the request for FSDP with {self.distributed_type}: this version of "
                    "Accelerate works differently from those that enable_cpu_fsdp() knows",
                    expected=DistributedType.FSDP,
                    actual=self.distributed_type,
                )
        except BaseException:
            # A second attempt must not meet a half-built state that speaks of a GPU.
            AcceleratorState._reset_state()
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
            raise

    _wrap(AcceleratorState, "__init__", init)


def _patch_training_arguments() -> None:
    try:
        from transformers import TrainingArguments
    except ImportError:
        return  # Accelerate alone is enough

    def post_init(original: Callable[..., None], self: Any) -> None:
        if self.fsdp:
            # The Trainer's Accelerator sets this as well, but the PartialState is built here.
            os.environ["ACCELERATE_USE_FSDP"] = "true"
        if _is_fsdp_requested():
            self.use_cpu = True  # otherwise they refuse bf16
        original(self)

    _wrap(TrainingArguments, "__post_init__", post_init)
