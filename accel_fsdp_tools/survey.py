"""What lies in a root of checkpoints: each with its step, age, size and state, and which one a resume would choose.

Nothing is changed and nothing is loaded. Not collective.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from .commit import PARTIAL, Found, find_checkpoints
from .errors import AccelFsdpError, ManifestVersionError
from .files import check_files
from .manifest import DIRECTORY, Manifest
from .quarantine import list_set_aside
from .records import CHECKSUMS, SIZES, Record, read_record
from .retention import CheckpointFacts

_PREFIX, _MIN_DIGITS = "step_", 8
_TRAINER_NAME = re.compile(r"checkpoint-[0-9]+")
_TRUSTED = {"checksums": (CHECKSUMS,), "sizes": (CHECKSUMS, SIZES), "all": (CHECKSUMS, SIZES, None)}


class State(str, Enum):
    """What a directory in a root is."""

    COMMITTED = "committed"
    PARTIAL = "partial"  # being written, or left by a crash
    DAMAGED = "damaged"  # it was a checkpoint of this package, and is not whole
    QUARANTINED = "quarantined"
    FOREIGN = "foreign"  # a checkpoint that others wrote


@dataclass(frozen=True)
class Entry:
    """One directory of a root. What is not known is None; `created_at` is in seconds since the epoch."""

    path: Path
    state: State
    step: int | None = None
    attempt: int | None = None
    created_at: float | None = None
    size_bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint_id: str | None = None
    is_verified: bool = False
    is_pinned: bool = False
    num_resumes: int = 0
    problem: str | None = None

    @property
    def name(self) -> str:
        return self.path.name

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": str(self.path),
            "state": self.state.value,
            "step": self.step,
            "attempt": self.attempt,
            "created_at": self.created_at,
            "size_bytes": self.size_bytes,
            "verified": self.is_verified,
            "pinned": self.is_pinned,
            "num_resumes": self.num_resumes,
            "metrics": dict(self.metrics),
            "checkpoint_id": self.checkpoint_id,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Candidate:
    """A committed checkpoint that a resume may begin with."""

    path: Path
    manifest: Manifest
    record: Record

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoint_id(self) -> str:
        return self.manifest.lineage.checkpoint_id

    @property
    def is_own(self) -> bool:
        return is_own(self.name, self.manifest)


@dataclass(frozen=True)
class Skipped:
    """Something in a root that a resume passed over.

    `is_own` says that this package gave it its name; only those are ever set aside. `moved_to` is where it then lies.
    """

    name: str
    reason: str
    is_own: bool = False
    moved_to: str | None = None
    checkpoint_id: str | None = None

    def __str__(self) -> str:
        moved = f" (moved to {self.moved_to})" if self.moved_to is not None else ""
        return f"skipped {self.name}: {self.reason}{moved}"


def get_name(step: int) -> str:
    """Return the name that a `Checkpointer` gives to the checkpoint of a step."""
    return f"{_PREFIX}{step:0{_MIN_DIGITS}d}"


def is_own(name: str, manifest: Manifest | None) -> bool:
    """Whether this package gave a checkpoint its name: what a user saved or renamed is never pruned or moved.

    Names are those of a `Checkpointer`, and the Trainer's where the callback for it wrote the manifest.

    Args:
        manifest: None if it cannot be read: then the name decides.
    """
    digits = name.removeprefix(_PREFIX)
    if name.startswith(_PREFIX) and len(digits) >= _MIN_DIGITS and digits.isdecimal() and digits.isascii():
        return True
    return bool(_TRAINER_NAME.fullmatch(name)) and (manifest is None or manifest.is_of_trainer)


def _is_own(path: Path) -> bool:
    """Whether a directory without a readable manifest was written by this package: its name and contents."""
    return is_own(path.name, None) and (path / DIRECTORY).is_dir()


def list_candidates(root: Path, *, max_resumes: int | None = None) -> tuple[list[Candidate], list[Skipped]]:
    """Return what a resume may begin with, the newest along the lineage first, and what it passes over and why.

    The newest is of the latest attempt that saved anything the one with the highest recorded step. Only manifests are
    read: whether the files are whole is for the caller to check (`find_fault`), one candidate after another.

    Args:
        max_resumes: pass over those that so many runs have begun with, none of which has saved since.

    Raises:
        ManifestVersionError: a newer version of this package wrote one of them: going back to an older one because of
            that would be no answer to damage.
    """
    candidates, skipped = [], []
    for found in find_checkpoints(root):
        if isinstance(found.error, ManifestVersionError):
            raise found.error
        name = found.path.name
        if found.manifest is None:
            skipped.append(Skipped(name, str(found.problem), _is_own(found.path)))
            continue
        record = read_record(root, found.manifest.lineage.checkpoint_id)
        if max_resumes is not None and record.num_resumes >= max_resumes:
            reason = f"{record.num_resumes} run(s) began with it and ended before they saved again"
            own = is_own(name, found.manifest)
            skipped.append(Skipped(name, reason, own, checkpoint_id=found.manifest.lineage.checkpoint_id))
            continue
        candidates.append(Candidate(found.path, found.manifest, record))
    return sorted(candidates, key=lambda each: (each.manifest.order, each.name), reverse=True), skipped


def find_fault(candidate: Candidate, *, checksums: bool = False) -> str | None:
    """Return what is wrong with a candidate's files, None if nothing is; sizes alone unless `checksums`."""
    try:
        check_files(candidate.path, candidate.manifest.files, checksums=checksums)
    except AccelFsdpError as error:
        return str(error)
    return None


