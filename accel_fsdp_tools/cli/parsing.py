"""Numbers as values of arguments: each returns one, or raises `argparse.ArgumentTypeError`, which argparse shows."""

from __future__ import annotations

import argparse
import math


def parse_count(text: str) -> int:
    """Return a whole number, 1 or more."""
    return _parse_whole(text, 1)


def parse_index(text: str) -> int:
    """Return a whole number, 0 or more."""
    return _parse_whole(text, 0)


def _parse_whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, {least} or more")
    return int(text)


def parse_amount(text: str) -> float:
    """Return a finite number, 0 or more."""
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give 0 or more")
    return number


def parse_positive(text: str) -> float:
    """Return a finite number above 0."""
    number = parse_amount(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give more than 0")
    return number
