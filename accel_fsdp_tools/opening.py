"""`open_checkpoint`: any checkpoint, ours or not, as sections of tensors that say where their bytes are. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ManifestError
from .formats.checkpoint import Checkpoint
from .formats.opening import read_checkpoint
from .manifest import ModelFacts, has_manifest, read_manifest

if TYPE_CHECKING:
    from .formats.flat import Layout


def open_checkpoint(
    path: str | Path,
    *,
    layout: Layout | Mapping[int, Layout] | None = None,
    keep_flat: bool = False,
) -> Checkpoint:
    """Open a checkpoint of any known format; nothing is loaded, nothing in it is executed.

    What our manifest says about the model is used where FSDP1's flat parameters need it; all else is as
    `formats.opening.read_checkpoint` describes it, arguments and errors included.

    Returns:
        `tensors` by name (the first model's under its own names, those of other sections behind `<section>.`), each
        with dtype, shape and extents; `sections` for models and optimizers one by one.
    """
    if layout is None:
        layout = _find_layouts(Path(path))
    return read_checkpoint(path, layout=layout, keep_flat=keep_flat)


def make_layout(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model in its order, each group of ties once."""
    order = {tensor.fqn: index for index, tensor in enumerate(facts.tensors)}
    tied = {name for group in facts.ties for name in sorted(group, key=lambda each: order.get(each, -1))[1:]}
    return {tensor.fqn: tensor.shape for tensor in facts.tensors if tensor.fqn not in tied}


def _find_layouts(path: Path) -> dict[int, dict[str, tuple[int, ...]]] | None:
    directory = path if path.is_dir() else path.parent
    if not has_manifest(directory):
        return None
    try:
        models = read_manifest(directory).models
    except ManifestError:
        return None  # readers need it for flat parameters only, and say so; judging a manifest is `verify`'s part
    return {index: make_layout(facts) for index, facts in enumerate(models)}
