"""Checkpoints of one file per rank as sections: opens the files of all ranks and has them put together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointIncompleteError
from ..extents import DiskTensor
from .checkpoint import MODEL, KeyPath, Section, name_section
from .flat import Layout, explain_missing_layout, find_pieces, is_flat_name, join_pieces, map_flat_tensors
from .rank_files import RankFamily, RankState, assemble
from .sharded import get_stated_world_size
from .state_dicts import StateDict, name_tensors, split_state
from .state_files import StateFile, name_values, open_state_file

FORMAT = "rank files"
FLAT_FORMAT = "fsdp1 flat rank files"


def read_rank_files(
    family: RankFamily,
    *,
    kind: str | None = None,
    index: int = 0,
    layout: Layout | None = None,
    keep_flat: bool = False,
) -> list[Section]:
    """Read the files that all ranks wrote.

    Args:
        family: the files.
        kind: what a file is if it holds one state dict.
        index: the sections' place among those of their kind.
        layout: names and shapes of the model, where they are known.
        keep_flat: return FSDP1's flat parameters as they are where no layout is known, instead of raising.

    Raises:
        CheckpointIncompleteError: a rank's file is missing.
        UnsupportedError: what the files hold can't be put together without guessing; the message says what is needed.
        DamagedCheckpointError, UnsafePickleError, MismatchError: see `assemble`, `load_pickle` and `flat`.
    """
    opened = {rank: open_state_file(path) for rank, path in family.files.items()}
    states = {rank: split_state(file.value, where=file.path, kind=kind) for rank, file in opened.items()}
    world_size = _find_world_size(family, states)
    leftovers = tuple(opened[rank].path for rank in opened if rank >= world_size)
    missing = [rank for rank in range(world_size) if rank not in opened]
    if missing:
        path = next(iter(family.files.values()))
        raise CheckpointIncompleteError(
            f"{path.parent}: of {world_size} ranks' files ({family.stem}) {_list_ranks(missing)} missing. Copy them "
            "here, or use another checkpoint.",
            path=str(path.parent),
            rank=missing[0],
            expected=world_size,
            actual=len(opened),
        )
    sections = []
    for each in dict.fromkeys(name for rank in range(world_size) for name in states[rank]):
        by_rank = {rank: states[rank].get(each, StateDict(each)) for rank in range(world_size)}
        files = {rank: opened[rank] for rank in range(world_size)}
        reader = _Reader(files, by_rank, layout if each == MODEL else None, keep_flat)
        sections.append(reader.build(each, index, leftovers))
    return sections


def _list_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if ranks[8:] else "")
    return f"that of rank {shown} is" if len(ranks) == 1 else f"those of ranks {shown} are"


def _find_world_size(family: RankFamily, states: Mapping[int, Mapping[str, StateDict]]) -> int:
    """Return how many ranks wrote the files: as their names say, or the tensors of the first, or their own number."""
    if family.world_size is not None:
        return family.world_size
    first = states[min(states)]
    for state in first.values():
        for value in state.tensors.values():
            stated = get_stated_world_size(value)
            if stated is not None:
                return stated
        stated = next((value for path, value in state.values.items() if path[-1] == "world_size"), None)
        if type(stated) is int and 0 < stated < 1 << 20:
            return stated
    return max(states) + 1


class _Reader:
    """One state dict, as all ranks hold it."""

    def __init__(
        self,
        files: Mapping[int, StateFile],
        states: Mapping[int, StateDict],
        layout: Layout | None,
        keep_flat: bool,
    ) -> None:
        self.files = files
        self.states = states
        self.layout = layout
        self.keep_flat = keep_flat
        self.state = RankState(files, {rank: state.tensors for rank, state in states.items()})
        self.is_flat = False

    def build(self, kind: str, index: int, leftovers: tuple[str, ...]) -> Section:
        paths: dict[KeyPath, Any] = {}
        values: dict[KeyPath, Any] = {}
        for state in self.states.values():
            for path, tensor in state.tensors.items():
                paths.setdefault(path, tensor)
            for path, value in state.values.items():
                values.setdefault(path, value)
        where = self.files[0].path
        names = name_tensors(kind, paths, where=where)
        tensors = self._read(paths, names)
        return Section(
            name=name_section(kind, index),
            kind=kind,
            index=index,
            format=FLAT_FORMAT if self.is_flat else FORMAT,
            path=where if len(self.files) == 1 else str(Path(where).parent),
            tensors=tensors,
            values=name_values(values),
            zips=tuple(file.range for file in self.files.values()),
            files=tuple(file.path for file in self.files.values()),
            leftovers=leftovers,
            notes=tuple(self.state.notes),
            world_size=len(self.files),
            is_flat=self.is_flat and self.layout is None,
        )

    def _read(self, paths: Mapping[KeyPath, Any], names: Mapping[KeyPath, str]) -> dict[str, DiskTensor]:
        flat = {names[path] for path in paths if is_flat_name(path[-1])}
        self.is_flat = bool(flat)
        if flat and self.layout is None and not self.keep_flat:
            raise explain_missing_layout(self.state.path, names.values())
        pieces = find_pieces(self.state)
        whole = {path: name for path, name in names.items() if path not in pieces}
        tensors = assemble(self.state, whole, self.layout)
        if self.layout is None or not flat:
            return tensors
        if pieces:
            rest = {name: tensor for name, tensor in tensors.items() if name not in flat}
            return {**join_pieces(self.state, names, pieces, self.layout), **rest}
        return map_flat_tensors(tensors, self.layout)
