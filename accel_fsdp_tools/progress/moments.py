"""A moment of a loader's pass: all random state that decides what is delivered from there on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataProgressError, RngStateError
from ..ranks import get_rank
from ..rng import RngSnapshot
from .generators import (
    FoundGenerator,
    GeneratorState,
    Path,
    check_numpy_state,
    check_state,
    format_path,
    identify_kind,
    is_dunder,
    make_generator,
    read_state,
    write_state,
)
from .places import Place, Places, make_place_error, parse_path

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moment:
    """The global generators (None where only the loader's own matter) and those reachable from the loader."""

    rng: RngSnapshot | None
    generators: Mapping[Path, GeneratorState] = field(default_factory=dict)

    @classmethod
    def capture(cls, found: Iterable[FoundGenerator], rng: RngSnapshot | None = None) -> Moment:
        """Remember now. `rng` is a snapshot taken at this moment already; without it one is taken."""
        snapshot = RngSnapshot.capture() if rng is None else rng
        return cls(snapshot, {item.path: read_state(item.generator) for item in found})

    def validate(self, places: Places) -> None:
        """Raise DataProgressError if a generator of this moment has no place in the loader; changes nothing."""
        if self.rng is not None:
            try:
                check_numpy_state(dict(self.rng.numpy), np.random.RandomState().get_state(legacy=False))
            except ValueError as error:
                raise _make_error(("numpy",), str(error)) from error
        for path, state in self.generators.items():
            place = _find(places, path)
            try:
                check_state(state, place.value)
            except ValueError as error:
                raise _make_error(path, str(error)) from error

    def restore_generators(self, loader: Any, *, but_not: Collection[str] = ()) -> None:
        """Put the loader's own generators back, making those that do not exist yet.

        Args:
            but_not: parts of the loader ("sampler", ...) whose generators are left as they are.
        """
        places = Places(loader)
        found = [
            (path, state, _find(places, path)) for path, state in self.generators.items() if path[0] not in but_not
        ]
        for path, state, place in found:
            try:
                if place.value is None:
                    place.put(make_generator(state))
                else:
                    write_state(place.value, state)
            except ValueError as error:
                raise _make_error(path, str(error)) from error

    def restore(self, loader: Any) -> None:
        """Put the global generators and the loader's own back to this moment."""
        if self.rng is not None:
            self.rng.restore()
        self.restore_generators(loader)

    def to_dict(self) -> dict[str, Any]:
        """What is not a tensor, for JSON: the generators' paths and kinds, in the order of their tensors."""
        return {
            "rng": self.rng is not None,
            "generators": [
                {"path": list(path), "kind": state.kind, "device": state.device}
                for path, state in self.generators.items()
            ],
        }

    def to_tensors(self, prefix: str) -> dict[str, Tensor]:
        """One tensor per generator, named `<prefix>/rng/...` and `<prefix>/generator/<number>`."""
        tensors = {} if self.rng is None else self.rng.to_tensors(f"{prefix}/rng")
        for number, state in enumerate(self.generators.values()):
            tensors[f"{prefix}/generator/{number}"] = state.to_tensor()
        return tensors

    @classmethod
    def from_dict(cls, data: Any, tensors: Mapping[str, Tensor], prefix: str, *, rank: int | None, path: Any) -> Moment:
        """Rebuild a moment. Raises RngStateError or DataProgressError naming rank and file."""
        if not isinstance(data, dict) or not isinstance(data.get("rng"), bool):
            raise DataProgressError(f"rank {rank}: {prefix} in {path} is malformed", rank=rank, path=path)
        rng = None
        if data["rng"]:
            rng = RngSnapshot.from_tensors(tensors, f"{prefix}/rng", rank=rank, path=path)
        generators: dict[Path, GeneratorState] = {}
        for number, (steps, kind, device) in enumerate(_parse_generators(data, prefix, rank, path)):
            name = f"{prefix}/generator/{number}"
            try:
                if name not in tensors:
                    raise ValueError("it is missing")
                generators[steps] = GeneratorState.from_tensor(kind, tensors[name], device)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise RngStateError(
                    f"rank {rank}: the state of the generator {format_path(steps)} ({name}) in {path} is not "
                    f"valid: {error}. Resume from another checkpoint.",
                    rank=rank,
                    path=path,
                    generator=format_path(steps),
                ) from error
        return cls(rng, generators)


def _parse_generators(data: Any, prefix: str, rank: int | None, path: Any) -> list[tuple[Path, str, str]]:
    try:
        items = [(parse_path(item["path"]), item["kind"], item["device"]) for item in data.get("generators", ())]
        if not all(isinstance(kind, str) and isinstance(device, str) for _, kind, device in items):
            raise ValueError("a kind or a device is no text")
        if len({steps for steps, _, _ in items}) != len(items):
            raise ValueError("a path is there twice")
    except (KeyError, TypeError, ValueError) as error:
        raise DataProgressError(
            f"rank {rank}: the generators of {prefix} in {path} are malformed ({error}); resume from another "
            "checkpoint",
            rank=rank,
            path=path,
        ) from error
    return items


def _find(places: Places, path: Path) -> Place:
    """The place of a generator: there is one, or None where one may be put."""
    place = places.find(path)
    if place is None or is_dunder(path[-1]):
        raise make_place_error(path, "a generator's state")
    if identify_kind(place.value) is None and (place.value is not None or not place.is_writable):
        what = f"where this loader has a {type(place.value).__name__}"
        raise make_place_error(path, "a generator's state", what)
    return place


def _make_error(path: Path, why: str) -> DataProgressError:
    rank, name = get_rank(), format_path(path)
    return DataProgressError(
        f"rank {rank}: the generator {name} cannot be put back: {why}. Build samplers and datasets as in the run that "
        "was saved.",
        rank=rank,
        path=name,
        generator=name,
    )
