"""Iterable datasets: go on with a stream that has no indices.

Three ways lead behind what was handed out:

- The stream's own state (`state_dict` and `load_state_dict`, on the dataset or on its iterator), taken before the
  fetch that is one ahead. Only without workers: theirs are in other processes.
- Where there is none, or where it isn't all (Hugging Face's shuffle buffers lose their contents), the stream is read
  again from the beginning of the pass, and what was handed out is dropped.
- With workers always so. Then they draw what they drew, too.

A stream has no indices whose checksum could prove the way. But the batch that had been fetched ahead at the save is
known by a checksum of its own, and it is fetched with the random state that it was fetched with: it must come again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DataProgressError
from .batches import digest_batch
from .contract import get_num_processes
from .dispatch import DispatchingFollower
from .follow import Pass
from .passes import ResumablePass, encode_values
from .records import LoaderProgress
from .resumable import ResumableFollower

if TYPE_CHECKING:
    from .kinds import LoaderKind

STATE = "stream"
_BUFFERS = ("BufferShuffledExamplesIterable",)  # their state leaves out what they hold


class StreamFeed:
    """Stands for a stream while its DataLoader iterates over it: counts the items, and can be moved elsewhere."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._iterator: Any = None
        self.num_items = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_stream":
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._stream)
        return self

    def __next__(self) -> Any:
        item = next(self._iterator)
        self.num_items += 1
        return item

    def read_state(self) -> dict[str, Any] | None:
        """Where the stream is: what the dataset and its iterator say, copied. None if neither says anything."""
        state = {
            name: copy_state(owner)
            for name, owner in (("dataset", self._stream), ("iterator", self._iterator))
            if has_state(owner)
        }
        return state or None

    def move(self, state: dict[str, Any], num_items: int) -> None:
        """Go on at a place that `read_state` has returned, behind so many items."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()
        if "dataset" in state:
            self._stream.load_state_dict(state["dataset"])
        self._iterator = iter(self._stream)
        if "iterator" in state:
            self._iterator.load_state_dict(state["iterator"])
        self.num_items = num_items

    def forget_state(self) -> None:
        """The next pass begins at the beginning: Hugging Face's streams would go to the loaded place again."""
        if "_starting_state_dict" in getattr(self._stream, "__dict__", {}):
            self._stream._starting_state_dict = None


