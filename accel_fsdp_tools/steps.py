"""How many updates the optimizers of an accelerator have made, counted where they happen."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .live import get_raw_optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator


class StepCounter:
    """Counts updates of the first prepared optimizer.

    `count` is None when it cannot be known: the optimizer had made updates before anyone counted.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self._paused = False
        self._followed: weakref.ref[Any] | None = None

    def follow(self, accelerator: Accelerator) -> None:
        """Start counting, if there is an optimizer and it is not followed yet."""
        if not accelerator._optimizers:
            return
        raw = get_raw_optimizer(accelerator._optimizers[0])
        if self._followed is not None and self._followed() is raw:
            return
        self._followed = weakref.ref(raw)
        self.count = None if raw.state else 0
        raw.register_step_post_hook(self._notice)

    def _notice(self, *_: Any) -> None:
        if self.count is not None and not self._paused:
            self.count += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count for a while: torch takes dummy steps to create optimizer state."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


_counters: weakref.WeakKeyDictionary[Any, StepCounter] = weakref.WeakKeyDictionary()


def follow_steps(accelerator: Accelerator) -> StepCounter:
    """Return the accelerator's counter, following its first optimizer from now on."""
    counter = _counters.setdefault(accelerator, StepCounter())
    counter.follow(accelerator)
    return counter
