"""How far a command is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from typing import TextIO

_BAR_WIDTH = 30
_BAR_EVERY_S = 0.1
_LINE_EVERY_S = 10.0


class ByteProgress:
    """Callable with the bytes done and the bytes in all, as `verify_checkpoint` calls it; a context manager."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream = stream
        self._label = label
        self._is_terminal = stream.isatty()
        self._every_s = _BAR_EVERY_S if self._is_terminal else _LINE_EVERY_S
        self._start = self._shown = time.monotonic()
        self._width = 0

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < self._every_s:
            return
        self._shown = now
        share = done / total if total else 1.0
        rate = done / max(now - self._start, 1e-9)
        text = f"{share:4.0%}  {done / 1e9:.1f} of {total / 1e9:.1f} GB  {rate / 1e9:.1f} GB/s"
        if self._is_terminal:
            bar = "#" * round(share * _BAR_WIDTH)
            text = f"{self._label} [{bar:<{_BAR_WIDTH}}] {text}"
            self._stream.write("\r" + text.ljust(self._width))
            self._width = max(self._width, len(text))
        else:
            self._stream.write(f"{self._label}: {text.strip()}\n")
        self._stream.flush()
