"""The whole model as it would be without FSDP, as a tree of modules without data.

transformers and PEFT are asked about a *model*: its classes, ties, conversions and order. The live one is wrapped,
sharded and renamed, and building another from its config would draw random numbers and miss what the user changed. So
its modules are copied without their contents: the same attributes, the original classes, and meta tensors of the
whole shapes. Nothing of the live model is touched.
"""

from __future__ import annotations

from typing import Any

import torch

from ..live import unwrap_module
from ..manifest import ModelFacts, TensorFacts

_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def build_skeleton(model: torch.nn.Module, facts: ModelFacts) -> torch.nn.Module:
    """Return a copy of the module inside `model` with the meta tensors that `facts` (`live.describe_model`) lists.

    Ties are ties in the copy. Not collective, no random numbers are drawn; memory: the modules' attributes.
    """
    inner = _unwrap(model)
    # DistributedDataParallel's prefix is in the names where it is the outermost.
    is_prefixed = bool(facts.tensors) and all(tensor.fqn.startswith("module.") for tensor in facts.tensors)
    return _Builder(facts).copy(inner, "module" if is_prefixed and "module" not in inner._modules else "")


class _Builder:
    def __init__(self, facts: ModelFacts) -> None:
        self.owned: dict[str, dict[str, TensorFacts]] = {}
        for tensor in facts.tensors:
            owner, _, name = tensor.fqn.rpartition(".")
            self.owned.setdefault(owner, {})[name] = tensor
        self.groups = {name: group[0] for group in facts.ties for name in group}
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.copies: dict[int, torch.nn.Module] = {}

    def copy(self, module: torch.nn.Module, path: str) -> torch.nn.Module:
        module = _unwrap(module)
        if id(module) in self.copies:  # one module in two places
            return self.copies[id(module)]
        cls = get_original_class(module)
        copy: torch.nn.Module = object.__new__(cls)
        owned = self.owned.get(path, {})
        # FSDP1 leaves views of its flat parameter where parameters were.
        plain = {name: value for name, value in vars(module).items() if name not in owned}
        copy.__dict__.update(plain)
        for name in _HOOKS:  # FSDP's act on the live shards
            if name in plain:
                copy.__dict__[name] = type(plain[name])()
        copy.__dict__["_parameters"] = self._copy_parameters(module, owned)
        copy.__dict__["_buffers"] = _copy_buffers(module, owned)
        self.copies[id(module)] = copy
        copy.__dict__["_modules"] = {
            name: None if child is None else self.copy(child, f"{path}.{name}" if path else name)
            for name, child in module._modules.items()
        }
        return copy

    def _copy_parameters(
        self, module: torch.nn.Module, owned: dict[str, TensorFacts]
    ) -> dict[str, torch.nn.Parameter | None]:
        copied: dict[str, torch.nn.Parameter | None] = {}
        known = {name: each for name, each in owned.items() if each.kind == "parameter"}
        for name, parameter in module._parameters.items():
            if name in known or parameter is None:
                copied[name] = self._get_parameter(known[name]) if name in known else None
        for name, each in known.items():
            if name not in copied:
                copied[name] = self._get_parameter(each)
        return copied

    def _get_parameter(self, tensor: TensorFacts) -> torch.nn.Parameter:
        key = self.groups.get(tensor.fqn, tensor.fqn)
        if key not in self.parameters:
            self.parameters[key] = torch.nn.Parameter(_make_meta(tensor), requires_grad=False)
        return self.parameters[key]


def _copy_buffers(module: torch.nn.Module, owned: dict[str, TensorFacts]) -> dict[str, torch.Tensor | None]:
    return {
        name: _make_meta(owned[name])
        if name in owned
        else None
        if buffer is None
        else torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
        for name, buffer in module._buffers.items()
    }


def _make_meta(tensor: TensorFacts) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")


def _unwrap(module: Any) -> Any:
    """Return the user's module inside what FSDP1, torch.compile and activation checkpointing put around any module."""
    while True:
        inner = unwrap_module(module)
        inner = inner._modules.get("_checkpoint_wrapped_module") or inner
        if inner is module:
            return module
        module = inner


def get_original_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class that a module had before FSDP2 gave it one of its own (`FSDP<Name>`)."""
    from torch.distributed.fsdp import FSDPModule

    cls = type(module)
    if isinstance(module, FSDPModule):
        mro = cls.__mro__
        return mro[mro.index(FSDPModule) + 1] if cls.__mro__[1] is FSDPModule else mro[cls._orig_cls_mro_index]
    return cls
