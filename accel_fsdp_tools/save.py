"""`save_state`: what Accelerate writes, what it leaves out, a manifest, and a commit that is all or nothing."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import contract, layout
from .commit import OWNER_NAME, Staging, check_target, commit_staging, discard_staging, open_staging
from .delegate import save_with_accelerate
from .errors import StorageError, UsageError
from .files import FileFacts, list_files, seal_files
from .inventory import build_manifest, take_inventory
from .manifest import DIRECTORY, Lineage, Manifest, write_manifest
from .ownership import read_owner
from .phases import reach
from .progress import track as track_loaders
from .rank_objects import EncodedObject, encode_object, find_different, write_rank_objects
from .rank_state import write_rank_state
from .ranks import (
    broadcast,
    gather_all,
    get_rank,
    get_world_size,
    run_on_each,
    run_on_main,
    run_together,
    wait_for_ranks,
)
from .rng import RngSnapshot
from .steps import follow_steps

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .progress import LoaderProgress

logger = logging.getLogger(__name__)

_VISIBILITY_S = 30.0  # network file systems may show another node's files late
_run_id: str | None = None


def get_run_id() -> str:
    """Return this process group's id, the same on every rank. Collective on the first call."""
    global _run_id
    if _run_id is None:
        _run_id = broadcast(uuid.uuid4().hex[:12])
    return _run_id


def save_state(
    accelerator: Accelerator,
    output_dir: str | Path,
    *,
    step: int | None = None,
    overwrite: bool = False,
    strict: bool = True,
    timeout_s: float | None = None,
) -> Path:
    """Save everything that an exact resume needs to `output_dir`, whole or not at all.

    Accelerate writes its files into a directory aside; beside them come the random generators of every rank, the
    progress of every prepared dataloader, and a manifest with sizes and checksums. When every rank has succeeded the
    directory is renamed to `output_dir`; until then whatever was there stays. Plain `accelerator.load_state` loads
    the result. The run itself is not changed: random generators and optimizers are as before the call.

    Collective: every rank calls it at the same place, between an update and the next batch. A checkpoint of this
    package at `output_dir` is replaced, surviving a crash in the middle.

    Args:
        accelerator: with models, optimizers, schedulers and dataloaders prepared.
        output_dir: the same on every rank, on storage that all ranks share.
        step: number of updates made, for the manifest; counted by this package where not given.
        overwrite: replace a directory that this package did not write.
        strict: False lets a dataloader through that was used before it was followed; its progress is then absent.
        timeout_s: how long to wait for a rank that does not arrive.

    Returns:
        The path of the committed checkpoint.

    Raises:
        CallOrderError: before `prepare`, or in the middle of a gradient accumulation.
        UsageError: `output_dir` cannot be used, or differs between ranks.
        StorageError: the storage is not shared between ranks or not writable.
        DataProgressError: a dataloader was used before it was followed.
        RankMissingError, RankFailedError: another rank did not arrive, or failed.
    """
    return write_checkpoint(
        accelerator,
        Path(output_dir),
        step=step,
        overwrite=overwrite,
        strict=strict,
        timeout_s=timeout_s,
    )[0]


def write_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    *,
    attempt: int = 0,
    parent_id: str | None = None,
    step: int | None = None,
    epoch: int | None = None,
    overwrite: bool = False,
    strict: bool = True,
    timeout_s: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> tuple[Path, Lineage]:
    """Do what `save_state` promises, with the lineage and position that the caller knows. Collective.

    Returns:
        The path of the committed checkpoint, and its place in the lineage.
    """
    reach("save.begin")
    wait_for_ranks("save_state", timeout_s=timeout_s)
    final = output_dir.expanduser().absolute()
    run_id = get_run_id()
    counter = follow_steps(accelerator)
    loaders = run_on_each(
        "checking before the save", lambda: _check_before(accelerator, final, step, overwrite, strict)
    )
    _check_same_target(final)
    staging = run_on_main("opening the checkpoint", lambda: open_staging(final, run_id))
    lineage = broadcast(Lineage(uuid.uuid4().hex, run_id, attempt, parent_id))
    try:
        run_together("looking for the shared storage", lambda: _check_shared(staging))
        reach("save.staged")
        rng = RngSnapshot.capture()
        with counter.paused(), _unchanged(rng):
            run_together("saving with Accelerate", lambda: save_with_accelerate(accelerator, staging.partial))
        reach("save.delegated")
        with _sealing(staging) as sealing:
            inventory = take_inventory(accelerator)
            reach("save.fingerprints")
            objects, opaque = _compare_objects(accelerator)
            written = run_together(
                "writing RNG and data progress",
                lambda: _write_rank_state(accelerator, staging, rng, loaders, objects),
            )
            files = _seal(staging, [name for names in written for name in names], sealing)
        reach("save.checksums")
        manifest = build_manifest(
            accelerator,
            inventory,
            files,
            lineage=lineage,
            step=step if step is not None else counter.count,
            epoch=epoch if epoch is not None else max((each.epoch for each in loaders), default=0),
            opaque_objects=opaque,
            num_pending=0 if accelerator.optimizer_step_was_skipped else counter.num_pending,
            extra=extra or {},
        )
        run_on_main("committing", lambda: _commit(staging, manifest))
    except BaseException:
        if get_rank() == 0:
            discard_staging(staging)
        raise
    reach("save.committed")
    return final, lineage


