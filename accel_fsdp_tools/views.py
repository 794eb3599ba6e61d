"""Do all ranks see the same storage? Asked before anything is decided by what one of them sees.

A network file system may show another node's files late, and a disk of the node's own never shows them. So a rank that
sees something else than the others is given some time, and then named. All functions are collective.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path

from .commit import OWN_FOLDERS
from .errors import AccelFsdpError, StorageError, UsageError
from .files import FileFacts, check_files
from .layout import get_writer_rank
from .manifest import DIRECTORY, Manifest, has_manifest, read_manifest
from .ownership import LOCK_NAME, read_owner
from .ranks import broadcast, gather_all, get_rank, get_world_size, run_together

VISIBILITY_S = 30.0
_PAUSE_S = 0.2
_ADVICE = (
    "The directory is not on storage that all ranks share, or this rank's node shows files too late. Use a shared file "
    "system (NFS, Lustre, a mounted bucket), and look at the node's mounts."
)


def check_same_root(root: Path) -> None:
    """Make sure that all ranks were given the same root.

    Raises:
        UsageError: they were not; names the first that differs.
    """
    roots = gather_all(str(root))
    for rank, other in enumerate(roots):
        if other != roots[0]:
            raise UsageError(
                f"Ranks were given different roots: rank 0 has {roots[0]}, rank {rank} has {other}. Give every rank "
                "the same one (a time stamp in the name has to come from rank 0).",
                path=roots[0],
                rank=rank,
                expected=roots[0],
                actual=other,
            )


def check_same_storage(root: Path, token: str) -> None:
    """Make sure that every rank sees the lock that rank 0 has just placed in the root.

    Raises:
        StorageError: a rank does not within `VISIBILITY_S`; names it.
    """

    def look() -> str | None:
        owner = read_owner(root / LOCK_NAME)
        if owner is not None and owner.token == token:
            return None
        return f"does not see the lock that rank 0 has placed in {root}"

    wait_until_seen("looking for the shared storage", root, look)


def agree_on_names(root: Path) -> None:
    """Wait until every rank lists the same committed checkpoints in the root.

    Otherwise a rank 0 that sees an old state of the root would make the whole run go back to it.

    Raises:
        StorageError: they do not within `VISIBILITY_S`; names a rank and what it sees or does not.
    """
    deadline = time.monotonic() + VISIBILITY_S
    while True:
        mine = list_committed(root)
        views = gather_all((zlib.crc32("\0".join(mine).encode()), time.monotonic() > deadline))
        if all(view == views[0][0] for view, _ in views):
            return
        if views[0][1]:  # rank 0's clock decides, so that all give up in the same round
            break
        time.sleep(_PAUSE_S)
    reference = set(broadcast(mine))
    for rank, (missing, extra) in enumerate(gather_all((sorted(reference - {*mine}), sorted({*mine} - reference)))):
        if missing or extra:
            sees = f"does not see {', '.join(missing[:3])}" if missing else f"sees {', '.join(extra[:3])}"
            others = "which rank 0 sees" if missing else "which rank 0 does not see"
            raise StorageError(
                f"After {VISIBILITY_S:g} s rank {rank} {sees} in {root}, {others}. Resuming now could go back further "
                f"than needed. {_ADVICE}",
                path=str(root),
                rank=rank,
                expected=sorted(reference),
                actual=missing or extra,
            )


def list_committed(root: Path) -> list[str]:
    """Return the names of the directories in `root` that have a manifest. Not collective."""
    if not root.is_dir():
        return []
    return sorted(path.name for path in root.iterdir() if path.name not in OWN_FOLDERS and has_manifest(path))


def wait_for_checkpoint(path: Path, checkpoint_id: str) -> None:
    """Wait until every rank sees the same manifest at `path`, and its share of the files at their full size.

    Rank 0 has looked at all files before: what another rank misses after that is its view, not damage.

    Raises:
        StorageError: a rank does not within `VISIBILITY_S`; names it.
    """

    def look() -> str | None:
        try:
            manifest = read_manifest(path)
            if manifest.lineage.checkpoint_id != checkpoint_id:
                return f"sees another checkpoint at {path} than rank 0"
            check_files(path, choose_share(manifest), checksums=False)
        except AccelFsdpError as error:
            return f"does not see what rank 0 sees: {error}"
        return None

    wait_until_seen("looking at the chosen checkpoint", path, look)


def agree_on_fault(path: Path) -> str | None:
    """Return what all ranks find wrong with the checkpoint at `path` (its manifest, the sizes of its files), or None.

    Asked where one rank has found something: before a checkpoint is called damaged, all have to see it so.

    Raises:
        StorageError: after `VISIBILITY_S` some still see it whole and some do not; names the first that does not.
    """
    deadline = time.monotonic() + VISIBILITY_S
    while True:
        seen = run_together("confirming the damage", lambda: (_find_fault(path), time.monotonic() > deadline))
        bad = [rank for rank, (fault, _) in enumerate(seen) if fault is not None]
        if len(bad) in (0, len(seen)):
            return seen[0][0]
        if seen[0][1]:
            rank = bad[0]
            raise StorageError(
                f"After {VISIBILITY_S:g} s rank {rank} does not see {path.name} as other ranks do, to which it is "
                f"whole. What it sees: {seen[rank][0]} {_ADVICE}",
                path=str(path),
                rank=rank,
            )
        time.sleep(_PAUSE_S)


def _find_fault(path: Path) -> str | None:
    try:
        check_files(path, read_manifest(path).files, checksums=False)
    except AccelFsdpError as error:
        return str(error)
    return None


def choose_share(manifest: Manifest) -> list[FileFacts]:
    """Return the files that this rank answers for: those of its own state, and its share of all others."""
    rank, world_size = get_rank(), get_world_size()
    shared = [file for file in manifest.files if not file.path.startswith(f"{DIRECTORY}/")]
    own = [
        file
        for file in manifest.files
        if file.path.startswith(f"{DIRECTORY}/") and get_writer_rank(file.path) % world_size == rank
    ]
    return shared[rank::world_size] + own


def wait_until_seen(what: str, path: Path, look: Callable[[], str | None]) -> None:
    """Wait until `look` finds nothing wrong on any rank.

    Args:
        what: the stage, for messages.
        path: what is looked at.
        look: what this rank does not see, in words that go on after "rank 1 "; None if it sees everything.

    Raises:
        StorageError: a rank still does not see it after `VISIBILITY_S`; names it.
    """

    def wait() -> None:
        deadline = time.monotonic() + (VISIBILITY_S if get_world_size() > 1 else 0)
        while (problem := look()) is not None:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"After {VISIBILITY_S:g} s rank {get_rank()} {problem}. {_ADVICE}",
                    path=str(path),
                    rank=get_rank(),
                )
            time.sleep(_PAUSE_S)

    run_together(what, wait)
