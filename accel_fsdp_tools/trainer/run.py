"""One call of `train`: what it began with, where its data stands, and what it has saved. Every method is collective."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import to_numbers
from ..delegate import failures_come_last, sync_later
from ..errors import CallOrderError, UsageError
from ..export.target import check_target
from ..holding import HeldRoot
from ..keeping import settle_checkpoint
from ..load import COMPARES_MEMORY, READS_CHECKSUMS
from ..load_notes import LoadNotes
from ..manifest import TRAINER, WRITER, Lineage
from ..prepared import get_prepared
from ..ranks import get_rank, run_on_each, run_on_main, run_together, wait_for_ranks
from ..report import LoadReport
from ..resuming import Resumed
from ..retention import KeepAny, RetentionPolicy
from ..rng import RngSnapshot
from ..running import LOADING, SAVING, RunGuard, Stop, Watching
from ..save import get_run_id
from ..verify_live import compare_with_checkpoint, require_verified
from .adapters import ADAPTER_FILE, adapters_kept, check_adapter, is_adapter_of_fsdp1
from .choosing import Order, choose_checkpoint
from .contract import check_trainer, describe_run
from .data import TrainingData, restore_checked
from .loading import finish_load, load_fsdp_optimizer
from .saving import KeepAsTrainer, export_into, make_place, retire_replaced, seal_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from transformers import Trainer, TrainerControl

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What the callback was given."""

    verify: str = "auto"
    strict: bool = True
    data_resume: str = "skip"
    retention: RetentionPolicy | None = None
    kept_beyond_limit: RetentionPolicy | None = None  # where `save_total_limit` rules
    on_damage: str = "fail"
    max_resumes: int | None = None
    fresh: bool = False
    tokenizer: Any = None
    timeout_s: float | None = None
    export_to: str | Path | None = None
    watching: Watching = field(default_factory=Watching)


class TrainingRun:
    """From the call of `train` to its end.

    Attributes:
        report: what became of the resume; None in a fresh run.
        num_saved: checkpoints committed.
        guard: watches over the run.
    """

    def __init__(self, trainer: Trainer, options: Options) -> None:
        self._trainer, self._options = trainer, options
        self.root = Path(trainer.args.output_dir).expanduser().absolute()
        self.report: LoadReport | None = None
        self.num_saved = 0
        self._held = HeldRoot(self.root)
        self._resumed = Resumed()
        self._parent_id: str | None = None
        self._data: TrainingData | None = None
        self._rng_due: RngSnapshot | None = None
        self._saving: Path | None = None
        self._saved: Path | None = None
        self._limit: int | None = None
        self.guard = RunGuard(self.root, options.watching)
        self._stop: Stop | None = None

    # -- begin --------------------------------------------------------------------------------------------------

    def open(self, given: Any, trial: Any) -> Path | None:
        """Check the set-up, take the output folder, and return the checkpoint that the Trainer is to load."""
        wait_for_ranks("Trainer.train", timeout_s=self._options.timeout_s)
        run_on_each("checking the Trainer", lambda: self._check(trial))
        self._held.take(get_run_id())
        self.guard.begin(get_run_id(), self._held.attempt)
        self.guard.enter(LOADING)
        order = Order(
            strict=self._options.strict,
            verifies=self._options.verify in READS_CHECKSUMS,
            on_damage=self._options.on_damage,
            max_resumes=self._options.max_resumes,
            fresh=self._options.fresh,
        )
        self._resumed = choose_checkpoint(self._trainer, self.root, given, order, get_run_id())
        self._held.may_save = True
        self._parent_id = self._resumed.checkpoint_id
        return self._resumed.path

    def _check(self, trial: Any) -> None:
        check_trainer(self._trainer)
        if trial is not None:
            raise UsageError(
                "FSDPCheckpointCallback does not handle hyperparameter_search; leave it out for the search"
            )
        if self._options.export_to is not None:  # not after days of training
            self._check_export(Path(self._options.export_to).expanduser().absolute())

    def _check_export(self, out: Path) -> None:
        root = self.root.resolve()
        if out.resolve() in (root, *root.parents):
            raise UsageError(
                f"export_to is {out}, which holds the checkpoints, and an export takes its directory's place. Give a "
                "directory of its own, or call trainer.save_model(), which writes into output_dir.",
                path=str(out),
            )
        check_target(out, None, overwrite=True)

    def begin_training(self, loader: Any) -> None:
        """The Trainer has loaded, and is about to iterate `loader`: verify, and put back what it leaves out.

        Raises:
            Preempted: a signal came meanwhile. Nothing is saved, since nothing was trained.
        """
        self._finish_load(loader)
        step = self._trainer.state.global_step
        stop = self.guard.begin_training(step)
        if stop is not None:
            self.guard.leave(stop, step=step, path=None)

    def _finish_load(self, loader: Any) -> None:
        if loader is None:
            raise CallOrderError("This Trainer has no training dataset, or hides it from its callbacks")
        trainer, options = self._trainer, self._options
        if trainer.args.save_total_limit is not None:  # not so when the Trainer begins again with a smaller batch
            self._limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        self._data = TrainingData(trainer.accelerator, loader)
        directory = self._resumed.path
        if directory is None:
            self._data.begin()
            return
        notes = LoadNotes()
        if self._resumed.report is not None:
            notes.notes.extend(self._resumed.report.notes)
        restored = finish_load(
            trainer,
            directory,
            self._data,
            verify=options.verify,
            strict=options.strict,
            data_resume=options.data_resume,
            notes=notes,
        )
        self.report, self._rng_due = restored.report, restored.rng
        if get_rank() == 0:
            logger.log(logging.INFO if self.report.exact else logging.WARNING, "%s", self.report)

    def is_finished(self) -> bool:
        """Whether all updates were done before: the Trainer looks only after the next batch. Not collective."""
        state = self._trainer.state
        return bool(state.global_step >= state.max_steps > 0)

    def adapters_kept(self) -> AbstractContextManager[None]:
        """Keep the adapters of PEFT in what is saved and loaded meanwhile. Not collective."""
        return adapters_kept(self._trainer)

    def load_optimizer(self, directory: Path) -> None:
        """Load the optimizer's state completely."""
        load_fsdp_optimizer(self._trainer, directory)

    def skip_by_itself(self, loader: Any, num_batches: int) -> bool:
        """Whether the loader stands behind its first `num_batches` already. Not collective."""
        return self._data is not None and self._data.answer_skip(loader, num_batches)

    def restore_rng(self) -> bool:
        """Put the random state back where the Trainer would; False if it is to do that itself. Not collective."""
        return self._data is not None and self._data.restore_rng()

    def begin_step(self) -> None:
        """Before the first update: where the Trainer had to put the random state back, this is the one of the save."""
        self.guard.go_on()
        due, self._rng_due = self._rng_due, None
        if due is None:
            return
        restore_checked(due)

    # -- stop ---------------------------------------------------------------------------------------------------

    def end_step(self, control: TrainerControl) -> None:
        """An update was made. If a signal or a health check asks for it on any rank, the Trainer saves and stops."""
        self._stop = self._stop or self.guard.step(self._trainer.state.global_step)
        if self._stop is not None:
            control.should_save = control.should_training_stop = True

    def end_save(self, control: TrainerControl) -> None:
        """A checkpoint was committed, which took its time: if a signal came meanwhile, the Trainer stops."""
        self._stop = self._stop or self.guard.ask()
        if self._stop is not None:
            control.should_training_stop = True

    def end_epoch(self) -> None:
        """The Trainer has left the loop over the steps of an epoch.

        Not before, so that other callbacks see the save; and not later, since the Trainer would evaluate, save again,
        load the best model and export, as at the end of a training.

        Raises:
            Preempted, Unhealthy: all ranks have saved and stop.
        """
        if self._stop is not None:
            self.guard.leave(self._stop, step=self._trainer.state.global_step, path=self._saved)
        self.guard.rest()

    # -- save ---------------------------------------------------------------------------------------------------

    def write(self, directory: Path, save: Callable[[], None]) -> None:
        """Let the Trainer write a checkpoint into `directory`, with nothing of an older one in it."""
        with self.guard.phase(SAVING):
            self._write(directory, save)

    def _write(self, directory: Path, save: Callable[[], None]) -> None:
        wait_for_ranks("Trainer's save", timeout_s=self._options.timeout_s)
        run_on_main("checking the output folder", self._held.check)
        moved = make_place(directory, run_id=get_run_id())
        if moved is not None and get_rank() == 0:
            logger.warning("%s was there already; it lies in %s now", directory, moved)

        def call() -> None:
            with sync_later(directory), failures_come_last():
                save()

        run_together("saving with the Trainer", call)
        self._saving = directory

    def seal(self) -> None:
        """Complete and commit the checkpoint that was just written, then remove what nothing keeps any longer."""
        directory, self._saving = self._saving, None
        if directory is None:
            return
        with self.guard.phase(SAVING):
            self._seal(directory)

    def _seal(self, directory: Path) -> None:
        trainer = self._trainer
        run_on_main("looking for the adapter", lambda: check_adapter(trainer, directory))
        if is_adapter_of_fsdp1(trainer) and run_on_main("looking", lambda: (directory / ADAPTER_FILE).exists()):
            export_into(trainer, directory, tokenizer=None)  # the Trainer's has no weights in it
        metrics = run_on_each("reading the metrics", lambda: to_numbers(_read_metrics(trainer)))
        loaders = run_on_each("looking at the training data", lambda: self._data.capture() if self._data else [])
        lineage = seal_checkpoint(
            trainer.accelerator,
            directory,
            run_id=get_run_id(),
            attempt=self._held.attempt,
            parent_id=self._parent_id,
            step=trainer.state.global_step,
            epoch=int(trainer.state.epoch or 0),
            loaders=loaders,
            tokenizer=find_tokenizer(trainer, self._options),
            extra={WRITER: TRAINER, "trainer": describe_run(trainer), "metrics": metrics},
        )
        retire_replaced(directory, parent_id=self._parent_id, run_id=get_run_id())
        self._parent_id = lineage.checkpoint_id
        self.num_saved += 1
        self._saved = directory
        self._settle(directory, lineage)

    def _settle(self, directory: Path, lineage: Lineage) -> None:
        settle_checkpoint(
            directory, lineage, policy=self._choose_policy(), verify=self._options.verify, run_id=get_run_id()
        )

    def _choose_policy(self) -> RetentionPolicy | None:
        best = self._trainer.state.best_model_checkpoint
        name = None if best is None else Path(best).name
        if self._options.retention is not None:
            return KeepAny((self._options.retention, _KeepNamed(name))) if name is not None else self._options.retention
        if not self._limit or self._limit < 0:
            return None
        limit, beyond = KeepAsTrainer(self._limit, name), self._options.kept_beyond_limit
        return limit if beyond is None else KeepAny((limit, beyond))

    # -- end ----------------------------------------------------------------------------------------------------

    def check_best(self) -> None:
        """Compare the model with the best checkpoint, where the Trainer has just loaded that."""
        trainer = self._trainer
        best = trainer.state.best_model_checkpoint
        if not trainer.args.load_best_model_at_end or best is None or self._options.verify not in COMPARES_MEMORY:
            return
        prepared = get_prepared(trainer.accelerator, optimizers=False)
        require_verified(compare_with_checkpoint(prepared, Path(best).absolute(), mode="auto", checks_sums=False))

    def close(self, error: BaseException | None = None) -> None:
        """Give back what was taken: the output folder, signals, and `save_total_limit`. Not collective.

        Args:
            error: what `train` ends with, if that is an error.
        """
        if self._limit is not None:
            self._trainer.args.save_total_limit = self._limit
        self._held.release()
        self.guard.close(error)


def find_tokenizer(trainer: Trainer, options: Options) -> Any:
    """Return the tokenizer or processor to keep with the model, None if there is none."""
    for each in (options.tokenizer, trainer.processing_class, getattr(trainer.data_collator, "tokenizer", None)):
        if callable(getattr(each, "save_pretrained", None)):
            return each
    return None


@dataclass(frozen=True)
class _KeepNamed:
    name: str

    def choose_kept(self, checkpoints: Any) -> frozenset[str]:
        return frozenset({self.name} & {each.name for each in checkpoints})


def _read_metrics(trainer: Trainer) -> dict[str, Any]:
    """The numbers that the Trainer has logged last, each by its name."""
    found: dict[str, Any] = {}
    for entry in reversed(trainer.state.log_history):
        for name, value in entry.items():
            if isinstance(value, (int, float)) and name not in ("step", "epoch", "total_flos"):
                found.setdefault(name, value)
    return found
