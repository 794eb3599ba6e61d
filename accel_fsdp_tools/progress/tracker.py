"""Follow all loaders of an accelerator, save where they stand, and put them back there."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from ..errors import DataProgressError, DataProgressWarning, UsageError
from ..rng import RngSnapshot
from . import comparing
from .carry import Brief, Carried, Change, carry, make_brief
from .checking import ProgressDifference, find_differences
from .contract import describe_contract, get_index_sampler
from .follow import Follower, get_follower, install
from .kinds import find_kind
from .records import LoaderOutcome, LoaderPosition, LoaderProgress
from .session import RestoreSession

DATA_RESUME = ("skip", "replay", "refuse")
_KEY = "_accel_fsdp_tools_data_tracker"


def track(accelerator: Any) -> DataTracker:
    """Follow every loader that `accelerator` has prepared, from now on.

    Call it after `prepare` and before the first batch, on every rank; again after preparing more loaders. It enters
    no collective and draws no random number. Calling it twice changes nothing.

    Returns:
        The accelerator's one tracker.

    Warns:
        DataProgressWarning: once for each loader whose resume will not be exact, with the reason.
    """
    tracker = getattr(accelerator, _KEY, None)
    if not isinstance(tracker, DataTracker):
        tracker = DataTracker(accelerator)
        setattr(accelerator, _KEY, tracker)
    tracker.follow_new_loaders()
    return tracker


def check_data_resume(data_resume: str) -> None:
    """Raise UsageError unless `data_resume` is a choice that `DataTracker.restore` knows."""
    if data_resume not in DATA_RESUME:
        raise UsageError(
            f"data_resume is {data_resume!r}; use one of {', '.join(DATA_RESUME)}",
            expected=DATA_RESUME,
            actual=data_resume,
        )


class DataTracker:
    """Knows where every prepared loader stands. Made by `track`. Every method is local to its rank."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._passive: weakref.WeakKeyDictionary[Any, Follower] = weakref.WeakKeyDictionary()
        self._has_warned_of_several = False
        self.train_index: int | None = None  # set by who knows which loader is trained on

    @property
    def loaders(self) -> list[LoaderPosition]:
        """Where each prepared loader stands: passes ended, batches in this pass, samples handed out by all ranks.

        After `restore` these are the restored positions, before any batch is drawn.
        """
        return [follower.get_position() for follower in self._get_followers()]

    def _list_loaders(self) -> list[Any]:
        return list(self._accelerator._dataloaders)

    def follow_new_loaders(self) -> None:
        """Follow the loaders that were prepared since the last call."""
        for index, loader in enumerate(self._list_loaders()):
            self._follow(index, loader)

    def _follow(self, index: int, loader: Any) -> Follower:
        follower = get_follower(loader) or self._passive.get(loader)
        if follower is not None:
            return follower
        kind = find_kind(loader)
        follower = kind.follow(loader, kind)
        if loader in self._get_active_loaders():
            follower.was_used_untracked = True
            self._warn_of_twin(index, loader)
        if kind.can_install:
            install(loader, follower)
        else:
            self._passive[loader] = follower
        reason = kind.explain(loader, "running")
        if reason is not None:
            warnings.warn(f"loader {index} ({kind.name}): {reason}", DataProgressWarning, stacklevel=4)
        return follower

    def _warn_of_twin(self, index: int, loader: Any) -> None:
        """A loader made anew after a restore begins at the beginning, while the restored one waits for ever."""
        contract = describe_contract(loader)
        for other, twin in enumerate(self._list_loaders()):
            follower = get_follower(twin)
            if follower is not None and follower.is_waiting and describe_contract(twin) == contract:
                warnings.warn(
                    f"loader {index} was prepared and iterated after load_state, and begins at the beginning, while "
                    f"loader {other}, which is like it, waits behind batch {follower.get_position().batch}. Iterate "
                    "the loader that was prepared before load_state; don't make it anew",
                    DataProgressWarning,
                    stacklevel=5,
                )

    def _get_active_loaders(self) -> list[Any]:
        return [loader for loader in self._accelerator.gradient_state.dataloader_references if loader is not None]

    def _get_followers(self) -> list[Follower]:
        return [self._follow(index, loader) for index, loader in enumerate(self._list_loaders())]

    def find_train_loader(self, loader: Any = None) -> int | None:
        """The index of the training loader, whose position is the position of the training.

        Args:
            loader: the prepared loader. None if it is clear: the only one, or the only one in random order.

        Returns:
            The index into `loaders`; None if no loader is prepared.

        Raises:
            UsageError: `loader` is not one of the prepared loaders, or None and several could be meant.
        """
        known = self._list_loaders()
        if loader is not None:
            for index, other in enumerate(known):
                if other is loader:
                    return index
            raise UsageError(
                "train_dataloader is not a loader that this accelerator prepared; give the object that "
                "accelerator.prepare returned"
            )
        if len(known) <= 1:
            return 0 if known else None
        shuffled = [index for index, other in enumerate(known) if not _is_sequential(other)]
        if len(shuffled) == 1:
            return shuffled[0]
        raise UsageError(f"{len(known)} dataloaders are prepared; say which one is trained on: train_dataloader=...")

    def begin_training(self) -> None:
        """Count passes and samples from here: a look at a batch before training is not an epoch."""
        for follower in self._get_followers():
            follower.begin_training()

    def capture(self, *, strict: bool = True) -> list[LoaderProgress]:
        """Where every loader stands on this rank, with the random state that its next batches need.

        Enters no collective, draws no random number, and changes nothing. Call it where the random state is that
        of the save.

        Args:
            strict: raise if a loader's position is not known. Otherwise its record says that it is absent, and why.

        Raises:
            DataProgressError: (strict) batches were handed out that nobody counted: a loader was iterated before
                `track`, or through `skip_first_batches`, or its restored position was bypassed.

        Warns:
            DataProgressWarning: several loaders are in the middle of a pass.
        """
        rng = RngSnapshot.capture()
        saved = []
        for index, follower in enumerate(self._get_followers()):
            reason = None
            try:
                self._check_followed(index, follower)
                follower.check_undisturbed()
            except DataProgressError as error:
                if strict:
                    raise
                reason = error.message
            if reason is None:
                saved.append(follower.capture(index, rng))
            else:
                saved.append(dataclasses.replace(follower.record(index, reason), known=False))
        return self._mark_several(saved)

    def _check_followed(self, index: int, follower: Follower) -> None:
        if follower.was_used_untracked:
            raise DataProgressError(
                f"loader {index} was iterated before it was followed, so how many batches it handed out is not "
                "known. Call accel_fsdp_tools.track(accelerator) after prepare and before the first batch (or save "
                "with strict=False: data progress is then absent from the checkpoint)."
            )
        sampler = get_index_sampler(follower.loader) if follower.kind.can_install else None
        for loader in self._get_active_loaders():
            if sampler is not None and get_follower(loader) is None and _draws_from(loader, sampler):
                raise DataProgressError(
                    f"batches of loader {index} are being handed out by another loader that skip_first_batches "
                    "made from it, and nobody counts them. Iterate the prepared loader itself: after load_state it "
                    "goes on where the checkpoint was."
                )

    def _mark_several(self, saved: list[LoaderProgress]) -> list[LoaderProgress]:
        in_pass = [item.index for item in saved if item.state != "idle"]
        if len(in_pass) < 2:
            return saved
        reason = (
            f"saved while loaders {', '.join(map(str, in_pass))} were all in the middle of a pass: each goes on with "
            "its next batch, but whether they are iterated in the same order again is not known"
        )
        if not self._has_warned_of_several:
            self._has_warned_of_several = True
            warnings.warn(reason, DataProgressWarning, stacklevel=3)
        return [
            dataclasses.replace(item, exact=False, reason=item.reason or reason) if item.index in in_pass else item
            for item in saved
        ]

    def find_changes(self, saved: Sequence[LoaderProgress]) -> list[tuple[str, str | None]]:
        """What `check` says, each with the argument of a load that permits it ("elastic", "dataset", ...), or None."""
        return comparing.find_changes(saved, self._get_followers())

    def list_notes(self, saved: Sequence[LoaderProgress]) -> list[str]:
        """What differs between the saved loaders and those here and may be all right; changes nothing."""
        return comparing.list_notes(saved, self._get_followers())

    def check(self, saved: Sequence[LoaderProgress]) -> list[str]:
        """Compare what was saved with the loaders that are prepared here; changes nothing.

        Returns:
            Each difference in words, naming the loader; empty if all positions mean the same here.
        """
        return comparing.list_all_differences(saved, self._get_followers())

    def list_problems(self, saved: Sequence[LoaderProgress], *, data_resume: str = "skip") -> list[str]:
        """What would make a strict `restore` refuse; changes nothing.

        More than `check` says: also places that the loaders here don't have, states that don't fit what is there, and
        positions that this version does not restore.

        Args:
            saved: this rank's records, as `capture` returned them.
            data_resume: as for `restore`.

        Returns:
            Each problem in words, naming the loader; empty if `restore(saved)` will restore them all.
        """
        return self._examine(saved, data_resume)[0]

    def _examine(self, saved: Sequence[LoaderProgress], data_resume: str) -> tuple[list[str], dict[int, str]]:
        """Every problem, and by place in `saved` why nothing but the epoch of that record can be used."""
        followers = self._get_followers()
        problems = self.check(saved)
        num_known = len(problems)
        reasons: dict[int, str] = {}
        for number, item in enumerate(saved):
            follower = followers[number] if number < len(followers) else None
            reason = self._find_obstacle(item, follower, data_resume)
            if reason is not None:
                reasons[number] = reason
                if num_known == 0:  # else `check` has said it
                    problems.append(f"loader {item.index}: {reason}")
            elif not item.restorable and not item.is_untouched:
                problems.append(f"loader {item.index} ({item.kind}): {item.reason}")
        return problems, reasons

    def restore(
        self, saved: Sequence[LoaderProgress], *, strict: bool = True, data_resume: str = "skip"
    ) -> list[LoaderOutcome]:
        """Put every loader where `saved` says. The batches that were handed out are skipped when it is iterated.

        Nothing is read or drawn now: counters and samplers' generators are set, the rest waits for the loader's
        next `__iter__`, once. The global random state is not touched by this call; a loader that was in the middle
        of a pass sets it to that of the save when it hands out its first batch.

        Args:
            saved: this rank's records, as `capture` returned them.
            strict: raise unless every loader goes on where it was. What is approximate then, such as random numbers
                drawn in workers, the outcomes say; without it, also which loaders begin their pass anew.
            data_resume: how loaders get behind the batches that were handed out. "skip" reads none of them where that
                is possible: where there are indices, or a stream has a state of its own. "replay" reads and drops
                them where that makes more exact: workers draw again what they drew. "refuse" is "skip" without the
                streams that have to be read again from their beginning.

        Returns:
            One outcome per saved loader.

        Raises:
            DataProgressError: (strict) a position cannot be restored; no loader was changed.
            UsageError: `data_resume` is none of these.
        """
        check_data_resume(data_resume)
        followers = self._get_followers()
        problems, reasons = self._examine(saved, data_resume)
        if problems and strict:
            raise DataProgressError(
                "the data progress of this checkpoint cannot be restored: "
                + "; ".join(problems)
                + ". Nothing was changed. Pass strict=False to go on as far as it can be.",
                actual=problems,
            )
        session = RestoreSession(strict=strict, data_resume=data_resume)
        outcomes = []
        for number, item in enumerate(saved):
            if number >= len(followers):
                outcomes.append(LoaderOutcome(item.index, "absent", reasons[number], item.epoch, 0))
            elif number in reasons:
                outcomes.append(followers[number].restore_epoch(item, reasons[number]))
            else:
                outcomes.append(followers[number].restore(item, session))
        return outcomes

    def give_up(self, saved: LoaderProgress, reason: str) -> LoaderOutcome:
        """After a `restore` that was not strict: let the pass of one loader begin anew after all."""
        followers = self._get_followers()
        if saved.index >= len(followers):
            return LoaderOutcome(saved.index, "absent", reason, saved.epoch, 0)
        return followers[saved.index].restore_epoch(saved, reason)

    # Another number of ranks

    def make_briefs(self, saved: Sequence[LoaderProgress], rank: int) -> list[Brief]:
        """What all ranks need to know of the records of one rank of the save, for `carry`; changes nothing."""
        followers = self._get_followers()
        return [make_brief(item, follower, rank) for item, follower in zip(saved, followers, strict=False)]

    def carry(
        self,
        first: Sequence[LoaderProgress],
        own: Sequence[LoaderProgress] | None,
        briefs: Sequence[Sequence[Brief]],
        *,
        change: Change,
        rank: int,
    ) -> list[Carried]:
        """Make this rank's records, for `restore`, of those that the ranks of the save wrote.

        Args:
            first: rank 0's records.
            own: those of the rank of this number; None if there was none.
            briefs: what `make_briefs` says, by rank of the save.
            change: what differs and may.
        """
        train_index = self.train_index
        if train_index is None:
            with contextlib.suppress(UsageError):  # several may be; then all are taken to be
                train_index = self.find_train_loader()
        carried = []
        for number, (item, follower) in enumerate(zip(first, self._get_followers(), strict=False)):
            carried.append(
                carry(
                    item,
                    own[number] if own is not None and number < len(own) else None,
                    [each[number] for each in briefs if number < len(each)],
                    follower,
                    change=change,
                    rank=rank,
                    is_trained=train_index in (None, number),
                )
            )
        return carried

    def find_differences(
        self, saved: Sequence[LoaderProgress], outcomes: Sequence[LoaderOutcome]
    ) -> list[ProgressDifference]:
        """Look again whether every loader stands where `restore(saved)`, which said `outcomes`, has put it.

        Draws no random number and changes nothing. Call it before any batch is drawn.
        """
        return list(find_differences(self._get_followers(), saved, outcomes))

    def _find_obstacle(self, item: LoaderProgress, follower: Follower | None, data_resume: str) -> str | None:
        """Why nothing but the epoch of this record can be used here; None if it can."""
        if follower is None:
            return "there is no such dataloader here"
        differences = comparing.compare(item, follower)
        if differences:
            return "; ".join(differences)
        try:
            follower.validate(item, data_resume)
        except DataProgressError as error:
            return error.message.rstrip(".")
        return None


def _is_sequential(loader: Any) -> bool:
    from torch.utils.data import SequentialSampler

    inner = get_index_sampler(loader)
    while hasattr(inner, "batch_sampler"):
        inner = inner.batch_sampler
    return isinstance(getattr(inner, "sampler", inner), SequentialSampler)


def _draws_from(loader: Any, sampler: Any) -> bool:
    """Whether the sampler chain of `loader` contains `sampler`."""
    inner = get_index_sampler(loader)
    for _ in range(8):
        if inner is sampler:
            return True
        inner = getattr(inner, "batch_sampler", None)
    return False
