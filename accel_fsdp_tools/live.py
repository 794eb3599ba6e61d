"""What is in memory: the names, whole shapes and ties of prepared models, and which optimizer belongs to which.

Walks what FSDP holds (flat parameters, DTensors) without gathering anything. Not collective, no copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .buffers import BufferCast, find_buffer_casts
from .errors import UsageError
from .manifest import ModelFacts, OptimizerFacts, TensorFacts, Topology
from .names import clean_fqn

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def get_raw_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside Accelerate's wrapper."""
    return optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer


def describe_topology(accelerator: Accelerator) -> Topology:
    """Return how this run is spread over ranks."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None) if is_fsdp(accelerator) else None
    mesh = getattr(accelerator, "torch_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None)
    strategy = getattr(plugin, "sharding_strategy", None)
    return Topology(
        world_size=accelerator.num_processes,
        distributed_type=str(accelerator.distributed_type.value),
        fsdp_version=None if plugin is None else int(plugin.fsdp_version),
        state_dict_type=None if plugin is None else plugin.state_dict_type.name,
        use_orig_params=None if plugin is None or plugin.fsdp_version != 1 else bool(plugin.use_orig_params),
        sharding_strategy=None if strategy is None else str(getattr(strategy, "name", strategy)),
        mixed_precision=str(accelerator.mixed_precision),
        device_type=accelerator.device.type,
        mesh=dict(zip(names, mesh.shape, strict=True)) if mesh is not None and names else None,
    )


def get_scheduler_classes(accelerator: Accelerator) -> list[str]:
    """Return the class names of the prepared schedulers."""
    return [type(getattr(each, "scheduler", each)).__name__ for each in accelerator._schedulers]


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has made an update, as far as its state tells: plain SGD has none, Adagrad's comes early."""
    return any(float(state["step"]) > 0 if "step" in state else bool(state) for state in optimizer.state.values())


def is_fsdp(accelerator: Accelerator) -> bool:
    """Whether this run uses FSDP (either version)."""
    return str(accelerator.distributed_type.value) == "FSDP"


def describe_model(model: torch.nn.Module) -> ModelFacts:
    """Return names, dtypes and whole shapes of a prepared model's parameters and persistent buffers.

    Dtypes are those of a state dict, which FSDP1's mixed precision makes others than those in memory.
    """
    tensors: dict[str, TensorFacts] = {}
    groups: dict[int | str, list[str]] = {}  # by the tensor's id, or its first name in a flat parameter
    flat_names: set[str] = set()
    for prefix, flat_param in _iterate_flat_params(model):
        params = flat_param._params or [flat_param] * len(flat_param._fqns)
        for index, (fqn, shape) in enumerate(zip(flat_param._fqns, flat_param._shapes, strict=True)):
            name = clean_fqn(f"{prefix}{fqn}")
            requires_grad = bool(params[index].requires_grad)
            tensors[name] = _describe(name, flat_param.dtype, shape, requires_grad, "parameter")
            flat_names.add(name)
        for shared in flat_param._shared_param_infos:
            name = clean_fqn(f"{prefix}{_join(shared[2], shared[0])}")
            primary = clean_fqn(f"{prefix}{_join(shared[5], shared[3])}")
            if primary in tensors:
                first = tensors[primary]
                tensors[name] = TensorFacts(name, first.dtype, first.shape, first.requires_grad, "parameter")
                flat_names.add(name)
                groups.setdefault(primary, [primary]).append(name)
    for raw_name, parameter in iterate_parameters(model):
        name = clean_fqn(raw_name)
        if name in flat_names or hasattr(parameter, "_fqns"):
            continue
        tensors[name] = _describe(name, parameter.dtype, parameter.shape, bool(parameter.requires_grad), "parameter")
        groups.setdefault(id(parameter), []).append(name)
    for name, buffer, cast in _iterate_persistent_buffers(model):
        dtype = buffer.dtype if cast is None else cast.get_saved_dtype(buffer)
        tensors[name] = _describe(name, dtype, buffer.shape, False, "buffer")
    inner = unwrap_module(model)
    config = getattr(inner, "config", None)
    return ModelFacts(
        class_name=get_class_name(inner),
        tensors=tuple(tensors.values()),
        ties=tuple(tuple(sorted(set(names))) for names in groups.values() if len(set(names)) > 1),
        config=None if config is None or not hasattr(config, "to_diff_dict") else _to_json(config.to_diff_dict()),
        is_peft=hasattr(inner, "peft_config"),
    )


def list_explained(model: torch.nn.Module, dtypes: Mapping[str, str]) -> list[str]:
    """Return the buffers whose dtype in a checkpoint is not this model's because FSDP1 casts them, and only therefore.

    A load loses nothing by these where the mixed precision is the same: in memory their dtype is, too.

    Args:
        dtypes: of tensors in the checkpoint, by name.
    """
    return [
        name
        for name, buffer, cast in _iterate_persistent_buffers(model)
        if cast is not None and name in dtypes and cast.explains(buffer, dtypes[name])
    ]


Place = tuple[int, str]
"""Where a parameter is registered: id of the module, and name. Between forward and backward FSDP has whole tensors
there, so what is registered does not tell."""