def choose_newest(root: Path, *, max_resumes: int | None = None) -> tuple[Candidate | None, list[Skipped]]:
    """Return the checkpoint that a resume would try first, and what it would pass over.

    That is the newest along the lineage whose files are all there and of the right size.

    Raises:
        ManifestVersionError: a newer version of this package wrote one of them.
    """
    candidates, skipped = list_candidates(root, max_resumes=max_resumes)
    for candidate in candidates:
        fault = find_fault(candidate)
        if fault is None:
            return candidate, skipped
        skipped.append(Skipped(candidate.name, fault, candidate.is_own))
    return None, skipped


def list_facts(root: Path, *, trust: str = "checksums", verified_ids: Collection[str] = ()) -> list[CheckpointFacts]:
    """Return what a retention policy may know about the checkpoints of `root` that this package named and committed.

    Args:
        trust: which count as verified: read back against their "checksums", at least against "sizes", or "all".
        verified_ids: count as verified too: checkpoints that the caller has just read back.
    """
    facts = []
    for found in find_checkpoints(root):
        if found.manifest is None or not is_own(found.path.name, found.manifest):
            continue
        manifest = found.manifest
        record = read_record(root, manifest.lineage.checkpoint_id)
        facts.append(
            CheckpointFacts(
                name=found.path.name,
                order=manifest.order,
                created_at=_parse_time(manifest.created_at) or 0.0,
                metrics=_get_metrics(manifest),
                size_bytes=manifest.size_bytes,
                checkpoint_id=manifest.lineage.checkpoint_id,
                is_verified=record.verified in _TRUSTED[trust] or manifest.lineage.checkpoint_id in verified_ids,
                is_pinned=record.is_pinned,
            )
        )
    return facts


def survey_root(root: Path, *, checksums: bool = False) -> list[Entry]:
    """Return everything in `root` that is, was or will be a checkpoint: along the lineage, newest first, then the rest.

    Sizes are always compared with the manifest, which reads nothing; with `checksums` every file is read.

    Raises:
        CheckpointNotFoundError: `root` is a file.
    """
    found = find_checkpoints(root)
    committed = sorted((each for each in found if each.manifest), key=lambda each: each.order, reverse=True)
    entries = [_describe(root, each, checksums) for each in committed]
    for each in found:
        if each.manifest is None:
            state = State.DAMAGED if (each.path / DIRECTORY).is_dir() else State.FOREIGN
            entries.append(_describe_other(each.path, state, each.problem))
    entries += [_describe_other(path, State.PARTIAL, "not completed") for path in _find_partial(root)]
    entries += [_describe_other(each.path, State.QUARANTINED, each.reason) for each in list_set_aside(root)]
    return entries


def _describe(root: Path, found: Found, checksums: bool) -> Entry:
    manifest = found.manifest
    assert manifest is not None  # noqa: S101 - the caller's choice
    record = read_record(root, manifest.lineage.checkpoint_id)
    fault = find_fault(Candidate(found.path, manifest, record), checksums=checksums)
    return Entry(
        path=found.path,
        state=State.COMMITTED if fault is None else State.DAMAGED,
        step=manifest.step,
        attempt=manifest.lineage.attempt,
        created_at=_parse_time(manifest.created_at),
        size_bytes=manifest.size_bytes,
        metrics=_get_metrics(manifest),
        checkpoint_id=manifest.lineage.checkpoint_id,
        is_verified=record.verified == CHECKSUMS and fault is None,
        is_pinned=record.is_pinned,
        num_resumes=record.num_resumes,
        problem=fault,
    )


def _describe_other(path: Path, state: State, problem: str | None) -> Entry:
    # Its time is for people to read; nothing is decided by it.
    try:
        modified = path.stat().st_mtime
    except OSError:
        modified = None
    return Entry(path, state, created_at=modified, size_bytes=_measure(path), problem=problem)


def _find_partial(root: Path) -> Iterator[Path]:
    for run_directory in sorted((root / PARTIAL).glob("*")):
        yield from sorted(path for path in run_directory.glob("*") if path.is_dir())


def _measure(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue  # being written, or swept, right now
    return total


def _get_metrics(manifest: Manifest) -> dict[str, float]:
    """Return the metrics that are numbers; NaN and the infinities were written as words, and come back as numbers."""
    metrics = manifest.extra.get("metrics")
    numbers = {}
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers


def _parse_time(text: str) -> float | None:
    try:
        seconds = datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None
