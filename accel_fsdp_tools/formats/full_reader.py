"""Whole state dicts in one file of `torch.save` (or several with an index), read by byte range, not loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import CheckpointIncompleteError, DamagedCheckpointError, UnsupportedError
from ..extents import DiskTensor
from .checkpoint import MODEL, Section, name_section
from .pickled import TensorRef
from .safetensors_reader import read_weight_map
from .state_dicts import StateDict, name_tensors, split_state
from .state_files import StateFile, make_whole_tensor, name_values, open_state_file

FORMAT = "torch file"


def read_full_file(path: str | Path, *, kind: str | None = None, index: int = 0) -> list[Section]:
    """Read a file such as `pytorch_model_fsdp.bin`, `optimizer.bin`, or one that holds several state dicts.

    Tied parameters and views share bytes of one storage, as they do in memory.

    Raises:
        CheckpointIncompleteError, DamagedCheckpointError, UnsafePickleError: see `open_state_file`.
        UnsupportedError: it holds no state dict, or shards of a rank.
    """
    path = Path(path).absolute()
    if path.name.endswith(".json"):
        return [_read_index(path, kind or MODEL, index)]
    file = open_state_file(path)
    states = split_state(file.value, where=str(path), kind=kind)
    return [_build_section(file, state, index) for state in states.values()]


def _build_section(file: StateFile, state: StateDict, index: int) -> Section:
    names = name_tensors(state.kind, state.tensors, where=file.path)
    tensors: dict[str, DiskTensor] = {}
    for key_path, value in state.tensors.items():
        name = names[key_path]
        if type(value) is not TensorRef:
            raise UnsupportedError(
                f"{file.path}: {name!r} is one rank's shard of a tensor. Give the directory that holds the files of "
                "all ranks, named by rank (for instance model_world_size_2_rank_0.pt).",
                path=file.path,
                fqn=name,
            )
        tensors[name] = make_whole_tensor(file, name, value, key_path)
    return Section(
        name=name_section(state.kind, index),
        kind=state.kind,
        index=index,
        format=FORMAT,
        path=file.path,
        tensors=tensors,
        values=name_values(state.values),
        zips=(file.range,),
        files=(file.path,),
    )


def _read_index(path: Path, kind: str, index: int) -> Section:
    merged: Section | None = None
    for file, expected in read_weight_map(path).items():
        (section,) = read_full_file(file, kind=kind, index=index)
        missing = sorted(set(expected) - section.tensors.keys())
        if missing:
            raise CheckpointIncompleteError(
                f"{file} lacks {missing[0]!r}, which the index says it holds. The files are not of one save; restore "
                "them from a copy.",
                path=str(file),
                fqn=missing[0],
            )
        if merged is None:
            merged = section
            continue
        for name in merged.tensors.keys() & section.tensors.keys():
            raise DamagedCheckpointError(f"{file}: {name!r} is in another file, too.", path=str(file), fqn=name)
        merged = replace(
            merged,
            tensors={**merged.tensors, **section.tensors},
            values={**merged.values, **section.values},
            zips=merged.zips + section.zips,
            files=merged.files + section.files,
        )
    if merged is None:
        raise DamagedCheckpointError(f"{path} names no files.", path=str(path))
    return replace(merged, path=str(path), files=(*merged.files, str(path)))
