"""`accel-fsdp list ROOT`: what lies in a root of checkpoints, and which one a resume would choose."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .exits import DIFFERENCE, GOOD
from .parsing import parse_count
from .tables import align

if TYPE_CHECKING:
    from ..survey import Entry, Skipped

NAME = "list"
HELP = "show the checkpoints of a folder: step, age, size, state, and which one a resume would choose"
DESCRIPTION = (
    "List everything in a folder that is, was or will be a checkpoint: committed, partial (being written, or left by a "
    "crash), damaged, quarantined or written by others. Says which one a resume would choose and why. Files are "
    "compared with their recorded sizes; nothing is read or changed without --check."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("root", metavar="ROOT", type=Path, help="the folder that holds the checkpoints")
    parser.add_argument("--check", action="store_true", help="read every file and compare its checksum (exit code 3)")
    parser.add_argument(
        "--max-resumes",
        metavar="N",
        type=parse_count,
        help="as the run's own max_resumes: pass over what N runs have begun with, none of which has saved since",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(arguments: argparse.Namespace) -> int:
    """List, and return 0; 3 if --check found a committed checkpoint that is damaged."""
    from ..errors import CheckpointNotFoundError
    from ..survey import State, survey_root

    root = arguments.root.expanduser().absolute()
    if not root.exists():
        raise CheckpointNotFoundError(f"{root} does not exist", path=str(root))
    entries = survey_root(root, checksums=arguments.check)
    chosen, reason, skipped = _choose(root, entries, arguments.max_resumes)
    if arguments.json:
        resume = {"name": chosen, "reason": reason, "skipped": [str(each) for each in skipped]}
        value = {"root": str(root), "checkpoints": [each.to_dict() for each in entries], "resume": resume}
        print(json.dumps(value, indent=1, default=str))
    else:
        print(_format(root, entries, chosen, reason, skipped))
    is_damaged = any(each.state is State.DAMAGED for each in entries)
    return DIFFERENCE if arguments.check and is_damaged else GOOD


def _choose(root: Path, entries: list[Entry], max_resumes: int | None) -> tuple[str | None, str, list[Skipped]]:
    """Return the name that a resume would choose, why, and what it would pass over."""
    from ..survey import Skipped, State, list_candidates

    candidates, skipped = list_candidates(root, max_resumes=max_resumes)
    damaged = {each.name: each.problem for each in entries if each.state is State.DAMAGED}
    for candidate in candidates:
        if candidate.name in damaged:
            skipped.append(Skipped(candidate.name, str(damaged[candidate.name]), candidate.is_own))
            continue
        attempt, step = candidate.manifest.order
        reason = f"step {step} of attempt {attempt}, the newest along the lineage"
        newer = [each for each in candidates if each.manifest.step > step and each.name not in damaged]
        if newer:
            names = ", ".join(each.name for each in newer[:3])
            reason += f"; {names} belong(s) to an earlier attempt, which it has superseded"
        return candidate.name, reason, skipped
    if any(each.state is not State.PARTIAL for each in entries):
        return None, "nothing here can be resumed: a run refuses to start anew in silence", skipped
    return None, "there are no checkpoints: a run starts anew", skipped


def _format(root: Path, entries: list[Entry], chosen: str | None, reason: str, skipped: list[Skipped]) -> str:

    lines = [str(root)]
    if entries:
        head = ("", "name", "step", "age", "size", "state", "verified", "pinned", "metrics")
        rows = [_make_row(each, chosen) for each in entries]
        lines += align([head, *rows])
        lines.append("")
        lines += [f"{each.name}: {each.problem}" for each in entries if each.problem]
    lines.append(f"resume would choose {chosen}: {reason}" if chosen else f"resume would choose none: {reason}")
    lines += [str(each) for each in skipped if each.reason not in {entry.problem for entry in entries}]
    return "\n".join(lines)


def _make_row(entry: Entry, chosen: str | None) -> tuple[str, ...]:
    from ..survey import State

    metrics = ", ".join(f"{name} {value:.4g}" for name, value in entry.metrics.items())
    is_chosen = entry.state is State.COMMITTED and entry.name == chosen
    return (
        "*" if is_chosen else "",
        entry.name,
        "" if entry.step is None else str(entry.step),
        "" if entry.created_at is None else format_age(time.time() - entry.created_at),
        "" if entry.size_bytes is None else format_size(entry.size_bytes),
        entry.state.value,
        "yes" if entry.is_verified else "",
        "yes" if entry.is_pinned else "",
        metrics,
    )


def format_age(seconds: float) -> str:
    """Return how long ago something was, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_size(num_bytes: int) -> str:
    """Return a number of bytes in decimal units."""
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {unit}"
    return f"{num_bytes} B"
