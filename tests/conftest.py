"""How many tests run beside each other: more than there are cores in a whole run, one at a time in a part of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# One thread each, before anything imports torch: with more workers than cores they would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_MOST_WORKERS = 8  # each holds a process with torch and one that ranks are forked from: about a gigabyte


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The `auto` of `-n auto`; 0 runs the tests in this process."""
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    if all(path.is_file() for path in paths):
        return 0
    num_cores = len(os.sched_getaffinity(0))
    # Ranks wait for each other, for the disk and for what is to time out: alone, a test leaves half of two cores idle.
    return min(num_cores + num_cores // 2, _MOST_WORKERS) if num_cores > 1 else 0
