"""The kinds of loaders, and which follower serves each.

To support another kind, write a follower in a file of its own and put a `LoaderKind` before the ones that match
more. Nothing else knows about kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .contract import is_iterable
from .dispatch import DispatchFollower
from .exact import ExactFollower
from .follow import Follower
from .records import PassState
from .stateful import (
    StatefulDispatchFollower,
    StatefulFollower,
    StatefulStreamDispatchFollower,
    StatefulStreamFollower,
    is_stateful,
    speaks_for_workers,
)
from .streams import StreamDispatchFollower, StreamFollower, has_state


@dataclass(frozen=True)
class LoaderKind:
    """One kind of loader.

    Attributes:
        name: as saved in the checkpoint; a position is restored only into a loader of the same kind.
        matches: whether a loader is of this kind; the first kind in `KINDS` that matches is taken.
        explain: why a loader saved in a given state of its pass does not go on exactly; None if it does.
        follow: makes the follower.
        can_install: whether the loader's iterations can be seen at all.
    """

    name: str
    matches: Callable[[Any], bool]
    explain: Callable[[Any, PassState], str | None]
    follow: Callable[[Any, LoaderKind], Follower]
    can_install: bool = True


def _is_shard(loader: Any) -> bool:
    from accelerate.data_loader import DataLoaderShard

    return issubclass(type(loader), DataLoaderShard)


def _is_dispatcher(loader: Any) -> bool:
    from accelerate.data_loader import DataLoaderDispatcher

    return issubclass(type(loader), DataLoaderDispatcher)


def _explain_workers(loader: Any, state: PassState) -> str | None:
    if not loader.num_workers:
        return None
    if not getattr(loader, "in_order", True):
        return _explain_disorder(loader)
    if getattr(loader, "persistent_workers", False):
        return (
            f"the random state of its {loader.num_workers} persistent workers is not saved; the order of the "
            'batches is exact. With persistent_workers=False and data_resume="replay" what workers draw is exact too'
        )
    if state == "running":
        return (
            f"saved in the middle of a pass: the random state of its {loader.num_workers} workers is not saved; the "
            'order of the batches is exact, and so are saves between passes. data_resume="replay" reads what was '
            "handed out again, and what workers draw is exact too"
        )
    return None


def _explain_disorder(loader: Any) -> str:
    return (
        f"in_order=False: the order in which its {loader.num_workers} workers deliver is not reproducible, nor what "
        "they draw; every sample is seen once in its epoch. in_order=True is exact"
    )


def _is_unordered_stream(loader: Any) -> bool:
    return is_iterable(loader) and loader.num_workers > 0 and not getattr(loader, "in_order", True)


def _explain_stream(loader: Any, state: PassState) -> str | None:
    if loader.num_workers and getattr(loader, "persistent_workers", False):
        return (
            f"the random state of its {loader.num_workers} persistent workers is not saved; what comes is exact as far "
            "as it is not random. persistent_workers=False is exact"
        )
    return None  # it is read again, by workers that draw what they drew


def _explain_stateful(loader: Any, state: PassState) -> str | None:
    if has_state(loader.dataset):
        return "the state of a dataset with indices (its state_dict) is not restored; the order of the batches is exact"
    return _explain_workers(loader, state)


def _explain_stateful_stream(loader: Any, state: PassState) -> str | None:
    if state == "running" and speaks_for_workers(loader):
        return _explain_workers(loader, state)
    return _explain_stream(loader, state)


KINDS: tuple[LoaderKind, ...] = (
    LoaderKind(
        name="tensor_parallel_dispatcher",
        matches=lambda loader: _is_dispatcher(loader) and getattr(loader, "submesh_tp", None) is not None,
        explain=lambda loader, state: "dispatch_batches under tensor parallelism is not restored by this version",
        follow=Follower,
    ),
    LoaderKind(
        name="skipping",
        matches=lambda loader: bool(getattr(loader, "skip_batches", 0)),
        explain=lambda loader, state: "a loader that skips batches in every pass is not restored by this version",
        follow=Follower,
    ),
    LoaderKind(
        name="unordered_stream",
        matches=_is_unordered_stream,
        explain=lambda loader, state: (
            "in_order=False over an iterable dataset: which of its samples were handed out is not known. in_order=True "
            "is exact"
        ),
        follow=Follower,
    ),
    LoaderKind(
        name="stateful_stream_dispatcher",
        matches=lambda loader: is_stateful(loader) and _is_dispatcher(loader) and is_iterable(loader),
        explain=_explain_stateful_stream,
        follow=StatefulStreamDispatchFollower,
    ),
    LoaderKind(
        name="stateful_stream",
        matches=lambda loader: is_stateful(loader) and _is_shard(loader) and is_iterable(loader),
        explain=_explain_stateful_stream,
        follow=StatefulStreamFollower,
    ),
    LoaderKind(
        name="stateful_dispatcher",
        matches=lambda loader: is_stateful(loader) and _is_dispatcher(loader),
        explain=_explain_stateful,
        follow=StatefulDispatchFollower,
    ),
    LoaderKind(
        name="stateful",
        matches=lambda loader: is_stateful(loader) and _is_shard(loader),
        explain=_explain_stateful,
        follow=StatefulFollower,
    ),
    LoaderKind(
        name="stream_dispatcher",
        matches=lambda loader: _is_dispatcher(loader) and is_iterable(loader),
        explain=_explain_stream,
        follow=StreamDispatchFollower,
    ),
    LoaderKind(
        name="stream",
        matches=lambda loader: _is_shard(loader) and is_iterable(loader),
        explain=_explain_stream,
        follow=StreamFollower,
    ),
    LoaderKind(
        name="dispatcher",
        matches=_is_dispatcher,
        explain=_explain_workers,
        follow=DispatchFollower,
    ),
    LoaderKind(
        name="workers",
        matches=lambda loader: _is_shard(loader) and getattr(loader, "num_workers", 0) > 0,
        explain=_explain_workers,
        follow=ExactFollower,
    ),
    LoaderKind(
        name="shard",
        matches=_is_shard,
        explain=lambda loader, state: None,
        follow=ExactFollower,
    ),
    LoaderKind(
        name="unknown",
        matches=lambda loader: True,
        explain=lambda loader, state: f"loaders of type {type(loader).__name__} cannot be followed",
        follow=Follower,
        can_install=False,
    ),
)


def find_kind(loader: Any) -> LoaderKind:
    """The kind of a prepared loader."""
    return next(kind for kind in KINDS if kind.matches(loader))
