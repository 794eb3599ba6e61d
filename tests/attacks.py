"""Pickles that would do something when loaded, and the places of a checkpoint where one can be put."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


BOMB_NAME = f"{os.mkdir.__module__}.mkdir"


class Settings:
    """What a user may register: an object of a class of its own, with a nested class."""

    class Inner:
        def __init__(self) -> None:
            self.value = 3

    def __init__(self) -> None:
        self.rate = 0.5
        self.inner = Settings.Inner()


def text(value: str, protocol: int = 2) -> bytes:
    """Return the opcode that pushes a short string."""
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data if protocol < 4 else b"\x8c" + bytes([len(data)]) + data


def save_to_bytes(value: Any, **options: Any) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def read_metadata(directory: Path) -> Any:
    return pickle.loads((directory / ".metadata").read_bytes())


def write_metadata(directory: Path, metadata: Any) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def replace_item(directory: Path, fqn: str, content: bytes) -> None:
    """Let an item of a DCP directory be `content`, appended to its file."""
    metadata = read_metadata(directory)
    for index, info in metadata.storage_data.items():
        if index.fqn == fqn:
            path = directory / info.relative_path
            offset = path.stat().st_size
            with path.open("ab") as file:
                file.write(content)
            metadata.storage_data[index] = replace(info, offset=offset, length=len(content))
            break
    else:
        raise KeyError(fqn)
    write_metadata(directory, metadata)
