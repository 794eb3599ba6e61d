"""The part of a load that Accelerate leaves out: each rank's generators, dataloaders and registered objects.

Read and judged before anything is loaded, restored at the end. Where one rank's data progress is absent no rank's is
restored: ranks at different places of an epoch would wait for each other for ever at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import contract
from .errors import DataProgressError, RngStateError
from .load_notes import LoadNotes
from .manifest import DIRECTORY, Manifest
from .progress import LoaderOutcome
from .progress import track as track_loaders
from .rank_objects import read_rank_objects
from .rank_state import RankState, read_rank_state
from .ranks import broadcast, gather_all, get_rank, get_world_size, run_on_each, run_together
from .rng import RngSnapshot, derive

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class RankPart:
    """What this rank will restore: its own state if it has one, or rank 0's generators to derive new ones from."""

    state: RankState | None
    base_rng: RngSnapshot | None
    restores_data: bool
    data_resume: str = "skip"


def read_rank_part(
    accelerator: Accelerator,
    directory: Path,
    manifest: Manifest | None,
    *,
    strict: bool,
    notes: LoadNotes,
    data_resume: str = "skip",
) -> RankPart:
    """Read this rank's generators and loaders, and find out whether they can be restored. Changes nothing. Collective.

    Raises:
        RngStateError, DataProgressError, MismatchError: with `strict`, on every rank, if any rank's cannot.
    """
    found: list[RankState] = []

    def read() -> bool:
        state = _read(accelerator, directory, manifest, strict, data_resume, notes)
        found.extend([] if state is None else [state])
        return state is not None

    has_state = run_together("reading RNG and data progress", read)
    state = found[0] if found else None
    if manifest is None:
        return RankPart(None, None, restores_data=False)
    has_new_ranks = get_world_size() > manifest.topology.world_size
    base_rng = broadcast(None if state is None else state.rng) if has_new_ranks else None
    missing = [rank for rank, has in enumerate(has_state) if not has]
    if missing and state is not None:
        notes.absent["data"] = f"rank(s) {', '.join(map(str, missing))} have no data progress, so no rank's is restored"
    return RankPart(state, base_rng, restores_data=not missing, data_resume=data_resume)


def _read(
    accelerator: Accelerator,
    directory: Path,
    manifest: Manifest | None,
    strict: bool,
    data_resume: str,
    notes: LoadNotes,
) -> RankState | None:
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
        notes.absent["data"] = f"rank {rank} did not exist at the save"
        return None
    if "rng" in notes.absent:
        return None  # its file is damaged, which has been accepted
    try:
        state = read_rank_state(directory / DIRECTORY, rank)
    except (RngStateError, DataProgressError) as error:
        if strict:
            raise
        notes.absent["rng"] = notes.absent["data"] = str(error)
        return None
    tracker = track_loaders(accelerator)
    differences = tracker.check(state.loaders)
    if strict:
        found = [contract.Difference("data", text) for text in differences]
        contract.raise_on_differences(directory, found, strict=True)
        problems = tracker.list_problems(state.loaders, data_resume=data_resume)
        if problems:
            raise DataProgressError(
                f"{directory}: the data progress cannot be restored: {'; '.join(problems)}. Nothing was loaded. Pass "
                "strict=False to go on as far as it can be; the report then says what is not exact.",
                path=str(directory),
                actual=problems,
            )
    notes.reasons["data"].extend(differences)
    return state


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
        outcomes = _agree_on_absent(accelerator, part, outcomes)
        absent = gather_all("data" in notes.absent)
        if any(absent) and not all(absent):
            notes.absent.setdefault("data", "another rank's data progress is absent")
    return outcomes


def _agree_on_absent(
    accelerator: Accelerator, part: RankPart, outcomes: tuple[LoaderOutcome, ...]
) -> tuple[LoaderOutcome, ...]:
    """Let a loader whose pass begins anew on one rank begin anew on all: ranks wait for each other in a pass."""
    mine = {outcome.index for outcome in outcomes if outcome.status == "absent"}
    others = set().union(*gather_all(mine)) - mine
    if not others or part.state is None:
        return outcomes
    tracker = track_loaders(accelerator)
    reason = "its data progress is absent on another rank"
    given_up = {item.index: tracker.give_up(item, reason) for item in part.state.loaders if item.index in others}
    return tuple(given_up.get(outcome.index, outcome) for outcome in outcomes)


def _restore(
    accelerator: Accelerator, manifest: Manifest | None, part: RankPart, strict: bool, notes: LoadNotes
) -> tuple[LoaderOutcome, ...]:
    rank = get_rank()
    outcomes: tuple[LoaderOutcome, ...] = ()
    if part.state is None:
        if manifest is None or rank < manifest.topology.world_size:
            return outcomes
        if part.base_rng is None:
            notes.absent["rng"] = "rank 0's generators, from which a new rank's are derived, could not be read"
            return outcomes
        derive(part.base_rng, rank).restore()
        notes.reasons["rng"].append(f"rank {rank} did not exist at the save: derived from rank 0's generators")
        return outcomes
    if part.restores_data:
        tracker = track_loaders(accelerator)
        outcomes = tuple(tracker.restore(part.state.loaders, strict=strict, data_resume=part.data_resume))
        for outcome in outcomes:
            if outcome.status == "absent":
                notes.absent["data"] = f"dataloader {outcome.index}: {outcome.reason}"
            elif outcome.status == "approximate":
                notes.reasons["data"].append(f"dataloader {outcome.index}: {outcome.reason}")
    unused = part.state.rng.restore()
    if unused:
        notes.notes.append(f"saved generators of {', '.join(unused)} are not used: there is no such device here")
    return outcomes


def restore_objects(accelerator: Accelerator, directory: Path, manifest: Manifest, notes: LoadNotes) -> None:
    """Give every rank the registered objects' states that differed from rank 0's, which Accelerate has loaded.

    Collective. What the checkpoint cannot give back to every rank is noted.
    """
    run_together("restoring registered objects", lambda: _restore_objects(accelerator, directory))
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
