"""Load a checkpoint into a model that is not the saved one: every rank reads what it holds of each tensor, by plan.

Accelerate's and torch's loads want the names and shapes to be equal. Here each rank fills its own shards from the
files, whatever wrote them; no tensor is ever whole in memory, and nothing is sent between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compare_live import Reader, compare_shard
from .disk_values import read_parameter_groups
from .errors import DamagedCheckpointError, UnsupportedError
from .extents import Box, DiskTensor, Part, Run, count_elements
from .findings import Severity
from .formats.checkpoint import Checkpoint, Section, name_section
from .formats.reading import FileCache
from .model_changes import ModelPlan
from .opening import open_checkpoint
from .optimizer_shards import iterate_optimizer_shards, list_owned
from .shards import LocalShard, iterate_local_shards

if TYPE_CHECKING:
    import torch

_ROWS_BYTES = 1 << 24


def load_changed(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    directory: Path,
    plans: Sequence[ModelPlan],
    *,
    verify: bool,
) -> list[list[str]]:
    """Fill models and raw optimizers from `directory` by plan. Not collective.

    A new parameter starts without optimizer state (under FSDP1: with zeros); a resized one keeps that of the rows which
    both have, with zeros beyond.

    Args:
        verify: read everything once more and compare it with memory.

    Returns:
        By optimizer, the parameters that had no state at the save, and start without.

    Raises:
        UnsupportedError: an optimizer keeps something that is no tensor.
        DamagedCheckpointError: what is in memory is not what was read.
    """
    import torch

    checkpoint = open_checkpoint(directory)
    stateless = []
    with torch.no_grad(), FileCache() as files:
        reader = Reader(files)
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            section = _get(checkpoint, "optimizer", index)
            stateless.append(_load_optimizer(model, optimizer, section, plans[index], reader))
        for index, model in enumerate(models):
            for shard, disk in _pair_model(model, _get(checkpoint, "model", index), plans[index]):
                _fill(shard, disk, reader)
        if verify:
            for index, model in enumerate(models):
                section = _get(checkpoint, "model", index)
                _verify(_pair_model(model, section, plans[index]), reader, directory)
                if index < len(optimizers):
                    section = _get(checkpoint, "optimizer", index)
                    pairs = _pair_optimizer(model, optimizers[index], section, plans[index])
                    _verify(((shard, disk) for shard, disk in pairs if disk is not None), reader, directory)
    return stateless


def _get(checkpoint: Checkpoint, kind: str, index: int) -> Section:
    return checkpoint.get_section(name_section(kind, index))


def _pair_model(model: torch.nn.Module, section: Section, plan: ModelPlan) -> Iterator[tuple[LocalShard, DiskTensor]]:
    """Yield what has a source, with it."""
    for shard in iterate_local_shards(model):
        disk = _find(shard, section, plan, "{}")
        if disk is not None:
            yield shard, disk


def _pair_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, section: Section, plan: ModelPlan
) -> Iterator[tuple[LocalShard, DiskTensor | None]]:
    for shard in iterate_optimizer_shards(model, optimizer):
        if shard.kind == "value":
            raise UnsupportedError(
                f"The optimizer's state {shard.state} of {shard.fqn} is no tensor, and cannot be loaded into a changed "
                "model. Load it into the model as it was.",
                fqn=shard.fqn,
            )
        yield shard, _find(shard, section, plan, f"state.{{}}.{shard.state}")


def _find(shard: LocalShard, section: Section, plan: ModelPlan, form: str) -> DiskTensor | None:
    for name in (shard.fqn, *shard.aliases):
        if name in plan.sources:
            disk = section.tensors.get(form.format(plan.sources[name]))
            if disk is not None:
                return disk
    return None


def _load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, section: Section, plan: ModelPlan, reader: Reader
) -> list[str]:
    import torch

    _make_states(optimizer)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()  # rows that are new stay so
    lacking = set()
    for shard, disk in _pair_optimizer(model, optimizer, section, plan):
        if disk is None:
            lacking.add(shard.fqn)
        else:
            _fill(shard, disk, reader)
    for held in list_owned(model, optimizer):
        # FSDP1 cannot save a unit of which some parameters have state and others not: there, zeros. Of a parameter of
        # which a rank has nothing it makes no state, and expects none.
        is_flat = str(held.shard.layout.scheme).startswith("flat")
        if held.owner.numel() == 0 if is_flat else held.shard.fqn in lacking:
            optimizer.state.pop(held.owner, None)
    saved = read_parameter_groups(section)
    for number, group in enumerate(optimizer.param_groups):
        for name, present in group.items():
            value = saved.get(f"param_groups.{number}.{name}")
            if name == "params" or value is None:
                continue
            if hasattr(present, "fill_"):
                present.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(present, tuple) else value
        for name in ("initial_lr",):  # a scheduler adds it; the script may have none
            if f"param_groups.{number}.{name}" in saved:
                group.setdefault(name, saved[f"param_groups.{number}.{name}"])
    return sorted(lacking - set(plan.new))


def _make_states(optimizer: Any) -> None:
    """Let the optimizer make its states, by a step that changes no parameter: no gradient, no learning rate."""
    import torch

    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    parameters = [each for group in groups for each in group["params"] if each.requires_grad]
    gradients = [each.grad for each in parameters]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        for each in parameters:
            each.grad = torch.zeros_like(each)
        optimizer.step(closure=None)
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient


def _fill(shard: LocalShard, disk: DiskTensor, reader: Reader) -> None:
    """Read this rank's share of a tensor into its memory, as far as the checkpoint has it."""
    for part, view in shard.as_in_memory().iterate_pieces():
        for inner, target in _iterate_common(part, view, disk):
            target.copy_(reader.read(disk, inner).reshape(target.shape))


def _iterate_common(part: Part, view: torch.Tensor, disk: DiskTensor) -> Iterator[tuple[Part, torch.Tensor]]:
    """Yield what a part and a tensor with another number of rows have in common, in blocks of rows."""
    if isinstance(part, Run):
        flat = view.reshape(-1) if view.is_contiguous() else view.view(-1)
        count = min(part.start + part.length, count_elements(disk.shape)) - part.start
        step = max(1, _ROWS_BYTES // 8)
        for start in range(0, max(0, count), step):
            length = min(step, count - start)
            yield Run(part.start + start, length), flat[start : start + length]
        return
    if not part.sizes:
        yield part, view
        return
    count = min(part.offsets[0] + part.sizes[0], disk.shape[0]) - part.offsets[0]
    width = max(1, part.numel // max(1, part.sizes[0]))
    step = max(1, _ROWS_BYTES // 8 // width)
    for start in range(0, max(0, count), step):
        size = min(step, count - start)
        inner = Box((part.offsets[0] + start, *part.offsets[1:]), (size, *part.sizes[1:]))
        if inner.numel:
            yield inner, view[start : start + size]


def _verify(pairs: Iterator[tuple[LocalShard, DiskTensor]], reader: Reader, directory: Path) -> None:
    """Compare what is in memory with the files: tensors of equal shape."""
    for shard, disk in pairs:
        if tuple(disk.shape) != tuple(shard.shape):
            continue
        name = shard.fqn if shard.state is None else f"state.{shard.fqn}.{shard.state}"
        for finding in compare_shard(name, replace(shard), disk, reader=reader):
            if finding.severity is Severity.FAILURE:
                raise DamagedCheckpointError(
                    f"{directory}: after the load {finding.message}. Load it again; if that persists, use another "
                    "checkpoint.",
                    path=str(directory),
                    fqn=shard.fqn,
                )
