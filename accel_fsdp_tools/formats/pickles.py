"""Pickles read without executing them: `scan_pickle` says whether one is harmless, `load_pickle` what it holds."""

from __future__ import annotations

import mmap
from typing import Any, BinaryIO

from .allowed import TORCH_STATE, AllowList
from .pickle_machine import PickleMachine
from .pickle_reader import Buffer


def scan_pickle(
    source: Buffer | BinaryIO, *, where: str, allow: AllowList = TORCH_STATE, path: str | None = None
) -> frozenset[str]:
    """Check every pickle in `source`, one after another to its end, and return the names that they use.

    `where` says in messages which file and entry this is; `path` is attached to errors.

    Raises:
        UnsafePickleError: a name that `allow` does not list, or a listed one used in a harmful way.
        DamagedCheckpointError: not a pickle, cut off, or followed by something else.
    """
    data = source if isinstance(source, bytes | mmap.mmap) else source.read()
    names: set[str] = set()
    position = 0
    while position < len(data) or position == 0:
        machine = PickleMachine(data, position, len(data), allow=allow, where=where, path=path)
        machine.run()
        names |= machine.names
        position = machine.position
    return frozenset(names)


def load_pickle(data: Buffer, *, where: str, allow: AllowList = TORCH_STATE, path: str | None = None) -> Any:
    """Return what one pickle holds, as plain data and the records of `pickled.py`.

    Tensors become `TensorRef`, numpy arrays `ArrayRef`, classes that are known but not plain `PickledObject`; a
    `defaultdict` loses its factory and an `OrderedDict` its attributes.

    Raises:
        UnsafePickleError, DamagedCheckpointError: as `scan_pickle`.
    """
    machine = PickleMachine(data, 0, len(data), allow=allow, where=where, path=path)
    value = machine.run()
    if machine.position != len(data):
        raise machine.describe_damage("is followed by something else")
    return value
