"""The random generators of one rank, remembered exactly and put back all together or not at all.

`RngSnapshot` holds the state of Python's `random`, numpy's legacy global generator, torch's CPU generator, and
the generator of this rank's current device for every type of accelerator that torch can use here. States are kept
as the libraries give them (capturing is cheap enough to do before every batch) and become tensors only when they
are saved: one tensor per generator, no pickle. torch is imported inside functions, so that this layer starts
without it.

Nothing here is collective: each rank captures, saves and restores its own generators.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import RngStateError
from .numpy_memory import remember_numpy

if TYPE_CHECKING:
    from torch import Tensor

_DEVICE_TYPES = ("cuda", "xpu", "npu", "mps", "hpu", "mlu", "musa", "sdaa", "mtia", "neuron")
_NUM_PYTHON_WORDS = 625  # Mersenne Twister: 624 words and the position
_NUM_MT_WORDS = 624


@dataclass(frozen=True, eq=False)
class RngSnapshot:
    """The states of one rank's random generators at one moment.

    Attributes:
        python: what `random.getstate()` returned.
        numpy: what `numpy.random.get_state(legacy=False)` returns.
        torch: the state of torch's CPU generator.
        devices: by accelerator type ("cuda", ...), the state of the generator of the current device.
    """

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    torch: Tensor
    devices: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def capture(cls, *, devices: bool = True) -> RngSnapshot:
        """Remember this rank's generators as they are now.

        Args:
            devices: also remember the accelerators' generators.
        """
        import torch

        states: dict[str, Tensor] = {}
        if devices:
            for name, module in find_device_modules().items():
                states[name] = module.get_rng_state()
        return cls(random.getstate(), remember_numpy(), torch.get_rng_state(), states)

    def restore(self) -> tuple[str, ...]:
        """Put all generators back to this moment, or none of them.

        Returns:
            The accelerator types whose states could not be used because this machine has no such device (a
            snapshot taken on a GPU and restored on a CPU). They are unused, not an error.

        Raises:
            RngStateError: a state is not valid for its generator; all generators are as before the call.
        """
        import torch

        modules = find_device_modules()
        before = RngSnapshot.capture()
        name = "python"
        try:
            random.setstate(self.python)
            name = "numpy"
            np.random.set_state(dict(self.numpy))
            name = "torch"
            torch.set_rng_state(self.torch)
            for name, state in self.devices.items():
                if name in modules:
                    modules[name].set_rng_state(state)
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            before._set_known_good(modules)
            raise RngStateError(
                f"the state of the random generator {name!r} is not valid ({error}); none was changed",
                generator=name,
            ) from error
        return tuple(name for name in self.devices if name not in modules)

    def _set_known_good(self, modules: Mapping[str, Any]) -> None:
        import torch

        random.setstate(self.python)
        np.random.set_state(dict(self.numpy))
        torch.set_rng_state(self.torch)
        for name, state in self.devices.items():
            modules[name].set_rng_state(state)

    def find_missing_devices(self) -> tuple[str, ...]:
        """Accelerator types that this machine has and this snapshot does not know (saved on a CPU)."""
        return tuple(name for name in find_device_modules() if name not in self.devices)

    def to_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return one tensor per generator: `<prefix>/python`, `/numpy`, `/torch`, `/device/<type>`."""
        tensors = {
            f"{prefix}/python": encode_python_state(self.python),
            f"{prefix}/numpy": encode_numpy_state(self.numpy),
            f"{prefix}/torch": self.torch.clone(),
        }
        for name, state in self.devices.items():
            tensors[f"{prefix}/device/{name}"] = state.cpu().clone()
        return tensors

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], prefix: str, *, rank: int | None = None, path: Any = None
    ) -> RngSnapshot:
        """Rebuild a snapshot from the tensors that `to_tensors(prefix)` made.

        Args:
            rank: whose state this is, for error messages.
            path: the file that the tensors came from, for error messages.

        Raises:
            RngStateError: a generator's tensor is missing or has not the right shape; names the rank, the
                generator and the file.
        """
        import torch

        def get(name: str) -> Tensor:
            tensor = tensors.get(f"{prefix}/{name}")
            if tensor is None:
                raise RngStateError(
                    f"rank {rank}: the state of the random generator {name!r} ({prefix}/{name}) is missing "
                    f"in {path}. The file is not whole: resume from another checkpoint.",
                    rank=rank,
                    path=path,
                    generator=name,
                )
            return tensor

        def decode(name: str, decoder: Any) -> Any:
            tensor = get(name)
            try:
                return decoder(tensor)
            except ValueError as error:
                raise RngStateError(
                    f"rank {rank}: the state of the random generator {name!r} ({prefix}/{name}) in {path} is "
                    f"not valid: {error}. The file is damaged: resume from another checkpoint.",
                    rank=rank,
                    path=path,
                    generator=name,
                ) from error

        def check_torch(tensor: Tensor) -> Tensor:
            check_bytes(tensor)
            try:
                torch.Generator().set_state(tensor)
            except (RuntimeError, TypeError) as error:
                raise ValueError(str(error)) from error
            return tensor

        start = f"{prefix}/device/"
        names = [name.removeprefix(start) for name in tensors if name.startswith(start)]
        return cls(
            python=decode("python", decode_python_state),
            numpy=decode("numpy", _decode_global_state),
            torch=decode("torch", check_torch),
            devices={name: decode(f"device/{name}", check_bytes) for name in sorted(names)},
        )

    def compute_digest(self) -> str:
        """A hash of all states: equal digests mean equal random numbers from here on."""
        total = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.to_tensors("rng").items()):
            total.update(name.encode())
            total.update(tensor.numpy().tobytes())
        return total.hexdigest()


