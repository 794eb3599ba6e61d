"""The machine that follows a pickle's opcodes without executing anything: names are not imported, nothing is called.

It sees the same names as CPython's unpickler however they were put together (through the memo, from pieces, by an
extension code), but all it can make is plain data and the records of `pickled.py`. It is stricter than CPython
wherever no pickler of Python 3 writes what it sees, and its time and memory stay within a constant factor of the
size of the pickle.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from typing import Any

from ..errors import UnsafePickleError
from .allowed import AllowList, RefusedError
from .allowed.arrays import set_array_state, set_dtype_state
from .allowed.containers import check_key
from .allowed.rules import check_attributes, join_name
from .allowed.tensors import load_storage
from .pickle_reader import (
    Buffer,
    PickleReader,
    decode_float,
    decode_signed,
    decode_text,
    decode_unsigned,
    parse_number,
)
from .pickled import ArrayRef, GlobalRef, NumpyDtype, PickledObject

_MAX_PROTOCOL = 5
_MAX_MARKS = 100_000  # far beyond what picklers can nest before they run out of stack
_COPIES_PER_BYTE = 16  # elements that may be copied per byte of the pickle; real ones copy less than one


class PickleMachine(PickleReader):
    """One pickle being followed. After `run`, `position` is the first byte behind it and `names` what it named."""

    def __init__(
        self, data: Buffer, start: int, end: int, *, allow: AllowList, where: str, path: str | None = None
    ) -> None:
        super().__init__(data, start, end, where=where, path=path)
        self.names: set[str] = set()
        self._start = start
        self._allow = allow
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below each open mark
        self._memo: dict[int, Any] = {}
        self._copies_left = _COPIES_PER_BYTE * (end - start) + (1 << 16)

    def run(self) -> Any:
        """Follow the pickle to its end and return its value."""
        data, end, stop = self.data, self.end, ord(".")
        try:
            while True:
                if self.position >= end:
                    raise self.describe_damage("ends in the middle of a pickle")
                opcode = data[self.position]
                self.position += 1
                if opcode == stop:
                    return self._stack.pop()
                _HANDLERS[opcode](self)
        except RefusedError as error:
            raise self._describe_refusal(str(error)) from None
        except (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
            detail = f"{type(error).__name__}: {str(error)[:200]}"
            raise self.describe_damage(f"is not a pickle that makes sense ({detail})") from None

    def _describe_refusal(self, what: str, name: str | None = None) -> UnsafePickleError:
        shown = what if len(what) <= 300 else f"{what[:300]}..."
        return UnsafePickleError(
            f"{self.where}: the pickle uses {shown}, which is not on the list of harmless things. "
            f"{self._allow.advice.replace('{name}', repr(name or what))}",
            path=self.path,
            actual=name or what,
        )

    # -- limits and marks ----------------------------------------------------------------------------------------

    def _pop_to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._outer.pop()
        return items

    def _push_mark(self) -> None:
        if len(self._outer) >= _MAX_MARKS:
            raise ValueError("nested absurdly deep")
        self._outer.append(self._stack)
        self._stack = []

    def _spend(self, count: int) -> None:
        self._copies_left -= count
        if self._copies_left < 0:
            raise ValueError("expands to a multiple of its size")

    # -- names ---------------------------------------------------------------------------------------------------

    def _push_global(self, module: str, name: str) -> None:
        full = join_name(module, name)
        if full not in self._allow.rules and full not in self._allow.objects:
            raise self._describe_refusal(f"{full!r}", full)
        self.names.add(full)
        self._stack.append(GlobalRef(full))

    def _global(self) -> None:
        module, name = self.take_line().decode(), self.take_line().decode()
        self._push_global(module, name)

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a name that is not text")
        self._push_global(module, name)

    def _inst(self) -> None:
        self._global()
        raise RefusedError(f"the opcode INST on {self._stack[-1].name}, which Python 3 does not write")

    def _obj(self) -> None:
        kind = self._pop_to_mark()[0]
        name = kind.name if isinstance(kind, GlobalRef) else "an object"
        raise RefusedError(f"the opcode OBJ on {name}, which Python 3 does not write")

    def _extension(self) -> None:
        raise RefusedError("an extension code, a number that stands for any name registered in the process")

    def _persistent_text(self) -> None:
        raise RefusedError("a persistent id in text form, which torch does not write")

    def _persistent(self) -> None:
        persistent_id = self._stack.pop()
        if not self._allow.has_storages:
            raise RefusedError("a persistent id, where no tensor belongs")
        self._stack.append(load_storage(persistent_id))

    def _buffer(self) -> None:
        raise ValueError("out-of-band buffers, which no file can hold")

    # -- objects -------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if type(function) is not GlobalRef or type(args) is not tuple:
            raise RefusedError("a call of something that is not a named function")
        name = function.name
        rule = self._allow.rules.get(name)
        if name == "builtins.getattr":
            self._push_attribute(args)
        elif name in self._allow.objects:
            self._stack.append(PickledObject(name, args))
        elif rule is None or rule.call is None:
            raise self._describe_refusal(f"a call of {name!r}", name)
        else:
            self._stack.append(rule.call(args, self._spend))

    def _push_attribute(self, args: tuple[Any, ...]) -> None:
        # Protocol 2 has no other way to name a nested class.
        owner, attribute = args
        if type(owner) is not GlobalRef or type(attribute) is not str:
            raise RefusedError("builtins.getattr on something else than a class")
        self._push_global(owner.name, attribute)

    def _new_object(self) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        if type(kind) is not GlobalRef or type(args) is not tuple:
            raise RefusedError("a new object of something that is not a named class")
        rule = self._allow.rules.get(kind.name)
        if kind.name in self._allow.objects or (rule is not None and rule.is_record):
            self._stack.append(PickledObject(kind.name, args))
        else:
            raise self._describe_refusal(f"a new object of {kind.name!r}", kind.name)

    def _new_object_ex(self) -> None:
        keywords, args, kind = self._stack.pop(), self._stack.pop(), self._stack[-1]
        name = kind.name if isinstance(kind, GlobalRef) else "an object"
        if name not in self._allow.objects or type(args) is not tuple or type(keywords) is not dict:
            raise self._describe_refusal(f"a new object of {name!r} with keywords", name)
        self._stack[-1] = PickledObject(name, (*args, keywords))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        kind = type(target)
        if kind is PickledObject:
            check_attributes(target.name, state, self._spend, trusted=target.name in self._allow.objects)
            target.set_state(state)
        elif kind is ArrayRef:
            set_array_state(target, state)
        elif kind is NumpyDtype:
            set_dtype_state(target, state)
        elif kind is collections.OrderedDict or kind is collections.deque:
            check_attributes(kind.__name__, state, self._spend)  # dropped (a state dict's `_metadata`)
        elif kind is GlobalRef:
            raise RefusedError(f"a change to {target.name} itself")
        else:
            raise TypeError(f"a state for a {kind.__name__}")

    # -- containers ----------------------------------------------------------------------------------------------

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        items = self._pop_to_mark()
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list or type(target) is collections.deque:
            target.extend(items)
        else:
            self._check_is_users(target)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._pop_to_mark())

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            self._check_is_users(target)
            return
        if len(items) % 2:
            raise ValueError("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                check_key(key)
            target[key] = value

    def _add_items(self) -> None:
        items, target = self._pop_to_mark(), self._stack[-1]
        if type(target) is set:
            for item in items:
                check_key(item)
            target.update(items)
        else:
            self._check_is_users(target)

    def _frozen_set(self) -> None:
        items = self._pop_to_mark()
        for item in items:
            check_key(item)
        self._stack.append(frozenset(items))

    def _dict(self) -> None:
        items = self._pop_to_mark()
        self._stack.append({})
        self._update(items)

    def _check_is_users(self, target: Any) -> None:
        # Items of a class derived from list or dict: the user vouches for it, and they are of no use here.
        if type(target) is not PickledObject or target.name not in self._allow.objects:
            raise TypeError("items for something that holds none")

    # -- stack and memo ------------------------------------------------------------------------------------------

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._discard_to_mark()

    def _discard_to_mark(self) -> None:
        self._pop_to_mark()

    def _tuple(self) -> None:
        items = tuple(self._pop_to_mark())
        self._stack.append(items)

    def _tuple1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def _tuple2(self) -> None:
        stack = self._stack
        stack[-2:] = [(stack[-2], stack[-1])]

    def _tuple3(self) -> None:
        stack = self._stack
        stack[-3:] = [(stack[-3], stack[-2], stack[-1])]

    def _put(self, index: int) -> None:
        if not 0 <= index <= self.position - self._start:  # CPython would reserve memory for all smaller numbers
            raise ValueError("an absurd memo number")
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise ValueError("a memo number that was never set")
        self._stack.append(self._memo[index])

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _duplicate(self) -> None:
        self._stack.append(self._stack[-1])

    def _protocol(self) -> None:
        protocol = self.take_byte()
        if protocol > _MAX_PROTOCOL:
            raise ValueError(f"protocol {protocol}")

    def _frame(self) -> None:
        if int.from_bytes(self.take(8), "little") > self.end - self.position:
            raise self.describe_damage("is cut off")

    # -- plain values (the frequent ones without a detour) ------------------------------------------------------------

    def _byte(self) -> None:
        self._stack.append(self.take_byte())

    def _short_text(self) -> None:
        self._stack.append(decode_text(self.take(self.take_byte())))

    def _long_get(self) -> None:
        self._get(decode_unsigned(self.take(4)))

    def _int_text(self) -> None:
        line = self.take_line()
        self._stack.append(line == b"01" if line in (b"00", b"01") else parse_number(line))


Handler = Callable[[PickleMachine], None]


def _unknown(machine: PickleMachine) -> None:
    raise ValueError("an unknown opcode")


def _push(make: Callable[[PickleMachine], Any]) -> Handler:
    def handler(machine: PickleMachine) -> None:
        value = make(machine)  # may change which stack is the current one
        machine._stack.append(value)

    return handler


_BY_OPCODE: dict[str, Handler] = {
    # constants and numbers
    "N": _push(lambda m: None),
    "\x88": _push(lambda m: True),
    "\x89": _push(lambda m: False),
    "I": PickleMachine._int_text,
    "L": _push(lambda m: parse_number(m.take_line().removesuffix(b"L"))),
    "F": _push(lambda m: float(m.take_line())),
    "J": _push(lambda m: decode_signed(m.take(4))),
    "K": PickleMachine._byte,
    "M": _push(lambda m: decode_unsigned(m.take(2))),
    "G": _push(lambda m: decode_float(m.take(8))),
    "\x8a": _push(lambda m: decode_signed(m.take_sized(1))),
    "\x8b": _push(lambda m: decode_signed(m.take_sized(4))),
    # text and bytes (those of Python 2 are ASCII)
    "V": _push(lambda m: m.take_line().decode("raw-unicode-escape")),
    "X": _push(lambda m: decode_text(m.take_sized(4))),
    "\x8c": PickleMachine._short_text,
    "\x8d": _push(lambda m: decode_text(m.take_sized(8))),
    "U": _push(lambda m: m.take_sized(1).decode("ascii")),
    "T": _push(lambda m: m.take_sized(4).decode("ascii")),
    "B": _push(lambda m: m.take_sized(4)),
    "C": _push(lambda m: m.take_sized(1)),
    "\x8e": _push(lambda m: m.take_sized(8)),
    "\x96": _push(lambda m: bytearray(m.take_sized(8))),
    # containers
    ")": _push(lambda m: ()),
    "]": _push(lambda m: []),
    "}": _push(lambda m: {}),
    "\x8f": _push(lambda m: set()),
    "t": PickleMachine._tuple,
    "\x85": PickleMachine._tuple1,
    "\x86": PickleMachine._tuple2,
    "\x87": PickleMachine._tuple3,
    "l": _push(lambda m: m._pop_to_mark()),
    "d": PickleMachine._dict,
    "a": PickleMachine._append,
    "e": PickleMachine._appends,
    "s": PickleMachine._set_item,
    "u": PickleMachine._set_items,
    "\x90": PickleMachine._add_items,
    "\x91": PickleMachine._frozen_set,
    # names and objects
    "c": PickleMachine._global,
    "\x93": PickleMachine._stack_global,
    "i": PickleMachine._inst,
    "o": PickleMachine._obj,
    "\x82": PickleMachine._extension,
    "\x83": PickleMachine._extension,
    "\x84": PickleMachine._extension,
    "P": PickleMachine._persistent_text,
    "Q": PickleMachine._persistent,
    "\x97": PickleMachine._buffer,
    "\x98": PickleMachine._buffer,
    "R": PickleMachine._reduce,
    "\x81": PickleMachine._new_object,
    "\x92": PickleMachine._new_object_ex,
    "b": PickleMachine._build,
    # stack, memo and frame
    "(": PickleMachine._push_mark,
    "0": PickleMachine._pop,
    "1": lambda m: m._discard_to_mark(),
    "2": PickleMachine._duplicate,
    "p": lambda m: m._put(parse_number(m.take_line())),
    "q": lambda m: m._put(m.take_byte()),
    "r": lambda m: m._put(decode_unsigned(m.take(4))),
    "g": lambda m: m._get(parse_number(m.take_line())),
    "h": lambda m: m._get(m.take_byte()),
    "j": PickleMachine._long_get,
    "\x94": PickleMachine._memoize,
    "\x80": PickleMachine._protocol,
    "\x95": PickleMachine._frame,
}

_HANDLERS: list[Handler] = [_BY_OPCODE.get(chr(opcode), _unknown) for opcode in range(256)]
