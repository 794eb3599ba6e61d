"""Manifests for tests that need no training."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_fsdp_tools.files import list_files, seal_files
from accel_fsdp_tools.manifest import (
    DIRECTORY,
    MANIFEST_PATH,
    Lineage,
    Manifest,
    ModelFacts,
    OptimizerFacts,
    TensorFacts,
    Topology,
    compute_digest,
    read_manifest,
    write_manifest,
)


def make_manifest(*, step: int = 1, attempt: int = 1, parent_id: str | None = None, files: tuple = ()) -> Manifest:
    return Manifest(
        created_at="2026-01-01T00:00:00.000+00:00",
        step=step,
        epoch=0,
        lineage=Lineage(uuid.uuid4().hex, "run", attempt, parent_id),
        topology=Topology(2, "FSDP", 2, "SHARDED_STATE_DICT"),
        versions={"torch": "2.13.0"},
        states={name: {} for name in ("model", "optimizer", "scheduler", "rng", "data")},
        files=files,
        models=(ModelFacts("M", (TensorFacts("w", "float32", (2, 3), True, "parameter"),), (("w", "v"),)),),
        optimizers=(OptimizerFacts("AdamW", 1, 1, 0, ("w",)),),
        num_schedulers=1,
        num_dataloaders=1,
        num_custom_objects=0,
        accelerate={"step": 3},
    )


def make_checkpoint(path: Path, *, step: int, attempt: int = 1) -> Path:
    """Write a committed checkpoint with one small file in it."""
    (path / DIRECTORY).mkdir(parents=True)
    (path / "random_states_0.pkl").write_bytes(b"x" * 10)
    files = tuple(seal_files(path, list_files(path)))
    write_manifest(path, make_manifest(step=step, attempt=attempt, files=files))
    return path


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Apply `change` to what the manifest of the checkpoint at `path` says, and let its digest fit again."""
    raw = json.loads((path / MANIFEST_PATH).read_text())
    change(raw)
    (path / MANIFEST_PATH).write_text(json.dumps({**raw, "digest": compute_digest(raw)}))


def reseal(path: Path) -> None:
    """Make the manifest agree with the files as they are now: someone who can change files can change checksums."""
    files = tuple(seal_files(path, [name for name in list_files(path) if name != MANIFEST_PATH]))
    write_manifest(path, dataclasses.replace(read_manifest(path), files=files))


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))
