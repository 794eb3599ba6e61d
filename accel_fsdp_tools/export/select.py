"""Which state dict of a checkpoint is meant, and what is known about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ManifestError, UsageError
from ..extents import DiskTensor
from ..formats.checkpoint import MODEL, OPTIMIZER, Checkpoint, Section, name_section
from ..manifest import DIRECTORY, Manifest, ModelFacts, has_manifest, read_manifest
from ..names import clean_names
from ..opening import open_checkpoint

if TYPE_CHECKING:
    from ..formats.flat import Layout

CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of one model, in a checkpoint or in memory.

    Attributes:
        path: the path that was given.
        tensors: by their names in the model, wrapper prefixes removed.
        facts: recorded by this package, where the checkpoint is ours; only for a model as it was prepared.
        assets: a directory with `config.json` and the like that belongs to the checkpoint, if there is one.
    """

    path: Path
    tensors: Mapping[str, DiskTensor]
    facts: ModelFacts | None
    assets: Path | None


@dataclass(frozen=True)
class Selection(ModelTensors):
    """One state dict of a checkpoint.

    Attributes:
        directory: the checkpoint's own directory (its parent's for a path to an inner directory or file).
        section: where the tensors were found.
        manifest: ours, where the checkpoint is.
    """

    directory: Path
    checkpoint: Checkpoint
    section: Section
    manifest: Manifest | None


def select_model(
    path: str | Path, *, index: int | None = None, key: str | None = None, layout: Layout | None = None
) -> Selection:
    """Open a checkpoint and choose a model in it.

    Args:
        path: anything that `open_checkpoint` opens.
        index: which of several models; the only one where not given.
        key: the place of a state dict inside the files, as dotted keys (`ema`, `app.model`), instead of a model.
        layout: shapes of the model's tensors, for FSDP1's flat parameters.

    Raises:
        UsageError: there is no model, or more than one and none was named; the message lists what there is.
        Whatever `open_checkpoint` raises.
    """
    if index is not None and key is not None:
        raise UsageError("model index and key both say what to export; give one of them.")
    checkpoint = open_checkpoint(path, layout=layout)
    directory = _find_directory(checkpoint.path)
    manifest = _read_manifest(directory)
    if key is not None:
        section, tensors = _find_key(checkpoint, key)
        return Selection(Path(path), tensors, None, None, directory, checkpoint, section, manifest)
    section = _find_section(checkpoint, MODEL, index)
    place = _get_index(checkpoint.path, section)
    facts = None
    if manifest is not None and place < len(manifest.models):
        facts = manifest.models[place]
    assets = _find_assets(directory, place)
    return Selection(Path(path), section.tensors, facts, assets, directory, checkpoint, section, manifest)


def select_optimizer(path: str | Path, *, index: int | None = None) -> Selection:
    """Open a checkpoint and choose an optimizer in it. Raises as `select_model` does."""
    checkpoint = open_checkpoint(path)
    directory = _find_directory(checkpoint.path)
    section = _find_section(checkpoint, OPTIMIZER, index)
    manifest = _read_manifest(directory)
    return Selection(Path(path), section.tensors, None, None, directory, checkpoint, section, manifest)


def _find_directory(path: Path) -> Path:
    inner = path if path.is_dir() else path.parent
    return inner.parent if has_manifest(inner.parent) and not has_manifest(inner) else inner


def _get_index(path: Path, section: Section) -> int:
    """Return the model's place in the run; an inner directory of the second model is opened as the only one."""
    match = re.search(r"pytorch_model(?:_fsdp)?_(\d+)(?:_rank\d+)?(?:\.bin)?$", path.name)
    return int(match[1]) if match else section.index


def _read_manifest(directory: Path) -> Manifest | None:
    if not has_manifest(directory):
        return None
    try:
        return read_manifest(directory)
    except ManifestError as error:
        raise ManifestError(
            f"{error.message} An export proves what it writes by the manifest; check the checkpoint with accel-fsdp "
            "verify, or move the manifest away to export without that proof.",
            **error.facts,
        ) from error


def _find_assets(directory: Path, index: int) -> Path | None:
    ours = directory / DIRECTORY / f"model_{index}"
    if ours.is_dir():
        return ours
    if index == 0:
        for place in (directory, directory.parent):  # the Trainer may keep the config beside its checkpoints
            if (place / CONFIG_NAME).is_file():
                return place
    return None


def _find_section(checkpoint: Checkpoint, kind: str, index: int | None) -> Section:
    found = checkpoint.models if kind == MODEL else checkpoint.optimizers
    if index is not None:
        return checkpoint.get_section(name_section(kind, index))
    if len(found) == 1:
        return found[0]
    if found:
        choices = ", ".join(str(each.index) for each in found)
        raise UsageError(
            f"{checkpoint.path} holds {len(found)} {kind}s. Say which one with --model-index ({choices}).",
            path=str(checkpoint.path),
            actual=tuple(each.index for each in found),
        )
    raise UsageError(_explain_missing(checkpoint, kind), path=str(checkpoint.path))


def _explain_missing(checkpoint: Checkpoint, kind: str) -> str:
    if kind == OPTIMIZER:
        return f"{checkpoint.path} holds no optimizer state. Give the checkpoint's directory."
    if checkpoint.optimizers:
        inner = checkpoint.path.parent / checkpoint.path.name.replace("optimizer", "pytorch_model_fsdp")
        where = inner if inner.exists() and inner != checkpoint.path else "the checkpoint's directory"
        return (
            f"{checkpoint.path} holds an optimizer's state, not a model. Export the model from {where}, or write the "
            "optimizer's tensors for analysis with --state optimizer."
        )
    keys = sorted({str(each.key_path[0]) for each in checkpoint.tensors.values() if len(each.key_path) > 1})
    hint = f" It has tensors under {', '.join(keys[:8])}: name one with --key." if keys else ""
    return f"{checkpoint.path} holds no model that is recognised as one.{hint}"


def _find_key(checkpoint: Checkpoint, key: str) -> tuple[Section, dict[str, DiskTensor]]:
    """Find the tensors below a key path; a section's own name or the first keys of a nested state dict."""
    wanted = tuple(key.split("."))
    for section in checkpoint.sections:
        if section.name == key:
            return section, dict(section.tensors)
        found = {
            ".".join(map(str, tensor.key_path[len(wanted) :])): tensor
            for tensor in section.tensors.values()
            if len(tensor.key_path) > len(wanted) and tuple(map(str, tensor.key_path[: len(wanted)])) == wanted
        }
        if found:
            cleaned = clean_names(found, path=section.path)
            return section, {cleaned[name]: tensor for name, tensor in found.items()}
    names = sorted(
        {section.name for section in checkpoint.sections}
        | {str(tensor.key_path[0]) for tensor in checkpoint.tensors.values() if len(tensor.key_path) > 1}
    )
    raise UsageError(
        f"{checkpoint.path} has no tensors under the key {key!r}; it has {', '.join(names[:12]) or 'none'}.",
        path=str(checkpoint.path),
        actual=tuple(names),
    )