@contextlib.contextmanager
def _unchanged(rng: RngSnapshot) -> Iterator[None]:
    """Put the random generators back: a run with saves must draw the same numbers as one without."""
    try:
        yield
    finally:
        rng.restore()


def _check_before(
    accelerator: Accelerator, final: Path, step: int | None, overwrite: bool, strict: bool
) -> list[LoaderProgress]:
    if step is not None:
        contract.parse_step(step)
    contract.check_setup(accelerator)
    contract.check_boundary(accelerator)
    check_naming(accelerator, final)
    if get_rank() == 0:
        check_target(final, overwrite=overwrite)
    return track_loaders(accelerator).capture(strict=strict)


def check_naming(accelerator: Accelerator, final: Path) -> None:
    """Keep out of the folder that Accelerate's automatic naming prunes by its own rules."""
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


def _check_same_target(final: Path) -> None:
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


def _check_shared(staging: Staging) -> None:
    """Make sure that this rank sees what rank 0 has just made."""
    owner = staging.run_directory / OWNER_NAME
    deadline = time.monotonic() + (_VISIBILITY_S if get_world_size() > 1 else 0)
    while True:
        found = read_owner(owner)
        if found is not None and found.run_id == staging.run_id and staging.partial.is_dir():
            return
        if time.monotonic() > deadline:
            raise StorageError(
                f"Rank {get_rank()} does not see {staging.partial}, which rank 0 has made: the directory is not on "
                "storage that all ranks share. Save to a shared file system (NFS, Lustre, a mounted bucket).",
                path=str(staging.partial),
            )
        time.sleep(0.1)


def _compare_objects(accelerator: Accelerator) -> tuple[dict[int, EncodedObject], dict[str, str]]:
    """Find the registered objects whose state differs from rank 0's here, and those that cannot be compared.

    Accelerate has written rank 0's alone. Collective.
    """
    if not accelerator._custom_objects or get_world_size() == 1:
        return {}, {}
    encoded: list[EncodedObject] = []

    def encode() -> list[str]:
        encoded.extend(
            encode_object(index, each.state_dict()) for index, each in enumerate(accelerator._custom_objects)
        )
        return [each.digest for each in encoded]

    digests = run_together("comparing registered objects", encode)
    different = {index: encoded[index] for index in find_different(digests, get_rank())}
    return different, {str(index): each.problem for index, each in enumerate(encoded) if each.problem is not None}


def _write_rank_state(
    accelerator: Accelerator,
    staging: Staging,
    rng: RngSnapshot,
    loaders: list[LoaderProgress],
    objects: dict[int, EncodedObject],
) -> list[str]:
    directory = staging.partial / DIRECTORY
    directory.mkdir(exist_ok=True)
    paths = write_rank_state(
        directory,
        accelerator.process_index,
        rng=rng,
        loaders=loaders,
        extra={"accelerator_step": accelerator.step},
    )
    paths += write_rank_objects(directory, accelerator.process_index, objects)
    reach("save.rng")
    reach("save.progress")
    return [path.relative_to(staging.partial).as_posix() for path in paths]


def _choose_mine(names: list[str]) -> list[str]:
    rank, world_size = get_rank(), get_world_size()
    return [name for name in names if layout.get_writer_rank(name) % world_size == rank]


@contextlib.contextmanager
def _sealing(staging: Staging) -> Iterator[Future[list[FileFacts]]]:
    """Make durable and checksum, in the background, what Accelerate has written: the storage needs no processor."""
    names = run_on_main("listing the files", lambda: list_files(staging.partial))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(seal_files, staging.partial, _choose_mine(names))


def _seal(staging: Staging, expected: list[str], sealing: Future[list[FileFacts]]) -> tuple[FileFacts, ...]:
    """Make all files durable and checksum them, each by the rank that wrote it."""
    wait_for_ranks("writing the checkpoint")
    names = run_on_main("listing the files", lambda: _list_all(staging.partial, expected))

    def seal() -> list[FileFacts]:
        done = sealing.result()
        known = {facts.path for facts in done}
        return done + seal_files(staging.partial, [name for name in _choose_mine(names) if name not in known])

    sealed = run_together("checksumming", seal)
    reach("save.synced")
    return tuple(sorted((facts for part in sealed for facts in part), key=lambda facts: facts.path))


def _list_all(directory: Path, expected: list[str]) -> list[str]:
    deadline = time.monotonic() + _VISIBILITY_S
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


def _commit(staging: Staging, manifest: Manifest) -> None:
    write_manifest(staging.partial, manifest)
    reach("save.manifest")
    commit_staging(staging)
