"""Load optimizer state into a fresh process, completely, where Accelerate 1.15 does not.

Measured on torch 2.13 and accelerate 1.15:

- FSDP1 with sharded files: `accelerator.load_state` succeeds and leaves the optimizer empty on every rank, since
  DCP fills only tensors that exist and a fresh optimizer has none. Here the state is allocated from the metadata.
- FSDP2: a trainable parameter that never got a gradient has no state in the files, and the load fails for want of
  its key. Here such parameters are left out of the load and stay without state, as they were.
- FSDP2 with a full file: the same parameters make the load hang. Here the file is dealt out tensor by tensor.
- FSDP1 with sharded files under hybrid sharding: torch allocates the state over all ranks and FSDP gathers it over a
  shard group. Here it is allocated over the shard group.
- FSDP2 with a full file, on a mesh that leaves ranks out (beside tensor parallelism): torch scatters from the first
  rank of each mesh, which has no values. Here every rank gets them.
- FSDP2: torch's dummy step, which creates the state, goes through Accelerate's wrapper and does nothing in the
  middle of an accumulation. Here it sees the raw optimizer.

Every function is collective.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import layout
from .errors import MismatchError
from .formats.dcp import read_dcp_metadata
from .formats.opening import read_checkpoint
from .formats.reading import read_part
from .live import describe_model, get_flat_names, get_raw_optimizer, iterate_parameters
from .names import clean_fqn
from .ranks import get_rank, get_world_size, run_on_main

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def load_optimizer(accelerator: Accelerator, index: int, directory: Path, *, kind: str, was_empty: bool) -> list[str]:
    """Load optimizer `index` of an FSDP checkpoint; returns the trainable parameters that it had no state for.

    Args:
        kind: the state-dict type of the files, SHARDED_STATE_DICT or FULL_STATE_DICT. The plugin must be set to it.
        was_empty: the optimizer had no state at all when it was saved (no update had been made): hyper-parameters
            are loaded, and the state that torch makes up on the way is dropped again.
    """
    model = accelerator._models[index]
    raw = get_raw_optimizer(accelerator._optimizers[index])
    plugin = accelerator.state.fsdp_plugin
    is_sharded, is_fsdp1 = kind == layout.SHARDED, plugin.fsdp_version == 1
    if is_sharded:
        path = directory / f"optimizer_{index}"
        load = _load_sharded_fsdp1 if is_fsdp1 else _load_sharded_fsdp2
        stateless = load(plugin, model, raw, path)
    elif is_fsdp1:
        stateless = _load_full_fsdp1(accelerator, model, raw, directory, index)
    else:
        stateless = _load_full_fsdp2(model, raw, layout.get_optimizer_path(directory, index, kind))
    if was_empty:
        raw.state.clear()
        return []
    return sorted(stateless)


def _get_saved_parameters(directory: Path) -> set[str]:
    """Return the names of the parameters that a DCP optimizer directory holds state for."""
    paths = read_dcp_metadata(directory).key_paths.values()
    return {clean_fqn(str(path[2])) for path in paths if len(path) > 2 and path[:2] == ("optimizer", "state")}


def _get_names(model: torch.nn.Module, raw: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's parameters by name; a tied one by its first."""
    waiting = {id(parameter) for group in raw.param_groups for parameter in group["params"]}
    names = {}
    for name, parameter in iterate_parameters(model):
        if id(parameter) in waiting:
            waiting.remove(id(parameter))
            names[clean_fqn(name)] = parameter
    return names


def _load_sharded_fsdp2(plugin: Any, model: torch.nn.Module, raw: torch.optim.Optimizer, path: Path) -> list[str]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    saved = _get_saved_parameters(path)
    _forget_training(raw)
    wanted: dict[str, Any] = get_optimizer_state_dict(model, raw)
    stateless = [name for name in wanted["state"] if clean_fqn(name) not in saved]
    for name in stateless:
        del wanted["state"][name]
    dcp.load({"optimizer": wanted}, storage_reader=dcp.FileSystemReader(path))
    set_optimizer_state_dict(model, raw, wanted, options=StateDictOptions(strict=not stateless))
    # torch made state for them on the way, by a dummy step; they had none.
    names = _get_names(model, raw)
    for name in stateless:
        raw.state.pop(names[clean_fqn(name)], None)
    return stateless


