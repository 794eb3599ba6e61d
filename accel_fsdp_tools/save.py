"""`save_state`: what Accelerate writes, what it leaves out, a manifest, and a commit that is all or nothing.

A save has two halves. The first needs the run as it is now (`_begin`); the second needs only what the first has
gathered (`_complete`), so that it can follow on another thread.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from . import background
from .assets import write_assets
from .background import PendingSave
from .commit import Staging, commit_staging, discard_staging, open_staging
from .completing import complete_checkpoint
from .delegate import Write, copy_with_accelerate, iterate_live, make_directories, save_with_accelerate, write_all
from .host_copies import HostCopies
from .inventory import Draft, build_manifest, draft_inventory
from .manifest import DIRECTORY, Lineage, Manifest, write_manifest
from .phases import reach
from .rank_objects import EncodedObject, encode_object, find_different, write_rank_objects
from .rank_state import write_rank_state
from .ranks import broadcast, get_rank, get_world_size, run_on_each, run_on_main, run_together, wait_for_ranks
from .rng import RngSnapshot
from .save_checks import check_before, check_same_target, check_shared
from .steps import follow_steps

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .progress import LoaderProgress

_run_id: str | None = None


def get_run_id() -> str:
    """Return this process group's id, the same on every rank. Collective on the first call."""
    global _run_id
    if _run_id is None:
        _run_id = broadcast(uuid.uuid4().hex[:12])
    return _run_id


@overload
def save_state(
    accelerator: Accelerator,
    output_dir: str | Path,
    *,
    step: int | None = None,
    overwrite: bool = False,
    strict: bool = True,
    tokenizer: Any = None,
    timeout_s: float | None = None,
    async_save: Literal[False] = False,
) -> Path: ...


@overload
def save_state(
    accelerator: Accelerator,
    output_dir: str | Path,
    *,
    step: int | None = None,
    overwrite: bool = False,
    strict: bool = True,
    tokenizer: Any = None,
    timeout_s: float | None = None,
    async_save: Literal[True],
) -> PendingSave: ...


def save_state(
    accelerator: Accelerator,
    output_dir: str | Path,
    *,
    step: int | None = None,
    overwrite: bool = False,
    strict: bool = True,
    tokenizer: Any = None,
    timeout_s: float | None = None,
    async_save: bool = False,
) -> Path | PendingSave:
    """Save everything that an exact resume needs to `output_dir`, whole or not at all.

    Accelerate writes its files into a directory aside; beside them come the random generators of every rank, the
    progress of every prepared dataloader, and a manifest with sizes and checksums. When every rank has succeeded the
    directory is renamed to `output_dir`; until then whatever was there stays. Plain `accelerator.load_state` loads
    the result. The run itself is not changed: random generators and optimizers are as before the call.

    Collective: every rank calls it at the same place, between an update and the next batch. A checkpoint of this
    package at `output_dir` is replaced, surviving a crash in the middle.

    With `async_save` training waits only until everything has been copied to host memory (of the size of what is on
    this rank, kept for the next time); writing, syncing, checksums and the commit go on in the background. The result
    is the same. One save at a time is in flight: the next save first waits for it, and so does `load_state`. What
    goes wrong is raised on every rank by `PendingSave.wait` or by the next save. `accelerator.end_training()` waits as
    well, and so does a process that ends; before `torch.distributed.destroy_process_group` call `wait()` yourself.

    Args:
        accelerator: with models, optimizers, schedulers and dataloaders prepared.
        output_dir: the same on every rank, on storage that all ranks share.
        step: number of updates made, for the manifest; counted by this package where not given.
        overwrite: replace a directory that this package did not write.
        strict: False lets a dataloader through that was used before it was followed; its progress is then absent.
        tokenizer: tokenizer or processor to keep with the model's config in the checkpoint, for exports.
        timeout_s: how long to wait for a rank that does not arrive.
        async_save: return as soon as training may go on.

    Returns:
        The path of the committed checkpoint; with `async_save` a `PendingSave`, whose `wait()` returns it.

    Raises:
        CallOrderError: before `prepare`, or in the middle of a gradient accumulation.
        UsageError: `output_dir` cannot be used, or differs between ranks.
        StorageError: the storage is not shared between ranks or not writable.
        DataProgressError: a dataloader was used before it was followed.
        RankMissingError, RankFailedError: another rank did not arrive, or failed.
        Whatever a save in flight has failed with; this one has not begun then.
    """
    order = SaveOrder(step=step, overwrite=overwrite, strict=strict, tokenizer=tokenizer, timeout_s=timeout_s)
    if async_save:
        return start_checkpoint(accelerator, Path(output_dir), order)
    return write_checkpoint(accelerator, Path(output_dir), order)[0]


