"""What a save records about the run beside its files: collected from all ranks, put into the manifest."""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from .describing import record_architecture
from .errors import AccelFsdpError, UnsupportedError
from .extents import DTYPE_SIZES, count_elements
from .files import FileFacts
from .host_copies import HostCopies
from .live import describe_model, describe_optimizers, describe_topology, get_raw_optimizer, get_scheduler_classes
from .live_fingerprints import Measured, OptimizerShards, Wanted, measure_model_shards, measure_optimizer_shards
from .local_digests import RankDigests, digest_shards
from .manifest import Lineage, Manifest, ModelFacts, OptimizerFacts
from .pace import PACES, PLANS, describe_plans, get_paces
from .ranks import broadcast, gather_all
from .shards import LocalShard, iterate_local_shards

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHEAP_BYTES = 128 << 20  # of a rank's parameters: summing up states of that size takes some tenths of a second


@dataclass(frozen=True)
class Inventory:
    """Models and optimizers with the fingerprints and statistics of what is in memory.

    `divergent` names tensors whose copies differ between ranks. That is legal (the statistics of a BatchNorm that is
    not synchronised), but a checkpoint keeps one rank's, so a resume is not exact. They have no fingerprint.
    """

    models: tuple[ModelFacts, ...]
    optimizers: tuple[OptimizerFacts, ...]
    divergent: tuple[str, ...] = ()

    @property
    def has_fingerprints(self) -> bool:
        return any(facts.fingerprints for facts in self.models)


@dataclass(frozen=True)
class Draft:
    """Models and optimizers without the sums, and where to find what is to be summed up, once somebody has the time."""

    models: tuple[ModelFacts, ...]
    optimizers: tuple[OptimizerFacts, ...]
    read_models: tuple[Callable[[], Iterable[LocalShard]], ...]
    read_optimizers: tuple[Callable[[], OptimizerShards], ...]
    wanted: tuple[Wanted, ...]  # of each optimizer


def draft_inventory(accelerator: Accelerator, copies: HostCopies | None = None) -> Draft:
    """Describe what is prepared. Collective.

    Args:
        copies: where the tensors are copied to, so that `sum_up` finds their values as they are now. Without it
            `sum_up` has to follow before anything changes.
    """
    models = tuple(_describe(model) for model in accelerator._models)
    optimizers = _merge(describe_optimizers(accelerator))
    read_models: list[Callable[[], Iterable[LocalShard]]] = []
    read_optimizers: list[Callable[[], OptimizerShards]] = []
    for index, model in enumerate(accelerator._models):
        read = partial(iterate_local_shards, model)
        read_models.append(read if copies is None else _hold(partial(_copy_all, copies, ("model", index), read)))
    for index, optimizer in enumerate(accelerator._optimizers):
        look = partial(OptimizerShards.read, accelerator._models[index], get_raw_optimizer(optimizer))
        read_optimizers.append(look if copies is None else _hold(partial(_copy_optimizer, copies, index, look)))
    wanted = tuple(_choose_for_optimizer(accelerator, models[index]) for index in range(len(read_optimizers)))
    return Draft(models, optimizers, tuple(read_models), tuple(read_optimizers), wanted)


def _hold(read: Callable[[], T]) -> Callable[[], T]:
    """Call `read` now and return what returns the result, or raises the error, later: where all ranks learn of it."""
    try:
        held = read()
    except AccelFsdpError as error:
        failure = error

        def fail() -> T:
            raise failure

        return fail
    return lambda: held


def _copy_all(
    copies: HostCopies, name: tuple[Any, ...], read: Callable[[], Iterable[LocalShard]]
) -> tuple[LocalShard, ...]:
    return tuple(
        shard
        if shard.tensor is None
        else dataclasses.replace(
            shard, tensor=copies.copy_tensor(("shard", *name, shard.fqn, shard.state), shard.tensor), memory=None
        )
        for shard in read()
    )


def _copy_optimizer(copies: HostCopies, index: int, read: Callable[[], OptimizerShards]) -> OptimizerShards:
    held = read()
    # Of the parameters only the names are used.
    return dataclasses.replace(held, states=_copy_all(copies, ("optimizer", index), lambda: held.states))


def sum_up(draft: Draft) -> Inventory:
    """Add fingerprints and statistics to a draft. Collective; one pass over local memory, nothing is copied."""
    try:
        of_models = [measure_model_shards(read, Wanted(statistics=True)) for read in draft.read_models]
        of_optimizers = [
            measure_optimizer_shards(read, wanted)
            for read, wanted in zip(draft.read_optimizers, draft.wanted, strict=True)
        ]
    except UnsupportedError as error:
        logger.warning("no fingerprints are recorded: %s", error)
        return Inventory(draft.models, draft.optimizers)
    return Inventory(
        models=tuple(_add_to_model(facts, each) for facts, each in zip(draft.models, of_models, strict=True)),
        optimizers=tuple(
            dataclasses.replace(facts, fingerprints=_to_text(each), statistics=_to_plain(each))
            for facts, each in zip(draft.optimizers, of_optimizers, strict=True)
        ),
        divergent=tuple(each.name for measured in (*of_models, *of_optimizers) for each in measured.divergences),
    )


