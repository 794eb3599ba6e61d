"""Files that are written in pieces, by several threads, at any place: made at their full size, then filled.

A file system that runs full is found out before the first tensor is read, and blocks that are reserved at once are
filled faster than a file that grows.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import StorageError
from ..files import fsync_directory, fsync_file
from .outputs import OutputFile

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SYNC_THREADS = 8  # they only wait


class Writer:
    """Writes to the files of one directory by name and position; one thread only. Keeps the last file open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name: str | None = None
        self._descriptor = -1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`.

        Raises:
            StorageError: the storage is full, or does not write.
        """
        try:
            descriptor = self._open(name)
            while data:
                count = os.pwrite(descriptor, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            raise describe_failure(error, self._directory / name) from error

    def open(self, name: str) -> int:
        """Return the descriptor of a file, which stays open until another one is asked for.

        Raises:
            StorageError: it cannot be opened.
        """
        try:
            return self._open(name)
        except OSError as error:
            raise describe_failure(error, self._directory / name) from error

    def _open(self, name: str) -> int:
        if name != self._name:
            self._close()
            self._descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CLOEXEC)
            self._name = name
        return self._descriptor

    def _close(self) -> None:
        if self._name is not None:
            self._name = None
            os.close(self._descriptor)


def create_files(files: Sequence[OutputFile], directory: Path) -> None:
    """Create all files at their full size, with their headers written. On failure, those created are removed again.

    Raises:
        StorageError: one exists already, the directory cannot be written to, or the storage is too small.
    """
    created: list[OutputFile] = []
    try:
        for file in files:
            path = directory / file.name
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                created.append(file)
                try:
                    _reserve(descriptor, file.size_bytes)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise describe_failure(error, path, file.size_bytes) from error
        with Writer(directory) as writer:
            for file in files:
                writer.write(file.name, 0, memoryview(file.header))
    except BaseException:
        remove_files(created, directory)
        raise


def remove_files(files: Sequence[OutputFile], directory: Path) -> None:
    """Remove what a failed export has written; what is gone already is no failure."""
    for file in files:
        (directory / file.name).unlink(missing_ok=True)


def sync_files(files: Sequence[OutputFile], directory: Path) -> None:
    """Make all files and their names durable.

    Raises:
        StorageError: the storage reports that it did not write.
    """
    from concurrent.futures import ThreadPoolExecutor  # takes as long to import as a small model to copy

    try:
        with ThreadPoolExecutor(_SYNC_THREADS) as pool:
            for _ in pool.map(fsync_file, [directory / file.name for file in files]):
                pass
        fsync_directory(directory)
    except OSError as error:
        raise describe_failure(error, directory) from error


def describe_failure(error: OSError, path: Path, size_bytes: int | None = None) -> StorageError:
    """Return what to tell about a failed write."""
    needs = "" if size_bytes is None else f" (it needs {size_bytes / 1e9:.3f} GB)"
    if error.errno in _FULL:
        what = f"the storage is full, or a quota is used up{needs}. Free some space, or export to another place"
    elif error.errno == errno.EFBIG:
        what = f"this file system or a limit of the process does not allow so large a file{needs}. Choose smaller files"
    elif error.errno == errno.EEXIST:
        what = "it exists already. Export to an empty directory"
    else:
        what = f"{os.strerror(error.errno) if error.errno else error}. Export to a place that can be written to"
    return StorageError(f"{path} cannot be written: {what}.", path=str(path), errno=error.errno)


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Give a file its size, with blocks on disk where the file system can reserve them."""
    function = _find_fallocate()
    if function is not None and size_bytes:
        number = function(descriptor, size_bytes)
        if not number:
            return
        if number in _FULL or number == errno.EFBIG:
            raise OSError(number, os.strerror(number))
    os.ftruncate(descriptor, size_bytes)


@functools.cache
def _find_fallocate() -> Callable[[int, int], int] | None:
    """Return Linux' fallocate, which answers with 0 or the number of an error; None where there is none.

    Not `os.posix_fallocate`: where the file system cannot reserve (NFS), the C library writes a byte into every
    block instead, which takes longer than the export.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    if sys.maxsize < 1 << 32:  # offsets may have 32 bits there
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def reserve(descriptor: int, size_bytes: int) -> int:
        return ctypes.get_errno() if function(descriptor, 0, 0, size_bytes) else 0

    return reserve
