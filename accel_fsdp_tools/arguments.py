"""What a `Checkpointer` is given, checked and put into the form that it uses. Nothing here is collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError
from .retention import KeepBest, RetentionPolicy, make_policy


def choose_policy(
    keep_last: int | None,
    keep_every: int | None,
    keep_best: KeepBest | Sequence[Any] | None,
    keep_every_s: float | None,
    retention: RetentionPolicy | None,
) -> RetentionPolicy | None:
    """Make one policy of the `keep_` arguments, or take the one that is given; None never removes anything."""
    if retention is None:
        rules = make_policy(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, keep_every_s=keep_every_s)
        return None if keep_last is None else rules  # all the newest are all there are
    if not isinstance(retention, RetentionPolicy):
        raise UsageError(
            f"retention is {retention!r:.80}; give a policy of accel_fsdp_tools.retention (KeepLast(3) | "
            "KeepEvery(1000)), or an object with its method choose_kept",
            actual=retention,
        )
    if (keep_every, keep_best, keep_every_s) != (None, None, None):
        raise UsageError("retention replaces the keep_ arguments; give the one or the others")
    return retention


def check_positive(name: str, value: Any, kinds: Any) -> None:
    """Raise `UsageError` unless `value` is None or a positive number of one of `kinds`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0 or not math.isfinite(value):
        raise UsageError(f"{name} is {value!r}; give a positive number, or None", actual=value)


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise `UsageError` unless `value` is one of those that are allowed."""
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; use one of {', '.join(allowed)}", actual=value)


def check_root(root: str | Path) -> Path:
    """Return the absolute path of a directory for checkpoints, which need not be there; raise where a file is."""
    path = Path(root).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; give a directory for the checkpoints", path=str(path))
    return path


def to_numbers(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Turn metrics into what JSON can hold; a tensor is read only here, so that step() never waits for a GPU."""
    numbers: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"The metric {name!r} is {type(value).__name__} {value!r:.60}; give numbers or one-element tensors"
            ) from error
        numbers[name] = number if math.isfinite(number) else str(number)
    return numbers
