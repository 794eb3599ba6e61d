"""A save that goes on while training does: one thread per rank, at most one save at a time.

A process that ends, with or without an error, first finishes its save. Threads of different
ranks agree among themselves over a channel of their own and never wait for a training thread, so a rank may wait for
its own thread at any place without a deadlock.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from .errors import AccelFsdpError, RankFailedError, SaveDiscardedError
from .ranks import Channel, get_control_group, get_world_size, run_together, use_channel

logger = logging.getLogger(__name__)

_current: PendingSave | None = None  # the save in flight, or one that nobody has waited for yet
_channel: Channel | None = None
_num_channels = 0


class PendingSave:
    """A checkpoint that is being written in the background: what `save_state(..., async_save=True)` returns.

    Attributes:
        path: where the checkpoint will be.
        checkpoint_id: its id in the lineage.
        is_committed: it has its name now; reading it back and removing old ones may still be under way or have failed.
    """

    def __init__(self, path: Path, checkpoint_id: str) -> None:
        self.path, self.checkpoint_id, self.is_committed = path, checkpoint_id, False
        self._unwanted = threading.Event()
        self._error: BaseException | None = None
        self._is_settled = False
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether this rank's part is over, well or not. Not collective: ranks may differ for a moment."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def failure(self) -> BaseException | None:
        """What this rank's part has failed with; once `wait` has returned, what any has. Not collective."""
        return self._error

    def wait(self) -> Path:
        """Wait until the checkpoint is complete on every rank, and return its path. Collective.

        Raises:
            SaveDiscardedError: it was given up by `discard`.
            What the save has failed with, the same on every rank, with the rank and its cause. Nothing is left of it
            then, unless `is_committed`; earlier checkpoints are untouched and training can go on.
        """
        global _current
        self.wait_alone()
        if not self._is_settled:
            self._is_settled = True
            if _current is self:
                _current = None
            self._error = self._agree()
        if self._error is not None:
            raise self._error
        return self.path

    def wait_alone(self) -> None:
        """Wait until this rank's part is over, and raise nothing. Not collective."""
        if self._thread is not None:
            self._thread.join()

    def discard(self) -> None:
        """Give the save up, unless it is committed already, and wait until nothing is left of it. Collective.

        A file that is being written is finished first.
        """
        self._unwanted.set()
        try:
            self.wait()
        except SaveDiscardedError:
            logger.info("the save of %s was discarded", self.path)
        except AccelFsdpError as error:
            logger.warning("a save that was to be discarded had failed: %s", error)

    def require_wanted(self) -> None:
        """Stop here if the save was discarded. Called at points where all ranks learn what one of them raises.

        Raises:
            SaveDiscardedError: it was.
        """
        if self._unwanted.is_set():
            raise SaveDiscardedError(f"The save of {self.path} was discarded", path=str(self.path))

    def start(self, channel: Channel, work: Callable[[], None]) -> None:
        """Do `work` on a thread, with `channel` for its collectives. Not collective."""
        self._thread = threading.Thread(target=self._run, args=(channel, work), name="accel-fsdp-save", daemon=False)
        self._thread.start()

    def _run(self, channel: Channel, work: Callable[[], None]) -> None:
        try:
            with use_channel(channel):
                work()
        except BaseException as error:  # raised by wait(), on the training thread
            self._error = error

    def _agree(self) -> BaseException | None:
        """Return what any rank's thread has failed with, the same on every rank. Collective."""
        own = self._error

        def tell() -> None:
            if own is not None:
                raise own

        try:
            run_together("saving in the background", tell)
        except AccelFsdpError as error:
            _abandon_channel()
            if isinstance(error, SaveDiscardedError):
                return error
            rest = "was written, but then" if self.is_committed else "could not be written in the background"
            told = type(error)(f"{self.path.name} {rest}: {error.message}", **error.facts)
            # Where it happened the chain leads to the original.
            told.__cause__ = own.__cause__ if isinstance(own, RankFailedError) and own.__cause__ else own or error
            return told
        return None


def find_current() -> PendingSave | None:
    """Return the save in flight, or one that nobody has waited for since it ended. The same on every rank."""
    return _current


def wait_alone() -> None:
    """Wait for this rank's part of the save in flight, if there is one; an error of it is raised later by others.

    For whatever reads or removes checkpoints. Not collective.
    """
    if _current is not None:
        _current.wait_alone()


def finish_current() -> None:
    """Wait for the save in flight, if there is one. Collective.

    Raises:
        What it has failed with, if nobody was told yet.
    """
    if _current is not None:
        _current.wait()


def prepare_channel() -> Channel:
    """Return the channel for threads in the background, with its group made. Collective; no save may be in flight."""
    global _channel, _num_channels
    if _channel is None:
        _num_channels += 1
        _channel = Channel(f"background {_num_channels}")
    if get_world_size() > 1:
        with use_channel(_channel):
            get_control_group()
    return _channel


def _abandon_channel() -> None:
    """Let the next save have a channel of its own: on this one ranks may have stopped at different places."""
    global _channel
    if _channel is not None:
        _channel.close()
        _channel = None


def start(pending: PendingSave, channel: Channel, work: Callable[[], None]) -> None:
    """Begin to work on `pending`, which is the save in flight from now on. Not collective; all ranks do it."""
    global _current
    if _current is not None:
        raise RuntimeError(f"{_current.path} has not been waited for")
    _current = pending
    _finish_before_exit()
    pending.start(channel, work)


_is_registered = False


def _finish_before_exit() -> None:
    """Let a process that ends wait for its save, and say so if that has failed."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    atexit.register(_tell_at_exit)
    # The interpreter waits for the thread anyway, but before that it closes all thread pools, which the thread needs.
    # What is registered last is called first, and pools registered when they were imported.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(wait_alone)


def _tell_at_exit() -> None:
    """Say so if the last save has failed and nobody asked. Threads have ended by now."""
    if _current is not None and _current._error is not None:
        logger.error("%s was not saved: %s", _current.path, _current._error)