def derive(base: RngSnapshot | int, rank: int) -> RngSnapshot:
    """Make the generators of a rank that did not exist when the checkpoint was saved.

    Deterministic: the same base and rank give the same states on every machine, and different ranks get
    unrelated ones. All seeds come from BLAKE2 of the base (all states of the snapshot, or the number) and the
    rank. Every accelerator type present on this machine gets a state too.

    Args:
        base: the snapshot of a rank that was saved (rank 0's, by convention), or a seed.
        rank: the new rank.

    Returns:
        The snapshot to restore on that rank.
    """
    import torch

    origin = str(base) if isinstance(base, int) else base.compute_digest()

    def make_seed(name: str, num_bytes: int) -> int:
        text = f"accel_fsdp_tools/derive/{origin}/{rank}/{name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=num_bytes).digest(), "little")

    numpy_seed = make_seed("numpy", 16)
    words = [(numpy_seed >> shift) & 0xFFFFFFFF for shift in range(0, 128, 32)]
    seed = make_seed("torch", 7)  # below 2**63, as manual_seed wants it
    devices = {
        name: torch.Generator(device=name).manual_seed(make_seed(name, 7)).get_state() for name in find_device_modules()
    }
    return RngSnapshot(
        python=random.Random(make_seed("python", 32)).getstate(),
        numpy=np.random.RandomState(words).get_state(legacy=False),
        torch=torch.Generator().manual_seed(seed).get_state(),
        devices=devices,
    )


@functools.cache
def find_device_modules() -> dict[str, Any]:
    """The torch modules (`torch.cuda`, ...) of the accelerator types that can be used in this process."""
    import torch

    names = list(_DEVICE_TYPES)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type not in names:
        names.append(accelerator.type)
    modules = {}
    for name in names:
        module: Any = getattr(torch, name, None)
        if hasattr(module, "get_rng_state") and hasattr(module, "is_available") and module.is_available():
            modules[name] = module
    return modules


def _pack_float(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _unpack_float(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])


def encode_python_state(state: tuple[Any, ...]) -> Tensor:
    """`random.Random.getstate()` as int64: version, 625 words, whether a Gaussian is cached, its bits."""
    import torch

    version, words, gauss = state
    tail = [0, 0] if gauss is None else [1, _pack_float(gauss)]
    return torch.tensor([version, *words, *tail], dtype=torch.int64)