@dataclass(frozen=True)
class SaveOrder:
    """What `save_state` is told, and the lineage and position that a `Checkpointer` knows beside that."""

    attempt: int = 0
    parent_id: str | None = None
    step: int | None = None
    epoch: int | None = None
    overwrite: bool = False
    strict: bool = True
    tokenizer: Any = None
    timeout_s: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def write_checkpoint(accelerator: Accelerator, output_dir: Path, order: SaveOrder) -> tuple[Path, Lineage]:
    """Do what `save_state` promises. Collective. Returns the checkpoint's path, and its place in the lineage."""
    begun = _begin(accelerator, output_dir, order)
    _complete(begun)
    return begun.staging.final, begun.manifest.lineage


def start_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    order: SaveOrder,
    *,
    follow: Callable[[Path, Lineage], None] | None = None,
) -> PendingSave:
    """Do the same in the background, once everything has been copied. Collective.

    Args:
        follow: what to do after the commit, on the thread of the save: collective, over its channel.
    """
    begun = _begin(accelerator, output_dir, order, copies=_get_copies())
    _wait_before_the_end(accelerator)
    final, lineage = begun.staging.final, begun.manifest.lineage
    pending = PendingSave(final, lineage.checkpoint_id)

    def work() -> None:
        _complete(begun, pending)
        if follow is not None:
            follow(final, lineage)

    background.start(pending, begun.channel, work)
    return pending


_copies: HostCopies | None = None


def _get_copies() -> HostCopies:
    global _copies
    if _copies is None:
        _copies = HostCopies()
    return _copies


def release_copies() -> None:
    """Give back the host memory that saves in the background use. Not collective; none may be in flight."""
    if _copies is not None:
        _copies.release()


def _wait_before_the_end(accelerator: Accelerator) -> None:
    """Let `accelerator.end_training()`, which destroys the process groups, wait for the save in flight."""
    if "end_training" in vars(accelerator):
        return
    original = accelerator.end_training

    @functools.wraps(original)
    def end_training(*args: Any, **kwargs: Any) -> Any:
        try:
            background.finish_current()
        finally:
            result = original(*args, **kwargs)
        return result

    accelerator.end_training = end_training


# -- the two halves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Begun:
    """A save of which everything is gathered that the run changes."""

    staging: Staging
    manifest: Manifest  # without files and sums
    draft: Draft
    written: list[str]  # files of all ranks beside Accelerate's
    writes: list[Write] | None = None  # what is still to be written, from copies
    channel: Any = None  # for the thread in the background


