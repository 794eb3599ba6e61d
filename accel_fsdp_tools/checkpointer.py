"""`Checkpointer`: the object for a training loop. When to save, which to keep, which to resume."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import contract
from .commit import Found, delete_checkpoint, find_checkpoints, make_root, recover
from .errors import AccelFsdpError, CallOrderError, CheckpointIncompleteError, UsageError
from .files import check_files
from .load import VERIFY_MODES, load_state
from .manifest import Manifest, read_manifest
from .ownership import RootLock
from .phases import reach
from .progress import track as track_loaders
from .ranks import broadcast, get_rank, get_world_size, run_on_each, run_on_main, run_together, wait_for_ranks
from .report import LoadReport
from .retention import choose_deletions
from .save import check_naming, get_run_id, write_checkpoint
from .steps import follow_steps

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Where training goes on.

    `epoch` counts passes over the training loader; it is the one to continue with: `for epoch in range(position.epoch,
    num_epochs)`. `batch` is how many batches of it were handed out before the save; the loader skips them by itself.
    Saved with an epoch's last batch in hand, `batch` is the whole epoch: the loop body is then not entered again, but
    the code after it runs, as it would have. `samples` counts the samples that all ranks together have been handed.
    """

    epoch: int
    step: int
    batch: int
    samples: int
    fresh: bool
    report: LoadReport | None = None

    def __str__(self) -> str:
        if self.fresh:
            return "fresh start"
        return f"resumed at epoch {self.epoch}, batch {self.batch}, step {self.step}"


@dataclass(frozen=True)
class _Choice:
    """What rank 0 found in the root."""

    path: Path | None
    attempt: int
    skipped: tuple[str, ...] = field(default=())


