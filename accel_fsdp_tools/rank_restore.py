"""The part of a load that Accelerate leaves out: each rank's generators, dataloaders and registered objects.

Read and judged before anything is loaded, restored at the end. Where one rank's data progress is absent no rank's is
restored: ranks at different places of an epoch would wait for each other for ever at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import contract
from .errors import DataProgressError, RngStateError
from .load_notes import LoadNotes
from .manifest import DIRECTORY, Manifest
from .permissions import Permissions
from .progress import Brief, Carried, Change, LoaderOutcome, LoaderProgress
from .progress import track as track_loaders
from .rank_objects import has_rank_objects, read_rank_objects
from .rank_state import RankState, read_rank_state
from .ranks import broadcast, gather_all, get_rank, get_world_size, run_on_each, run_together
from .rng import RngSnapshot, derive

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class RankPart:
    """What this rank will restore: its own state if it has one, or rank 0's generators to derive new ones from.

    `loaders` are the records to restore: those of its state, or, on other ranks or settings, what became of all ranks'.
    """

    state: RankState | None
    base_rng: RngSnapshot | None
    restores_data: bool
    loaders: tuple[LoaderProgress, ...] = ()
    data_resume: str = "skip"


def read_rank_part(
    accelerator: Accelerator,
    directory: Path,
    manifest: Manifest | None,
    *,
    permissions: Permissions,
    notes: LoadNotes,
    data_resume: str = "skip",
) -> RankPart:
    """Read this rank's generators and loaders, and find out whether they can be restored. Changes nothing. Collective.

    Raises:
        RngStateError, DataProgressError, MismatchError: with `strict`, on every rank, if any rank's cannot.
    """
    found: list[RankState] = []

    def read() -> bool:
        state = _read(directory, manifest, permissions, notes)
        found.extend([] if state is None else [state])
        return state is not None

    has_state = run_together("reading RNG and data progress", read)
    state = found[0] if found else None
    if manifest is None:
        return RankPart(None, None, restores_data=False)
    has_new_ranks = get_world_size() > manifest.topology.world_size
    base_rng = broadcast(None if state is None else state.rng) if has_new_ranks else None
    missing = [rank for rank, has in enumerate(has_state) if not has and rank < manifest.topology.world_size]
    change = _describe_change(accelerator, manifest, permissions)
    if state is not None:
        notes.notes.extend(track_loaders(accelerator).list_notes(state.loaders))
    loaders = () if state is None else tuple(state.loaders)
    part = RankPart(state, base_rng, restores_data=not missing, loaders=loaders, data_resume=data_resume)
    if not missing and _is_to_be_carried(accelerator, state, change, permissions):
        return replace(part, loaders=_carry(accelerator, directory, state, change, permissions, notes))
    run_together(
        "comparing the dataloaders", lambda: _judge(accelerator, directory, state, permissions, data_resume, notes)
    )
    if has_new_ranks:
        missing.extend(range(manifest.topology.world_size, get_world_size()))
    if missing and state is not None:
        notes.absent["data"] = f"rank(s) {', '.join(map(str, missing))} have no data progress, so no rank's is restored"
    elif missing and get_rank() >= manifest.topology.world_size:
        notes.absent["data"] = f"rank {get_rank()} did not exist at the save"
    return replace(part, restores_data=not missing)


def _read(directory: Path, manifest: Manifest | None, permissions: Permissions, notes: LoadNotes) -> RankState | None:
    rank = get_rank()
    if manifest is None:
        if (directory / f"random_states_{rank}.pkl").exists():
            notes.reasons["rng"].append(
                "restored by Accelerate from its own file; without a manifest nothing tells whether it is whole"
            )
        else:
            notes.absent["rng"] = f"there is no random_states_{rank}.pkl for rank {rank}"
        notes.absent["data"] = "the checkpoint was not written by this package and holds no data progress"
        return None
    if rank >= manifest.topology.world_size:
        return None
    if "rng" in notes.absent:
        return None  # its file is damaged, which has been accepted
    try:
        return read_rank_state(directory / DIRECTORY, rank)
    except (RngStateError, DataProgressError) as error:
        if permissions.strict:
            raise
        notes.absent["rng"] = notes.absent["data"] = str(error)
        return None


def _judge(
    accelerator: Accelerator,
    directory: Path,
    state: RankState | None,
    permissions: Permissions,
    data_resume: str,
    notes: LoadNotes,
) -> None:
    """Refuse, or note, what differs between the records of this rank and its loaders."""
    if state is None:
        return
    tracker = track_loaders(accelerator)
    found = [contract.Difference("data", text, argument=name) for text, name in tracker.find_changes(state.loaders)]
    if permissions.strict:
        # Here none is permitted: those that are would have been carried over, all of them or none.
        contract.raise_on_differences(directory, found, Permissions(strict=True))
        problems = tracker.list_problems(state.loaders, data_resume=data_resume)
        if problems:
            raise DataProgressError(
                f"{directory}: the data progress cannot be restored: {'; '.join(problems)}. Nothing was loaded. Pass "
                "strict=False to go on as far as it can be; the report then says what is not exact.",
                path=str(directory),
                actual=problems,
            )
    notes.reasons["data"].extend(each.text for each in found)


# -- other ranks or settings ----------------------------------------------------------------------------------------


def _describe_change(accelerator: Accelerator, manifest: Manifest, permissions: Permissions) -> Change:
    now = accelerator.gradient_accumulation_steps
    return Change(
        elastic=permissions.elastic,
        allowed=permissions.allow,
        accumulation_before=int(manifest.accelerate.get("gradient_accumulation_steps", now)),
        accumulation_now=now,
        num_ranks_before=manifest.topology.world_size,
        num_ranks_now=get_world_size(),
    )


def _is_to_be_carried(
    accelerator: Accelerator, state: RankState | None, change: Change, permissions: Permissions
) -> bool:
    """Whether the records mean something else here, and the caller permits what differs. The same on every rank."""
    if (change.num_ranks_before, change.accumulation_before) != (change.num_ranks_now, change.accumulation_now):
        return permissions.permits("elastic")
    changes = [] if state is None else track_loaders(accelerator).find_changes(state.loaders)
    everyone = [name for names in gather_all([name for _, name in changes]) for name in names]
    return any(permissions.permits(name) for name in everyone)


def _carry(
    accelerator: Accelerator,
    directory: Path,
    state: RankState | None,
    change: Change,
    permissions: Permissions,
    notes: LoadNotes,
) -> tuple[LoaderProgress, ...]:
    """Make this rank's records of those of all ranks of the save, each of which is read by one rank. Collective."""
    rank, tracker = get_rank(), track_loaders(accelerator)

    def read() -> tuple[list[LoaderProgress], list[list[Brief]]]:
        first = state if rank == 0 and state is not None else read_rank_state(directory / DIRECTORY, 0)
        briefs = []
        for number in range(rank, change.num_ranks_before, change.num_ranks_now):
            is_own = number == rank and state is not None
            each = state if is_own and state is not None else read_rank_state(directory / DIRECTORY, number)
            briefs.append(tracker.make_briefs(each.loaders, number))
        return first.loaders, briefs

    first, mine = run_on_each("reading the data progress of all ranks", read)
    briefs = [each for part in gather_all(mine) for each in part if each]
    briefs.sort(key=lambda each: each[0].rank)

    def carry() -> list[Carried]:
        own = None if state is None else state.loaders
        carried = tracker.carry(first, own, briefs, change=change, rank=rank)
        found = [
            contract.Difference("data", f"dataloader {each.record.index}: {each.problem}")
            for each in carried
            if each.problem is not None
        ]
        contract.raise_on_differences(directory, found, Permissions(strict=permissions.strict))
        return carried

    was, now = (change.num_ranks_before, change.accumulation_before), (change.num_ranks_now, change.accumulation_now)
    changes = [] if state is None else tracker.find_changes(state.loaders)
    is_cut_otherwise = was != now or any(name == "elastic" for _, name in changes)
    carried = run_on_each("carrying the data progress over", carry)
    notes.notes.extend(each.note for each in carried if each.note is not None)
    if is_cut_otherwise:
        notes.reasons["model"].append("an update is cut into other micro-batches: sums over them may round differently")
        notes.reasons["rng"].append(
            "an update is cut into other micro-batches: dropout and augmentation hit other samples than they would have"
        )
    return tuple(each.record for each in carried)


