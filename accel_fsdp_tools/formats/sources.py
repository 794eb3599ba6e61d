"""What a directory holds, by the names that Accelerate, the Trainer, transformers and common scripts give.

Only the reader of what is there is loaded: all of them take longer to load than a small checkpoint takes to read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint import METADATA_NAME, MODEL, OPTIMIZER, Section

if TYPE_CHECKING:
    from .flat import Layout


@dataclass(frozen=True)
class Options:
    """What a caller knows or wants: layouts by model index, and whether flat parameters may stay flat."""

    layouts: Mapping[int, Layout]
    keep_flat: bool = False


@dataclass(frozen=True)
class Source:
    """Something in a directory that a reader can read: what it is by its name, and how to read it."""

    kind: str | None
    index: int
    label: str
    read: Callable[[Options], list[Section]]


def _number(text: str | None) -> int:
    return int(text) if text else 0


_DCP_NAMES = ((re.compile(r"pytorch_model_fsdp_(\d+)"), MODEL), (re.compile(r"optimizer_(\d+)"), OPTIMIZER))

# In the order of preference: where a directory holds a model twice, the one that training resumes from comes first.
_FILES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"pytorch_model_fsdp(?:_(\d+))?\.bin"), MODEL),
    (re.compile(r"model(?:_(\d+))?\.safetensors"), MODEL),
    (re.compile(r"model(?:_(\d+))?\.safetensors\.index\.json"), MODEL),
    (re.compile(r"pytorch_model(?:_(\d+))?\.bin"), MODEL),
    (re.compile(r"pytorch_model(?:_(\d+))?\.bin\.index\.json"), MODEL),
    (re.compile(r"adapter_model(?:_(\d+))?\.(?:safetensors|bin)"), MODEL),
    (re.compile(r"optimizer(?:_(\d+))?\.bin"), OPTIMIZER),
    (re.compile(r"optimizer(?:_(\d+))?\.pt"), OPTIMIZER),
)

_RANKS: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (re.compile(r"pytorch_model_fsdp(?:_(?P<index>\d+))?_rank(?P<rank>\d+)\.bin"), MODEL),
    (re.compile(r"optimizer(?:_(?P<index>\d+))?_rank(?P<rank>\d+)\.bin"), OPTIMIZER),
    (re.compile(r"model_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt"), MODEL),
    (re.compile(r"optim_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt"), OPTIMIZER),
    (re.compile(r"model_pt_rank_(?P<rank>\d+)\.pt"), None),
)


def find_sources(directory: Path) -> list[Source]:
    """Return what can be read in `directory` itself, the preferred one of each kind and index first."""
    if (directory / METADATA_NAME).is_file():
        kind = next((kind for pattern, kind in _DCP_NAMES if pattern.fullmatch(directory.name)), None)
        return [_make_dcp_source(directory, kind, 0)]
    entries = sorted(directory.iterdir())
    return [
        *_find_dcp_directories(entries),
        *_find_rank_families(directory, entries),
        *_find_files(entries),
    ]


def _find_dcp_directories(entries: list[Path]) -> Iterator[Source]:
    for pattern, kind in _DCP_NAMES:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match and entry.is_dir():
                yield _make_dcp_source(entry, kind, int(match[1]))


def _make_dcp_source(path: Path, kind: str | None, index: int) -> Source:
    def read(options: Options) -> list[Section]:
        from .dcp_reader import read_dcp

        return read_dcp(path, kind=kind, index=index)

    return Source(kind, index, path.name, read)


def _find_files(entries: list[Path]) -> Iterator[Source]:
    for pattern, kind in _FILES:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match and entry.is_file():
                yield _make_file_source(entry, kind, _number(match[1]))


def _make_file_source(path: Path, kind: str | None, index: int) -> Source:
    def read(options: Options) -> list[Section]:
        if ".safetensors" in path.name:
            from .safetensors_reader import read_safetensors

            return [read_safetensors(path, kind=kind or MODEL, index=index)]
        from .full_reader import read_full_file

        return read_full_file(path, kind=kind, index=index)

    return Source(kind, index, path.name, read)


def _find_rank_families(directory: Path, entries: list[Path]) -> Iterator[Source]:
    for pattern, kind in _RANKS:
        matches = [match for entry in entries if (match := pattern.fullmatch(entry.name))]
        # pytorch_model_fsdp_rank0.bin and pytorch_model_fsdp_0_rank0.bin are two families of index 0
        stems = {match.groupdict().get("index"): match for match in matches}
        for written, match in stems.items():
            yield _make_rank_source(directory, pattern, match, written, kind)


def _make_rank_source(
    directory: Path,
    pattern: re.Pattern[str],
    match: re.Match[str],
    written: str | None,
    kind: str | None,
) -> Source:
    index = _number(written)
    begin, end = match.span("rank")
    stem = f"{match.string[:begin]}*{match.string[end:]}"

    def read(options: Options) -> list[Section]:
        from .rank_files import find_family
        from .rank_reader import read_rank_files

        family = find_family(directory, pattern, stem, index=written)
        return read_rank_files(
            family,
            kind=kind,
            index=index,
            layout=options.layouts.get(index),
            keep_flat=options.keep_flat,
        )

    return Source(kind, index, stem, read)


def find_file_source(path: Path) -> Source:
    """Return what to read for the path of one file: the whole that it is part of, or the file alone."""
    if path.name == METADATA_NAME or path.suffix == ".distcp":
        (source,) = find_sources(path.parent)
        return source
    for pattern, kind in _RANKS:
        match = pattern.fullmatch(path.name)
        if match:
            return _make_rank_source(path.parent, pattern, match, match.groupdict().get("index"), kind)
    kind = next((kind for pattern, kind in _FILES if pattern.fullmatch(path.name)), None)
    return _make_file_source(path, kind, 0)


def find_checkpoints_below(directory: Path, depth: int = 2) -> list[Path]:
    """Return the directories below that hold something to read; not hidden ones, nor any inside those found."""
    found: list[Path] = []
    for entry in sorted(directory.iterdir()):
        if not entry.is_dir() or entry.name.startswith("."):
            continue
        if find_sources(entry):
            found.append(entry)
        elif depth > 1:
            found += find_checkpoints_below(entry, depth - 1)
    return found
