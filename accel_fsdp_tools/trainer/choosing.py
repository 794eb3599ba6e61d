"""Which checkpoint a call of `train` begins with, looked at by all ranks before the Trainer loads it. Collective."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import contract as contracts
from ..errors import CallOrderError, CheckpointNotFoundError, MismatchError
from ..files import check_files
from ..latest import latest_checkpoint
from ..load import check_is_checkpoint
from ..load_notes import LoadNotes
from ..manifest import STATES, Manifest, find_manifest, has_manifest, read_manifest
from ..permissions import Permissions
from ..ranks import broadcast, gather_all, get_rank, get_world_size, run_on_each, run_on_main, run_together
from ..report import LoadReport, StateOutcome, Status
from ..resuming import Resumed, load_newest
from ..survey import list_candidates
from .contract import check_complete, compare_models, compare_runs, describe_kind

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What the user has said about resuming."""

    strict: bool
    verifies: bool
    on_damage: str
    max_resumes: int | None
    fresh: bool


def choose_checkpoint(trainer: Trainer, root: Path, given: Any, order: Order, run_id: str) -> Resumed:
    """Return what to resume from, whole and fitting this run, the same on every rank.

    Args:
        given: as the Trainer's `resume_from_checkpoint`: a path, True for the newest, None or False for a fresh start.
            Ranks may see a file system differently: rank 0's counts.

    Raises:
        CallOrderError: a fresh start in a folder that holds checkpoints of another run.
        CheckpointNotFoundError: there is nothing to resume from.
        Whatever is wrong with the checkpoint; nothing was loaded.
    """
    named = gather_all(None if given is None or given is False else given if given is True else str(given))
    if any(each != named[0] for each in named):
        logger.warning("ranks were given different checkpoints to resume from; all take rank 0's: %s", named[0])
    chosen = named[0]
    if chosen is None:
        run_on_main("looking into the output folder", lambda: _check_fresh(root, order, run_id))
        return Resumed()
    if chosen is True and run_on_main("looking into the output folder", lambda: bool(list_candidates(root)[0])):
        return load_newest(
            trainer.accelerator,
            root,
            lambda path, _, notes: _examine(trainer, path, order),
            on_damage=order.on_damage,
            max_resumes=order.max_resumes,
            verifies=order.verifies,
            run_id=run_id,
        )
    path = run_on_main("looking for a checkpoint", lambda: _find(root, chosen))
    report = _examine(trainer, path, order)
    manifest = _read_manifest(path)
    checkpoint_id = None if manifest is None else manifest.lineage.checkpoint_id
    return Resumed(path, checkpoint_id, 0 if manifest is None else max(manifest.step, 0), report)


def _check_fresh(root: Path, order: Order, run_id: str) -> None:
    if order.fresh:
        return
    others = [each.name for each in list_candidates(root)[0] if each.manifest.lineage.run_id != run_id]
    if others:
        raise CallOrderError(
            f"{root} holds checkpoints of an earlier run ({', '.join(others[:3])}), and train() was not told to "
            "resume: saving would start a new branch and let them be removed. Pass resume_from_checkpoint=True (or "
            "latest_checkpoint(output_dir)) to train(), use another output_dir, or give the callback fresh=True.",
            path=str(root),
        )


def _find(root: Path, chosen: str | bool) -> Path:
    if isinstance(chosen, str):
        path = Path(chosen).expanduser().absolute()
        check_is_checkpoint(path)
        return path
    newest = latest_checkpoint(root)  # of others: this package has none here
    if newest is None:
        raise CheckpointNotFoundError(
            f"resume_from_checkpoint=True, and {root} holds no checkpoint that is whole. For a script that starts anew "
            "where there is none, pass resume_from_checkpoint=latest_checkpoint(output_dir).",
            path=str(root),
        )
    return newest


def _read_manifest(path: Path) -> Manifest | None:
    return broadcast(read_manifest(path) if get_rank() == 0 and has_manifest(path) else None)


def _examine(trainer: Trainer, path: Path, order: Order) -> LoadReport:
    """Make sure that the Trainer can load a checkpoint, and that it fits. Reads every file, dealt out to the ranks.

    Returns:
        A report that claims nothing yet, with notes.
    """
    notes = LoadNotes()

    def look() -> None:
        manifest = find_manifest(path)
        lacking = check_complete(path, get_world_size())
        notes.notes.extend(lacking)
        _check_kind(trainer, path)
        differences = compare_models(trainer, path, manifest)
        if manifest is not None:
            shifts, others = compare_runs(trainer, manifest)
            differences += shifts
            notes.notes.extend(others)
        contracts.raise_on_differences(path, differences, Permissions(strict=order.strict))

    def check() -> None:
        if order.verifies and has_manifest(path):
            check_files(path, read_manifest(path).files[get_rank() :: get_world_size()])

    run_on_each("comparing the checkpoint with the run", look)
    run_together("checking the files", check)
    unknown = {name: StateOutcome(Status.NOT_USED) for name in STATES}
    return LoadReport(str(path), -1, 0, unknown, tuple(notes.notes))


def _check_kind(trainer: Trainer, path: Path) -> None:
    saved, live = describe_kind(trainer, path)
    if saved != live:
        raise MismatchError(
            f"{path} was saved as {saved}, this run has {live}, and the Trainer loads only its own kind. Set "
            f'"state_dict_type": "{saved}" in fsdp_config for the resume.',
            path=str(path),
            expected=saved,
            actual=live,
        )
