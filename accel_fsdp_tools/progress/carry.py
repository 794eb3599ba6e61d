"""Turn the records that all ranks of a save wrote into the record of one rank of another set-up, or say why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contract import describe_contract, list_differences
from .converting import convert_record, digest_order, find_synchronised, move_paths
from .elastic import GOVERNED, EpochShape, Place, find_obstacle, find_place
from .follow import Follower
from .generators import SAMPLER_ROOTS, find_generators, format_path
from .order import Dealing, OrderProof, find_inner_sampler
from .records import UNSEEDED, LoaderProgress, PassState

_KINDS = ({"shard", "workers"}, {"dispatcher"}, {"stateful"}, {"stateful_dispatcher"})
"""Kinds of loaders whose places are places in one global order; within a set one is a place in the other."""
_DISPATCHED = ("dispatcher", "stateful_dispatcher")
_COVERED = {"elastic": GOVERNED, "dataset": ("dataset_length", "num_samples"), "num_workers": ("num_workers",)}
"""By argument of a load, the facts of a contract that may differ with it."""


@dataclass(frozen=True)
class Change:
    """What the load is told about the new set-up: what may differ, and the numbers that no loader knows."""

    elastic: str
    allowed: tuple[str, ...]
    accumulation_before: int
    accumulation_now: int
    num_ranks_before: int
    num_ranks_now: int

    @property
    def covered(self) -> tuple[str, ...]:
        """Names of facts that may differ."""
        arguments = (*(["elastic"] if self.elastic != "refuse" else []), *self.allowed)
        names = [name for each in arguments for name in _COVERED.get(each, ())]
        return (*names, "num_batches") if names else ()

    def list_refused(self, saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
        """The differences between two contracts that this does not cover."""
        covered = self.covered
        kept = {name: value for name, value in saved.items() if name not in covered}
        return list_differences({**here, **kept}, here)


def share_an_order(kind: str, other: str) -> bool:
    """Whether a place in a loader of one kind can be carried to one of the other."""
    return any({kind, other} <= kinds for kinds in _KINDS)


def find_argument(name: str) -> str | None:
    """The argument of a load with which a fact of a contract may differ."""
    return next((argument for argument, names in _COVERED.items() if name in names), None)


@dataclass(frozen=True)
class Brief:
    """What all ranks of the new run need to know of one record of the save. Small; sent between ranks."""

    rank: int
    state: PassState
    epoch: int
    batch: int
    iteration: int
    samples: int
    digest: int | None
    order: str
    is_restorable: bool

    @property
    def place(self) -> tuple[Any, ...]:
        """What has to be the same on all ranks."""
        return self.state, self.epoch, self.batch, self.iteration, self.is_restorable


@dataclass(frozen=True)
class Carried:
    """A record for this rank, with what is worth knowing of it; or why nothing but its epoch can be used."""

    record: LoaderProgress
    problem: str | None = None
    note: str | None = None


def make_brief(saved: LoaderProgress, follower: Follower, rank: int) -> Brief:
    """Describe a record of the save to other ranks. Reads the loader, changes nothing."""
    loader = follower.loader
    moved = move_paths(saved, loader)
    found = find_generators(loader)
    skipped = find_synchronised(loader, found) if saved.state != "running" else None
    return Brief(
        rank=rank,
        state=saved.state,
        epoch=saved.epoch,
        batch=saved.batch,
        iteration=saved.iteration,
        samples=saved.samples,
        digest=saved.digest,
        order=digest_order(moved, loader, skipped),
        is_restorable=saved.restorable and not saved.undelivered,
    )


def carry(
    first: LoaderProgress,
    own: LoaderProgress | None,
    briefs: Sequence[Brief],
    follower: Follower,
    *,
    change: Change,
    rank: int,
    is_trained: bool,
) -> Carried:
    """Make this rank's record of a loader.

    Args:
        first: rank 0's record.
        own: the record of the rank of this number; None if there was none.
        briefs: of all ranks of the save.
        is_trained: updates are made with this loader's batches, so that it matters which samples share one.
    """
    loader = follower.loader
    here = describe_contract(loader)
    refused = change.list_refused(first.contract, here)
    problem = "; ".join(refused) or _find_problem(first, briefs, follower)
    if refused or (problem is not None and not first.is_untouched):
        return _give_up(first, follower, here, problem)
    is_dispatched = first.kind in _DISPATCHED
    before = EpochShape.from_contract(first.contract, change.accumulation_before, is_dispatched=is_dispatched)
    now = EpochShape.from_contract(here, change.accumulation_now, is_dispatched=is_dispatched)
    if before is None or now is None:
        if first.is_untouched:
            return Carried(dataclasses.replace(first, contract=here, kind=follower.kind.name))
        return _give_up(first, follower, here, "the samples of a batch are not known, so the place in the order is not")
    if before.unit != now.unit or (before.unit == "batch" and first.contract["batch_size"] != here["batch_size"]):
        return _give_up(first, follower, here, "which samples a batch sampler puts together depends on its batch size")
    num_micro = first.batch if first.state == "running" else 0
    has_other_data = first.contract.get("dataset_length") != here["dataset_length"]
    obstacle = _find_obstacle(before, now, num_micro, has_other_data)
    filled = dataclasses.replace(now, is_filled=True, is_sharded=True)
    fills_last = obstacle is not None and _is_to_be_filled(before, now, loader)
    fills_last = fills_last and find_obstacle(before, filled, num_micro) is None
    if fills_last:
        now, obstacle = filled, None
    if obstacle is not None and change.elastic == "exact" and is_trained:
        advice = 'Choose batch size and accumulation so that they agree, or give elastic="allow"'
        return _give_up(first, follower, here, f"{obstacle} (then {_count(before)}; now {_count(now)}). {advice}")
    if fills_last:
        _fill_last_batches(loader)
        here = describe_contract(loader)
    later = _find_undetermined(move_paths(first, loader), loader) if is_dispatched else None
    if later is not None and change.elastic == "exact" and is_trained:
        return _give_up(first, follower, here, later)
    place = find_place(before, now, num_micro)
    reason = _explain(first, here, before, now, place, obstacle if is_trained else None, later)
    record = convert_record(first, own, follower, here, place, now, rank)
    if first.state == "running" and record.state == "idle" and (later is not None or UNSEEDED in first.values):
        # What the pass began with is put back only for one that goes on.
        problem = later or "the first pass of a stateful loader, which drew no seed, cannot begin again"
        return _give_up(first, follower, here, f"less than one batch of now was handed out; {problem}")
    if record.state == "running" and not has_other_data and (rank == 0 or not is_dispatched):
        record = dataclasses.replace(record, proof=_make_proof(first, briefs, record, before, now, rank, change))
    note = f"dataloader {first.index}: {_count(now)}, {_count(before)} at the save"
    if reason is None and record.state == "running":
        note += f"; the same {now.unit}s go into the same updates, from {now.unit} {place.num_units} of the epoch on"
    reasons = [each for each in (first.reason, reason) if each is not None]
    return Carried(dataclasses.replace(record, reason="; ".join(reasons) or None), note=note)


def _find_obstacle(before: EpochShape, now: EpochShape, num_micro: int, has_other_data: bool) -> str | None:
    if has_other_data:  # which the caller has allowed, so that the ends of epochs need not agree
        whole = before.per_update * now.per_update
        before, now = (dataclasses.replace(each, num_units=whole) for each in (before, now))
    return find_obstacle(before, now, num_micro)


def _give_up(first: LoaderProgress, follower: Follower, here: dict[str, Any], problem: str | None) -> Carried:
    """A record of which nothing but the epoch can be used."""
    record = dataclasses.replace(
        first,
        contract=here,
        kind=follower.kind.name,
        restorable=False,
        reason=problem,
        digest=None,
        moments={},
        attributes={},
        replayable=False,
        next_digest=None,
        undelivered=(),
        values={},
    )
    return Carried(record, problem=problem)


def _count(shape: EpochShape) -> str:
    each = shape.per_micro // shape.num_processes
    return f"{shape.num_processes} x {each} x {shape.accumulation} = {shape.per_update} {shape.unit}s per update"


def _find_problem(first: LoaderProgress, briefs: Sequence[Brief], follower: Follower) -> str | None:
    """Why the records of the save do not tell where a global order stood; None if they do."""
    if not share_an_order(first.kind, follower.kind.name):
        return f"the position of a loader of kind {first.kind!r} cannot be carried to another set-up"
    if not first.restorable:
        return first.reason or "its position was not saved"
    if not all(each.is_restorable for each in briefs):
        return "its workers had delivered batches out of order, so there is no common place (in_order=True keeps one)"
    different = next((each for each in briefs if each.place != briefs[0].place), None)
    if different is not None:
        return (
            f"ranks 0 and {different.rank} of the save stood at different places (batches {briefs[0].batch} and "
            f"{different.batch}), so there is no common one"
        )
    if first.kind in _DISPATCHED:
        return None  # rank 0 alone draws an order, and goes on as rank 0
    different = next((each for each in briefs if each.order != briefs[0].order), None)
    if different is not None:
        return (
            f"ranks 0 and {different.rank} of the save drew different orders (their samplers' states differ), so there "
            "was no global one; give every rank the same seed, or the sampler a generator"
        )
    return _find_undetermined(move_paths(first, follower.loader), follower.loader)


def _find_undetermined(moved: LoaderProgress, loader: Any) -> str | None:
    known = moved.moments["epoch_start" if moved.state == "running" else "now"].generators
    text = (
        "the order is drawn from the global random generator in the run that saved or in this one, so it cannot be "
        "continued; give the sampler a generator of its own, or set DataLoaderConfiguration(use_seedable_sampler=True)"
    )
    for each in find_generators(loader):
        if each.decides_order and each.path not in known and type(_get_sampler(loader)).__name__ != _SEEDABLE:
            return f"{format_path(each.path)} has no saved state: {text}"
    sampler = _get_sampler(loader)
    if "generator" in getattr(sampler, "__dict__", {}) and sampler.generator is None:
        paths = [path for path in known if path[-1] == "generator" and path[0] in SAMPLER_ROOTS]
        if not paths and type(sampler).__name__ != _SEEDABLE:
            return text
    return None


_SEEDABLE = "SeedableRandomSampler"  # sets its generator to a seed and the epoch itself


def _get_sampler(loader: Any) -> Any:
    inner = find_inner_sampler(loader)
    return getattr(inner, "sampler", inner)


def _explain(
    first: LoaderProgress,
    here: dict[str, Any],
    before: EpochShape,
    now: EpochShape,
    place: Place,
    obstacle: str | None,
    later: str | None,
) -> str | None:
    texts = [] if obstacle is None else [f"{obstacle} (then {_count(before)}; now {_count(now)})"]
    lengths = first.contract.get("dataset_length"), here["dataset_length"]
    if lengths[0] != lengths[1]:
        texts.append(
            f"the dataset has {lengths[1]} items, it had {lengths[0]}: the order is another, so items may come again "
            "or be left out in this epoch"
        )
    if first.contract.get("num_workers") != here["num_workers"]:
        texts.append(
            f"num_workers is {here['num_workers']}, it was {first.contract.get('num_workers')}: random numbers "
            "drawn while items are read are others"
        )
    if later is not None:
        texts.append(f"this epoch goes on in its order, later ones are in others: {later}")
    if first.state == "running" and (place.num_repeated or texts):
        again = f", so {place.num_repeated} that had been handed out come again" if place.num_repeated else ""
        texts.append(f"goes on at {now.unit} {place.num_units} of the epoch{again}")
    return "; ".join(texts) or None


# -- one process, which Accelerate leaves alone ---------------------------------------------------------------------


def _is_to_be_filled(before: EpochShape, now: EpochShape, loader: Any) -> bool:
    """Whether the last batch was filled up by Accelerate at the save, and is not here because one process runs."""
    if not before.is_filled or now.is_sharded or now.unit != "sample":
        return False
    return bool(now.num_short) and getattr(loader.base_dataloader, "batch_sampler", None) is not None


def _fill_last_batches(loader: Any) -> None:
    """Let one process end its epochs as several do: with a last batch that is filled up."""
    from accelerate.data_loader import BatchSamplerShard

    base = loader.base_dataloader
    shard = BatchSamplerShard(base.batch_sampler, 1, 0)
    if type(_get_sampler(loader)).__name__ == _SEEDABLE:
        shard.sampler = _get_sampler(loader)  # as Accelerate does, so that its state is found where it was
    base.__dict__["batch_sampler"] = shard  # `DataLoader.__setattr__` refuses


def _make_proof(
    first: LoaderProgress,
    briefs: Sequence[Brief],
    record: LoaderProgress,
    before: EpochShape,
    now: EpochShape,
    rank: int,
    change: Change,
) -> OrderProof:
    if before.is_dispatched:
        return OrderProof(
            before=Dealing.from_reader(first.contract),
            now=Dealing.from_reader(record.contract),
            num_micro=first.batch * before.per_micro // first.contract["batch_size"],
            num_units=first.batch * before.per_micro,
            digests={} if first.digest is None else {0: first.digest},
            num_micro_now=record.batch * now.per_micro // record.contract["batch_size"],
        )
    digests = {
        each.rank * before.num_processes // change.num_ranks_before: each.digest
        for each in briefs
        if each.digest is not None
    }
    return OrderProof(
        before=Dealing.from_contract(first.contract, before.unit),
        now=Dealing.from_contract(record.contract, now.unit),
        num_micro=first.batch,
        num_units=first.batch * before.per_micro,
        digests=digests,
        process=rank * now.num_processes // change.num_ranks_now,
        num_micro_now=record.batch,
    )
