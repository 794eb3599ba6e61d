"""What a checkpoint's pickles become here: plain data, and small records that say what torch would have built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..extents import DTYPE_SIZES


@dataclass(frozen=True)
class GlobalRef:
    """A class, function or constant that the pickle names, for instance `torch.float32`. It was not imported."""

    name: str


@dataclass(frozen=True)
class StorageRef:
    """The bytes behind tensors: the entry `data/<key>` of the same zip."""

    key: str
    dtype: str
    location: str
    numel: int

    @property
    def size_bytes(self) -> int:
        return self.numel * DTYPE_SIZES[self.dtype]


@dataclass(frozen=True)
class TensorRef:
    """A tensor: which elements of which storage. `offset` and `strides` count elements of `dtype`."""

    storage: StorageRef
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    requires_grad: bool = False


@dataclass(frozen=True)
class NumpyDtype:
    """A numpy dtype: `code` as in `numpy.dtype(code)`, without byte order, and the byte order (`<`, `>`, `|`)."""

    code: str
    order: str = "|"

    @property
    def size_bytes(self) -> int:
        count = int(self.code[1:])
        return 4 * count if self.code[0] == "U" else count


@dataclass(frozen=True)
class ArrayRef:
    """A numpy array with its bytes; `fortran` means column-major."""

    dtype: NumpyDtype = NumpyDtype("b1")
    shape: tuple[int, ...] = (0,)
    fortran: bool = False
    data: bytes = field(default=b"", repr=False)


class PickledObject:
    """An object of a class that is known, or admitted by the caller, but never imported or built.

    `args` are what it was made from, `state` what was then put into it (None: nothing). Two are equal only if they
    are the same.
    """

    __slots__ = ("_has_state", "args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self.name = name
        self.args = args
        self.state = state
        self._has_state = state is not None

    def __repr__(self) -> str:
        return f"<pickled {self.name}>"

    def set_state(self, state: Any) -> None:
        """Take the state, once, as an unpickler would on `BUILD`."""
        if self._has_state:
            raise ValueError(f"state of {self.name} is set twice")
        # An unpickler copies attributes at this moment: what the pickle does to the dict later must not be seen here.
        if isinstance(state, dict):
            state = dict(state)
        elif isinstance(state, tuple) and len(state) == 2:
            state = tuple(dict(part) if isinstance(part, dict) else part for part in state)
        self.state = state
        self._has_state = True

    def get_attributes(self) -> dict[str, Any]:
        """Return the attributes that the state sets; empty where it is not a plain set of attributes."""
        if isinstance(self.state, dict):
            return self.state
        if isinstance(self.state, tuple) and len(self.state) == 2:
            parts = [part for part in self.state if part is not None]
            if all(isinstance(part, dict) for part in parts):
                return {key: value for part in parts for key, value in part.items()}
        return {}
