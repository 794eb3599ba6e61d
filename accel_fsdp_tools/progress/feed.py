"""Stand between a DataLoader and its index sampler: skip what was handed out, and know what was drawn.

Skipping happens here, where only indices are drawn, so that no skipped item is ever read. Every batch of indices is
added to a running checksum: on resume the skipped indices must give the checksum that was saved, which proves that
the order was reproduced, whatever hidden state a sampler may have.
"""

from __future__ import annotations

import warnings
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import DataProgressError, DataProgressWarning


class IndexFeed:
    """Takes the place of a loader's index sampler while the loader makes its iterator.

    One feed serves a loader for life: persistent workers keep the object that they were started with. A start
    with workers calls `iter` twice, so the skip belongs to the first *draw*, and happens once.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.drawn: deque[tuple[int, int]] = deque()  # checksum so far and length, per batch not yet handed out
        self.was_started = False
        self._digest = 0
        self._num_to_skip = 0
        self._undelivered: frozenset[int] = frozenset()
        self._kept: deque[Any] = deque()
        self._expected_digest: int | None = None
        self._strict = True
        self._indices: Iterator[Any] | None = None
        self._before_iter: Callable[[], None] | None = None

    def prepare(
        self,
        *,
        num_to_skip: int = 0,
        undelivered: Sequence[int] = (),
        expected_digest: int | None = None,
        strict: bool = True,
        before_iter: Callable[[], None] | None = None,
    ) -> None:
        """Get ready for a pass that begins after `num_to_skip` batches.

        Args:
            undelivered: batches among those drawn that were not handed out: they come first. Skipping draws so many
                batches more.
            expected_digest: what the checksum of the skipped batches has to be; None if not known.
            strict: raise if it is another one, instead of warning.
            before_iter: called each time before the sampler is asked for its iterator.
        """
        self.was_started = False
        self._before_iter = before_iter
        self._digest = 0
        self._num_to_skip = num_to_skip + (len(undelivered) if num_to_skip else 0)
        self._undelivered = frozenset(undelivered)
        self._kept.clear()
        self._expected_digest = expected_digest
        self._strict = strict
        self._indices = None

    def __iter__(self) -> Iterator[Any]:
        self.was_started = True
        self.drawn.clear()
        if self._before_iter is not None:
            self._before_iter()
        self._indices = iter(self.sampler)  # now: some samplers draw their order in `__iter__`
        return _FeedIterator(self, self._indices)

    def __len__(self) -> int:
        return len(self.sampler)

    def skip_now(self) -> None:
        """Skip at once (without workers nothing has been drawn yet when the iterator has just been made)."""
        if self._num_to_skip and self._indices is not None:
            self.skip(self._indices)

    def skip(self, indices: Iterator[Any]) -> None:
        """Draw and drop the batches that were handed out before, and prove that they are the same ones."""
        num_to_skip, self._num_to_skip = self._num_to_skip, 0
        for number in range(num_to_skip):
            try:
                batch = next(indices)
            except StopIteration:
                raise DataProgressError(
                    f"the sampler ended after {number} batches, but {num_to_skip} were handed out before the "
                    "save: the dataset or the sampler is not the one that was saved",
                    expected=num_to_skip,
                    actual=number,
                ) from None
            self._digest = extend_digest(self._digest, batch)
            if number in self._undelivered:
                self._kept.append(batch)
        self.check_digest(self._digest, self._expected_digest, num_to_skip, strict=self._strict)

    def check_digest(self, digest: int | None, expected: int | None, num_batches: int, *, strict: bool) -> None:
        """Raise DataProgressError (or warn) unless what was skipped is what had been handed out."""
        if expected is None or digest == expected:
            return
        text = (
            f"the first {num_batches} batches of the epoch are not those that were handed out before the save: "
            "the sampler's order depends on something that is not saved. Draw it from a generator kept as an "
            "attribute of the sampler, not from the global one while iterating, and keep the dataset as it was."
        )
        if strict:
            raise DataProgressError(text, expected=expected, actual=digest)
        warnings.warn(text, DataProgressWarning, stacklevel=2)

    def draw(self, indices: Iterator[Any]) -> Any:
        """The next batch of indices."""
        if self._num_to_skip:
            self.skip(indices)
        if self._kept:
            return self._deliver(self._kept.popleft())
        batch = next(indices)
        self._digest = extend_digest(self._digest, batch)
        return self._deliver(batch)

    def _deliver(self, batch: Any) -> Any:
        self.drawn.append((self._digest, len(batch) if hasattr(batch, "__len__") else 1))
        return batch


class _FeedIterator:
    __slots__ = ("_feed", "_indices")

    def __init__(self, feed: IndexFeed, indices: Iterator[Any]) -> None:
        self._feed = feed
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._feed.draw(self._indices)


def extend_digest(digest: int, batch: Any) -> int:
    """Add a batch of indices to the checksum of those before it."""
    try:
        data = array("q", batch if isinstance(batch, (list, tuple)) else [batch]).tobytes()
    except (TypeError, OverflowError):  # indices may be anything that the dataset understands
        data = repr(batch).encode()
    return zlib.crc32(data, digest)
