"""Outputs that only transformers can compute, group by group in a child process that has torch. No torch here.

Most conversions only move elements about, and are copied (`recipes`). What pads a tensor with zeros, or does
arithmetic, is left to transformers' own function, with the tensors that belong together and no others.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from ..extents import DTYPE_SIZES, DiskTensor, Shape, count_elements
from ..formats.reading import FileCache
from .children import make_environment
from .computed import Compute, Source, iterate_source, list_inputs

if TYPE_CHECKING:
    import subprocess

_MODULE = "accel_fsdp_tools.describing.reverting"
_NUM_HELD = 2  # groups that the child keeps
_BLOCK_NUMEL = 1 << 20


class Reverter:
    """The child process, started when something is asked for. Any thread may ask; one question at a time.

    Memory here: 1 MiB. In the child: torch, transformers, and two groups of tensors before and after the conversion.
    """

    def __init__(self, directory: Path, *, trust_remote_code: bool = False) -> None:
        """`directory` holds the model's config.json, and the code that it names, if any."""
        self._command = [sys.executable, "-m", _MODULE, str(directory)]
        self._command += ["--trust-remote-code"] if trust_remote_code else []
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._held: dict[str, dict[str, Any]] = {}

    def read(self, tensor: RevertedTensor, start: int, target: memoryview, files: FileCache) -> None:
        """Fill `target` with bytes of an output, from byte `start` on.

        Raises:
            UnsupportedError: transformers cannot convert the group, or makes something else of it than was recorded.
        """
        group = "\n".join(sorted(tensor.sources))
        with self._lock:
            process = self._start()
            try:
                if group not in self._held:
                    self._convert(process, group, tensor, files)
                found = self._held[group].get(tensor.fqn)
                if found != [tensor.dtype, list(tensor.shape)]:
                    raise UnsupportedError(
                        f"{tensor.fqn}: transformers makes {found} of it here, and {tensor.dtype} {list(tensor.shape)} "
                        "was expected. Export with the version that the model was trained with, or give --model its "
                        "config.",
                        fqn=tensor.fqn,
                        expected=[tensor.dtype, list(tensor.shape)],
                        actual=found,
                    )
                request = {"read": group, "name": tensor.fqn, "start": start, "length": len(target)}
                self._ask(process, request)
                while target:
                    count = process.stdout.readinto(target)  # type: ignore[union-attr] # a pipe
                    if not count:
                        raise BrokenPipeError
                    target = target[count:]
            except (BrokenPipeError, EOFError) as error:
                raise UnsupportedError(
                    f"{tensor.fqn} is computed by transformers, which has failed: {self._read_errors()}. Load the "
                    "checkpoint into the model and use its save_pretrained.",
                    fqn=tensor.fqn,
                ) from error

    def close(self) -> None:
        """End the child process. Can be called again."""
        process, self._process = self._process, None
        self._held = {}
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                try:
                    pipe.close()  # type: ignore[union-attr] # both are pipes
                except BrokenPipeError:  # what was not sent is not wanted any more
                    continue
            process.wait()
            self._errors.close()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            import subprocess
            import tempfile  # here: an export that needs none of this does not wait for it

            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**make_environment(), "HF_HUB_OFFLINE": "1"},
            )
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
        process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr] # a pipe
        process.stdin.flush()  # type: ignore[union-attr]

    def _convert(self, process: subprocess.Popen[bytes], group: str, tensor: RevertedTensor, files: FileCache) -> None:
        sources = [[name, each.dtype, list(each.shape)] for name, each in tensor.sources.items()]
        self._ask(process, {"convert": group, "sources": sources})
        for each in tensor.sources.values():
            for block in iterate_source(each, files):
                process.stdin.write(block)  # type: ignore[union-attr] # a pipe
        process.stdin.flush()  # type: ignore[union-attr]
        line = process.stdout.readline()  # type: ignore[union-attr] # a pipe
        if not line:
            raise EOFError
        answer = json.loads(line)
        if "error" in answer:
            raise UnsupportedError(
                f"{tensor.fqn} is computed by transformers from {', '.join(tensor.sources)}, which has failed: "
                f"{answer['error']}. Load the checkpoint into the model and use its save_pretrained.",
                fqn=tensor.fqn,
            )
        while len(self._held) >= _NUM_HELD:  # as the child does
            del self._held[next(iter(self._held))]
        self._held[group] = answer["outputs"]

    def _read_errors(self) -> str:
        self._errors.seek(0, os.SEEK_SET)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it has ended without a word"


@dataclass(frozen=True, eq=False)
class RevertedTensor:
    """An output that transformers computes from `sources`, tensors of the checkpoint by their names in the model.

    Adapters may be merged into these first. A `computed.ComputedTensor`. Its dtype is that of its sources; should
    transformers make another one of them, the export fails.
    """

    fqn: str
    dtype: str
    shape: Shape
    sources: Mapping[str, Source]
    reverter: Reverter

    @property
    def numel(self) -> int:
        return count_elements(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * DTYPE_SIZES[self.dtype]

    @property
    def inputs(self) -> tuple[DiskTensor, ...]:
        return list_inputs(self.sources.values())

    @property
    def block_numel(self) -> int:
        return _BLOCK_NUMEL

    def enter(self, files: FileCache) -> Compute:
        """Return what asks for a range of it."""
        size = DTYPE_SIZES[self.dtype]

        def compute(start: int, length: int, target: memoryview) -> None:
            self.reverter.read(self, start * size, target, files)

        return compute
