"""Map-style loaders: skip what was handed out by its indices, so that no skipped item is read.

With `data_resume="replay"` a loader with workers reads it again: the workers then draw what they drew.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DataProgressError
from .contract import get_index_sampler, get_num_processes
from .feed import IndexFeed
from .follow import Pass
from .moments import Moment
from .passes import ResumablePass
from .records import LoaderProgress
from .resumable import ResumableFollower
from .trial import unchanged_attributes

if TYPE_CHECKING:
    from .kinds import LoaderKind


class Deliveries:
    """Which batches, in the order their indices were drawn, workers that need not keep that order have delivered."""

    def __init__(self, source: Any, saved: LoaderProgress | None, group_size: int) -> None:
        undelivered = () if saved is None else saved.undelivered
        drawn = 0 if saved is None else saved.batch * group_size + len(undelivered)
        self._source = source
        self._kept, self._first_number = tuple(undelivered), drawn
        self._outstanding: set[int] = set()
        self._num_sent = 0
        self._fetched: deque[int] = deque()
        self._floor = 0  # all below it were handed out, and of those above it these
        self._handed_out = set(range(drawn)) - set(undelivered)
        self._raise_floor()

    def note_fetch(self) -> None:
        """One more batch came from the workers."""
        tasks, num_sent = set(self._source._task_info), int(self._source._send_idx)
        arrived = (self._outstanding | set(range(self._num_sent, num_sent))) - tasks
        self._fetched.extend(
            self._kept[task] if task < len(self._kept) else self._first_number + task - len(self._kept)
            for task in sorted(arrived)
        )
        self._outstanding, self._num_sent = tasks, num_sent

    def hand_out(self) -> None:
        """The first of those that came is handed out."""
        if self._fetched:
            self._handed_out.add(self._fetched.popleft())
            self._raise_floor()

    def _raise_floor(self) -> None:
        while self._floor in self._handed_out:
            self._handed_out.remove(self._floor)
            self._floor += 1

    def list_undelivered(self) -> tuple[int, ...]:
        """Those that were passed by."""
        last = max(self._handed_out, default=self._floor)
        return tuple(number for number in range(self._floor, last) if number not in self._handed_out)


class IndexPass(ResumablePass):
    """A pass over a loader with indices."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.deliveries: Deliveries | None = None  # only where workers need not keep the order


class ExactFollower(ResumableFollower):
    """Follows a map-style loader with a sampler, and restores it."""

    def __init__(self, loader: Any, kind: LoaderKind) -> None:
        super().__init__(loader, kind)
        self._feed = IndexFeed(get_index_sampler(loader))

    def _replays(self, saved: LoaderProgress, data_resume: str) -> bool:
        # Without workers the random state of each fetch is known, and a replay would only cost time.
        base = self.loader.base_dataloader
        return bool(data_resume == "replay" and base.num_workers > 0 and base.in_order)

    def _count(self, this: Pass, batch: Any) -> None:
        num_samples = self._take_drawn(this)
        this.count_batch(num_samples, get_num_processes(self.loader) if this.samples_per_batch is None else 1)

    def _take_drawn(self, this: Pass) -> int | None:
        """Note the indices of the batch that is handed out; returns how many there are, None if not drawn here."""
        assert isinstance(this, IndexPass)  # noqa: S101
        num_samples = None
        for _ in range(self._get_group_size()):
            if this.deliveries is not None:
                this.deliveries.hand_out()
            if self._feed.drawn:
                this.digest, length = self._feed.drawn.popleft()
                num_samples = length + (num_samples or 0)
        return num_samples

    def _describe(self, this: ResumablePass) -> dict[str, Any]:
        base = self.loader.base_dataloader
        is_replayable = base.num_workers > 0 and base.in_order and not this.reuses_workers
        facts = {**super()._describe(this), "replayable": is_replayable}
        if isinstance(this, IndexPass) and this.deliveries is not None:
            facts["undelivered"] = this.deliveries.list_undelivered()
            if facts["undelivered"]:
                facts["digest"] = None  # that of other batches
        return facts

    def _make_pass(self, loader: Any) -> Pass:
        return IndexPass(loader)

    def note_batch(self, this: ResumablePass, batch: Any) -> None:
        if isinstance(this, IndexPass) and this.deliveries is not None:
            this.deliveries.note_fetch()

    def _make_source(self, loader: Any, this: ResumablePass, is_running: bool) -> Iterator[Any]:
        saved = this.resumed
        num_to_skip = 0 if saved is None or this.replays else saved.batch * self._get_group_size()
        self._feed.prepare(
            num_to_skip=num_to_skip,
            undelivered=() if saved is None else saved.undelivered,
            expected_digest=None if saved is None else self._prove_order(loader, this, saved),
            strict=this.is_strict,
            # Workers that ran at the save are started anew here: undo the draw of their seed before the order's.
            before_iter=(
                functools.partial(self._restore_start, loader, this.epoch_start)
                if this.epoch_start is not None and this.reuses_workers and not is_running
                else None
            ),
        )
        source = self._make_fed_iterator(loader.base_dataloader, is_running and not this.reuses_workers)
        if saved is not None and not self._feed.was_started:
            raise DataProgressError(
                "the loader's persistent workers were started before it was followed; call track or load_state "
                "before the first batch"
            )
        base = loader.base_dataloader
        if isinstance(this, IndexPass) and base.num_workers > 0 and not base.in_order and self._get_group_size():
            this.deliveries = Deliveries(source, saved, self._get_group_size())
        return source

    def _prove_order(self, loader: Any, this: ResumablePass, saved: LoaderProgress) -> int | None:
        """The checksum of what is to be skipped; of a record that was made for other ranks, once it is proven."""
        if saved.proof is None or this.epoch_start is None:
            return saved.digest
        try:
            with unchanged_attributes(loader):
                return saved.proof.prove(loader, draws_seed=not (saved.reuses_workers or this.is_unseeded))
        except DataProgressError as error:
            self.complain(this, error.message, **error.facts)
            return None
        finally:
            this.epoch_start.restore(loader)

    def _restore_start(self, loader: Any, start: Moment) -> None:
        parts = loader.base_dataloader.__dict__
        slot = "batch_sampler" if parts["batch_sampler"] is not None else "sampler"
        feed, parts[slot] = parts[slot], self._feed.sampler  # paths lead through the sampler itself
        try:
            start.restore(loader)
        finally:
            parts[slot] = feed

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

    def _reach(self, source: Iterator[Any], this: ResumablePass, saved: LoaderProgress) -> None:
        if not this.replays:
            self._feed.skip_now()
            return
        self._replay(source, this, saved)
        digest = None
        for _ in range(min(this.num_fetches, len(self._feed.drawn))):
            digest, _ = self._feed.drawn.popleft()
        self._feed.check_digest(digest, saved.digest, saved.batch, strict=this.is_strict)
