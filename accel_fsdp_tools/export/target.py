"""The directory that an export writes: aside first, and in place only when everything in it is proven.

Until the rename, whatever was at the target stays as it was; a failed export leaves nothing behind, and what a killed
one left is removed by the next export to the same place.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import StorageError, UsageError
from ..files import fsync_directory
from ..manifest import has_manifest

REPORT_NAME = "export_report.json"
_FOREIGN = (".metadata", "scheduler.bin", "trainer_state.json", "optimizer.bin", "optimizer.pt")
_SPARE_BYTES = 16 << 20


def check_target(out: Path, source: Path | None, *, overwrite: bool) -> None:
    """Make sure that `out` can become an export of the checkpoint `source`; None is a model in memory.

    Raises:
        UsageError: it exists and `overwrite` is not given, is no earlier export, or is part of a checkpoint.
        StorageError: its parent cannot be written.
    """
    resolved = out.resolve()
    if source is not None:
        origin = source.resolve()
        if resolved == origin or resolved in origin.parents:
            raise UsageError(f"{out} is the checkpoint itself or holds it; export to another directory.", path=str(out))
        inner = origin if origin.is_dir() else origin.parent
        if inner in resolved.parents and _is_checkpoint(inner):
            raise _explain_inside(out, inner)
    else:
        for parent in resolved.parents:
            if _is_checkpoint(parent):
                raise _explain_inside(out, parent)
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} exists and is no directory; give another path.", path=str(out))
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise UsageError(f"{out} exists and is not empty. Use --overwrite to replace it.", path=str(out))
        _check_replaceable(out)
    parent = find_existing(out.parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(f"{parent} cannot be written to: choose another place for {out.name}.", path=str(parent))


def _is_checkpoint(directory: Path) -> bool:
    return has_manifest(directory) or (directory / ".metadata").exists()


def _explain_inside(out: Path, checkpoint: Path) -> UsageError:
    return UsageError(
        f"{out} lies inside the checkpoint {checkpoint}, which would no longer be what was saved; export beside it.",
        path=str(out),
    )


def _check_replaceable(out: Path) -> None:
    """Replacing deletes all of it: only what looks like weights, and holds no checkpoint to resume from."""
    names = [entry.name for entry in out.iterdir()]
    has_weights = any(re.search(r"\.safetensors(\.index\.json)?$", name) for name in names) or any(
        (entry / "adapter_config.json").exists() for entry in out.iterdir()
    )
    reason = None
    if not has_weights and REPORT_NAME not in names:
        reason = "it holds no weights, so it is no earlier export"
    elif (
        has_manifest(out)
        or any(name in _FOREIGN for name in names)
        or any(_holds_checkpoint(entry) for entry in out.iterdir())
    ):
        reason = "it holds a checkpoint that training could resume from"
    if reason:
        raise UsageError(
            f"{out} is not replaced, although --overwrite was given: {reason}. Delete it yourself, or choose another "
            "path.",
            path=str(out),
        )


def _holds_checkpoint(directory: Path) -> bool:
    """Whether a folder is a checkpoint, or one of the parts of one, whoever wrote it."""
    return (
        _is_checkpoint(directory)
        or any((directory / name).exists() for name in _FOREIGN)
        or any(directory.glob("*/.metadata"))
    )


def find_existing(path: Path) -> Path:
    """Return the path, or its first parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_space(out: Path, size_bytes: int) -> None:
    """Make sure that the file system of `out` has room for so much more.

    Raises:
        StorageError: it has not; nothing was written.
    """
    parent = find_existing(out.parent)
    free = shutil.disk_usage(parent).free
    if free < size_bytes + _SPARE_BYTES:
        raise StorageError(
            f"{parent} has {free / 1e9:.2f} GB left and the export needs {size_bytes / 1e9:.2f} GB. Make room, choose "
            "another place, or export fewer bytes a weight (--dtype bf16).",
            path=str(parent),
            expected=size_bytes,
            actual=free,
        )


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yield an empty directory beside `out` that takes its place when the block ends well, and vanishes if not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    staging = out.parent / f".{out.name}.partial-{_get_host()}-{os.getpid()}-{os.urandom(4).hex()}"
    staging.mkdir()
    try:
        yield staging
        _swap(staging, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _get_host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", os.uname().nodename)


def _swap(staging: Path, out: Path) -> None:
    old = None
    if out.exists():
        if any(out.iterdir()):
            old = out.parent / staging.name.replace(".partial-", ".replaced-")
            out.rename(old)
        else:
            out.rmdir()
    try:
        staging.rename(out)
    except OSError:
        if old is not None:
            old.rename(out)
        raise
    fsync_directory(out.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _sweep(out: Path) -> None:
    """Remove what exports of this host that are no longer alive left beside `out`; give a replaced one back."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.(partial|replaced)-{re.escape(_get_host())}-(\d+)-[0-9a-f]{{8}}")
    for entry in sorted(out.parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match is None or _is_alive(int(match[2])):
            continue
        if match[1] == "replaced" and not out.exists():
            entry.rename(out)  # killed between the two renames
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
