"""The files of an export, planned: which tensors go into which file, and where in it each one lies.

The same as transformers' `save_pretrained` decides (huggingface_hub's split into shards) and as the safetensors
library lays a file out, so that what is written is the same byte for byte. Pure arithmetic on names, dtypes and
shapes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import UnsupportedError, UsageError
from ..extents import DTYPE_SIZES, Shape
from .casts import can_cast
from .computed import Source

MAX_SHARD_SIZE = "50GB"
"""As in transformers."""

ONE_FILE = 1 << 62
"""A size for what has to be in one file: adapters, which PEFT reads from one."""

# In the order in which the library lays tensors out: large elements first, so that all are aligned.
_CODES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "float4_e2m1fn_x2": "F4",
    "bool": "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_CODES)}
_PAIRS = "float4_e2m1fn_x2"  # safetensors counts single numbers, torch pairs of them
_METADATA_KEY = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # the library reads no longer ones
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write: its name there, where its values come from, and the dtype to write them in.

    `storage` names the memory that it shares with others in transformers, and the number of elements of that.

    Raises:
        UnsupportedError: safetensors has no such dtype or no way to spell the name, or the cast is not known.
    """

    name: str
    source: Source
    dtype: str
    storage: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _CODES or (self.dtype == _PAIRS and not self.shape):
            raise UnsupportedError(
                f"{self.name!r} has the dtype {self.dtype}, which safetensors files cannot hold. Leave the tensor out.",
                fqn=self.name,
                actual=self.dtype,
            )
        if self.dtype != self.source.dtype and not can_cast(self.source.dtype, self.dtype):
            raise UnsupportedError(
                f"{self.name!r}: {self.source.dtype} is not cast to {self.dtype}; keep its dtype.",
                fqn=self.name,
                expected=self.dtype,
                actual=self.source.dtype,
            )
        if self.name == _METADATA_KEY or not _is_encodable(self.name):
            raise UnsupportedError(f"{self.name!r} cannot be a name in a safetensors file.", fqn=self.name)

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def size_bytes(self) -> int:
        """Of its elements as they are written."""
        return math.prod(self.shape) * DTYPE_SIZES[self.dtype]

    @property
    def counted_bytes(self) -> int:
        """What transformers counts for it when it cuts files: the whole of a shared memory."""
        return self.size_bytes if self.storage is None else self.storage[1] * DTYPE_SIZES[self.dtype]


def _is_encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


@dataclass(frozen=True)
class OutputFile:
    """One safetensors file: its tensors in the order of their bytes. Make it with `lay_out`."""

    name: str
    tensors: tuple[OutputTensor, ...]

    @cached_property
    def header(self) -> bytes:
        """All bytes before the first tensor's."""
        entries: dict[str, object] = {_METADATA_KEY: {"format": "pt"}}
        end = 0
        for tensor in self.tensors:
            start, end = end, end + tensor.size_bytes
            shape = list(tensor.shape)
            if tensor.dtype == _PAIRS:
                shape[-1] *= 2
            entries[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MAX_HEADER_BYTES:
            raise UnsupportedError(
                f"{self.name} would need a header of {len(text)} bytes, {_MAX_HEADER_BYTES} are allowed. Choose a "
                "smaller maximum size of files.",
                path=self.name,
            )
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where in the file each tensor begins, and where the last one ends."""
        sizes = (tensor.size_bytes for tensor in self.tensors)
        return tuple(itertools.accumulate(sizes, initial=len(self.header)))

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self.offsets[-1]


def lay_out(name: str, tensors: Iterable[OutputTensor]) -> OutputFile:
    """Return the file that the safetensors library would write for these tensors.

    Raises:
        UsageError: two tensors have one name.
    """
    ordered = tuple(sorted(tensors, key=lambda tensor: (_RANKS[tensor.dtype], tensor.name)))
    _refuse_repeated(ordered)
    return OutputFile(name, ordered)


def _refuse_repeated(tensors: Sequence[OutputTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise UsageError(f"Two tensors would be called {tensor.name!r} in the export.", fqn=tensor.name)
        seen.add(tensor.name)


def split_into_files(
    tensors: Sequence[OutputTensor], max_shard_size: int | str = MAX_SHARD_SIZE, *, stem: str = "model"
) -> tuple[OutputFile, ...]:
    """Cut a state dict into files as transformers' `save_pretrained` does.

    Args:
        tensors: in the order of the model's state dict, which decides on the cut; ties are left out already.
        max_shard_size: bytes of tensors per file, as a number or such as "5GB" (powers of ten); a larger tensor has
            a file of its own.
        stem: of the files' names; transformers calls an adapter's "adapter_model".

    Returns:
        `model.safetensors` alone, or `model-00001-of-00003.safetensors` and so on; none where there is no tensor.

    Raises:
        UsageError: the size cannot be read, or two tensors have one name.
    """
    limit = parse_size(max_shard_size)
    _refuse_repeated(tensors)
    shards: list[list[OutputTensor]] = []
    current: list[OutputTensor] = []
    current_bytes = 0
    blocks: dict[object, list[OutputTensor]] = {}
    for tensor in tensors:
        blocks.setdefault(_get_block(tensor), []).append(tensor)
    for block in blocks.values():
        size_bytes = block[0].counted_bytes
        if size_bytes > limit:
            shards.append(block)
            continue
        if current_bytes + size_bytes > limit:
            shards.append(current)
            current, current_bytes = [], 0
        current += block
        current_bytes += size_bytes
    if current:
        shards.append(current)
    if len(shards) == 1:
        return (lay_out(f"{stem}.safetensors", shards[0]),)
    return tuple(
        lay_out(f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors", shard)
        for number, shard in enumerate(shards, start=1)
    )


def _get_block(tensor: OutputTensor) -> object:
    """Return what transformers keeps together: views of one memory, which all tensors without elements share."""
    return (tensor.storage if tensor.storage is not None else tensor.name) if tensor.size_bytes else None


def parse_size(size: int | str) -> int:
    """Return a number of bytes from one, or from text such as "5GB" or "500 mb".

    Raises:
        UsageError: neither, or negative.
    """
    if isinstance(size, str):
        text = size.strip()
        try:
            number = int(float(text[:-2].strip()) * _UNITS[text[-2:].upper()])
        except (KeyError, ValueError, OverflowError):
            raise UsageError(
                f"{size!r} is no size of a file; write a number and one of {', '.join(_UNITS)}, such as '5GB'.",
                actual=size,
            ) from None
    else:
        number = size
    if number < 0:
        raise UsageError(f"A file cannot have a size of {size!r}.", actual=size)
    return number


def get_total_bytes(files: Sequence[OutputFile]) -> int:
    """Return the bytes of all tensors, headers not counted and shared memory once: the index's `total_size`."""
    blocks = {_get_block(tensor): tensor.counted_bytes for file in files for tensor in file.tensors}
    return sum(blocks.values())


def build_index(files: Sequence[OutputFile], total_parameters: int) -> bytes | None:
    """Return the `model.safetensors.index.json` that transformers writes beside several files; None for one or none.

    Args:
        files: all of them.
        total_parameters: elements of the model's parameters, each counted once, buffers not counted.
    """
    if len(files) < 2:
        return None
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    metadata = {"total_parameters": total_parameters, "total_size": get_total_bytes(files)}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True).encode() + b"\n"
