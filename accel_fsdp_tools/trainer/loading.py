"""After the Trainer has loaded: is what sits in memory what was saved? And what it left out is put back.

Every public function is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..disk_values import iterate_differences, read_values, simplify
from ..errors import DataProgressError, MismatchError
from ..load import COMPARES_MEMORY, verify_memory
from ..load_notes import LoadNotes, build_report
from ..manifest import DIRECTORY, Manifest, find_manifest, has_manifest, read_manifest
from ..optimizer_io import load_optimizer
from ..rank_state import RankState, read_rank_state
from ..ranks import get_rank, get_world_size, run_on_each, run_together
from ..report import LoadReport
from .contract import SCHEDULER, compare_runs, count_skipped, describe_kind
from .data import TrainingData

if TYPE_CHECKING:
    from transformers import Trainer

    from ..rng import RngSnapshot

_SCALER = "scaler.pt"


def load_fsdp_optimizer(trainer: Trainer, directory: Path) -> None:
    """Load the optimizer completely, in place of Accelerate's function, which doesn't always. Collective.

    Under FSDP1 with sharded files that one succeeds and leaves the optimizer empty; see `optimizer_io`.
    """
    kind, _ = describe_kind(trainer, directory)
    facts = read_manifest(directory).optimizers[0] if has_manifest(directory) else None
    was_empty = facts is not None and facts.is_empty
    run_together(
        "loading the optimizer",
        lambda: load_optimizer(trainer.accelerator, 0, directory, kind=str(kind), was_empty=was_empty),
    )


@dataclass(frozen=True)
class Restored:
    """What became of a resume, and random state that is due at the first step, where the Trainer's own comes last."""

    report: LoadReport
    rng: RngSnapshot | None = None


def finish_load(
    trainer: Trainer,
    directory: Path,
    data: TrainingData,
    *,
    verify: str,
    strict: bool,
    data_resume: str,
    notes: LoadNotes,
) -> Restored:
    """Compare what the Trainer has loaded with the checkpoint, and put loader and random state back. Collective.

    Args:
        notes: of what was found before the load.

    Raises:
        DamagedCheckpointError: memory is not what was saved; names the first difference, on every rank.
        MismatchError: the scheduler is not where the Trainer's count of updates is.
        DataProgressError, RngStateError: (strict) a rank's place in the data or its generators cannot be restored.
    """
    manifest = run_on_each("reading the manifest", lambda: find_manifest(directory))
    if verify in COMPARES_MEMORY:
        verify_memory(trainer.accelerator, directory, verify, None, notes)
    run_together("comparing scheduler and scaler", lambda: _compare_states(trainer, directory))
    state = _read_state(directory, manifest, strict, notes)
    shifts = [] if manifest is None else [each.text for each in compare_runs(trainer, manifest)[0]]
    restore = partial(_restore, trainer, data, shifts=shifts, strict=strict, data_resume=data_resume, notes=notes)
    rng = run_on_each("restoring RNG and data progress", lambda: restore(state))
    counted = {"scheduler": 1, "data": 1, "rng": get_world_size()}
    return Restored(build_report(trainer.accelerator, directory, manifest, notes, counted=counted), rng)


def _compare_states(trainer: Trainer, directory: Path) -> None:
    scaler = trainer.accelerator.scaler
    for name, read_live in (
        (SCHEDULER, trainer.lr_scheduler.state_dict),
        *(((_SCALER, scaler.state_dict),) if scaler is not None else ()),
    ):
        for key, expected, actual in _iterate_differences(directory / name, read_live):
            raise MismatchError(
                f"{directory / name}: {key} is {expected!r} in the checkpoint and {actual!r} in memory after the load. "
                "Training on would follow another schedule; use the scheduler and optimizer of the run that saved it.",
                path=str(directory / name),
                expected=expected,
                actual=actual,
            )


def _iterate_differences(path: Path, read_live: Callable[[], Any]) -> Iterator[tuple[str, Any, Any]]:
    if path.exists():
        yield from iterate_differences(read_values(path), simplify(read_live()))


def _read_state(directory: Path, manifest: Manifest | None, strict: bool, notes: LoadNotes) -> RankState | None:
    """Return what this rank has saved beyond the Trainer's files; None, on every rank, if any rank has nothing."""
    rank = get_rank()
    found: list[RankState] = []

    def read() -> bool:
        if manifest is None:
            return False
        if rank >= manifest.topology.world_size:
            return False
        found.append(read_rank_state(directory / DIRECTORY, rank))
        return True

    has_state = run_together("reading RNG and data progress", read)
    if all(has_state):
        return found[0]
    if manifest is None:
        text = "the checkpoint was not written with the callback: the Trainer restores what it has saved, in its way"
    else:
        text = (
            f"rank(s) {', '.join(str(each) for each, has in enumerate(has_state) if not has)} did not exist at the save"
        )
    notes.reasons["rng"].append(text)
    notes.reasons["data"].append(f"{text}; it finds its place from the number of updates and today's settings")
    return None


def _restore(
    trainer: Trainer,
    data: TrainingData,
    state: RankState | None,
    *,
    shifts: list[str],
    strict: bool,
    data_resume: str,
    notes: LoadNotes,
) -> RngSnapshot | None:
    """Put the loader back on this rank. Returns random state that has to wait for the first step."""
    if state is None:
        return None
    if trainer.args.ignore_data_skip:
        notes.absent["data"] = "ignore_data_skip=True: the epoch begins anew"
        data.begin_epoch(state.rng)
        return None
    found = data.find_problems(state.loaders, data_resume)
    num_skipped = count_skipped(trainer)
    problems = shifts + (found or data.find_shift(state.loaders, num_skipped))
    if problems and strict and any(each.restorable for each in state.loaders):
        raise DataProgressError(
            f"The place in the training data cannot be restored: {'; '.join(problems)}. Nothing was trained. Use the "
            "data and settings of the run that saved it, or give the callback strict=False: the Trainer then finds its "
            "place by itself, and the report says what is not exact.",
            actual=problems,
        )
    if problems:
        notes.reasons["data"].extend(f"the Trainer skips the batches by itself: {each}" for each in problems)
        return state.rng
    inexact = data.restore(state.loaders, state.rng, num_skipped=num_skipped, data_resume=data_resume)
    notes.reasons["data"].extend(inexact)
    return None
