"""How many steps a scheduler makes per update, and keeping that where the number of ranks changes.

Accelerate steps a prepared scheduler once per rank at every update (once with `split_batches`, never by itself with
`step_scheduler_with_optimizer=False`), and what a schedule is written in is up to the script. So on another number of
ranks either the pace of the save is kept, or, where the script's schedule counts in the new pace (it has computed its
length anew from the number of ranks or batches), the count is converted. Which of the two holds is told by the learning
rates that were planned at the save. Nothing here is collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

PACES, PLANS = "scheduler_paces", "scheduler_plans"  # keys of the manifest's facts about Accelerate
_UPDATES_AHEAD = (0, 1, 2, 5, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class PaceOutcome:
    """What became of one scheduler's pace; `is_exact` if every update has the learning rate that was planned for it."""

    index: int
    text: str
    is_exact: bool


class _KeptPace:
    """Takes the place of the `step` of a prepared scheduler: as Accelerate's, with a number of steps of its own."""

    def __init__(self, wrapped: Any, num_steps: int) -> None:
        self.wrapped = wrapped
        self.num_steps = num_steps

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        wrapped = self.wrapped
        if not wrapped.gradient_state.sync_gradients:
            type(wrapped).step(wrapped, *args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in wrapped.optimizers):
            return
        scheduler = wrapped.scheduler
        for _ in range(self.num_steps):
            # A schedule of limited length refuses to be stepped beyond it, and its last update may be a short one.
            if not hasattr(scheduler, "total_steps") or scheduler._step_count <= scheduler.total_steps:
                scheduler.step(*args, **kwargs)


def get_paces(accelerator: Accelerator) -> list[int | None]:
    """Return each scheduler's steps per update; None where the script steps it by itself."""
    return [_get_pace(accelerator, wrapped) for wrapped in accelerator._schedulers]


def _get_pace(accelerator: Accelerator, wrapped: Any) -> int | None:
    kept = vars(wrapped).get("step")
    return kept.num_steps if isinstance(kept, _KeptPace) else _get_own_pace(accelerator, wrapped)


def _get_own_pace(accelerator: Accelerator, wrapped: Any) -> int | None:
    """What Accelerate makes of it."""
    if not getattr(wrapped, "step_with_optimizer", False):
        return None
    return 1 if wrapped.split_batches else accelerator.num_processes


def describe_plans(accelerator: Accelerator) -> list[list[list[float]] | None]:
    """Return the learning rates that each schedule of functions plans for the updates ahead; None for other kinds.

    Other kinds keep what they are made of in their state, so that it comes back with the checkpoint.
    """
    plans = []
    for wrapped, pace in zip(accelerator._schedulers, get_paces(accelerator), strict=True):
        raw = getattr(wrapped, "scheduler", wrapped)
        plans.append(_plan(raw, getattr(raw, "last_epoch", 0), pace))
    return plans


def _plan(raw: Any, count: int, pace: int | None) -> list[list[float]] | None:
    """The learning rates at `count` and some updates later, by update and parameter group."""
    functions, base_rates = getattr(raw, "lr_lambdas", None), getattr(raw, "base_lrs", None)
    if pace is None or not functions or not base_rates:
        return None
    try:
        plan = [
            [
                float(rate) * float(function(count + pace * ahead))
                for function, rate in zip(functions, base_rates, strict=True)
            ]
            for ahead in _UPDATES_AHEAD
        ]
    except Exception:  # a function of the user's may end where its table does: then nothing is known ahead
        return None
    return plan if all(math.isfinite(rate) for rates in plan for rate in rates) else None