def _forget_training(raw: torch.optim.Optimizer) -> None:
    """Make an optimizer as one that has made no update: torch makes up state for all its parameters or for none.

    Gradients go too: where there is one, torch makes up none.
    """
    if raw.state:
        raw.state.clear()
        raw.zero_grad(set_to_none=True)


def _load_sharded_fsdp1(plugin: Any, model: torch.nn.Module, raw: torch.optim.Optimizer, path: Path) -> list[str]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

    saved = _get_saved_parameters(path)
    with (
        warnings.catch_warnings(),
        FSDP.state_dict_type(model, plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config),
    ):
        # torch itself calls its deprecated ShardedTensor functions on this path.
        warnings.simplefilter("ignore", FutureWarning)
        if _get_shard_group(model).size() < get_world_size():
            state = _read_in_shard_groups(model, path)
        else:
            state = load_sharded_optimizer_state_dict(
                model_state_dict=model.state_dict(),
                optimizer_key="optimizer",
                storage_reader=dcp.FileSystemReader(path),
            )
        # Without any state on disk (no update yet, or plain SGD) the key is missing altogether.
        loaded = {"state": {}, **state["optimizer"]}
        _unshard_ignored(model, loaded["state"], path)
        raw.load_state_dict(FSDP.optim_state_dict_to_load(model, raw, loaded))
    return _find_flat_stateless(model, saved)


def _get_shard_group(model: torch.nn.Module) -> Any:
    """Return the group of ranks that FSDP1 cuts parameters over: not all under hybrid sharding."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

    return next(module.process_group for module in model.modules() if isinstance(module, FSDP))


def _read_in_shard_groups(model: torch.nn.Module, path: Path) -> dict[str, Any]:
    """Read what torch's `load_sharded_optimizer_state_dict` does, cut over each shard group.

    That one cuts over all ranks, and FSDP then puts the parts of one shard group together as if they were the whole:
    under hybrid sharding the state would be wrong in silence.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
    from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

    group, device = _get_shard_group(model), next(model.parameters()).device
    num_devices = torch.accelerator.device_count() if device.type != "cpu" else 1
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "size"):
            state[key] = "<bytes_io>"
            continue
        whole = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        is_cut = whole.numel() > 1
        state[key] = (
            _create_chunk_sharded_tensor(whole, dist.get_rank(group), group.size(), num_devices, group)
            if is_cut
            else whole
        )
    dcp.load(state, storage_reader=reader)
    nested: dict[str, Any] = unflatten_state_dict(state, metadata.planner_data)
    return nested


def _unshard_ignored(model: torch.nn.Module, state: dict[str, dict[str, Any]], path: Path) -> None:
    """Replace the states of parameters that FSDP ignores by whole tensors: torch shards whatever it allocates."""
    import torch

    flat = get_flat_names(model)
    ignored = [name for name in state if clean_fqn(name) not in flat]
    if not ignored:
        return
    tensors = read_checkpoint(path).sections[0].tensors
    for name in ignored:
        for key, value in state[name].items():
            disk = tensors.get(f"state.{clean_fqn(name)}.{key}")
            if disk is not None and type(value) is not torch.Tensor:
                whole = torch.frombuffer(read_part(disk), dtype=getattr(torch, disk.dtype))
                state[name][key] = whole.reshape(disk.shape)


def _find_flat_stateless(model: torch.nn.Module, saved: set[str]) -> list[str]:
    """Return the trainable parameters of an FSDP1 model without saved state; a tied one is saved by one name."""
    facts = describe_model(model)
    covered = saved.union(*(group for group in facts.ties if saved.intersection(group)))
    return [
        tensor.fqn
        for tensor in facts.tensors
        if tensor.requires_grad and tensor.kind == "parameter" and tensor.fqn not in covered
    ]


