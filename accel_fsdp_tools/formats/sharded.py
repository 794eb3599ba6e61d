"""What a pickled DTensor or ShardedTensor says about itself: the whole tensor, and which parts this rank holds."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from ..errors import DamagedCheckpointError, UnsupportedError
from ..extents import Box, Extent, Shape
from ..placements import Cut, compute_boxes, iterate_local_boxes
from .pickled import GlobalRef, PickledObject, TensorRef
from .state_files import StateFile

_MAX_PIECES = 1 << 16  # ranks along a dimension of the mesh; a file may claim anything


@dataclass(frozen=True)
class RankPart:
    """What one rank's file holds of one tensor.

    `is_first` is False if another rank, by the placements, holds the same parts and counts as the one that does.
    `is_placed` is False for a plain tensor, which says nothing about being whole or a part. `rank` and `world_size`
    are those that the pickle states, if any.
    """

    dtype: str
    shape: Shape
    extents: tuple[Extent, ...]
    is_first: bool = True
    is_placed: bool = True
    requires_grad: bool = False
    rank: int | None = None
    world_size: int | None = None


def read_rank_part(file: StateFile, name: str, value: Any) -> RankPart:
    """Return what `value`, read from a rank's `file`, holds of the tensor `name`.

    Raises:
        UnsupportedError: a kind of sharding that can't be put together (partial sums).
        DamagedCheckpointError: the facts it states contradict each other.
    """
    if type(value) is TensorRef:
        extents = (file.make_extent(value),) if all(value.shape) else ()
        return RankPart(value.dtype, value.shape, extents, is_placed=False, requires_grad=value.requires_grad)
    try:
        if value.name.endswith("DTensor"):
            return _read_dtensor(file, name, value)
        return _read_sharded_tensor(file, value)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{file.label}: {name!r} does not describe a sharded tensor as torch writes it "
            f"({type(error).__name__}: {str(error)[:200]}). The file is damaged or from an unknown version of torch.",
            path=file.path,
            fqn=name,
        ) from None


def _read_dtensor(file: StateFile, name: str, value: PickledObject) -> RankPart:
    attributes = value.get_attributes()
    local, spec = attributes["_local_tensor"], attributes["_spec"].get_attributes()
    shape, dtype = _get_tensor_meta(spec["tensor_meta"])
    mesh = spec["mesh"].get_attributes()
    coordinate = mesh.get("_coordinate_on_dim")
    facts: dict[str, Any] = {"rank": mesh.get("_rank"), "requires_grad": bool(value.args[-1])}
    if coordinate is None:  # a rank outside the mesh holds nothing
        return RankPart(dtype, shape, (), **facts)
    if type(local) is not TensorRef or len(local.shape) != len(shape) or local.dtype != dtype:
        raise ValueError(f"the local tensor is {local!r}")
    cuts: list[Cut] = []
    is_first = True
    for size, place, placement in zip(_get_mesh_shape(mesh), coordinate, spec["placements"], strict=True):
        if type(place) is not int or not 0 <= place < size:
            raise ValueError(f"rank {place!r} of {size!r} in the mesh")
        cut = _read_placement(file, name, placement, size, place, len(shape))
        if cut is None:
            is_first = is_first and place == 0
        else:
            cuts.append(cut)
    try:
        boxes = compute_boxes(shape, cuts, local.shape)
    except UnsupportedError as error:
        raise UnsupportedError(f"{file.label}: {name!r}: {error}.", path=file.path, fqn=name) from None
    extents = []
    for box, place_in_local in iterate_local_boxes(boxes):
        skip = sum(map(operator.mul, place_in_local.offsets, local.strides))
        extents.append(file.make_extent(local, box, skip=skip))
    return RankPart(dtype, shape, tuple(extents), is_first=is_first, **facts)


def _get_tensor_meta(meta: PickledObject) -> tuple[Shape, str]:
    # A named tuple: (shape, strides, dtype) as arguments of the new object.
    shape, _, dtype = meta.args
    if type(dtype) is not GlobalRef:
        raise TypeError("a malformed tensor_meta")
    return _as_shape(shape), dtype.name.removeprefix("torch.")


def _as_shape(sizes: Any) -> Shape:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise TypeError("sizes expected")
    return tuple(sizes)


def _get_mesh_shape(mesh: dict[str, Any]) -> Shape:
    if type(mesh.get("mesh")) is TensorRef:  # until torch 2.9
        return tuple(mesh["mesh"].shape)
    layout = mesh["_layout"].get_attributes()
    if "axes" in layout:
        return tuple(math.prod(axis.get_attributes()["shape"]) for axis in layout["axes"])
    return tuple(math.prod(size) if isinstance(size, tuple) else size for size in layout["shape"])


def _read_placement(
    file: StateFile, name: str, placement: PickledObject, count: int, index: int, num_dims: int
) -> Cut | None:
    """Return how a placement cuts the tensor over `count` ranks of which this is number `index`; None: not at all."""
    kind = placement.name.rpartition(".")[2]
    attributes = placement.get_attributes()
    if kind == "Replicate":
        return None
    if kind in ("Shard", "_StridedShard"):
        dim, factor = attributes["dim"], attributes.get("split_factor", 1)
        if type(dim) is not int or type(factor) is not int or not 1 <= factor <= _MAX_PIECES or count > _MAX_PIECES:
            raise ValueError(f"{kind} of dimension {dim!r} into {count!r} times {factor!r}")
        return Cut(range(num_dims)[dim], count, index, factor)
    raise UnsupportedError(
        f"{file.label}: {name!r} has the placement {kind}: each rank holds a summand, not a part, and the file does "
        "not say that the sum was meant to be saved. Redistribute it (Replicate or Shard) and save again.",
        path=file.path,
        fqn=name,
        actual=kind,
    )


def _read_sharded_tensor(file: StateFile, value: PickledObject) -> RankPart:
    shards, metadata, group, *_ = value.state
    facts = metadata.get_attributes()
    shape = _as_shape(facts["size"])
    dtype = facts["tensor_properties"].state[0].name.removeprefix("torch.")
    extents = []
    for shard in shards:
        attributes = shard.get_attributes()
        tensor, place = attributes["tensor"], attributes["metadata"].get_attributes()
        box = Box(_as_shape(place["shard_offsets"]), _as_shape(place["shard_sizes"]))
        if type(tensor) is not TensorRef or tensor.shape != box.sizes or tensor.dtype != dtype:
            raise ValueError(f"the shard is {tensor!r}, {box.sizes} was expected")
        if len(box.offsets) != len(shape):
            raise ValueError(f"a shard at {box.offsets}")
        if box.numel:
            extents.append(file.make_extent(tensor, box))
    ranks = group.get_attributes()
    return RankPart(
        dtype,
        shape,
        tuple(extents),
        requires_grad=bool(value.args[-1]),
        rank=ranks["global_rank"],
        world_size=ranks["global_world_size"],
    )


def get_storage_starts(file: StateFile, name: str, value: Any) -> dict[str, int]:
    """Return where in a flat sharded tensor the first element of each storage of this rank's shards would be.

    Raises:
        DamagedCheckpointError: `value` is not a sharded tensor of one dimension.
    """
    part = read_rank_part(file, name, value)
    if not part.is_placed or len(part.shape) != 1 or value.name.endswith("DTensor"):
        raise DamagedCheckpointError(
            f"{file.label}: {name!r} is not a flat parameter as torch writes it.", path=file.path, fqn=name
        )
    starts = {}
    for shard in value.state[0]:
        attributes = shard.get_attributes()
        (offset,) = attributes["metadata"].get_attributes()["shard_offsets"]
        starts[attributes["tensor"].storage.key] = offset - attributes["tensor"].offset
    return starts


def get_stated_world_size(value: Any) -> int | None:
    """Return how many ranks there were, as a pickled sharded tensor says; None if it doesn't, or isn't one."""
    if type(value) is not PickledObject:
        return None
    try:
        if value.name.endswith("DTensor"):
            # Only newer versions keep the ranks of the whole world; older ones those of a submesh.
            mesh = value.get_attributes()["_spec"].get_attributes()["mesh"].get_attributes()
            size = len(mesh["_flatten_rank_map"]) if "_layout" in mesh else None
        else:
            size = value.state[2].get_attributes()["global_world_size"]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return size if type(size) is int and 0 < size < 1 << 20 else None
