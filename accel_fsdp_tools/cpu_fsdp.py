"""Real FSDP on ranks without a GPU: one explicit switch, the training script unchanged.

Accelerate turns FSDP on for accelerator backends only. On a CPU it ignores the FSDP plugin without a word, and under
`accelerate launch` or torchrun even starts independent processes that all believe to be the main one. PyTorch's FSDP
itself, 1 and 2, works on a CPU under gloo. `enable_cpu_fsdp` closes the gap, so that examples, tests and first
experiments run the same code on a laptop as later on a cluster. It is meant for that, not for speed.

How: where FSDP was asked for, `PartialState` is made to join one gloo group of all launched processes, and
`AcceleratorState` is shown a distributed type that its own FSDP branch accepts, so that the decision, the checks and
the mixed precision settings remain Accelerate's.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from .errors import CallOrderError, UnsupportedError, UsageError

_HIDE = (
    "On a machine with a GPU, leave out enable_cpu_fsdp() (for instance `if not torch.accelerator.is_available(): "
    "enable_cpu_fsdp()`), or hide the GPU from the whole process before it starts (CUDA_VISIBLE_DEVICES='')."
)

_enabled = False


def enable_cpu_fsdp() -> None:
    """Let FSDP 1 and 2 run on CPU processes under gloo, for everything that Accelerate sets up from now on.

    Call it once at the top of the script, before the first `Accelerator`, `PartialState` or `TrainingArguments`,
    on every rank; it is not collective, and further calls do nothing. Nothing changes where FSDP was not asked for.
    It was asked for if the process was launched with an FSDP config (`accelerate launch`, `ACCELERATE_USE_FSDP`),
    if a `FullyShardedDataParallelPlugin` is passed to `Accelerator`, or by `TrainingArguments(fsdp=True)`. Then:

    - all processes of one launch (`accelerate launch`, torchrun, mpirun) are the ranks of one gloo group; a process
      that was started without a launcher is the only rank of a group of one;
    - `accelerator.distributed_type` is `FSDP` and its device is `cpu`, mixed precision may be "no" or "bf16";
    - `TrainingArguments` behave as with `use_cpu=True`;
    - two faults of torch that make full state dicts crash or lie on CPU ranks are worked around
      (`accel_fsdp_tools.upstream`).

    What cannot work on a CPU is refused with a `UsageError` when the Accelerator is built: fp16 and
    fp8, FSDP1 with `sync_module_states` or `cpu_ram_efficient_loading` (broadcasts from GPU memory), FSDP1 with
    hybrid sharding (it counts GPUs per node; use FSDP2 with a `ParallelismConfig`), parameter or activation offload.

    Raises:
        UsageError: an accelerator is visible to this process (FSDP would choose it, whatever Accelerate is told),
            or this torch has no gloo.
        CallOrderError: Accelerate's state exists already.
    """
    global _enabled
    if _enabled:
        return
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, PartialState

    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        raise UsageError(
            f"enable_cpu_fsdp(): this process sees an accelerator ({found}). {_HIDE}", actual=str(found)
        )
    if not (dist.is_available() and dist.is_gloo_available()):
        raise UsageError("enable_cpu_fsdp(): this build of torch has no gloo backend; install one that has")
    if PartialState._shared_state or AcceleratorState._shared_state:
        raise CallOrderError(
            "enable_cpu_fsdp() came too late: an Accelerator, PartialState or TrainingArguments exists already. "
            "Make it the first call of the script, before any of them."
        )
    from . import upstream

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


def _wrap_init(cls: Any, name: str, wrapper: Callable[..., None]) -> None:
    """Replace `cls.name` by `wrapper(original, self, *args, **kwargs)`."""
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
            # Only `sync_module_states` looks for a device there, and finds none.
            if not (self.fsdp_version == 1 and self.sync_module_states):
                raise
            raise UsageError(
                "FSDP1 cannot synchronize module states on a CPU. Set `fsdp_sync_module_states: false` and "
                "`fsdp_cpu_ram_efficient_loading: false` in the Accelerate config, or "
                '`"sync_module_states": False` in the `fsdp_config` of TrainingArguments (there it is on unless '
                "said otherwise), or use FSDP2. Every rank must then load or initialise the same weights itself."
            ) from error

    _wrap_init(FullyShardedDataParallelPlugin, "__post_init__", post_init)


def _check_plugin(plugin: Any) -> None:
    """Refuse what FSDP would crash on, or do something else than asked, on a CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy

    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        raise UsageError(
            f"FSDP1 with {strategy.name} takes the number of GPUs of a node for the size of its shard groups; on a "
            "CPU that is 1 and nothing would be sharded. Use FULL_SHARD, or FSDP2 with a parallelism config.",
            actual=strategy.name,
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) or getattr(
        plugin.cpu_offload, "offload_params", False
    ):
        raise UsageError(
            "Parameters are on the CPU already: set `fsdp_offload_params: false` (`cpu_offload`)"
        )
    if plugin.activation_checkpointing_offload:
        raise UsageError(
            "Activations are on the CPU already: set `fsdp_activation_checkpointing_offload: false`"
        )