def _load_full_fsdp1(
    accelerator: Accelerator, model: torch.nn.Module, raw: torch.optim.Optimizer, directory: Path, index: int
) -> list[str]:
    from accelerate.utils.fsdp_utils import load_fsdp_optimizer

    load_fsdp_optimizer(accelerator.state.fsdp_plugin, accelerator, raw, model, str(directory), index)
    path = layout.get_optimizer_path(directory, index, layout.FULL)
    saved = run_on_main("reading the names", lambda: {clean_fqn(name) for name in _read_full(path)["state"]})
    return _find_flat_stateless(model, saved)


def _read_full(path: Path) -> dict[str, Any]:
    """Map a full optimizer file into memory; its tensors are read when they are used."""
    import torch

    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return state


@dataclass(frozen=True)
class _TensorOutline:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _load_full_fsdp2(model: torch.nn.Module, raw: torch.optim.Optimizer, path: Path) -> list[str]:
    """Deal a full optimizer file out to the ranks, tensor by tensor; rank 0 alone reads it.

    Not through torch's `set_optimizer_state_dict(full_state_dict=True)`: parameters without state make it hang
    (some ranks wait for a tensor that rank 0 does not have), and it turns hyper-parameter tuples into lists.
    Peak memory: the largest tensor, whole, on every rank.
    """
    import torch

    full = _read_full(path) if get_rank() == 0 else None
    state, groups = run_on_main("reading the optimizer", lambda: _outline(full))
    trainable = _get_names(model, raw)
    places = {
        id(parameter): place
        for place, parameter in enumerate(each for group in raw.param_groups for each in group["params"])
    }
    loaded: dict[int, dict[str, Any]] = {}
    for name, entries in state.items():
        parameter = trainable[name]
        values = loaded.setdefault(places[id(parameter)], {})
        for key, entry in entries.items():
            if not isinstance(entry, _TensorOutline):
                values[key] = entry
                continue
            source = full["state"][name][key] if full is not None else torch.empty(entry.shape, dtype=entry.dtype)
            values[key] = _deal_out(source, parameter)
    raw.load_state_dict({"state": loaded, "param_groups": _match_groups(raw, groups, trainable, places, path)})
    return [name for name, parameter in trainable.items() if parameter.requires_grad and name not in state]


def _outline(full: dict[str, Any] | None) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    import torch

    if full is None:
        raise ValueError("only rank 0 reads the file")
    outline = {
        clean_fqn(name): {
            key: _TensorOutline(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            for key, value in entries.items()
        }
        for name, entries in full["state"].items()
    }
    return outline, full["param_groups"]


def _deal_out(source: torch.Tensor, parameter: Any) -> Any:
    """Give every rank its part of rank 0's `source`: the shard that it has of the parameter, or all of it."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, distribute_tensor

    on_device = source.to(parameter.device)
    is_sharded = isinstance(parameter, DTensor) and source.shape == parameter.shape
    if is_sharded and parameter.device_mesh.size() == dist.get_world_size():
        return distribute_tensor(on_device, parameter.device_mesh, parameter.placements)
    dist.broadcast(on_device, src=0)
    if is_sharded:
        # On a mesh of some ranks (FSDP beside tensor parallelism) torch would scatter from a rank that has no values.
        return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return on_device.to(source.device) if source.dim() == 0 else on_device


def _match_groups(
    raw: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    names: dict[str, Any],
    places: dict[int, int],
    path: Path,
) -> list[dict[str, Any]]:
    by_id = {id(parameter): name for name, parameter in names.items()}
    matched = []
    for number, (live, saved) in enumerate(zip(raw.param_groups, groups, strict=True)):
        mine = [by_id[id(parameter)] for parameter in live["params"]]
        theirs = [clean_fqn(name) for name in saved["params"]]
        if set(mine) != set(theirs):
            different = sorted(set(mine) ^ set(theirs))
            raise MismatchError(
                f"{path}: parameter group {number} holds other parameters than the optimizer's ({different[0]}, ...). "
                "Build the optimizer's groups as when it was saved.",
                path=str(path),
                expected=theirs,
                actual=mine,
            )
        matched.append({**saved, "params": [places[id(parameter)] for parameter in live["params"]]})
    return matched
