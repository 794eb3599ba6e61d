"""What must be true before a save begins: found before anything is written, so that nothing has to be undone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import contract
from .assets import check_tokenizer
from .commit import OWNER_NAME, Staging, check_target
from .errors import StorageError, UsageError
from .ownership import read_owner
from .phases import reach
from .progress import track as track_loaders
from .ranks import gather_all, get_rank, get_world_size

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .progress import LoaderProgress

VISIBILITY_S = 30.0  # network file systems may show another node's files late


def check_before(
    accelerator: Accelerator, final: Path, step: int | None, overwrite: bool, strict: bool, tokenizer: Any
) -> list[LoaderProgress]:
    """Find out on this rank whether everything can be saved; returns where its dataloaders stand. Not collective."""
    reach("save.begin")
    if step is not None:
        contract.parse_step(step)
    check_tokenizer(tokenizer)
    contract.check_setup(accelerator)
    contract.check_boundary(accelerator)
    check_naming(accelerator, final)
    if get_rank() == 0:
        check_target(final, overwrite=overwrite)
    return track_loaders(accelerator).capture(strict=strict)


def check_naming(accelerator: Accelerator, final: Path) -> None:
    """Keep out of the folder that Accelerate's automatic naming prunes by its own rules. Not collective."""
    configuration = accelerator.project_configuration
    if not configuration.automatic_checkpoint_naming or accelerator.project_dir is None:
        return
    taken = Path(accelerator.project_dir).expanduser().absolute() / "checkpoints"
    if final.parent == taken:
        raise UsageError(
            f"{taken} belongs to Accelerate's automatic checkpoint naming, which deletes folders there by the number "
            "in their names. Save elsewhere, or make the Accelerator without automatic_checkpoint_naming.",
            path=str(taken),
        )


def check_same_target(final: Path) -> None:
    """Make sure that all ranks were given the same directory. Collective."""
    targets = gather_all(str(final))
    different = [rank for rank, target in enumerate(targets) if target != targets[0]]
    if different:
        rank = different[0]
        raise UsageError(
            f"Ranks were given different directories: rank 0 has {targets[0]}, rank {rank} has {targets[rank]}. Give "
            "every rank the same one (a time stamp in the name has to come from rank 0).",
            path=targets[0],
            rank=rank,
            expected=targets[0],
            actual=targets[rank],
        )


def check_shared(staging: Staging) -> None:
    """Make sure that this rank sees what rank 0 has just made. Not collective."""
    owner = staging.run_directory / OWNER_NAME
    deadline = time.monotonic() + (VISIBILITY_S if get_world_size() > 1 else 0)
    while True:
        found = read_owner(owner)
        if found is not None and found.run_id == staging.run_id and staging.partial.is_dir():
            reach("save.staged")
            return
        if time.monotonic() > deadline:
            raise StorageError(
                f"Rank {get_rank()} does not see {staging.partial}, which rank 0 has made: the directory is not on "
                "storage that all ranks share. Save to a shared file system (NFS, Lustre, a mounted bucket).",
                path=str(staging.partial),
            )
        time.sleep(0.1)
