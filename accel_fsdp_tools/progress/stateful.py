"""`use_stateful_dataloader=True`: torchdata's StatefulDataLoader under Accelerate's loaders.

Accelerate saves one rank's state for all and restores it to every rank. Here each rank has its own place, found as
for any other loader: by indices, by the stream's state, or by reading again. The StatefulDataLoader's own state is used
where only it can say something: for a stream in workers. It is taken before the fetch that is one ahead, so that it
belongs to the batches that were handed out.

Preparing such a loader makes an iterator at once (Accelerate asks it for a state), with workers that prefetch. It is
given up when the loader is followed: what it has drawn by then was seen by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .dispatch import DispatchingFollower
from .exact import ExactFollower
from .passes import ResumablePass, encode_values
from .records import UNSEEDED, LoaderProgress
from .resumable import ResumableFollower
from .streams import StreamFollower, StreamPass, can_move, copy_state, get_stream, has_state
from .values import PlainValue

if TYPE_CHECKING:
    from .kinds import LoaderKind

_LOADER = "loader"


class StatefulBase(ResumableFollower):
    """What all stateful loaders need; comes before the class that knows how a place is reached."""

    def __init__(self, loader: Any, kind: LoaderKind) -> None:
        super().__init__(loader, kind)
        # The seed of the iterator that is given up has been drawn: the next one is not to draw another.
        self._has_drawn_seed = bool(getattr(loader.base_dataloader, "_initial_iter_for_state_dict", False))
        _forget(loader.base_dataloader)

    def _make_source(self, loader: Any, this: ResumablePass, is_running: bool) -> Iterator[Any]:
        import torch

        saved = this.resumed
        this.is_unseeded = self._has_drawn_seed if saved is None else UNSEEDED in saved.values
        self._has_drawn_seed = False
        generator = loader.base_dataloader.generator or torch.default_generator
        before = generator.get_state()
        source = super()._make_source(loader, this, is_running)
        if this.is_unseeded and loader.num_workers == 0:  # workers have drawn an order by now
            generator.set_state(before)
        return source

    def _describe(self, this: ResumablePass) -> dict[str, Any]:
        facts = super()._describe(this)
        if this.is_unseeded:
            facts["values"] = {**facts.get("values", {}), UNSEEDED: PlainValue(True)}
        return facts

    def apply_counters(self, saved: LoaderProgress) -> None:
        super().apply_counters(saved)
        self._has_drawn_seed = self._has_drawn_seed and saved.is_untouched
        _forget(self.loader.base_dataloader)  # Accelerate has loaded the state that rank 0 saved


class StatefulFollower(StatefulBase, ExactFollower):
    """Follows a stateful map-style loader."""


class StatefulDispatchFollower(StatefulBase, DispatchingFollower, ExactFollower):
    """Follows a stateful map-style loader with `dispatch_batches`."""


class StatefulStreamFollower(StatefulBase, StreamFollower):
    """Follows a stateful loader over a stream."""

    def __init__(self, loader: Any, kind: LoaderKind) -> None:
        super().__init__(loader, kind)
        self._asks_workers = speaks_for_workers(loader)

    def _replays(self, saved: LoaderProgress, data_resume: str) -> bool:
        return super()._replays(saved, data_resume) and (data_resume == "replay" or _LOADER not in saved.values)

    def _make_source(self, loader: Any, this: ResumablePass, is_running: bool) -> Iterator[Any]:
        saved = this.resumed
        if saved is not None and not this.replays and _LOADER in saved.values:
            loader.base_dataloader.load_state_dict(saved.values[_LOADER].decode())
        return super()._make_source(loader, this, is_running)

    def _reach(self, source: Iterator[Any], this: ResumablePass, saved: LoaderProgress) -> None:
        assert isinstance(this, StreamPass)  # noqa: S101
        if this.replays or _LOADER not in saved.values:
            super()._reach(source, this, saved)
        else:
            this.running_digest = saved.digest or 0

    def _is_next_known(self) -> bool:
        return not self._asks_workers  # what workers draw is not repeated

    def note_before_fetch(self, this: ResumablePass) -> None:
        super().note_before_fetch(this)
        assert isinstance(this, StreamPass)  # noqa: S101
        if this.num_fetches and self._asks_workers:
            this.last_state, this.state = this.state, copy_state(self.loader.base_dataloader)

    def _describe(self, this: ResumablePass) -> dict[str, Any]:
        facts = super()._describe(this)
        assert isinstance(this, StreamPass)  # noqa: S101
        base = self.loader.base_dataloader
        if self._asks_workers:
            facts["replayable"] = base.in_order and not this.reuses_workers
            if this.state is not None:
                values, _ = encode_values({_LOADER: this.state})
                facts["values"] = {**facts.get("values", {}), **values}
                facts["values"].pop("stream", None)
        return facts


class StatefulStreamDispatchFollower(DispatchingFollower, StatefulStreamFollower):
    """Follows a stateful dispatcher over a stream."""


def is_stateful(loader: Any) -> bool:
    """Whether torchdata's loader is underneath."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def speaks_for_workers(loader: Any) -> bool:
    """Whether the loader's own state says where its workers are in their streams."""
    stream = get_stream(loader)
    return bool(loader.num_workers > 0 and stream is loader.dataset and has_state(stream) and can_move(loader))


def _forget(base: Any) -> None:
    base._iterator = None
    base._initial_iter_for_state_dict = False
    base.next_iter_state = None
