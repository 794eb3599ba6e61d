"""Faults in memory for the matrix: planted between load and check, and undone again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.matrix import Run


@dataclass(frozen=True)
class Planted:
    """Where a fault was planted: what a finding must name, and the rank that it must name if only one has it."""

    name: str
    rank: int | None = None


Planter = Callable[[Run], "contextlib.AbstractContextManager[Planted | None]"]
"""Changes memory for the duration of the context; yields None on ranks that don't know what was changed."""

MEMORY_FAULTS: dict[str, Planter] = {}


def _memory_fault(name: str) -> Callable[[Callable[[Run], Iterator[Planted | None]]], Any]:
    def register(function: Callable[[Run], Iterator[Planted | None]]) -> Any:
        MEMORY_FAULTS[name] = contextlib.contextmanager(function)
        return function

    return register


def _list_pieces(run: Run, kind: str = "parameter") -> list[tuple[str, torch.Tensor]]:
    """Return this rank's floating-point pieces of parameters (or all of its buffers), as flat as they can be."""
    from accel_fsdp_tools.shards import iterate_local_shards

    return [
        (shard.fqn, tensor)
        for shard in iterate_local_shards(run.model)
        if shard.kind == kind
        for _, tensor in shard.iterate_pieces()
        if tensor.numel() and (kind == "buffer" or tensor.is_floating_point())
    ]


@contextlib.contextmanager
def _restoring(*tensors: torch.Tensor) -> Iterator[None]:
    before = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        yield
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)


def _is_last(run: Run) -> bool:
    return bool(run.accelerator.process_index == run.accelerator.num_processes - 1)


@_memory_fault("one element changed on one rank")
def _change_element(run: Run) -> Iterator[Planted | None]:
    if not _is_last(run):
        yield None
        return
    name, piece = _list_pieces(run)[0]
    with _restoring(piece):
        piece[(piece.shape[0] // 2, *[0] * (piece.dim() - 1))] += 1
        yield Planted(name, run.accelerator.process_index)


@_memory_fault("two elements swapped")
def _swap_elements(run: Run) -> Iterator[Planted | None]:
    if not _is_last(run):
        yield None
        return
    for name, piece in reversed(_list_pieces(run)):
        ends = (0,) * piece.dim(), tuple(size - 1 for size in piece.shape)
        if piece[ends[0]] != piece[ends[1]]:
            with _restoring(piece):
                first = piece[ends[0]].clone()
                piece[ends[0]] = piece[ends[1]]
                piece[ends[1]] = first
                yield Planted(name, run.accelerator.process_index)
            return
    raise AssertionError("no two unequal elements here")


@_memory_fault("tensor zeroed")
def _zero(run: Run) -> Iterator[Planted | None]:
    name, pieces = _find_pieces(run, "blocks.1.up.weight")
    with _restoring(*pieces):
        for piece in pieces:
            piece.zero_()
        yield Planted(name)


def is_named(name: str, target: str) -> bool:
    """PEFT puts its own names around and into those of the model."""
    stem, _, leaf = target.rpartition(".")
    return name.endswith((target, f"{stem}.base_layer.{leaf}"))


def _find_pieces(run: Run, target: str) -> tuple[str, list[torch.Tensor]]:
    """Return a parameter's full name and what this rank has of it, which may be nothing."""
    from accel_fsdp_tools.shards import iterate_local_shards

    name = next(shard.fqn for shard in iterate_local_shards(run.model) if is_named(shard.fqn, target))
    return name, [piece for each, piece in _list_pieces(run) if each == name]


@_memory_fault("values went through a narrower dtype")
def _round(run: Run) -> Iterator[Planted | None]:
    name, pieces = _find_pieces(run, "blocks.0.down.weight")
    with _restoring(*pieces):
        for piece in pieces:
            narrow = torch.bfloat16 if piece.dtype == torch.float32 else torch.float8_e5m2
            piece.copy_(piece.to(narrow).to(piece.dtype))
        yield Planted(name)


@_memory_fault("0-d integer buffer changed on one rank")
def _change_buffer(run: Run) -> Iterator[Planted | None]:
    if not _is_last(run):
        yield None
        return
    name, buffer = next(each for each in _list_pieces(run, "buffer") if each[0].endswith("blocks.1.count"))
    with _restoring(buffer):
        buffer.add_(1)
        yield Planted(name, run.accelerator.process_index)


def _list_states(run: Run, state: str) -> list[Any]:
    from accel_fsdp_tools.live import get_raw_optimizer
    from accel_fsdp_tools.optimizer_shards import iterate_optimizer_shards

    shards = iterate_optimizer_shards(run.model, get_raw_optimizer(run.optimizer))
    return [shard for shard in shards if shard.state == state and shard.parts]


@_memory_fault("optimizer state of another parameter of the same shape")
def _take_another_state(run: Run) -> Iterator[Planted | None]:
    if not _is_last(run):
        yield None
        return
    shards = _list_states(run, "exp_avg")
    for index, one in enumerate(shards):
        for other in shards[index + 1 :]:
            alike = (one.shape, one.tensor.shape) == (other.shape, other.tensor.shape)
            if alike and not torch.equal(one.tensor, other.tensor):
                with _restoring(one.tensor):
                    one.tensor.copy_(other.tensor)
                    yield Planted(f"optimizer.state.{one.fqn}.exp_avg", run.accelerator.process_index)
                return
    raise AssertionError("no two states of one shape here")


@_memory_fault("step counter changed")
def _change_step(run: Run) -> Iterator[Planted | None]:
    if not _is_last(run):
        yield None
        return
    shard = _list_states(run, "step")[-1]
    with _restoring(shard.tensor):
        shard.tensor.add_(1)
        yield Planted(f"optimizer.state.{shard.fqn}.step", run.accelerator.process_index)


@_memory_fault("hyper-parameter changed")
def _change_option(run: Run) -> Iterator[Planted | None]:
    groups = run.optimizer.param_groups
    before = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = 0.5
    yield Planted("optimizer.param_groups.0.weight_decay")
    for group, old in zip(groups, before, strict=True):
        group["weight_decay"] = old