def _check_precision(mixed_precision: str | None, plugin: Any) -> None:
    import torch

    precision = (mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()
    policy = plugin.mixed_precision_policy
    dtypes = [
        getattr(policy, name, None)
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
    ]
    if precision not in ("no", "bf16") or torch.float16 in dtypes:
        wrong = precision if precision not in ("no", "bf16") else "fp16"
        raise UsageError(
            f"Mixed precision {wrong} does not work on a CPU: Accelerate would run it without a gradient scaler. "
            'Use "bf16" or "no".',
            expected=("no", "bf16"),
            actual=wrong,
        )


def _patch_partial_state() -> None:
    import torch
    import torch.distributed as dist
    from accelerate.state import PartialState

    def init(original: Callable[..., None], self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if PartialState._shared_state or not _is_fsdp_requested():
            original(self, cpu, **kwargs)
            return
        if dist.is_initialized() and "gloo" not in str(dist.get_backend()):
            raise UsageError(
                f"FSDP on CPU needs gloo, and the process group is {dist.get_backend()}", expected="gloo"
            )
        if not _is_launched():
            _become_only_rank()
        # Not what a script asked for on a GPU (nccl), nor MPI, which Accelerate prefers where torch has it.
        kwargs["backend"] = "gloo"
        original(self, True, **kwargs)
        # Accelerate says "cpu:0"; FSDP1 compares with "cpu".
        PartialState._shared_state["device"] = torch.device("cpu")

    _wrap_init(PartialState, "__init__", init)


def _is_launched() -> bool:
    from accelerate.utils import get_int_from_env

    sizes = ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE"]
    return int(os.environ.get("LOCAL_RANK", -1)) != -1 or get_int_from_env(sizes, 1) > 1


def _become_only_rank() -> None:
    """Form a group of one process (without a port), and say so where Accelerate looks for it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(dist.get_rank())
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())


def _patch_accelerator_state() -> None:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original_signature = inspect.signature(AcceleratorState.__init__)

    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        given = original_signature.bind(self, *args, **kwargs).arguments
        plugin = given.get("fsdp_plugin")
        if AcceleratorState._shared_state or plugin is None or not _is_fsdp_requested():
            original(self, *args, **kwargs)
            return
        _check_precision(given.get("mixed_precision"), plugin)
        _check_plugin(plugin)
        PartialState(True, **given.get("kwargs", {}))
        if PartialState._shared_state["distributed_type"] is not DistributedType.MULTI_CPU:
            raise CallOrderError(
                "FSDP was asked for by a plugin after a PartialState had been built without it, so the processes of "
                "this launch do not form a group. Build the Accelerator first, or set ACCELERATE_USE_FSDP=true."
            )
        # Any type of Accelerate's list of backends that FSDP may replace; it replaces it by FSDP.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        kwargs["cpu"] = True
        try:
            original(self, *args, **kwargs)
            if self.distributed_type is not DistributedType.FSDP:
                raise UnsupportedError(
                    f"Accelerate answered FSDP with {self.distributed_type}; this version of it works in another way"
                )
        except BaseException:
            # Without this a second attempt would meet a half-built state of a GPU run.
            AcceleratorState._reset_state()
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
            raise

    _wrap_init(AcceleratorState, "__init__", init)


def _patch_training_arguments() -> None:
    try:
        from transformers import TrainingArguments
    except ImportError:
        return  # Accelerate alone is enough

    def post_init(original: Callable[..., None], self: Any) -> None:
        # They refuse bf16 without a GPU and build their own PartialState, before they look at their `fsdp`.
        if _is_fsdp_requested() or self.fsdp:
            self.use_cpu = True
        original(self)

    _wrap_init(TrainingArguments, "__post_init__", post_init)