def restore_rank_part(
    accelerator: Accelerator, manifest: Manifest | None, part: RankPart, *, strict: bool, notes: LoadNotes
) -> tuple[LoaderOutcome, ...]:
    """Put this rank's loaders and generators back, the generators last. Collective.

    Returns:
        What became of each loader of this rank.
    """
    outcomes = run_on_each(
        "restoring RNG and data progress", lambda: _restore(accelerator, manifest, part, strict, notes)
    )
    if manifest is not None:
        absent = gather_all("data" in notes.absent)
        if any(absent) and not all(absent):
            notes.absent.setdefault("data", "another rank's data progress is absent")
    return outcomes


def _restore(
    accelerator: Accelerator, manifest: Manifest | None, part: RankPart, strict: bool, notes: LoadNotes
) -> tuple[LoaderOutcome, ...]:
    outcomes: tuple[LoaderOutcome, ...] = ()
    if part.restores_data and part.loaders:
        tracker = track_loaders(accelerator)
        outcomes = tuple(tracker.restore(part.loaders, strict=strict, data_resume=part.data_resume))
        for outcome in outcomes:
            if outcome.status == "absent":
                notes.absent["data"] = f"dataloader {outcome.index}: {outcome.reason}"
            elif outcome.status == "approximate":
                notes.reasons["data"].append(f"dataloader {outcome.index}: {outcome.reason}")
    if manifest is not None:
        _restore_rng(manifest, part, notes)
    return outcomes


