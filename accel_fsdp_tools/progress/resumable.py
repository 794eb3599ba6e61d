"""Remember a loader's pass so that it can go on exactly, and go on with one that was saved.

Accelerate fetches one batch ahead: with batch k-1 in hand, batch k has been fetched already. What is remembered, and
what a resumed pass does, in this order:

1. *Before the loader makes its iterator* the random state is that of the pass's beginning: making it draws the
   workers' seed, and the first draw of indices draws the permutation.
2. The iterator is brought behind the k batches that were handed out. How is what kinds of loaders differ in: indices
   are drawn and dropped (`exact.py`), a stream's own state is put back (`streams.py`), or, where nothing else leads
   there or `data_resume="replay"` asks for it, batches are read and dropped. A checksum must be the saved one.
3. *Before batch k is fetched* the random state is that from before the fetch that was one ahead at the save.
4. *After it* the random state is that of the save, and Accelerate's loop goes on as if it had never stopped.

A pass saved with its last batch in hand has nothing to deliver: it ends at once, so that the end-of-epoch code runs.
Accelerate's synchronisation of generators between ranks (a collective, done when a pass begins) is left out in a
resumed pass: it is part of state 1, and a rank whose pass is empty would not take part.

With workers nothing is drawn in this process while a batch is fetched, except by samplers, which are ahead by what is
prefetched. So nothing is remembered per fetch, and the samplers' generators are left as step 2 makes them.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DataProgressError, DataProgressWarning
from ..rng import RngSnapshot
from .attributes import AttributeStates, AttributeWatch
from .follow import Follower, Pass, make_outcome
from .generators import SAMPLER_ROOTS, find_generators
from .moments import Moment
from .passes import ResumablePass, WatchedIterator, has_running_workers
from .places import Places
from .records import LoaderOutcome, LoaderPosition, LoaderProgress

if TYPE_CHECKING:
    from .kinds import LoaderKind
    from .session import RestoreSession


class ResumableFollower(Follower):
    """Follows a loader through its DataLoader's fetches, and restores it. Subclasses know how a place is reached."""

    def __init__(self, loader: Any, kind: LoaderKind) -> None:
        super().__init__(loader, kind)
        self._watch = AttributeWatch(loader)
        self._waiting: LoaderProgress | None = None
        self._session: RestoreSession | None = None
        self._rng_types: Any = None
        self._is_next_reusing_workers = False

    @property
    def is_waiting(self) -> bool:
        return self._waiting is not None

    # What kinds differ in

    def _get_group_size(self) -> int:
        """Fetches of this rank's DataLoader per batch that is handed out; 0 if another rank fetches."""
        return 1

    def _make_source(self, loader: Any, this: ResumablePass, is_running: bool) -> Iterator[Any]:
        """The DataLoader's iterator for a pass; `is_running`: its persistent workers run already."""
        source: Iterator[Any] = type(loader.base_dataloader).__iter__(loader.base_dataloader)
        return source

    def _reach(self, source: Iterator[Any], this: ResumablePass, saved: LoaderProgress) -> None:
        """Bring an iterator that has just been made behind the batches that were handed out."""
        raise NotImplementedError

    def _replays(self, saved: LoaderProgress, data_resume: str) -> bool:
        """Whether a saved pass is reached by reading what was handed out."""
        return data_resume == "replay"

    def _take_drawn(self, this: Pass) -> int | None:
        """A batch is handed out: note which; returns how many samples this rank read for it, None if not known."""
        return None

    def note_batch(self, this: ResumablePass, batch: Any) -> None:
        """A fetch has brought `batch`."""

    def _describe(self, this: ResumablePass) -> dict[str, Any]:
        """Further facts of a running pass, by field of `LoaderProgress`; "reason" says why they are not enough."""
        return {}

    # Iterating

    def note_derived_loader(self) -> None:
        waiting = self._waiting
        if waiting is not None:
            raise DataProgressError(
                f"skip_first_batches was used on loader {waiting.index}, which load_state had put in its place "
                f"already: it goes on after batch {waiting.batch} by itself. Iterate the prepared loader and leave "
                "skip_first_batches out."
            )

    def _open(self, loader: Any) -> Pass | None:
        waiting, session = self._waiting, self._session
        self.check_undisturbed(forget=True)
        self._waiting = self._session = None
        if waiting is None or session is None:
            this = super()._open(loader)
            self._hook(loader, this)
            return this
        entry = RngSnapshot.capture()
        after = waiting.moments["now"].rng if session.take_rng_turn() else entry
        if waiting.state == "exhausted":
            self._end_exhausted(loader, waiting, after)
            return None
        loader.iteration = waiting.iteration
        this = super()._open(loader)
        assert isinstance(this, ResumablePass)  # noqa: S101
        this.resumed, this.rng_after, this.is_strict = waiting, after, session.strict
        this.replays = self._replays(waiting, session.data_resume)
        this.num_batches = waiting.batch
        this.num_samples = waiting.samples - waiting.samples_before_epoch
        if "rng_types" in loader.__dict__:
            self._rng_types, loader.rng_types = loader.rng_types, None
        self._hook(loader, this)
        return this

    def _make_pass(self, loader: Any) -> Pass:
        return ResumablePass(loader)

    def _end_exhausted(self, loader: Any, waiting: LoaderProgress, after: RngSnapshot | None) -> None:
        self._end(self.current)
        loader.iteration = waiting.iteration + 1
        self.num_passes += 1
        self.samples_before = waiting.samples
        if after is not None:
            after.restore()

    def _hook(self, loader: Any, this: Pass | None) -> None:
        base = loader.base_dataloader

        def make_iterator() -> Iterator[Any]:
            assert isinstance(this, ResumablePass)  # noqa: S101
            self._unhook(loader, this)
            return self._make_iterator(loader, this)

        # Accelerate calls `self.base_dataloader.__iter__()`, so that an attribute of the instance is found.
        base.__dict__["__iter__"] = make_iterator

    def _unhook(self, loader: Any, this: Pass) -> None:
        loader.base_dataloader.__dict__.pop("__iter__", None)
        if isinstance(this, ResumablePass) and this.resumed is not None and "rng_types" in loader.__dict__:
            loader.rng_types = self._rng_types

    def _close(self, loader: Any, this: Pass) -> None:
        if this is self.current:
            self._unhook(loader, this)
        super()._close(loader, this)

    def _make_iterator(self, loader: Any, this: ResumablePass) -> Iterator[Any]:
        saved = this.resumed
        is_running = has_running_workers(loader)
        if saved is not None:
            return self._resume(loader, this, saved, is_running)
        this.found = find_generators(loader)
        this.epoch_start = Moment.capture(this.found)
        this.attributes = self._watch.read(loader)
        this.reuses_workers = is_running or self._is_next_reusing_workers
        self._is_next_reusing_workers = False
        source = self._make_source(loader, this, is_running)
        return WatchedIterator(source, self, this, self._get_group_size())

    def _resume(self, loader: Any, this: ResumablePass, saved: LoaderProgress, is_running: bool) -> Iterator[Any]:
        source = self._go_back(loader, this, saved, is_running)
        this.before_fetch = saved.moments["before_fetch"]
        self._restore_moment(loader, this.before_fetch)
        pending = self._fetch_pending(source, this, saved)
        self._arrive(loader, this, saved)
        return WatchedIterator(source, self, this, self._get_group_size(), pending)

    def _go_back(self, loader: Any, this: ResumablePass, saved: LoaderProgress, is_running: bool) -> Iterator[Any]:
        """Make the iterator as it was made when the saved pass began, and bring it to where it was saved."""
        this.epoch_start = saved.moments["epoch_start"]
        this.attributes = saved.attributes.get("epoch_start", AttributeStates())
        this.attributes.restore(loader)
        this.epoch_start.restore(loader)
        this.found = find_generators(loader)
        this.reuses_workers = saved.reuses_workers
        self._is_next_reusing_workers = False
        source = self._make_source(loader, this, is_running)
        this.num_fetches = saved.batch * self._get_group_size()
        if self._get_group_size():
            self._reach(source, this, saved)
        return source

    def _fetch_pending(self, source: Iterator[Any], this: ResumablePass, saved: LoaderProgress) -> deque[Any]:
        """Fetch the batch that had been fetched ahead at the save, as it was fetched then."""
        pending: deque[Any] = deque()
        for _ in range(self._get_group_size()):
            try:
                batch = next(source)
            except StopIteration:
                break
            pending.append(batch)
            self.note_batch(this, batch)
        if not pending and self._get_group_size():
            raise DataProgressError(
                f"loader {saved.index} ended after {saved.batch} batches, but the checkpoint was saved with more to "
                "come: the dataset or the sampler is not the one that was saved",
                expected=saved.batch + 1,
                actual=saved.batch,
            )
        return pending

    def _arrive(self, loader: Any, this: ResumablePass, saved: LoaderProgress) -> None:
        """Put the random state of the save back."""
        this.resumed = None
        skipped = SAMPLER_ROOTS if self._leaves_samplers() else ()
        saved.moments["now"].restore_generators(loader, but_not=skipped)
        if this.rng_after is not None:
            this.rng_after.restore()

    def _restore_moment(self, loader: Any, moment: Moment) -> None:
        if not self._leaves_samplers():
            moment.restore(loader)

    def _leaves_samplers(self) -> bool:
        return bool(self.loader.base_dataloader.num_workers > 0)

    def _replay(self, source: Iterator[Any], this: ResumablePass, saved: LoaderProgress) -> None:
        """Read and drop what was handed out."""
        for number in range(this.num_fetches):
            try:
                batch = next(source)
            except StopIteration:
                raise DataProgressError(
                    f"loader {saved.index} ended after {number} fetches while what had been handed out was read again, "
                    f"but {this.num_fetches} were made before the save: it does not deliver what it delivered then. "
                    "Build it as in the run that was saved.",
                    expected=this.num_fetches,
                    actual=number,
                ) from None
            self.note_batch(this, batch)

    def note_before_fetch(self, this: ResumablePass) -> None:
        """The fetches of another batch begin."""
        if self._leaves_samplers():
            this.before_fetch = this.before_last_fetch = this.epoch_start
            return
        if 0 < this.num_fetches <= self._get_group_size():
            # Some samplers and collators make their generator when they are first used.
            this.found = find_generators(self.loader)
        this.before_last_fetch, this.before_fetch = this.before_fetch, Moment.capture(this.found)

    def note_failure(self, this: ResumablePass) -> None:
        """A fetch failed: the user never gets the batch before it, which is where a resume has to begin."""
        this.before_fetch = this.before_last_fetch

    def note_end(self, this: ResumablePass) -> None:
        """Nothing more comes from the DataLoader."""
        this.is_exhausted = True

    # Saving

    def get_position(self) -> LoaderPosition:
        return super().get_position() if self._waiting is None else self._waiting.position

    def begin_training(self) -> None:
        super().begin_training()
        self._waiting = self._session = None

    def capture(self, index: int, rng: RngSnapshot) -> LoaderProgress:
        if self._waiting is not None:
            self.check_undisturbed()
            return _renumber(self._waiting, index)
        plain = self.record(index)
        this, _, _ = self.find_pass()
        found = find_generators(self.loader)
        now = Moment.capture(found, rng if plain.state != "idle" else None)
        moments = {"now": now if plain.state != "idle" else Moment(None, now.generators)}
        attributes = {"now": self._watch.read(self.loader)}
        reason, facts = plain.reason, {}
        is_running = plain.state == "running" and isinstance(this, ResumablePass)
        if is_running and isinstance(this, ResumablePass):
            if this.epoch_start is None or (this.before_fetch is None and self._get_group_size()):
                text = f"{type(self.loader).__name__} iterates in a way of its own, so its fetches were not seen"
                return self.record(index, text)
            before = this.before_fetch or this.epoch_start
            moments.update(epoch_start=this.epoch_start, before_fetch=before)
            attributes["epoch_start"] = self._watch.complete(this.attributes, attributes["now"])
            if set(now.generators) - set(before.generators) and not self._leaves_samplers():
                reason = reason or "a random generator was added to the loader in the middle of the pass"
            facts = self._describe(this)
            reason = reason or facts.pop("reason", None)
        return LoaderProgress(
            **{
                **plain.__dict__,
                "exact": reason is None,
                "restorable": True,
                "reason": reason,
                "reuses_workers": (
                    this.reuses_workers
                    if is_running and isinstance(this, ResumablePass)
                    else has_running_workers(self.loader) or self._is_next_reusing_workers
                ),
                "digest": this.digest if is_running and isinstance(this, ResumablePass) else None,
                "moments": moments,
                "attributes": attributes,
                **facts,
            }
        )

    # Restoring

    def validate(self, saved: LoaderProgress, data_resume: str) -> None:
        if not saved.restorable:
            return
        reads = saved.state == "running" and self._get_group_size() > 0 and self._replays(saved, data_resume)
        if data_resume == "refuse" and reads:
            raise DataProgressError(
                f"the place of loader {saved.index} ({saved.kind}), behind {saved.batch} batches, can only be reached "
                'by reading them again, which data_resume="refuse" forbids. Pass data_resume="replay" to read them'
            )
        places = Places(self.loader)
        for moment in saved.moments.values():
            moment.validate(places)
        for states in saved.attributes.values():
            states.validate(places)

    def restore(self, saved: LoaderProgress, session: RestoreSession) -> LoaderOutcome:
        if not saved.restorable:
            return super().restore(saved, session)
        loader, now = self.loader, saved.moments["now"]
        self.apply_counters(saved)
        for states in saved.attributes.values():
            self._watch.expect(states)
        if saved.state != "running":
            saved.attributes.get("now", AttributeStates()).restore(loader)
        start = saved.moments.get("epoch_start", now)
        # A record made for other ranks has the order's generators of the pass's beginning alone.
        Moment(None, {**start.generators, **now.generators}).restore_generators(loader)
        self._session = session
        self._waiting = saved if saved.state != "idle" else None
        session.expect(
            find_generators(loader),
            (now.generators, start.generators),
            until_any_batch=self._waiting is None,
        )
        self._is_next_reusing_workers = saved.reuses_workers and saved.state != "running"
        is_made_exact = saved.replayable and saved.state == "running" and session.data_resume == "replay"
        return make_outcome(saved, None if is_made_exact else saved.reason)

    def restore_epoch(self, saved: LoaderProgress, reason: str) -> LoaderOutcome:
        self._waiting = self._session = None
        return super().restore_epoch(saved, reason)

    def check_undisturbed(self, *, forget: bool = False) -> None:
        waiting, session = self._waiting, self._session
        if session is not None and (waiting is not None or forget):
            session.check(find_generators(self.loader), forget=forget)

    def complain(self, this: ResumablePass, text: str, **facts: Any) -> None:
        """Raise DataProgressError, or warn if the restore was not strict."""
        if this.is_strict:
            raise DataProgressError(text, **facts)
        warnings.warn(text, DataProgressWarning, stacklevel=2)


def _renumber(saved: LoaderProgress, index: int) -> LoaderProgress:
    return LoaderProgress(**{**saved.__dict__, "index": index})
