"""Checkpoints that must not be read as if nothing were wrong: damaged, incomplete, ambiguous, or hostile."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_fsdp_tools.errors import (
    AccelFsdpError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    MismatchError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from accel_fsdp_tools.extents import Box, check_coverage
from accel_fsdp_tools.formats.reading import check_item, read_part
from accel_fsdp_tools.opening import open_checkpoint
from tests.attacks import BOMB_NAME, Bomb, read_metadata, replace_item, save_to_bytes, write_metadata
from tests.checkpoints import check_equal, get_bytes, get_model_layout, save_with_accelerate
from tests.harness import run_ranks
from tests.training import Setup

SAVES = [("sharded", "SHARDED_STATE_DICT", True), ("rank files", "SHARDED_STATE_DICT", False)]
BEYOND = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_with_accelerate, str(root / "2"), Setup(accumulation=1), SAVES, folder=root / "ranks 2")
    local = [("local", "LOCAL_STATE_DICT", True), ("rank files", "SHARDED_STATE_DICT", False)]
    run_ranks(save_with_accelerate, str(root / "1"), Setup(1, accumulation=1), local, folder=root / "ranks 1")
    return root


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / "copy"))


def _save_ranks(directory: Path, *states: dict[str, Any], metadata: dict[str, Any] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    for rank, state in enumerate(states):
        content = {"state_dict": state, "optimizer_state": {}, "metadata": metadata or {}}
        torch.save(content, directory / f"model_pt_rank_{rank}.pt")
    return directory


# -- plain tensors of several ranks ----------------------------------------------------------------------------------


def test_copies_on_every_rank_count_once(tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "norm": torch.ones(4), "step": torch.tensor(3)}
    tensors = open_checkpoint(_save_ranks(tmp_path / "a", state, state, state)).model.tensors
    check_equal(tensors, state)
    assert [(len(each.extents), len(each.replicas)) for each in tensors.values()] == [(1, 2)] * 3
    transposed = {"w": state["w"].t().contiguous().t(), "norm": torch.ones(9)[2:6], "step": torch.tensor(3)}
    check_equal(open_checkpoint(_save_ranks(tmp_path / "b", state, transposed)).model.tensors, state)
    one = open_checkpoint(_save_ranks(tmp_path / "one", {"norm": torch.ones(4)}))
    check_equal(one.model.tensors, {"norm": torch.ones(4)})
    gathered = open_checkpoint(_save_ranks(tmp_path / "gathered", state, {}, {}))
    check_equal(gathered.model.tensors, state)


@pytest.mark.parametrize("how", ["values", "shapes", "constant", "missing", "one element"])
def test_plain_shards_are_never_guessed(tmp_path: Path, how: str) -> None:
    """Case E09: nothing in the file says that these are shards, or of what; nor are they copies for sure."""
    first = {"w": torch.arange(8.0).reshape(2, 4), "norm": torch.ones(4)}
    second = {
        "values": {"w": torch.arange(8.0).reshape(2, 4) + 8, "norm": torch.ones(4)},
        "shapes": {"w": torch.arange(4.0).reshape(1, 4), "norm": torch.ones(4)},
        "constant": {"norm": torch.ones(4)},
        "missing": {"norm": torch.ones(4)},
        "one element": {"w": torch.arange(8.0).reshape(2, 4).index_put((torch.tensor(1),), torch.tensor(9.0))},
    }[how]
    if how == "constant":
        first = second
    directory = _save_ranks(tmp_path / "ranks", first, second)
    with pytest.raises(UnsupportedError, match=r"nothing is guessed.*SHARDED_STATE_DICT") as caught:
        open_checkpoint(directory)
    assert caught.value.fqn == ("norm" if how == "constant" else "w")
    if how == "constant":  # with the model's shapes it is known to be whole, or not to be
        check_equal(open_checkpoint(directory, layout={"norm": (4,)}).model.tensors, first)
        with pytest.raises(UnsupportedError, match="has not the shape of the model"):
            open_checkpoint(directory, layout={"norm": (8,)})


def test_plain_tensors_without_crc_are_compared(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        same = _save_ranks(tmp_path / "same", *[{"w": torch.arange(5.0)}] * 2)
        other = _save_ranks(tmp_path / "other", {"w": torch.arange(5.0)}, {"w": torch.arange(5.0).flip(0)})
    finally:
        torch.serialization.set_crc32_options(True)
    check_equal(open_checkpoint(same).model.tensors, {"w": torch.arange(5.0)})
    with pytest.raises(UnsupportedError, match="differs between ranks 0 and 1"):
        open_checkpoint(other)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "clean"),
    [
        ("module.a.w", "a.w"),
        ("_fsdp_wrapped_module.a.w", "a.w"),
        ("_orig_mod._fsdp_wrapped_module.a._checkpoint_wrapped_module.w", "a.w"),
        ("layers.0._checkpoint_wrapped_module._orig_mod.mlp.w", "layers.0.mlp.w"),
        ("module._orig_mod.module.w", "module.w"),
    ],
)
def test_prefixes_are_removed(tmp_path: Path, written: str, clean: str) -> None:
    """Cases E03, E04."""
    state = {written: torch.arange(3.0)}
    check_equal(open_checkpoint(_save_ranks(tmp_path, state, state)).model.tensors, {clean: torch.arange(3.0)})
    torch.save(state, tmp_path / "pytorch_model.bin")
    check_equal(open_checkpoint(tmp_path / "pytorch_model.bin").model.tensors, {clean: torch.arange(3.0)})


def test_a_module_called_module_keeps_its_name(tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(2), "head.w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    assert sorted(open_checkpoint(tmp_path).tensors) == ["head.w", "module.w"]


@pytest.mark.parametrize("names", [("a.w", "a._orig_mod.w"), ("module.w", "module._orig_mod.w")])
def test_names_that_collide(tmp_path: Path, names: tuple[str, str]) -> None:
    state = {name: torch.arange(3.0) for name in names}
    directory = _save_ranks(tmp_path, state, state)
    with pytest.raises(DamagedCheckpointError, match="without wrapper prefixes") as caught:
        open_checkpoint(directory)
    assert set(caught.value.actual) == set(names)


# -- files of ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["1/rank files", "2/rank files", "1/local"])
def test_missing_exchanged_and_stale_rank_files(copy: Callable[[str], Path], run: str) -> None:
    directory = copy(run)
    first, second = sorted(directory.glob("pytorch_model_fsdp*.bin"))
    layout = get_model_layout()
    reference = {
        name: bytes(read_part(each)) for name, each in open_checkpoint(directory, layout=layout).tensors.items()
    }
    stale = directory / second.name.replace("rank1", "rank2")
    shutil.copy(second, stale)  # of an earlier save with more ranks
    checkpoint = open_checkpoint(directory, layout=layout)
    assert checkpoint.model.leftovers == (str(stale),)
    assert {name: bytes(read_part(each)) for name, each in checkpoint.tensors.items()} == reference
    stale.unlink()
    shutil.move(first, directory / "aside")
    shutil.move(second, first)
    shutil.move(directory / "aside", second)
    with pytest.raises(DamagedCheckpointError, match="renamed or exchanged"):
        open_checkpoint(directory, layout=layout)
    for missing, rest in ((second, first), (first, second)):
        shutil.move(missing, directory / "aside")
        with pytest.raises(CheckpointIncompleteError, match="missing"):
            open_checkpoint(rest, layout=layout)
        shutil.move(directory / "aside", missing)


def test_names_that_state_two_world_sizes(tmp_path: Path) -> None:
    for name in ("model_world_size_2_rank_0.pt", "model_world_size_4_rank_1.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(DamagedCheckpointError, match="2 and 4 ranks"):
        open_checkpoint(tmp_path)
    (tmp_path / "model_world_size_4_rank_1.pt").unlink()
    with pytest.raises(CheckpointIncompleteError, match="that of rank 1 is missing"):
        open_checkpoint(tmp_path)


def test_one_ranks_shards_alone(copy: Callable[[str], Path]) -> None:
    directory = copy("2/rank files")
    shutil.copy(directory / "pytorch_model_fsdp_0_rank0.bin", directory / "weights.pt")
    with pytest.raises(UnsupportedError, match="one rank's shard"):
        open_checkpoint(directory / "weights.pt")


@pytest.mark.parametrize("change", ["missing", "shape", "unknown unit"])
def test_wrong_layouts(saved: Path, change: str) -> None:
    layout = get_model_layout()
    if change == "missing":
        del layout["model.norm.weight"]
    else:
        layout["model.norm.weight"] = (33,)
    with pytest.raises(MismatchError, match="layout"):
        open_checkpoint(saved / "1" / "local", layout=layout)
    with pytest.raises(UsageError, match="layout"):
        open_checkpoint(saved / "1" / "local", layout={"a": {"b": (1,)}})  # type: ignore[dict-item]


# -- DCP -------------------------------------------------------------------------------------------------------------


def test_holes_overlaps_and_chunks_outside(copy: Callable[[str], Path]) -> None:
    directory = copy("2/sharded") / "pytorch_model_fsdp_0"
    metadata = read_metadata(directory)
    entries = metadata.state_dict_metadata
    hole, double, beyond = (entries[f"model.{name}"] for name in ("lm_head.weight", "model.norm.weight", BEYOND))
    del hole.chunks[1]
    double.chunks.append(double.chunks[0])
    beyond.size = torch.Size([16, 32])
    write_metadata(directory, metadata)
    tensors = open_checkpoint(directory).tensors
    coverage = check_coverage(tensors["lm_head.weight"].shape, tensors["lm_head.weight"].parts)
    assert coverage.holes == (Box((51, 0), (50, 32)),)
    assert check_coverage(tensors["model.norm.weight"].shape, tensors["model.norm.weight"].parts).num_repeated == 16
    assert check_coverage(tensors[BEYOND].shape, tensors[BEYOND].parts).outside
    for each in ("lm_head.weight", "model.norm.weight"):
        with pytest.raises(DamagedCheckpointError, match="hole or overlap"):
            read_part(tensors[each])


def test_items_that_are_not_what_the_metadata_says(copy: Callable[[str], Path], saved: Path) -> None:
    directory = copy("2/sharded") / "pytorch_model_fsdp_0"
    for content in (torch.ones(16, dtype=torch.float64), torch.ones(17), [1, 2], {"a": torch.ones(16)}):
        replace_item(directory, "model.model.norm.weight", save_to_bytes(content))
        with pytest.raises(DamagedCheckpointError, match="the metadata describes"):
            read_part(open_checkpoint(directory).tensors["model.norm.weight"])
    (directory / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointIncompleteError, match="__1_0"):
        read_part(open_checkpoint(directory).tensors["lm_head.weight"])
    (directory / "__5_0.distcp").write_bytes(b"")
    assert open_checkpoint(directory).model.leftovers == (str(directory / "__5_0.distcp"),)
    (directory / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(directory)
    with pytest.raises(CheckpointIncompleteError, match="did not finish"):
        open_checkpoint(directory.parent)


def test_transforms_and_unknown_dtypes(copy: Callable[[str], Path]) -> None:
    directory = copy("2/sharded") / "pytorch_model_fsdp_0"
    metadata = read_metadata(directory)
    index, info = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(info, transform_descriptors=["zstd"])
    write_metadata(directory, metadata)
    with pytest.raises(UnsupportedError, match="zstd") as caught:
        open_checkpoint(directory)
    assert caught.value.fqn == index.fqn
    metadata.storage_data[index] = info
    metadata.state_dict_metadata[index.fqn].properties.dtype = torch.quint8
    write_metadata(directory, metadata)
    with pytest.raises((UnsupportedError, UnsafePickleError), match="quint8"):
        open_checkpoint(directory)


def test_a_flipped_bit_fails_the_stored_crc(copy: Callable[[str], Path]) -> None:
    directory = copy("2/sharded")
    extent = open_checkpoint(directory).model.tensors["lm_head.weight"].extents[1]
    assert extent.bytes.crc32 is not None
    assert check_item(extent.bytes) is True
    with Path(extent.bytes.path).open("r+b") as file:
        file.seek(extent.bytes.offset + extent.bytes.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 16]))
    assert check_item(extent.bytes) is False
    assert check_item(replace(extent.bytes, crc32=None)) is None
    with pytest.raises(DamagedCheckpointError, match="ends before"):
        check_item(replace(extent.bytes, offset=1 << 40))


# -- attacks and damage ----------------------------------------------------------------------------------------------


def _read_everything(path: Path) -> None:
    for tensor in open_checkpoint(path).tensors.values():
        read_part(tensor)


@pytest.mark.parametrize("place", ["full", "container", "rank file", "hand-rolled", "item", "index", "mesh"])
def test_nothing_is_executed(copy: Callable[[str], Path], tmp_path: Path, place: str) -> None:
    bomb: Any = Bomb(tmp_path / "canary")
    target = tmp_path / "attack"
    target.mkdir()
    if place == "full":
        torch.save({"w": torch.ones(2), "x": bomb}, target / "pytorch_model_fsdp.bin")
    elif place == "container":
        torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: bomb}}}, target / "pytorch_model.bin")
    elif place == "rank file":
        for rank in range(2):
            torch.save({"w": torch.ones(2), **({"x": bomb} if rank else {})}, target / f"optimizer_0_rank{rank}.bin")
    elif place == "hand-rolled":
        _save_ranks(target, {"w": torch.ones(2)}, {"w": torch.ones(2)}, metadata={"config": bomb})
    elif place == "index":
        torch.save({"w": bomb}, target / "part.bin")
        (target / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "part.bin"}}))
    elif place == "item":
        target = copy("2/sharded") / "pytorch_model_fsdp_0"
        replace_item(target, "model.model.norm.weight", save_to_bytes(bomb))
    else:
        target = copy("2/rank files")
        path = target / "pytorch_model_fsdp_0_rank0.bin"
        state = torch.load(path, weights_only=False)
        state["model.norm.weight"]._spec.mesh.surprise = bomb
        torch.save(state, path)
    with pytest.raises(UnsafePickleError) as caught:
        _read_everything(target)
    assert BOMB_NAME in str(caught.value.actual)
    assert not (tmp_path / "canary").exists()


def test_indexes_that_lead_elsewhere(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for files, error, message in (
        ({"a": "../a.safetensors"}, DamagedCheckpointError, "outside"),
        ({"a": "/etc/passwd"}, DamagedCheckpointError, "outside"),
        ({"a": "gone.safetensors"}, CheckpointIncompleteError, "gone"),
        ({"c": "a.safetensors"}, CheckpointIncompleteError, "lacks 'c'"),
        ({"a": "a.safetensors", "b": "b.safetensors"}, DamagedCheckpointError, "another file"),
    ):
        index.write_text(json.dumps({"weight_map": files}))
        with pytest.raises(error, match=message):
            open_checkpoint(tmp_path)
    for text in ("", "[]", '{"weight_map": 3}', '{"weight_map": {"a": ' + "[" * 100_000):
        index.write_text(text)
        with pytest.raises(DamagedCheckpointError, match="no index"):
            open_checkpoint(tmp_path)


def test_damaged_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    good = "{" + entry + "}"

    def write(header: str, data: bytes = bytes(8), size: int | None = None) -> None:
        path.write_bytes((len(header) if size is None else size).to_bytes(8, "little") + header.encode() + data)

    write(good)
    assert read_part(open_checkpoint(path).tensors["a"]) == bytes(8)
    for header, data, size in (
        (good, bytes(7), None),
        (good, bytes(8), 1 << 60),
        (good.replace("[2]", "[3]"), bytes(8), None),
        (good.replace("[2]", "[-2]"), bytes(8), None),
        (good.replace("[2]", "[2.0]"), bytes(8), None),
        (good.replace("[0, 8]", "[8, 0]"), bytes(8), None),
        ("{" + entry + "," + entry + "}", bytes(8), None),
        ("[]", b"", None),
        ("{", b"", None),
    ):
        write(header, data, size)
        with pytest.raises(DamagedCheckpointError):
            open_checkpoint(path)
    write(good.replace("F32", "X7"))
    with pytest.raises(UnsupportedError, match="X7"):
        open_checkpoint(path)
    write(good[:-1] + ', "__metadata__": {"DCP_SHARDING_INFO": "{}"}}')
    with pytest.raises(UnsupportedError, match="shards of one rank"):
        open_checkpoint(path)


def test_random_damage_raises_nothing_else(copy: Callable[[str], Path]) -> None:
    """Whatever is in the files: an error of the taxonomy, or a result."""
    generator = random.Random(3)
    directory = copy("2/rank files")
    path = directory / "pytorch_model_fsdp_0_rank1.bin"
    original = path.read_bytes()
    size = len(original)
    for _ in range(60):
        damaged = bytearray(original)
        for _ in range(generator.randrange(1, 4)):
            low = 0 if generator.random() < 0.5 else size - 12_000
            damaged[generator.randrange(low, min(low + 24_000, size))] = generator.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(AccelFsdpError):
            _read_everything(path)


# -- which checkpoint ------------------------------------------------------------------------------------------------


def test_directories_of_checkpoints(saved: Path, tmp_path: Path) -> None:
    """Case E05: one below is opened, several are listed in one line, hidden ones don't count."""
    root = tmp_path / "root"
    shutil.copytree(saved / "2" / "sharded", root / "checkpoints" / "checkpoint_0")
    shutil.copytree(saved / "2" / "sharded", root / ".partial" / "x")
    assert open_checkpoint(root).path == root / "checkpoints" / "checkpoint_0"
    for number in (10, 9, 100):
        shutil.copytree(saved / "2" / "sharded", root / f"checkpoint-{number}")
    with pytest.raises(UsageError, match="4 checkpoints; name one of them: checkpoint-9, checkpoint-10, ") as caught:
        open_checkpoint(root)
    assert "\n" not in str(caught.value)
    assert "checkpoints/checkpoint_0" in caught.value.actual


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match=r"notes\.txt"):
        open_checkpoint(tmp_path)
    with pytest.raises((DamagedCheckpointError, UnsupportedError)):
        open_checkpoint(tmp_path / "notes.txt")


def test_formats_that_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"before version 1\.6"):
        open_checkpoint(tmp_path / "old.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(UnsupportedError, match="not a state dict"):
        open_checkpoint(tmp_path / "list.pt")
    torch.save({"model": {"w": torch.ones(2)}, "state_dict": {"w": torch.ones(2)}}, tmp_path / "two.pt")
    with pytest.raises(UnsupportedError, match="two state dicts"):
        open_checkpoint(tmp_path / "two.pt")


def test_asking_for_sections(saved: Path) -> None:
    checkpoint = open_checkpoint(saved / "2" / "sharded" / "optimizer_0")
    with pytest.raises(UsageError, match="holds no model"):
        _ = checkpoint.model
    with pytest.raises(UsageError, match="no section 'model_1'"):
        checkpoint.get_section("model_1")
    assert get_bytes(torch.ones(0)) == b""
