"""Checkpoints of one `torch.save` file per rank: found by name, put together only by what the files state.

A DTensor or ShardedTensor says which part of which tensor it is. A plain tensor says nothing: two ranks' tensors of
four ones may be copies of one norm weight or halves of another. So plain tensors count as whole only where torch's
own rules make them so (next to sharded ones, everything else is unsharded), where a known shape says so, or where the
ranks' files are copies of each other as a whole. Anything else is refused. Adding the ranks' tensors up, or
averaging those that look like norms and biases, gives weights that load and are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointIncompleteError, DamagedCheckpointError, UnsupportedError
from ..extents import DiskTensor, Extent, Part, Shape
from .checkpoint import KeyPath
from .sharded import RankPart, read_rank_part
from .state_files import StateFile

FULL_ADVICE = (
    "Save again with a sharded format that states it (SHARDED_STATE_DICT with torch.distributed.checkpoint, as "
    "accelerator.save_state does) or as a whole (FULL_STATE_DICT)."
)


@dataclass(frozen=True)
class RankFamily:
    """The files of all ranks for one state dict: `files` maps rank to path; `world_size` is what names state."""

    stem: str
    files: Mapping[int, Path]
    world_size: int | None = None


def find_family(directory: Path, pattern: re.Pattern[str], stem: str, *, index: str | None = None) -> RankFamily:
    """Return the files of `directory` whose whole name matches.

    Args:
        directory: where to look.
        pattern: has a group `rank` and may have `world` (the number of ranks) and `index` (of the model).
        stem: what to call the files in messages.
        index: take only names with exactly this `index`.

    Raises:
        CheckpointIncompleteError: there are none.
        DamagedCheckpointError: the names state different world sizes.
    """
    matches = [
        (match, path)
        for path in directory.iterdir()
        if (match := pattern.fullmatch(path.name)) and match.groupdict().get("index") == index
    ]
    worlds = {int(match["world"]) for match, _ in matches if "world" in match.groupdict()}
    if not matches:
        raise CheckpointIncompleteError(f"{directory} holds no files {stem}.", path=str(directory))
    if len(worlds) > 1:
        raise DamagedCheckpointError(
            f"{directory} holds rank files of saves with {' and '.join(map(str, sorted(worlds)))} ranks. Move those "
            "that don't belong to this checkpoint elsewhere.",
            path=str(directory),
            actual=tuple(sorted(worlds)),
        )
    files = {int(match["rank"]): path for match, path in matches}
    return RankFamily(stem, dict(sorted(files.items())), worlds.pop() if worlds else None)


@dataclass
class RankState:
    """The tensors of one state dict as the ranks hold them: by rank, by key path."""

    files: Mapping[int, StateFile]
    tensors: dict[int, dict[KeyPath, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.tensors)

    @property
    def path(self) -> str:
        return self.files[self.ranks[0]].path


def assemble(
    state: RankState, names: Mapping[KeyPath, str], shapes: Mapping[str, Shape] | None = None
) -> dict[str, DiskTensor]:
    """Put the ranks' tensors together.

    Args:
        state: what each rank's file holds; its notes are added to.
        names: the name of each tensor, by its key path.
        shapes: whole shapes by name, where they are known from the model's config or a manifest.

    Raises:
        UnsupportedError: plain tensors of which nothing says whether they are whole.
        DamagedCheckpointError: the ranks contradict each other.
    """
    parts = {
        path: {
            rank: read_rank_part(state.files[rank], names[path], tensors[path])
            for rank, tensors in state.tensors.items()
            if path in tensors
        }
        for path in names
    }
    for path, by_rank in parts.items():
        _check_ranks(state, names[path], by_rank)
    plain = {path: by_rank for path, by_rank in parts.items() if not next(iter(by_rank.values())).is_placed}
    if plain:
        _judge_plain(state, plain, names, shapes, has_placed=len(plain) < len(parts))
    return {names[path]: _merge(names[path], path, by_rank) for path, by_rank in parts.items()}


def _check_ranks(state: RankState, name: str, by_rank: Mapping[int, RankPart]) -> None:
    first = next(iter(by_rank.values()))
    for rank, part in by_rank.items():
        path = state.files[rank].path
        if part.rank is not None and part.rank != rank:
            raise DamagedCheckpointError(
                f"{path}: {name!r} was written by rank {part.rank}, not by rank {rank} as the file's name says. The "
                "files were renamed or exchanged; restore them from a copy.",
                path=path,
                rank=rank,
                fqn=name,
                expected=rank,
                actual=part.rank,
            )
        if part.world_size is not None and part.world_size != len(state.tensors):
            raise CheckpointIncompleteError(
                f"{path}: {name!r} was written by {part.world_size} ranks, files of {len(state.tensors)} are here. "
                "Copy the files of all ranks into one directory.",
                path=path,
                fqn=name,
                expected=part.world_size,
                actual=len(state.tensors),
            )
        if part.is_placed != first.is_placed or part.dtype != first.dtype:
            raise DamagedCheckpointError(
                f"{path}: {name!r} is {part.dtype} on rank {rank} and {first.dtype} on another, or sharded on one "
                "only. The files are not of one save.",
                path=path,
                fqn=name,
            )
        if part.is_placed and part.shape != first.shape:
            raise DamagedCheckpointError(
                f"{path}: {name!r} has the shape {part.shape} on rank {rank} and {first.shape} on another. The "
                "files are not of one save.",
                path=path,
                fqn=name,
                expected=first.shape,
                actual=part.shape,
            )


def _judge_plain(
    state: RankState,
    plain: Mapping[KeyPath, Mapping[int, RankPart]],
    names: Mapping[KeyPath, str],
    shapes: Mapping[str, Shape] | None,
    *,
    has_placed: bool,
) -> None:
    """Raise unless every plain tensor is known to be whole on every rank that has it."""
    if len(state.tensors) == 1 or [rank for rank, tensors in state.tensors.items() if tensors] == [0]:
        return  # one rank wrote all of it: state dicts gathered on rank 0 are empty elsewhere
    num_certain = 0
    for path, by_rank in plain.items():
        name = names[path]
        found = {part.shape for part in by_rank.values()}
        known = None if shapes is None else shapes.get(name)
        if len(found) > 1 or len(by_rank) < len(state.tensors) or (known is not None and found != {known}):
            raise _explain_refusal(
                state, name, by_rank, "differs in shape between the ranks" if known is None else None
            )
        differing = find_differing_rank(by_rank)
        if differing is not None and (has_placed or known is not None):
            state.notes.append(f"{name} is not sharded and differs between ranks 0 and {differing}; rank 0's is used")
        elif differing is not None:
            raise _explain_refusal(state, name, by_rank, f"differs between ranks {state.ranks[0]} and {differing}")
        num_certain += known is not None or has_placed
    if num_certain < len(plain) and not any(_has_two_values(by_rank) for by_rank in plain.values()):
        name = names[next(iter(plain))]
        raise _explain_refusal(
            state, name, plain[next(iter(plain))], "is, like all others, the same on all ranks, but constant"
        )


def _explain_refusal(state: RankState, name: str, by_rank: Mapping[int, RankPart], how: str | None) -> UnsupportedError:
    listed = ", ".join(f"{part.shape} on rank {rank}" for rank, part in list(by_rank.items())[:4])
    return UnsupportedError(
        f"{Path(state.path).parent}: {name!r} {how or 'has not the shape of the model'} ({listed}), and the files do "
        "not say whether it is whole or how it was cut. Adding the ranks' tensors up or averaging them would give "
        f"wrong weights, so nothing is guessed. {FULL_ADVICE}",
        path=state.path,
        fqn=name,
    )


def _merge(name: str, path: KeyPath, by_rank: Mapping[int, RankPart]) -> DiskTensor:
    extents: dict[Part, Extent] = {}
    replicas: list[Extent] = []
    for number, part in enumerate(by_rank.values()):
        counts = part.is_first if part.is_placed else number == 0
        for extent in part.extents:
            if counts and extent.part not in extents:  # stated at the same place by two ranks: one is a copy
                extents[extent.part] = extent
            else:
                replicas.append(extent)
    first = next(iter(by_rank.values()))
    return DiskTensor(
        name, first.dtype, first.shape, tuple(extents.values()), tuple(replicas), path, first.requires_grad
    )


def find_differing_rank(by_rank: Mapping[int, RankPart]) -> int | None:
    """Return the first rank whose bytes are not those of the first, None if all are equal.

    Stored CRCs decide where there are any, so that nothing needs to be read.
    """
    ranks = list(by_rank)
    for rank in ranks[1:]:
        if not _are_equal(by_rank[ranks[0]], by_rank[rank]):
            return rank
    return None


def _are_equal(a: RankPart, b: RankPart) -> bool:
    from .reading import read_blocks

    for one, other in zip(a.extents, b.extents, strict=True):
        same_place = (one.start, one.strides, one.bytes.length) == (other.start, other.strides, other.bytes.length)
        if same_place and None not in (one.bytes.crc32, other.bytes.crc32):
            if one.bytes.crc32 == other.bytes.crc32:
                continue
            if one.start == 0 and other.start == 0 and _fills_item(a, one) and _fills_item(b, other):
                return False
        blocks = (read_blocks(_as_tensor(part, extent)) for part, extent in ((a, one), (b, other)))
        if any(x != y for (_, x), (_, y) in zip(*blocks, strict=True)):
            return False
    return True


def _fills_item(part: RankPart, extent: Extent) -> bool:
    return _as_tensor(part, extent).size_bytes == extent.bytes.length


def _as_tensor(part: RankPart, extent: Extent) -> DiskTensor:
    return DiskTensor("", part.dtype, part.shape, (extent,))


def _has_two_values(by_rank: Mapping[int, RankPart]) -> bool:
    """Whether the tensor has two different elements; a constant one shows nothing by being equal everywhere."""
    from .reading import read_blocks

    part = next(iter(by_rank.values()))
    if not part.extents:
        return False
    tensor = _as_tensor(part, part.extents[0])
    size = tensor.size_bytes // max(tensor.numel, 1)
    first: bytes | None = None
    for _, block in read_blocks(tensor):
        first = bytes(block[:size]) if first is None else first
        if block != first * (len(block) // size):
            return True
    return False
