"""One small number per step that all ranks agree on, read when the next step is over.

A reduction is begun at one step and read at the next, so that its way over the network hides behind the computation.
Where steps are long, that would cost more of the time until a machine is taken away than it saves: there the ranks
wait for it, a fraction of a millisecond. Which of the two it is follows from the longest step of all ranks, which
travels with the number, so that they never differ. It shares the control group with all that this thread asks the
others meanwhile: every rank begins its messages in the same order.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

from ..ranks import get_control_group, get_world_size, naming_missing

LONG_STEP_S = 1.0
_LAST_WAIT_S = 2.0


class Agreement:
    """The largest of all ranks' numbers. Every method but `close` is collective."""

    def __init__(self) -> None:
        self._work: Any = None
        self._group: Any = None  # that it was begun on
        self._values: Any = None  # [number, length of the step in ms]; must stay alive while the reduction runs
        self._last: float | None = None
        self._waits = False

    def exchange(self, number: int) -> int:
        """Tell this rank's number, at the end of a step; returns the largest of those told at the step before.

        Where steps are long, of those told at this one.
        """
        now = time.monotonic()
        length_s = 0.0 if self._last is None else now - self._last
        self._last = now
        if get_world_size() == 1:
            return number
        agreed = self._read()
        self._begin(number, length_s)
        return max(agreed, self._read()) if self._waits else agreed

    def ask(self, number: int) -> int:
        """Tell this rank's number and return the largest, waiting for it."""
        if get_world_size() == 1:
            return number
        agreed = self._read()
        self._begin(number, 0.0)
        return max(agreed, self._read())

    def forget_time(self) -> None:
        """What lies between the last step and the next is no step: a save, an evaluation."""
        self._last = None

    def _begin(self, number: int, length_s: float) -> None:
        import torch
        import torch.distributed as dist

        with naming_missing("agreeing on whether to go on"):
            self._group = get_control_group()
            self._values = torch.tensor([number, int(length_s * 1000)], dtype=torch.int64)
            self._work = dist.all_reduce(self._values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _read(self) -> int:
        work, self._work = self._work, None
        if work is None:
            return 0
        with naming_missing("agreeing on whether to go on"):
            if get_control_group() is not self._group:  # broken meanwhile, which all ranks know: what was told is lost
                return 0
            work.wait()
        number, length_ms = self._values.tolist()
        self._waits = length_ms >= LONG_STEP_S * 1000
        return int(number)

    def close(self, *, wait: bool) -> None:
        """Stop. Not collective.

        Args:
            wait: let the reduction that was begun last end before, for a moment: other ranks are about to begin it.
        """
        work, self._work = self._work, None
        if work is not None and wait:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=_LAST_WAIT_S))
