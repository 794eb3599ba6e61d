"""Find every random generator that decides what a dataloader delivers, and set it again after a resume.

A loader's order can hang on a generator anywhere: in the DataLoader, in any sampler of the chain that Accelerate
wraps, in a dataset or its transforms, in a collate function. All objects reachable from the loader's parts are
visited (with limits), and each generator is remembered under its *path*: the attribute names and keys that lead to
it. After a resume the new process's loader is walked too, and the paths are looked up there (`places.py`).
"""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..rng import (
    check_bytes,
    decode_numpy_state,
    decode_python_state,
    encode_numpy_state,
    encode_python_state,
)

if TYPE_CHECKING:
    from torch import Tensor

Path = tuple[str | int, ...]

SAMPLER_ROOTS = ("generator", "batch_sampler", "sampler")
DATA_ROOTS = ("dataset", "collate_fn")
MAX_DEPTH = 7
_MAX_OBJECTS = 4000
_MAX_ITEMS = 256  # containers longer than this hold data, not parts
_MODULE_TABLES = frozenset(
    f"_{name}"
    for name in (
        "parameters", "buffers", "modules", "non_persistent_buffers_set", "backward_pre_hooks", "backward_hooks",
        "forward_hooks", "forward_hooks_with_kwargs", "forward_hooks_always_called", "forward_pre_hooks",
        "forward_pre_hooks_with_kwargs", "state_dict_hooks", "state_dict_pre_hooks", "load_state_dict_pre_hooks",
        "load_state_dict_post_hooks",
    )
)  # fmt: skip
_MAX_STEP = 60  # characters of a step in a message
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
# numpy takes any number for these, and then reads its memory at that place.
_LARGEST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1, "uinteger": (1 << 32) - 1}
_LEAVES = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, np.ndarray, np.generic,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.GeneratorType, range, set, frozenset,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """One generator's state, as its library gives it. `kind` is "torch", "numpy", "numpy_legacy" or "python"."""

    kind: str
    state: Any
    device: str = "cpu"

    def to_tensor(self) -> Tensor:
        """The state as one tensor that safetensors can hold."""
        if self.kind == "torch":
            tensor: Tensor = self.state.clone()
            return tensor
        return encode_python_state(self.state) if self.kind == "python" else encode_numpy_state(self.state)

    @classmethod
    def from_tensor(cls, kind: str, tensor: Tensor, device: str = "cpu") -> GeneratorState:
        """The inverse of `to_tensor`; raises ValueError if the tensor is no state of this kind."""
        if kind == "torch":
            return cls(kind, check_bytes(tensor), device)
        if kind == "python":
            return cls(kind, decode_python_state(tensor))
        if kind in ("numpy", "numpy_legacy"):
            return cls(kind, decode_numpy_state(tensor))
        raise ValueError(f"unknown kind of generator {kind!r}")

    def is_same(self, other: GeneratorState) -> bool:
        """Whether both would draw the same numbers from here on."""
        if self.kind != other.kind:
            return False
        mine, theirs = self.to_tensor(), other.to_tensor()
        return mine.shape == theirs.shape and bool((mine == theirs).all())


@dataclass(frozen=True, slots=True)
class FoundGenerator:
    """A generator of this process and the path that leads to it."""

    path: Path
    generator: Any
    decides_order: bool  # reached through a sampler, not only through the dataset


def identify_kind(value: Any) -> str | None:
    """The kind of generator that `value` is, or None."""
    import torch

    if isinstance(value, torch.Generator):
        return "torch"
    if isinstance(value, np.random.Generator):
        return "numpy"
    if isinstance(value, np.random.RandomState):
        return "numpy_legacy"
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return "python"
    return None


