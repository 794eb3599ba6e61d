"""The names that Accelerate gives to what it writes, and what a directory holds by them. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import CheckpointIncompleteError

SHARDED, FULL, LOCAL, RANK_FILES = (
    "SHARDED_STATE_DICT",
    "FULL_STATE_DICT",
    "LOCAL_STATE_DICT",
    "rank files (use_dcp=False)",
)

_RANK_PATTERNS = (
    re.compile(r"(?:^|/)__(\d+)_\d+\.distcp$"),
    re.compile(r"(?:^|/)random_states_(\d+)\.pkl$"),
    re.compile(r"(?:^|/)rng_state_(\d+)\.pth$"),
    re.compile(r"(?:^|/)(?:rng|progress|objects|digests)_rank_(\d+)\.(?:safetensors|json)$"),
    re.compile(r"_rank(\d+)\.bin$"),
)


def get_writer_rank(path: str) -> int:
    """Return the rank that wrote the file, by its name; 0 for what only the main process writes."""
    for pattern in _RANK_PATTERNS:
        if match := pattern.search(path):
            return int(match.group(1))
    return 0


def _indexed(stem: str, index: int, suffix: str) -> str:
    return f"{stem}{suffix}" if index == 0 else f"{stem}_{index}{suffix}"


def get_model_path(directory: Path, index: int, kind: str | None) -> Path:
    """Return where model `index` lies for a state-dict type (None: a run without FSDP)."""
    if kind == SHARDED:
        return directory / f"pytorch_model_fsdp_{index}" / ".metadata"
    if kind == FULL:
        return directory / _indexed("pytorch_model_fsdp", index, ".bin")
    safe = directory / _indexed("model", index, ".safetensors")
    return safe if safe.exists() else directory / _indexed("pytorch_model", index, ".bin")


def get_optimizer_path(directory: Path, index: int, kind: str | None) -> Path:
    """Return where optimizer `index` lies for a state-dict type (None: a run without FSDP)."""
    if kind == SHARDED:
        return directory / f"optimizer_{index}" / ".metadata"
    return directory / _indexed("optimizer", index, ".bin")


def detect_state_dict_type(directory: Path) -> str | None:
    """Return the FSDP state-dict type that the files of `directory` show, None for a checkpoint without FSDP.

    Raises:
        CheckpointIncompleteError: there is no model in it.
    """
    names = {entry.name for entry in directory.iterdir()}
    if "pytorch_model_fsdp_0" in names:
        return SHARDED
    if "pytorch_model_fsdp.bin" in names:
        return FULL
    if any(re.fullmatch(r"pytorch_model_fsdp_rank\d+\.bin", name) for name in names):
        return LOCAL
    if any(re.fullmatch(r"pytorch_model_fsdp_\d+_rank\d+\.bin", name) for name in names):
        return RANK_FILES
    if names & {"model.safetensors", "pytorch_model.bin"}:
        return None
    shown = ", ".join(sorted(names)[:8]) or "nothing"
    raise CheckpointIncompleteError(
        f"{directory} holds no model (it holds {shown}). Expected pytorch_model_fsdp_0/, pytorch_model_fsdp.bin or "
        "model.safetensors, as accelerator.save_state writes them.",
        path=str(directory),
    )


def count_custom_objects(directory: Path) -> int:
    """Return the number of registered objects' files."""
    return sum(1 for entry in directory.iterdir() if re.fullmatch(r"custom_checkpoint_\d+\.pkl", entry.name))


def count_schedulers(directory: Path) -> int:
    """Return the number of schedulers' files."""
    return sum(1 for entry in directory.iterdir() if re.fullmatch(r"scheduler(_\d+)?\.bin", entry.name))


def count_random_states(directory: Path) -> int:
    """Return the number of Accelerate's RNG files: the world size of the save."""
    return sum(1 for entry in directory.iterdir() if re.fullmatch(r"random_states_\d+\.pkl", entry.name))
