"""Checkpoints that were set aside: out of the way of every resume, kept as they are, with the reason beside them.

    <root>/.quarantine/step_00000750/              as it was found
    <root>/.quarantine/step_00000750.reason.json   why, when, and by which run

Nothing here is ever deleted by this package. To use one after all, move it back by hand.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from .errors import StorageError
from .files import fsync_directory, write_json_durably

QUARANTINE = ".quarantine"
_REASON = ".reason.json"


@dataclass(frozen=True)
class SetAside:
    """One checkpoint in quarantine and why it is there."""

    path: Path
    reason: str


def set_aside(root: Path, name: str, *, reason: str, run_id: str) -> Path | None:
    """Move `<root>/<name>` into quarantine with the reason; returns its new place, None if it is gone already.

    A crash in the middle leaves the checkpoint where it was, or in quarantine with its reason. Done by one rank.

    Raises:
        StorageError: it cannot be moved.
    """
    source = root / name
    if not source.exists():
        return None
    try:
        (root / QUARANTINE).mkdir(exist_ok=True)
        target = _find_free(root / QUARANTINE, name)
        facts = {
            "name": name,
            "reason": reason,
            "set_aside_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "run_id": run_id,
            "process_id": os.getpid(),
        }
        write_json_durably(target.with_name(f"{target.name}{_REASON}"), facts)
        source.rename(target)
        fsync_directory(target.parent)
        fsync_directory(root)
    except FileNotFoundError:
        return None  # another process has moved or pruned it
    except OSError as error:
        raise StorageError(
            f"{source} is to be set aside ({reason}) and cannot be moved into {root / QUARANTINE}: {error}. Move it "
            "away by hand, or give resume() the path of the checkpoint to use.",
            path=str(source),
        ) from error
    return target


def list_set_aside(root: Path) -> list[SetAside]:
    """Return what lies in the quarantine of `root`, by name."""
    directory = root / QUARANTINE
    if not directory.is_dir():
        return []
    return [SetAside(path, _read_reason(path)) for path in sorted(directory.iterdir()) if path.is_dir()]


def _find_free(directory: Path, name: str) -> Path:
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return next(
        directory / each
        for each in names
        if not (directory / each).exists() and not (directory / f"{each}{_REASON}").exists()
    )


def _read_reason(path: Path) -> str:
    try:
        return str(json.loads(path.with_name(f"{path.name}{_REASON}").read_bytes())["reason"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "the reason is not recorded"
