"""Child processes, in which transformers is asked what needs torch."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])


def make_environment() -> dict[str, str]:
    """Return the environment of a child that finds this package where this process has found it, installed or not."""
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
