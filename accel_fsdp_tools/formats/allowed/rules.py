"""What an allow list is: names, and what each may be used for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import UsageError

Spend = Callable[[int], None]
"""Counts copied elements, so that a small pickle cannot make a huge amount of data out of one value."""

Call = Callable[[tuple[Any, ...], Spend], Any]


class RefusedError(Exception):
    """A known name used in a way that no writer of checkpoints uses it."""


@dataclass(frozen=True)
class Rule:
    """What a name may be used for: calling it (`REDUCE`), or making an object of it (`NEWOBJ`), or neither."""

    call: Call | None = None
    is_record: bool = False


@dataclass(frozen=True)
class AllowList:
    """The names that a pickle may use. `objects` are classes that the user vouches for; they may be used freely."""

    rules: Mapping[str, Rule]
    objects: frozenset[str] = field(default_factory=frozenset)
    has_storages: bool = True
    advice: str = (
        "Nothing was executed. Neither torch nor Accelerate write this; don't load the checkpoint unless you know "
        "where it comes from and what the file holds."
    )

    def with_objects(self, names: Iterable[str], advice: str) -> AllowList:
        """Return the list extended by classes (full dotted names) that the user trusts.

        Raises:
            UsageError: a name is not a full path, or belongs to a module through which anything can be run.
        """
        checked = frozenset(names)
        for name in checked:
            module = name.partition(".")[0]
            if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name) or module in _NEVER:
                reason = "can run anything" if module in _NEVER else "is not a full dotted name"
                raise UsageError(
                    f"allow_objects: {name!r} {reason}. Give the classes of your own registered objects, such as "
                    "'my_package.my_module.MyState'.",
                    actual=name,
                )
        return AllowList(self.rules, self.objects | checked, self.has_storages, advice)


_NEVER = frozenset(
    {
        *("builtins", "__builtin__", "os", "posix", "nt", "sys", "subprocess", "importlib", "runpy", "shutil"),
        *("socket", "pty", "code", "ctypes", "pickle", "_pickle", "functools", "operator", "_operator", "types"),
        *("marshal", "timeit", "pdb", "webbrowser", "multiprocessing"),
    }
)

_MODULE_ALIASES = {
    "__builtin__": "builtins",  # protocol 2 spells Python 3's modules as Python 2 did
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    "pathlib._local": "pathlib",
}


def join_name(module: str, name: str) -> str:
    """Return the one spelling under which a global is looked up and reported."""
    return f"{_MODULE_ALIASES.get(module, module)}.{name}"


_HOOKS = frozenset({"_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"})


def check_attributes(name: str, state: Any, spend: Spend, *, trusted: bool = False) -> None:
    """Refuse a state that replaces special attributes or hooks of an object of class `name`.

    A state is a dict of attributes, a pair of two (the second for slots), or something only the class understands.
    """
    for part in state if type(state) is tuple and len(state) == 2 else (state,):
        if not isinstance(part, dict):
            continue
        spend(len(part))
        for key in part:
            if type(key) is not str or (not trusted and (key.startswith("__") or key in _HOOKS)):
                raise RefusedError(f"a change to special attributes of {name}")
