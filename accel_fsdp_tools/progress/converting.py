"""The parts of a record that another number of ranks needs in another form: paths, random state, the place.

What decides the order (samplers and their generators) comes from rank 0, after a look whether all ranks had it alike;
what decides how items are read (the global generators, those of datasets) is each rank's own. A rank that did not exist
gets global generators derived from rank 0's, and keeps its datasets' generators as its script has made them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from ..rng import derive
from .attributes import AttributeStates
from .contract import get_index_sampler
from .elastic import EpochShape, Place
from .follow import Follower
from .generators import SAMPLER_ROOTS, FoundGenerator, GeneratorState, Path
from .moments import Moment
from .places import Places
from .records import FIRST_BATCH, UNSEEDED, LoaderProgress, PassState
from .values import PlainValue


def move_paths(saved: LoaderProgress, loader: Any) -> LoaderProgress:
    """Rewrite the paths of a record: with several processes there is one more layer around the batch sampler."""
    was, is_now = saved.contract.get("even_batches") is not None, hasattr(get_index_sampler(loader), "even_batches")
    if was == is_now:
        return saved

    def move(path: Path) -> Path:
        if path[0] != "batch_sampler":
            return path
        if is_now:
            return ("batch_sampler", *path)
        return path[1:] if path[1:2] == ("batch_sampler",) else path

    return dataclasses.replace(
        saved,
        moments={
            name: Moment(each.rng, {move(path): state for path, state in each.generators.items()})
            for name, each in saved.moments.items()
        },
        attributes={
            name: AttributeStates(
                {move(path): value for path, value in each.scalars.items()},
                {move(path): value for path, value in each.arrays.items()},
            )
            for name, each in saved.attributes.items()
        },
    )


def find_synchronised(loader: Any, found: Sequence[FoundGenerator]) -> Path | None:
    """The path of the generator that Accelerate sets to rank 0's state whenever a pass begins."""
    if "generator" not in (getattr(loader, "rng_types", None) or ()):
        return None
    generator = getattr(loader, "__dict__", {}).get("synchronized_generator")
    return next((each.path for each in found if each.generator is generator and generator is not None), None)


def digest_order(moved: LoaderProgress, loader: Any, skipped: Path | None) -> str:
    """A hash of all that decides the order of the epoch: equal on ranks that draw the same one."""
    total = hashlib.blake2b(digest_size=16)
    start = "epoch_start" if moved.state == "running" else "now"
    is_shared = Places(loader).is_shared(("generator",))
    generators = moved.moments[start].generators if start in moved.moments else {}
    for path, state in sorted(generators.items(), key=lambda item: str(item[0])):
        is_order = path[0] in SAMPLER_ROOTS and (path != ("generator",) or is_shared)
        if is_order and path != skipped:
            total.update(f"{path}{state.kind}".encode())
            total.update(state.to_tensor().clone().numpy().tobytes())
    states = moved.attributes.get(start, AttributeStates())
    total.update(repr(sorted(states.scalars.items(), key=lambda item: str(item[0]))).encode())
    for path, (_, array) in sorted(states.arrays.items(), key=lambda item: str(item[0])):
        total.update(f"{path}{array.dtype}{array.shape}".encode() + array.tobytes())
    return total.hexdigest()


def convert_record(
    first: LoaderProgress,
    own: LoaderProgress | None,
    follower: Follower,
    here: dict[str, Any],
    place: Place,
    now: EpochShape,
    rank: int,
) -> LoaderProgress:
    """The record of this rank: the place is what `find_place` said, all else comes from rank 0's and its own."""
    moved, mine = move_paths(first, follower.loader), None if own is None else move_paths(own, follower.loader)
    state: PassState = moved.state
    moments = {name: _merge(name, moved, mine, rank) for name in moved.moments}
    attributes = moved.attributes
    batch, samples = place.num_micro, moved.samples
    if state == "running" and now.unit == "sample":
        samples = moved.samples_before_epoch + place.num_units
    if state == "running" and place.num_micro == 0:  # nothing is behind it: the pass begins, in the same order
        state = "idle"
        moments = {"now": Moment(None, moments["epoch_start"].generators)}
        attributes = {"now": attributes.get("epoch_start", AttributeStates())}
    elif state == "running" and place.num_micro >= now.num_micro:  # nothing is left
        state = "exhausted"
        moments = {"now": Moment(moments["now"].rng, {**moved.moments["now"].generators, **moments["now"].generators})}
        attributes = {"now": attributes.get("now", AttributeStates())}
    elif state == "exhausted":
        batch = now.num_micro
    return dataclasses.replace(
        moved,
        kind=follower.kind.name,
        contract=here,
        state=state,
        batch=0 if state == "idle" else batch,
        samples=samples,
        digest=None,
        moments=moments,
        attributes=attributes,
        replayable=False,
        next_digest=None,
        values=_pick_values(first if own is None else own) if state == "running" else {},
    )


def _pick_values(saved: LoaderProgress) -> dict[str, PlainValue]:
    return {name: value for name, value in saved.values.items() if name in (FIRST_BATCH, UNSEEDED)}


def _merge(name: str, first: LoaderProgress, own: LoaderProgress | None, rank: int) -> Moment:
    """The order's generators of rank 0, and this rank's for the rest.

    In the middle of a pass the order's come from the pass's beginning alone: how far they have moved since depends on
    how many batches are fetched ahead.
    """
    shared, mine = first.moments[name], None if own is None else own.moments.get(name)
    generators: dict[Path, GeneratorState] = {}
    if first.state != "running" or name == "epoch_start":
        generators.update({path: each for path, each in shared.generators.items() if path[0] in SAMPLER_ROOTS})
    if mine is not None:
        generators.update({path: each for path, each in mine.generators.items() if path[0] not in SAMPLER_ROOTS})
    rng = shared.rng if mine is None else mine.rng
    if mine is None and rng is not None:
        rng = derive(rng, rank)
    return Moment(rng, generators)