def decode_python_state(tensor: Tensor) -> tuple[Any, ...]:
    """The inverse of `encode_python_state`; raises ValueError for anything else."""
    values = _to_words(tensor, _NUM_PYTHON_WORDS + 3)
    version, words, (has_gauss, gauss) = values[0], values[1:-2], values[-2:]
    state = (version, tuple(words), _unpack_float(gauss) if has_gauss else None)
    try:
        random.Random().setstate(state)
    except (OverflowError, TypeError) as error:
        raise ValueError(str(error)) from error
    return state


def encode_numpy_state(state: Mapping[str, Any]) -> Tensor:
    """A numpy generator's state as a tensor.

    MT19937 (the global one, and every RandomState): int64 of 624 words, position, whether a Gaussian is
    cached, its bits. Any other bit generator: its state as JSON, in uint8 (some hold integers of 128 bits).
    """
    import torch

    if state["bit_generator"] == "MT19937" and "has_gauss" in state:
        words = state["state"]["key"].tolist()
        tail = [state["state"]["pos"], state["has_gauss"], _pack_float(state["gauss"])]
        return torch.tensor([*words, *tail], dtype=torch.int64)
    text = json.dumps(state, default=_encode_array).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _encode_array(value: Any) -> dict[str, Any]:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    if isinstance(value, np.generic):
        return {"dtype": value.dtype.str, "values": value.item()}
    raise TypeError(f"a numpy generator state holds a {type(value).__name__}")


def _decode_array(value: dict[str, Any]) -> Any:
    if set(value) == {"dtype", "values"}:
        return np.array(value["values"], dtype=np.dtype(value["dtype"]))
    return value


def decode_numpy_state(tensor: Tensor) -> dict[str, Any]:
    """The inverse of `encode_numpy_state`; raises ValueError for anything else."""
    import torch

    if tensor.dtype == torch.uint8:
        check_bytes(tensor)
        state = json.loads(tensor.numpy().tobytes().decode(), object_hook=_decode_array)
        if not isinstance(state, dict) or not isinstance(state.get("bit_generator"), str):
            raise ValueError("not the state of a numpy generator")
        return state
    words = _to_words(tensor, _NUM_MT_WORDS + 3)
    keys, (position, has_gauss, gauss) = words[:_NUM_MT_WORDS], words[_NUM_MT_WORDS:]
    if min(keys) < 0 or max(keys) > 0xFFFFFFFF or not 0 <= position <= _NUM_MT_WORDS:
        raise ValueError("a word is out of range")
    return {
        "bit_generator": "MT19937",
        "state": {"key": np.array(keys, dtype=np.uint32), "pos": position},
        "has_gauss": int(has_gauss),
        "gauss": _unpack_float(gauss),
    }


def _decode_global_state(tensor: Tensor) -> dict[str, Any]:
    """Decode the state of numpy's global generator, which may be of any kind, but not out of its range."""
    state = decode_numpy_state(tensor)
    if state["bit_generator"] == "MT19937":  # numpy takes any position, and would read beyond its words
        words = state.get("state")
        key, position = (words.get("key"), words.get("pos")) if isinstance(words, dict) else (None, None)
        has_words = isinstance(key, np.ndarray) and key.shape == (_NUM_MT_WORDS,) and key.dtype == np.uint32
        if not has_words or type(position) is not int or not 0 <= position <= _NUM_MT_WORDS:
            raise ValueError("a word is out of range")
    return state


def check_bytes(tensor: Tensor) -> Tensor:
    """Return `tensor` if it is a flat run of bytes on the CPU; raises ValueError otherwise."""
    import torch

    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() == 0:
        raise ValueError(f"expected a flat uint8 tensor, found {tuple(tensor.shape)} of {tensor.dtype}")
    return tensor


def _to_words(tensor: Tensor, num_words: int) -> list[int]:
    import torch

    if tensor.dtype != torch.int64 or tuple(tensor.shape) != (num_words,):
        raise ValueError(f"expected {num_words} int64 words, found {tuple(tensor.shape)} of {tensor.dtype}")
    return [int(word) for word in tensor.tolist()]