def _begin(accelerator: Accelerator, output_dir: Path, order: SaveOrder, *, copies: HostCopies | None = None) -> _Begun:
    """Check, and gather everything that the run changes. Collective.

    Args:
        copies: copy the large tensors there and write them later; without it they are written at once.
    """
    background.finish_current()
    wait_for_ranks("save_state", timeout_s=order.timeout_s)
    final = output_dir.expanduser().absolute()
    run_id = get_run_id()
    counter = follow_steps(accelerator)
    loaders = run_on_each("checking before the save", lambda: _check_before(accelerator, final, order))
    check_same_target(final)
    channel = background.prepare_channel() if copies is not None else None
    staging = run_on_main("opening the checkpoint", lambda: open_staging(final, run_id))
    lineage = broadcast(Lineage(uuid.uuid4().hex, run_id, order.attempt, order.parent_id))
    with _discarded_on_failure(staging), contextlib.ExitStack() as stack:
        run_together("looking for the shared storage", lambda: _look_and_prepare(accelerator, staging))
        if copies is not None:
            stack.enter_context(copies.taking(iterate_live(accelerator)))
        rng = RngSnapshot.capture()
        with counter.paused(), _unchanged(rng):
            writes = run_on_each("saving with Accelerate", lambda: _delegate(accelerator, staging.partial, copies))
        assets = staging.partial / DIRECTORY
        run_on_main("writing the config", lambda: write_assets(accelerator, assets, tokenizer=order.tokenizer))
        objects, opaque = _compare_objects(accelerator)
        written = run_together(
            "writing RNG and data progress",
            lambda: _write_rank_state(accelerator, staging, rng, loaders, objects),
        )
        draft = draft_inventory(accelerator, copies)
        manifest = build_manifest(
            accelerator,
            draft,
            lineage=lineage,
            step=order.step if order.step is not None else counter.count,
            epoch=order.epoch if order.epoch is not None else max((each.epoch for each in loaders), default=0),
            opaque_objects=opaque,
            num_pending=0 if accelerator.optimizer_step_was_skipped else counter.num_pending,
            extra=order.extra,
        )
    return _Begun(staging, manifest, draft, [name for names in written for name in names], writes, channel)


def _look_and_prepare(accelerator: Accelerator, staging: Staging) -> None:
    check_shared(staging)
    if get_rank() == 0:
        make_directories(accelerator, staging.partial)


def _check_before(accelerator: Accelerator, final: Path, order: SaveOrder) -> list[LoaderProgress]:
    return check_before(accelerator, final, order.step, order.overwrite, order.strict, order.tokenizer)


def _complete(begun: _Begun, pending: PendingSave | None = None) -> None:
    """Write what is still to be written, make all durable, and commit. Collective."""
    require_wanted = pending.require_wanted if pending is not None else lambda: None
    staging, writes = begun.staging, begun.writes
    with _discarded_on_failure(staging):
        if writes is not None:
            run_together("beginning to write", lambda: _begin_to_write(require_wanted))
            run_together("writing the checkpoint", lambda: _write(writes))
        manifest = complete_checkpoint(staging.partial, begun.manifest, begun.draft, begun.written)
        run_together("judging whether to commit", require_wanted)
        run_on_main("committing", lambda: _commit(staging, manifest))
    if pending is not None:
        pending.is_committed = True
    run_together("ending the save", lambda: reach("save.committed"))


@contextlib.contextmanager
def _discarded_on_failure(staging: Staging) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if get_rank() == 0:
            discard_staging(staging)
        raise


@contextlib.contextmanager
def _unchanged(rng: RngSnapshot) -> Iterator[None]:
    """Put the random generators back: a run with saves must draw the same numbers as one without."""
    try:
        yield
    finally:
        rng.restore()


def _delegate(accelerator: Accelerator, directory: Path, copies: HostCopies | None) -> list[Write] | None:
    if copies is not None:
        return copy_with_accelerate(accelerator, directory, copies)
    save_with_accelerate(accelerator, directory)
    reach("save.delegated")
    return None


def _begin_to_write(require_wanted: Callable[[], None]) -> None:
    reach("save.writing")
    require_wanted()


def _write(writes: list[Write]) -> None:
    write_all(writes)  # collective: whoever fails before would leave the others waiting in it
    reach("save.delegated")


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


def _commit(staging: Staging, manifest: Manifest) -> None:
    write_manifest(staging.partial, manifest)
    reach("save.manifest")
    commit_staging(staging)
