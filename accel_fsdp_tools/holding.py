"""A root in the hands of one run: locked, on shared storage, and free of what dead runs left half done."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from . import views
from .commit import find_checkpoints, make_root, recover
from .errors import AccelFsdpError, CallOrderError
from .manifest import read_manifest
from .ownership import RootLock
from .quarantine import list_set_aside
from .ranks import run_on_main

logger = logging.getLogger(__name__)


class HeldRoot:
    """The right to save into a root, from `take` to `release`.

    Attributes:
        attempt: which start of a run this is; set by `take`.
        may_save: the run has resumed, or there was nothing to resume.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.attempt = 0
        self.may_save = False
        self._lock: RootLock | None = None
        self._is_taken = False

    def take(self, run_id: str) -> None:
        """Take the root: lock it, see that it is on shared storage, and finish what a dead run left half done.

        Does nothing if it is held already. Collective.
        """
        if self._is_taken:
            return
        views.check_same_root(self.root)

        def take() -> tuple[list[str], int, str]:
            make_root(self.root)
            if self._lock is not None:  # of an attempt to open that has failed
                self._lock.release()
            lock = RootLock(self.root, run_id)
            lock.acquire()
            self._lock = lock
            return recover(self.root), _count_attempts(self.root) + 1, lock.owner.token

        done, self.attempt, token = run_on_main("opening the root", take)
        for line in done:
            logger.info("%s: %s", self.root, line)
        views.check_same_storage(self.root, token)
        self._is_taken = True

    def release(self) -> None:
        """Give the root back. Not collective."""
        self._is_taken = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def check(self) -> None:
        """Make sure that the root is still held and may be saved into. By rank 0 for all.

        Raises:
            LockedError: another run has taken it.
            CallOrderError: it holds checkpoints, and this run has not resumed.
        """
        if self._lock is not None:
            self._lock.check()
        if self.may_save:
            return
        found = [each.path.name for each in find_checkpoints(self.root) if each.manifest]
        if found:
            raise CallOrderError(
                f"{self.root} holds checkpoints ({', '.join(found[-3:])}) and this run has not called resume(): saving "
                "would start a new branch and let the old one be pruned. Call resume() before training; "
                "resume(fresh=True) starts anew on purpose.",
                path=str(self.root),
            )
        self.may_save = True


def _count_attempts(root: Path) -> int:
    """Return the number of the last attempt that has saved into the root, what was set aside included."""
    manifests = [each.manifest for each in find_checkpoints(root) if each.manifest]
    for each in list_set_aside(root):
        with contextlib.suppress(AccelFsdpError):  # why it is there, perhaps
            manifests.append(read_manifest(each.path))
    return max((manifest.lineage.attempt for manifest in manifests), default=0)
