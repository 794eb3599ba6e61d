"""The second half of every save: sum up what is in memory, make the files durable, and complete the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .inventory import Draft, Inventory, complete_manifest, digest_held, sum_up
from .local_digests import write_digests
from .manifest import Manifest
from .ranks import get_rank, get_world_size, run_together
from .sealing import begin_sealing, finish_sealing


def complete_checkpoint(directory: Path, manifest: Manifest, draft: Draft, written: Sequence[str]) -> Manifest:
    """Return the manifest with sums and files; all that is left to do is to write it. Collective.

    Args:
        directory: what it lies in; nobody writes there any more.
        manifest: without files and sums.
        draft: where the tensors are.
        written: names of files that ranks have written beside Accelerate's or the Trainer's.
    """
    expected = list(written)
    with begin_sealing(directory) as sealing:
        inventory = sum_up(draft)
        if inventory.has_fingerprints:
            named = run_together("recording what each rank holds", lambda: _write_digests(directory, draft, inventory))
            expected += [name for names in named for name in names]
        files = finish_sealing(directory, expected, sealing)
    return complete_manifest(manifest, inventory, files)


def _write_digests(directory: Path, draft: Draft, inventory: Inventory) -> list[str]:
    paths = write_digests(directory, get_rank(), digest_held(draft, inventory), world_size=get_world_size())
    return [path.relative_to(directory).as_posix() for path in paths]
