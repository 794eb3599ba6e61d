"""One rank's random and data state on disk: a safetensors file and a JSON file, no pickles.

    rng_rank_00000.safetensors      now/...               this rank's generators at the save
                                    loader_0/...          those that dataloader 0 needs to go on
    progress_rank_00000.json        where each dataloader stood, and extra facts of this rank

Nothing here is collective: each rank writes and reads its own two files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DataProgressError, RngStateError
from .rng import RngSnapshot

if TYPE_CHECKING:
    from torch import Tensor

    from .progress import LoaderProgress

FORMAT_VERSION = 1
_RNG_FORMAT = "accel_fsdp_tools.rng"
_PROGRESS_FORMAT = "accel_fsdp_tools.progress"


@dataclass(frozen=True)
class RankState:
    """What one rank wrote: its generators, its dataloaders' positions, and extra facts."""

    rank: int
    rng: RngSnapshot
    loaders: list[LoaderProgress]
    extra: dict[str, Any]


def get_rank_paths(directory: str | Path, rank: int) -> tuple[Path, Path]:
    """The RNG file and the progress file of a rank."""
    folder = Path(directory)
    return folder / f"rng_rank_{rank:05d}.safetensors", folder / f"progress_rank_{rank:05d}.json"


def write_rank_state(
    directory: str | Path,
    rank: int,
    *,
    rng: RngSnapshot,
    loaders: Sequence[LoaderProgress],
    extra: Mapping[str, Any],
) -> list[Path]:
    """Write this rank's two files into `directory` (made if missing). Syncing them to disk is the caller's part.

    Args:
        rng: the rank's generators at the save.
        loaders: what `DataTracker.capture` returned.
        extra: further facts of this rank, JSON-able.

    Returns:
        The paths that were written.
    """
    from safetensors.torch import save_file

    rng_path, progress_path = get_rank_paths(directory, rank)
    rng_path.parent.mkdir(parents=True, exist_ok=True)
    tensors = rng.to_tensors("now")
    for item in loaders:
        tensors.update(item.to_tensors())
    metadata = {"format": _RNG_FORMAT, "version": str(FORMAT_VERSION), "rank": str(rank)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, rng_path, metadata=metadata)
    record = {
        "format": _PROGRESS_FORMAT,
        "version": FORMAT_VERSION,
        "rank": rank,
        "loaders": [item.to_dict() for item in loaders],
        "extra": dict(extra),
    }
    progress_path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return [rng_path, progress_path]


def read_rank_state(directory: str | Path, rank: int) -> RankState:
    """Read what `write_rank_state` wrote for `rank`. Restores nothing.

    Raises:
        RngStateError: the RNG file is missing, truncated, of another rank, or lacks a generator.
        DataProgressError: the progress file is missing, truncated, of another rank, or malformed.
    """
    rng_path, progress_path = get_rank_paths(directory, rank)
    tensors = _read_tensors(rng_path, rank)
    record = _read_record(progress_path, rank)
    from .progress import LoaderProgress

    return RankState(
        rank=rank,
        rng=RngSnapshot.from_tensors(tensors, "now", rank=rank, path=rng_path),
        loaders=[LoaderProgress.from_dict(item, tensors, rank=rank, path=progress_path) for item in record["loaders"]],
        extra=record["extra"],
    )


def _read_tensors(path: Path, rank: int) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise RngStateError(
            f"rank {rank}: its random states are missing: there is no {path}. Resume from a whole checkpoint.",
            rank=rank,
            path=path,
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: the states are kept until loaders are iterated, the file may be gone or replaced by then.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RngStateError(
            f"rank {rank}: {path} cannot be read ({error}); the file is truncated or damaged",
            rank=rank,
            path=path,
        ) from error
    if (metadata.get("format"), metadata.get("rank")) != (_RNG_FORMAT, str(rank)):
        raise RngStateError(
            f"rank {rank}: {path} does not hold the random states of this rank (format "
            f"{metadata.get('format')!r}, rank {metadata.get('rank')!r})",
            rank=rank,
            path=path,
            expected=str(rank),
            actual=metadata.get("rank"),
        )
    return tensors


def _read_record(path: Path, rank: int) -> dict[str, Any]:
    def make_error(why: str) -> DataProgressError:
        return DataProgressError(
            f"rank {rank}: its data progress cannot be read: {path} {why}. Resume from a whole checkpoint.",
            rank=rank,
            path=path,
        )

    if not path.exists():
        raise make_error("is missing")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise make_error(f"is truncated or damaged ({error})") from error
    if not isinstance(record, dict) or record.get("format") != _PROGRESS_FORMAT:
        raise make_error("is not such a file")
    if record.get("version") != FORMAT_VERSION:
        raise make_error(f"has version {record.get('version')!r}, this package reads {FORMAT_VERSION}")
    if record.get("rank") != rank:
        raise make_error(f"is of rank {record.get('rank')!r}")
    if not isinstance(record.get("loaders"), list) or not isinstance(record.get("extra"), dict):
        raise make_error("lacks its records")
    return record
