"""What `.metadata` says, read from directories that DCP itself wrote, and what it must not be allowed to say."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from accel_fsdp_tools.errors import (
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    UnsafePickleError,
)
from accel_fsdp_tools.formats.allowed import DCP_METADATA
from accel_fsdp_tools.formats.dcp import read_dcp_metadata
from accel_fsdp_tools.formats.pickles import load_pickle, scan_pickle
from accel_fsdp_tools.formats.zips import open_torch_zip, open_window
from tests.attacks import BOMB_NAME, Bomb, read_metadata, write_metadata
from tests.harness import run_ranks


def _save(folder: str) -> dict[str, Any]:
    """Two ranks save tensors of several placements; returns this rank's local parts."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(101 * 6, dtype=torch.float32).reshape(101, 6)
    rows = distribute_tensor(full, mesh, [Shard(0)])
    columns = distribute_tensor(full.to(torch.bfloat16), mesh, [Shard(1)])
    state = {
        "model": {
            "rows": rows,
            "columns": columns,
            "same": distribute_tensor(full[:3], mesh, [Replicate()]),
            "one row": distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)]),
            "scalar": torch.tensor(7),
            "transposed": full.t(),
            "f8": torch.ones(4).to(torch.float8_e4m3fn),
        },
        "optimizer": {
            "state": {"rows": {"exp_avg": rows.clone(), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["rows"]}],
        },
    }
    dcp.save(state, checkpoint_id=folder)
    return {"rows": rows.to_local().numpy().tobytes()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("dcp")
    return root / "ckpt", run_ranks(_save, str(root / "ckpt"), folder=root / "ranks")


@pytest.fixture
def copy(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def test_tensors_chunks_and_blobs(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, parts = saved
    metadata = read_dcp_metadata(directory)
    reference = read_metadata(directory)
    assert list(metadata.key_paths.items()) == list(reference.planner_data.items())
    assert metadata.key_paths["optimizer.state.rows.exp_avg"] == ("optimizer", "state", "rows", "exp_avg")
    assert metadata.version == reference.version
    assert set(metadata.tensors) | set(metadata.blobs) == set(reference.state_dict_metadata)
    for fqn, tensor in metadata.tensors.items():
        expected = reference.state_dict_metadata[fqn]
        assert (tensor.shape, f"torch.{tensor.dtype}") == (tuple(expected.size), str(expected.properties.dtype))
        assert [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks] == [
            (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in expected.chunks
        ]
    assert metadata.tensors["model.columns"].dtype == "bfloat16"
    assert metadata.tensors["model.f8"].dtype == "float8_e4m3fn"
    assert metadata.tensors["model.scalar"].shape == ()
    assert [chunk.sizes for chunk in metadata.tensors["model.rows"].chunks] == [(51, 6), (50, 6)]
    assert any(fqn.startswith("optimizer.param_groups") for fqn in metadata.blobs)
    assert len(metadata.items) == len(reference.storage_data)
    for chunk, part in zip(metadata.tensors["model.rows"].chunks, parts, strict=True):
        with open_window(directory / chunk.item.file) as window:
            archive = open_torch_zip(window.narrow(chunk.item.offset, chunk.item.length, "item"))
            assert archive.read("data/0") == part["rows"]


def test_the_names_that_dcp_uses_today(saved: tuple[Path, Any]) -> None:
    names = scan_pickle((saved[0] / ".metadata").read_bytes(), where="m", allow=DCP_METADATA)
    assert {name.rpartition(".")[2] for name in names if "checkpoint" in name} == {
        *("Metadata", "MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
    }


def test_written_without_collectives(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / ".metadata").rename(tmp_path / "a" / "__0.metadata")
    assert read_dcp_metadata(tmp_path / "a", name="__0.metadata").tensors["w"].shape == (3,)


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        read_dcp_metadata(tmp_path / "absent")
    with pytest.raises(CheckpointIncompleteError, match="did not finish"):
        read_dcp_metadata(tmp_path)


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/../../x", "", ".", "x\0", "..\\x"])
def test_files_outside_the_directory(copy: Path, file: str) -> None:
    metadata = read_metadata(copy)
    index, info = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(info, relative_path=file)
    write_metadata(copy, metadata)
    with pytest.raises(DamagedCheckpointError) as caught:
        read_dcp_metadata(copy)
    assert caught.value.path == str(copy / ".metadata")
    assert file == "" or repr(file) in str(caught.value)


@pytest.mark.parametrize(
    "where", ["root", "planner_data", "storage_data", "state_dict_metadata", "storage_meta", "version", "index"]
)
def test_code_in_the_metadata(copy: Path, tmp_path: Path, where: str) -> None:
    metadata: Any = read_metadata(copy)
    bomb: Any = Bomb(tmp_path / "canary")
    if where == "root":
        metadata = bomb
    elif where == "index":
        info = next(iter(metadata.storage_data.values()))
        info.transform_descriptors = [bomb]
    elif where in ("storage_data", "state_dict_metadata"):
        getattr(metadata, where)["more"] = bomb
    else:
        setattr(metadata, where, bomb)
    write_metadata(copy, metadata)
    with pytest.raises(UnsafePickleError, match=BOMB_NAME) as caught:
        read_dcp_metadata(copy)
    assert caught.value.actual == BOMB_NAME
    assert not (tmp_path / "canary").exists()


def _break(metadata: Any, how: str) -> None:
    first = next(iter(metadata.state_dict_metadata))
    index = next(iter(metadata.storage_data))
    if how == "no storage":
        metadata.storage_data = None
    elif how == "item missing":
        del metadata.storage_data[index]
    elif how == "negative offset":
        metadata.storage_data[index] = replace(metadata.storage_data[index], offset=-1)
    elif how == "huge length":
        metadata.storage_data[index] = replace(metadata.storage_data[index], length=2**70)
    elif how == "sizes":
        metadata.state_dict_metadata[first].size = [1, "2"]
    elif how == "dtype":
        metadata.state_dict_metadata[first].properties = 3
    elif how == "planner data":
        metadata.planner_data = {"x": [b"y"]}
    elif how == "entries":
        metadata.state_dict_metadata = [1]


@pytest.mark.parametrize(
    "how",
    [
        *("no storage", "item missing", "negative offset", "huge length", "sizes", "dtype", "planner data", "entries"),
    ],
)
def test_contradictions(copy: Path, how: str) -> None:
    metadata = read_metadata(copy)
    _break(metadata, how)
    write_metadata(copy, metadata)
    with pytest.raises(DamagedCheckpointError, match="does not describe a checkpoint"):
        read_dcp_metadata(copy)


def test_something_else(copy: Path) -> None:
    for content in (b"", b"hello", pickle.dumps({"a": 1}), pickle.dumps(read_metadata(copy)) + b"\0"):
        (copy / ".metadata").write_bytes(content)
        with pytest.raises(DamagedCheckpointError):
            read_dcp_metadata(copy)


def test_names_of_older_versions(copy: Path) -> None:
    """Until torch 2.2 the properties came from the sharded tensor's module."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    metadata = read_metadata(copy)
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = TensorProperties(dtype=entry.properties.dtype)
    write_metadata(copy, metadata)
    assert read_dcp_metadata(copy).tensors["model.columns"].dtype == "bfloat16"


def test_random_damage(copy: Path) -> None:
    data = (copy / ".metadata").read_bytes()
    generator = random.Random(1)
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(generator.randrange(1, 4)):
            damaged[generator.randrange(len(data))] = generator.randrange(256)
        (copy / ".metadata").write_bytes(damaged)
        with contextlib.suppress(DamagedCheckpointError, UnsafePickleError):
            read_dcp_metadata(copy)


def test_reading_needs_no_torch(saved: tuple[Path, Any]) -> None:
    code = (
        "import sys; from accel_fsdp_tools.formats.scan import scan_checkpoint; "
        "from accel_fsdp_tools.formats.dcp import read_dcp_metadata; "
        "m = read_dcp_metadata(sys.argv[1]); scan_checkpoint(sys.argv[1]); "
        "assert len(m.tensors) == 9, len(m.tensors); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(saved[0])], check=True, env={**os.environ, "PYTHONPATH": "."})


def test_paths_are_text(saved: tuple[Path, Any]) -> None:
    root = load_pickle((saved[0] / ".metadata").read_bytes(), where="m", allow=DCP_METADATA)
    assert root.get_attributes()["storage_meta"].get_attributes()["checkpoint_id"] == str(saved[0])
