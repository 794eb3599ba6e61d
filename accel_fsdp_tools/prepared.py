"""What a verification compares: the prepared models and optimizers, and by which names findings call their tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .formats.checkpoint import name_section
from .live import get_raw_optimizer
from .shards import iterate_local_shards

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

NameFilter = Callable[[str], bool]


@dataclass(frozen=True)
class Prepared:
    """Models and raw optimizers in Accelerate's order; optimizer i belongs to model i."""

    models: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...] = ()


def get_prepared(subject: Accelerator | torch.nn.Module, *, optimizers: bool = True) -> Prepared:
    """Return what an accelerator has prepared; of a lone model (wrapped in any way) that model. Not collective.

    Raises:
        UsageError: it is neither, or nothing was prepared.
    """
    import torch

    if isinstance(subject, torch.nn.Module):
        return Prepared((subject,))
    models = getattr(subject, "_models", None)
    if not models:
        raise UsageError(
            f"There is no model to verify: {type(subject).__name__} is neither a model nor an Accelerator with a "
            "prepared model. Call accelerator.prepare first, or give the model itself.",
            actual=type(subject).__name__,
        )
    raw: tuple[Any, ...] = tuple(map(get_raw_optimizer, subject._optimizers)) if optimizers else ()
    return Prepared(tuple(models), raw)


def label_tensor(kind: str, index: int, name: str) -> str:
    """Name a tensor in findings as `Checkpoint.tensors` does."""
    return name if (kind, index) == ("model", 0) else f"{name_section(kind, index)}.{name}"


def make_filter(pattern: str | None) -> NameFilter:
    """Return which names a pattern such as `*.layers.0.*` chooses; None chooses all."""
    if pattern is None:
        return lambda name: True

    def is_chosen(name: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")

    return is_chosen


def skip_aliases(model: torch.nn.Module, is_chosen: NameFilter) -> NameFilter:
    """Leave out the further names of tied parameters: they are one tensor, compared under its first name."""
    aliases = {alias for shard in iterate_local_shards(model) for alias in shard.aliases}

    def is_first_name(name: str) -> bool:
        parameter = name.removeprefix("state.").rpartition(".")[0] if name.startswith("state.") else name
        return parameter not in aliases and is_chosen(name)

    return is_first_name
