"""Open files, read by position."""

from __future__ import annotations

import os

from ..errors import CheckpointIncompleteError, DamagedCheckpointError


class FileCache:
    """Open files by path, closed at the end of its context; at most `limit` are open at a time.

    One thread only: a file that another thread still reads might be closed to make room.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> FileCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; the cache can be used again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `path` from `offset` on.

        Raises:
            CheckpointIncompleteError: the file is gone.
            DamagedCheckpointError: it ends too early.
        """
        descriptor = self.open(path)
        position = 0
        while position < len(buffer):
            count = os.preadv(descriptor, [buffer[position:]], offset + position)
            if not count:
                raise DamagedCheckpointError(
                    f"{path} ends before byte {offset + len(buffer)}, which the checkpoint refers to. The file is cut "
                    "off; use another checkpoint or restore the file from a copy.",
                    path=path,
                    expected=offset + len(buffer),
                    actual=offset + position,
                )
            position += count

    def open(self, path: str) -> int:
        """Return the descriptor of a file; it stays open until other files have been asked for, or the cache closes.

        Raises:
            CheckpointIncompleteError: the file is missing.
        """
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            if len(self._descriptors) >= self._limit:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise CheckpointIncompleteError(
                    f"{path} is missing; the checkpoint is incomplete. Use another one, or restore it from a copy.",
                    path=path,
                ) from None
            self._descriptors[path] = descriptor
        return descriptor
