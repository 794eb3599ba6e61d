"""Readers of every format, on files that the real writers made in the test, byte for byte against torch's own load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel_fsdp_tools.errors import UnsupportedError
from accel_fsdp_tools.extents import Box
from accel_fsdp_tools.formats.checkpoint import MODEL_COPY
from accel_fsdp_tools.formats.reading import read_array, read_part
from accel_fsdp_tools.manifest import DIRECTORY, ModelFacts, TensorFacts, write_manifest
from accel_fsdp_tools.opening import open_checkpoint
from tests.checkpoints import (
    DTYPES,
    check_equal,
    expect_mesh_tensors,
    flatten,
    get_bytes,
    get_model_layout,
    load_dcp,
    make_mesh_tensors,
    make_tensor,
    save_on_mesh,
    save_with_accelerate,
    save_with_tensor_parallelism,
)
from tests.harness import run_ranks
from tests.manifests import make_manifest
from tests.training import Setup

SAVES_1 = [
    ("sharded", "SHARDED_STATE_DICT", True),
    ("rank files", "SHARDED_STATE_DICT", False),
    ("local", "LOCAL_STATE_DICT", True),
    ("full", "FULL_STATE_DICT", True),
]
SAVES_2 = [save for save in SAVES_1 if save[0] != "local"]


@pytest.fixture(scope="module")
def accelerate_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("accelerate")
    for name, setup, saves in (
        ("fsdp1", Setup(fsdp_version=1, accumulation=1), SAVES_1),
        ("fsdp1 flat", Setup(fsdp_version=1, accumulation=1, use_orig_params=False), SAVES_1),
        ("fsdp2", Setup(accumulation=1), SAVES_2),
    ):
        run_ranks(save_with_accelerate, str(root / name), setup, saves, folder=root / f"ranks {name}")
    return root


@pytest.fixture(scope="module")
def mesh_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mesh")
    (root / "out").mkdir()
    run_ranks(save_on_mesh, str(root / "out"), world_size=4, folder=root / "ranks")
    return root / "out"


RUNS = [(run, save[0]) for run in ("fsdp1", "fsdp1 flat") for save in SAVES_1]
RUNS += [("fsdp2", save[0]) for save in SAVES_2]


@pytest.mark.parametrize(("run", "save"), RUNS)
def test_what_accelerate_writes(accelerate_root: Path, run: str, save: str) -> None:
    """Two ranks, vocabulary 101; every way of saving holds the state that the sharded one holds."""
    reference = accelerate_root / run / "sharded"
    checkpoint = open_checkpoint(accelerate_root / run / save, layout=get_model_layout())
    assert [section.name for section in checkpoint.sections] == ["model", "optimizer"]
    check_equal(checkpoint.model.tensors, load_dcp(reference / "pytorch_model_fsdp_0"))
    check_equal(checkpoint.optimizer.tensors, load_dcp(reference / "optimizer_0"))
    state = checkpoint.optimizer.tensors["state.lm_head.weight.exp_avg"]
    assert state.key_path == ("state", "lm_head.weight", "exp_avg")
    assert set(checkpoint.files) == {str(path) for path in (accelerate_root / run / save).rglob("*") if path.is_file()}
    if save == "full":
        loaded = torch.load(accelerate_root / run / save / "pytorch_model_fsdp.bin")
        check_equal(checkpoint.model.tensors, loaded)
        assert checkpoint.optimizer.values["param_groups"][0]["betas"] == (0.9, 0.999)
    if save == "sharded":
        assert "param_groups.0.betas" in checkpoint.optimizer.blobs


@pytest.mark.parametrize("run", ["fsdp1", "fsdp1 flat"])
def test_flat_parameters_need_a_layout(accelerate_root: Path, run: str) -> None:
    directory = accelerate_root / run / "local"
    with pytest.raises(UnsupportedError, match=r"names and shapes .* named_parameters.* SHARDED_STATE_DICT"):
        open_checkpoint(directory)
    checkpoint = open_checkpoint(directory, keep_flat=True)
    assert checkpoint.model.is_flat
    assert checkpoint.model.world_size == 2
    sizes = {name: tensor.numel for name, tensor in checkpoint.model.tensors.items()}
    assert sizes == {"_flat_param": 6496, "model.layers.0._flat_param": 9280, "model.layers.1._flat_param": 9280}
    assert len(checkpoint.optimizer.tensors) == 63


def test_flat_parameters_by_our_manifest(accelerate_root: Path, tmp_path: Path) -> None:
    """The manifest knows names, shapes and ties: nothing need be given."""
    directory = Path(shutil.copytree(accelerate_root / "fsdp1 flat" / "local", tmp_path / "step"))
    (directory / DIRECTORY).mkdir()
    shapes = {**get_model_layout(), "tied.weight": (101, 32)}
    tensors = tuple(TensorFacts(name, "float32", shape, True, "parameter") for name, shape in shapes.items())
    facts = ModelFacts("M", tensors, ties=(("lm_head.weight", "tied.weight"),))
    write_manifest(directory, replace(make_manifest(), models=(facts,)))
    reference = load_dcp(accelerate_root / "fsdp1 flat" / "sharded" / "pytorch_model_fsdp_0")
    for path in (directory, directory / "pytorch_model_fsdp_rank1.bin"):
        check_equal(open_checkpoint(path).model.tensors, reference)
    (directory / DIRECTORY / "manifest.json").write_text("{")
    with pytest.raises(UnsupportedError, match="named_parameters"):
        open_checkpoint(directory)


def test_inner_directories_and_files_stand_for_the_whole(accelerate_root: Path) -> None:
    """Case E05."""
    step = accelerate_root / "fsdp2" / "sharded"
    model = open_checkpoint(step).model.tensors
    for path in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__1_0.distcp"):
        checkpoint = open_checkpoint(step / path)
        assert [section.name for section in checkpoint.sections] == ["model"]
        assert checkpoint.tensors.keys() == model.keys()
    optimizer = open_checkpoint(step / "optimizer_0")
    assert [section.name for section in optimizer.sections] == ["optimizer"]
    assert "optimizer.state.lm_head.weight.step" in optimizer.tensors
    ranks = accelerate_root / "fsdp2" / "rank files"
    for name, kind in (("pytorch_model_fsdp_0_rank1.bin", "model"), ("optimizer_0_rank0.bin", "optimizer")):
        (section,) = open_checkpoint(ranks / name).sections
        assert (section.name, section.world_size, len(section.files)) == (kind, 2, 2)


def test_dcp_on_a_mesh(mesh_root: Path) -> None:
    checkpoint = open_checkpoint(mesh_root / "dcp")
    assert [section.name for section in checkpoint.sections] == ["model", "other"]
    check_equal(checkpoint.model.tensors, expect_mesh_tensors(checkpoint.model.tensors))
    assert checkpoint.model.tensors["one.over_four"].parts == (Box((0, 0), (1, 4)),)
    other = checkpoint.get_section("other")
    assert (list(other.tensors), list(other.blobs)) == (["extra.count"], ["extra.note"])
    assert read_array(other.tensors["extra.count"]) == 7


def test_dtensor_rank_files_on_a_mesh(mesh_root: Path) -> None:
    checkpoint = open_checkpoint(mesh_root / "ranks")
    tensors = checkpoint.model.tensors
    check_equal(tensors, expect_mesh_tensors(tensors))
    assert checkpoint.model.world_size == 4
    hsdp, buffer = tensors["rows.hsdp"], tensors["buffer"]
    assert [(len(each.extents), len(each.replicas)) for each in (hsdp, buffer)] == [(2, 2), (1, 3)]
    assert len(tensors["bf16.strided"].extents) == 4


def test_fsdp_over_tensor_parallelism(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run_ranks(save_with_tensor_parallelism, str(tmp_path / "out"), world_size=4, folder=tmp_path / "ranks")
    whole = torch.load(tmp_path / "out" / "whole.pt")
    check_equal(open_checkpoint(tmp_path / "out").model.tensors, whole)
    check_equal(open_checkpoint(tmp_path / "out" / "dcp").model.tensors, whole)


def test_hand_rolled_rank_files_with_placements(mesh_root: Path) -> None:
    """Cases E03, E09: names without `module.`; a norm of ones, sharded over 4, has its full length."""
    checkpoint = open_checkpoint(mesh_root / "hand")
    assert [section.name for section in checkpoint.sections] == ["model", "optimizer", "other"]
    check_equal(checkpoint.model.tensors, expect_mesh_tensors(checkpoint.model.tensors))
    assert checkpoint.model.tensors["norm.over_four"].shape == (16,)
    assert len(checkpoint.model.tensors["bf16.lone"].extents) == 4  # one local tensor, two boxes
    assert list(checkpoint.optimizer.tensors) == ["state.0.exp_avg", "state.0.step"]
    assert read_part(checkpoint.optimizer.tensors["state.0.exp_avg"]) == get_bytes(make_mesh_tensors()["rows"])
    assert checkpoint.get_section("other").values["metadata.world_size"] == 4


def test_state_dicts_nested_as_others_nest_them(tmp_path: Path) -> None:
    """`{"app": {"model", "optimizer"}}` (torch's tutorials), flat, and torchtitan's mixture."""
    import torch.distributed.checkpoint as dcp

    weight, moment = torch.ones(3, 2), torch.zeros(3, 2)
    nested = {"model": {"a.w": weight}, "optimizer": {"state": {"a.w": {"exp_avg": moment}}}}
    titan = {"a.w": weight, "optimizer": {"state.a.w.exp_avg": moment}, "train_state": {"step": torch.tensor(1)}}
    states = {"app": {"app": nested}, "flat": {"a.w": weight}, "llama": {"model.w": weight}, "titan": titan}
    for name, state in states.items():
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(state, checkpoint_id=tmp_path / name)
        checkpoint = open_checkpoint(tmp_path / name)
        check_equal(checkpoint.model.tensors, {"model.w" if name == "llama" else "a.w": weight})
        if name in ("app", "titan"):
            (tensor,) = checkpoint.optimizer.tensors.values()
            assert (tensor.fqn, tensor.key_path) == ("state.a.w.exp_avg", ("state", "a.w", "exp_avg"))
    assert list(open_checkpoint(tmp_path / "titan").get_section("other").tensors) == ["train_state.step"]


def _make_many_kinds() -> dict[str, torch.Tensor]:
    storage = make_tensor(torch.float32, 60)
    matrix = make_tensor(torch.float32, 33, 21)
    return {
        **{str(dtype): make_tensor(dtype, 3, 5) for dtype in DTYPES},
        **{f"{dtype} scalar": make_tensor(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)},
        "empty": torch.empty(0, 4),
        "tied one": matrix,
        "tied two": matrix,
        "transposed": matrix.t(),
        "view": storage[7:19].reshape(3, 4),
        "steps": storage[3::7],
        "columns": matrix[:, 2:9:3],
        "expanded": matrix[:1].expand(4, 21),
        "permuted": make_tensor(torch.int16, 4, 3, 5).permute(2, 0, 1),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def test_torch_save_and_dcp_of_every_dtype_and_stride(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = _make_many_kinds()
    torch.save(state, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    check_equal(checkpoint.tensors, torch.load(tmp_path / "pytorch_model.bin"))
    one, two = (checkpoint.tensors[name].extents[0].bytes for name in ("tied one", "tied two"))
    assert one == two
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    check_equal(open_checkpoint(tmp_path / "dcp").tensors, state)


def test_without_crcs(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(5)}, tmp_path / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    tensor = open_checkpoint(tmp_path).tensors["w"]
    assert tensor.extents[0].bytes.crc32 is None
    assert read_part(tensor) == get_bytes(torch.ones(5))


def test_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    supported = {str(dtype): make_tensor(dtype, 3, 4) for dtype in DTYPES if "complex" not in str(dtype)}
    state = {**supported, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 2), "complex": torch.ones(2) * 1j}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_equal(open_checkpoint(tmp_path).tensors, state)
    check_equal(open_checkpoint(tmp_path / "model.safetensors").tensors, state)


def test_what_transformers_writes(tmp_path: Path) -> None:
    from tests.models import build_tiny_llama

    model = build_tiny_llama()
    state = model.state_dict()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for path in (tmp_path / "one", tmp_path / "many", tmp_path / "many" / "model.safetensors.index.json"):
        check_equal(open_checkpoint(path).tensors, state)


def test_a_model_in_two_formats(accelerate_root: Path, tmp_path: Path) -> None:
    """The Trainer leaves `model.safetensors` beside what a resume needs: the latter is the model."""
    from safetensors.torch import save_file

    directory = Path(shutil.copytree(accelerate_root / "fsdp2" / "full", tmp_path / "checkpoint-3"))
    save_file(torch.load(directory / "pytorch_model_fsdp.bin"), directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    assert [section.name for section in checkpoint.sections] == ["model", "optimizer", "model_copy"]
    assert checkpoint.model.path.endswith("pytorch_model_fsdp.bin")
    copy = checkpoint.get_section("model_copy")
    assert copy.kind == MODEL_COPY
    check_equal(copy.tensors, torch.load(directory / "pytorch_model_fsdp.bin"))


def test_several_state_dicts_in_one_file(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": state, "optimizer": optimizer, "epoch": 3}, tmp_path / "checkpoint.pt")
    checkpoint = open_checkpoint(tmp_path / "checkpoint.pt")
    check_equal(checkpoint.model.tensors, state)
    check_equal(checkpoint.optimizer.tensors, flatten(optimizer))
    assert checkpoint.get_section("other").values == {"epoch": 3}
    torch.save(optimizer, tmp_path / "any.pt")
    assert open_checkpoint(tmp_path / "any.pt").optimizer.values["param_groups"] == [{"lr": 0.1, "params": [0]}]


def test_reading_needs_neither_torch_nor_numpy(accelerate_root: Path) -> None:
    code = (
        "import sys; from accel_fsdp_tools.opening import open_checkpoint; "
        "from accel_fsdp_tools.formats.reading import read_part; "
        "c = [open_checkpoint(path) for path in sys.argv[1:]]; "
        "assert all(len(read_part(t)) == t.size_bytes for each in c for t in each.tensors.values()); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    paths = [str(accelerate_root / "fsdp2" / name) for name in ("sharded", "rank files", "full")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, env={**os.environ, "PYTHONPATH": "."})
