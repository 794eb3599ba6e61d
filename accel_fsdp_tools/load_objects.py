"""Put the states into the live objects: through Accelerate, through our own optimizer loads, or by plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .changed_load import load_changed
from .delegate import load_with_accelerate
from .live import get_raw_optimizer
from .load_notes import LoadNotes
from .manifest import Manifest
from .model_changes import ModelPlan
from .optimizer_io import load_optimizer
from .options import list_overridden, read_options
from .ranks import run_together
from .steps import follow_steps

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextmanager
def _state_dict_type(accelerator: Accelerator, kind: str | None) -> Iterator[None]:
    """Set FSDP to the state-dict type of the files for the duration of the load."""
    if kind is None or accelerator.state.fsdp_plugin.state_dict_type.name == kind:
        yield
        return
    plugin = accelerator.state.fsdp_plugin
    names = ("state_dict_type", "state_dict_config", "optim_state_dict_config")
    old = {name: getattr(plugin, name) for name in names}
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type(kind)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(plugin, name, value)


def load_objects(
    accelerator: Accelerator,
    directory: Path,
    manifest: Manifest | None,
    kind: str | None,
    plans: Sequence[ModelPlan] | None,
    findings: LoadNotes,
    *,
    verify: bool = False,
) -> None:
    """Load models, optimizers, schedulers and scaler, and set the counters. Collective.

    Args:
        kind: the state-dict type of the files; None without FSDP.
        plans: where the tensors of models that are not the saved ones come from.
        verify: compare memory with the files afterwards where there are plans. Otherwise it is the caller's part.
    """
    counter = follow_steps(accelerator)
    script = read_options(accelerator)

    def load() -> None:
        load_with_accelerate(accelerator, directory, optimizers=kind is None, models=plans is None)
        if plans is not None:
            _load_by_plan(accelerator, directory, plans, findings, verify=verify)
            return
        for index in range(len(accelerator._optimizers) if kind is not None else 0):
            facts = manifest.optimizers[index] if manifest is not None else None
            fresh = load_optimizer(
                accelerator,
                index,
                directory,
                kind=str(kind),
                was_empty=facts is not None and facts.is_empty,
            )
            unexpected = sorted(set(fresh) - set(facts.stateless if facts is not None else ()))
            _note_stateless(index, fresh, unexpected, facts is not None, findings)

    with counter.paused(), _state_dict_type(accelerator, kind):
        run_together("loading with Accelerate", load)
    findings.notes.extend(list_overridden(script, read_options(accelerator)))
    counter.count = None if manifest is None or manifest.step < 0 else manifest.step
    if manifest is not None:
        accelerator.step = _convert_step(accelerator, manifest)
        accelerator.project_configuration.iteration = int(manifest.accelerate.get("save_iteration", 0))


def _convert_step(accelerator: Accelerator, manifest: Manifest) -> int:
    """Accelerate's counter of micro-batches, at the same update if more or fewer of them make one now."""
    step, now = int(manifest.accelerate.get("step", 0)), accelerator.gradient_accumulation_steps
    before = int(manifest.accelerate.get("gradient_accumulation_steps", now))
    return step if before == now else step // max(1, before) * now


def _load_by_plan(
    accelerator: Accelerator, directory: Path, plans: Sequence[ModelPlan], findings: LoadNotes, *, verify: bool
) -> None:
    optimizers = [get_raw_optimizer(each) for each in accelerator._optimizers]
    found = load_changed(accelerator._models, optimizers, directory, plans, verify=verify)
    for index, fresh in enumerate(found):
        _note_stateless(index, fresh, [], True, findings)
    for index, plan in enumerate(plans):
        reasons, notes = plan.describe(index)
        findings.reasons["model"].extend(reasons)
        findings.notes.extend(notes)
        if plan.is_changed and index < len(optimizers):
            findings.reasons["optimizer"].append(
                f"optimizer {index}: new parameters have no state (or zeros), and resized ones that of the "
                "rows which were saved"
            )


def _note_stateless(
    index: int, fresh: list[str], unexpected: list[str], has_manifest: bool, findings: LoadNotes
) -> None:
    if unexpected and has_manifest:
        findings.reasons["optimizer"].append(
            f"optimizer {index}: no state on disk for {', '.join(unexpected[:5])}, which had some when it was saved"
        )
    elif fresh:
        findings.notes.append(
            f"optimizer {index}: {len(fresh)} trainable parameter(s) had no state when saved (they never got a "
            f"gradient) and start without: {', '.join(fresh[:5])}"
        )