def restore_paces(accelerator: Accelerator, facts: Mapping[str, Any], num_ranks_before: int) -> list[PaceOutcome]:
    """Let every scheduler go on through the learning rates that were planned for its updates at the save.

    Call it when the schedulers' states are loaded. Schedulers keep their kind and their state; where the pace is
    another than Accelerate's, the prepared scheduler's `step` is replaced.

    Args:
        facts: what the manifest says about Accelerate.
        num_ranks_before: for a checkpoint that says nothing of paces.
    """
    outcomes = []
    for index, wrapped in enumerate(accelerator._schedulers):
        own = _get_own_pace(accelerator, wrapped)
        unknown = None if own is None else (own if wrapped.split_batches else num_ranks_before)
        before, plan = _get(facts.get(PACES), index, unknown), _get(facts.get(PLANS), index, None)
        if isinstance(vars(wrapped).get("step"), _KeptPace):  # of an earlier load
            del wrapped.step
        is_pace = before is None or (type(before) is int and before > 0)
        outcome = _restore(index, wrapped, before if is_pace else unknown, own, plan if _is_plan(plan) else None)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def _is_plan(plan: Any) -> bool:
    """Whether a manifest holds what `describe_plans` makes."""
    is_list = isinstance(plan, list) and all(isinstance(rates, list) for rates in plan)
    return is_list and all(type(rate) in (int, float) for rates in plan for rate in rates)


def _get(values: Any, index: int, default: Any) -> Any:
    return values[index] if isinstance(values, list) and index < len(values) else default


def _restore(
    index: int, wrapped: Any, before: int | None, own: int | None, plan: list[list[float]] | None
) -> PaceOutcome | None:
    raw = getattr(wrapped, "scheduler", wrapped)
    if before is None or own is None:
        if before == own:
            return None
        text = "by Accelerate at every update" if before is not None else "by the script"
        return PaceOutcome(index, f"scheduler {index} was stepped {text} at the save, which is not so now", False)
    count = getattr(raw, "last_epoch", 0)
    if plan is None and hasattr(raw, "lr_lambdas") and before != own:
        plan = [[float(rate) for rate in raw.get_last_lr()]]  # of an older checkpoint, or a function that ends
    is_same = plan is None or _agrees(plan, _plan(raw, count, before))
    if before == own:
        return None if is_same else PaceOutcome(index, _explain_other(index, raw, plan, before), False)
    is_converted = not is_same and count % before == 0 and _agrees(plan, _plan(raw, count // before * own, own))
    if is_converted:
        raw.last_epoch = count // before * own
        raw._step_count = raw.last_epoch + 1
        text = (
            f"scheduler {index} makes {own} step(s) per update, it made {before} at the save; its schedule is written "
            f"for that, so its count goes on from {raw.last_epoch} instead of {count}, and the learning rates are as "
            "planned"
        )
        return PaceOutcome(index, text, True)
    wrapped.step = _KeptPace(wrapped, before)
    if not is_same:
        return PaceOutcome(index, _explain_other(index, raw, plan, before), False)
    text = (
        f"scheduler {index} goes on with {before} step(s) per update, as at the save, where Accelerate would make "
        f"{own}: the learning rates are as planned"
    )
    return PaceOutcome(index, text, True)


def _agrees(plan: Sequence[Sequence[float]] | None, other: Sequence[Sequence[float]] | None) -> bool:
    if plan is None or other is None:
        return plan is other
    pairs = [(a, b) for rates, others in zip(plan, other, strict=False) for a, b in zip(rates, others, strict=False)]
    return all(math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-300) for a, b in pairs)


def _explain_other(index: int, raw: Any, plan: Any, pace: int) -> str:
    other = _plan(raw, getattr(raw, "last_epoch", 0), pace) or []
    for ahead, rates, others in zip(_UPDATES_AHEAD, plan, other, strict=False):
        if not _agrees([rates], [others]):
            return (
                f"scheduler {index}: the script's schedule is another than that of the save: {ahead} update(s) from "
                f"here the learning rate is {others[0]:g}, it was to be {rates[0]:g}; it goes on with the script's"
            )
    return f"scheduler {index}: the script's schedule could not be compared with that of the save"
