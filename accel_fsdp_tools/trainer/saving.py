"""What is added to a checkpoint that the Trainer has just written, and which of the older ones then may go.

The Trainer writes in place, so there is no renaming: the manifest, written last and only when every rank is done, is
what makes the directory a checkpoint. Collective.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..assets import write_assets
from ..commit import delete_checkpoint
from ..completing import complete_checkpoint
from ..export_live import export_model
from ..files import fsync_directory
from ..inventory import build_manifest, draft_inventory
from ..manifest import DIRECTORY, Lineage, Manifest, has_manifest, read_manifest, write_manifest
from ..phases import reach
from ..quarantine import set_aside
from ..rank_state import write_rank_state
from ..ranks import broadcast, run_on_main, run_together
from ..records import forget, read_record
from ..retention import CheckpointFacts, KeepLast
from ..rng import RngSnapshot
from ..views import wait_until_seen

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

    from ..progress import LoaderProgress


_STAGING = ".export"
_REASON = "a later run has saved the same step again; the Trainer would have written into this one"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class KeepAsTrainer:
    """What `save_total_limit` keeps: the newest, and among that many the best, which never goes.

    As with every policy, only checkpoints that were read back count.
    """

    limit: int
    best: str | None = None

    def choose_kept(self, checkpoints: Sequence[CheckpointFacts]) -> frozenset[str]:
        kept = KeepLast(self.limit).choose_kept(checkpoints)
        if self.best is None or self.best in kept or self.best not in {each.name for each in checkpoints}:
            return kept
        return KeepLast(max(1, self.limit - 1)).choose_kept(checkpoints) | {self.best}


def make_place(directory: Path, *, run_id: str) -> Path | None:
    """Make the empty directory that a checkpoint is about to be written into, seen by all ranks. Collective.

    What is there is moved away: half a save, or one of an abandoned branch. The Trainer would write into it: files of
    both would be mixed, under a manifest that vouches for the old ones. A whole one stays beside it, to be resumed
    from, until `retire_replaced`: it may be the only one.

    The Trainer lets each rank ask whether the directory is there to know whether it is that of the best model; under
    SHARDED_STATE_DICT it made it only later, or another rank just now: the one before was taken for the best, or ranks
    disagreed and hung at the end.

    Returns:
        Where what was there lies now, None if nothing was.
    """

    def make() -> Path | None:
        moved = None
        if has_manifest(directory):
            moved = _get_replaced(directory)
            if moved.exists():  # of a save that was killed; the one that is moved now is newer
                set_aside(moved.parent, moved.name, reason=_REASON, run_id=run_id)
            directory.rename(moved)
        elif directory.is_dir() and any(directory.iterdir()):
            moved = set_aside(directory.parent, directory.name, reason=_REASON, run_id=run_id)
        directory.mkdir(parents=True, exist_ok=True)
        fsync_directory(directory.parent)
        return moved

    moved = run_on_main("making room for the checkpoint", make)
    wait_until_seen("making room", directory, lambda: None if directory.is_dir() else f"does not see {directory}")
    return moved


def retire_replaced(directory: Path, *, parent_id: str | None, run_id: str) -> None:
    """Move into quarantine what the checkpoint just committed in `directory` has taken the place of. Collective.

    Where that is its parent it goes: no update lies between them (a step that was saved twice, by `save_steps` and
    again at the end of the epoch), and a user who does so would otherwise keep everything twice.
    """

    def retire() -> None:
        replaced = _get_replaced(directory)
        if not has_manifest(replaced):
            return
        checkpoint_id = read_manifest(replaced).lineage.checkpoint_id
        if checkpoint_id == parent_id and not read_record(directory.parent, checkpoint_id).is_pinned:
            delete_checkpoint(replaced, run_id)
            forget(directory.parent, checkpoint_id)
        else:
            set_aside(replaced.parent, replaced.name, reason=_REASON, run_id=run_id)

    run_on_main("clearing what was replaced", retire)


def _get_replaced(directory: Path) -> Path:
    return directory.with_name(f"replaced-{directory.name}")


def export_into(trainer: Trainer, directory: Path, **options: Any) -> None:
    """Export the Trainer's model into a directory that may hold other things. Collective."""
    staging = directory / _STAGING
    export_model(trainer.accelerator, trainer.model, staging, overwrite=True, **options)
    run_on_main("moving the export", lambda: _move_files(staging, directory))


def _move_files(source: Path, target: Path) -> None:
    """Move an export's files into a directory with other things; weights of an earlier one make way."""
    files = [path for path in source.rglob("*") if path.is_file()]
    names = {path.relative_to(source).as_posix() for path in files}
    for old in target.glob("model*.safetensors*"):
        if _WEIGHTS.fullmatch(old.name) and old.name not in names:
            old.unlink()
    for path in sorted(files, key=lambda path: path.name.endswith(".index.json")):  # it names the others
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    shutil.rmtree(source)


def seal_checkpoint(
    accelerator: Accelerator,
    directory: Path,
    *,
    run_id: str,
    attempt: int,
    parent_id: str | None,
    step: int,
    epoch: int,
    loaders: Sequence[LoaderProgress],
    tokenizer: Any,
    extra: Mapping[str, Any],
) -> Lineage:
    """Add everything that an exact resume needs beyond the Trainer's files, and commit. Collective.

    The run is not changed: random generators are as before. Returns the checkpoint's place in the lineage.
    """
    lineage = broadcast(Lineage(uuid.uuid4().hex, run_id, attempt, parent_id))
    rng = RngSnapshot.capture()
    try:
        ours = directory / DIRECTORY
        run_on_main("writing the config", lambda: write_assets(accelerator, ours, tokenizer=tokenizer))
        written = run_together(
            "writing RNG and data progress", lambda: _write_rank_state(accelerator, directory, rng, loaders)
        )
        draft = draft_inventory(accelerator)
        manifest = build_manifest(
            accelerator,
            draft,
            lineage=lineage,
            step=step,
            epoch=epoch,
            opaque_objects={},
            num_pending=0,
            extra=extra,
        )
        # The Trainer prepares loaders for evaluation too, which begin anew each time: they have no progress.
        states = {**manifest.states, "data": {"count": len(loaders)}}
        manifest = dataclasses.replace(manifest, states=states, num_dataloaders=len(loaders))
        complete = complete_checkpoint(directory, manifest, draft, [name for names in written for name in names])
        run_on_main("committing", lambda: _commit(directory, complete))
    finally:
        rng.restore()
    run_together("ending the save", lambda: reach("save.committed"))
    return lineage


def _write_rank_state(
    accelerator: Accelerator, directory: Path, rng: RngSnapshot, loaders: Sequence[LoaderProgress]
) -> list[str]:
    extra = {"accelerator_step": accelerator.step}
    paths = write_rank_state(
        directory / DIRECTORY, accelerator.process_index, rng=rng, loaders=list(loaders), extra=extra
    )
    reach("save.rng")
    reach("save.progress")
    return [path.relative_to(directory).as_posix() for path in paths]


def _commit(directory: Path, manifest: Manifest) -> None:
    write_manifest(directory, manifest)
    reach("save.manifest")
    fsync_directory(directory)
    fsync_directory(directory.parent)
