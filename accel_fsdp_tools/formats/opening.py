"""Finding out what a path is, and reading it: the one entrance to all formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointNotFoundError, UsageError
from .checkpoint import MODEL, MODEL_COPY, OPTIMIZER, OPTIMIZER_COPY, OTHER, Checkpoint, Section, name_section
from .sources import Options, Source, find_checkpoints_below, find_file_source, find_sources

if TYPE_CHECKING:
    from .flat import Layout

_COPIES = {MODEL: MODEL_COPY, OPTIMIZER: OPTIMIZER_COPY}
_ORDER = {MODEL: 0, OPTIMIZER: 1}


def read_checkpoint(
    path: str | Path,
    *,
    layout: Layout | Mapping[int, Layout] | None = None,
    keep_flat: bool = False,
) -> Checkpoint:
    """Open a checkpoint of any known format; nothing is loaded or executed.

    Args:
        path: a checkpoint's directory (Accelerate's, the Trainer's `checkpoint-N`, one with rank files), a directory
            inside it (`pytorch_model_fsdp_0`), a file, or a directory that holds one checkpoint. A path to one file
            of many stands for all of them.
        layout: names and shapes of the model's parameters and buffers in the order of `named_parameters()`, needed
            for FSDP1's flat parameters only; by model index where there are several models.
        keep_flat: return flat parameters as they are where no layout is given, instead of raising.

    Returns:
        Its sections: models first, then optimizers. Where a directory holds a model in two formats, the one that
        training resumes from is the model, the other a copy.

    Raises:
        CheckpointNotFoundError: there is nothing at `path`, or nothing that is known.
        UsageError: `path` holds several checkpoints; the message lists them.
        UnsupportedError: it can't be read without guessing; the message says what is needed.
        CheckpointIncompleteError, DamagedCheckpointError, UnsafePickleError, MismatchError: see the readers.
    """
    path = Path(path).absolute()
    options = Options(_by_index(layout), keep_flat)
    if path.is_file():
        return Checkpoint(path, tuple(_collect([find_file_source(path)], options)))
    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path} does not exist.", path=str(path))
    sources = find_sources(path)
    if not sources:
        path = _choose_below(path)
        sources = find_sources(path)
    return Checkpoint(path, tuple(_collect(sources, options)))


def _by_index(layout: Layout | Mapping[int, Layout] | None) -> dict[int, Layout]:
    by_index: dict[int, Layout] = {}
    by_name: dict[str, tuple[int, ...]] = {}
    for key, value in (layout or {}).items():
        if isinstance(key, int) and isinstance(value, Mapping):
            by_index[key] = value
        elif isinstance(key, str) and not isinstance(value, Mapping):
            by_name[key] = tuple(value)
        else:
            raise UsageError("layout: give {name: shape, ...}, or {model index: {name: shape, ...}}.", actual=key)
    return {**by_index, **({0: by_name} if by_name else {})}


def _choose_below(path: Path) -> Path:
    found = find_checkpoints_below(path)
    if len(found) == 1:
        return found[0]
    if found:
        names = sorted((str(each.relative_to(path)) for each in found), key=_natural)
        shown = ", ".join([*names[:1], "...", *names[-7:]] if len(names) > 9 else names)
        raise UsageError(
            f"{path} holds {len(found)} checkpoints; name one of them: {shown}",
            path=str(path),
            actual=tuple(names),
        )
    shown = ", ".join(sorted(each.name for each in path.iterdir())[:8]) or "nothing"
    raise CheckpointNotFoundError(
        f"{path} holds no checkpoint that is known here (it holds {shown}). Give a directory with .metadata, "
        "pytorch_model_fsdp_0/, pytorch_model_fsdp.bin, model.safetensors or rank files.",
        path=str(path),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _collect(sources: list[Source], options: Options) -> list[Section]:
    sections: dict[str, Section] = {}
    for source in sources:
        for section in source.read(options):
            kind, index = section.kind, section.index
            if section.name in sections:  # the same once more, in another format
                kind = _COPIES.get(kind, OTHER)
            while name_section(kind, index) in sections:
                index += 1
            sections[name_section(kind, index)] = replace(
                section, name=name_section(kind, index), kind=kind, index=index
            )
    return sorted(sections.values(), key=lambda section: (_ORDER.get(section.kind, 2), section.index))
