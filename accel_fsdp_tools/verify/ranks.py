"""Files of single ranks: leftovers of a save with more ranks, missing ones, and those unlike their neighbours."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict

from .. import layout
from ..formats.dcp_reader import FORMAT as DCP
from .gathering import Gatherer
from .subject import DiskFile, Subject

# Ranks write at the same time, and about as much; only clear differences are worth a look.
_MAX_AGE_S = 300.0
_MAX_RATIO = 2.0
_MIN_DIFFERENCE_BYTES = 1 << 14
_MAX_LISTED = 100  # a number in a file's name may be anything

_RNG_PATTERNS = (r"random_states_(\d+)\.pkl", r"rng_state_(\d+)\.pth")
_OURS = re.compile(r".*_rank_(?P<rank>\d+)\.(?:safetensors|json)")
_FAMILIES = (
    r"(?P<family>(?:.*/)?__)(?P<rank>\d+)_\d+\.distcp",
    r"(?P<family>random_states_)(?P<rank>\d+)\.pkl",
    r"(?P<family>rng_state_)(?P<rank>\d+)\.pth",
    r"(?P<family>.*_rank_?)(?P<rank>\d+)\.(?:bin|pt)",
)


def find_rank(name: str) -> int | None:
    """Return the rank that a file belongs to by its name; None for files of the run as a whole."""
    for pattern in (*_FAMILIES, _OURS):
        match = re.fullmatch(pattern, name)
        if match:
            return int(match["rank"])
    return None


def check_ranks(subject: Subject, gather: Gatherer) -> None:
    """Look for shards and random states that belong to another save."""
    _check_leftovers(subject, gather)
    if subject.is_whole:
        for pattern in _RNG_PATTERNS:
            _check_random_states(subject, re.compile(pattern), gather)
    for family, members in _group(subject).items():
        _compare_members(family, members, gather)


def _check_leftovers(subject: Subject, gather: Gatherer) -> None:
    for path in dict.fromkeys(path for section in subject.sections for path in section.leftovers):
        name = gather.shorten(path)
        gather.fail(
            "stale",
            f"{name} is referred to by nothing: it was left by an earlier save with more ranks into the same "
            "directory. Remove it.",
            path=name,
            rank=find_rank(name),
        )


def _check_random_states(subject: Subject, pattern: re.Pattern[str], gather: Gatherer) -> None:
    found = {int(match[1]): name for name in subject.files if (match := pattern.fullmatch(name))}
    if not found:
        return
    if subject.manifest is not None:
        world_size, certain = subject.manifest.topology.world_size, True
    else:
        # Ranks without any item exist (more ranks than rows), so what the metadata shows is a lower bound.
        world_size, certain = max(_count_dcp_ranks(subject), 1), False
    for rank in sorted(rank for rank in found if rank >= world_size):
        text = f"{found[rank]} is of rank {rank}, but {world_size} rank(s) wrote the checkpoint"
        if certain:
            gather.fail("stale", f"{text}. It was left by an earlier save; remove it.", path=found[rank], rank=rank)
        elif _count_dcp_ranks(subject):
            gather.hint("stale", f"{text}, as far as the shards tell", path=found[rank], rank=rank)
    if not certain:
        last = min(max(world_size - 1, *found), len(found) + _MAX_LISTED)
        for rank in sorted(set(range(last + 1)) - found.keys()):
            name = re.sub(r"\\|\(.*?\)", "", pattern.pattern.replace(r"(\d+)", str(rank)))
            gather.fail("missing_file", f"{name} is missing: rank {rank} can't resume exactly", path=name, rank=rank)


def _count_dcp_ranks(subject: Subject) -> int:
    """Return one more than the highest rank that a DCP directory's metadata refers to; 0 if there is none."""
    files = [path for section in subject.sections if section.format == DCP for path in section.files]
    return max((layout.get_writer_rank(path) + 1 for path in files if path.endswith(".distcp")), default=0)


def _group(subject: Subject) -> dict[str, dict[int, list[tuple[str, DiskFile]]]]:
    """Return the files of each family by rank: what all ranks wrote of one thing."""
    groups: dict[str, dict[int, list[tuple[str, DiskFile]]]] = defaultdict(lambda: defaultdict(list))
    stale = {path for section in subject.sections for path in section.leftovers}
    for name, file in subject.files.items():
        for pattern in _FAMILIES:
            match = re.fullmatch(pattern, name)
            if match and str(file.path) not in stale:
                groups[match["family"]][int(match["rank"])].append((name, file))
                break
    return groups


def _compare_members(family: str, members: dict[int, list[tuple[str, DiskFile]]], gather: Gatherer) -> None:
    if len(members) < 2:
        return
    sizes = {rank: sum(file.size_bytes for _, file in files) for rank, files in members.items()}
    ages = {rank: max(file.modified_s for _, file in files) for rank, files in members.items()}
    usual_size, usual_age = statistics.median_low(sizes.values()), statistics.median_low(ages.values())
    if len(members) == 2:
        usual_size, usual_age = max(sizes.values()), max(ages.values())
    for rank, files in members.items():
        name = files[0][0]
        size = sizes[rank]
        is_far = max(size, usual_size) > _MAX_RATIO * min(size, usual_size)
        if is_far and abs(size - usual_size) > _MIN_DIFFERENCE_BYTES:
            gather.hint(
                "rank_size",
                f"{name}: rank {rank} wrote {size} bytes, others of {family}* {usual_size}",
                path=name,
                rank=rank,
                expected=usual_size,
                actual=size,
            )
        apart_s = ages[rank] - usual_age
        if abs(apart_s) > _MAX_AGE_S:
            gather.hint(
                "rank_age",
                f"{name}: rank {rank}'s file is {abs(apart_s) / 60:.0f} minutes {'newer' if apart_s > 0 else 'older'} "
                "than those of other ranks: of another save?",
                path=name,
                rank=rank,
                seconds=round(apart_s),
            )
