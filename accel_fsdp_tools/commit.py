"""A checkpoint exists whole or not at all: staging, commit by rename, recovery and sweeping.

    <root>/step_00000500/                        committed
    <root>/.partial/<run id>/step_00000750/      being written, or left by a crash; never resumed from
    <root>/.partial/<run id>/<name>.replaced/    an old checkpoint for the moment in which a new one takes its name
    <root>/.partial/<run id>/<name>.deleted/     an old checkpoint on its way out

A root also has `.quarantine` (module `quarantine`) and `.accel_fsdp_tools` (module `records`).

Everything here is done by rank 0 alone; the callers make the other ranks wait and agree.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import ownership
from .errors import AccelFsdpError, CheckpointNotFoundError, UsageError
from .files import fsync_directory
from .manifest import MANIFEST_PATH, Manifest, has_manifest, read_manifest
from .ownership import (
    STALE_S,
    Owner,
    explain_unwritable,
    is_alive,
    is_of_this_host,
    measure_age_s,
    read_owner,
    write_owner,
)
from .phases import reach
from .quarantine import QUARANTINE
from .records import RECORDS

PARTIAL, OWNER_NAME = ownership.PARTIAL, ownership.OWNER_NAME  # the heartbeat needs them too
# A plain `save_state` has no heartbeat: from another host, one that runs looks like one that died until it is this old.
FOREIGN_PARTIAL_STALE_S = 24 * 3600.0
OWN_FOLDERS = (PARTIAL, QUARANTINE, RECORDS)  # of a root: what this package keeps there beside checkpoints
_REPLACED, _DELETED = ".replaced", ".deleted"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Names by which a directory that others wrote is recognised as a checkpoint.
_FOREIGN_MARKS = (
    "pytorch_model_fsdp_0",
    "pytorch_model_fsdp.bin",
    "optimizer_0",
    "optimizer.bin",
    "random_states_0.pkl",
    "model.safetensors",
    "pytorch_model.bin",
    "trainer_state.json",
    ".metadata",
)


@dataclass(frozen=True)
class Staging:
    """Where one save is written before it is a checkpoint."""

    final: Path
    run_id: str

    @property
    def run_directory(self) -> Path:
        return self.final.parent / PARTIAL / self.run_id

    @property
    def partial(self) -> Path:
        return self.run_directory / self.final.name

    @property
    def set_aside(self) -> Path:
        return self.run_directory / f"{self.final.name}{_REPLACED}"


@dataclass(frozen=True)
class Found:
    """A directory in a root that is or looks like a checkpoint: a manifest, or why there is none."""

    path: Path
    manifest: Manifest | None = None
    problem: str | None = None
    error: AccelFsdpError | None = None

    @property
    def order(self) -> tuple[int, int]:
        if self.manifest is None:
            raise ValueError(f"{self.path} has no place in the lineage: {self.problem}")
        return self.manifest.order


def looks_like_checkpoint(directory: Path) -> bool:
    """Whether `directory` holds files by the names that Accelerate, the Trainer or torch give checkpoints."""
    return any((directory / mark).exists() for mark in _FOREIGN_MARKS)


def check_target(final: Path, *, overwrite: bool) -> None:
    """Make sure that a checkpoint may be written to `final`; nothing is changed.

    A checkpoint of this package is replaced; so is an empty directory. Anything else there needs `overwrite`.

    Raises:
        UsageError: a file is in the way, or a directory with contents that this package did not write.
    """
    if final.name in ("", ".", "..") or not {*OWN_FOLDERS}.isdisjoint(final.parts):
        raise UsageError(f"{final} is no possible name for a checkpoint; choose another", path=str(final))
    for ancestor in final.parents:
        if ancestor.exists():
            if not ancestor.is_dir():
                raise UsageError(
                    f"{ancestor} is a file, so {final} cannot be made; choose another place", path=str(ancestor)
                )
            break
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        kind = "a symbolic link" if final.is_symlink() else "a file"
        raise UsageError(f"{final} is {kind}; give a directory that may be replaced", path=str(final))
    if not final.exists() or has_manifest(final) or overwrite:
        return
    names = sorted(entry.name for entry in final.iterdir())
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise UsageError(
            f"{final} exists and was not written by this package (it holds {shown}). Saving would replace it: choose "
            "another directory, or pass overwrite=True if it may go.",
            path=str(final),
        )


def make_root(root: Path) -> None:
    """Make the directory for the checkpoints, unless it exists.

    Raises:
        StorageError: that is not possible.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_unwritable(root, error) from error


