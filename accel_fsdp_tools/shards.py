"""What this rank holds of the live model: every tensor's local part, in the coordinates of the whole tensor.

FSDP1's flat parameters (by FSDP's own shard infos: alignment and padding make equal division wrong), DTensors of any
placement, whole parameters and persistent buffers. Names are those of the state dict without wrappers' prefixes.
Nothing is gathered, copied or resharded: what FSDP has unsharded at the moment is looked up in its shards.

Not collective. Every rank yields the same names in the same order, those of which it holds nothing included.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .buffers import BufferCast, find_buffer_casts
from .errors import UnsupportedError
from .extents import Box, Part, Run, Shape, get_whole
from .live import Place, find_fsdp2_shards
from .names import clean_fqn
from .placements import Cut, compute_boxes, iterate_local_boxes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Layout:
    """How a tensor is spread over ranks, and which share this rank has.

    `scheme` names the way of cutting, the same on all ranks that take part; ranks of one scheme with the same `index`
    hold copies of the same parts. None: every rank that has the tensor has all of it.
    """

    scheme: str | None = None
    index: tuple[int, ...] = ()


WHOLE = Layout()
OUTSIDE = Layout("outside")  # of a rank that the tensor's mesh leaves out: it holds nothing


@dataclass(frozen=True)
class LocalShard:
    """This rank's share of one tensor, or (kind "value") something that is no tensor.

    `dtype` has no `torch.`; `shape` is the whole tensor's. `tensor` is a view of the live memory: of the shape of the
    box, 1-D for a run, and where there are several boxes (strided shards) all of them in one. Of a buffer that FSDP1
    casts for state dicts it is a copy, cast so, and `memory` the live one. `parts` is empty where this rank holds
    nothing. `aliases` are further names of the same tensor (tied parameters). Of an optimizer's
    state, `fqn` is the parameter's name and `state` the state's (`exp_avg`, `step`); None for the model's own.
    """

    fqn: str
    dtype: str
    shape: Shape
    parts: tuple[Part, ...]
    tensor: torch.Tensor | None = field(repr=False)
    kind: str  # "parameter", "buffer", "state" or "value"
    requires_grad: bool = False
    layout: Layout = WHOLE
    aliases: tuple[str, ...] = ()
    state: str | None = None
    value: Any = None
    memory: torch.Tensor | None = field(default=None, repr=False)

    def as_in_memory(self) -> LocalShard:
        """Return the share with the live memory, also of a buffer that FSDP1 casts for state dicts."""
        if self.memory is None:
            return self
        dtype = str(self.memory.dtype).removeprefix("torch.")
        return dataclasses.replace(self, tensor=self.memory, dtype=dtype, memory=None)

    def iterate_pieces(self) -> Iterator[tuple[Part, torch.Tensor]]:
        """Yield each part with the view of memory that holds it. No copies."""
        if self.tensor is None or not self.parts:
            return
        if len(self.parts) == 1:
            yield self.parts[0], self.tensor
            return
        for part, place in iterate_local_boxes([part for part in self.parts if isinstance(part, Box)]):
            slices = (slice(start, start + size) for start, size in zip(place.offsets, place.sizes, strict=True))
            yield part, self.tensor[tuple(slices)]


@dataclass(frozen=True)
class Held:
    """A parameter's local share and what the optimizer knows it by.

    `owner` is the object in the optimizer's parameter groups. For a flat parameter that stands for several,
    `flat_start` is where this one's elements begin in it (and in its states), and `flat_numel` its local size.
    """

    shard: LocalShard
    owner: torch.Tensor
    flat_start: int | None = None
    flat_numel: int = 0


def iterate_local_shards(model: torch.nn.Module) -> Iterator[LocalShard]:
    """Yield this rank's share of every parameter and persistent buffer of a prepared model.

    Takes models as they are: wrapped by FSDP 1 or 2, `torch.compile`, activation checkpointing, PEFT. Each tensor
    comes once, under its first name; further names (tied parameters) are its `aliases`. Parameters come before
    buffers. A parameter that FSDP was told to ignore is whole.

    Not collective. Peak memory: nothing is copied, the views point into live memory; except for buffers that FSDP1's
    mixed precision has cast, which come as a state dict holds them, one at a time.

    Raises:
        UnsupportedError: a tensor's share cannot be told (see the message), or it is on the meta device.
    """
    for held in iterate_held_parameters(model):
        yield held.shard
    casts = find_buffer_casts(model)
    buffers: dict[int, tuple[torch.Tensor, BufferCast | None, list[str]]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                entry = buffers.setdefault(id(buffer), (buffer, casts.get((id(module), name)), []))
                entry[2].append(clean_fqn(f"{module_name}.{name}"))
    for buffer, cast, names in buffers.values():
        shard = _describe(names, buffer, "buffer", requires_grad=False)
        saved = buffer if cast is None else cast.apply(buffer)
        if saved is not buffer:
            shard = dataclasses.replace(_describe(names, saved, "buffer", requires_grad=False), memory=shard.tensor)
        yield shard


def iterate_held_parameters(model: torch.nn.Module) -> Iterator[Held]:
    """Yield the parameters among `iterate_local_shards`, with their owners. Not collective."""
    in_flat: set[Place] = set()
    for module_name, module in model.named_modules():
        handle = vars(module).get("_handle")  # the wrapper of torch.compile hands out its module's attributes
        if handle is not None and getattr(handle, "flat_param", None) is not None:
            infos = (*handle.flat_param._param_infos, *handle.flat_param._shared_param_infos)
            in_flat.update((id(info.module), info.param_name) for info in infos)
            yield from _iterate_flat(module_name, handle)
    sharded = find_fsdp2_shards(model)
    parameters: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, registered in module._parameters.items():
            place = (id(module), name)
            if registered is None or place in in_flat or hasattr(registered, "_fqns"):
                continue
            parameter = sharded.get(place, registered)
            parameters.setdefault(id(parameter), (parameter, []))[1].append(clean_fqn(f"{module_name}.{name}"))
    for parameter, names in parameters.values():
        yield Held(_describe(names, parameter, "parameter", requires_grad=parameter.requires_grad), parameter)


def _iterate_flat(module_name: str, handle: Any) -> Iterator[Held]:
    """Yield the parameters of one FSDP1 unit."""
    flat_param = handle.flat_param
    local = _get_local_flat(flat_param)
    layout = _get_flat_layout(handle) if handle.uses_sharded_strategy else WHOLE
    dtype = _get_dtype(module_name, local)
    aliases: dict[str, list[str]] = {}
    for shared in flat_param._shared_param_infos:
        primary = clean_fqn(".".join(filter(None, (module_name, shared[5], shared[3]))))
        aliases.setdefault(primary, []).append(clean_fqn(".".join(filter(None, (module_name, shared[2], shared[0])))))
    infos = zip(
        flat_param._fqns,
        flat_param._shapes,
        flat_param._shard_param_infos,
        flat_param._contiguities,
        flat_param._param_extensions,
        flat_param._params or [flat_param] * len(flat_param._fqns),
        strict=True,
    )
    for fqn, shape, info, is_contiguous, extension, owner in infos:
        name = clean_fqn(f"{module_name}.{fqn}")
        if extension is not None or not is_contiguous:
            raise UnsupportedError(
                f"{name}: FSDP1 holds it {'by an extension (tensor parallelism)' if extension else 'not row by row'}; "
                "which of its elements are on this rank cannot be told. Use FSDP2, or make it contiguous before FSDP",
                fqn=name,
            )
        start, numel = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
        shard = LocalShard(
            fqn=name,
            dtype=dtype,
            shape=tuple(shape),
            parts=(Run(info.intra_param_start_idx, numel),) if numel else (),
            tensor=local[start : start + numel],
            kind="parameter",
            requires_grad=bool(owner.requires_grad),
            layout=layout,
            aliases=tuple(aliases.get(name, ())),
        )
        yield Held(shard, owner, None if owner is not flat_param else start, local.numel())


def _get_local_flat(flat_param: Any) -> torch.Tensor:
    """Return the flat parameter's shard, also while FSDP has the whole or a low-precision copy in its place."""
    data: torch.Tensor = flat_param.data
    shard: torch.Tensor | None = getattr(flat_param, "_local_shard", None)  # set by the first forward
    if shard is None or (data.shape == shard.shape and data.dtype == shard.dtype):
        return data.detach()
    return shard.detach()


