"""Before a load: every pickle that Accelerate or DCP would open in a checkpoint is checked, and none is executed.

`accelerator.load_state` unpickles `.metadata`, DCP's byte items and registered objects without any restriction, and
the rest with torch's `weights_only`. Reading only directories of zips and their `data.pkl`, the check costs a small
part of the load and grows with the number of tensors, not with their size. It protects from what the files hold at
the time of the check; whoever can still write to the checkpoint can change it afterwards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointNotFoundError, UnsupportedError, UsageError
from .allowed import TORCH_STATE, AllowList
from .checkpoint import METADATA_NAME
from .dcp import DcpItem, read_dcp_metadata
from .torch_files import scan_torch_file
from .zips import open_window

DCP_METADATA_KIND = "dcp metadata"
DCP_ITEMS_KIND = "dcp items"
CUSTOM_KIND = "registered object"
STATE_KIND = "state"
WEIGHTS_KIND = "weights or optimizer"

_PATTERNS = (
    (re.compile(r"custom_checkpoint_\d+\.pkl"), CUSTOM_KIND),
    (re.compile(r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth"), STATE_KIND),
    (re.compile(r"(scheduler|sampler|dl_state_dict)(_\d+)?\.(bin|pt)|scaler\.pt"), STATE_KIND),
    (re.compile(r"(pytorch_model|optimizer).*\.(bin|pt)"), WEIGHTS_KIND),
)
_DCP_DIRECTORY = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
_METADATA = re.compile(r"(__\d+)?\.metadata")
_OF_ONE_RANK = re.compile(r"(?:random_states_|rng_state_|.*_rank)(\d+)\.(?:pkl|pth|bin)")

_CUSTOM_ADVICE = (
    "Nothing was executed. If it belongs to an object that you gave to accelerator.register_for_checkpointing, and "
    "you trust this file, pass allow_objects=[{name}]; otherwise don't load the checkpoint."
)


@dataclass(frozen=True)
class ScanReport:
    """What was looked at; a scan that finds anything raises instead."""

    directory: str
    files: int
    pickles: int
    seconds: float

    @property
    def ok(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"{self.directory}: {self.pickles} pickles in {self.files} files are harmless ({self.seconds:.2f} s)"

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": self.directory,
            "ok": self.ok,
            "files": self.files,
            "pickles": self.pickles,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class _Part:
    """One file to scan: all of it, or only the items that DCP's metadata lists."""

    path: Path
    kind: str
    items: tuple[DcpItem, ...] = ()


