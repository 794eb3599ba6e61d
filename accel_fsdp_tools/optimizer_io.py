"""Load optimizer state into a fresh process, completely, where Accelerate 1.15 does not.

Measured on torch 2.13 and accelerate 1.15:

- FSDP1 with sharded files: `accelerator.load_state` succeeds and leaves the optimizer empty on every rank, since
  DCP fills only tensors that exist and a fresh optimizer has none. Here the state is allocated from the metadata.
- FSDP2: a trainable parameter that never got a gradient has no state in the files, and the load fails for want of
  its key. Here such parameters are left out of the load and stay without state, as they were.
- FSDP2: torch's dummy step, which creates the state, goes through Accelerate's wrapper and does nothing in the
  middle of an accumulation. Here it sees the raw optimizer.

Every function is collective.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .formats.dcp import read_dcp_metadata
from .layout import SHARDED
from .live import clean_fqn, describe_model, get_raw_optimizer

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def load_optimizer(
    accelerator: Accelerator, index: int, directory: Path, *, kind: str, was_empty: bool
) -> list[str]:
    """Load optimizer `index` of an FSDP checkpoint; returns the trainable parameters that it had no state for.

    Args:
        kind: the state-dict type of the files, SHARDED_STATE_DICT or FULL_STATE_DICT. The plugin must be set to it.
        was_empty: the optimizer had no state at all when it was saved (no update had been made): hyper-parameters
            are loaded, and the state that torch makes up on the way is dropped again.
    """
    model = accelerator._models[index]
    raw = get_raw_optimizer(accelerator._optimizers[index])
    plugin = accelerator.state.fsdp_plugin
    if kind == SHARDED:
        path = directory / f"optimizer_{index}"
        if plugin.fsdp_version == 1:
            stateless = _load_sharded_fsdp1(plugin, model, raw, path)
        else:
            stateless = _load_sharded_fsdp2(plugin, model, raw, path)
    else:
        stateless = _load_full(accelerator, model, raw, directory, index)
    if was_empty:
        raw.state.clear()
        return []
    if plugin.fsdp_version == 2:
        _drop_state(model, raw, stateless)
    return sorted(stateless)


def _get_saved_parameters(directory: Path) -> set[str]:
    """Return the names of the parameters that a DCP optimizer directory holds state for."""
    paths = read_dcp_metadata(directory).key_paths.values()
    return {clean_fqn(str(path[2])) for path in paths if len(path) > 2 and path[:2] == ("optimizer", "state")}


def _get_trainable_names(model: torch.nn.Module, raw: torch.optim.Optimizer) -> dict[str, Any]:
    mine = {id(parameter) for group in raw.param_groups for parameter in group["params"]}
    return {
        clean_fqn(name): parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in mine and parameter.requires_grad
    }


def _drop_state(model: torch.nn.Module, raw: torch.optim.Optimizer, names: list[str]) -> None:
    trainable = _get_trainable_names(model, raw)
    for name in names:
        raw.state.pop(trainable[name], None)


def _load_sharded_fsdp2(
    plugin: Any, model: torch.nn.Module, raw: torch.optim.Optimizer, path: Path
) -> list[str]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    saved = _get_saved_parameters(path)
    wanted: dict[str, Any] = get_optimizer_state_dict(model, raw)
    stateless = [name for name in wanted["state"] if name not in saved]
    for name in stateless:
        del wanted["state"][name]
    dcp.load({"optimizer": wanted}, storage_reader=dcp.FileSystemReader(path))
    options = StateDictOptions(strict=not stateless)
    set_optimizer_state_dict(model, raw, wanted, options=options)
    return stateless


def _load_sharded_fsdp1(
    plugin: Any, model: torch.nn.Module, raw: torch.optim.Optimizer, path: Path
) -> list[str]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

    saved = _get_saved_parameters(path)
    with (
        warnings.catch_warnings(),
        FSDP.state_dict_type(
            model, plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config
        ),
    ):
        # torch itself calls its deprecated ShardedTensor functions on this path.
        warnings.simplefilter("ignore", FutureWarning)
        state = load_sharded_optimizer_state_dict(
            model_state_dict=model.state_dict(),
            optimizer_key="optimizer",
            storage_reader=dcp.FileSystemReader(path),
        )
        raw.load_state_dict(FSDP.optim_state_dict_to_load(model, raw, state["optimizer"]))
    return [name for name in _get_flat_trainable_names(model) if name not in saved]


def _get_flat_trainable_names(model: torch.nn.Module) -> list[str]:
    facts = describe_model(model)
    aliases = {name for group in facts.ties for name in group[1:]}
    return [
        tensor.fqn
        for tensor in facts.tensors
        if tensor.requires_grad and tensor.kind == "parameter" and tensor.fqn not in aliases
    ]


def _load_full(
    accelerator: Accelerator, model: torch.nn.Module, raw: torch.optim.Optimizer, directory: Path, index: int
) -> list[str]:
    from accelerate.utils.fsdp_utils import load_fsdp_optimizer

    plugin = accelerator.state.fsdp_plugin
    load_fsdp_optimizer(plugin, accelerator, raw, model, str(directory), index)
    return []
