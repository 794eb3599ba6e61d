"""`Checkpointer`: the object for a training loop. When to save, which to keep, which to resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import background, contract
from .arguments import check_positive, choose_policy, to_numbers
from .assets import check_tokenizer
from .background import PendingSave
from .errors import UsageError
from .export_live import export_model
from .holding import HeldRoot
from .keeping import settle_checkpoint
from .load import READS_CHECKSUMS, VERIFY_MODES, load_checkpoint
from .load_notes import LoadNotes
from .manifest import Lineage, has_manifest, read_manifest
from .model_changes import ModelChanges, Rename
from .permissions import Permissions
from .position import Position, StepAndEpoch
from .progress import check_data_resume
from .progress import track as track_loaders
from .ranks import broadcast, run_on_each, run_on_main, wait_for_ranks
from .recording import join
from .records import pin
from .report import LoadReport
from .resuming import ON_DAMAGE, Resumed, load_newest
from .retention import KeepBest, RetentionPolicy
from .save import SaveOrder, get_run_id, release_copies, start_checkpoint, write_checkpoint
from .save_checks import check_naming
from .steps import follow_steps
from .survey import get_name

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from .export import ExportReport
    from .recording import Recorder

logger = logging.getLogger(__name__)

_WHEN_BUSY = ("wait", "skip")


class Checkpointer:
    """Saves every N steps, keeps those that a policy names, and resumes from the newest whole checkpoint.

        with Checkpointer(accelerator, "runs/a", save_every=500, keep_last=3) as checkpointer:
            position = checkpointer.resume()
            for epoch in range(position.epoch, num_epochs):
                for batch in loader:
                    with accelerator.accumulate(model):
                        ...
                    checkpointer.step(loss=loss)

    One run at a time may use a root; a lock with a heartbeat sees to it. Every method is collective.

    After each save the new checkpoint is read back from disk, and only then old ones go: those that none of the
    `keep_` arguments covers. What has not been read back never counts towards them, the newest that has been never
    goes, nor does what is pinned, nor anything that a user saved or renamed here.

    With `async_save` training stops only while everything is copied to host memory; the rest, removing old ones
    included, goes on in the background. One save is in flight at a time. If it fails, the next `step` that counts an
    update, `save`, `wait`, `resume` or `close` raises that on every rank; nothing of it is left, and training can go
    on. Leaving the `with` block, `close` and the end of the process wait for it.

    Args:
        accelerator: with everything prepared.
        root: directory for the checkpoints `step_00000500`, ..., on storage that all ranks share.
        save_every: updates between two saves; None saves only on `save()` or by time.
        save_every_s: seconds between two saves, judged by rank 0 for all.
        keep_last: how many of the newest stay; None keeps all.
        keep_every: checkpoints of steps that are multiples of this stay for good.
        keep_best: metric, "min" or "max", and how many, ("loss", "min", 3), or a `retention.KeepBest`: those stay. The
            metric is one of those last given to `step` before the save.
        keep_every_s: one checkpoint per so many seconds stays for good.
        retention: a policy of the module `retention`, or of your own, in place of all `keep_` arguments.
        on_damage: where the newest checkpoint is damaged, `resume` falls back to the one before, and so on. This is
            what it does when none is left: "fail" raises, "fresh" starts anew. "stop" never falls back: it raises on
            the first that is damaged.
        max_resumes: pass over a checkpoint that so many runs have begun with without saving again (a crash loop);
            None never does.
        verify: as for `load_state`; "off" also skips reading back before pruning.
        train_dataloader: the prepared loader that `Position` speaks of; needed only when several are prepared and
            not exactly one of them shuffles.
        strict: as for `load_state` and `save_state`.
        elastic, allow: as for `load_state`.
        tokenizer: as for `save_state`.
        allow_objects: as for `load_state`.
        data_resume: as for `load_state`.
        async_save: save in the background. Takes memory for one copy of what is on this rank.
        when_busy: what a save does while another is in flight: "wait" for it, or "skip" itself.
        timeout_s: how long to wait for a rank that does not arrive.

    Raises:
        UsageError: an argument cannot be right, or the set-up cannot be saved.
        CallOrderError: called before `prepare`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        root: str | Path,
        *,
        save_every: int | None = None,
        save_every_s: float | None = None,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: KeepBest | Sequence[Any] | None = None,
        keep_every_s: float | None = None,
        retention: RetentionPolicy | None = None,
        on_damage: str = "fail",
        max_resumes: int | None = None,
        verify: str = "auto",
        async_save: bool = False,
        when_busy: str = "wait",
        train_dataloader: Any = None,
        strict: bool = True,
        elastic: str = "refuse",
        allow: Sequence[str] = (),
        tokenizer: Any = None,
        allow_objects: Sequence[str] = (),
        data_resume: str = "skip",
        timeout_s: float | None = None,
    ) -> None:
        check_positive("save_every", save_every, int)
        check_positive("save_every_s", save_every_s, (int, float))
        check_positive("max_resumes", max_resumes, int)
        check_positive("timeout_s", timeout_s, (int, float))
        self._policy = choose_policy(keep_last, keep_every, keep_best, keep_every_s, retention)
        choices = (
            ("verify", verify, VERIFY_MODES),
            ("on_damage", on_damage, ON_DAMAGE),
            ("when_busy", when_busy, _WHEN_BUSY),
        )
        for name, value, allowed in choices:
            if value not in allowed:
                raise UsageError(f"{name} is {value!r}; use one of {', '.join(allowed)}", actual=value)
        self._recorder = join()
        self.root = Path(root).expanduser().absolute() if self._recorder is None else self._recorder.root
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{self.root} is a file; give a directory for the checkpoints", path=str(self.root))
        contract.check_setup(accelerator)
        check_naming(accelerator, self.root / "any")
        self._accelerator = accelerator
        self._save_every, self._save_every_s = save_every, save_every_s
        self._on_damage, self._max_resumes = on_damage, max_resumes
        self._verify, self._strict = verify, strict
        check_data_resume(data_resume)
        self._data_resume = data_resume
        self._changes: ModelChanges | None = None
        self._permissions = Permissions.make(strict=strict, elastic=elastic, allow=allow)
        self._async_save, self._when_busy = async_save, when_busy
        self._pending: PendingSave | None = None
        self._allow_objects, self._timeout_s = tuple(allow_objects), timeout_s
        check_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._tracker = track_loaders(accelerator)
        self._tracker.train_index = self._tracker.find_train_loader(train_dataloader)
        self._counter = StepAndEpoch(self._tracker, self._tracker.train_index)
        follow_steps(accelerator)
        if self._recorder is not None:
            self._recorder.attach(accelerator)
        self._held = HeldRoot(self.root)
        self._parent_id: str | None = None
        self._last_save = time.monotonic()
        self._metrics: dict[str, Any] = {}

    # -- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._finish_alone()
        self.close()

    def close(self, *, discard: bool = False) -> None:
        """Wait for the save in flight, and give the root back. A run that dies without it is recognised as dead.

        Collective if a save is in flight (the `with` block that is left by an error lets it end as well, and only logs
        what it fails with, since other ranks may have had no error). Otherwise not.

        Args:
            discard: give the save in flight up instead of waiting for it.

        Raises:
            What the save in flight has failed with.
        """
        try:
            if discard and self._pending is not None:
                self._pending.discard()
                self._pending = None
            self._finish()
        finally:
            if self._async_save:
                release_copies()
            self._held.release()

    def _finish_alone(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait_alone()
            if pending.failure is not None:
                logger.error("%s was not saved: %s", pending.path, pending.failure)

    def wait(self) -> Path | None:
        """Wait for the save in flight, and return the path of its checkpoint; None if there was none. Collective.

        Raises:
            What it has failed with, the same on every rank; earlier checkpoints are untouched.
        """
        wait_for_ranks("Checkpointer.wait", timeout_s=self._timeout_s)
        return self._finish()

    def _finish(self) -> Path | None:
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            return pending.wait()
        finally:
            if pending.is_committed:
                self._parent_id = pending.checkpoint_id

    # -- resume -------------------------------------------------------------------------------------------------

    def resume(
        self,
        path: str | Path | None = None,
        *,
        fresh: bool = False,
        rename: Rename | None = None,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
        resize: Sequence[str] = (),
    ) -> Position:
        """Load the newest whole checkpoint of the root, or `path`, and return where training goes on.

        The newest is the last one along the lineage: of the latest attempt that saved anything, the highest recorded
        step; never by time or by name. All ranks load the one that rank 0 chose, after they have agreed that they see
        the same. One that is damaged is moved to `<root>/.quarantine` with the reason, and the one before it is loaded:
        every rank logs that, and `Position.skipped` and the report's notes say it. What is no damage (a run that does
        not fit the checkpoint, say) is raised instead. An empty root is a fresh start. A root that holds only what
        cannot be resumed (unfinished, damaged, or written by others) is not: that would throw a run away in silence.

        Args:
            path: a checkpoint to go back to; training from there becomes the newest branch with its first save. If it
                is damaged there is no falling back.
            fresh: start anew whatever the root holds.
            rename, allow_missing, allow_unexpected, resize: as for `load_state`.

        Raises:
            CheckpointIncompleteError: the root holds checkpoints, and none that can be resumed.
            StorageError: a rank sees something else than the others; names it.
            LockedError: another live run uses the root.
            Whatever `load_state` raises.
        """
        if path is not None and fresh:
            raise UsageError("resume() was given both a path and fresh=True; choose one")
        if self._recorder is not None:
            path = None  # a rehearsal begins from nothing, and resumes from its own
        self._changes = ModelChanges.make(rename, allow_missing, allow_unexpected, resize)
        wait_for_ranks("Checkpointer.resume", timeout_s=self._timeout_s)
        self._finish()
        self._held.take(get_run_id())
        resumed = Resumed()
        if path is not None:
            resumed = self._load_named(Path(path).expanduser().absolute())
        elif not fresh:
            resumed = load_newest(
                self._accelerator,
                self.root,
                self._load,
                on_damage=self._on_damage,
                max_resumes=self._max_resumes,
                verifies=self._verify in READS_CHECKSUMS,
                run_id=get_run_id(),
            )
        self._held.may_save = True
        self._parent_id = resumed.checkpoint_id
        self._last_save = time.monotonic()
        if resumed.report is None:
            self._tracker.begin_training()
            self._counter.begin()
            position = Position(epoch=0, step=0, batch=0, samples=0, fresh=True, skipped=resumed.skipped)
        else:
            position = self._counter.go_on(resumed.step, resumed.report, resumed.skipped)
        if self._recorder is not None:
            self._recorder.begin(position.step, position.report)
        return position

    def _load(self, path: Path, allow_after_step: bool, notes: LoadNotes) -> LoadReport:
        return load_checkpoint(
            self._accelerator,
            path,
            notes,
            verify=self._verify,
            permissions=self._permissions,
            changes=self._changes,
            allow_after_step=allow_after_step,
            allow_objects=self._allow_objects,
            data_resume=self._data_resume,
            timeout_s=self._timeout_s,
        )

    def _load_named(self, path: Path) -> Resumed:
        report = self._load(path, True, LoadNotes())

        def describe() -> tuple[str | None, int]:
            if not has_manifest(path):
                return None, 0
            manifest = read_manifest(path)
            return manifest.lineage.checkpoint_id, max(manifest.step, 0)

        checkpoint_id, step = run_on_main("reading the step", describe)
        return Resumed(path, checkpoint_id, step, report)

    # -- save ---------------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Updates made so far, those of earlier runs included."""
        return self._counter.step

    def step(self, *, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Path | None:
        """Count an update, and save if one is due. Call it once per batch, after `optimizer.step()`.

        In the middle of a gradient accumulation nothing is counted and nothing is saved. `loss` and `metrics`
        (numbers or one-element tensors) are recorded in the manifest of the next checkpoint.

        Returns:
            The checkpoint's path if one was saved; with `async_save`, the path that it will have.

        Raises:
            What a save in flight has failed with. The update is counted nevertheless.
        """
        given = {**(metrics or {}), **({} if loss is None else {"loss": loss})}
        self._metrics = {name: value.detach() if hasattr(value, "detach") else value for name, value in given.items()}
        if self._recorder is not None:
            self._recorder.note_loss(loss)
        if not self._accelerator.sync_gradients:
            return None
        self._counter.count_update()
        # Ranks end their parts at different moments: rank 0's decides when all of them look.
        if self._pending is not None and broadcast(self._pending.done):
            self._finish()
        if self._recorder is not None:
            return self._step_in_rehearsal(self._recorder)
        return self.save() if self._is_due() else None

    def _step_in_rehearsal(self, recorder: Recorder) -> Path | None:
        is_ordered = recorder.end_step(self.num_steps)
        path = self.save() if self._is_due() or is_ordered else None
        recorder.leave_step(self.num_steps, self._finish)
        return path

    def _is_due(self) -> bool:
        if self._save_every is not None and self.num_steps % self._save_every == 0:
            return True
        if self._save_every_s is None:
            return False
        # Clocks differ: rank 0's decides, or some ranks would enter the save and others not.
        return broadcast(time.monotonic() - self._last_save >= self._save_every_s)

    def save(self, *, pinned: bool = False) -> Path | None:
        """Save now, then remove what nothing keeps any longer. Returns the committed checkpoint's path.

        With `async_save` that is the path which the checkpoint will have, and the removing comes later; None if this
        save was skipped because another is in flight.

        Args:
            pinned: this one stays until it is unpinned (`accel-fsdp pin --undo`), whatever the policy says.

        Raises:
            CallOrderError: gradients are partly accumulated.
            DamagedCheckpointError: the new checkpoint cannot be read back as it was written; nothing was removed.
            Whatever `save_state` raises; the earlier checkpoints are untouched then.
        """
        wait_for_ranks("Checkpointer.save", timeout_s=self._timeout_s)
        if self._pending is not None:
            if self._when_busy == "skip" and not broadcast(self._pending.done):
                return None
            self._finish()
        self._held.take(get_run_id())
        run_on_main("checking the root", self._held.check)
        metrics = run_on_each("reading the metrics", lambda: to_numbers(self._metrics))
        path = self.root / get_name(self.num_steps)
        order = SaveOrder(
            attempt=self._held.attempt,
            parent_id=self._parent_id,
            step=self.num_steps,
            epoch=self._counter.get_epoch(),
            strict=self._strict,
            tokenizer=self._tokenizer,
            timeout_s=self._timeout_s,
            extra={"metrics": metrics},
        )

        def settle(path: Path, lineage: Lineage) -> None:
            if pinned:
                run_on_main("pinning", lambda: pin(self.root, lineage.checkpoint_id, name=path.name))
            settle_checkpoint(path, lineage, policy=self._policy, verify=self._verify, run_id=get_run_id())

        if self._async_save:
            self._pending = start_checkpoint(self._accelerator, path, order, follow=settle)
            self._last_save = time.monotonic()
            return path
        path, lineage = write_checkpoint(self._accelerator, path, order)
        self._parent_id = lineage.checkpoint_id
        self._last_save = time.monotonic()
        settle(path, lineage)
        return path

    def export(self, out: str | Path, *, model: torch.nn.Module | None = None, **options: Any) -> ExportReport:
        """Write the model as it is in memory now to `out`, as a Hugging Face directory; see `export_model`.

        Nothing is saved or counted, and the root is not touched.

        Args:
            out: the directory to write.
            model: which one, where several are prepared.
            options: as for `export_model`; the tokenizer is the one given to this object.
        """
        background.wait_alone()  # the storage, and the memory of the copies
        return export_model(
            self._accelerator, model, out, **{"tokenizer": self._tokenizer, "timeout_s": self._timeout_s, **options}
        )
