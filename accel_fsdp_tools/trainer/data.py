"""The place of the Trainer's one training loader, and the random state that belongs to it. Local to its rank.

On a resume the Trainer skips batches by itself, fetches the next ones, and only then puts the random state back: what
a dataset or collator has drawn in between (the mask of a masked language model, say) is drawn differently than in the
run that never stopped (transformers 5.24). So where the place is known exactly the loader is put there beforehand,
and the Trainer's skipping is answered with the loader itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DataProgressError, RngStateError
from ..progress import DataTracker, LoaderProgress
from ..ranks import get_rank
from ..rng import RngSnapshot

if TYPE_CHECKING:
    from accelerate import Accelerator


def restore_checked(rng: RngSnapshot) -> None:
    """Put the random state back and look whether it is there.

    Raises:
        RngStateError: it is not; names the generators.
    """
    rng.restore()
    here, saved = RngSnapshot.capture().to_tensors("now"), rng.to_tensors("now")
    wrong = [name for name in saved.keys() & here.keys() if not bool((saved[name] == here[name]).all())]
    if wrong:
        names = ", ".join(sorted(wrong))
        raise RngStateError(f"rank {get_rank()}: {names} cannot be put back to what was saved", generator=names)


@dataclass(frozen=True)
class _OneLoader:
    """What a tracker looks at in an accelerator. The Trainer prepares a new evaluation loader every time, too."""

    _dataloaders: list[Any]
    gradient_state: Any


class TrainingData:
    """Follows the training loader of one call of `train`."""

    def __init__(self, accelerator: Accelerator, loader: Any) -> None:
        self._loader = loader
        self._tracker = DataTracker(_OneLoader([loader], accelerator.gradient_state))
        self._tracker.follow_new_loaders()
        self._num_waiting: int | None = None  # batches that the Trainer is about to skip and must not
        self._rng: RngSnapshot | None = None  # due where a pass begins anew

    def begin(self) -> None:
        """Count from here: a fresh start."""
        self._tracker.begin_training()

    def capture(self) -> list[LoaderProgress]:
        """Where the loader stands; a position that is not known says so."""
        return self._tracker.capture(strict=False)

    def find_problems(self, saved: Sequence[LoaderProgress], data_resume: str) -> list[str]:
        """Why the Trainer has to find the place by itself, in words; empty if `restore` can."""
        problems = self._tracker.list_problems(saved, data_resume=data_resume)
        if not problems:
            problems = [str(each.reason) for each in saved if not (each.restorable or each.is_untouched)]
        return problems

    def find_shift(self, saved: Sequence[LoaderProgress], num_batches: int) -> list[str]:
        """Why the Trainer would go on elsewhere, in words: it is about to skip `num_batches`; empty if it agrees."""
        num_saved = sum(each.batch for each in _align(saved, num_batches))
        if num_batches == num_saved or any(map(_is_stream, saved)):
            return []
        text = f"the Trainer computes from the number of updates that {num_batches} batches of this epoch are done"
        return [f"{text}; at the save it was {num_saved}"]

    def begin_epoch(self, rng: RngSnapshot) -> None:
        """Leave the loader at its beginning; the random state comes back where the Trainer would put it back."""
        self._tracker.begin_training()
        self._rng = rng

    def restore(
        self, saved: Sequence[LoaderProgress], rng: RngSnapshot, *, num_skipped: int, data_resume: str
    ) -> list[str]:
        """Put the loader where it was. Returns what is not exact, in words.

        Args:
            num_skipped: batches that the Trainer is about to skip.
        """
        aligned = _align(saved, num_skipped)
        outcomes = self._tracker.restore(aligned, data_resume=data_resume)
        self._num_waiting = num_skipped if any(map(_is_stream, saved)) else sum(each.batch for each in aligned)
        self._rng = rng
        return [each.reason for each in outcomes if each.reason is not None]

    def restore_rng(self) -> bool:
        """Put the random state back in the Trainer's place, whose own is of a moment too late or too early.

        Returns:
            False if that is for the Trainer to do.
        """
        if self._rng is None:
            return False
        if not self._num_waiting:  # otherwise it came back with the loader's first batch
            restore_checked(self._rng)
        return True

    def answer_skip(self, loader: Any, num_batches: int) -> bool:
        """Whether the Trainer may iterate `loader` as it is instead of skipping its first batches.

        Raises:
            DataProgressError: it is about to skip another number than were handed out before the save.
        """
        if loader is not self._loader or self._num_waiting is None:
            return False
        if num_batches != self._num_waiting:
            raise DataProgressError(
                f"The Trainer computes from the number of updates that {num_batches} batches of this epoch are done; "
                f"at the save it was {self._num_waiting}. Use the batch size, accumulation and data of that run.",
                expected=self._num_waiting,
                actual=num_batches,
            )
        return True


def _align(saved: Sequence[LoaderProgress], num_skipped: int) -> list[LoaderProgress]:
    """The places as the Trainer understands them: where it skips nothing, it begins a pass."""
    return [each if num_skipped else each.end_pass() for each in saved]


def _is_stream(saved: LoaderProgress) -> bool:
    """Whether the Trainer does not know how long a pass is: it then counts batches over all of them."""
    return saved.contract.get("num_batches") is None
