"""Every pickle that `torch.load` would open in one file or item: zip, legacy format, or a bare pickle."""

from __future__ import annotations

import collections
import tarfile
from pathlib import Path
from typing import Any

from ..errors import DamagedCheckpointError, UnsafePickleError
from .allowed import AllowList
from .pickle_machine import PickleMachine
from .pickled import PickledObject
from .zips import ZIP_MAGIC, MemoryWindow, Window, open_torch_zip

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PICKLES = 5  # magic number, protocol, system, the object, the keys of the storages that follow
_MAX_NESTING = 4
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)


def scan_torch_file(window: Window, *, allow: AllowList, nested: bool = False) -> int:
    """Check every pickle that `torch.load` would open in `window`, and return how many there were.

    With `nested`, byte strings inside that are pickles or torch files themselves are checked too: some frameworks
    keep states of dataloaders that way in a DCP item and unpickle them after the load.

    Raises:
        UnsafePickleError: a pickle that could run code, or a kind of archive whose loading does.
        DamagedCheckpointError: neither a torch file nor a pickle.
    """
    return _scan(window, allow, _MAX_NESTING if nested else 0)


def _scan(window: Window, allow: AllowList, nesting: int) -> int:
    head = window.read(0, min(4, window.length))
    values = _scan_zip(window, allow) if head == ZIP_MAGIC else _scan_stream(window, allow)
    count = len(values)
    if nesting:
        for value in values:
            for data in _find_nested(value):
                count += _scan_nested(data, window, allow, nesting - 1)
    return count


def _scan_zip(window: Window, allow: AllowList) -> list[Any]:
    archive = open_torch_zip(window)
    path = str(window.path)
    if "constants.pkl" in (name.lower() for name in archive.entries):
        raise UnsafePickleError(
            f"{window.label} is a TorchScript archive, which torch would compile and run while loading. "
            f"{allow.advice.replace('{name}', 'it')}",
            path=path,
            actual="TorchScript",
        )
    values = []
    names = [name for name in archive.entries if name.lower().endswith(".pkl")]
    for name in names:
        header, data = archive.read_unchecked(name)
        machine = PickleMachine(data, 0, len(data), allow=allow, where=f"{window.label}, entry {name}", path=path)
        values.append(machine.run())
        if machine.position != len(data):
            raise machine.describe_damage("is followed by something else")
        archive.check(header, data)
    if "data.pkl" not in names:
        raise window.describe_damage("has no entry 'data.pkl'")
    return values


def _scan_stream(window: Window, allow: AllowList) -> list[Any]:
    """Scan a file that is not a zip: pickles one after another, which is also what torch wrote before 1.6."""
    if not window.length:
        raise window.describe_damage("is empty")
    _refuse_tar(window)
    data, position, end = window.map()
    values: list[Any] = []
    try:
        while position < end:
            machine = PickleMachine(
                data, position, end, allow=allow, where=_name_pickle(window, len(values)), path=str(window.path)
            )
            values.append(machine.run())
            position = machine.position
            if len(values) == _LEGACY_PICKLES and values[0] == _LEGACY_MAGIC:
                break  # the storages follow, as raw bytes
    finally:
        if not isinstance(data, bytes):
            data.close()
    return values


def _name_pickle(window: Window, index: int) -> str:
    return window.label if not index else f"{window.label}, pickle {index + 1} of the file"


def _refuse_tar(window: Window) -> None:
    # torch.load tries the tar format of its first versions before it looks at the pickle that the file starts with,
    # and a file can be both.
    head = window.read(0, min(512, window.length))
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return
    raise UnsafePickleError(
        f"{window.label} can be read as a tar archive, torch's format before 0.4, whose pickles can't be checked. "
        "Nothing was executed. Don't load it.",
        path=str(window.path),
        actual="tar archive",
    )


def _find_nested(root: Any) -> list[bytes]:
    """Return all byte strings in a value that look like a pickle or a torch file."""
    found: list[bytes] = []
    seen: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if isinstance(value, bytes | bytearray):
            if _looks_loadable(value):
                found.append(bytes(value))
        elif isinstance(value, (*_CONTAINERS, dict, PickledObject)) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                todo += [*value.keys(), *value.values()]
            elif isinstance(value, PickledObject):
                todo += [*value.args, value.state]
            else:
                todo += value
    return found


def _looks_loadable(data: bytes | bytearray) -> bool:
    return data[:4] == ZIP_MAGIC or (data[:1] == b"\x80" and 2 <= (data[1:2] or b"\0")[0] <= 5)


def _scan_nested(data: bytes, window: Window, allow: AllowList, nesting: int) -> int:
    label = f"{window.label}, in a byte string"
    if not nesting:
        raise UnsafePickleError(
            f"{label}: pickles within pickles within pickles; not checked further. Don't load it.",
            path=str(window.path),
            actual="nested pickles",
        )
    try:
        return _scan(MemoryWindow(data, Path(window.path), label), allow, nesting)
    except DamagedCheckpointError:
        return 0  # bytes that only look like a pickle; nothing could load them
