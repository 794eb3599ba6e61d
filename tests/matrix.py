"""Configurations that a verification has to hold under: each prepared by a real Accelerator, trained, saved, loaded.

`Net` of `shard_cases` (odd sizes, 0-d and integer buffers) as Accelerate would get it. Where Accelerate cannot wrap a
model in that way on a CPU, it gets one that is wrapped already, which it takes as it is (`by_hand` says why).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.shard_cases import (
    _SMALL,
    Block,
    _add_lora,
    _freeze,
    _fsdp1,
    _fsdp2,
    _fsdp2_with_tp,
    build_net,
)

KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
WORLDS = (2, 4)


@dataclass(frozen=True)
class Configuration:
    """`plugin` are arguments of Accelerate's FSDP plugin; `wrap` wraps before Accelerate sees the model."""

    name: str
    fsdp_version: int = 2
    plugin: dict[str, Any] = field(default_factory=dict)
    options: tuple[tuple[str, Any], ...] = ()
    change: Callable[[nn.Module], nn.Module] = lambda net: net
    wrap: Callable[[nn.Module], nn.Module] | None = None
    by_hand: str = ""
    worlds: tuple[int, ...] = WORLDS
    hsdp: bool = False
    compiled: bool = False
    same_batches: bool = False  # ranks that share the work on one batch need the same one


def _to_bf16(net: nn.Module) -> nn.Module:
    return net.to(torch.bfloat16)