def open_staging(final: Path, run_id: str) -> Staging:
    """Make an empty directory to write a checkpoint into, marked as this run's.

    Raises:
        StorageError: the root cannot be written to.
    """
    staging = Staging(final, run_id)
    try:
        _make_run_directory(staging)
        write_owner(staging.run_directory / OWNER_NAME, Owner.current(run_id))
        if staging.partial.exists():
            shutil.rmtree(staging.partial)
        staging.partial.mkdir()
    except OSError as error:
        raise explain_unwritable(final.parent, error) from error
    return staging


def _make_run_directory(staging: Staging) -> None:
    """Make the run's directory below `.partial`, which another process may just be removing because it is empty."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            staging.run_directory.mkdir(parents=True, exist_ok=True)
            return
        staging.final.parent.stat()  # the root itself has to be there
    staging.run_directory.mkdir(parents=True, exist_ok=True)


def commit_staging(staging: Staging) -> None:
    """Give the finished checkpoint its name. The manifest must have been written and synced.

    A crash at any moment leaves the old checkpoint or the new one: an old one of the same name is set aside by a
    rename, and `recover` puts it back if the new one never got its name.
    """
    _fsync_tree(staging.partial)
    fsync_directory(staging.run_directory)
    replaced = staging.final.exists()
    if replaced:
        if staging.set_aside.exists():
            shutil.rmtree(staging.set_aside)
        staging.final.rename(staging.set_aside)
        fsync_directory(staging.run_directory)
    try:
        reach("save.set_aside")
        staging.partial.rename(staging.final)
    except BaseException:  # not only a failed rename: an interrupt must not leave the run without either
        if replaced:
            staging.set_aside.rename(staging.final)
        raise
    reach("save.renamed")
    directory = staging.final.parent
    for ancestor in (directory, *directory.parents):
        # Up to the root of the file system that we may write to: a new root's own name has to last as well.
        with contextlib.suppress(PermissionError):
            fsync_directory(ancestor)
        if ancestor == ancestor.parent or ancestor.is_mount():
            break
    if replaced:
        shutil.rmtree(staging.set_aside)
    close_staging(staging)


def close_staging(staging: Staging) -> None:
    """Remove the run's directory below `.partial` if nothing is left in it, and `.partial` if it is empty."""
    with contextlib.suppress(OSError):
        if {entry.name for entry in staging.run_directory.iterdir()} <= {OWNER_NAME}:
            (staging.run_directory / OWNER_NAME).unlink(missing_ok=True)
            staging.run_directory.rmdir()
            staging.run_directory.parent.rmdir()


def discard_staging(staging: Staging) -> None:
    """Remove what a failed save left; whatever cannot be removed now is swept by a later run."""
    shutil.rmtree(staging.partial, ignore_errors=True)
    close_staging(staging)


def _fsync_tree(directory: Path) -> None:
    for current, _, _ in os.walk(directory):
        fsync_directory(Path(current))


