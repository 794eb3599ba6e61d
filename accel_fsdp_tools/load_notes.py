"""What the stages of one load find out, and the report that becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .manifest import STATES, Manifest
from .ranks import gather_all, get_world_size
from .report import LoadReport, StateOutcome, Status

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class LoadNotes:
    """This rank's notes: why a state is not exact, what is absent, and what is worth knowing besides."""

    reasons: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in STATES})
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    has_begun: bool = False  # from here on the objects in memory are changed


def build_report(
    accelerator: Accelerator,
    directory: Path,
    manifest: Manifest | None,
    findings: LoadNotes,
    *,
    counted: Mapping[str, int] | None = None,
) -> LoadReport:
    """Put the notes of all ranks into one report, the same on every rank. Collective.

    Args:
        counted: how many objects there are of states that Accelerate does not know of.
    """
    everyone = gather_all(findings)
    counts = {
        "model": len(accelerator._models),
        "optimizer": len(accelerator._optimizers),
        "scheduler": len(accelerator._schedulers),
        "rng": get_world_size(),
        "data": len(accelerator._dataloaders),
        **(counted or {}),
    }
    labels = {"rng": "rank", "data": "dataloader"}
    states = {}
    for name in STATES:
        reasons = list(dict.fromkeys(reason for each in everyone for reason in each.reasons[name]))
        absent = list(dict.fromkeys(each.absent[name] for each in everyone if name in each.absent))
        if absent:
            states[name] = StateOutcome(Status.ABSENT, "", tuple(absent + reasons))
        elif counts[name] == 0 and not reasons:
            states[name] = StateOutcome(Status.NOT_USED)
        else:
            status = Status.APPROXIMATE if reasons else Status.RESTORED
            states[name] = StateOutcome(status, f"{counts[name]} {labels.get(name, name)}(s)", tuple(reasons))
    notes = list(dict.fromkeys(note for each in everyone for note in each.notes))
    return LoadReport(
        path=str(directory),
        step=-1 if manifest is None else manifest.step,
        epoch=0 if manifest is None else manifest.epoch,
        states=states,
        notes=tuple(notes),
        has_manifest=manifest is not None,
    )
