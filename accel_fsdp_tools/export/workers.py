"""Threads that take units of work one by one, and stop at the first failure.

The units come from an iterator that is advanced under a lock, so that planning goes on while earlier units are being
worked on and a long list never exists. Reading, writing, checksums and numpy all release the interpreter's lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

MAX_THREADS = 16  # beyond, the page cache's own locks decide

Unit = TypeVar("Unit")


def count_threads(num_threads: int | None) -> int:
    """Return the number given, or else the number of processors that this process may use, at most `MAX_THREADS`."""
    if num_threads is not None:
        return max(1, num_threads)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, MAX_THREADS)


class _Queue(Generic[Unit]):
    """The units that are left, and the first failure."""

    def __init__(self, units: Iterator[Unit]) -> None:
        self._units = units
        self._lock = threading.Lock()
        self._is_over = False
        self.error: BaseException | None = None

    def take(self) -> Unit | None:
        with self._lock:
            unit = None if self._is_over else next(self._units, None)
            self._is_over = unit is None
            return unit

    def stop(self, error: BaseException | None = None) -> None:
        self._is_over = True
        self.error = self.error or error


def run_units(
    units: Iterator[Unit], enter_worker: Callable[[], AbstractContextManager[Callable[[Unit], None]]], num_threads: int
) -> None:
    """Do all units in threads, each with a worker of its own (its buffers and open files).

    Raises:
        whatever a unit, or the iterator, raises first; all threads have ended then.
    """
    queue = _Queue(units)

    def work() -> None:
        try:
            with enter_worker() as do:
                while (unit := queue.take()) is not None:
                    do(unit)
        except BaseException as error:  # raised again in the thread that waits
            queue.stop(error)

    threads = [threading.Thread(target=work, name=f"export-{number}", daemon=True) for number in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # an interrupt: let them finish their units, so that nobody writes any more
        queue.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if queue.error is not None:
        raise queue.error
