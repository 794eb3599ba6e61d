"""The two ways in which bytes are summed, cast and copied: by the compiled kernel, and in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accel_fsdp_tools import crc, kernel


def forget() -> None:
    """Let the next one who asks look for the kernel anew."""
    kernel.forget_kernel()
    crc.find_crc32.cache_clear()


@contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Use the kernel, or Python, in this process and in those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(kernel.VARIABLE, raising=False)
        if name == "python":
            patch.setenv(kernel.VARIABLE, "off")
        forget()
        try:
            if name == "kernel" and kernel.find_kernel() is None:
                pytest.skip(kernel.describe_kernel()[1])
            yield
        finally:
            forget()
