"""What tests of several modules share; and how many run beside each other, in a whole run some more than the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import use_engine
from tests.launches import CONFIG, EXAMPLE, run_script

# One thread each, before anything imports torch: with more workers than cores they would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_MOST_WORKERS = 8  # each holds a process with torch and one that ranks are forked from: about a gigabyte


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The `auto` of `-n auto`; 0, for a part of the tests, runs them in this process."""
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    if all(path.is_file() for path in paths):
        return 0
    num_cores = len(os.sched_getaffinity(0))
    # Ranks wait for each other, for the disk and for what is to time out: alone, a test leaves half of two cores idle.
    return min(num_cores + num_cores // 2, _MOST_WORKERS) if num_cores > 1 else 0


@pytest.fixture(scope="module", params=["kernel", "python"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run all tests of a module that use it with the compiled kernel and without."""
    with use_engine(request.param):
        yield request.param


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples/finetune_lm.py leaves when nothing happens to it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_script(*EXAMPLE, "--output-dir", folder, config=CONFIG, folder=tmp_path_factory.mktemp("ranks"))
    return folder
