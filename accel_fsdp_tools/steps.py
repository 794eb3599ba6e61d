"""How many updates the optimizers of an accelerator have made, and whether gradients wait for one."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .live import get_raw_optimizer, has_stepped

if TYPE_CHECKING:
    from accelerate import Accelerator


class StepCounter:
    """Counts updates of the first prepared optimizer.

    `count` is None when it cannot be known: the optimizer had made updates before anyone counted. `num_pending` counts
    the calls of `accelerator.backward` since the last update of any optimizer.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self.num_pending = 0
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
        self.count = None if has_stepped(raw) else 0
        raw.register_step_post_hook(self._notice)
        for other in accelerator._optimizers:
            get_raw_optimizer(other).register_step_post_hook(self._forget_pending)
        self._count_backwards(accelerator)

    def _notice(self, *_: Any) -> None:
        if self.count is not None and not self._paused:
            self.count += 1

    def _forget_pending(self, *_: Any) -> None:
        self.num_pending = 0

    def _count_backwards(self, accelerator: Accelerator) -> None:
        """Count the calls of `accelerator.backward`: a script may accumulate gradients without `accumulate`."""
        if "backward" in vars(accelerator):
            return
        original = accelerator.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.num_pending += 1
            return original(*args, **kwargs)

        accelerator.backward = backward

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
