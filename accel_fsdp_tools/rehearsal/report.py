"""What a rehearsal has found out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .causes import Cause
from .comparing import Difference, get_losses, get_lrs, get_norm
from .plan import Plan
from .records import Attempt


class Verdict(str, Enum):
    """How it went."""

    EXACT = "exact"
    CONSISTENT = "consistent"  # on another number of ranks, where sums round differently
    DIFFERENT = "not exact"
    UNREPEATABLE = "not repeatable"  # runs without a break differ already
    DOES_NOT_RESUME = "does not resume"
    FAILED = "failed"  # no resume was tried

    @property
    def is_good(self) -> bool:
        return self in (Verdict.EXACT, Verdict.CONSISTENT)


@dataclass(frozen=True)
class RunFacts:
    """One start of the script."""

    name: str
    seconds: float
    exit_code: int | None
    log: str
    first_step: int
    last_step: int
    world_size: int


@dataclass(frozen=True)
class RehearsalReport:
    """The result of `rehearse`.

    `differences` are those of the two runs that the verdict is about, the first one first; `compared` names them.
    `headline` is the finding in one sentence; `notes` are facts that take nothing away from the verdict.
    """

    plan: Plan
    verdict: Verdict
    headline: str
    runs: Sequence[RunFacts]
    cause: Cause | None = None
    differences: Sequence[Difference] = ()
    compared: tuple[str, str] = ("straight", "resumed")
    notes: Sequence[str] = ()
    attempts: Mapping[str, Attempt] = field(default_factory=dict, repr=False)
    log_tail: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict.is_good

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, with what the runs did at every update."""
        facts: dict[str, Any] = _make_plain(self._list_facts())
        return facts

    def _list_facts(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "ok": self.ok,
            "headline": self.headline,
            "cause": None if self.cause is None else self.cause.to_dict(),
            "first_difference": self.differences[0].to_dict() if self.differences else None,
            "differences": [each.to_dict() for each in self.differences],
            "compared": list(self.compared),
            "notes": list(self.notes),
            "command": list(self.plan.command),
            "steps": self.plan.steps,
            "save_at": self.plan.save_at,
            "kill_at": self.plan.kill_at,
            "kill_rank": self.plan.kill_rank,
            "elastic": self.plan.elastic,
            "runs": [vars(each) for each in self.runs],
            "series": {name: list_points(attempt) for name, attempt in self.attempts.items()},
        }


def _make_plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, dict):
        return {key: _make_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def list_points(attempt: Attempt) -> list[dict[str, Any]]:
    """Return every update's loss, the mean of all ranks, and its learning rates and gradient norm on rank 0."""
    points = []
    for step in sorted({step for rank in attempt.ranks for step in rank.steps}):
        records = attempt.get_step(step)
        losses = [loss for record in records for loss in get_losses(record)]
        points.append(
            {
                "step": step,
                "loss": sum(losses) / len(losses) if losses else None,
                "lrs": get_lrs(records[0]),
                "gradient_norm": get_norm(records[0]),
            }
        )
    return points
