"""Containers and other plain values of the standard library, as picklers of protocols 0 to 5 write them."""

from __future__ import annotations

import collections
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ..pickled import GlobalRef, PickledObject, StorageRef, TensorRef
from .rules import Call, RefusedError, Rule, Spend

_HASHED_BY_VALUE = (str, int, float, bool, bytes, complex, type(None), frozenset, GlobalRef, TensorRef, StorageRef)


def check_key(key: Any, depth: int = 8) -> None:
    """Raise unless `key` can be hashed without deep recursion (hashing nested tuples can exhaust the C stack)."""
    kind = type(key)
    if kind is tuple and depth:
        for part in key:
            check_key(part, depth - 1)
    elif kind not in _HASHED_BY_VALUE and kind is not PickledObject:
        raise TypeError(f"a {kind.__name__} as a key")


def _items(args: tuple[Any, ...], spend: Spend) -> Any:
    (items,) = args or ((),)
    if type(items) not in (list, tuple, set, frozenset, dict):
        raise TypeError("not a container")
    spend(len(items))
    return items


def _keys(args: tuple[Any, ...], spend: Spend) -> Any:
    items = _items(args, spend)
    for item in items:
        check_key(item)
    return items


def _ordered_dict(args: tuple[Any, ...], spend: Spend) -> Any:
    items = _items(args, spend)
    pairs = list(items.items()) if isinstance(items, dict) else [(key, value) for key, value in items]
    for key, _ in pairs:
        check_key(key)
    return collections.OrderedDict(pairs)


def _counter(args: tuple[Any, ...], spend: Spend) -> Any:
    counts = _keys(args, spend)
    return collections.Counter(counts if isinstance(counts, dict) else dict.fromkeys(counts, 1))


def _defaultdict(args: tuple[Any, ...], spend: Spend) -> Any:
    factory, *rest = args or (None,)
    if factory is not None and not (isinstance(factory, GlobalRef) and factory.name in _FACTORIES):
        raise RefusedError("collections.defaultdict with a factory of its own")
    # The factory is dropped: no file decides what is called later.
    return collections.defaultdict(None, _keys(tuple(rest), spend) or {})


def _deque(args: tuple[Any, ...], spend: Spend) -> Any:
    maximum = args[1] if len(args) > 1 else None
    return collections.deque(_items(args[:1], spend), maximum)


def _bytearray(args: tuple[Any, ...], spend: Spend) -> bytearray:
    content = _encode(args, spend) if len(args) == 2 else (args[0] if args else b"")
    if type(content) not in (bytes, bytearray):
        raise TypeError("a bytearray of something else than bytes")
    spend(len(content))
    return bytearray(content)


def _bytes(args: tuple[Any, ...], spend: Spend) -> bytes:
    return bytes(_bytearray(args, spend))


def _encode(args: tuple[Any, ...], spend: Spend) -> bytes:
    text, encoding = args
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise RefusedError("_codecs.encode with another codec than latin1")
    spend(len(text))
    return text.encode("latin-1")


def _complex(args: tuple[Any, ...], spend: Spend) -> complex:
    real, imaginary = args
    return complex(float(real), float(imaginary))


def _path(flavour: type[PurePosixPath | PureWindowsPath]) -> Call:
    def call(args: tuple[Any, ...], spend: Spend) -> str:
        if not all(type(part) is str for part in args):
            raise TypeError("a path of something else than strings")
        spend(sum(map(len, args)))
        return str(flavour(*args))

    return call


_FACTORIES = frozenset(f"builtins.{name}" for name in ("list", "dict", "int", "float", "set", "str", "tuple", "bool"))

CONTAINERS: dict[str, Rule] = {
    "collections.OrderedDict": Rule(_ordered_dict),
    "collections.Counter": Rule(_counter),
    "collections.defaultdict": Rule(_defaultdict),
    "collections.deque": Rule(_deque),
    "builtins.set": Rule(lambda args, spend: set(_keys(args, spend))),
    "builtins.frozenset": Rule(lambda args, spend: frozenset(_keys(args, spend))),
    "builtins.bytearray": Rule(_bytearray),
    "builtins.bytes": Rule(_bytes),
    "builtins.complex": Rule(_complex),
    "_codecs.encode": Rule(_encode),
    **{name: Rule() for name in _FACTORIES - {"builtins.set"}},
}

PATHS: dict[str, Rule] = {
    **{f"pathlib.{name}": Rule(_path(PurePosixPath)) for name in ("PosixPath", "PurePosixPath")},
    **{f"pathlib.{name}": Rule(_path(PureWindowsPath)) for name in ("WindowsPath", "PureWindowsPath")},
}
