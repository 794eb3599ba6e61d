"""Checkpoints of every format, made by the real writers, and what torch itself loads from them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel_fsdp_tools.extents import DiskTensor, check_coverage
from accel_fsdp_tools.formats.reading import check_item, read_part
from tests.training import Setup

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
]


def get_bytes(tensor: torch.Tensor) -> bytes:
    """Return the row-major bytes of any tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def check_equal(found: Mapping[str, DiskTensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Require the same names, dtypes, shapes and bytes, each element in exactly one place, and right CRCs."""
    assert sorted(found) == sorted(expected)
    for name, tensor in found.items():
        reference = expected[name]
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(reference.dtype), tuple(reference.shape)), name
        assert check_coverage(tensor.shape, tensor.parts).ok, name
        assert read_part(tensor) == get_bytes(reference), name
        for extent in (*tensor.extents, *tensor.replicas):
            assert check_item(extent.bytes) in (True, None), name
            assert Path(extent.bytes.path).is_absolute()


def make_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of arbitrary bits (0 and 1 for bool)."""
    generator = torch.Generator().manual_seed(len(shape))
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = dtype.itemsize
    numel = torch.Size(shape).numel()
    return torch.randint(256, (numel * size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def save_with_accelerate(folder: str, setup: Setup, saves: list[tuple[str, str, bool]]) -> None:
    """Train one step on this rank, then save model and optimizer as each (name, state-dict type, use_dcp) says."""
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    from tests.training import build, train_batch

    objects = build(setup, seed=1)
    train_batch(objects, next(iter(objects.loader)))
    accelerator, plugin = objects.accelerator, objects.accelerator.state.fsdp_plugin
    for name, kind, use_dcp in saves:
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type(kind)
        target = f"{folder}/{name}"
        save_fsdp_model(plugin, accelerator, objects.model, target, 0, use_dcp=use_dcp)
        save_fsdp_optimizer(plugin, accelerator, objects.optimizer, objects.model, target, 0, use_dcp=use_dcp)
        accelerator.wait_for_everyone()


def get_model_layout() -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the model that `save_with_accelerate` trains."""
    from tests.models import build_tiny_llama

    return {name: tuple(each.shape) for name, each in build_tiny_llama(num_layers=2).named_parameters()}


def load_dcp(directory: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a DCP directory with torch, by their key paths without the first key."""
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(directory).read_metadata()
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    paths = metadata.planner_data
    return {".".join(map(str, paths[name][1:])): tensor for name, tensor in state.items()}


def flatten(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a nested state dict by their dotted key paths."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    found: dict[str, torch.Tensor] = {}
    if isinstance(value, dict):
        for key, inner in value.items():
            found |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def save_with_tensor_parallelism(folder: str) -> None:
    """Four ranks save a model under FSDP2 over tensor parallelism; 9 rows don't divide evenly in either way."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 7))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"{folder}/whole.pt")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    torch.save(model.state_dict(), f"{folder}/model_world_size_4_rank_{dist.get_rank()}.pt")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/dcp")


MESH_SHAPES = {"rows": (101, 6), "few": (3, 5), "one": (1, 4), "vector": (17,), "cube": (5, 7, 3)}


def make_mesh_tensors() -> dict[str, torch.Tensor]:
    """Return the whole tensors of `save_on_mesh`, the same in every process."""
    whole = {name: make_tensor(torch.float32, *shape) for name, shape in MESH_SHAPES.items()}
    return {**whole, "bf16": make_tensor(torch.bfloat16, 8, 9), "norm": torch.ones(16)}


def save_on_mesh(folder: str) -> None:
    """Four ranks save DTensors of many placements on a 2 x 2 mesh: as DCP, and each rank for itself."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,))
    placements = {
        "both": (Shard(0), Shard(1)),
        "first_twice": (Shard(0), Shard(0)),
        "hsdp": (Replicate(), Shard(0)),
        "columns": (Shard(1), Replicate()),
        "everywhere": (Replicate(), Replicate()),
    }
    state: dict[str, Any] = {}
    for name, whole in make_mesh_tensors().items():
        for title, placement in placements.items():
            if whole.ndim > max(getattr(each, "dim", 0) for each in placement):
                state[f"{name}.{title}"] = distribute_tensor(whole, mesh, placement)
        state[f"{name}.over_four"] = distribute_tensor(whole, flat, (Shard(0),))
    # FSDP over tensor parallelism, as fully_shard makes it of a colwise parallel weight.
    whole = make_mesh_tensors()["bf16"]
    strided = (_StridedShard(0, split_factor=2), Shard(0))
    (pieces, _) = strided[0]._split_tensor(whole, 2, with_padding=False)
    local = pieces[mesh.get_local_rank("dp")].chunk(2)[mesh.get_local_rank("tp")].clone()
    state["bf16.strided"] = DTensor.from_local(
        local, mesh, strided, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    state["bf16.transposed"] = distribute_tensor(whole.t(), mesh, (Shard(0), Replicate()))
    rank = dist.get_rank()
    dcp.save({"model": state, "extra": {"note": "text", "count": torch.tensor(7)}}, checkpoint_id=f"{folder}/dcp")
    Path(f"{folder}/ranks").mkdir(exist_ok=True)
    torch.save({**state, "buffer": torch.arange(3)}, f"{folder}/ranks/model_world_size_4_rank_{rank}.pt")
    state |= {
        "bf16.lone": DTensor.from_local(
            pieces[mesh.get_local_rank("dp")],
            mesh,
            (strided[0], Replicate()),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    }
    Path(f"{folder}/hand").mkdir(exist_ok=True)
    torch.save(
        {
            "state_dict": {f"module.{name}": tensor for name, tensor in state.items()},
            "optimizer_state": {"state": {0: {"exp_avg": state["rows.both"], "step": torch.tensor(3.0)}}},
            "metadata": {"rank": rank, "world_size": 4, "epoch": 1},
        },
        f"{folder}/hand/model_pt_rank_{rank}.pt",
    )


def expect_mesh_tensors(names: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the whole tensors that the names of `save_on_mesh` stand for."""
    whole = make_mesh_tensors()
    expected = {}
    for name in names:
        stem, _, title = name.partition(".")
        expected[name] = whole[stem].t() if title == "transposed" else whole.get(stem, torch.arange(3))
    return expected
