"""A pass that can be gone on with: what is remembered of it, and the iterator that sees its fetches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ..rng import RngSnapshot
from .attributes import AttributeStates
from .follow import Pass
from .generators import FoundGenerator
from .moments import Moment
from .values import PlainValue

if TYPE_CHECKING:
    from .records import LoaderProgress


class ResumablePass(Pass):
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
        self.replays = False
        self.reuses_workers = False
        self.first_batch: Any = None  # the beginning of a dispatcher's first batch, which completes its last
        self.is_unseeded = False  # a stateful loader's first pass: the seed was drawn when it was prepared


class FetchObserver(Protocol):
    """Who is told of fetches."""

    def note_before_fetch(self, this: Any) -> None:
        """The fetches of another batch begin."""

    def note_batch(self, this: Any, batch: Any) -> None:
        """A fetch has brought `batch`."""

    def note_failure(self, this: Any) -> None:
        """A fetch failed: the user never gets the batch before it, which is where a resume has to begin."""

    def note_end(self, this: Any) -> None:
        """Nothing more comes from the DataLoader."""


class WatchedIterator:
    """The DataLoader's iterator; tells the follower before and after each fetch."""

    __slots__ = ("_follower", "_group_size", "_is_over", "_pass", "_pending", "_source")

    def __init__(
        self,
        source: Iterator[Any],
        follower: FetchObserver,
        this: ResumablePass,
        group_size: int,
        pending: deque[Any] | None = None,
    ) -> None:
        self._source = source
        self._follower = follower
        self._pass = this
        self._pending = pending or deque()
        self._group_size = max(1, group_size)
        self._is_over = 0 < len(self._pending) < self._group_size

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        this, follower = self._pass, self._follower
        if self._pending:
            this.num_fetches += 1
            return self._pending.popleft()
        if self._is_over:
            raise StopIteration
        if this.num_fetches % self._group_size == 0:
            follower.note_before_fetch(this)
        this.num_fetches += 1
        try:
            batch = next(self._source)
        except StopIteration:
            self._is_over = True
            follower.note_end(this)
            raise
        except BaseException:
            follower.note_failure(this)
            raise
        follower.note_batch(this, batch)
        return batch


def has_running_workers(loader: Any) -> bool:
    """Whether the next pass is made with workers that run already (torch keeps such an iterator)."""
    base = loader.base_dataloader
    return bool(base.persistent_workers) and base.num_workers > 0 and base._iterator is not None


def encode_values(values: dict[str, Any]) -> tuple[dict[str, PlainValue], str | None]:
    """Encode what is to be saved, and say what could not be; that is left out."""
    encoded: dict[str, PlainValue] = {}
    problem = None
    for name, value in values.items():
        try:
            encoded[name] = PlainValue.encode(value)
        except TypeError as error:
            problem = str(error)
    return encoded, problem
