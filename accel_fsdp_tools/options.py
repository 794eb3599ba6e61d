"""Where a script sets other options of an optimizer than the checkpoint holds: the checkpoint's win, and it is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .live import get_raw_optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator

Options = tuple[tuple[Mapping[str, Any], ...], ...]
"""By optimizer and parameter group: the options that are plain values."""

_PLAIN = (bool, int, float, str, tuple, type(None))


def read_options(accelerator: Accelerator) -> Options:
    """Return the options of all optimizers as they are now. Not collective."""
    return tuple(
        tuple(
            {name: _simplify(value) for name, value in group.items() if name != "params"} for group in raw.param_groups
        )
        for raw in map(get_raw_optimizer, accelerator._optimizers)
    )


def _simplify(value: Any) -> Any:
    if hasattr(value, "numel"):  # a learning rate may be a tensor
        return value.item() if value.numel() == 1 else None
    if isinstance(value, list):
        return tuple(value)
    return value if isinstance(value, _PLAIN) else repr(value)


def list_overridden(script: Options, loaded: Options) -> list[str]:
    """Say which options of the script a load has replaced, with both values.

    A learning rate that a scheduler moves is told by the one that it started from.
    """
    texts = []
    for index, groups in enumerate(zip(script, loaded, strict=True)):
        for number, (mine, theirs) in enumerate(zip(*groups, strict=False)):
            moves = "initial_lr" in mine and "initial_lr" in theirs
            for name in mine.keys() & theirs.keys() - ({"lr"} if moves else set()):
                if mine[name] != theirs[name]:
                    texts.append(
                        f"optimizer {index}, parameter group {number}: {name} is {theirs[name]!r} as in the "
                        f"checkpoint, not {mine[name]!r} as in this script; set it after the load if the new value is "
                        "wanted"
                    )
    return sorted(texts)
