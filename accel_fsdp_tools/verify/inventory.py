"""Whether everything is there: the files that the manifest lists, the five states, and each rank's own files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from ..formats.scan import list_pickles
from ..formats.zips import open_window
from ..manifest import DIRECTORY, MANIFEST_PATH, Manifest
from .gathering import Gatherer
from .ranks import find_rank
from .subject import PARSING_ERRORS, Subject

_MAX_HEADER_BYTES = 1 << 20

# Files that no load unpickles but reads all the same.
_LOADED = re.compile(r".*\.(safetensors|distcp)|.*\.index\.json|(.*/)?\.metadata")


def check_inventory(subject: Subject, gather: Gatherer) -> None:
    """Compare the directory with what its manifest says, or with what the files themselves imply."""
    if subject.is_partial:
        gather.fail(
            "unfinished",
            f"{subject.root} is being written, or was left by a save that did not finish. It is no checkpoint; use "
            "a committed one.",
        )
    if not subject.is_whole:
        return
    if subject.manifest is None:
        _note_states(subject, gather)
        return
    _check_listed(subject, gather)
    _check_unlisted(subject, gather)
    _check_states(subject, subject.manifest, gather)
    _check_rank_files(subject, subject.manifest, gather)


def _check_listed(subject: Subject, gather: Gatherer) -> None:
    for name, (size_bytes, _) in subject.expected.items():
        found = subject.files.get(name)
        rank = find_rank(name)
        if found is None:
            gather.fail(
                "missing_file",
                f"{name} is missing; the manifest lists it with {size_bytes} bytes. Restore it from a copy, or use "
                "another checkpoint.",
                path=name,
                rank=rank,
            )
        elif found.size_bytes != size_bytes:
            gather.fail(
                "size",
                f"{name} has {found.size_bytes} bytes, {size_bytes} were written. It was cut off or replaced.",
                path=name,
                rank=rank,
                expected=size_bytes,
                actual=found.size_bytes,
            )


def _check_unlisted(subject: Subject, gather: Gatherer) -> None:
    extra = sorted(subject.files.keys() - subject.expected.keys() - {MANIFEST_PATH})
    if not extra:
        return
    try:
        loaded = {gather.shorten(path) for path, _ in list_pickles(subject.root)}
    except PARSING_ERRORS as error:
        gather.add_error(error)
        loaded = set()
    for name in extra:
        if name in loaded or _LOADED.fullmatch(name) or name.startswith(f"{DIRECTORY}/"):
            gather.fail(
                "unlisted",
                f"{name} was not there when the checkpoint was committed, and a load may open it. Remove it if you "
                "don't know what put it there.",
                path=name,
            )
        else:
            gather.hint("unlisted", f"{name} was not there when the checkpoint was committed", path=name)


def _check_states(subject: Subject, manifest: Manifest, gather: Gatherer) -> None:
    """Count what each of the five states consists of."""
    files = subject.files.keys()
    found = {
        "model": len(subject.models),
        "optimizer": len(subject.optimizers),
        "scheduler": _count(files, r"scheduler(_\d+)?\.bin"),
        "registered object": _count(files, r"custom_checkpoint_\d+\.pkl"),
        "random state": _count(files, rf"{DIRECTORY}/rng_rank_\d+\.safetensors"),
        "data progress": _count(files, rf"{DIRECTORY}/progress_rank_\d+\.json"),
    }
    ranks = manifest.topology.world_size
    recorded = {
        "model": len(manifest.models),
        "optimizer": len(manifest.optimizers),
        "scheduler": manifest.num_schedulers,
        "registered object": manifest.num_custom_objects,
        "random state": ranks,
        "data progress": ranks,
    }
    for state, expected in recorded.items():
        if found[state] != expected:
            gather.fail(
                "incomplete",
                f"{state}: {found[state]} here, {expected} saved. A resume needs all of it; use another checkpoint.",
                expected=expected,
                actual=found[state],
            )
    if manifest.accelerate.get("has_scaler") and "scaler.pt" not in files:
        gather.fail("incomplete", "the gradient scaler was saved, and scaler.pt is not here", path="scaler.pt")


def _count(names: Iterable[str], pattern: str) -> int:
    return sum(1 for name in names if re.fullmatch(pattern, name))


def _check_rank_files(subject: Subject, manifest: Manifest, gather: Gatherer) -> None:
    # A rank more than there are files is enough to know that some are missing; the number may be nonsense.
    for rank in range(min(manifest.topology.world_size, len(subject.files) + 1)):
        readers: dict[str, Callable[[Subject, str, int], str | None]] = {
            f"{DIRECTORY}/rng_rank_{rank:05d}.safetensors": _read_rng,
            f"{DIRECTORY}/progress_rank_{rank:05d}.json": _read_progress,
        }
        for name in (_name_random_states(manifest, rank), *readers):
            if name not in subject.files:
                if name not in subject.expected:  # otherwise reported as a missing file
                    gather.fail("missing_file", f"{name} is missing: rank {rank} can't resume", path=name, rank=rank)
            elif name in readers:
                problem = _run(readers[name], subject, name, rank)
                if problem is not None:
                    gather.fail("rank_state", f"{name} {problem}. Restore it from a copy.", path=name, rank=rank)


def _name_random_states(manifest: Manifest, rank: int) -> str:
    if not manifest.is_of_trainer:
        return f"random_states_{rank}.pkl"
    return f"rng_state_{rank}.pth" if manifest.topology.world_size > 1 else "rng_state.pth"


def _run(reader: Callable[[Subject, str, int], str | None], subject: Subject, name: str, rank: int) -> str | None:
    try:
        return reader(subject, name, rank)
    except PARSING_ERRORS as error:
        return f"cannot be read ({type(error).__name__}: {str(error)[:200]})"


def _read_rng(subject: Subject, name: str, rank: int) -> str | None:
    """Return what is wrong with the header of a rank's random states; their bytes are the checksum's matter."""
    with open_window(subject.files[name].path) as window:
        size = int.from_bytes(window.read(0, 8), "little")
        if size > min(_MAX_HEADER_BYTES, window.length - 8):
            return f"states a header of {size} bytes"
        header = json.loads(window.read(8, size))
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        if 8 + size + end != window.length:
            return f"has {window.length} bytes, its header describes {8 + size + end}"
    metadata = header.get("__metadata__") or {}
    if metadata.get("format") != "accel_fsdp_tools.rng" or metadata.get("rank") != str(rank):
        stated = f"format {metadata.get('format')!r}, rank {metadata.get('rank')!r}"
        return f"is not the random state of rank {rank} (it says {stated})"
    if not any(key.startswith("now/") for key in header):
        return "holds no random state of the save"
    return None


def _read_progress(subject: Subject, name: str, rank: int) -> str | None:
    """Return what is wrong with a rank's data progress."""
    record = json.loads(subject.files[name].path.read_bytes())
    if not isinstance(record, dict) or record.get("format") != "accel_fsdp_tools.progress":
        return "is no data progress of this package"
    if record.get("rank") != rank:
        return f"is of rank {record.get('rank')!r}"
    loaders = record.get("loaders")
    if not isinstance(loaders, list) or not all(isinstance(each, dict) for each in loaders):
        return "lacks its records"
    expected = subject.manifest.num_dataloaders if subject.manifest is not None else len(loaders)
    if len(loaders) != expected:
        return f"describes {len(loaders)} dataloader(s), {expected} were prepared"
    return None


def _note_states(subject: Subject, gather: Gatherer) -> None:
    """Say which states a checkpoint without a manifest shows no sign of."""
    names = subject.files.keys()
    seen = {
        "model": bool(subject.models),
        "optimizer": bool(subject.optimizers),
        "scheduler": _count(names, r"scheduler(_\d+)?\.(bin|pt)") > 0,
        "random states": _count(names, r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth") > 0,
    }
    absent = [state for state, is_there in seen.items() if not is_there]
    if absent and any(seen.values()):
        gather.note(
            "states", f"no {', no '.join(absent)} here; whether there should be is not known without a manifest"
        )
