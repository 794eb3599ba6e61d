"""Which names a pickle in a checkpoint may use, and what each may be called with.

A name alone does not make a call harmless: `getattr` on the wrong object, a numpy dtype with forged flags or a
tensor with backward hooks are ways to run code or corrupt memory with names that real checkpoints contain. So each
name comes with a function that looks at its arguments and either answers with plain data or refuses. The lists were
made by writing checkpoints with torch 2.13, Accelerate 1.15 and numpy 2.4 and listing what they name, with the older
homes of the same names added.
"""

from __future__ import annotations

from .arrays import ARRAYS
from .containers import CONTAINERS, PATHS
from .rules import AllowList, RefusedError, Rule
from .tensors import DTYPES_AND_SIZES, TENSORS, call_enum

__all__ = ["DCP_METADATA", "TORCH_STATE", "AllowList", "RefusedError"]

TORCH_STATE = AllowList({**CONTAINERS, **ARRAYS, **DTYPES_AND_SIZES, **TENSORS})
"""What state dicts, RNG states and the items of a DCP directory consist of."""

_DCP = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_DCP_RECORDS = (
    *(
        f"{_DCP}.metadata.{name}"
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
        )
    ),
    f"{_DCP}.filesystem._StorageInfo",
    f"{_OLD}.TensorProperties",
)
_DCP_ENUMS = (f"{_DCP}.metadata._MEM_FORMAT_ENCODING", f"{_OLD}.MEM_FORMAT_ENCODING")

DCP_METADATA = AllowList(
    {
        **CONTAINERS,
        **PATHS,
        **DTYPES_AND_SIZES,
        **{name: Rule(is_record=True) for name in _DCP_RECORDS},
        **{name: Rule(call_enum(name)) for name in _DCP_ENUMS},
    },
    has_storages=False,
)
"""What the file `.metadata` of a DCP directory consists of."""
