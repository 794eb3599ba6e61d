"""Load the newest checkpoint of a root that is whole, and fall back to older ones where it is not.

What is damaged is told from what is not by looking, never by the kind of an exception alone: a run that does not fit
its checkpoint, a full memory or a node with a bad mount must not cost a good checkpoint its place. Collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import views
from .damage import find_damage
from .errors import AccelFsdpError, CheckpointIncompleteError, DamagedCheckpointError, StorageError
from .keeping import try_to_record
from .live import get_raw_optimizer
from .load_notes import LoadNotes
from .quarantine import list_set_aside, set_aside
from .ranks import get_rank, run_on_main, wait_for_ranks
from .records import CHECKSUMS, count_resume, forget, record_verified, take_back_resume
from .report import LoadReport
from .survey import Candidate, Skipped, find_fault, list_candidates

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

_MAX_LOOKS = 3
ON_DAMAGE = ("fail", "fresh", "stop")
Load = Callable[[Path, bool, LoadNotes], LoadReport]
"""Loads a checkpoint, given whether one was tried before, with notes that are filled on the way."""


@dataclass(frozen=True)
class Resumed:
    """What a run begins with: a checkpoint and how it was loaded, or nothing. `skipped` is what was passed over."""

    path: Path | None = None
    checkpoint_id: str | None = None
    step: int = 0
    report: LoadReport | None = None
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class _Offer:
    """What every rank needs to know of a candidate."""

    path: Path
    checkpoint_id: str
    step: int
    is_own: bool


@dataclass
class _Attempts:
    """What has been tried so far, in this process."""

    has_tried: bool = False
    has_begun: bool = False  # something was loaded into the objects
    skipped: list[Skipped] = field(default_factory=list)
    last_error: AccelFsdpError | None = None

    def skip(self, offer: _Offer, reason: str) -> None:
        self.skipped.append(Skipped(offer.path.name, reason, offer.is_own, checkpoint_id=offer.checkpoint_id))


def load_newest(
    accelerator: Accelerator,
    root: Path,
    load: Load,
    *,
    on_damage: str = "fail",
    max_resumes: int | None = None,
    verifies: bool = True,
    run_id: str = "",
) -> Resumed:
    """Load the newest whole checkpoint of `root`, the same on every rank.

    Candidates come along the lineage, newest first. One that turns out to be damaged is passed over for the next; once
    an older one has been loaded, those passed over are set aside. Every load puts back all five kinds of state, so
    nothing of a load that failed half-way is left in the objects.

    Args:
        load: loads one checkpoint; collective, raises the same on every rank.
        on_damage: what to do where nothing is left: "fail", or "fresh" to start anew. "stop" never falls back.
        max_resumes: set aside what so many runs have begun with, none of which has saved since.
        verifies: `load` compares every file with its checksum.
        run_id: recorded where something is set aside.

    Raises:
        CheckpointIncompleteError: the root holds checkpoints, and none that can be resumed.
        DamagedCheckpointError: with "stop", on the first that is damaged.
        StorageError: a rank sees something else than the others; names it.
        Whatever `load` raises that is no damage.
    """
    views.agree_on_names(root)
    candidates: list[Candidate] = []  # filled on rank 0 alone: manifests are large
    offers, unusable = _agree_on_choice(root, max_resumes, candidates)
    tries = _Attempts(skipped=unusable)
    untouched = [raw for raw in map(get_raw_optimizer, accelerator._optimizers) if not raw.state]
    for number, offer in enumerate(offers):
        if on_damage == "stop":
            _stop_at_damage(root, tries)
        loaded = _try(offer, candidates[number] if candidates else None, load, tries, root)
        if loaded is None:
            for raw in untouched:
                raw.state.clear()  # a load that failed half-way must not leave state where the next one brings none
            continue
        if verifies:
            _record_verified(root, offer)
        skipped = _set_aside_all(root, tries, run_id)
        return Resumed(offer.path, offer.checkpoint_id, offer.step, _add_notes(loaded, skipped), skipped)
    if on_damage == "stop":
        _stop_at_damage(root, tries)
    return _end_without_checkpoint(root, tries, on_damage, run_id)


def _agree_on_choice(
    root: Path, max_resumes: int | None, candidates: list[Candidate]
) -> tuple[list[_Offer], list[Skipped]]:
    """Let rank 0 choose for all, once the others have confirmed what it cannot read."""
    for _ in range(_MAX_LOOKS):
        offers, unusable = run_on_main("choosing a checkpoint", lambda: _choose(root, max_resumes, candidates))
        unreadable = [each for each in unusable if each.is_own and each.checkpoint_id is None]
        late = [each for each in unreadable if views.agree_on_fault(root / each.name) is None]
        if not late:
            return offers, unusable
    raise StorageError(
        f"{root}: {late[0].name} is read differently from one moment to the next ({late[0].reason}). Look at the file "
        "system and start again.",
        path=str(root / late[0].name),
    )


def _choose(root: Path, max_resumes: int | None, candidates: list[Candidate]) -> tuple[list[_Offer], list[Skipped]]:
    found, skipped = list_candidates(root, max_resumes=max_resumes)
    candidates[:] = found
    return [_Offer(each.path, each.checkpoint_id, max(each.manifest.step, 0), each.is_own) for each in found], skipped


def _try(offer: _Offer, candidate: Candidate | None, load: Load, tries: _Attempts, root: Path) -> LoadReport | None:
    """Load one candidate, which rank 0 has; None if it is damaged, which `tries` then knows."""
    fault = run_on_main("looking at the files", lambda: candidate and find_fault(candidate))
    if fault is not None and (fault := views.agree_on_fault(offer.path)) is not None:
        tries.skip(offer, fault)
        return None
    views.wait_for_checkpoint(offer.path, offer.checkpoint_id)
    # Before the load: what kills a process while it loads counts too.
    _count_resume(root, offer)
    notes = LoadNotes()
    try:
        report = load(offer.path, tries.has_tried, notes)
    except AccelFsdpError as error:
        wait_for_ranks("judging a load that has failed")
        tries.has_begun |= notes.has_begun
        tries.last_error = error
        tries.skip(offer, _judge(error, offer, root))
        return None
    finally:
        tries.has_tried = True
    wait_for_ranks("ending a load")
    return report


def _judge(error: AccelFsdpError, offer: _Offer, root: Path) -> str:
    try:
        return find_damage(error, offer.path)
    except AccelFsdpError:
        if get_rank() == 0:  # no crash, and not the checkpoint's fault
            try_to_record(partial(take_back_resume, root, offer.checkpoint_id, name=offer.path.name))
        raise


def _count_resume(root: Path, offer: _Offer) -> None:
    run_on_main(
        "recording the resume",
        lambda: try_to_record(lambda: count_resume(root, offer.checkpoint_id, name=offer.path.name)),
    )


def _record_verified(root: Path, offer: _Offer) -> None:
    run_on_main(
        "recording what was read",
        lambda: try_to_record(lambda: record_verified(root, offer.checkpoint_id, name=offer.path.name, how=CHECKSUMS)),
    )


# -- what becomes of those passed over ------------------------------------------------------------------------------


def _set_aside_all(root: Path, tries: _Attempts, run_id: str) -> tuple[Skipped, ...]:
    """Move what was passed over out of the way of later resumes and saves, and say so. The same on every rank."""

    def move() -> list[Skipped]:
        return [_set_aside_one(root, each, run_id) for each in tries.skipped]

    skipped = tuple(run_on_main("setting aside", move)) if tries.skipped else ()
    for each in skipped:
        logger.warning("%s: %s", root, each)
    return skipped


def _set_aside_one(root: Path, skipped: Skipped, run_id: str) -> Skipped:
    if not skipped.is_own:
        return skipped
    try:
        moved = set_aside(root, skipped.name, reason=skipped.reason, run_id=run_id)
    except StorageError as error:
        return replace(skipped, reason=f"{skipped.reason} ({error})")
    if skipped.checkpoint_id is not None:
        forget(root, skipped.checkpoint_id)  # moved back by hand, it starts with a clean record
    return replace(skipped, moved_to=None if moved is None else str(moved))


def _add_notes(report: LoadReport, skipped: tuple[Skipped, ...]) -> LoadReport:
    return replace(report, notes=(*report.notes, *map(str, skipped))) if skipped else report


def _stop_at_damage(root: Path, tries: _Attempts) -> None:
    damaged = [each for each in tries.skipped if each.is_own]
    if damaged:
        raise DamagedCheckpointError(
            f'{root}: {damaged[-1].name} cannot be resumed and on_damage="stop" forbids to fall back: '
            f"{damaged[-1].reason} Mend it, move it away, or give resume() the path of the one to use.",
            path=str(root / damaged[-1].name),
        ) from tries.last_error


def _end_without_checkpoint(root: Path, tries: _Attempts, on_damage: str, run_id: str) -> Resumed:
    """Decide what to do where nothing can be resumed: nothing was ever there, or a run would be thrown away."""
    quarantined = run_on_main("looking into the quarantine", lambda: [str(each.path) for each in list_set_aside(root)])
    if not tries.skipped and not quarantined:
        return Resumed()
    others = [each for each in tries.skipped if not each.is_own]
    if on_damage == "fresh" and not others and not tries.has_begun:
        skipped = _set_aside_all(root, tries, run_id)
        logger.warning("%s: nothing can be resumed; starting anew, as on_damage='fresh' says", root)
        return Resumed(skipped=skipped)
    lines = [f"  - {each}" for each in tries.skipped]
    lines += [f"  - {each}: set aside earlier" for each in quarantined]
    advice = (
        "Starting fresh would abandon them in silence. Give resume() the path of one to load, fresh=True to start "
        "anew, or use an empty root."
    )
    if tries.has_begun:
        advice = (
            "Parts of them have been loaded into the model and the optimizer, so this process cannot start anew: begin "
            "again, and give resume() the path of one to load, or fresh=True."
        )
    shown = "\n".join(lines)
    raise CheckpointIncompleteError(
        f"{root} holds checkpoints, but none that can be resumed:\n{shown}\n{advice}", path=str(root)
    ) from tries.last_error
