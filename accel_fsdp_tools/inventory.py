"""What a save records about the run beside its files: collected from all ranks, put into the manifest."""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedError
from .files import FileFacts
from .live import describe_model, describe_optimizers, describe_topology, get_scheduler_classes
from .live_fingerprints import Measured, measure_model, measure_optimizer
from .manifest import Lineage, Manifest, ModelFacts, OptimizerFacts
from .ranks import gather_all

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inventory:
    """Models and optimizers with the fingerprints of what is in memory.

    `divergent` names tensors whose copies differ between ranks. That is legal (the statistics of a BatchNorm that is
    not synchronised), but a checkpoint keeps one rank's, so a resume is not exact. They have no fingerprint.
    """

    models: tuple[ModelFacts, ...]
    optimizers: tuple[OptimizerFacts, ...]
    divergent: tuple[str, ...] = ()


def take_inventory(accelerator: Accelerator) -> Inventory:
    """Describe and sum up what is prepared. Collective; one pass over local memory, nothing is copied."""
    models = tuple(describe_model(model) for model in accelerator._models)
    optimizers = _merge(gather_all(describe_optimizers(accelerator)))
    try:
        of_models = [measure_model(model) for model in accelerator._models]
        of_optimizers = [
            measure_optimizer(accelerator._models[index], optimizer)
            for index, optimizer in enumerate(accelerator._optimizers)
        ]
    except UnsupportedError as error:
        logger.warning("no fingerprints are recorded: %s", error)
        return Inventory(models, optimizers)
    return Inventory(
        models=tuple(_add_to_model(facts, each) for facts, each in zip(models, of_models, strict=True)),
        optimizers=tuple(
            dataclasses.replace(facts, fingerprints=_to_text(each))
            for facts, each in zip(optimizers, of_optimizers, strict=True)
        ),
        divergent=tuple(each.name for measured in (*of_models, *of_optimizers) for each in measured.divergences),
    )


def _to_text(measured: Measured) -> dict[str, str]:
    return {name: str(fingerprint) for name, fingerprint in measured.fingerprints.items()}


def _add_to_model(facts: ModelFacts, measured: Measured) -> ModelFacts:
    known = _to_text(measured)
    tensors = tuple(dataclasses.replace(each, fingerprint=known.get(each.fqn)) for each in facts.tensors)
    return dataclasses.replace(facts, tensors=tensors)


def _merge(ranks: list[tuple[OptimizerFacts, ...]]) -> tuple[OptimizerFacts, ...]:
    """Combine what the ranks know: under FSDP1 each sees the state of the parameters that it has a piece of."""
    return tuple(
        dataclasses.replace(
            parts[0],
            stateless=tuple(sorted({name for part in parts for name in part.stateless})),
            is_empty=all(part.is_empty for part in parts),
        )
        for parts in zip(*ranks, strict=True)
    )


def build_manifest(
    accelerator: Accelerator,
    inventory: Inventory,
    files: tuple[FileFacts, ...],
    *,
    lineage: Lineage,
    step: int | None,
    epoch: int,
    opaque_objects: Mapping[str, str],
    num_pending: int,
    extra: Mapping[str, Any],
) -> Manifest:
    """Put everything together. Not collective; the same on every rank but for the time."""
    return Manifest(
        created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        step=-1 if step is None else step,
        epoch=epoch,
        lineage=lineage,
        topology=describe_topology(accelerator),
        versions=_get_versions(),
        states={
            "model": {
                "count": len(accelerator._models),
                "custom_objects": len(accelerator._custom_objects),
                "opaque_objects": dict(opaque_objects),
                "divergent": list(inventory.divergent),
            },
            "optimizer": {"count": len(accelerator._optimizers), "num_pending": num_pending},
            "scheduler": {"count": len(accelerator._schedulers)},
            "rng": {"num_ranks": accelerator.num_processes},
            "data": {"count": len(accelerator._dataloaders)},
        },
        files=files,
        models=inventory.models,
        optimizers=inventory.optimizers,
        num_schedulers=len(accelerator._schedulers),
        num_dataloaders=len(accelerator._dataloaders),
        num_custom_objects=len(accelerator._custom_objects),
        accelerate={
            "step": accelerator.step,
            "save_iteration": accelerator.save_iteration,
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            "has_scaler": accelerator.scaler is not None,
            "schedulers": get_scheduler_classes(accelerator),
        },
        extra=extra,
    )


def _get_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("accel-fsdp-tools", "torch", "accelerate", "transformers", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions
