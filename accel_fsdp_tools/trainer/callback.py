"""`FSDPCheckpointCallback`: the one object that a user of the Trainer adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ..arguments import check_choice, check_positive, choose_policy
from ..assets import check_tokenizer
from ..errors import CallOrderError, UsageError
from ..export import export_checkpoint
from ..export_live import export_model
from ..load import VERIFY_MODES
from ..progress import check_data_resume
from ..ranks import run_on_main
from ..report import LoadReport
from ..resuming import ON_DAMAGE
from ..retention import KeepBest, RetentionPolicy, make_policy
from ..running import DEFAULT_SIGNALS, HangLimits, Health, Watching
from .contract import check_trainer
from .hooks import find_trainer, install
from .run import Options, TrainingRun, find_tokenizer
from .saving import export_into

if TYPE_CHECKING:
    from transformers import Trainer

    from ..export import ExportReport


class FSDPCheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Makes the Trainer's checkpoints under FSDP complete, exact, proven and durable.

        trainer = Trainer(..., callbacks=[FSDPCheckpointCallback()])
        trainer.train(resume_from_checkpoint=latest_checkpoint(output_dir))

    Works for the Trainers derived from it too. The Trainer saves when and where it always does; after each save every
    rank's random state, the place in the training data and the model's config and tokenizer are added, all files are
    synced, checksummed and fingerprinted, and a manifest is written last: without it the folder is not a checkpoint.

    On a resume the newest checkpoint that is whole is taken for `resume_from_checkpoint=True`, agreed on by all ranks
    and read against its checksums before it is loaded. After the load models, optimizer and scheduler in memory are
    compared with it. The training loader then goes on with the very next batch, in the random state of the save.

    `save_total_limit` is obeyed, but only after a new checkpoint has been committed and read back; the best model's
    and folders that this package did not write never go.

    Args:
        trainer: needed only with `trainer.add_callback(FSDPCheckpointCallback(trainer))`; in the list of `callbacks`
            the Trainer is found.
        verify: as for `load_state`; "off" also skips reading back before older checkpoints go.
        strict: refuse a resume that cannot be exact because the run differs (ranks, batch size, accumulation, data);
            False goes on, and the report says what is not exact.
        data_resume: as for `load_state`.
        keep_last: how many of the newest stay, in place of `save_total_limit`. The best model's checkpoint stays in
            any case.
        keep_every: see `Checkpointer`; this, `keep_best` and `keep_every_s` name what stays beyond `save_total_limit`
            (or `keep_last`). Without either nothing goes.
        keep_best: see `Checkpointer`; metrics are what the Trainer logs ("eval_loss").
        keep_every_s: see `Checkpointer`.
        retention: see `Checkpointer`; in place of all of these.
        on_damage: see `Checkpointer`; for `resume_from_checkpoint=True`.
        max_resumes: see `Checkpointer`.
        fresh: start anew in a folder that holds checkpoints of an earlier run.
        export_to: directory for the model when training has ended, as a Hugging Face directory; with
            `load_best_model_at_end` the best one. An earlier export there is replaced.
        tokenizer: kept in every checkpoint; the Trainer's `processing_class` where not given.
        timeout_s: how long to wait for a rank that does not arrive.
        on_signal: see `Checkpointer`. `train` then saves at the end of the step, whatever `save_strategy` is, and
            raises `Preempted`, which ends the process.
        hang_limits, health, health_every, health_timeout_s: see `Checkpointer`.

    Attributes:
        report: what became of the last resume (a `LoadReport`), None after a fresh start.

    Raises:
        UsageError: an argument cannot be right.
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        *,
        verify: str = "auto",
        strict: bool = True,
        data_resume: str = "skip",
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: KeepBest | Sequence[Any] | None = None,
        keep_every_s: float | None = None,
        retention: RetentionPolicy | None = None,
        on_damage: str = "fail",
        max_resumes: int | None = None,
        fresh: bool = False,
        export_to: str | Path | None = None,
        tokenizer: Any = None,
        timeout_s: float | None = None,
        on_signal: Sequence[str] = DEFAULT_SIGNALS,
        hang_limits: HangLimits | float | None = None,
        health: Health = None,
        health_every: int = 100,
        health_timeout_s: float = 60.0,
    ) -> None:
        check_choice("verify", verify, VERIFY_MODES)
        check_choice("on_damage", on_damage, ON_DAMAGE)
        rules = make_policy(keep_every=keep_every, keep_best=keep_best, keep_every_s=keep_every_s)
        check_data_resume(data_resume)
        check_positive("max_resumes", max_resumes, int)
        check_positive("timeout_s", timeout_s, (int, float))
        check_tokenizer(tokenizer)
        self._options = Options(
            verify=verify,
            strict=strict,
            data_resume=data_resume,
            retention=choose_policy(keep_last, keep_every, keep_best, keep_every_s, retention),
            kept_beyond_limit=None if keep_last is not None or retention is not None else rules,
            on_damage=on_damage,
            max_resumes=max_resumes,
            fresh=fresh,
            tokenizer=tokenizer,
            timeout_s=timeout_s,
            export_to=export_to,
            watching=Watching(on_signal, hang_limits, health, health_every, health_timeout_s),
        )
        self._trainer: Trainer | None = None
        self.run: TrainingRun | None = None
        if trainer is not None:
            self._attach(trainer)

    @property
    def report(self) -> LoadReport | None:
        """What became of the last resume."""
        return None if self.run is None else self.run.report

    def _attach(self, trainer: Trainer) -> None:
        check_trainer(trainer)
        self._trainer = trainer
        install(trainer, self)

    def _require_trainer(self) -> Trainer:
        if self._trainer is None:
            raise CallOrderError(
                "FSDPCheckpointCallback does not know its Trainer. Put it into the list of callbacks that the Trainer "
                "is made with, or write trainer.add_callback(FSDPCheckpointCallback(trainer))."
            )
        return self._trainer

    def open_run(self) -> TrainingRun:
        """Return a new run. Called by the hook of `train`."""
        return TrainingRun(self._require_trainer(), self._options)

    def _require_run(self) -> TrainingRun:
        self._require_trainer()
        if self.run is None:
            raise CallOrderError(
                "train() is running without the callback's part in it; add the callback before train()"
            )
        return self.run

    # -- events -------------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the Trainer that is being made."""
        trainer = find_trainer(self)
        if trainer is None or trainer is self._trainer:
            return
        if self._trainer is not None:
            raise UsageError("This FSDPCheckpointCallback serves another Trainer; give each Trainer one of its own.")
        self._attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Verify what was loaded, before the first step."""
        self._require_run().begin_training(kwargs.get("train_dataloader"))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the random state back where the Trainer's own came last."""
        self._require_run().begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop here, if any rank was asked to."""
        self._require_run().end_step(control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete and commit what the Trainer has just saved."""
        self._require_run().seal()
        self._require_run().end_save(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave, if all ranks have saved in order to."""
        self._require_run().end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Export, if that was asked for."""
        self._require_run().check_best()
        if self._options.export_to is not None:
            self.export(self._options.export_to)

    # -- export -------------------------------------------------------------------------------------------------

    def export(self, out: str | Path, *, checkpoint: str | Path | None = None, **options: Any) -> ExportReport:
        """Write the model to `out` as a Hugging Face directory, replacing an earlier export there. Collective.

        Args:
            checkpoint: one of the Trainer's, "best" for that of the best model; None is the model in memory.
            options: as for `export_model`, or with a checkpoint for `export_checkpoint`.

        Raises:
            UsageError: there is no best checkpoint.
            Whatever the export raises, on every rank.
        """
        trainer = self._require_trainer()
        options = {"overwrite": True, **options}
        if checkpoint is None:
            found = {"tokenizer": find_tokenizer(trainer, self._options), "timeout_s": self._options.timeout_s}
            return export_model(trainer.accelerator, trainer.model, out, **{**found, **options})
        if checkpoint == "best":
            best = trainer.state.best_model_checkpoint
            if best is None:
                raise UsageError(
                    "The Trainer has no best checkpoint: set metric_for_best_model, and evaluate", actual=None
                )
            checkpoint = best
        return run_on_main("exporting the checkpoint", lambda: export_checkpoint(checkpoint, out, **options))

    def export_into(self, directory: Path) -> None:
        """Write the model's files into a directory that may hold other things. Called by the hook of `save_model`."""
        trainer = self._require_trainer()
        options = {"timeout_s": self._options.timeout_s, "tokenizer": find_tokenizer(trainer, self._options)}
        export_into(trainer, directory.expanduser().absolute(), **options)
