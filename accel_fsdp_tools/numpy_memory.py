"""The state of numpy's global generator, copied from memory: fifty times faster than `numpy.random.get_state`.

Before every batch it is remembered, and mostly thrown away; numpy makes an array of it word by word. Where the words
are numpy documents (`bit_generator.ctypes.state_address`), but not where the generator keeps the second number of a
pair of Gaussians. So that place is looked for once, in a generator of our own, and what is read there is compared with
what numpy says. Where anything is otherwise (another numpy, another kind of generator), numpy is asked each time.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_NUM_WORDS = 624
_WORDS = struct.Struct(f"={4 * _NUM_WORDS}si")  # the words, and the position among them
_GAUSS = struct.Struct("@id")  # whether a Gaussian is kept, and which
_MARK = -1.2345678901234567e-301


class RememberedState(Mapping[str, Any]):
    """What `numpy.random.get_state(legacy=False)` would have returned, made when it is asked for."""

    __slots__ = ("_gauss", "_state", "_words")

    def __init__(self, words: bytes, gauss: bytes) -> None:
        self._words, self._gauss = words, gauss
        self._state: dict[str, Any] | None = None

    def _get(self) -> dict[str, Any]:
        if self._state is None:
            words, position = _WORDS.unpack(self._words)
            has_gauss, gauss = _GAUSS.unpack(self._gauss)
            self._state = {
                "bit_generator": "MT19937",
                "state": {"key": np.frombuffer(words, dtype=np.uint32).copy(), "pos": position},
                "has_gauss": has_gauss,
                "gauss": gauss,
            }
        return self._state

    def __getitem__(self, name: str) -> Any:
        return self._get()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._get())

    def __len__(self) -> int:
        return len(self._get())


def remember_numpy() -> Mapping[str, Any]:
    """The state of numpy's global generator, of whatever kind it is. Changes nothing."""
    state = remember(np.random.mtrand._rand)
    return np.random.get_state(legacy=False) if state is None else state


def remember(generator: np.random.RandomState) -> RememberedState | None:
    """The state of a legacy generator; None where only numpy can tell."""
    place, bits = _find_gauss(), generator._bit_generator
    if place is None or type(bits) is not np.random.MT19937 or type(generator) is not np.random.RandomState:
        return None
    with bits.lock:  # another thread may be drawing
        words = ctypes.string_at(bits.ctypes.state_address, _WORDS.size)
        return RememberedState(words, ctypes.string_at(id(generator) + place, _GAUSS.size))


@functools.cache
def _find_gauss() -> int | None:
    """Where a `RandomState` keeps its Gaussian, in bytes from its beginning; None if that is not certain."""
    generator = np.random.RandomState(1)
    size = np.random.RandomState.__basicsize__
    start = _GAUSS.size - struct.calcsize("d")
    state = {**generator.get_state(legacy=False), "has_gauss": 1, "gauss": _MARK}
    generator.set_state(state)
    memory = ctypes.string_at(id(generator), size)
    mark = struct.pack("d", _MARK)
    place = memory.find(mark) - start
    if memory.count(mark) != 1 or place < 0:
        return None
    for has_gauss, gauss, num_draws in ((0, 0.0, 0), (1, 2.5, 700), (0, 0.0, 3)):
        generator.set_state({**state, "has_gauss": has_gauss, "gauss": gauss})
        for _ in range(num_draws):
            generator.random_sample()
        if not _is_read_as_numpy_says(generator, place):
            return None
    generator.randn()
    return place if _is_read_as_numpy_says(generator, place) else None


def _is_read_as_numpy_says(generator: np.random.RandomState, place: int) -> bool:
    expected = generator.get_state(legacy=False)
    words = ctypes.string_at(generator._bit_generator.ctypes.state_address, _WORDS.size)
    found = dict(RememberedState(words, ctypes.string_at(id(generator) + place, _GAUSS.size)))
    return (
        found.keys() == expected.keys()
        and all(found[name] == expected[name] for name in ("bit_generator", "has_gauss", "gauss"))
        and found["state"].keys() == expected["state"].keys()
        and found["state"]["pos"] == expected["state"]["pos"]
        and np.array_equal(found["state"]["key"], expected["state"]["key"])
    )
