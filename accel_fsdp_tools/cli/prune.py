"""`accel-fsdp prune ROOT --keep-last 3`: remove checkpoints that no rule keeps."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .exits import GOOD

if TYPE_CHECKING:
    from ..retention import CheckpointFacts

NAME = "prune"
HELP = "remove checkpoints that no rule keeps; the last good one always stays"
DESCRIPTION = (
    "Remove checkpoints that none of the given rules keeps. Checkpoints that have not been read back yet are read and "
    "compared with their checksums first: damaged ones take no place of a good one. The newest good one, everything "
    "newer, and pinned ones always stay; directories that a Checkpointer did not name are never touched. Refuses while "
    "a run holds the folder: it prunes by its own rules."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("root", metavar="ROOT", type=Path, help="the folder that holds the checkpoints")
    parser.add_argument("--keep-last", metavar="N", type=int, help="keep the newest N")
    parser.add_argument("--keep-every", metavar="K", type=int, help="keep those of steps that are multiples of K")
    parser.add_argument(
        "--keep-best",
        metavar="METRIC:MODE[:N]",
        type=_parse_best,
        help="keep the N (default 1) with the best value of a metric; MODE is min or max",
    )
    parser.add_argument("--keep-every-hours", metavar="T", type=float, help="keep one per T hours")
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and change nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _parse_best(text: str) -> tuple[str, str, int]:
    name, _, rest = text.rpartition(":")
    count = 1
    if rest.isdecimal():
        count, (name, _, rest) = int(rest), name.rpartition(":")
    if not name or rest not in ("min", "max") or count < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give METRIC:min or METRIC:max, and :N for more than one")
    return name, rest, count


def run(arguments: argparse.Namespace) -> int:
    """Prune, print what went and what stays, and return 0."""
    import uuid

    from ..commit import delete_checkpoint
    from ..errors import CheckpointNotFoundError, UsageError
    from ..records import forget
    from ..retention import choose_deletions, make_policy

    root = arguments.root.expanduser().absolute()
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} is no directory", path=str(root))
    hours = arguments.keep_every_hours
    policy = make_policy(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        keep_best=arguments.keep_best,
        keep_every_s=None if hours is None else hours * 3600,
    )
    if policy is None:
        raise UsageError("no rule says what to keep: give --keep-last, --keep-every, --keep-best or --keep-every-hours")
    if not arguments.dry_run:
        _refuse_if_held(root)
    facts = _list_verified(root, record=not arguments.dry_run)
    condemned = choose_deletions(facts, policy)
    if not arguments.dry_run:
        run_id = f"prune-{uuid.uuid4().hex[:12]}"
        for each in condemned:
            _refuse_if_held(root)
            delete_checkpoint(root / each.name, run_id)
            forget(root, each.checkpoint_id)
    _show(root, facts, condemned, arguments)
    return GOOD


def _refuse_if_held(root: Path) -> None:
    from ..errors import LockedError
    from ..ownership import LOCK_NAME, is_alive, read_owner

    lock = root / LOCK_NAME
    if lock.exists() and is_alive(lock):
        holder = read_owner(lock)
        who = "a run" if holder is None else f"run {holder.run_id} (process {holder.process_id} on {holder.host})"
        raise LockedError(
            f"{root} is in use by {who}, which prunes it by its own rules. Stop it first, or give its Checkpointer "
            "other keep_ arguments; --dry-run works at any time.",
            path=str(lock),
            actual=str(holder),
        )


def _list_verified(root: Path, *, record: bool) -> list[CheckpointFacts]:
    """Return the facts of all checkpoints, verified those that are good now.

    What was read back before has to have its sizes still; the rest is read now, and that is recorded.
    """
    from dataclasses import replace

    from ..errors import AccelFsdpError
    from ..files import check_files
    from ..keeping import try_to_record
    from ..manifest import read_manifest
    from ..records import CHECKSUMS, record_verified
    from ..survey import list_facts

    facts = []
    for each in list_facts(root):
        try:
            check_files(root / each.name, read_manifest(root / each.name).files, checksums=not each.is_verified)
        except AccelFsdpError:
            facts.append(replace(each, is_verified=False))
            continue
        facts.append(replace(each, is_verified=True))
        if record and not each.is_verified:
            try_to_record(partial(record_verified, root, each.checkpoint_id, name=each.name, how=CHECKSUMS))
    return facts


def _show(
    root: Path, facts: list[CheckpointFacts], condemned: list[CheckpointFacts], arguments: argparse.Namespace
) -> None:
    from .list import format_size

    gone = {each.name for each in condemned}
    kept = sorted((each for each in facts if each.name not in gone), key=lambda each: each.order)
    if arguments.json:
        value = {
            "root": str(root),
            "dry_run": arguments.dry_run,
            "removed": [each.name for each in condemned],
            "removed_bytes": sum(each.size_bytes for each in condemned),
            "kept": [each.name for each in kept],
            "not_verified": [each.name for each in kept if not each.is_verified],
        }
        print(json.dumps(value, indent=1))
        return
    verb = "would remove" if arguments.dry_run else "removed"
    for each in condemned:
        print(f"{verb} {each.name} ({format_size(each.size_bytes)})")
    if not condemned:
        print("nothing to remove")
    for each in kept:
        notes = ["pinned"] * each.is_pinned + ["damaged"] * (not each.is_verified)
        print(f"keeps {each.name}" + (f" ({', '.join(notes)})" if notes else ""))
