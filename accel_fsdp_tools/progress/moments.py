"""A moment of a loader's pass: all random state that decides what is delivered from there on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import DataProgressError, RngStateError
from ..rng import RngSnapshot
from .generators import (
    FoundGenerator,
    GeneratorState,
    Path,
    follow_path,
    format_path,
    identify_kind,
    make_generator,
    read_state,
    set_at_path,
    write_state,
)

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

    def validate(self, loader: Any) -> None:
        """Raise DataProgressError if a generator of this moment has no place in `loader`; changes nothing."""
        for path, state in self.generators.items():
            present = follow_path(loader, path)
            if present is not None and identify_kind(present) != state.kind:
                raise _make_error(path, f"saved as {state.kind}, here it is a {type(present).__name__}")
            device = getattr(present, "device", None)
            if device is not None and str(device).split(":")[0] != state.device.split(":")[0]:
                raise _make_error(path, f"saved on {state.device}, here it is on {device}")

    def restore_generators(self, loader: Any) -> None:
        """Put the loader's own generators back, making those that do not exist yet."""
        for path, state in self.generators.items():
            present = follow_path(loader, path)
            try:
                if present is None:
                    set_at_path(loader, path, make_generator(state))
                else:
                    write_state(present, state)
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
        for number, item in enumerate(data.get("generators", ())):
            steps, name = tuple(item["path"]), f"{prefix}/generator/{number}"
            try:
                if name not in tensors:
                    raise ValueError("it is missing")
                generators[steps] = GeneratorState.from_tensor(item["kind"], tensors[name], item["device"])
            except ValueError as error:
                raise RngStateError(
                    f"rank {rank}: the state of the generator {format_path(steps)} ({name}) in {path} is not "
                    f"valid: {error}. Resume from another checkpoint.",
                    rank=rank,
                    path=path,
                    generator=format_path(steps),
                ) from error
        return cls(rng, generators)


def _make_error(path: Path, why: str) -> DataProgressError:
    return DataProgressError(
        f"the generator {format_path(path)} cannot be put back: {why}. Build samplers and datasets as in the run "
        "that was saved.",
        generator=format_path(path),
    )
