"""What follows a commit: the new checkpoint is read back from disk, that is recorded, and old ones may go.

One function for the training thread or a thread in the background; it touches nothing but the root. Collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from .commit import delete_checkpoint
from .files import check_files
from .manifest import Lineage, read_manifest
from .phases import reach
from .ranks import get_rank, get_world_size, run_on_main, run_together
from .records import CHECKSUMS, SIZES, clear_resumes, forget, record_verified
from .retention import RetentionPolicy, choose_deletions
from .survey import list_facts

logger = logging.getLogger(__name__)


def settle_checkpoint(
    path: Path,
    lineage: Lineage,
    *,
    policy: RetentionPolicy | None,
    verify: str,
    run_id: str,
) -> list[Path]:
    """Read a committed checkpoint back and remove what the policy of its root no longer covers.

    Without a policy nothing ever goes, and nothing is read. With verify "off" nothing is read either, by choice, and
    checkpoints count as if they had been; with "size" sizes have to do.

    Returns:
        What was removed, oldest first.

    Raises:
        DamagedCheckpointError, CheckpointIncompleteError: the new one is not what was written, on every rank. Nothing
            was removed.
    """
    root = path.parent
    if lineage.parent_id is not None:
        parent_id = lineage.parent_id
        run_on_main("recording the save", lambda: try_to_record(lambda: clear_resumes(root, parent_id)))
    if policy is None:
        return []
    verified_ids: Collection[str] = ()
    how = {"off": None, "size": SIZES}.get(verify, CHECKSUMS)
    run_together("reading the new checkpoint back", lambda: _read_back(path, how))
    if how is not None:
        run_on_main(
            "recording what was read back",
            lambda: try_to_record(lambda: record_verified(root, lineage.checkpoint_id, name=path.name, how=how)),
        )
        verified_ids = (lineage.checkpoint_id,)
    trust = {"off": "all", "size": "sizes"}.get(verify, "checksums")
    return run_on_main(
        "pruning", lambda: prune_root(root, policy, trust=trust, run_id=run_id, verified_ids=verified_ids)
    )


def try_to_record(record: Callable[[], Any]) -> None:
    """Record a fact; where that is not possible (a full disk) say so and go on. Not collective.

    Records save a second look and no more: training must not end for want of one.
    """
    try:
        record()
    except OSError as error:
        logger.warning("a record of a checkpoint could not be written: %s", error)


def prune_root(
    root: Path,
    policy: RetentionPolicy | None,
    *,
    trust: str,
    run_id: str,
    verified_ids: Collection[str] = (),
) -> list[Path]:
    """Remove what `policy` does not keep, oldest first; returns what this process has removed. Not collective.

    Another process may be pruning too: what it removes first is not an error. Only directories go that a
    `Checkpointer` has named and committed. `trust` and `verified_ids` are as for `list_facts`.
    """
    removed = []
    for facts in choose_deletions(list_facts(root, trust=trust, verified_ids=verified_ids), policy):
        if delete_checkpoint(root / facts.name, run_id):
            removed.append(root / facts.name)
        forget(root, facts.checkpoint_id)
    return removed


def _read_back(path: Path, how: str | None) -> None:
    reach("prune.begin")
    if how is None:
        return
    files = read_manifest(path).files[get_rank() :: get_world_size()]
    check_files(path, files, checksums=how == CHECKSUMS)
