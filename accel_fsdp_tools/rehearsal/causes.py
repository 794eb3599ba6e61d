"""Why a resumed run differs, as far as the first difference and what is known beside it can tell; and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .comparing import Difference, Thing, find_shift, show
from .records import Attempt


@dataclass(frozen=True)
class Cause:
    """A likely cause: `code` for machines, the rest for people. `evidence` is what speaks for it."""

    code: str
    title: str
    advice: str
    evidence: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "evidence": list(self.evidence)}


# -- a resume that differs --------------------------------------------------------------------------------------------


def explain_resume(differences: Sequence[Difference], straight: Attempt, resumed: Attempt) -> Cause:
    """Say why a resumed run is not the run without a break, which is known to repeat itself."""
    first = differences[0]
    beside = {each.thing for each in differences if each.step == first.step}
    evidence = list_inexact(resumed)
    if first.thing is Thing.PARAMETERS_BEFORE and set(first.names) <= list_divergent(straight, resumed.first_step):
        return Cause(
            "copies-differ",
            f"every rank has a copy of its own of {', '.join(first.names[:4])}, such as BatchNorm's running "
            "statistics, and a checkpoint holds one: after the resume all ranks have the same",
            "Make the copies equal: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before prepare, or a mean "
            "over the ranks before a save. Running statistics act on evaluations, and not on training.",
            evidence,
        )
    if first.thing is Thing.PARAMETERS_BEFORE:
        return Cause(
            "parameters-not-restored",
            "the resume did not bring the parameters back",
            "Nothing may change the model between resume() and the first batch, and it has to be the model that was "
            "prepared.",
            evidence,
        )
    if first.thing is Thing.OPTIMIZER_BEFORE:
        return Cause(
            "optimizer-not-restored",
            "the resume did not bring the optimizer's state back",
            "Pass the optimizer to accelerator.prepare together with the model, and create it before the Checkpointer.",
            (f"other or absent: {', '.join(first.names[:4])}", *evidence),
        )
    if first.thing is Thing.NUM_BATCHES and not _trains_on_as_many(first, straight, resumed):
        return Cause(
            "accumulation",
            "the update is made of another number of batches",
            "Let accelerator.accumulate decide when an update is due; a counter of the script's own begins anew after "
            "a resume.",
            (f"{show(first.expected)} batch(es) without a break, {show(first.actual)} after the resume", *evidence),
        )
    if first.thing is Thing.NUM_BATCHES:
        dropped = f"it takes {show(first.actual)} batch(es) from the loader for this update and trains on the last"
        evidence = (dropped, *evidence)
    if first.thing in (Thing.NUM_BATCHES, Thing.INDICES, Thing.GENERATORS, Thing.BATCH):
        return _explain_data(first, beside, straight, resumed, evidence)
    if first.thing is Thing.INPUTS and not resumed.ranks[first.rank].steps[first.step]["batches"]:
        return _explain_unseen_data(first, straight, resumed, evidence)
    if first.thing is Thing.INPUTS:
        return Cause(
            "inputs",
            "what the script makes of the batch before the model takes it is other after the resume",
            "Whatever it draws or counts there (masks, noise, a curriculum) has to come from the global generators or "
            "be registered with accelerator.register_for_checkpointing.",
            evidence,
        )
    if first.thing is Thing.GENERATORS_AFTER_FORWARD:
        return _explain_generators(first, evidence)
    if first.thing is Thing.NUM_UPDATES:
        return Cause(
            "accumulation",
            "the optimizer makes its updates at other batches than without a break",
            "Let accelerator.accumulate decide when an update is due, or count by position.step: a counter of the "
            "script's own begins anew after a resume. Call step() where no gradients are left over.",
            evidence,
        )
    if first.thing is Thing.LEARNING_RATE:
        return _explain_rate(first, resumed, evidence)
    return _explain_numbers(first, beside, straight, resumed, evidence)


def _explain_data(
    first: Difference, beside: set[Thing], straight: Attempt, resumed: Attempt, evidence: tuple[str, ...]
) -> Cause:
    shift = find_shift(straight, resumed, first.step, first.rank) if Thing.BATCH in beside else None
    if shift is not None:
        there = _find_step(straight, first.step, first.rank, shift)
        seen = evidence
        if there is not None:
            seen = (f"the batch of step {first.step} is what the run without a break saw at step {there}", *evidence)
        if shift > 0:
            return Cause(
                "data-skipped-twice",
                f"data is skipped twice: after the resume it is ahead by {shift} batch(es)",
                "The prepared loader goes on behind the last batch by itself after resume(). Take out the script's own "
                "skipping (skip_first_batches, islice, a loop that continues until a counter is reached).",
                seen,
            )
        return Cause(
            "data-repeated",
            f"data comes again: after the resume it lags behind by {-shift} batch(es)",
            "Iterate the loader that accelerator.prepare returned before resume() was called; one that is made anew "
            "begins at its beginning.",
            seen,
        )
    if Thing.GENERATORS in beside and Thing.INDICES not in beside:
        if _is_drawn_after_save(first, straight, resumed):
            return _explain_drawing(first, resumed, evidence)
        return _explain_generators(first, evidence)
    if Thing.INDICES in beside:
        return Cause(
            "data-order",
            "other samples, or another order, than without a break",
            "The order has to come from a generator that is saved: that of the DataLoader or sampler, or the global "
            "one; and the dataset has to be the same, in the same order.",
            evidence,
        )
    return Cause(
        "data-generator",
        "the same samples have another content: the dataset or its collate function draws random numbers from a "
        "generator that is not restored",
        "Draw from the global generators (random, numpy.random, torch), or keep the generator as an attribute of the "
        "dataset, where it is saved and restored.",
        ("indices and global random generators are the same", *evidence),
    )


def _explain_unseen_data(first: Difference, straight: Attempt, resumed: Attempt, evidence: tuple[str, ...]) -> Cause:
    shift = find_shift(straight, resumed, first.step, first.rank)
    facts = ["no batch came from a loader that is prepared"]
    if shift is not None:
        there = _find_step(straight, first.step, first.rank, shift)
        facts.append(f"the batch of step {first.step} is what the run without a break saw at step {there}")
    return Cause(
        "loader-not-prepared",
        "the training loader is not prepared: no checkpoint knows where it stands, and other data comes afterwards",
        "Pass the loader to accelerator.prepare and iterate what it returns, or skip what was seen by position.step.",
        (*facts, *evidence),
    )


def _explain_generators(first: Difference, evidence: tuple[str, ...]) -> Cause:
    advice = "Look for a set_seed, torch.manual_seed or the like inside the loop"
    if first.thing is Thing.GENERATORS_AFTER_FORWARD:
        where = "they were right when the batch came and other after the forward pass"
    elif first.thing is Thing.GENERATORS_AFTER:
        where = "they were right after the forward pass and other after the update"
    else:
        where = "they are other when the batch comes"
        advice = "Look for a set_seed, torch.manual_seed or the like behind resume()"
    names = f" ({', '.join(first.names)})" if first.names else ""
    return Cause(
        "rng-not-restored",
        f"the random generators{names} are not those of the run without a break: dropout and whatever else draws from "
        "them differs",
        f"{advice}, and for random numbers drawn in the script that only one of the runs draws. Seed once, before the "
        "model is made.",
        (where, *evidence),
    )


def _is_drawn_after_save(first: Difference, straight: Attempt, resumed: Attempt) -> bool:
    """Whether the run without a break draws between the update that was saved and the next batch, and only that run."""
    begin = resumed.ranks[first.rank].begin
    saved, following, resumed_following = (
        straight.ranks[first.rank].steps.get(first.step - 1),
        straight.ranks[first.rank].steps.get(first.step),
        resumed.ranks[first.rank].steps.get(first.step),
    )
    if first.step != resumed.first_step + 1 or not (begin and saved and following and resumed_following):
        return False
    pairs = [(saved["generators"], following["batches"]), (begin["generators"], resumed_following["batches"])]
    if not all(batches for _, batches in pairs):
        return False
    draws, draws_resumed = (
        any(generators.get(name) != batches[0]["generators"].get(name) for name in first.names)
        for generators, batches in pairs
    )
    return draws and not draws_resumed


def _explain_drawing(first: Difference, resumed: Attempt, evidence: tuple[str, ...]) -> Cause:
    return Cause(
        "draws-after-save",
        f"random numbers ({', '.join(first.names)}) are drawn between the save of step {resumed.first_step} and the "
        "next batch: the resumed run, which begins after the save, does not draw them",
        "Evaluate, sample and log before step(), so that the checkpoint has the generators as they are afterwards. "
        "Where that cannot be, keep the generators out of it: iterating any DataLoader draws from torch's, unless it "
        "has a generator of its own.",
        evidence,
    )


def _explain_rate(first: Difference, resumed: Attempt, evidence: tuple[str, ...]) -> Cause:
    setup = _get_setup(resumed)
    num_schedulers, num_registered = setup.get("schedulers", 0), setup.get("registered", 0)
    begun = next(iter(resumed.ranks[first.rank].steps.values()), None)
    facts = [f"{show(first.expected)} without a break, {show(first.actual)} after the resume"]
    if begun is not None and resumed.ranks[first.rank].steps and first.step == min(resumed.ranks[first.rank].steps) + 1:
        facts.append("the first update after the resume still had the right one, from the optimizer's own state")
    if num_schedulers == 0 and num_registered == 0 and not setup.get("restores_schedulers"):
        return Cause(
            "scheduler-not-prepared",
            "the scheduler was forgotten: none is prepared or registered, so the schedule begins anew",
            "Pass the scheduler to accelerator.prepare, before the Checkpointer is made; a schedule of your own goes "
            "by position.step or is registered with accelerator.register_for_checkpointing.",
            (*facts, *evidence),
        )
    return Cause(
        "learning-rate",
        "the learning rate takes another course, although "
        f"{num_schedulers} scheduler(s) and {num_registered} registered object(s) are restored",
        "Look for a rate that the script sets by itself, or a second scheduler that is not prepared.",
        (*facts, *evidence),
    )


def _explain_numbers(
    first: Difference, beside: set[Thing], straight: Attempt, resumed: Attempt, evidence: tuple[str, ...]
) -> Cause:
    """Everything that goes in is the same, and something that comes out is not."""
    strangers = _list_strangers(resumed, first.step, first.rank)
    if strangers:
        return Cause(
            "optimizer-not-prepared",
            f"an optimizer is not prepared ({', '.join(strangers)}): no checkpoint holds its state",
            "Pass every optimizer to accelerator.prepare together with its model. Several of one model: make them one, "
            "with parameter groups.",
            (*_compare_states(straight, resumed, first), *evidence),
        )
    if first.thing is Thing.LOSS:
        return Cause(
            "hidden-state",
            "batch, parameters and random generators are the same and the loss is not: the forward pass depends on "
            "something that no checkpoint holds",
            "Look for a torch.Generator of the model's own, a counter, a buffer with persistent=False, a cache. "
            "Register it with accelerator.register_for_checkpointing, or make it a persistent buffer.",
            evidence,
        )
    if first.thing in (Thing.GRADIENTS, Thing.GRADIENT_NORM):
        return Cause(
            "gradients",
            "the loss is the same and the gradients are not",
            "Look for gradients that are left from before the resume (zero_grad), hooks with a state of their own, or "
            "a loss scale that is not the prepared accelerator's.",
            evidence,
        )
    if first.thing in (Thing.PARAMETERS, Thing.OPTIMIZER):
        if Thing.OPTIMIZER not in beside:
            evidence = ("the optimizer's state is the same after the update: something else may change them", *evidence)
        return Cause(
            "update",
            "the gradients are the same and the update is not: the optimizer goes by something that was not restored",
            "Look for state that the optimizer keeps outside of its `state`, or changes of the parameters outside of "
            "it (EMA, weight clipping).",
            (*_compare_states(straight, resumed, first), *evidence),
        )
    return _explain_generators(first, evidence)


def explain_elastic(differences: Sequence[Difference], straight: Attempt, resumed: Attempt) -> Cause:
    """Say why a resume on another number of ranks is not consistent with the run without a break."""
    first = differences[0]
    evidence = list_inexact(resumed)
    if first.thing is Thing.SAMPLES:
        return Cause(
            "elastic-samples",
            "an update is made of other samples than it was to be",
            "Batch size per rank x ranks x accumulation has to stay what it was: --elastic-args gives the resumed run "
            'other arguments ("--accumulate 2"). Checkpointer(elastic="exact") refuses what is not so.',
            (f"{show(first.expected)} on {straight.world_size} rank(s), {show(first.actual)} now", *evidence),
        )
    if first.thing is Thing.LOSS:
        return Cause(
            "elastic-loss",
            "the loss is farther apart than --tolerance, with the same samples, learning rates and parameters at the "
            "resume",
            "Dropout and augmentation hit other samples on another number of ranks: rehearse without them, or with a "
            "larger --tolerance. Otherwise look for a loss that is scaled by the number of ranks or the accumulation.",
            evidence,
        )
    return explain_resume(differences, straight, resumed)


def list_divergent(attempt: Attempt, step: int) -> set[str]:
    """Names of the tensors of which ranks had different copies after an update: those have no fingerprint."""
    return {name for record in attempt.get_step(step) for name in record.get("divergent", ())}


# -- evidence ---------------------------------------------------------------------------------------------------------


def _get_setup(attempt: Attempt) -> Mapping[str, Any]:
    return {} if attempt.begin is None else dict(attempt.begin.get("setup") or {})


def list_inexact(resumed: Attempt) -> tuple[str, ...]:
    """Return what the load's own report says is not exact, in words."""
    report = None if resumed.begin is None else resumed.begin.get("report")
    if report is None:
        return ()
    found = []
    for name, outcome in report["states"].items():
        if outcome["status"] in ("approximate", "absent"):
            why = "; ".join(outcome["reasons"]) or outcome["detail"]
            found.append(f"the resume itself reported: {name} {outcome['status']}: {why}")
    return tuple(found)