def read_state(generator: Any) -> GeneratorState:
    """The present state of a generator of any kind."""
    kind = identify_kind(generator)
    if kind == "torch":
        return GeneratorState(kind, generator.get_state(), str(generator.device))
    if kind == "numpy":
        return GeneratorState(kind, generator.bit_generator.state)
    if kind == "numpy_legacy":
        return GeneratorState(kind, generator.get_state(legacy=False))
    assert kind == "python"  # noqa: S101
    return GeneratorState(kind, generator.getstate())


def write_state(generator: Any, state: GeneratorState) -> None:
    """Set a generator; raises ValueError if the state does not belong to such a generator."""
    if identify_kind(generator) != state.kind:
        raise ValueError(f"saved as {state.kind}, here it is a {type(generator).__name__}")
    try:
        if state.kind == "torch":
            generator.set_state(state.state)
        elif state.kind == "numpy":
            check_numpy_state(state.state, generator.bit_generator.state)
            generator.bit_generator.state = state.state
        elif state.kind == "numpy_legacy":
            check_numpy_state(state.state, generator.get_state(legacy=False))
            generator.set_state(state.state)
        else:
            generator.setstate(state.state)
    except (RuntimeError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(str(error)) from error


def check_numpy_state(state: Any, example: Any, name: str = "the state") -> None:
    """Raise ValueError unless `state` is built like `example`, the state of the same generator, with sane numbers."""
    is_good = type(state) is type(example)
    if isinstance(example, dict):
        is_good = is_good and state.keys() == example.keys()
        if is_good:
            for key, part in example.items():
                check_numpy_state(state[key], part, str(key))
    elif isinstance(example, np.ndarray):
        is_good = is_good and state.dtype == example.dtype and state.shape == example.shape
    elif isinstance(example, str):
        is_good = is_good and state == example
    elif isinstance(example, int):
        is_good = is_good and 0 <= state <= _LARGEST.get(name, (1 << 128) - 1)
    if not is_good:
        raise ValueError(f"{name!r} is not that of a generator like the one here")


def check_state(state: GeneratorState, present: Any) -> None:
    """Raise ValueError unless `present` can be put in this state (None: a new generator); changes nothing."""
    if present is None:
        make_generator(state)
        return
    if identify_kind(present) != state.kind:
        raise ValueError(f"saved as {state.kind}, here it is a {type(present).__name__}")
    twin: Any
    if state.kind == "torch":
        import torch

        if present.device.type != state.device.split(":")[0]:
            raise ValueError(f"saved on {state.device}, here it is on {present.device}")
        twin = torch.Generator(device=present.device)
    elif state.kind == "numpy":
        twin = np.random.Generator(copy.deepcopy(present.bit_generator))
    elif state.kind == "numpy_legacy":
        twin = copy.deepcopy(present)
    else:
        twin = random.Random()
    write_state(twin, state)


def make_generator(state: GeneratorState) -> Any:
    """A new generator in this state: some samplers make theirs only when they are first iterated.

    Raises ValueError if no such generator can be made here.
    """
    import torch

    generator: Any
    if state.kind == "torch":
        try:
            generator = torch.Generator(device=state.device)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    elif state.kind == "numpy":
        name = state.state["bit_generator"]
        if name not in _BIT_GENERATORS:
            raise ValueError(f"numpy has no bit generator {name!r}")
        generator = np.random.Generator(getattr(np.random, name)())
    elif state.kind == "numpy_legacy":
        generator = np.random.RandomState()
    else:
        generator = random.Random()
    write_state(generator, state)
    return generator


def is_newly_seeded(generator: Any) -> bool:
    """Whether a generator looks as if it was seeded and nothing drawn since (a user who seeds every epoch)."""
    import torch

    state = read_state(generator)
    if state.kind == "torch":
        twin = torch.Generator(device=state.device).manual_seed(generator.initial_seed())
        return bool((twin.get_state() == state.state).all())
    if state.kind == "python":
        return int(state.state[1][-1]) == 624
    words = state.state.get("state", {})
    return state.kind == "numpy_legacy" and words.get("pos") == 624


def get_parts(loader: Any) -> dict[str, Any]:
    """The parts of a loader that decide what it delivers, by the name that paths begin with."""
    base = getattr(loader, "base_dataloader", loader)
    return {name: getattr(base, name, None) for name in (*SAMPLER_ROOTS, *DATA_ROOTS)}


def find_generators(loader: Any) -> list[FoundGenerator]:
    """Every generator reachable from a loader, each once, those of the samplers first."""
    found = []
    for path, value, in_sampler in walk(loader):
        if identify_kind(value) is not None:
            # The DataLoader's own generator seeds workers; what else it decides is reached through the sampler.
            found.append(FoundGenerator(path, value, in_sampler and path != ("generator",)))
    return found


def walk(loader: Any) -> Iterator[tuple[Path, Any, bool]]:
    """Yield (path, object, reached through a sampler) for what can be reached from a loader, within limits.

    Breadth first, so that the shortest path wins. Samplers refer to the dataset: it is left to the second round. A
    stream is its own sampler.
    """
    from torch.utils.data import IterableDataset

    parts = get_parts(loader)
    is_stream = isinstance(parts["dataset"], IterableDataset)
    seen: set[int] = set()
    rounds = (((*SAMPLER_ROOTS, *DATA_ROOTS[:1]), True), (DATA_ROOTS[1:], False))
    for names, in_sampler in rounds if is_stream else ((SAMPLER_ROOTS, True), (DATA_ROOTS, False)):
        if in_sampler and not is_stream:
            seen.add(id(parts["dataset"]))
        else:
            seen.discard(id(parts["dataset"]))
        queue: deque[tuple[Path, Any]] = deque(((name,), parts[name]) for name in names)
        num_objects = 0
        while queue and num_objects < _MAX_OBJECTS:
            path, value = queue.popleft()
            if isinstance(value, _LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            num_objects += 1
            yield path, value, in_sampler
            if has_parts(path, value):
                queue.extend(((*path, step), part) for step, part in list_children(value))


def has_parts(path: Path, value: Any) -> bool:
    """Whether the walk goes on to the parts of what it met at `path`."""
    return len(path) <= MAX_DEPTH and identify_kind(value) is None


def list_children(value: Any) -> list[tuple[str | int, Any]]:
    """The parts of an object, with the steps that lead to them. What has a dunder name is Python's, and no part."""
    import torch

    if isinstance(value, torch.Tensor):
        return []
    if isinstance(value, torch.nn.Module):  # a transform; its parameters are no generators, and torch's tables no parts
        own = {name: part for name, part in vars(value).items() if name not in _MODULE_TABLES}
        return _select({**own, **value._modules})
    if isinstance(value, Mapping):
        return _select(value) if len(value) <= _MAX_ITEMS else []
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value)) if len(value) <= _MAX_ITEMS else []
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    attributes = getattr(value, "__dict__", None)
    return _select(attributes) if isinstance(attributes, dict) else []


def _select(parts: Mapping[Any, Any]) -> list[tuple[str | int, Any]]:
    return [
        (step, part)
        for step, part in parts.items()
        if isinstance(step, (str, int)) and not isinstance(step, bool) and not is_dunder(step)
    ]


def is_dunder(step: str | int) -> bool:
    """Whether a step is one of the names that Python itself gives a meaning."""
    return isinstance(step, str) and step.startswith("__") and step.endswith("__")


def format_path(path: Sequence[str | int]) -> str:
    """A path as a user would write it: `batch_sampler.sampler.generators[0]`."""
    text = ""
    for step in path:
        if isinstance(step, str) and step.isidentifier() and len(step) <= _MAX_STEP:
            text += f".{step}"
        else:
            name = repr(step)
            text += f"[{name if len(name) <= _MAX_STEP else name[:_MAX_STEP] + '...'}]"
    return text.lstrip(".")