class _Quantized(nn.Module):
    """A frozen 4-bit weight as bitsandbytes keeps one: packed bytes in a parameter, scales and a code beside it."""

    def __init__(self, width: int, storage: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        packed = torch.randint(256, (width * width * 4,), dtype=torch.uint8, generator=generator)
        # Any pattern of bits occurs, those of NaNs included.
        self.weight = nn.Parameter(packed.view(storage).reshape(-1, 1), requires_grad=False)
        self.register_buffer("absmax", torch.rand(7, generator=generator))
        self.register_buffer("code", torch.linspace(-1, 1, 16))
        self.register_buffer("nested_absmax", torch.randint(256, (7,), dtype=torch.uint8, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.absmax.mean()


class _QuantizedBlock(Block):
    def __init__(self, width: int, hidden: int, storage: torch.dtype) -> None:
        super().__init__(width, hidden)
        self.base = _Quantized(width, storage)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(super().forward(x))


def _quantize(storage: torch.dtype) -> Callable[[nn.Module], nn.Module]:
    def change(net: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            net.blocks[1] = _QuantizedBlock(10, 13, storage)
        return net

    return change


BUFFERS = {
    "buffer_flag": torch.tensor(True),
    "buffer_number": torch.tensor(0.5),
    "buffer_half": torch.tensor(-2.0, dtype=torch.bfloat16),
    "buffer_tiny": torch.tensor(-3, dtype=torch.int8),
    "buffer_mask": torch.tensor([True, False, True]),
    "buffer_positions": torch.arange(11, dtype=torch.int32),
    "buffer_packed": torch.arange(253, dtype=torch.uint8).reshape(11, 23),
    "buffer_double": torch.tensor([1e-300, 2.0], dtype=torch.float64),
    "buffer_empty": torch.zeros(0, 3),
}


def _add_buffers(net: nn.Module) -> nn.Module:
    for name, value in BUFFERS.items():
        net.register_buffer(name, value.clone())
    return net


def _flat(**more: Any) -> dict[str, Any]:
    return {"use_orig_params": False, **more}


_NO_OFFLOAD = "Accelerate's plugin refuses to offload to the CPU what is on the CPU"
_NO_TP = "Accelerate takes tensor parallelism from transformers' models only"
_NO_HYBRID = "Accelerate's hybrid sharding counts the GPUs of a node"


def _offload_1(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import CPUOffload

    return _fsdp1(cpu_offload=CPUOffload(offload_params=True))(net)


def _offload_2(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False))(net)


CONFIGURATIONS = {
    each.name: each
    for each in (
        Configuration("FSDP1 orig", 1),
        Configuration("FSDP1 flat", 1, _flat()),
        Configuration("FSDP1 SHARD_GRAD_OP", 1, {"sharding_strategy": "SHARD_GRAD_OP"}),
        Configuration("FSDP1 NO_SHARD", 1, {"sharding_strategy": "NO_SHARD"}),
        Configuration("FSDP1 HSDP", 1, wrap=_fsdp1(strategy="HYBRID_SHARD"), by_hand=_NO_HYBRID, worlds=(4,)),
        Configuration("FSDP1 flat NO_SHARD", 1, _flat(sharding_strategy="NO_SHARD")),
        Configuration("FSDP1 compile", 1, compiled=True),
        Configuration("FSDP1 activation checkpointing", 1, {"activation_checkpointing": True}),
        Configuration("FSDP1 tied", 1, options=(("tied", True),)),
        Configuration("FSDP1 frozen", 1, change=_freeze),
        Configuration("FSDP1 LoRA", 1, change=_add_lora),
        Configuration("FSDP1 bf16", 1, change=_to_bf16),
        Configuration("FSDP1 buffers", 1, change=_add_buffers),
        Configuration("FSDP1 quantized base", 1, change=_quantize(torch.float32)),
        Configuration("FSDP2"),
        Configuration("FSDP2 no reshard", plugin={"reshard_after_forward": False}),
        Configuration("FSDP2 HSDP", worlds=(4,), hsdp=True),
        Configuration(
            "FSDP2 + TP", options=_SMALL, wrap=_fsdp2_with_tp, by_hand=_NO_TP, worlds=(4,), same_batches=True
        ),
        Configuration("FSDP2 CPU offload", wrap=_offload_2, by_hand=_NO_OFFLOAD),
        Configuration("FSDP2 compile", compiled=True),
        Configuration("FSDP2 activation checkpointing", plugin={"activation_checkpointing": True}),
        Configuration("FSDP2 tied", options=(("tied", True),)),
        Configuration("FSDP2 frozen", change=_freeze),
        Configuration("FSDP2 LoRA", change=_add_lora),
        Configuration("FSDP2 bf16", change=_to_bf16),
        Configuration("FSDP2 buffers", change=_add_buffers),
        Configuration("FSDP2 quantized base", change=_quantize(torch.uint8)),
    )
}


NOT_RUN = {
    "FSDP1 CPU offload": "FSDP1 pins the offloaded shards for its first forward, which torch can't do without an "
    "accelerator (its local memory is an ordinary flat parameter's)",
    "bitsandbytes Params4bit": "not installed here; its packed bytes and the tensors beside them stand in as plain "
    "parameters and buffers (`quantized base`)",
}
"""What is asked for and cannot run here, and why."""

OFFLOADED_1 = Configuration("FSDP1 CPU offload", 1, wrap=_offload_1, by_hand=_NO_OFFLOAD)


@dataclass(frozen=True)
class Cell:
    """One configuration, written as one kind of state dict by one number of ranks."""

    configuration: str
    kind: str
    world: int

    def __str__(self) -> str:
        return f"{self.configuration}, {self.kind.removesuffix('_STATE_DICT')}, {self.world} ranks"


CELLS = [Cell(name, kind, world) for name, each in CONFIGURATIONS.items() for kind in KINDS for world in each.worlds]


# Every kind of set-up once, under one version of FSDP; the others are in the matrix only.
SAMPLED = (
    "FSDP1 orig",
    "FSDP1 flat",
    "FSDP1 SHARD_GRAD_OP",
    "FSDP1 NO_SHARD",
    "FSDP1 activation checkpointing",
    "FSDP1 frozen",
    "FSDP1 buffers",
    "FSDP2",
    "FSDP2 HSDP",
    "FSDP2 + TP",
    "FSDP2 CPU offload",
    "FSDP2 compile",
    "FSDP2 tied",
    "FSDP2 LoRA",
    "FSDP2 bf16",
    "FSDP2 quantized base",
)


def choose_sample() -> list[Cell]:
    """Return each of these configurations once, the kinds by turns, on two ranks wherever it can."""
    return [Cell(name, KINDS[index % 2], CONFIGURATIONS[name].worlds[0]) for index, name in enumerate(SAMPLED)]


# -- one run -----------------------------------------------------------------------------------------------------------


class Registered:
    """What a user registers for checkpointing."""

    def __init__(self) -> None:
        self.value = torch.arange(5.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "name": "registered"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@dataclass
class Run:
    accelerator: Any
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any
    same_batches: bool = False

    def train(self, num_batches: int) -> None:
        for _, batch in zip(range(num_batches), self.loader, strict=False):
            tokens = torch.arange(6).reshape(2, 3) if self.same_batches else batch
            self.accelerator.backward(self.model(tokens).float().square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def spoil(self) -> None:
        """Change everything, so that nothing can be right by accident, and forget what was loaded before."""
        from accel_fsdp_tools.live import get_raw_optimizer
        from accel_fsdp_tools.shards import iterate_local_shards

        get_raw_optimizer(self.optimizer).state.clear()
        with torch.no_grad():
            for shard in iterate_local_shards(self.model):
                for _, tensor in shard.iterate_pieces():
                    tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)


def build(cell: Cell, *, dtype: torch.dtype | None = None, configuration: Configuration | None = None) -> Run:
    """Prepare everything for one cell. `dtype` casts the model's floating-point tensors before it is wrapped."""
    from torch.utils.data import DataLoader

    configuration = configuration or CONFIGURATIONS[cell.configuration]
    accelerator = build_accelerator(configuration, cell)
    options = dict(configuration.options)
    model: nn.Module = configuration.change(build_net(**options))
    if dtype is not None:
        model = model.to(dtype)
    if configuration.wrap is not None:
        model = configuration.wrap(model)
    if configuration.fsdp_version == 1:
        # Flat parameters exist only after wrapping; an optimizer built before would hold what is no longer trained.
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    vocabulary = int(options.get("vocabulary", 23))
    items = [torch.arange(3) * (number + 1) % vocabulary for number in range(40)]
    loader = DataLoader(items, batch_size=2, shuffle=True)
    if accelerator._models:
        optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
    else:
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(Registered())
    return Run(accelerator, model, optimizer, scheduler, loader, configuration.same_batches)


def build_accelerator(configuration: Configuration, cell: Cell) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    from accel_fsdp_tools import enable_cpu_fsdp

    enable_cpu_fsdp()
    arguments: dict[str, Any] = {
        "fsdp_version": configuration.fsdp_version,
        "state_dict_type": cell.kind,
        "auto_wrap_policy": "transformer_based_wrap" if configuration.wrap is None else "no_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
    }
    if configuration.fsdp_version == 1:
        arguments |= {
            "sharding_strategy": "FULL_SHARD",
            "use_orig_params": True,
            "sync_module_states": False,
            "cpu_ram_efficient_loading": False,
        }
    more: dict[str, Any] = {"dynamo_backend": "eager"} if configuration.compiled else {}
    if configuration.hsdp:
        more["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=cell.world // 2)
    return Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**{**arguments, **configuration.plugin}),
        **more,
    )
