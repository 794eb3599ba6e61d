"""Where a run is: the position that a resume returns, and the counting of updates and epochs behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .report import LoadReport
from .survey import Skipped

if TYPE_CHECKING:
    from .progress.tracker import DataTracker


@dataclass(frozen=True)
class Position:
    """Where training goes on.

    `epoch` counts passes over the training loader; it is the one to continue with: `for epoch in range(position.epoch,
    num_epochs)`. `batch` is how many batches of it were handed out before the save; the loader skips them by itself.
    Saved with an epoch's last batch in hand, `batch` is the whole epoch: the loop body is then not entered again, but
    the code after it runs, as it would have. `samples` counts the samples that all ranks together have been handed.
    `skipped` is what the resume passed over and why: newer checkpoints that are damaged, and what is none.
    """

    epoch: int
    step: int
    batch: int
    samples: int
    fresh: bool
    report: LoadReport | None = None
    skipped: tuple[Skipped, ...] = ()

    def __str__(self) -> str:
        lines = [str(each) for each in self.skipped]
        if self.fresh:
            return "\n".join(["fresh start", *lines])
        return "\n".join([f"resumed at epoch {self.epoch}, batch {self.batch}, step {self.step}", *lines])


class StepAndEpoch:
    """Counts the updates of a run and the passes over its training loader.

    A pass counts when its first update is made: other passes over the loader (a look at a batch, a metric over the
    training data) are no epochs. A script that never reports an update has all passes counted.
    """

    def __init__(self, tracker: DataTracker, train_index: int | None) -> None:
        self.step = 0
        self._tracker, self._train_index = tracker, train_index
        self._num_epochs = 0  # passes of the training loader in which an update was made, the current one included
        self._last_pass: int | None = None

    def begin(self) -> None:
        """Start from nothing."""
        self.step, self._num_epochs, self._last_pass = 0, 0, None

    def go_on(self, step: int, report: LoadReport, skipped: tuple[Skipped, ...] = ()) -> Position:
        """Go on where a checkpoint was that has just been loaded."""
        self.step = step
        if self._train_index is None:
            return Position(report.epoch, step, 0, 0, fresh=False, report=report, skipped=skipped)
        loader = self._tracker.loaders[self._train_index]
        # The pass that is gone on with is counted already when its first update comes.
        is_in_pass = loader.batch > 0
        epoch = report.epoch if report.has_manifest else loader.epoch
        self._num_epochs = epoch + 1 if is_in_pass else epoch
        self._last_pass = loader.epoch if is_in_pass else None
        return Position(epoch, step, loader.batch, loader.samples, fresh=False, report=report, skipped=skipped)

    def count_update(self) -> None:
        """Count an update, and the pass it is made in if it is its first."""
        self.step += 1
        if self._train_index is not None:
            current = self._tracker.loaders[self._train_index].epoch
            if current != self._last_pass:
                self._num_epochs, self._last_pass = self._num_epochs + 1, current

    def get_epoch(self) -> int | None:
        """Return how many epochs have ended; None without a training loader."""
        if self._train_index is None:
            return None
        current = self._tracker.loaders[self._train_index].epoch
        if self._num_epochs == 0:
            return current
        return self._num_epochs - 1 if current == self._last_pass else self._num_epochs
