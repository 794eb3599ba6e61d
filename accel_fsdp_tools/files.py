"""Files that survive a crash: durable writes, checksums, and paths that stay inside their directory.

Nothing here knows what a checkpoint is, and nothing is collective.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from .errors import CheckpointIncompleteError, DamagedCheckpointError

CHECKSUM_ALGORITHM = "xxh3_128"
_SYNC_THREADS = 8  # they only wait; syncs under way together share one write of the file system's journal
_BLOCK_BYTES = 1 << 20  # re-used by every read: first touch of fresh memory is slow on virtual machines


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of one file of a checkpoint; `path` is relative, with forward slashes."""

    path: str
    size_bytes: int
    checksum: str


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable. File systems that cannot sync a directory are left alone."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the contents of `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write `path` whole or not at all: a temporary name, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_json_durably(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, whole or not at all. NaN and infinity are refused."""
    text = json.dumps(value, indent=1, sort_keys=False, allow_nan=False)
    write_durably(path, text.encode() + b"\n")


def resolve_inside(directory: Path, relative: str) -> Path:
    """Return `directory / relative`, refusing anything that would leave `directory`.

    Raises:
        DamagedCheckpointError: `relative` is absolute, empty, or contains `..` or a NUL.
    """
    pure = PurePosixPath(relative)
    if not relative or pure.is_absolute() or ".." in pure.parts or "\0" in relative or "\\" in relative:
        raise DamagedCheckpointError(
            f"{directory}: the manifest names {relative!r}, which lies outside the checkpoint. The manifest is damaged "
            "or was tampered with; don't use this checkpoint.",
            path=str(directory),
            actual=relative,
        )
    return directory / pure


def list_files(directory: Path) -> list[str]:
    """Return the relative paths of all regular files below `directory`, sorted; links are not followed.

    Raises:
        DamagedCheckpointError: something that is neither a file nor a directory (a link, a device) lies there.
    """
    return sorted(_walk(directory, ""))


def _walk(directory: Path, prefix: str) -> Iterator[str]:
    with os.scandir(directory) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                yield name
            else:
                raise DamagedCheckpointError(
                    f"{entry.path} is neither a file nor a directory ({_describe_mode(entry)}); a checkpoint holds "
                    "nothing else. Remove it, or copy the checkpoint with links resolved (cp -rL).",
                    path=entry.path,
                )


def _describe_mode(entry: os.DirEntry[str]) -> str:
    mode = entry.stat(follow_symlinks=False).st_mode
    return "a symbolic link" if stat.S_ISLNK(mode) else f"mode {stat.filemode(mode)}"


def compute_checksum(path: Path) -> tuple[int, str]:
    """Return size in bytes and xxh3_128 of a file, read in blocks of 1 MiB with one re-used buffer."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_BLOCK_BYTES)
    view = memoryview(buffer)
    size_bytes = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            size_bytes += count
    return size_bytes, digest.hexdigest()


def seal_files(directory: Path, paths: Iterable[str], *, num_threads: int = 2) -> list[FileFacts]:
    """Make the named files durable and return their sizes and checksums.

    The checksums are computed in `num_threads` threads, from pages that are still in memory, while the storage is
    busy with the syncs; both release the GIL. The largest files come first.
    """
    from concurrent.futures import (
        ThreadPoolExecutor,
    )  # here, as in `check_files`: commands that seal nothing start faster

    names = list(paths)
    targets = [resolve_inside(directory, name) for name in names]
    order = sorted(range(len(names)), key=lambda index: -targets[index].stat().st_size)
    with ThreadPoolExecutor(_SYNC_THREADS) as syncing, ThreadPoolExecutor(num_threads) as computing:
        syncs = [syncing.submit(fsync_file, targets[index]) for index in order]
        checksums = {index: computing.submit(compute_checksum, targets[index]) for index in order}
        for sync in syncs:
            sync.result()
        return [FileFacts(name, *checksums[index].result()) for index, name in enumerate(names)]


def check_files(
    directory: Path, expected: Iterable[FileFacts], *, checksums: bool = True, num_threads: int = 2
) -> None:
    """Compare files with the recorded facts; raises on the first that is missing or differs.

    Raises:
        CheckpointIncompleteError: a file is missing.
        DamagedCheckpointError: a size or (with `checksums`) a checksum differs.
    """
    from concurrent.futures import ThreadPoolExecutor

    def check(facts: FileFacts) -> None:
        path = resolve_inside(directory, facts.path)
        advice = "Don't resume from this checkpoint; use an older one, or restore the file from a copy."
        try:
            size_bytes = path.lstat().st_size
        except FileNotFoundError:
            raise CheckpointIncompleteError(
                f"{path} is missing, the manifest lists it with {facts.size_bytes} bytes. {advice}", path=str(path)
            ) from None
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be looked at: {error}. {advice}", path=str(path)) from error
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is not a file. {advice}", path=str(path))
        if size_bytes == facts.size_bytes and checksums:
            size_bytes, checksum = compute_checksum(path)
            if checksum != facts.checksum and size_bytes == facts.size_bytes:
                raise DamagedCheckpointError(
                    f"{path} is damaged: its {CHECKSUM_ALGORITHM} is {checksum}, {facts.checksum} was written. "
                    f"{advice}",
                    path=str(path),
                    expected=facts.checksum,
                    actual=checksum,
                )
        if size_bytes != facts.size_bytes:
            raise DamagedCheckpointError(
                f"{path} is damaged: it has {size_bytes} bytes, {facts.size_bytes} were written. {advice}",
                path=str(path),
                expected=facts.size_bytes,
                actual=size_bytes,
            )

    with ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(check, expected):
            pass