def _get_flat_layout(handle: Any) -> Layout:
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(handle.process_group)
    return Layout(_name_scheme("flat", ranks), (int(handle.rank),))


def _name_scheme(kind: str, ranks: list[int]) -> str:
    """Name a way of cutting so that groups of ranks that cut alike (the shard groups of HSDP) find each other."""
    pattern = ",".join(str(rank - ranks[0]) for rank in ranks)
    return f"{kind}/{hashlib.sha256(pattern.encode()).hexdigest()[:16]}"


def _describe(names: list[str], tensor: torch.Tensor, kind: str, *, requires_grad: bool) -> LocalShard:
    shape, parts, local, layout = locate(names[0], tensor)
    return LocalShard(
        fqn=names[0],
        dtype=_get_dtype(names[0], local),
        shape=shape,
        parts=parts,
        tensor=local,
        kind=kind,
        requires_grad=requires_grad,
        layout=layout,
        aliases=tuple(dict.fromkeys(name for name in names[1:] if name != names[0])),
    )


def locate(name: str, tensor: torch.Tensor) -> tuple[Shape, tuple[Part, ...], torch.Tensor, Layout]:
    """Return whole shape, parts, local memory and layout of a DTensor or plain tensor. Not collective.

    Raises:
        UnsupportedError: it is a partial sum, or a local tensor that does not fit its placements.
    """
    from torch.distributed.tensor import DTensor

    shape = tuple(int(size) for size in tensor.shape)
    if not isinstance(tensor, DTensor):
        whole = get_whole(shape)
        return shape, (whole,) if whole.numel else (), tensor.detach(), WHOLE
    mesh, local = tensor.device_mesh, tensor._local_tensor.detach()
    coordinate = mesh.get_coordinate()
    cuts, kinds = [], []
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise UnsupportedError(f"{name} has the placement {placement}: ranks hold no parts of it", fqn=name)
        factor = int(getattr(placement, "split_factor", 1))
        index = coordinate[mesh_dim] if coordinate is not None else 0
        cuts.append(Cut(int(placement.dim), mesh.size(mesh_dim), index, factor))
        kinds.append(f"{mesh_dim}:{placement.dim}:{factor}")
    if coordinate is None:
        return shape, (), local, OUTSIDE
    if not cuts:
        return shape, (get_whole(shape),) if local.numel() else (), local, WHOLE
    try:
        boxes = _compute_boxes(shape, tuple(cuts), tuple(local.shape))
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error.message}", **{**error.facts, "fqn": name}) from error
    if mesh not in _mesh_names:
        _mesh_names[mesh] = _name_scheme(f"mesh {tuple(mesh.shape)}", mesh.mesh.flatten().tolist())
    scheme = f"{_mesh_names[mesh]} {' '.join(kinds)}"
    return shape, boxes, local, Layout(scheme, tuple(cut.index for cut in cuts))


_compute_boxes = lru_cache(4096)(compute_boxes)  # layers are alike, and an optimizer's states like their parameters
_mesh_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # a model has few meshes and many tensors


def _get_dtype(name: str, tensor: torch.Tensor) -> str:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if tensor.is_meta:
        raise UnsupportedError(f"{name} is on the meta device: it has no values yet", fqn=name)
    if is_traceable_wrapper_subclass(tensor):
        raise UnsupportedError(f"{name} is a {type(tensor).__name__}, whose memory is not understood", fqn=name)
    return str(tensor.dtype).removeprefix("torch.")