def recover(root: Path) -> list[str]:
    """Finish what dead runs left half done: put back checkpoints that were set aside, remove partial ones.

    Directories of runs that live are not touched. What a run of another host left counts as alive for a day; only a
    checkpoint that it set aside is put back sooner, for in a run that lives it lies there for a moment.
    Returns a line for each thing done.
    """
    done: list[str] = []
    partial = root / PARTIAL
    if not partial.is_dir():
        return done
    for run_directory in sorted(partial.iterdir()):
        owner = run_directory / OWNER_NAME
        if not run_directory.is_dir():
            continue
        # A rename into the run's directory renews the time of that. So does the probe of `is_alive`: measured first.
        is_quiet = measure_age_s(run_directory) >= STALE_S
        alive = is_alive(owner, stale_s=FOREIGN_PARTIAL_STALE_S)
        if alive and (is_of_this_host(owner) or not is_quiet):
            continue
        for left in sorted(run_directory.iterdir()):
            if left.name.endswith(_REPLACED) and has_manifest(left):
                final = root / left.name.removesuffix(_REPLACED)
                if not final.exists():
                    left.rename(final)
                    fsync_directory(root)
                    done.append(f"put {final.name} back, whose replacement was never completed")
                    continue
            if left.is_dir() and not alive:
                # A crashed run's leavings: another process may be sweeping them too.
                shutil.rmtree(left, ignore_errors=True)
                done.append(f"removed {left.relative_to(root)}, left by a run that ended before completing it")
        if not alive:
            with contextlib.suppress(OSError):
                if (
                    is_quiet
                ):  # else it may be a run that is just beginning: it writes its owner under another name first
                    for left in run_directory.iterdir():
                        left.unlink()
                owner.unlink(missing_ok=True)
                run_directory.rmdir()
    with contextlib.suppress(OSError):
        partial.rmdir()
    return done


def find_interrupted(path: Path) -> bool:
    """Whether a checkpoint named `path` was set aside by a replacement that has not completed."""
    return any((path.parent / PARTIAL).glob(f"*/{path.name}{_REPLACED}"))


def delete_checkpoint(path: Path, run_id: str) -> bool:
    """Remove a checkpoint: renamed out of the way first, so that half a deletion is never seen as a checkpoint.

    On a disk too full for that, the manifest goes first instead: a crash in the middle then leaves what is listed as
    damaged. To refuse would keep the disk full.

    Returns:
        False if another process has removed it already.
    """
    staging = Staging(path, run_id)
    owner = staging.run_directory / OWNER_NAME
    try:
        _make_run_directory(staging)
        if read_owner(owner) is None:
            write_owner(owner, Owner.current(run_id))
    except OSError as error:
        if error.errno not in _FULL:
            raise
        close_staging(staging)
        return _delete_in_place(path)
    condemned = staging.run_directory / f"{path.name}{_DELETED}"
    shutil.rmtree(condemned, ignore_errors=True)
    try:
        path.rename(condemned)
    except FileNotFoundError:
        close_staging(staging)
        return False
    finally:
        reach("prune.set_aside")
    shutil.rmtree(condemned, ignore_errors=True)
    reach("prune.removed")
    close_staging(staging)
    return True


def _delete_in_place(path: Path) -> bool:
    try:
        (path / MANIFEST_PATH).unlink()
    except FileNotFoundError:
        return False
    reach("prune.set_aside")
    shutil.rmtree(path, ignore_errors=True)
    reach("prune.removed")
    return True


def find_checkpoints(root: Path) -> list[Found]:
    """Return every directory of `root` that is a checkpoint or looks like one, by name; nothing is changed.

    Raises:
        CheckpointNotFoundError: `root` is a file.
    """
    if not root.exists():
        return []
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} is a file, not a directory of checkpoints", path=str(root))
    found = []
    for path in sorted(root.iterdir()):
        if not path.is_dir() or path.name in OWN_FOLDERS:
            continue
        if has_manifest(path):
            try:
                found.append(Found(path, manifest=read_manifest(path)))
            except AccelFsdpError as error:
                if path.exists():  # else another process has pruned it meanwhile
                    found.append(Found(path, problem=str(error), error=error))
        elif looks_like_checkpoint(path):
            found.append(Found(path, problem="it has no manifest: not completed, or not written by this package"))
        elif path.name.startswith("step_"):
            found.append(Found(path, problem="it is named like a checkpoint and holds none"))
    return found
