"""Make the files of a checkpoint durable and checksum them: each rank its own, while other things go on. Collective."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from . import layout, save_checks
from .errors import StorageError
from .files import FileFacts, list_files, seal_files
from .phases import reach
from .ranks import get_rank, get_world_size, run_on_main, run_together, wait_for_ranks


def _choose_mine(names: list[str]) -> list[str]:
    rank, world_size = get_rank(), get_world_size()
    return [name for name in names if layout.get_writer_rank(name) % world_size == rank]


@contextlib.contextmanager
def begin_sealing(directory: Path) -> Iterator[Future[list[FileFacts]]]:
    """Seal, on another thread, what lies in `directory` already: the storage needs no processor."""
    names = run_on_main("listing the files", lambda: list_files(directory))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(seal_files, directory, _choose_mine(names))


def finish_sealing(directory: Path, expected: list[str], begun: Future[list[FileFacts]]) -> tuple[FileFacts, ...]:
    """Seal the rest, and return the facts of all files, the same on every rank.

    Args:
        expected: names of files that ranks have written; they are waited for where rank 0 sees them late.
        begun: what `begin_sealing` has begun.
    """
    wait_for_ranks("writing the checkpoint")
    names = run_on_main("listing the files", lambda: _list_all(directory, expected))

    def seal() -> list[FileFacts]:
        reach("save.fingerprints")
        done = begun.result()
        known = {facts.path for facts in done}
        done += seal_files(directory, [name for name in _choose_mine(names) if name not in known])
        reach("save.synced")
        reach("save.checksums")
        return done

    sealed = run_together("checksumming", seal)
    return tuple(sorted((facts for part in sealed for facts in part), key=lambda facts: facts.path))


def _list_all(directory: Path, expected: list[str]) -> list[str]:
    deadline = time.monotonic() + save_checks.VISIBILITY_S
    while True:
        names = list_files(directory)
        missing = sorted(set(expected) - set(names))
        if not missing:
            return names
        if time.monotonic() > deadline:
            raise StorageError(
                f"Rank 0 does not see {missing[0]} in {directory}, which another rank has written. The directory is "
                "not on storage that all ranks share, or it shows files too late.",
                path=str(directory / missing[0]),
            )
        time.sleep(0.1)