def list_pickles(directory: str | Path) -> Iterator[tuple[Path, str]]:
    """Yield every file of a checkpoint that a load would unpickle, with its kind (the `*_KIND` constants).

    `directory` is what `load_state` is given, or a DCP directory. Files that no load opens, such as the Trainer's
    `training_args.bin`, are left out.

    Raises:
        CheckpointNotFoundError: there is no such directory.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory} is not a directory", path=str(directory))
    for folder in _list_dcp_directories(directory):
        for path in sorted(folder.iterdir()):
            if _METADATA.fullmatch(path.name):
                yield path, DCP_METADATA_KIND
            elif path.suffix == ".distcp":
                yield path, DCP_ITEMS_KIND
    for path in sorted(directory.iterdir()):
        kind = next((kind for pattern, kind in _PATTERNS if pattern.fullmatch(path.name)), None)
        if kind is not None and not path.is_dir():
            yield path, kind


def scan_checkpoint(
    directory: str | Path, *, allow_objects: Iterable[str] = (), share: tuple[int, int] = (0, 1)
) -> ScanReport:
    """Check every pickle that loading the checkpoint would open, without executing any. Not collective.

    Args:
        directory: what `load_state` is given, or a DCP directory.
        allow_objects: classes (full dotted names) that registered objects may consist of, beyond tensors, numbers
            and containers. They apply to `custom_checkpoint_*.pkl` only. A class that is named here is trusted:
            loading runs its code with what the file holds.
        share: `(rank, world_size)`. Each rank scans what it opens itself, and weights and DCP items are divided
            between the ranks, which must see the same files; a checkpoint is harmless when no rank raised.

    Raises:
        UnsafePickleError: something that could run code; the message names it, the file and the entry.
        DamagedCheckpointError: a file that is not what its name says.
        CheckpointIncompleteError: a DCP directory without metadata, or a file that its metadata lists is missing.
        CheckpointNotFoundError: there is no such directory.
        UnsupportedError: items that were compressed or encrypted, which can't be looked into.
        UsageError: `allow_objects` or `share` make no sense.
    """
    started = time.perf_counter()
    directory = Path(directory)
    rank, world_size = share
    if not 0 <= rank < world_size:
        raise UsageError(f"share: rank {rank} of {world_size}", actual=share)
    if isinstance(allow_objects, str):
        raise UsageError(f"allow_objects: give a list of names, [{allow_objects!r}]", actual=allow_objects)
    custom = TORCH_STATE.with_objects(allow_objects, _CUSTOM_ADVICE)
    parts, num_metadata = _list_parts(directory)
    mine = _choose(parts, rank, world_size)
    pickles = sum(_scan_part(part, custom if part.kind == CUSTOM_KIND else TORCH_STATE) for part in mine)
    seconds = time.perf_counter() - started
    return ScanReport(str(directory), len(mine) + num_metadata, pickles + num_metadata, seconds)


def _list_dcp_directories(directory: Path) -> list[Path]:
    folders = [path for path in sorted(directory.iterdir()) if path.is_dir()]
    named = {path for path in folders if _DCP_DIRECTORY.fullmatch(path.name)}
    return [folder for folder in [directory, *folders] if folder in named or _is_dcp(folder)]


def _is_dcp(folder: Path) -> bool:
    return any(_METADATA.fullmatch(path.name) or path.suffix == ".distcp" for path in folder.iterdir())


def _list_parts(directory: Path) -> tuple[list[_Part], int]:
    """Return what is to be scanned, and how many metadata files were read (and thereby scanned) to know it."""
    parts = [
        _Part(path, kind) for path, kind in list_pickles(directory) if kind not in (DCP_METADATA_KIND, DCP_ITEMS_KIND)
    ]
    num_metadata = 0
    for folder in _list_dcp_directories(directory):
        names = [path.name for path in sorted(folder.iterdir()) if _METADATA.fullmatch(path.name)]
        files: dict[str, dict[DcpItem, None]] = {}
        for name in names or [METADATA_NAME]:
            for item in read_dcp_metadata(folder, name=name).items:
                files.setdefault(item.file, {})[item] = None
        num_metadata += len(names)
        parts += [_Part(folder / file, DCP_ITEMS_KIND, tuple(items)) for file, items in files.items()]
    return parts, num_metadata


def _choose(parts: list[_Part], rank: int, world_size: int) -> list[_Part]:
    """Return the parts that fall to `rank`; every rank comes to the same division."""
    mine: list[_Part] = []
    divided: list[_Part] = []
    for part in parts:
        owner = _OF_ONE_RANK.fullmatch(part.path.name)
        if owner and int(owner.group(1)) < world_size:
            if int(owner.group(1)) == rank:
                mine.append(part)
        elif part.kind in (CUSTOM_KIND, STATE_KIND) and not owner:
            mine.append(part)  # every rank opens it
        else:
            divided.append(part)
    loads = [0] * world_size
    for part in sorted(divided, key=lambda part: (-len(part.items), str(part.path))):
        lightest = loads.index(min(loads))
        loads[lightest] += max(1, len(part.items))
        if lightest == rank:
            mine.append(part)
    return mine


def _scan_part(part: _Part, allow: AllowList) -> int:
    with open_window(part.path) as window:
        if part.kind != DCP_ITEMS_KIND:
            return scan_torch_file(window, allow=allow)
        count = 0
        for item in sorted(part.items, key=lambda item: item.offset):
            label = f"{part.path}, item {item.fqn!r}"
            if item.transforms:
                raise UnsupportedError(
                    f"{label} went through {', '.join(item.transforms)[:200]}, which can't be undone here, so its "
                    "pickle can't be checked. Save the checkpoint without that extension.",
                    path=str(part.path),
                    fqn=item.fqn,
                )
            count += scan_torch_file(window.narrow(item.offset, item.length, label), allow=allow, nested=True)
        return count