class Checkpointer:
    """Saves every N steps, keeps the last few, and resumes from the newest whole checkpoint.

        with Checkpointer(accelerator, "runs/a", save_every=500, keep_last=3) as checkpointer:
            position = checkpointer.resume()
            for epoch in range(position.epoch, num_epochs):
                for batch in loader:
                    with accelerator.accumulate(model):
                        ...
                    checkpointer.step(loss=loss)

    One run at a time may use a root; a lock with a heartbeat sees to it. Every method is collective.

    Args:
        accelerator: with everything prepared.
        root: directory for the checkpoints `step_00000500`, ..., on storage that all ranks share.
        save_every: updates between two saves; None saves only on `save()` or by time.
        save_every_s: seconds between two saves, judged by rank 0 for all.
        keep_last: how many committed checkpoints stay; None keeps all. Old ones go only after a new one has been
            committed and read back from disk.
        verify: as for `load_state`; "off" also skips reading back before pruning.
        train_dataloader: the prepared loader that `Position` speaks of; needed only when several are prepared and
            not exactly one of them shuffles.
        strict: as for `load_state` and `save_state`.
        allow_objects: as for `load_state`.
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
        verify: str = "auto",
        train_dataloader: Any = None,
        strict: bool = True,
        allow_objects: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> None:
        _check_positive("save_every", save_every, int)
        _check_positive("save_every_s", save_every_s, (int, float))
        _check_positive("timeout_s", timeout_s, (int, float))
        choose_deletions(list[Found](), keep_last=keep_last)
        if verify not in VERIFY_MODES:
            raise UsageError(f"verify is {verify!r}; use one of {', '.join(VERIFY_MODES)}", actual=verify)
        self.root = Path(root).expanduser().absolute()
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{self.root} is a file; give a directory for the checkpoints", path=str(self.root))
        contract.check_setup(accelerator)
        check_naming(accelerator, self.root / "any")
        self._accelerator = accelerator
        self._save_every, self._save_every_s = save_every, save_every_s
        self._keep_last, self._verify, self._strict = keep_last, verify, strict
        self._allow_objects, self._timeout_s = tuple(allow_objects), timeout_s
        self._tracker = track_loaders(accelerator)
        self._train_index = self._tracker.find_train_loader(train_dataloader)
        follow_steps(accelerator)
        self._lock: RootLock | None = None
        self._is_open = False
        self._has_resumed = False
        self._step = 0
        self._num_epochs = 0  # passes of the training loader in which an update was made, the current one included
        self._last_pass: int | None = None
        self._attempt = 0
        self._parent_id: str | None = None
        self._last_save = time.monotonic()
        self._metrics: dict[str, Any] = {}

    # -- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the root back. Not collective; a run that dies without it is recognised as dead."""
        self._is_open = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open(self) -> None:
        """Take the root: lock it and finish what a dead run left half done."""
        if self._is_open:
            return
        run_id = get_run_id()

        def take() -> tuple[list[str], int]:
            make_root(self.root)
            lock = RootLock(self.root, run_id)
            lock.acquire()
            self._lock = lock
            done = recover(self.root)
            known = [each.manifest.lineage.attempt for each in find_checkpoints(self.root) if each.manifest]
            return done, max(known, default=0) + 1

        done, self._attempt = run_on_main("opening the root", take)
        self._is_open = True
        for line in done:
            logger.info("%s: %s", self.root, line)

    # -- resume -------------------------------------------------------------------------------------------------

    def resume(self, path: str | Path | None = None, *, fresh: bool = False) -> Position:
        """Load the newest committed checkpoint of the root, or `path`, and return where training goes on.

        The newest is the last one along the lineage: of the latest attempt that saved anything, the highest recorded
        step; never by time or by name. All ranks load the one that rank 0 chose. An empty root is a fresh start. A
        root that holds only what cannot be resumed (unfinished, damaged, or written by others) is not: that would
        throw a run away in silence.

        Args:
            path: a checkpoint to go back to; training from there becomes the newest branch with its first save.
            fresh: start anew whatever the root holds.

        Raises:
            CheckpointIncompleteError: the root holds checkpoints, and none that can be resumed.
            LockedError: another live run uses the root.
            Whatever `load_state` raises.
        """
        if path is not None and fresh:
            raise UsageError("resume() was given both a path and fresh=True; choose one")
        wait_for_ranks("Checkpointer.resume", timeout_s=self._timeout_s)
        self._open()
        chosen = None if path is None else Path(path).expanduser().absolute()
        choice = _Choice(chosen, self._attempt)
        if chosen is None and not fresh:
            choice = run_on_main("choosing a checkpoint", lambda: _choose(self.root, self._attempt))
        self._has_resumed = True
        if choice.path is None:
            self._tracker.begin_training()
            self._step, self._parent_id = 0, None
            self._num_epochs, self._last_pass = 0, None
            return Position(epoch=0, step=0, batch=0, samples=0, fresh=True)
        report = load_state(
            self._accelerator,
            choice.path,
            verify=self._verify,
            strict=self._strict,
            allow_objects=self._allow_objects,
            allow_after_step=path is not None,
            timeout_s=self._timeout_s,
        )
        if choice.skipped:
            report = dataclasses.replace(report, notes=(*report.notes, *choice.skipped))
        for line in choice.skipped:
            logger.warning("%s", line)
        self._step = self._read_step(choice.path, report)
        self._last_save = time.monotonic()
        return self._describe_position(report)

    def _read_step(self, path: Path, report: LoadReport) -> int:
        if not report.has_manifest:
            self._parent_id = None
            return 0
        manifest: Manifest = run_on_main("reading the step", lambda: read_manifest(path))
        self._parent_id = manifest.lineage.checkpoint_id
        return max(manifest.step, 0)

    def _describe_position(self, report: LoadReport) -> Position:
        if self._train_index is None:
            return Position(report.epoch, self._step, 0, 0, fresh=False, report=report)
        loader = self._tracker.loaders[self._train_index]
        # The pass that is gone on with is counted already when its first update comes.
        is_in_pass = loader.batch > 0
        epoch = report.epoch if report.has_manifest else loader.epoch
        self._num_epochs = epoch + 1 if is_in_pass else epoch
        self._last_pass = loader.epoch if is_in_pass else None
        return Position(epoch, self._step, loader.batch, loader.samples, fresh=False, report=report)

    # -- save ---------------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Updates made so far, those of earlier runs included."""
        return self._step

    def step(self, *, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Path | None:
        """Count an update, and save if one is due. Call it once per batch, after `optimizer.step()`.

        In the middle of a gradient accumulation nothing is counted and nothing is saved. `loss` and `metrics`
        (numbers or one-element tensors) are recorded in the manifest of the next checkpoint.

        Returns:
            The checkpoint's path if one was saved.
        """
        given = {**(metrics or {}), **({} if loss is None else {"loss": loss})}
        self._metrics = {name: value.detach() if hasattr(value, "detach") else value for name, value in given.items()}
        if not self._accelerator.sync_gradients:
            return None
        self._step += 1
        self._count_epoch()
        return self.save() if self._is_due() else None

    def _count_epoch(self) -> None:
        """Count a pass of the training loader when its first update is made.

        Other passes over it (a look at a batch, a metric over the training data) are no epochs.
        """
        if self._train_index is not None:
            current = self._tracker.loaders[self._train_index].epoch
            if current != self._last_pass:
                self._num_epochs, self._last_pass = self._num_epochs + 1, current

    def _get_epoch(self) -> int | None:
        """Return how many epochs have ended; a script that never calls `step` has all passes counted."""
        if self._train_index is None:
            return None
        current = self._tracker.loaders[self._train_index].epoch
        if self._num_epochs == 0:
            return current
        return self._num_epochs - 1 if current == self._last_pass else self._num_epochs

    def _is_due(self) -> bool:
        if self._save_every is not None and self._step % self._save_every == 0:
            return True
        if self._save_every_s is None:
            return False
        # Clocks differ: rank 0's decides, or some ranks would enter the save and others not.
        return broadcast(time.monotonic() - self._last_save >= self._save_every_s)

    def save(self) -> Path:
        """Save now, then remove what `keep_last` no longer covers. Returns the committed checkpoint's path.

        Raises:
            CallOrderError: gradients are partly accumulated.
            Whatever `save_state` raises; the earlier checkpoints are untouched then.
        """
        wait_for_ranks("Checkpointer.save", timeout_s=self._timeout_s)
        self._open()
        run_on_main("checking the root", self._check_root)
        metrics = run_on_each("reading the metrics", lambda: _to_numbers(self._metrics))
        path, lineage = write_checkpoint(
            self._accelerator,
            self.root / f"step_{self._step:08d}",
            attempt=self._attempt,
            parent_id=self._parent_id,
            step=self._step,
            epoch=self._get_epoch(),
            strict=self._strict,
            timeout_s=self._timeout_s,
            extra={"metrics": metrics},
        )
        self._parent_id = lineage.checkpoint_id
        self._last_save = time.monotonic()
        self._prune(path)
        return path

    def _check_root(self) -> None:
        if self._lock is not None:
            self._lock.check()
        if self._has_resumed:
            return
        found = [each.path.name for each in find_checkpoints(self.root) if each.manifest]
        if found:
            raise CallOrderError(
                f"{self.root} holds checkpoints ({', '.join(found[-3:])}) and this run has not called resume(): saving "
                "would start a new branch and let the old one be pruned. Call resume() before training; "
                "resume(fresh=True) starts anew on purpose.",
                path=str(self.root),
            )
        self._has_resumed = True

    def _prune(self, newest: Path) -> None:
        """Remove old checkpoints, once the new one has been read back from disk."""
        condemned = run_on_main("choosing what to prune", lambda: self._choose_deletions())
        if not condemned:
            return
        reach("prune.begin")
        if self._verify != "off":
            run_together("reading the new checkpoint back", lambda: _read_back(newest, self._verify))
        run_on_main("pruning", lambda: _delete_all(condemned, get_run_id()))

    def _choose_deletions(self) -> list[Path]:
        committed = [each for each in find_checkpoints(self.root) if each.manifest and _is_ours(each.path)]
        return [each.path for each in choose_deletions(committed, keep_last=self._keep_last)]


def _delete_all(paths: list[Path], run_id: str) -> None:
    for path in paths:
        delete_checkpoint(path, run_id)


def _is_ours(path: Path) -> bool:
    """Whether a `Checkpointer` gave this name: a checkpoint that a user saved or renamed here is never pruned."""
    digits = path.name.removeprefix("step_")
    return path.name.startswith("step_") and len(digits) >= 8 and digits.isdecimal()


def _read_back(path: Path, verify: str) -> None:
    files = read_manifest(path).files[get_rank() :: get_world_size()]
    check_files(path, files, checksums=verify != "size")


def _choose(root: Path, attempt: int) -> _Choice:
    """Return the newest whole checkpoint of `root`, and why newer or unordered ones were passed over."""
    found = find_checkpoints(root)
    whole = sorted((each for each in found if each.manifest), key=lambda each: each.order, reverse=True)
    skipped = [f"skipped {each.path.name}: {each.problem}" for each in found if each.manifest is None]
    for each in whole:
        assert each.manifest is not None  # noqa: S101
        try:
            check_files(each.path, each.manifest.files, checksums=False)
        except AccelFsdpError as error:
            skipped.append(f"skipped {each.path.name}: {error}")
            continue
        return _Choice(each.path, attempt, tuple(skipped))
    if found:
        lines = "\n".join(f"  - {line}" for line in skipped)
        raise CheckpointIncompleteError(
            f"{root} holds checkpoints, but none that can be resumed:\n{lines}\nStarting fresh would abandon them in "
            "silence. Give resume() the path of one to load, fresh=True to start anew, or use an empty root.",
            path=str(root),
        )
    return _Choice(None, attempt)


def _check_positive(name: str, value: Any, kinds: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0 or not math.isfinite(value):
        raise UsageError(f"{name} is {value!r}; give a positive number, or None", actual=value)


def _to_numbers(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Turn metrics into what JSON can hold; a tensor is read only here, so that step() never waits for a GPU."""
    numbers: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"The metric {name!r} is {type(value).__name__} {value!r:.60}; give numbers or one-element tensors"
            ) from error
        numbers[name] = number if math.isfinite(number) else str(number)
    return numbers
