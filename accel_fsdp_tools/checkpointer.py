"""`Checkpointer`: the object for a training loop. When to save, which to keep, which to resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from . import background, contract
from .arguments import check_choice, check_positive, check_root, choose_policy, to_numbers
from .errors import AccelFsdpError, UsageError
from .export_live import export_model
from .holding import HeldRoot
from .model_changes import ModelChanges, Rename
from .permissions import Permissions
from .position import Position, StepAndEpoch
from .progress import track as track_loaders
from .ranks import run_on_each, run_on_main, wait_for_ranks
from .resuming import Resumed
from .retention import KeepBest, RetentionPolicy
from .run_loads import RunLoads
from .run_saves import RunSaves, SavePlan
from .running import DEFAULT_SIGNALS, EXPORTING, LOADING, SAVING, HangLimits, Health, RunGuard, Stop, Watching
from .save import get_run_id, release_copies
from .save_checks import check_naming
from .steps import follow_steps

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from .export import ExportReport

logger = logging.getLogger(__name__)


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

    From `resume` on the run is watched over: a signal, or a failing health check, on any rank makes all ranks save at
    the same step and leave with an exit code for it; ranks tell how far they are (`accel-fsdp health`); and with
    `hang_limits` one that hangs ends itself. See docs/running.md.

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
        on_signal: signals upon which all ranks save and leave with exit code 75; () for none.
        hang_limits: seconds that a step may take, or `HangLimits`; a rank that takes longer prints all stacks and ends.
        health: a command, run once per node, or a function, called on every rank; where it fails, all ranks save and
            leave with exit code 69.
        health_every: updates between two checks.
        health_timeout_s: a command that takes longer has failed.

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
        on_signal: Sequence[str] = DEFAULT_SIGNALS,
        hang_limits: HangLimits | float | None = None,
        health: Health = None,
        health_every: int = 100,
        health_timeout_s: float = 60.0,
    ) -> None:
        watching = Watching(on_signal, hang_limits, health, health_every, health_timeout_s)
        policy = choose_policy(keep_last, keep_every, keep_best, keep_every_s, retention)
        check_choice("when_busy", when_busy, ("wait", "skip"))
        self.root = check_root(root)
        self._accelerator, self._tokenizer, self._timeout_s = accelerator, tokenizer, timeout_s
        self._async_save, self._when_busy = async_save, when_busy
        permissions, objects = Permissions.make(strict=strict, elastic=elastic, allow=allow), tuple(allow_objects)
        self._loads = RunLoads(
            accelerator, self.root, on_damage, max_resumes, verify, permissions, objects, data_resume, timeout_s
        )
        plan = SavePlan(self.root, save_every, save_every_s, policy, verify, strict, tokenizer, timeout_s)
        self._saves = RunSaves(accelerator, plan)
        contract.check_setup(accelerator)
        check_naming(accelerator, self.root / "any")
        self._tracker = track_loaders(accelerator)
        self._tracker.train_index = self._tracker.find_train_loader(train_dataloader)
        self._counter = StepAndEpoch(self._tracker, self._tracker.train_index)
        follow_steps(accelerator)
        self._held = HeldRoot(self.root)
        self._guard = RunGuard(self.root, watching)
        self._metrics: dict[str, Any] = {}

    # -- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._saves.finish_alone()
        self._close(error)

    def close(self, *, discard: bool = False) -> None:
        """Wait for the save in flight, and give the root back. A run that dies without it is recognised as dead.

        Collective if a save is in flight (the `with` block that is left by an error lets it end as well, and only logs
        what it fails with, since other ranks may have had no error). Otherwise not.

        Args:
            discard: give the save in flight up instead of waiting for it.

        Raises:
            What the save in flight has failed with.
        """
        if discard:
            self._saves.discard()
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        try:
            self._finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if self._async_save:
                release_copies()
            self._held.release()
            self._guard.close(error)

    def wait(self) -> Path | None:
        """Wait for the save in flight, and return the path of its checkpoint; None if there was none. Collective.

        Raises:
            What it has failed with, the same on every rank; earlier checkpoints are untouched.
        """
        wait_for_ranks("Checkpointer.wait", timeout_s=self._timeout_s)
        return self._finish()

    def _finish(self) -> Path | None:
        if not self._saves.is_busy:
            return None
        with self._guard.phase(SAVING):
            return self._saves.finish()

    def phase(self, name: str, *, limit_s: float | None = None) -> AbstractContextManager[None]:
        """`with checkpointer.phase("evaluation")`: the watchdog waits longer, the heartbeats say so. Not collective.

        Args:
            name: what it is; saves, loads and exports name themselves.
            limit_s: how long it may take; `HangLimits.evaluation_s` where not given.
        """
        check_positive("limit_s", limit_s, (int, float))
        return self._guard.phase(name, limit_s=limit_s)

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
            Preempted: a signal came before the first step; nothing is saved, since nothing was trained.
            Whatever `load_state` raises.
        """
        if path is not None and fresh:
            raise UsageError("resume() was given both a path and fresh=True; choose one")
        changes = ModelChanges.make(rename, allow_missing, allow_unexpected, resize)
        wait_for_ranks("Checkpointer.resume", timeout_s=self._timeout_s)
        self._finish()
        self._open()
        resumed = Resumed()
        with self._guard.phase(LOADING):
            if path is not None:
                resumed = self._loads.load_named(Path(path).expanduser().absolute(), changes)
            elif not fresh:
                resumed = self._loads.load_newest(changes)
        self._held.may_save = True
        self._saves.begin(resumed.checkpoint_id)
        if resumed.report is None:
            self._tracker.begin_training()
            self._counter.begin()
            position = Position(epoch=0, step=0, batch=0, samples=0, fresh=True, skipped=resumed.skipped)
        else:
            position = self._counter.go_on(resumed.step, resumed.report, resumed.skipped)
        stop = self._guard.begin_training(self.num_steps)
        if stop is not None:
            self._guard.leave(stop, step=self.num_steps, path=None)
        return position

    def _open(self) -> None:
        """Take the root, and begin to watch over the run. Collective."""
        self._held.take(get_run_id())
        self._guard.begin(get_run_id(), self._held.attempt)

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
            Preempted, Unhealthy: a signal or a health check asked for it, and all ranks have saved at this step. They
                are `SystemExit`s: let them end the process, with their exit code.
        """
        given = {**(metrics or {}), **({} if loss is None else {"loss": loss})}
        self._metrics = {name: value.detach() if hasattr(value, "detach") else value for name, value in given.items()}
        if not self._accelerator.sync_gradients:
            return None
        self._counter.count_update()
        if not self._guard.is_begun:
            self._open()
        stop = self._guard.step(self.num_steps)
        if stop is None and self._saves.is_done():  # ranks end their parts at different moments: rank 0's decides
            self._finish()
        path = None
        if stop is None and self._saves.is_due(self.num_steps):
            path = self.save()
            stop = self._guard.ask()
        if stop is not None:
            self._leave(stop)
        return path

    def _leave(self, stop: Stop) -> NoReturn:
        try:
            self._finish()
        except AccelFsdpError as error:  # of an earlier step, as a rule: this one is still to be saved
            logger.error("%s", error)
        path = self._saves.find_saved(self.num_steps)
        if path is None:
            with self._guard.phase(SAVING):
                path = self._save(in_background=False)
        self._guard.leave(stop, step=self.num_steps, path=path)

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
        with self._guard.phase(SAVING):
            return self._save(pinned=pinned, in_background=self._async_save)

    def _save(self, *, pinned: bool = False, in_background: bool) -> Path | None:
        wait_for_ranks("Checkpointer.save", timeout_s=self._timeout_s)
        if self._saves.is_busy:
            if self._when_busy == "skip" and not self._saves.is_done():
                return None
            self._finish()
        self._held.take(get_run_id())
        run_on_main("checking the root", self._held.check)
        metrics = run_on_each("reading the metrics", lambda: to_numbers(self._metrics))
        return self._saves.write(
            self.num_steps,
            epoch=self._counter.get_epoch(),
            attempt=self._held.attempt,
            metrics=metrics,
            pinned=pinned,
            in_background=in_background,
        )

    def export(self, out: str | Path, *, model: torch.nn.Module | None = None, **options: Any) -> ExportReport:
        """Write the model as it is in memory now to `out`, as a Hugging Face directory; see `export_model`.

        Nothing is saved or counted, and the root is not touched.

        Args:
            out: the directory to write.
            model: which one, where several are prepared.
            options: as for `export_model`; the tokenizer is the one given to this object.
        """
        with self._guard.phase(EXPORTING):
            background.wait_alone()  # the storage, and the memory of the copies
            return export_model(
                self._accelerator, model, out, **{"tokenizer": self._tokenizer, "timeout_s": self._timeout_s, **options}
            )