def find_fsdp2_shards(model: torch.nn.Module) -> dict[Place, torch.nn.Parameter]:
    """Return FSDP2's shards by the places where they belong."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[Place, torch.nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for each in group.fsdp_params:
                    info = each._module_info
                    names = (info.param_name, *info.shared_param_names)
                    for owner, name in zip((info.module, *info.shared_modules), names, strict=True):
                        found[id(owner), name] = each.sharded_param
    return found


def iterate_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield every parameter under each of its names, as the optimizer knows it.

    Between a forward and its backward FSDP2 registers gathered parameters in place of the shards (and leaves the
    root's there after a forward in evaluation); the shards are what is trained and saved.
    """
    shards = find_fsdp2_shards(model)
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, registered in module._parameters.items():
            if registered is not None:
                yield _join(module_name, name), shards.get((id(module), name), registered)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _to_json(value: Any) -> Any:
    """Turn a config into what JSON can hold; infinity and NaN, which some configs have, become text."""
    if isinstance(value, dict):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _describe(name: str, dtype: Any, shape: Any, requires_grad: bool, kind: str) -> TensorFacts:
    text = str(dtype).removeprefix("torch.")
    return TensorFacts(name, text, tuple(int(size) for size in shape), requires_grad, kind)


def _iterate_flat_params(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (prefix, flat parameter) for every FSDP1 unit that manages parameters."""
    for name, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        if handle is not None and hasattr(handle, "flat_param"):
            yield (f"{name}." if name else ""), handle.flat_param


def get_flat_names(model: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that FSDP1 has put into flat parameters."""
    return {clean_fqn(f"{prefix}{fqn}") for prefix, flat in _iterate_flat_params(model) for fqn in flat._fqns}


def _iterate_persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, BufferCast | None]]:
    casts = find_buffer_casts(model)
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield clean_fqn(_join(module_name, name)), buffer, casts.get((id(module), name))


def unwrap_module(model: Any) -> Any:
    """Return the user's module inside FSDP1, DDP, torch.compile (FSDP2 wraps in place)."""
    while True:
        for attribute in ("_fsdp_wrapped_module", "_orig_mod"):
            inner = model._modules.get(attribute) or model.__dict__.get(attribute)
            if inner is not None:
                model = inner
                break
        else:
            if type(model).__name__ == "DistributedDataParallel":
                model = model.module
                continue
            return model


def get_class_name(module: Any) -> str:
    """Return the module's own class name; FSDP2 renames classes to `FSDP<Name>` in place."""
    for cls in type(module).__mro__:
        if cls.__name__.startswith("FSDP") and cls.__module__.startswith("torch."):
            continue
        if cls.__name__.startswith("FSDP") and cls.__mro__[1:] and cls.__mro__[1].__name__ == "FSDPModule":
            continue
        return str(cls.__name__)
    return type(module).__name__


def describe_optimizers(accelerator: Accelerator) -> tuple[OptimizerFacts, ...]:
    """Return the facts of every prepared optimizer, having checked that each belongs to the model of its place.

    Accelerate saves optimizer i together with model i, whatever parameters it holds.

    Raises:
        UsageError: an optimizer's parameters are not those of the model at the same place.
    """
    owners: dict[int, int] = {}
    names: dict[int, list[str]] = {}
    for index, model in enumerate(accelerator._models):
        for name, parameter in iterate_parameters(model):
            owners.setdefault(id(parameter), index)
            names.setdefault(id(parameter), _get_original_names(name, parameter))
    facts = []
    for index, wrapped in enumerate(accelerator._optimizers):
        raw = get_raw_optimizer(wrapped)
        parameters = [parameter for group in raw.param_groups for parameter in group["params"]]
        found = {owners.get(id(parameter)) for parameter in parameters}
        if found != {index}:
            raise UsageError(_explain_pairing(index, found, accelerator), expected=index, actual=str(found))
        stateless = [
            name
            for parameter in parameters
            if parameter.requires_grad and parameter.numel() and not raw.state.get(parameter)
            for name in names[id(parameter)]
        ]
        facts.append(
            OptimizerFacts(
                class_name=type(raw).__name__,
                num_param_groups=len(raw.param_groups),
                num_parameters=len(parameters),
                model_index=index,
                stateless=tuple(sorted(stateless)),
                is_empty=not raw.state,
            )
        )
    return tuple(facts)


def _get_original_names(name: str, parameter: Any) -> list[str]:
    """Return the names that a parameter of the live model stands for: several for an FSDP1 flat parameter."""
    prefix = name.rpartition(".")[0]
    return [clean_fqn(_join(prefix, fqn)) for fqn in getattr(parameter, "_fqns", [name.rpartition(".")[2]])]


def _explain_pairing(index: int, found: set[int | None], accelerator: Accelerator) -> str:
    if None in found:
        what = "holds parameters of no prepared model (it was built before the model was prepared, or for another)"
    elif len(found) > 1:
        what = f"holds parameters of several models (at the places {sorted(found)})"  # type: ignore[type-var]
    else:
        what = f"holds the parameters of the model at place {found.pop()}"
    return (
        f"Optimizer {index} {what}, but Accelerate saves it together with model {index} of "
        f"{len(accelerator._models)}. Give accelerator.prepare one optimizer per model, models and optimizers in the "
        "same order; use parameter groups instead of two optimizers on one model."
    )
