"""Signals that ask a run to stop, noticed at once and acted upon at a step.

The handler only sets a flag, which `RunGuard` takes to the other ranks. A handler in Python runs when the main thread
comes back from C, which it may never do, so a thread hears of every signal through Python's wake-up descriptor as well.
It stops the process at once if a signal is repeated, and after some seconds if another rank of this host has died: then
no step will ever end.

Repeated means more than `REPEAT_S` later: batch systems signal every process, and torchrun passes on what it gets, so
that one request comes twice.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ..errors import UsageError
from .exits import EXIT_SIGNAL
from .watchdog import dump_stacks, tell

logger = logging.getLogger(__name__)

DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1")
REPEAT_S = 3.0
LAST_WORDS_S = 10.0  # for the main thread to raise by itself once a rank is lost: gloo breaks, and then it is named
_CANNOT_BE_CAUGHT = ("SIGKILL", "SIGSTOP")
_END = 0  # no signal has this number


def parse_signals(names: Any) -> tuple[signal.Signals, ...]:
    """Return the signals by these names.

    Raises:
        UsageError: there is no such signal, or it can't be caught.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise UsageError(f'on_signal is {names!r}; give names, such as ("SIGTERM", "SIGUSR1"), or () for none')
    found = []
    for name in names:
        if not isinstance(name, str) or name not in signal.Signals.__members__ or name in _CANNOT_BE_CAUGHT:
            raise UsageError(
                f"on_signal holds {name!r}, which is no signal that can be caught; give names such as SIGTERM, "
                "SIGUSR1, SIGUSR2 or SIGINT",
                actual=name,
            )
        found.append(signal.Signals[name])
    return tuple(dict.fromkeys(found))


class SignalWatch:
    """Watches some signals from `install` to `restore`. Nothing here is collective.

    Args:
        signals: which.
        find_lost: says which rank of this host has died, None if none has. Called on a thread.
        clean_up: done before the process ends at once, for a second at most. Called on a thread, with the exit code.

    Attributes:
        received: the first signal that came, None if none did.
    """

    def __init__(
        self,
        signals: tuple[signal.Signals, ...],
        *,
        find_lost: Callable[[], str | None] = lambda: None,
        clean_up: Callable[[int, str], None] = lambda code, text: None,
    ) -> None:
        self.received: signal.Signals | None = None
        self._signals, self._find_lost, self._clean_up = signals, find_lost, clean_up
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._previous_wakeup = -1
        self._calm_until: float | None = None  # until then a signal is the one that has come already
        self._leaving_with: int | None = None

    def install(self) -> None:
        """Begin to watch. Where it can't be done, since this is no main thread, that is logged."""
        if not self._signals or self._pipe is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "%s cannot be watched: Python lets only the main thread of a process do that, and this is %s. A signal "
                "that reaches another rank still makes all of them save.",
                ", ".join(each.name for each in self._signals),
                threading.current_thread().name,
            )
            return
        self._pipe = os.pipe()
        for descriptor in self._pipe:
            os.set_inheritable(descriptor, False)
        os.set_blocking(self._pipe[1], False)
        threading.Thread(target=self._listen, args=self._pipe[:1], name="accel-fsdp-signals", daemon=True).start()
        self._previous_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for each in self._signals:
            self._previous[each] = signal.signal(each, self._handle)
        _watching.add(self)
        atexit.register(self._keep_exit_code)

    def begin_to_leave(self, exit_code: int) -> None:
        """Everything is saved: from now on a signal finds the process on its way out, with this exit code."""
        self._leaving_with = exit_code
        self._calm_until = time.monotonic() + REPEAT_S

    def restore(self) -> None:
        """Put the handlers back that were there before, unless somebody has replaced these meanwhile.

        A process that leaves keeps them, or the launcher's signal, which comes when the first rank has ended, would
        change the exit code of the others.
        """
        if self._pipe is None or self._leaving_with is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning("the handlers of signals stay: only the main thread can put the earlier ones back")
            return
        self._put_back()
        os.write(self._pipe[1], bytes([_END]))
        os.close(self._pipe[1])
        self._pipe = None

    def _keep_exit_code(self) -> None:
        """Python puts the defaults back before it takes its modules down, which lasts: a signal then would kill."""
        for each in self._signals:
            if self._leaving_with is not None and signal.getsignal(each) == self._handle:
                signal.signal(each, signal.SIG_IGN)

    def _put_back(self) -> None:
        _watching.discard(self)
        atexit.unregister(self._keep_exit_code)
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
        found = signal.set_wakeup_fd(self._previous_wakeup)
        if self._pipe is not None and found != self._pipe[1]:  # somebody else's by now
            signal.set_wakeup_fd(found)

    def forget_in_child(self) -> None:
        """A forked child is no rank: neither a signal to it nor its end must count as one to this process."""
        signal.set_wakeup_fd(-1)
        self._pipe = None
        for each in self._signals:
            # What says "stop soon" is sent to every process of a job: it must not kill the workers of a dataloader,
            # whose rank needs them until the end of the step.
            signal.signal(each, signal.SIG_DFL if each in (signal.SIGTERM, signal.SIGINT) else signal.SIG_IGN)

    # -- when one comes -----------------------------------------------------------------------------------------

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        previous = self._previous.get(number)
        if not callable(previous) or previous is signal.default_int_handler:
            return
        try:
            previous(number, frame)
        except BaseException as error:  # it wants to end the process: not before everything is saved
            tell(f"the earlier handler of {signal.Signals(number).name} raised {error!r}, which is held back")

    def _listen(self, descriptor: int) -> None:
        while True:
            for number in os.read(descriptor, 64):
                if number == _END:
                    os.close(descriptor)
                    return
                if self._previous_wakeup >= 0:
                    with contextlib.suppress(OSError):
                        os.write(self._previous_wakeup, bytes([number]))
                if number in self._signals:
                    self._notice(signal.Signals(number))

    def _notice(self, received: signal.Signals) -> None:
        now = time.monotonic()
        if self._calm_until is None:
            self._calm_until = now + REPEAT_S
            self.received = self.received or received
            lost = self._find_lost()
            if lost is None:
                tell(f"{received.name}: this process saves at the end of its step, with all ranks, and ends")
            else:
                threading.Thread(target=self._end_soon, args=(received, lost), daemon=True).start()
        elif now > self._calm_until:
            self.stop_at_once(received, f"{received.name} once more: stopping at once, without a checkpoint")

    def _end_soon(self, received: signal.Signals, lost: str) -> None:
        tell(f"{received.name}: {lost}, so no step will end and nothing can be saved; stopping")
        time.sleep(LAST_WORDS_S)
        dump_stacks()
        self.stop_at_once(received, f"{lost}; this process did not end by itself within {LAST_WORDS_S:g} s of that")

    def stop_at_once(self, received: signal.Signals, text: str) -> None:
        """End the process now, wherever its main thread is."""
        code = EXIT_SIGNAL + received if self._leaving_with is None else self._leaving_with
        if self._leaving_with is None:
            tell(text)
            cleaning = threading.Thread(target=self._clean_up, args=(code, text), daemon=True)
            cleaning.start()
            cleaning.join(1.0)
        os._exit(code)


_watching: weakref.WeakSet[SignalWatch] = weakref.WeakSet()


def _forget_in_child() -> None:
    for each in list(_watching):
        each.forget_in_child()
    _watching.clear()


os.register_at_fork(after_in_child=_forget_in_child)
