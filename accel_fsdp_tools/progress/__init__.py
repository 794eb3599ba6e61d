"""Exact data progress of the dataloaders that Accelerate prepared.

`track(accelerator)` follows every prepared loader from its first batch on. `DataTracker.capture` says where each
of them stands, `DataTracker.restore` puts them back there: the same loader objects, with all their settings,
continue with the batch that was next, and the epochs after it are whole and in the right order. Section 5 of
`docs/design.md` says what has to be true; `resumable.py` does it; `kinds.py` is where further kinds of loaders are
added.
"""

from .carry import Brief, Carried, Change
from .records import LoaderOutcome, LoaderPosition, LoaderProgress
from .tracker import DataTracker, check_data_resume, track

__all__ = [
    "Brief",
    "Carried",
    "Change",
    "DataTracker",
    "LoaderOutcome",
    "LoaderPosition",
    "LoaderProgress",
    "check_data_resume",
    "track",
]
