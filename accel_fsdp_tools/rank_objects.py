"""Registered objects whose value differs between ranks: every rank gets its own back.

Accelerate writes what `register_for_checkpointing` was given from the main process alone, so that after a load every
rank has rank 0's value. Where another rank's state differs, it is kept here as well, as JSON and safetensors:

    objects_rank_00001.json             the structure, one tree per registered object that differs
    objects_rank_00001.safetensors      the tensors and arrays in it, if any

Nothing here is collective: ranks compare digests, which the caller exchanges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from .errors import DamagedCheckpointError
from .fingerprint import view_bytes

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = "accel_fsdp_tools.objects"
_VERSION = 1


class _Opaque(Exception):  # noqa: N818 - a signal inside this module
    """A value that cannot be written without pickling it."""


@dataclass(frozen=True)
class EncodedObject:
    """One object's state in a form that can be compared and written; `problem` says why there is none."""

    tree: Any = None
    tensors: Mapping[str, Tensor] | None = None
    digest: str = ""
    problem: str | None = None


def encode_object(index: int, state: Any) -> EncodedObject:
    """Turn a state dict of containers, numbers, text, tensors and arrays into a tree and tensors.

    Anything else is not written (this package writes no pickles): the result then carries a `problem`.
    """
    tensors: dict[str, Tensor] = {}
    try:
        tree = _encode(state, f"object_{index}", tensors)
    except _Opaque as opaque:
        return EncodedObject(problem=str(opaque))
    digest = xxhash.xxh3_128(json.dumps(tree, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(view_bytes(tensor))
    return EncodedObject(tree, tensors, digest.hexdigest())


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    import numpy as np
    import torch

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is torch.Tensor:
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        tensors[name] = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        return {"array": name, "dtype": array.dtype.str, "shape": list(array.shape), "scalar": np.isscalar(value)}
    if type(value) in (list, tuple):
        kind = type(value).__name__
        return {kind: [_encode(each, f"{name}.{number}", tensors) for number, each in enumerate(value)]}
    if isinstance(value, dict):
        pairs = enumerate(value.items())
        return {
            "dict": [
                [_encode(key, f"{name}.k{number}", tensors), _encode(each, f"{name}.{number}", tensors)]
                for number, (key, each) in pairs
            ]
        }
    raise _Opaque(f"holds a {type(value).__module__}.{type(value).__qualname__}")


def _decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    import numpy as np

    if tree is None or type(tree) in (bool, int, str):
        return tree
    if "float" in tree:
        return float.fromhex(tree["float"])
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "array" in tree:
        flat = tensors[tree["array"]].numpy().view(np.dtype(tree["dtype"]))
        array = flat.reshape(tree["shape"])
        return array[()] if tree["scalar"] else array
    if "dict" in tree:
        return {_decode(key, tensors): _decode(value, tensors) for key, value in tree["dict"]}
    if "list" in tree:
        return [_decode(each, tensors) for each in tree["list"]]
    return tuple(_decode(each, tensors) for each in tree["tuple"])


def _get_paths(directory: Path, rank: int) -> tuple[Path, Path]:
    return directory / f"objects_rank_{rank:05d}.json", directory / f"objects_rank_{rank:05d}.safetensors"


def write_rank_objects(directory: Path, rank: int, objects: Mapping[int, EncodedObject]) -> list[Path]:
    """Write this rank's own objects by their index; nothing is written if there are none. Returns the paths."""
    if not objects:
        return []
    from safetensors.torch import save_file

    tree_path, tensor_path = _get_paths(directory, rank)
    trees = {str(index): encoded.tree for index, encoded in objects.items()}
    record = {"format": _FORMAT, "version": _VERSION, "rank": rank, "objects": trees}
    tree_path.write_text(json.dumps(record), encoding="utf-8")
    tensors = {name: tensor for each in objects.values() for name, tensor in (each.tensors or {}).items()}
    if not tensors:
        return [tree_path]
    # Views and tied tensors are stored one by one: safetensors refuses shared memory.
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tensor_path)
    return [tree_path, tensor_path]


def read_rank_objects(directory: Path, rank: int) -> dict[int, Any]:
    """Return this rank's own states by object index; empty if it had the same as rank 0.

    Raises:
        DamagedCheckpointError: the files cannot be read or do not fit together.
    """
    tree_path, tensor_path = _get_paths(directory, rank)
    if not tree_path.exists():
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        record = json.loads(tree_path.read_text(encoding="utf-8"))
        tensors = load_file(tensor_path) if tensor_path.exists() else {}
        if (record["format"], record["version"], record["rank"]) != (_FORMAT, _VERSION, rank):
            raise ValueError(f"it says {record['format']}, version {record['version']}, rank {record['rank']}")
        return {int(index): _decode(tree, tensors) for index, tree in record["objects"].items()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpointError(
            f"rank {rank}: the registered objects in {tree_path} cannot be read ({type(error).__name__}: {error}). Use "
            "another checkpoint.",
            path=str(tree_path),
            rank=rank,
        ) from error


def has_rank_objects(directory: Path, num_ranks: int) -> bool:
    """Whether any rank had an object that differed from rank 0's."""
    return any(_get_paths(directory, rank)[0].exists() for rank in range(1, num_ranks))


def find_different(digests: Sequence[Sequence[str]], rank: int) -> list[int]:
    """Return the indices of the objects whose digest on `rank` is not rank 0's; opaque ones ("") are left out."""
    return [index for index, mine in enumerate(digests[rank]) if mine and mine != digests[0][index]]
