"""`track`: follow an accelerator's dataloaders and updates from the start, so that a save knows where they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .progress import track as track_loaders
from .steps import follow_steps

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .progress import DataTracker


def track(accelerator: Accelerator) -> DataTracker:
    """Follow everything prepared so far; call it after `prepare` and before the first batch. Not collective.

    Afterwards it is known at any moment how many batches each loader has handed out and what the random generators
    were when it fetched them, which cannot be found out later. `Checkpointer` and `load_state` call it themselves:
    only a script that uses `save_state` without either needs to. Calling it again follows what was prepared since.
    """
    follow_steps(accelerator)
    return track_loaders(accelerator)
