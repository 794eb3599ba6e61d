"""Remember a map-style loader's pass so that it can go on exactly, and go on with one that was saved.

Accelerate fetches one batch ahead: with batch k-1 in hand, batch k has been fetched already. What is remembered, and
what a resumed pass does, in this order:

1. *Before the loader makes its iterator* the random state is that of the pass's beginning: making it draws the
   workers' seed, and the first draw of indices draws the permutation.
2. The indices of the k batches that were handed out are drawn and dropped. Nothing is read from the dataset. Their
   checksum must be the saved one.
3. *Before batch k is fetched* the random state is that from before the fetch that was one ahead at the save.
4. *After it* the random state is that of the save, and Accelerate's loop goes on as if it had never stopped.

A pass saved with its last batch in hand has nothing to deliver: it ends at once, so that the end-of-epoch code runs.
Accelerate's synchronisation of generators between ranks (a collective, done when a pass begins) is left out in a
resumed pass: it is part of state 1, and a rank whose pass is empty would not take part.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DataProgressError, DataProgressWarning
from ..rng import RngSnapshot
from .attributes import AttributeStates, AttributeWatch
from .contract import get_index_sampler, get_num_processes
from .feed import IndexFeed
from .follow import Follower, Pass, make_outcome
from .generators import FoundGenerator, find_generators
from .moments import Moment
from .places import Places
from .records import LoaderOutcome, LoaderPosition, LoaderProgress
from .trial import unchanged_attributes

if TYPE_CHECKING:
    from .kinds import LoaderKind
    from .session import RestoreSession


class ExactPass(Pass):
    """A pass with the random state that its continuation needs."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.found: list[FoundGenerator] = []
        self.epoch_start: Moment | None = None
        self.before_fetch: Moment | None = None
        self.before_last_fetch: Moment | None = None
        self.attributes = AttributeStates()
        self.digest: int | None = None
        self.num_fetches = 0
        self.resumed: LoaderProgress | None = None
        self.rng_after: RngSnapshot | None = None
        self.is_strict = True
        self.reuses_workers = False


