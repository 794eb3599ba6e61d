"""Why has a load failed: is the checkpoint damaged, or is it the run, the machine or a mount? Collective.

Told by looking at the files, by two ranks that are likely to be on different nodes, never by the kind of an exception
alone: what is no damage must not cost a good checkpoint its place.
"""

from __future__ import annotations

import errno
from pathlib import Path

from . import views
from .errors import (
    AccelFsdpError,
    CallOrderError,
    DamagedCheckpointError,
    LockedError,
    ManifestVersionError,
    MismatchError,
    RankMissingError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from .files import FileFacts, check_files
from .manifest import MANIFEST_PATH, read_manifest
from .ranks import get_rank, get_world_size, run_on_main, run_together

_NO_DAMAGE = (
    CallOrderError,
    LockedError,
    ManifestVersionError,
    MismatchError,
    RankMissingError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
_UNREADABLE = (errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO), getattr(errno, "EREMOTEIO", errno.EIO))


def find_damage(error: AccelFsdpError, path: Path) -> str:
    """Return what is wrong with the checkpoint at `path`, whose load has failed with `error` on every rank.

    Damage is a file that is not what was written, in the eyes of the first and the last rank, or contents that are not
    what was in memory at the save. All else (a run that does not fit, no memory, a bug) is no damage: it would fail
    with an older checkpoint as well. Reads one file, or, where the error names none, the whole checkpoint once.

    Raises:
        StorageError: some rank reads something else than others; names it.
        The error itself, if it is no damage.
    """
    if isinstance(error, _NO_DAMAGE):
        raise error
    suspect = run_on_main("looking for the damage", lambda: _find_named_file(error, path))
    rank = error.rank
    if suspect is None:
        if isinstance(error, DamagedCheckpointError):
            return str(error)
        found = [each for each in run_together("reading the checkpoint", lambda: _find_bad_file(path)) if each]
        if not found:
            raise error
        suspect, rank = found[0]
    last = get_world_size() - 1
    readers = run_together(
        "reading the damaged file", lambda: _reread(path, suspect) if get_rank() in (0, last) else None
    )
    problems = {reader: readers[reader] for reader in (0, last)}
    good = [reader for reader, problem in problems.items() if problem is None]
    if not good:
        return str(problems[0])
    bad = [reader for reader, problem in problems.items() if problem is not None]
    rank = bad[0] if bad else rank
    raise StorageError(
        f"Rank {rank} cannot read {path / suspect} as it was written, and rank {good[0]} can: the checkpoint is good. "
        f"Look at the memory, the mounts and the network of the node of rank {rank}. What it met: "
        f"{problems[bad[0]] if bad else error}",
        path=str(path / suspect),
        rank=rank,
    ) from error


def _find_named_file(error: AccelFsdpError, path: Path) -> str | None:
    """Return the file of the checkpoint that an error names, relative to it; the manifest if that is damaged."""
    try:
        manifest = read_manifest(path)
    except AccelFsdpError:
        return MANIFEST_PATH
    if not isinstance(error.path, str) or not Path(error.path).is_relative_to(path):
        return None
    relative = Path(error.path).relative_to(path).as_posix()
    return relative if relative in {MANIFEST_PATH, *(file.path for file in manifest.files)} else None


def _find_bad_file(path: Path) -> tuple[str, int] | None:
    """Return the first file of this rank's share that is not what was written, and this rank."""
    try:
        share = views.choose_share(read_manifest(path))
    except AccelFsdpError:
        return MANIFEST_PATH, get_rank()
    bad = next((file for file in share if _check(path, file) is not None), None)
    return None if bad is None else (bad.path, get_rank())


def _reread(path: Path, relative: str) -> str | None:
    """Return what is wrong with a file by the manifest, None if nothing is."""
    try:
        manifest = read_manifest(path)
    except AccelFsdpError as error:
        return str(error)
    listed = [file for file in manifest.files if file.path == relative]
    return next((problem for file in listed if (problem := _check(path, file)) is not None), None)


def _check(path: Path, file: FileFacts) -> str | None:
    try:
        check_files(path, [file])
    except AccelFsdpError as error:
        return str(error)
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        return f"{path / file.path} cannot be read: {error}"
    return None
