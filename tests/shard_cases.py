"""A small model under every kind of sharding that the walk over local shards knows, and its whole tensors.

Sizes are odd and shapes differ, so that shards are uneven, some are empty, and cuts fall inside rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

WORLD_2_AND_4 = (2, 4)


class Block(nn.Module):
    """Two linear layers of odd widths, a norm, and buffers of several kinds."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x) * self.scale.to(x.dtype))))


class Net(nn.Module):
    def __init__(self, *, width: int = 10, hidden: int = 13, vocabulary: int = 23, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, hidden), Block(width, hidden)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_net(**options: Any) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net(**options)


@dataclass(frozen=True)
class Case:
    """`wrap(net)` shards; `worlds` are the numbers of ranks it can run on."""

    name: str
    wrap: Callable[[nn.Module], nn.Module]
    options: tuple[tuple[str, Any], ...] = ()
    prepare: Callable[[nn.Module], nn.Module] = lambda net: net
    worlds: tuple[int, ...] = WORLD_2_AND_4


def _fsdp1(**options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(net: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        arguments = {"use_orig_params": True, **options}
        arguments["sharding_strategy"] = ShardingStrategy[arguments.pop("strategy", "FULL_SHARD")]
        if "HYBRID" in arguments["sharding_strategy"].name:
            arguments["process_group"] = _make_hybrid_groups()
        if ignored := arguments.pop("ignored", None):
            arguments["ignored_states"] = list(net.get_submodule(ignored).parameters())
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(net, auto_wrap_policy=policy, device_id=torch.device("cpu"), **arguments)

    return wrap


def _make_hybrid_groups() -> tuple[Any, Any]:
    import torch.distributed as dist

    mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return mesh.get_group(1), mesh.get_group(0)


def _fsdp2(
    *mesh_shape: int, ignored: str | None = None, dim: int = 0, **options: Any
) -> Callable[[nn.Module], nn.Module]:
    def wrap(net: nn.Module) -> nn.Module:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        shape = mesh_shape or (dist.get_world_size(),)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        leave = set(net.get_submodule(ignored).parameters()) if ignored else None
        placement = (lambda parameter: Shard(dim) if parameter.dim() > dim else Shard(0)) if dim else None
        for module in [*(each for each in net.modules() if isinstance(each, Block)), net]:
            fully_shard(module, mesh=mesh, ignored_params=leave, shard_placement_fn=placement, **options)
        return net

    return wrap


def _fsdp2_with_tp(net: nn.Module) -> nn.Module:
    """Rows of `up` are cut twice (strided), columns of `down` and rows by both, norms and embeddings by FSDP alone."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"])


def _freeze(net: nn.Module) -> nn.Module:
    net.blocks[0].requires_grad_(False)
    return net


def _checkpoint_activations(net: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
    return net


def _add_lora(net: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return get_peft_model(net, LoraConfig(r=3, target_modules=["up", "down"], init_lora_weights=False))


_MIXED_1 = MixedPrecision(param_dtype=torch.bfloat16)
_MIXED_2 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
_SMALL = (("width", 8), ("hidden", 16), ("vocabulary", 24))

CASES = {
    case.name: case
    for case in (
        Case("unsharded", lambda net: net),
        Case("fsdp1", _fsdp1()),
        Case("fsdp1 flat", _fsdp1(use_orig_params=False)),
        Case("fsdp1 SHARD_GRAD_OP", _fsdp1(strategy="SHARD_GRAD_OP")),
        Case("fsdp1 flat SHARD_GRAD_OP", _fsdp1(strategy="SHARD_GRAD_OP", use_orig_params=False)),
        Case("fsdp1 NO_SHARD", _fsdp1(strategy="NO_SHARD")),
        Case("fsdp1 flat NO_SHARD", _fsdp1(strategy="NO_SHARD", use_orig_params=False)),
        Case("fsdp1 HYBRID", _fsdp1(strategy="HYBRID_SHARD"), worlds=(4,)),
        Case("fsdp1 flat HYBRID", _fsdp1(strategy="HYBRID_SHARD", use_orig_params=False), worlds=(4,)),
        Case("fsdp1 mixed precision", _fsdp1(strategy="SHARD_GRAD_OP", mixed_precision=_MIXED_1)),
        Case("fsdp1 NO_SHARD mixed precision", _fsdp1(strategy="NO_SHARD", mixed_precision=_MIXED_1)),
        Case("fsdp1 ignored", _fsdp1(ignored="head")),
        Case("fsdp1 tied", _fsdp1(), options=(("tied", True),)),
        Case("fsdp1 frozen", _fsdp1(), prepare=_freeze),
        Case("fsdp1 bf16", _fsdp1(), prepare=lambda net: net.to(torch.bfloat16)),
        Case("fsdp1 activation checkpointing", lambda net: _checkpoint_activations(_fsdp1()(net))),
        Case("fsdp1 compile", lambda net: torch.compile(_fsdp1()(net), backend="eager")),
        Case("fsdp1 LoRA", _fsdp1(), prepare=_add_lora),
        Case("fsdp2", _fsdp2()),
        Case("fsdp2 unsharded after forward", _fsdp2(reshard_after_forward=False)),
        Case("fsdp2 mixed precision", _fsdp2(reshard_after_forward=False, mp_policy=_MIXED_2)),
        Case("fsdp2 columns", _fsdp2(dim=1), options=_SMALL),
        Case("fsdp2 HSDP", _fsdp2(2, 2), worlds=(4,)),
        Case("fsdp2 TP", _fsdp2_with_tp, options=_SMALL, worlds=(4,)),
        Case("fsdp2 TP odd", _fsdp2_with_tp, options=(("width", 8), ("hidden", 14)), worlds=(4,)),
        Case("fsdp2 ignored", _fsdp2(ignored="head")),
        Case("fsdp2 tied", _fsdp2(), options=(("tied", True),)),
        Case("fsdp2 frozen", _fsdp2(), prepare=_freeze),
        Case("fsdp2 bf16", _fsdp2(), prepare=lambda net: net.to(torch.bfloat16)),
        Case("fsdp2 activation checkpointing", lambda net: _fsdp2()(_checkpoint_activations(net))),
        Case("fsdp2 compile", lambda net: torch.compile(_fsdp2()(net), backend="eager")),
        Case("fsdp2 LoRA", _fsdp2(), prepare=_add_lora),
    )
}


def build_case(case: Case) -> nn.Module:
    """Return the sharded model; the same values on every rank, and for every case with the same options."""
    return case.wrap(case.prepare(build_net(**dict(case.options))))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, vocabulary: int) -> None:
    """One update, on the same batch on every rank."""
    tokens = torch.arange(6).reshape(2, 3) % vocabulary
    with torch.enable_grad():
        run(model, tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Forward; what `torch.compile` wraps runs uncompiled, since only the wrapper matters here."""
    return getattr(model, "_orig_mod", model)(tokens)


def gather_whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and persistent buffers whole, by FSDP's own means; wrappers' prefixes removed."""
    from accel_fsdp_tools.live import clean_fqn

    def read(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {
            clean_fqn(name): (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in named
        }

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    keep = {clean_fqn(name) for name, _ in model.named_buffers() if not name.endswith("scratch")}
    buffers = {name: value for name, value in read(model.named_buffers()).items() if name in keep}
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        inner = model._orig_mod if hasattr(model, "_orig_mod") else model
        with FullyShardedDataParallel.summon_full_params(inner, writeback=False):
            return {**read(inner.named_parameters(remove_duplicate=False)), **buffers}
    return {**read(model.named_parameters(remove_duplicate=False)), **buffers}
