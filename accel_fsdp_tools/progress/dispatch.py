"""Loaders with `dispatch_batches`: rank 0 reads for all, and every rank gets a slice.

What differs from a loader per rank:

- One batch that is handed out is a group of fetches on rank 0 (one per process, or one with `split_batches`), and none
  on the others. There only the random state and the place are put back.
- The last group may be short. It is completed with the beginning of the pass's first batch, which Accelerate's loop
  remembers: so it is saved, and given back when the loop asks for it.
- Ranks wait for rank 0's next batch in a broadcast. If rank 0 cannot get back to its place all ranks are told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..ranks import run_on_each
from .exact import ExactFollower
from .follow import Pass
from .passes import ResumablePass, encode_values
from .records import FIRST_BATCH, LoaderProgress
from .resumable import ResumableFollower


class DispatchingFollower(ResumableFollower):
    """What following any kind of dataset through a dispatcher needs; comes before the class that knows the dataset."""

    def _get_group_size(self) -> int:
        state = self.loader.state
        if state.process_index != 0:
            return 0
        return 1 if self.loader.split_batches else int(state.num_processes)

    def _open(self, loader: Any) -> Pass | None:
        this = super()._open(loader)
        if isinstance(this, ResumablePass) and not loader._drop_last and loader.state.num_processes > 1:
            self._hook_slices(loader, this)
        return this

    def _hook_slices(self, loader: Any, this: ResumablePass) -> None:
        """The first slice that a pass takes is the beginning of its first batch."""
        take = loader.slice_fn
        saved = None if this.resumed is None else this.resumed.values.get(FIRST_BATCH)

        def take_first(data: Any, *args: Any, **kwargs: Any) -> Any:
            loader.slice_fn = take
            this.first_batch = take(data, *args, **kwargs)
            if saved is not None:
                from accelerate.utils import send_to_device

                this.first_batch = _extend(send_to_device(saved.decode(), loader.state.device), loader)
            return this.first_batch

        loader.slice_fn = take_first
        this.undo_hook = lambda: loader.__dict__.update(slice_fn=take)

    def _close(self, loader: Any, this: Pass) -> None:
        this.undo_hook()
        super()._close(loader, this)

    def _count(self, this: Pass, batch: Any) -> None:
        self._take_drawn(this)
        num_here = None
        if this.samples_per_batch is None:
            from accelerate.utils import find_batch_size

            num_here = find_batch_size(batch)
        before = this.num_samples
        this.count_batch(num_here, int(self.loader.state.num_processes))
        # Every rank is told; whether rank 0's DataLoader has ended is not the same (a remainder may be to come).
        this.is_exhausted = bool(self.loader.end_of_dataloader)
        if this.is_exhausted and this.samples_limit is None:
            this.num_samples = before + int(self.loader.remainder)

    def note_end(self, this: ResumablePass) -> None:
        """Nothing: a remainder may be to come."""

    def _resume(self, loader: Any, this: ResumablePass, saved: LoaderProgress, is_running: bool) -> Iterator[Any]:
        return run_on_each(
            "going back to a place in the data",
            lambda: super(DispatchingFollower, self)._resume(loader, this, saved, is_running),
        )

    def _describe(self, this: ResumablePass) -> dict[str, Any]:
        facts = super()._describe(this)
        first = this.first_batch
        if first is not None:
            values, problem = encode_values({FIRST_BATCH: first})
            facts["values"] = {**facts.get("values", {}), **values}
            if problem is not None:
                facts.setdefault("reason", f"the beginning of the first batch, which completes the last: {problem}")
        return facts


def _extend(first: Any, loader: Any) -> Any:
    """The saved beginning of a first batch, long enough to complete a batch of more processes than saved it."""
    from accelerate.utils import concatenate, find_batch_size

    while 0 < find_batch_size(first) < loader.state.num_processes:
        first = concatenate([first, first], dim=0)
    return first


class DispatchFollower(DispatchingFollower, ExactFollower):
    """Follows a map-style loader with `dispatch_batches`."""
