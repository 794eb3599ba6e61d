"""`latest_checkpoint`: which checkpoint of a folder to go on with. No torch, nothing is changed."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from .commit import looks_like_checkpoint
from .errors import CheckpointNotFoundError
from .manifest import DIRECTORY
from .rehearsal.orders import redirect
from .survey import choose_newest
from .verify import verify_checkpoint

logger = logging.getLogger(__name__)

_FOREIGN_NAME = re.compile(r"checkpoint[-_](\d+)")  # the Trainer's and Accelerate's
_TRAINER_STATE = "trainer_state.json"
_OPTIMIZERS = ("optimizer_0/.metadata", "optimizer.bin", "optimizer.pt")


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the checkpoint of `output_dir` to resume from, None if there is none that is whole.

    In the root of a `Checkpointer` that is the one which its `resume()` would try first: the newest along the lineage
    whose files are all there and of the right size. In a folder of others (`checkpoint-500` of the Trainer,
    `checkpoint_3` of Accelerate, also in its `checkpoints` folder) it is the one with the highest recorded step, or
    number where no step is recorded, whose model and optimizer are all there; a folder with another name
    (`checkpoint-500-merged`), an empty or a half written one is none. Time stamps decide nothing.

    What was passed over is logged with its reason. Not collective: on several ranks, let rank 0 choose for all.

    Args:
        output_dir: the folder that holds the checkpoints; it need not exist.

    Raises:
        CheckpointNotFoundError: it is a file.
        ManifestVersionError: a newer version of this package wrote one of the checkpoints.
    """
    root = redirect(Path(output_dir).expanduser().absolute())
    if not root.exists():
        return None
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} is a file, not a directory of checkpoints", path=str(root))
    chosen, skipped = choose_newest(root)
    foreign = _list_foreign(root) or _list_foreign(root / "checkpoints")
    names = {path.name for _, path in foreign}
    for each in skipped:
        if each.name not in names:
            logger.warning("%s: %s", root, each)
    if chosen is not None:
        return chosen.path
    for _, path in sorted(foreign, reverse=True):
        fault = _find_fault(path)
        if fault is None:
            return path
        logger.warning("%s: skipped %s: %s", root, path.name, fault)
    return None


def _list_foreign(root: Path) -> list[tuple[tuple[int, int], Path]]:
    """Return checkpoints by the names that others give, with recorded step and number."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        match = _FOREIGN_NAME.fullmatch(path.name)
        if match is not None and path.is_dir():
            number = int(match[1])
            found.append(((_read_step(path, number), number), path))
    return found


def _read_step(path: Path, number: int) -> int:
    """Return the step that the Trainer has recorded; the number in the name where there is none."""
    try:
        step = json.loads((path / _TRAINER_STATE).read_bytes())["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return number
    return step if isinstance(step, int) else number


def _find_fault(path: Path) -> str | None:
    """Return why a checkpoint of others is not whole, None if nothing speaks against it; no tensor is read."""
    if (path / DIRECTORY).is_dir():
        return "it is a save that was never completed (it has no manifest)"
    if not looks_like_checkpoint(path):
        return "it is empty, or holds no checkpoint"
    if not any((path / name).exists() for name in _OPTIMIZERS):
        return "it has no optimizer, so no run can go on with it"
    if path.name.startswith("checkpoint-") and not (path / _TRAINER_STATE).is_file():
        return f"it has no {_TRAINER_STATE}, which the Trainer writes last: it was never completed"
    failures = verify_checkpoint(path, crcs=False).failures
    return None if not failures else failures[0].message
