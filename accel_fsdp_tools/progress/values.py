"""Plain values as JSON and tensors: states of streams, which are nested containers of numbers, texts and arrays.

What cannot be said this way is not saved: there are no pickles here, and reading a value back runs no code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataProgressError

if TYPE_CHECKING:
    from torch import Tensor

_MAX_DEPTH = 64
_TAGS = ("tuple", "dict", "set", "tensor", "array", "number", "bytes")


@dataclass(frozen=True, eq=False)
class PlainValue:
    """A value in two parts: `data` for JSON, and the tensors that it refers to by number."""

    data: Any
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def encode(cls, value: Any) -> PlainValue:
        """Take a value apart; tensors and arrays are copied. Raises TypeError if it holds anything that isn't plain."""
        tensors: list[Tensor] = []
        return cls(_encode(value, tensors, 0), tuple(tensors))

    def decode(self) -> Any:
        """The value again, made of new containers. Raises ValueError if this is no encoded value."""
        return _decode(self.data, self.tensors, 0)

    def to_tensors(self, prefix: str) -> dict[str, Tensor]:
        """The tensors, named `<prefix>/<number>`."""
        return {f"{prefix}/{number}": tensor for number, tensor in enumerate(self.tensors)}

    @classmethod
    def from_dict(
        cls, data: Any, tensors: Mapping[str, Tensor], prefix: str, *, rank: int | None, path: Any
    ) -> PlainValue:
        """Rebuild from JSON and tensors. Raises DataProgressError naming rank and file."""
        found: list[Tensor] = []
        while f"{prefix}/{len(found)}" in tensors:
            found.append(tensors[f"{prefix}/{len(found)}"])
        value = cls(data, tuple(found))
        try:
            value.decode()
        except (ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
            raise DataProgressError(
                f"rank {rank}: the value {prefix} in {path} is malformed ({error}); resume from another checkpoint",
                rank=rank,
                path=path,
            ) from error
        return value


def _encode(value: Any, tensors: list[Tensor], depth: int) -> Any:
    import torch

    if depth > _MAX_DEPTH:
        raise TypeError("it is nested too deeply")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encode(part, tensors, depth + 1) for part in value]
    if type(value) is tuple:
        return {"tuple": [_encode(part, tensors, depth + 1) for part in value]}
    if type(value) in (set, frozenset):
        return {"set": [_encode(part, tensors, depth + 1) for part in value]}
    if isinstance(value, dict):
        pairs = [[_encode(key, tensors, depth + 1), _encode(part, tensors, depth + 1)] for key, part in value.items()]
        return {"dict": pairs}
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().cpu().clone().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "iufb":
        tensors.append(torch.from_numpy(np.array(value)))
        return {"array" if isinstance(value, np.ndarray) else "number": len(tensors) - 1}
    if type(value) in (bytes, bytearray):
        tensors.append(torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0).byte())
        return {"bytes": len(tensors) - 1}
    raise TypeError(f"a {type(value).__name__} cannot be saved without pickle")


def _decode(data: Any, tensors: Sequence[Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [_decode(part, tensors, depth + 1) for part in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("it is neither plain nor tagged")
    ((tag, content),) = data.items()
    if tag not in _TAGS:
        raise ValueError(f"there is no tag {tag!r}")
    if tag in ("tuple", "set", "dict"):
        if not isinstance(content, list):
            raise ValueError(f"the content of a {tag} is no list")
        parts = [_decode(part, tensors, depth + 1) for part in content]
        return {"tuple": tuple, "set": set, "dict": dict}[tag](parts)
    if not isinstance(content, int) or isinstance(content, bool) or not 0 <= content < len(tensors):
        raise ValueError("a tensor is missing")
    tensor = tensors[content].clone()
    if tag == "tensor":
        return tensor
    array = tensor.numpy()
    if tag == "bytes":
        return array.tobytes()
    return array if tag == "array" else array[()]
