"""What a rehearsal tells the processes of the script: one environment variable, and files in its folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import UsageError

VARIABLE = "ACCEL_FSDP_REHEARSAL"
_MARKER = "killed.json"
_RANK = "_rank_"


@dataclass(frozen=True)
class Orders:
    """What one run of the script is to do.

    Args:
        folder: of this run alone: its checkpoints, records and log.
        name: of the run ("straight", "broken", "repeat").
        steps: after so many updates the script is ended.
        save_at: a checkpoint is saved after this update, whatever the script's own rules are; None orders none.
        kill_at: after this update a rank, or all, are killed, once; None kills nobody.
        kill_rank: the one that is killed; None kills all.
        is_elastic: the run is going to be compared with one on another number of ranks.
    """

    folder: str
    name: str
    steps: int
    save_at: int | None = None
    kill_at: int | None = None
    kill_rank: int | None = None
    is_elastic: bool = False

    def to_text(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self))

    @property
    def root(self) -> Path:
        """Where the script's checkpoints go, in place of its own folder."""
        return Path(self.folder) / "checkpoints"

    @property
    def marker(self) -> Path:
        """The file that says that the kill has happened: whoever starts now is to resume."""
        return Path(self.folder) / _MARKER

    @property
    def attempt(self) -> str:
        """What this process belongs to: the run up to the kill, or what comes after it."""
        if self.kill_at is None:
            return self.name
        return "resumed" if self.marker.exists() else "killed"


def read_orders() -> Orders | None:
    """Return the orders of the rehearsal that this process is part of; None outside of one.

    Raises:
        UsageError: the variable is set, and not by a rehearsal of this version.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    try:
        return Orders(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{VARIABLE} is set by `accel-fsdp rehearse` for the processes that it starts; here it holds "
            f"{text!r:.100}, which this version does not understand. Unset it.",
            actual=text,
        ) from error


def redirect(path: Path) -> Path:
    """Return where checkpoints are to be looked for and written: `path` itself, outside of a rehearsal."""
    orders = read_orders()
    return path if orders is None else orders.root


def get_records_path(folder: Path, attempt: str, rank: int) -> Path:
    """Return the file in which one rank of one attempt keeps its records."""
    return folder / f"{attempt}{_RANK}{rank:05d}.jsonl"


def find_records(folder: Path, attempt: str) -> dict[int, Path]:
    """Return the files that the ranks of an attempt have written, by rank."""
    return {int(path.stem.rpartition(_RANK)[2]): path for path in folder.glob(f"{attempt}{_RANK}*.jsonl")}
