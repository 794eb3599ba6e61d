"""Obey a rehearsal's orders inside the script: record every update, save, die or end where that is ordered."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import AccelFsdpError, UsageError
from ..live import get_raw_optimizer
from ..live_fingerprints import measure_model, measure_optimizer
from ..ranks import get_rank, get_world_size, wait_for_ranks
from ..rehearsal.orders import Orders, get_records_path, read_orders
from ..rehearsal.records import BEGIN, END, ERROR, KILLED, STEP
from .digests import digest_generators
from .watching import Watch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..report import LoadReport


class RehearsalEnd(SystemExit):
    """The rehearsal has seen enough: raised on every rank at the same update, it ends the script with exit code 0."""


def join() -> Recorder | None:
    """Return the process's recorder if it is part of a rehearsal, else None. Not collective.

    Raises:
        UsageError: the orders cannot be read.
    """
    global _recorder
    if _recorder is None:
        orders = read_orders()
        if orders is None:
            return None
        _recorder = Recorder(orders)
    return _recorder


_recorder: Recorder | None = None


class Recorder:
    """One rank's part in a rehearsal, for one `Checkpointer` or callback."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.attempt = orders.attempt
        self._accelerator: Accelerator | None = None
        self._watch: Watch | None = None
        self._file: TextIO | None = None
        self._has_begun = False
        self._restores_schedulers = False
        self._note_errors()

    @property
    def root(self) -> Path:
        """Where checkpoints go, in place of the script's own folder."""
        return self.orders.root

    @property
    def _is_to_be_killed(self) -> bool:
        return self.attempt == "killed"

    # -- the life of a run --------------------------------------------------------------------------------------

    def attach(self, accelerator: Accelerator, *, restores_schedulers: bool = False) -> None:
        """Watch what `accelerator` has prepared. The first one counts: a script has one training. Not collective.

        Args:
            restores_schedulers: somebody restores schedulers that are not prepared: the Trainer.
        """
        if self._watch is not None:
            return
        self._restores_schedulers = restores_schedulers
        self._accelerator = accelerator
        self._watch = Watch(accelerator, looks_at_samples=self.orders.is_elastic)
        self._watch.start()

    def begin(self, step: int, report: LoadReport | None) -> None:
        """Training begins after update number `step`, of a checkpoint if there is a report. Collective."""
        rank = None if self.attempt == "resumed" else self.orders.kill_rank  # may be on fewer ranks
        if rank is not None and rank >= get_world_size():
            raise UsageError(f"--kill-rank is {rank}, and there are {get_world_size()} ranks, from 0 on", actual=rank)
        self._has_begun = True
        self._take_events()  # looks at batches before training, and the dummy steps of a load, belong to no update
        self._write(
            BEGIN,
            step=step,
            is_resumed=report is not None,
            was_asked=True,
            world_size=get_world_size(),
            report=None if report is None else report.to_dict(),
            setup=self._describe_setup(),
            generators=digest_generators(),
            **self._measure(),
        )

    def note_loss(self, loss: Any) -> None:
        """Note the loss of a batch, if the script reports one. Not collective."""
        if self._watch is not None:
            self._watch.note_loss(loss)

    def end_step(self, step: int) -> bool:
        """Record update number `step`, which has just been made. Collective.

        Returns:
            Whether a checkpoint of it is ordered.
        """
        if not self._has_begun:  # the script never asked for a resume
            self._write(BEGIN, step=step - 1, is_resumed=False, was_asked=False, setup=self._describe_setup())
            self._has_begun = True
        events = self._take_events()
        is_ordered = step == self.orders.save_at and self.attempt != "resumed"
        self._write(
            STEP, step=step, generators=digest_generators(), is_saved=is_ordered, **asdict(events), **self._measure()
        )
        return is_ordered

    def choose_start(self, given: Any) -> Any:
        """Return what the Trainer is to resume from where its script has given `given`. Not collective.

        A run starts from nothing. After the kill the newest checkpoint of the rehearsal takes the place of whatever the
        script names, if it names one.
        """
        if self.attempt != "resumed":
            return None
        return None if given is None or given is False else True

    def leave_step(self, step: int, finish: Callable[[], Any] = lambda: None) -> None:
        """Everything that belongs to an update is done: die, or end the script, if that is ordered. Collective.

        Args:
            finish: waits for a save in flight.

        Raises:
            RehearsalEnd: the script has run as far as was ordered.
        """
        if self._is_to_be_killed and step == self.orders.kill_at:
            finish()
            self._die(step)
        if step >= self.orders.steps:
            finish()
            self._write(END, step=step)
            wait_for_ranks("ending the rehearsal's run")
            raise RehearsalEnd(0)
        if self._watch is not None:  # what a save has done is no part of the next update
            self._watch.take()
            self._watch.follow_models()

    def _die(self, step: int) -> None:
        chosen = self.orders.kill_rank
        if get_rank() == (chosen or 0):
            self.orders.marker.write_text(json.dumps({"step": step, "rank": chosen}), encoding="utf-8")
        wait_for_ranks("being killed together")
        if chosen is None or chosen == get_rank():
            self._write(KILLED, step=step)
            os.kill(os.getpid(), signal.SIGKILL)

    # -- what is recorded ---------------------------------------------------------------------------------------

    def _take_events(self) -> Any:
        if self._watch is None:
            raise RuntimeError("attach() comes first")
        return self._watch.take()

    def _describe_setup(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "models": len(accelerator._models) if accelerator else 0,
            "optimizers": len(accelerator._optimizers) if accelerator else 0,
            "schedulers": len(accelerator._schedulers) if accelerator else 0,
            "loaders": len(accelerator._dataloaders) if accelerator else 0,
            "restores_schedulers": self._restores_schedulers,
            "registered": len(accelerator._custom_objects) if accelerator else 0,
            "accumulation": accelerator.gradient_accumulation_steps if accelerator else 1,
        }

    def _measure(self) -> dict[str, Any]:
        """Fingerprints of all parameters, buffers and optimizer states, whole; rank 0 keeps them."""
        accelerator = self._accelerator
        if accelerator is None:
            return {}
        models, optimizers = accelerator._models, accelerator._optimizers
        measured = [measure_model(each) for each in models]
        pairs = zip(models, optimizers, strict=False)
        measured_optimizers = [measure_optimizer(model, get_raw_optimizer(each)) for model, each in pairs]
        if get_rank() != 0:
            return {}
        found = {"models": measured, "optimizers": measured_optimizers}
        return {
            **{
                kind: [{name: str(value) for name, value in each.fingerprints.items()} for each in values]
                for kind, values in found.items()
            },
            "divergent": [each.name for values in found.values() for one in values for each in one.divergences],
        }

    def _write(self, kind: str, **facts: Any) -> None:
        if self._file is None:
            path = get_records_path(Path(self.orders.folder), self.attempt, get_rank())
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n")
        self._file.flush()

    def _note_errors(self) -> None:
        """Record what ends the process, besides what Python does with it."""
        previous = sys.excepthook

        def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            is_own = isinstance(error, AccelFsdpError)
            setup = self._describe_setup()
            self._write(ERROR, type=kind.__name__, message=str(error), is_own=is_own, setup=setup)
            previous(kind, error, trace)

        sys.excepthook = note
