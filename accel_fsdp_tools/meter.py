"""How far several threads are, together."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes to do, from any thread, never from two at once."""


class Meter:
    """Adds up the bytes that all threads have done, and tells the caller."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0

    def add(self, count: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += count
                self._progress(self._done, self._total)
