"""Tensors, whole or sharded, as `torch.save` writes them."""

from __future__ import annotations

import re
from typing import Any

from ...extents import DTYPE_SIZES
from ..pickled import GlobalRef, PickledObject, StorageRef, TensorRef
from .rules import Call, RefusedError, Rule, Spend, check_attributes

_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}

_MAX_INT = 1 << 62


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_INT:
        raise ValueError("a count that is not a non-negative integer")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list):
        raise TypeError("sizes that are not a tuple")
    return tuple(_count(value) for value in values)


def load_storage(persistent_id: Any) -> StorageRef:
    """Return the storage that a persistent id of torch's format stands for."""
    if type(persistent_id) is not tuple or not persistent_id or persistent_id[0] != "storage":
        raise RefusedError("a persistent id that is not a torch storage")
    kind, key, location, numel, *view = persistent_id[1:]
    if any(part is not None for part in view):
        raise ValueError("a view of a storage, as torch before 0.4 wrote")
    if not isinstance(kind, GlobalRef) or type(key) is not str or type(location) is not str:
        raise TypeError("a malformed storage id")
    return StorageRef(key, _STORAGE_DTYPES[kind.name.rpartition(".")[2]], location, _count(numel))


def _dtype_name(value: Any) -> str:
    name = value.name.removeprefix("torch.") if isinstance(value, GlobalRef) else ""
    if name not in DTYPE_SIZES:
        raise TypeError("not a dtype")
    return str(name)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: str | None
) -> TensorRef:
    if type(storage) is not StorageRef:
        raise TypeError("a tensor without a storage")
    _check_hooks(hooks)
    dtype = storage.dtype if dtype is None else dtype
    shape, strides, start = _counts(shape), _counts(strides), _count(offset)
    if len(shape) != len(strides):
        raise ValueError("a tensor whose sizes and strides differ in number")
    if all(shape):
        end = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        if end * DTYPE_SIZES[dtype] > storage.size_bytes:
            raise ValueError("a tensor that reaches beyond its storage")
    return TensorRef(storage, dtype, shape, strides, start, bool(requires_grad))


def _check_hooks(hooks: Any) -> None:
    if hooks:  # torch would call them in the next backward pass
        raise RefusedError("a tensor with backward hooks")


def _tensor_v2(args: tuple[Any, ...], spend: Spend) -> TensorRef:
    storage, offset, shape, strides, requires_grad, hooks, *metadata = args
    _check_length(metadata, 1)
    return _tensor(storage, offset, shape, strides, requires_grad, hooks, None)


def _tensor_v3(args: tuple[Any, ...], spend: Spend) -> TensorRef:
    storage, offset, shape, strides, requires_grad, hooks, dtype, *metadata = args
    _check_length(metadata, 1)
    return _tensor(storage, offset, shape, strides, requires_grad, hooks, _dtype_name(dtype))


def _parameter(args: tuple[Any, ...], spend: Spend) -> Any:
    data, _, hooks, *state = args
    _check_length(state, 1)
    _check_hooks(hooks)
    for attributes in state:
        check_attributes("a parameter", attributes, spend)
    if type(data) not in (TensorRef, PickledObject):
        raise TypeError("a parameter that is not a tensor")
    return data


def _check_length(values: list[Any], maximum: int) -> None:
    if len(values) > maximum:
        raise ValueError("too many arguments")


def _wrapper(args: tuple[Any, ...], spend: Spend) -> PickledObject:
    kind = args[0]
    if not isinstance(kind, GlobalRef) or kind.name not in _WRAPPERS:
        raise RefusedError("torch._utils._rebuild_wrapper_subclass of an unknown class")
    return PickledObject(kind.name, args[1:])


