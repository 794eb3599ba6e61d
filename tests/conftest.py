"""What tests of several modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launches import EXAMPLE, ON_TWO_CPUS, run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples/finetune_lm.py leaves when nothing happens to it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = run(*ON_TWO_CPUS, *EXAMPLE, "--output-dir", folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder
