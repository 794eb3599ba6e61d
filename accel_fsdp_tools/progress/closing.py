"""Tell a pass that was left by an exception from one that was left by `break`.

Both close the loader's iterator, and Python doesn't say why. But a save made while that exception is being handled
(an emergency save in `except` or `finally`, or in a context manager's exit) can look at the exception's traceback:
if it passes through the frame that held the iterator, at the very instruction where that frame was when the
iterator closed, the pass was interrupted and has not ended.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType

_MAX_DEPTH = 16

Holders = tuple[tuple[int, int], ...]


def note_holders(frame: FrameType | None) -> Holders:
    """Identify the frames that may have held an iterator that is being closed, keeping none of them alive.

    These are the first frame from `frame` outwards that is no generator, and the generators before it (a progress
    bar holds the loader's iterator, and the user's loop holds the progress bar).
    """
    holders: list[tuple[int, int]] = []
    while frame is not None and len(holders) < _MAX_DEPTH:
        holders.append((id(frame), frame.f_lasti))
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            break
        frame = frame.f_back
    return tuple(holders)


def is_being_handled(holders: Holders) -> bool:
    """Whether the exception being handled now passed through one of these frames at that instruction."""
    for error in _list_handled():
        trace = error.__traceback__
        while trace is not None:
            if (id(trace.tb_frame), trace.tb_lasti) in holders:
                return True
            trace = trace.tb_next
    return False


def _list_handled() -> Iterator[BaseException]:
    error = sys.exc_info()[1]
    for _ in range(_MAX_DEPTH):
        if error is None:
            return
        yield error
        error = error.__context__