def _from_type(args: tuple[Any, ...], spend: Spend) -> Any:
    function, kind, inner, state = args
    maker = _REBUILDERS.get(function.name) if isinstance(function, GlobalRef) else None
    if maker is None or not isinstance(kind, GlobalRef) or type(inner) is not tuple:
        raise RefusedError("torch._tensor._rebuild_from_type_v2 with a function that does not rebuild tensors")
    result = maker(inner, spend)
    check_attributes(kind.name, state, spend)
    if kind.name in _WRAPPERS and type(result) is PickledObject:
        result.set_state(state)
    elif kind.name not in _PLAIN_TENSORS:
        raise RefusedError(f"torch._tensor._rebuild_from_type_v2 into {kind.name}")
    return result  # attributes that someone hung on a plain tensor are of no use here


_REBUILDERS: dict[str, Call] = {
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
}

_PLAIN_TENSORS = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})

_SHARDED = "torch.distributed._shard"
_SHARDED_TENSOR = f"{_SHARDED}.sharded_tensor.api.ShardedTensor"
_SHARDED_METADATA = f"{_SHARDED}.sharded_tensor.metadata"

_WRAPPERS = frozenset({"torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor", _SHARDED_TENSOR})


def call_enum(name: str) -> Call:
    def call(args: tuple[Any, ...], spend: Spend) -> PickledObject:
        (value,) = args
        return PickledObject(name, (_count(value),), state=())

    return call


def _layout(args: tuple[Any, ...], spend: Spend) -> GlobalRef:
    (name,) = args
    if type(name) is not str or not re.fullmatch(r"torch\.[a-z_]{1,30}", name):
        raise RefusedError("torch.serialization._get_layout of something else than a layout")
    return GlobalRef(name)


def _device(args: tuple[Any, ...], spend: Spend) -> str:
    kind, *index = args
    _check_length(index, 1)
    if type(kind) is not str:
        raise TypeError("a device without a name")
    return f"{kind}:{_count(index[0])}" if index else kind


DTYPES_AND_SIZES: dict[str, Rule] = {
    "torch.Size": Rule(lambda args, spend: _counts(args[0] if args else ())),
    "torch.serialization._get_layout": Rule(_layout),
    **{f"torch.{name}": Rule() for name in DTYPE_SIZES},
}

_RECORDS = (
    f"{_SHARDED_TENSOR}.ProcessGroupState",
    f"{_SHARDED}.sharded_tensor.shard.Shard",
    f"{_SHARDED}.metadata.ShardMetadata",
    f"{_SHARDED_METADATA}.ShardedTensorMetadata",
    f"{_SHARDED_METADATA}.TensorProperties",
    f"{_SHARDED}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    f"{_SHARDED}.sharding_spec.api.EnumerableShardingSpec",
    "torch.distributed.remote_device._remote_device",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed._mesh_layout._FlatLayout",
    *(
        f"torch.distributed.{module}.{name}"
        for module in ("tensor._dtensor_spec", "_tensor.placement_types")
        for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    ),
    *(
        f"torch.distributed.{module}.placement_types.{name}"
        for module in ("tensor", "_tensor")
        for name in ("Shard", "Replicate", "Partial", "_StridedShard")
    ),
)

TENSORS: dict[str, Rule] = {
    **{name: Rule(call) for name, call in _REBUILDERS.items()},
    "torch._tensor._rebuild_from_type_v2": Rule(_from_type),
    "torch.device": Rule(_device),
    **{name: Rule() for name in (*_PLAIN_TENSORS, *_WRAPPERS)},
    **{f"torch.{name}": Rule() for name in _STORAGE_DTYPES},
    **{f"torch.cuda.{name}": Rule() for name in _STORAGE_DTYPES},
    "torch.storage.UntypedStorage": Rule(),
    **{name: Rule(is_record=True) for name in _RECORDS},
    "builtins.getattr": Rule(),  # the machine lets it name a nested class that is itself allowed
    f"{_SHARDED_METADATA}.MEM_FORMAT_ENCODING": Rule(call_enum(f"{_SHARDED_METADATA}.MEM_FORMAT_ENCODING")),
    "_io.BytesIO": Rule(is_record=True),
}
