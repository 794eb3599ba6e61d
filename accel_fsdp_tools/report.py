"""What a load did to each of the five kinds of state, for people (`str`) and for machines (`to_dict`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .manifest import STATES


class Status(str, Enum):
    """How well a state was restored."""

    RESTORED = "restored"
    APPROXIMATE = "approximate"
    ABSENT = "absent"
    NOT_USED = "not used"  # neither the run nor the checkpoint has it: nothing to restore


@dataclass(frozen=True)
class StateOutcome:
    """One kind of state: how it was restored, and why not better."""

    status: Status
    detail: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return self.status in (Status.RESTORED, Status.NOT_USED)

    def to_dict(self) -> dict[str, Any]:
        return {"status": self.status.value, "detail": self.detail, "reasons": list(self.reasons)}


@dataclass(frozen=True)
class LoadReport:
    """The result of `load_state`: model, optimizer, scheduler, RNG and data, each accounted for by name.

    `exact` promises that training goes on bit for bit as the run that saved would have; `ok` only that nothing
    which the run needs is absent. `notes` are facts worth reading that take nothing away from either.
    """

    path: str
    step: int
    epoch: int
    states: Mapping[str, StateOutcome]
    notes: tuple[str, ...] = ()
    has_manifest: bool = True

    def __post_init__(self) -> None:
        if set(self.states) != set(STATES):
            raise ValueError(f"a report covers {STATES}, not {sorted(self.states)}")

    @property
    def exact(self) -> bool:
        return all(outcome.exact for outcome in self.states.values())

    @property
    def ok(self) -> bool:
        return all(outcome.status is not Status.ABSENT for outcome in self.states.values())

    def __getattr__(self, name: str) -> StateOutcome:
        if name in STATES:
            return self.states[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        verdict = "exact" if self.exact else ("not exact" if self.ok else "incomplete")
        lines = [f"loaded {self.path} (step {self.step}): {verdict}"]
        for name in STATES:
            outcome = self.states[name]
            lines.append(f"  {name:<10}{outcome.status.value:<12}{outcome.detail}".rstrip())
            lines.extend(f"  {'':<22}- {reason}" for reason in outcome.reasons)
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "step": self.step,
            "epoch": self.epoch,
            "exact": self.exact,
            "ok": self.ok,
            "has_manifest": self.has_manifest,
            "states": {name: self.states[name].to_dict() for name in STATES},
            "notes": list(self.notes),
        }
