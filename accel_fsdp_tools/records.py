"""What a root remembers about its checkpoints, beside them: read back, pinned, how often resumed from.

    <root>/.accel_fsdp_tools/<checkpoint id>.verified.json    its files were read from disk and are what was written
    <root>/.accel_fsdp_tools/<checkpoint id>.pinned.json      it stays, whatever the policy says
    <root>/.accel_fsdp_tools/<checkpoint id>.resumed.json     runs that began with it and have not saved since

Never inside a checkpoint, which does not change once it is committed. By id, so that a checkpoint that takes another's
name does not inherit what was said of that one. One small file per fact, each written whole: several processes may
record different facts at once, and a lost record costs a second look, never a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .files import write_json_durably

RECORDS = ".accel_fsdp_tools"
CHECKSUMS, SIZES = "checksums", "sizes"  # how a checkpoint was read back
_VERIFIED, _PINNED, _RESUMED = "verified", "pinned", "resumed"
_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True)
class Record:
    """What is remembered about one checkpoint. `verified` is how it was read back, None if it was not."""

    verified: str | None = None
    is_pinned: bool = False
    num_resumes: int = 0


def read_record(root: Path, checkpoint_id: str) -> Record:
    """Return what is known about a checkpoint; a missing or unreadable fact is not known."""
    verified = _read(root, checkpoint_id, _VERIFIED)
    resumed = _read(root, checkpoint_id, _RESUMED)
    how, count = verified.get("how"), resumed.get("count")
    return Record(
        verified=how if how in (CHECKSUMS, SIZES) else None,
        is_pinned=_get_path(root, checkpoint_id, _PINNED).is_file() if _ID.fullmatch(checkpoint_id) else False,
        num_resumes=count if isinstance(count, int) and count > 0 else 0,
    )


def record_verified(root: Path, checkpoint_id: str, *, name: str, how: str) -> None:
    """Record that every file of a checkpoint has been compared with what was written.

    Args:
        how: `CHECKSUMS`, or `SIZES` where no more was asked for.
    """
    _write(root, checkpoint_id, _VERIFIED, {"name": name, "how": how})


def pin(root: Path, checkpoint_id: str, *, name: str) -> None:
    """Record that a checkpoint stays until it is unpinned."""
    _write(root, checkpoint_id, _PINNED, {"name": name})


def unpin(root: Path, checkpoint_id: str) -> None:
    """Take a pin back; does nothing if there is none."""
    _remove(root, checkpoint_id, _PINNED)


def count_resume(root: Path, checkpoint_id: str, *, name: str) -> int:
    """Record that a run is about to begin with a checkpoint, and return how often that has happened."""
    count = read_record(root, checkpoint_id).num_resumes + 1
    _write(root, checkpoint_id, _RESUMED, {"name": name, "count": count})
    return count


def take_back_resume(root: Path, checkpoint_id: str, *, name: str) -> None:
    """Undo `count_resume`: the run ended in an error that is not the checkpoint's fault."""
    count = read_record(root, checkpoint_id).num_resumes - 1
    if count > 0:
        _write(root, checkpoint_id, _RESUMED, {"name": name, "count": count})
    else:
        clear_resumes(root, checkpoint_id)


def clear_resumes(root: Path, checkpoint_id: str) -> None:
    """Forget how often a checkpoint was resumed from: a run that began with it has saved."""
    _remove(root, checkpoint_id, _RESUMED)


def forget(root: Path, checkpoint_id: str) -> None:
    """Remove all that is remembered about a checkpoint that is gone."""
    for kind in (_VERIFIED, _PINNED, _RESUMED):
        _remove(root, checkpoint_id, kind)


def _get_path(root: Path, checkpoint_id: str, kind: str) -> Path:
    return root / RECORDS / f"{checkpoint_id}.{kind}.json"


def _read(root: Path, checkpoint_id: str, kind: str) -> Mapping[str, Any]:
    if not _ID.fullmatch(checkpoint_id):
        return {}  # an id that this package did not make: nothing was ever recorded for it
    try:
        raw = json.loads(_get_path(root, checkpoint_id, kind).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _write(root: Path, checkpoint_id: str, kind: str, facts: Mapping[str, Any]) -> None:
    if not _ID.fullmatch(checkpoint_id):
        return
    path = _get_path(root, checkpoint_id, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write_json_durably(path, {**facts, "recorded_at": when})


def _remove(root: Path, checkpoint_id: str, kind: str) -> None:
    if _ID.fullmatch(checkpoint_id):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _get_path(root, checkpoint_id, kind).unlink()