class StreamPass(ResumablePass):
    """A pass over a stream."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.feed: StreamFeed | None = None
        self.state: Any = None
        self.last_state: Any = None
        self.running_digest = 0
        self.digests: deque[int] = deque()  # after each fetch whose batch is not handed out yet


class StreamFollower(ResumableFollower):
    """Follows a loader over an iterable dataset, and restores it."""

    def __init__(self, loader: Any, kind: LoaderKind) -> None:
        super().__init__(loader, kind)
        self._can_move = can_move(loader)

    def _make_pass(self, loader: Any) -> Pass:
        return StreamPass(loader)

    def _replays(self, saved: LoaderProgress, data_resume: str) -> bool:
        return data_resume == "replay" or STATE not in saved.values

    def _make_source(self, loader: Any, this: ResumablePass, is_running: bool) -> Iterator[Any]:
        base = loader.base_dataloader
        assert isinstance(this, StreamPass)  # noqa: S101
        if not _can_be_fed(loader):
            return super()._make_source(loader, this, is_running)
        dataset = base.dataset
        this.feed = StreamFeed(get_stream(loader))
        if this.feed._stream is dataset:
            base.__dict__["dataset"] = this.feed  # `DataLoader.__setattr__` refuses
        else:
            shard = copy.copy(dataset)
            shard.dataset = this.feed
            base.__dict__["dataset"] = shard
        try:
            return super()._make_source(loader, this, is_running)
        finally:
            base.__dict__["dataset"] = dataset

    def _reach(self, source: Iterator[Any], this: ResumablePass, saved: LoaderProgress) -> None:
        assert isinstance(this, StreamPass)  # noqa: S101
        if this.replays:
            self._replay(source, this, saved)
            if self.loader.num_workers > 0 and not this.reuses_workers and this.running_digest != saved.digest:
                self._complain(this, saved)
        else:
            assert this.feed is not None  # noqa: S101
            if this.feed._stream is not self.loader.dataset:
                next(source)  # the first batch may have to complete the last
            num_items = saved.batch * (this.samples_per_batch or 0)
            this.feed.move(saved.values[STATE].decode(), num_items)
        this.digests.clear()
        this.running_digest = saved.digest or 0

    def _fetch_pending(self, source: Iterator[Any], this: ResumablePass, saved: LoaderProgress) -> deque[Any]:
        assert isinstance(this, StreamPass)  # noqa: S101
        this.state = saved.values[STATE].decode() if STATE in saved.values else None
        pending = super()._fetch_pending(source, this, saved)
        if this.feed is not None:
            this.feed.forget_state()
        is_known = saved.next_digest is not None and (this.replays or self._is_next_known()) and not this.reuses_workers
        if is_known and pending and this.running_digest != saved.next_digest:
            self._complain(this, saved)
        return pending

    def _is_next_known(self) -> bool:
        """Whether the batch that was one ahead comes again bit for bit when only the place is found again."""
        return True

    def _complain(self, this: StreamPass, saved: LoaderProgress) -> None:
        if this.replays:
            why = (
                "it does not deliver the same when it is iterated again. Draw what it draws from generators that are "
                "its attributes, and keep its data as they were"
            )
        else:
            why = 'its state does not say all. Pass data_resume="replay" to read it again from its beginning'
        self.complain(
            this,
            f"the stream of loader {saved.index} could not be brought to where it was, behind {saved.batch} batches: "
            f"another batch came than the one that was next at the save; {why}.",
            expected=saved.next_digest,
            actual=this.running_digest,
        )

    def note_batch(self, this: ResumablePass, batch: Any) -> None:
        assert isinstance(this, StreamPass)  # noqa: S101
        this.running_digest = digest_batch(batch, this.running_digest)
        this.digests.append(this.running_digest)

    def note_before_fetch(self, this: ResumablePass) -> None:
        super().note_before_fetch(this)
        assert isinstance(this, StreamPass)  # noqa: S101
        if this.num_fetches and self._can_move and this.feed is not None:
            this.last_state, this.state = this.state, this.feed.read_state()

    def note_failure(self, this: ResumablePass) -> None:
        super().note_failure(this)
        assert isinstance(this, StreamPass)  # noqa: S101
        this.state = this.last_state

    def _take_drawn(self, this: Pass) -> int | None:
        assert isinstance(this, StreamPass)  # noqa: S101
        for _ in range(min(self._get_group_size(), len(this.digests))):
            this.digest = this.digests.popleft()
        return None

    def _count(self, this: Pass, batch: Any) -> None:
        assert isinstance(this, StreamPass)  # noqa: S101
        self._take_drawn(this)
        this.count_batch(_measure(batch), 1)
        if this.is_exhausted and this.feed is not None and this.samples_limit is None:
            # Accelerate repeats samples to even the last batch. All ranks read the whole stream, or each its shards,
            # which are as many as this rank's as far as is known here.
            num_shares = get_num_processes(self.loader) if self.loader.dataset is get_stream(self.loader) else 1
            this.num_samples = min(this.num_samples, num_shares * this.feed.num_items)

    def _describe(self, this: ResumablePass) -> dict[str, Any]:
        assert isinstance(this, StreamPass)  # noqa: S101
        facts = super()._describe(this)
        facts["next_digest"] = this.digests[-1] if this.digests else None
        if this.state is not None:
            values, _ = encode_values({STATE: this.state})  # what can't be encoded is read again instead
            facts["values"] = {**facts.get("values", {}), **values}
        return facts


class StreamDispatchFollower(DispatchingFollower, StreamFollower):
    """Follows a dispatcher over an iterable dataset."""


def get_stream(loader: Any) -> Any:
    """The dataset that the user gave, without what Accelerate wraps it in to share it between ranks."""
    from accelerate.data_loader import IterableDatasetShard

    dataset = loader.dataset
    return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset


def _can_be_fed(loader: Any) -> bool:
    """Whether something can stand for the stream: in workers it would be copied, and torch asks what a pipe is."""
    from torch.utils.data import IterDataPipe

    return bool(loader.num_workers == 0) and not isinstance(get_stream(loader), IterDataPipe)


def can_move(loader: Any) -> bool:
    """Whether the stream's state, if it has one, is all that is needed to go on."""
    stream = get_stream(loader)
    chain = [getattr(stream, "_ex_iterable", None)]
    is_table = bool(getattr(getattr(stream, "_formatting", None), "is_table", False))
    for part in chain:
        if part is None:
            continue
        if type(part).__name__ in _BUFFERS:
            return False
        if is_table and getattr(part, "batched", False):  # its state may skip a batch, says its documentation
            return False
        chain.append(getattr(part, "ex_iterable", None))
        chain.extend(getattr(part, "ex_iterables", ()))
    return True


def has_state(owner: Any) -> bool:
    """Whether an object says where it is, and can be told."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def copy_state(owner: Any) -> Any:
    """What an object says about where it is, in containers that it will not change."""
    state = owner.state_dict()
    try:
        return copy.deepcopy(state)
    except (TypeError, RuntimeError) as error:
        raise DataProgressError(
            f"the state of the stream {type(owner).__name__} cannot be copied ({error}); return plain containers, "
            "numbers, texts, arrays or tensors from state_dict"
        ) from error


def _measure(batch: Any) -> int | None:
    from accelerate.utils import find_batch_size

    try:
        size = find_batch_size(batch)
    except (TypeError, AttributeError, IndexError):
        return None
    return None if size is None else int(size)