def _list_strangers(attempt: Attempt, step: int, rank: int) -> list[str]:
    """Optimizers that made an update and were never prepared."""
    record = attempt.ranks[rank].steps.get(step)
    updates = [] if record is None else record["updates"]
    return [str(each["class"]) for each in updates if not each["is_prepared"]]


def _trains_on_as_many(first: Difference, straight: Attempt, resumed: Attempt) -> bool:
    """Whether the model takes as many batches in both runs, however many the loaders hand out."""
    pair = [attempt.ranks[first.rank].steps[first.step] for attempt in (straight, resumed)]
    return len(pair[0]["inputs"]) == len(pair[1]["inputs"]) > 0


def _compare_states(straight: Attempt, resumed: Attempt, first: Difference) -> list[str]:
    """Optimizers whose state was empty at the update after the resume, and wasn't without a break."""
    pair = [attempt.ranks[first.rank].steps.get(first.step) for attempt in (straight, resumed)]
    if pair[0] is None or pair[1] is None:
        return []
    return [
        f"before the update the {one['class']} had state of {one['num_states']} parameter(s) without a break, of "
        f"{other['num_states']} after the resume"
        for one, other in zip(pair[0]["updates"], pair[1]["updates"], strict=False)
        if one["num_states"] != other["num_states"]
    ]


def _find_step(attempt: Attempt, step: int, rank: int, shift: int) -> int | None:
    """The update to which the batch belongs that comes so many batches later than the first of `step`."""
    steps = attempt.ranks[rank].steps
    numbers = [number for number in sorted(steps) for _ in steps[number]["inputs"] or steps[number]["batches"]]
    at = sum(number < step for number in numbers) + shift
    return numbers[at] if 0 <= at < len(numbers) else None
