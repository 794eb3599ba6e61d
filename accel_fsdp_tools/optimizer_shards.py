"""What this rank holds of a live optimizer's state, by parameter name, in the coordinates of the whole tensors.

The same walk as `shards`, one level further: each parameter's states (`exp_avg`, `step`, ...), and the options of
the parameter groups. Not collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedError, UsageError
from .extents import Part, Run, Shape, get_whole
from .shards import WHOLE, Held, Layout, LocalShard, iterate_held_parameters, locate

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ParameterGroup:
    """One parameter group: its parameters' names, and its options (`lr`, `betas`, ...) as plain values."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


def iterate_optimizer_shards(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, owned: Sequence[Held] | None = None
) -> Iterator[LocalShard]:
    """Yield this rank's share of every state of an optimizer.

    `fqn` is the name of the parameter (as `iterate_local_shards` has it) and `state` that of the state. A 0-d state
    (`step`) and one that is no tensor (kind "value") is whole on every rank that has it. A parameter without state,
    because it never got a gradient or because this rank holds none of its elements, is not among them.

    Args:
        model: the prepared model.
        optimizer: the raw optimizer, not Accelerate's wrapper.
        owned: what `list_owned` returns, if it is known already.

    Not collective. Peak memory: nothing is copied.

    Raises:
        UsageError: the optimizer holds a parameter that is not one of the model's.
        UnsupportedError: a state of a sharded parameter has a shape from which its place cannot be told.
    """
    for held in list_owned(model, optimizer) if owned is None else owned:
        for name, value in optimizer.state.get(held.owner, {}).items():
            yield _describe_state(held, name, value)


def describe_parameter_groups(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, owned: Sequence[Held] | None = None
) -> tuple[ParameterGroup, ...]:
    """Return the optimizer's parameter groups by name; 0-d tensors among their options become numbers.

    Not collective; the same on every rank.

    Raises:
        UsageError: the optimizer holds a parameter that is not one of the model's.
    """
    names: dict[int, list[str]] = {}
    for held in list_owned(model, optimizer) if owned is None else owned:
        names.setdefault(id(held.owner), []).append(held.shard.fqn)
    return tuple(
        ParameterGroup(
            names=tuple(name for parameter in group["params"] for name in names[id(parameter)]),
            options={key: _make_plain(value) for key, value in group.items() if key not in ("params", "param_names")},
        )
        for group in optimizer.param_groups
    )


def _make_plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(map(_make_plain, value)) if isinstance(value, (tuple, list)) else value


def iterate_optimizer_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[LocalShard]:
    """Yield this rank's share of the optimizer's parameters, in its order, those without state included.

    Not collective; the same names on every rank.

    Raises:
        UsageError: the optimizer holds a parameter that is not one of the model's.
    """
    for held in list_owned(model, optimizer):
        yield held.shard


def list_owned(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Held, ...]:
    """Return the optimizer's parameters, in its own order. Not collective.

    Raises:
        UsageError: the optimizer holds a parameter that is not one of the model's.
    """
    owned: list[Held] = []
    by_owner: dict[int, list[Held]] = {}
    for held in iterate_held_parameters(model):
        by_owner.setdefault(id(held.owner), []).append(held)
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in by_owner:
                raise UsageError(
                    f"Parameter {place} of the optimizer's group {number} is none of the model's. Build the optimizer "
                    "from the model that it is prepared with, and pass both to accelerator.prepare."
                )
            owned += by_owner[id(parameter)]
    return tuple(owned)


def _describe_state(held: Held, name: str, value: Any) -> LocalShard:
    import torch
    from torch.distributed.tensor import DTensor

    parameter = held.shard
    if not isinstance(value, torch.Tensor):
        return LocalShard(
            fqn=parameter.fqn,
            dtype="",
            shape=(),
            parts=(),
            tensor=None,
            kind="value",
            aliases=parameter.aliases,
            state=name,
            value=value,
        )
    if isinstance(value, DTensor) or value.dim() == 0:
        shape, parts, local, layout = locate(f"{name} of {parameter.fqn}", value)
    else:
        shape, parts, local, layout = _place_like_parameter(held, name, value.detach())
    return LocalShard(
        fqn=parameter.fqn,
        dtype=str(local.dtype).removeprefix("torch."),
        shape=shape,
        parts=parts,
        tensor=local,
        kind="state",
        layout=layout,
        aliases=parameter.aliases,
        state=name,
    )


def _place_like_parameter(
    held: Held, name: str, value: torch.Tensor
) -> tuple[Shape, tuple[Part, ...], torch.Tensor, Layout]:
    """Place a plain state tensor: it is cut as its parameter is, unless its parameter is not cut at all."""
    parameter = held.shard
    assert parameter.tensor is not None  # noqa: S101 - parameters have one
    expected = parameter.tensor.shape
    if held.flat_start is not None and value.numel() == held.flat_numel:
        local = value.reshape(-1)[held.flat_start : held.flat_start + expected.numel()]
        return parameter.shape, parameter.parts, local, parameter.layout
    is_run = all(isinstance(part, Run) for part in parameter.parts)
    if held.flat_start is None and (value.shape == expected or (is_run and value.numel() == expected.numel())):
        return parameter.shape, parameter.parts, value, parameter.layout
    if held.flat_start is None and parameter.layout == WHOLE:
        return tuple(value.shape), (get_whole(tuple(value.shape)),) if value.numel() else (), value, WHOLE
    raise UnsupportedError(
        f"{name} of {parameter.fqn} has the shape {tuple(value.shape)} on this rank, whose part of the parameter is "
        f"{parameter.parts}: what it is a part of cannot be told. Use an optimizer whose states have the "
        "parameter's shape, or FSDP2 with states that are DTensors",
        fqn=parameter.fqn,
        expected=tuple(expected),
        actual=tuple(value.shape),
    )