def digest_held(draft: Draft, inventory: Inventory) -> RankDigests:
    """Return the digests of what this rank holds of all that has a fingerprint. Not collective; nothing is copied."""
    return RankDigests(
        models=[
            digest_shards(read(), facts.fingerprints)
            for read, facts in zip(draft.read_models, inventory.models, strict=True)
        ],
        optimizers=[
            digest_shards(read().states, facts.fingerprints)
            for read, facts in zip(draft.read_optimizers, inventory.optimizers, strict=True)
        ],
    )


def _describe(model: torch.nn.Module) -> ModelFacts:
    facts = describe_model(model)
    return dataclasses.replace(facts, architecture=record_architecture(model, facts))


def _choose_for_optimizer(accelerator: Accelerator, facts: ModelFacts) -> Wanted:
    """Leave out the statistics of large optimizer states in the CPU's memory, where they would show in a save's time.

    The same on every rank.
    """
    num_bytes = sum(count_elements(each.shape) * DTYPE_SIZES.get(each.dtype, 0) for each in facts.tensors)
    is_cheap = accelerator.device.type != "cpu" or num_bytes <= _CHEAP_BYTES * accelerator.num_processes
    return Wanted(statistics=is_cheap)


def _to_text(measured: Measured) -> dict[str, str]:
    return {name: str(fingerprint) for name, fingerprint in measured.fingerprints.items()}


def _to_plain(measured: Measured) -> dict[str, dict[str, Any]]:
    return {name: numbers.to_dict() for name, numbers in measured.statistics.items()}


def _add_to_model(facts: ModelFacts, measured: Measured) -> ModelFacts:
    known, numbers = _to_text(measured), _to_plain(measured)
    tensors = tuple(
        dataclasses.replace(each, fingerprint=known.get(each.fqn), statistics=numbers.get(each.fqn))
        for each in facts.tensors
    )
    return dataclasses.replace(facts, tensors=tensors)


def _merge(mine: tuple[OptimizerFacts, ...]) -> tuple[OptimizerFacts, ...]:
    """Combine what the ranks know: under FSDP1 each sees the state of the parameters that it has a piece of.

    Ranks send only what rank 0 has not said. Collective.
    """
    first = broadcast(mine)
    more = [
        (tuple(sorted({*own.stateless} - {*facts.stateless})), own.is_empty)
        for own, facts in zip(mine, first, strict=False)  # a number that differs is found below, by every rank
    ] + [((), True)] * (len(mine) - len(first))
    return tuple(
        dataclasses.replace(
            facts,
            stateless=tuple(sorted({*facts.stateless}.union(*(names for names, _ in parts)))),
            is_empty=all(is_empty for _, is_empty in parts),
        )
        for facts, parts in zip(first, zip(*gather_all(more), strict=True), strict=True)
    )


def build_manifest(
    accelerator: Accelerator,
    draft: Draft,
    *,
    lineage: Lineage,
    step: int | None,
    epoch: int,
    opaque_objects: Mapping[str, str],
    num_pending: int,
    extra: Mapping[str, Any],
) -> Manifest:
    """Put together what is known of the run now; `complete_manifest` adds what takes longer. Not collective."""
    return Manifest(
        created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        step=-1 if step is None else step,
        epoch=epoch,
        lineage=lineage,
        topology=describe_topology(accelerator),
        versions=dict(_get_versions()),
        states={
            "model": {
                "count": len(accelerator._models),
                "custom_objects": len(accelerator._custom_objects),
                "opaque_objects": dict(opaque_objects),
            },
            "optimizer": {"count": len(accelerator._optimizers), "num_pending": num_pending},
            "scheduler": {"count": len(accelerator._schedulers)},
            "rng": {"num_ranks": accelerator.num_processes},
            "data": {"count": len(accelerator._dataloaders)},
        },
        files=(),
        models=draft.models,
        optimizers=draft.optimizers,
        num_schedulers=len(accelerator._schedulers),
        num_dataloaders=len(accelerator._dataloaders),
        num_custom_objects=len(accelerator._custom_objects),
        accelerate={
            "step": accelerator.step,
            "save_iteration": accelerator.save_iteration,
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            "has_scaler": accelerator.scaler is not None,
            "schedulers": get_scheduler_classes(accelerator),
            PACES: get_paces(accelerator),
            PLANS: describe_plans(accelerator),
        },
        extra=extra,
    )


def complete_manifest(manifest: Manifest, inventory: Inventory, files: tuple[FileFacts, ...]) -> Manifest:
    """Return the manifest with what was summed up and written."""
    model = {**manifest.states["model"], "divergent": list(inventory.divergent)}
    return dataclasses.replace(
        manifest,
        states={**manifest.states, "model": model},
        files=files,
        models=inventory.models,
        optimizers=inventory.optimizers,
    )


@cache  # looked up on disk, and what is loaded stays the same
def _get_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("accel-fsdp-tools", "torch", "accelerate", "transformers", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions
