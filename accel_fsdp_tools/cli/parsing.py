"""Values of arguments that several commands take."""

from __future__ import annotations

import argparse


def parse_threads(text: str) -> int:
    """Return a number of threads.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; give 1 or more")
    return int(text)