class ExactFollower(Follower):
    """Follows a map-style loader with a sampler, and restores it."""

    def __init__(self, loader: Any, kind: LoaderKind) -> None:
        super().__init__(loader, kind)
        self._feed = IndexFeed(get_index_sampler(loader))
        self._watch = AttributeWatch(loader)
        self._waiting: LoaderProgress | None = None
        self._session: RestoreSession | None = None
        self._was_derived = False
        self._rng_types: Any = None
        self._is_next_reusing_workers = False

    def note_derived_loader(self) -> None:
        self._was_derived = self._waiting is not None

    # Iterating

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
        assert isinstance(this, ExactPass)  # noqa: S101
        this.resumed, this.rng_after, this.is_strict = waiting, after, session.strict
        this.num_batches = waiting.batch
        this.num_samples = waiting.samples - waiting.samples_before_epoch
        self._rng_types, loader.rng_types = loader.rng_types, None
        self._hook(loader, this)
        return this

    def _make_pass(self, loader: Any) -> Pass:
        return ExactPass(loader)

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
            assert isinstance(this, ExactPass)  # noqa: S101
            self._unhook(loader, this)
            return self._make_iterator(loader, this)

        # Accelerate calls `self.base_dataloader.__iter__()`, so that an attribute of the instance is found.
        base.__dict__["__iter__"] = make_iterator

    def _unhook(self, loader: Any, this: Pass) -> None:
        loader.base_dataloader.__dict__.pop("__iter__", None)
        if isinstance(this, ExactPass) and this.resumed is not None and loader.rng_types is None:
            loader.rng_types = self._rng_types

    def _close(self, loader: Any, this: Pass) -> None:
        if this is self.current:
            self._unhook(loader, this)
        super()._close(loader, this)

    def _count(self, this: Pass) -> None:
        assert isinstance(this, ExactPass)  # noqa: S101
        this.digest, num_samples = self._feed.drawn.popleft() if self._feed.drawn else (None, None)
        this.count_batch(num_samples, get_num_processes(self.loader) if this.samples_per_batch is None else 1)

    def _make_iterator(self, loader: Any, this: ExactPass) -> Iterator[Any]:
        saved = this.resumed
        is_running = _has_running_workers(loader)
        if saved is None:
            this.found = find_generators(loader)
            this.epoch_start = Moment.capture(this.found)
            this.attributes = self._watch.read(loader)
            this.reuses_workers = is_running or self._is_next_reusing_workers
        else:
            this.epoch_start = saved.moments["epoch_start"]
            this.attributes = saved.attributes.get("epoch_start", AttributeStates())
            this.attributes.restore(loader)
            this.epoch_start.restore(loader)
            this.found = find_generators(loader)
            this.reuses_workers = saved.reuses_workers
        self._is_next_reusing_workers = False
        self._feed.prepare(
            num_to_skip=0 if saved is None else saved.batch,
            expected_digest=None if saved is None else self._prove_order(loader, this, saved),
            strict=this.is_strict,
            # Workers that ran at the save are started anew here: undo the draw of their seed before the order's.
            before_iter=(
                functools.partial(this.epoch_start.restore, loader) if this.reuses_workers and not is_running else None
            ),
        )
        iterator = self._make_fed_iterator(loader.base_dataloader, is_running and not this.reuses_workers)
        if saved is not None:
            if not self._feed.was_started:
                raise DataProgressError(
                    "the loader's persistent workers were started before it was followed; call track or load_state "
                    "before the first batch"
                )
            self._feed.skip_now()
            this.before_fetch = saved.moments["before_fetch"]
            this.before_fetch.restore(loader)
        return _WatchedIterator(iterator, loader, this)

    def _prove_order(self, loader: Any, this: ExactPass, saved: LoaderProgress) -> int | None:
        """The checksum of what is to be skipped; of a record that was made for other ranks, once it is proven."""
        if saved.proof is None or this.epoch_start is None:
            return saved.digest
        try:
            with unchanged_attributes(loader):
                return saved.proof.prove(loader, draws_seed=not saved.reuses_workers)
        except DataProgressError as error:
            if this.is_strict:
                raise
            warnings.warn(error.message, DataProgressWarning, stacklevel=2)
            return None
        finally:
            this.epoch_start.restore(loader)

    def _make_fed_iterator(self, base: Any, is_start_to_be_repeated: bool) -> Iterator[Any]:
        slot = "batch_sampler" if base.batch_sampler is not None else "sampler"
        self._feed.sampler = base.__dict__[slot]
        if is_start_to_be_repeated:  # workers run, but at the save they were being started: draw what that draws
            import torch

            iter(self._feed.sampler)
            torch.empty((), dtype=torch.int64).random_(generator=base.generator)
        base.__dict__[slot] = self._feed  # `DataLoader.__setattr__` refuses
        try:
            iterator: Iterator[Any] = type(base).__iter__(base)
        finally:
            base.__dict__[slot] = self._feed.sampler
        return iterator

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
        reason = plain.reason
        if plain.state == "running" and isinstance(this, ExactPass):
            if this.epoch_start is None or this.before_fetch is None:
                text = f"{type(self.loader).__name__} iterates in a way of its own, so its fetches were not seen"
                return self.record(index, text)
            moments.update(epoch_start=this.epoch_start, before_fetch=this.before_fetch)
            attributes["epoch_start"] = self._watch.complete(this.attributes, attributes["now"])
            if set(now.generators) - set(this.before_fetch.generators):
                reason = reason or "a random generator was added to the loader in the middle of the pass"
        return LoaderProgress(
            **{
                **plain.__dict__,
                "exact": reason is None,
                "restorable": True,
                "reason": reason,
                "reuses_workers": (
                    this.reuses_workers
                    if plain.state == "running" and isinstance(this, ExactPass)
                    else _has_running_workers(self.loader) or self._is_next_reusing_workers
                ),
                "digest": this.digest if plain.state == "running" and isinstance(this, ExactPass) else None,
                "moments": moments,
                "attributes": attributes,
            }
        )

    # Restoring

    def validate(self, saved: LoaderProgress) -> None:
        if saved.restorable:
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
        self._was_derived = False
        self._is_next_reusing_workers = saved.reuses_workers and saved.state != "running"
        return make_outcome(saved, saved.reason)

    def restore_epoch(self, saved: LoaderProgress, reason: str) -> LoaderOutcome:
        self._waiting = self._session = None
        return super().restore_epoch(saved, reason)

    def check_undisturbed(self, *, forget: bool = False) -> None:
        waiting, session = self._waiting, self._session
        if session is None:
            return
        if waiting is not None and self._was_derived:
            raise DataProgressError(
                f"skip_first_batches was used on loader {waiting.index}, which load_state had put in its place "
                f"already: it goes on after batch {waiting.batch} by itself. Iterate the prepared loader and leave "
                "skip_first_batches out."
            )
        if waiting is not None or forget:
            session.check(find_generators(self.loader), forget=forget)


def _has_running_workers(loader: Any) -> bool:
    """Whether the next pass is made with workers that run already (torch keeps such an iterator)."""
    base = loader.base_dataloader
    return bool(base.persistent_workers) and base.num_workers > 0 and base._iterator is not None


def _renumber(saved: LoaderProgress, index: int) -> LoaderProgress:
    return LoaderProgress(**{**saved.__dict__, "index": index})


class _WatchedIterator:
    """The DataLoader's iterator; remembers the random state before each fetch."""

    __slots__ = ("_iterator", "_loader", "_pass")

    def __init__(self, iterator: Iterator[Any], loader: Any, this: ExactPass) -> None:
        self._iterator = iterator
        self._loader = loader
        self._pass = this

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        this = self._pass
        if this.resumed is not None:
            return self._fetch_resumed(this, this.resumed)
        if this.num_fetches == 1:  # some samplers and collators make their generator when they are first used
            this.found = find_generators(self._loader)
        this.before_last_fetch, this.before_fetch = this.before_fetch, Moment.capture(this.found)
        this.num_fetches += 1
        try:
            return next(self._iterator)
        except StopIteration:
            this.is_exhausted = True
            raise
        except BaseException:
            # The user never gets the batch fetched before this one, which is where a resume has to begin.
            this.before_fetch = this.before_last_fetch
            raise

    def _fetch_resumed(self, this: ExactPass, saved: LoaderProgress) -> Any:
        """Fetch the batch that had been fetched ahead at the save, as it was fetched then."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise DataProgressError(
                f"loader {saved.index} ended after {saved.batch} batches, but the checkpoint was saved with more to "
                "come: the dataset or the sampler is not the one that was saved",
                expected=saved.batch + 1,
                actual=saved.batch,
            ) from None
        this.resumed = None
        saved.moments["now"].restore_generators(self._loader)
        if this.rng_after is not None:
            this.rng_after.restore()
        return batch