def _restore_rng(manifest: Manifest, part: RankPart, notes: LoadNotes) -> None:
    rank, num_saved = get_rank(), manifest.topology.world_size
    if part.state is not None:
        unused = part.state.rng.restore()
        if unused:
            notes.notes.append(f"saved generators of {', '.join(unused)} are not used: there is no such device here")
        if rank == 0 and get_world_size() < num_saved:
            notes.reasons["rng"].append(f"the generators of {num_saved - get_world_size()} rank(s) have no rank here")
    elif rank >= num_saved:
        if part.base_rng is None:
            notes.absent["rng"] = "rank 0's generators, from which a new rank's are derived, could not be read"
            return
        derive(part.base_rng, rank).restore()
        notes.reasons["rng"].append(f"rank {rank} did not exist at the save: derived from rank 0's generators")


def restore_objects(accelerator: Accelerator, directory: Path, manifest: Manifest, notes: LoadNotes) -> None:
    """Give every rank the registered objects' states that differed from rank 0's, which Accelerate has loaded.

    Collective. What the checkpoint cannot give back to every rank is noted.
    """
    run_together("restoring registered objects", lambda: _restore_objects(accelerator, directory))
    num_saved = manifest.topology.world_size
    if get_rank() == 0 and get_world_size() != num_saved and has_rank_objects(directory / DIRECTORY, num_saved):
        notes.reasons["model"].append(
            "registered objects differed between the ranks of the save: those that exist here have theirs, new ones "
            "have rank 0's"
        )
    divergent = manifest.states["model"].get("divergent", [])
    if divergent:
        notes.reasons["model"].append(
            f"{len(divergent)} tensor(s) differed between ranks at the save ({divergent[0]}, ...): all have one rank's"
        )
    if get_world_size() > 1:
        notes.reasons["model"].extend(
            f"registered object {index} {problem}, so it cannot be compared between ranks: all have rank 0's value"
            for index, problem in manifest.states["model"].get("opaque_objects", {}).items()
        )


def _restore_objects(accelerator: Accelerator, directory: Path) -> None:
    for index, state in read_rank_objects(directory / DIRECTORY, get_rank()).items():
        accelerator._custom_objects[index].load_state_dict(state)
