"""A checkpoint is scanned before it is loaded: real ones pass, and code is found wherever a pickle can be."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from accel_fsdp_tools.errors import (
    AccelFsdpError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from accel_fsdp_tools.formats.scan import list_pickles, scan_checkpoint
from tests.attacks import BOMB_NAME, Bomb, Settings, read_metadata, replace_item, save_to_bytes, write_metadata
from tests.harness import run_ranks


class _Registered:
    def state_dict(self) -> dict[str, Any]:
        return {"settings": Settings(), "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class _Plain(_Registered):
    def state_dict(self) -> dict[str, Any]:
        return {"queue": torch.arange(5), "best": float("inf"), "names": {"a", "b"}}


def _save(root: str, fsdp_version: int) -> None:
    """Save one model in every form that Accelerate knows for this version of FSDP."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model, save_fsdp_optimizer

    from accel_fsdp_tools.cpu_fsdp import enable_cpu_fsdp
    from tests.models import LAYER_CLASS, build_tiny_llama

    enable_cpu_fsdp()
    arguments: dict[str, Any] = {"sync_module_states": False} if fsdp_version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=fsdp_version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER_CLASS],
        cpu_ram_efficient_loading=False,
        **arguments,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = build_tiny_llama()
    if fsdp_version == 1:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.MultiStepLR(optimizer.optimizer, [3, 3, 9]))
    tokens = torch.arange(8)[None]
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    scheduler.step()
    accelerator.register_for_checkpointing(_Registered(), _Plain())
    for name, (version, kind) in _KINDS.items():
        if version != fsdp_version:
            continue
        folder = str(Path(root) / name)
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type(kind)
        if "rank files" in name:
            save_fsdp_model(plugin, accelerator, model, folder, use_dcp=False)
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=False)
        else:
            accelerator.save_state(folder)
        accelerator.wait_for_everyone()


SETTINGS = ["tests.attacks.Settings", "tests.attacks.Settings.Inner"]
_KINDS = {
    "fsdp2 sharded": (2, "SHARDED_STATE_DICT"),
    "fsdp2 full": (2, "FULL_STATE_DICT"),
    "fsdp2 rank files": (2, "SHARDED_STATE_DICT"),
    "fsdp1 sharded": (1, "SHARDED_STATE_DICT"),
    "fsdp1 local": (1, "LOCAL_STATE_DICT"),
    "fsdp1 rank files": (1, "SHARDED_STATE_DICT"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("saved"), set()

    def get(name: str) -> Path:
        version = _KINDS[name][0]
        if version not in made:
            made.add(version)
            run_ranks(_save, str(root), version, folder=root / f"ranks {version}")
        return root / name

    return get


@pytest.fixture
def copy(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved("fsdp2 sharded"), tmp_path / "copy"))


@pytest.mark.parametrize("name", _KINDS)
def test_real_checkpoints_pass(saved: Callable[[str], Path], name: str) -> None:
    directory = saved(name)
    report = scan_checkpoint(directory, allow_objects=SETTINGS)
    assert report.ok
    assert report.files == len(list(list_pickles(directory)))
    assert report.pickles >= report.files
    assert report.to_dict()["pickles"] == report.pickles
    assert str(report.pickles) in str(report)


def test_every_file_that_accelerate_wrote_is_known(saved: Callable[[str], Path]) -> None:
    directory = saved("fsdp2 sharded")
    found = {str(path.relative_to(directory)): kind for path, kind in list_pickles(directory)}
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert set(found) == files
    assert found["custom_checkpoint_0.pkl"] == "registered object"
    assert found["random_states_1.pkl"] == found["scheduler.bin"] == "state"
    assert found["optimizer_0/.metadata"] == "dcp metadata"
    assert found["optimizer_0/__1_0.distcp"] == "dcp items"


def test_registered_objects_need_admission(saved: Callable[[str], Path]) -> None:
    directory = saved("fsdp2 sharded")
    with pytest.raises(UnsafePickleError) as caught:
        scan_checkpoint(directory)
    assert caught.value.actual == "tests.attacks.Settings"
    assert caught.value.path == str(directory / "custom_checkpoint_0.pkl")
    assert "allow_objects=['tests.attacks.Settings']" in str(caught.value)
    with pytest.raises(UnsafePickleError, match=r"allow_objects=\['tests\.attacks\.Settings\.Inner'\]"):
        scan_checkpoint(directory, allow_objects=SETTINGS[:1])


# -- code in every place where a pickle can be -----------------------------------------------------------------------


def _in_zip(bomb: Bomb) -> bytes:
    return save_to_bytes({"x": bomb})


def _in_legacy(bomb: Bomb) -> bytes:
    return save_to_bytes({"w": torch.ones(2), "x": bomb}, _use_new_zipfile_serialization=False)


def _in_pickle(bomb: Bomb) -> bytes:
    return pickle.dumps([1, bomb])


def _in_upper_case_entry(bomb: Bomb) -> bytes:
    """torch looks entries up without regard to case."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/DATA.PKL", pickle.dumps(bomb, 2))
        archive.writestr("archive/version", "3\n")
    return stream.getvalue()


FORMS = {"zip": _in_zip, "legacy": _in_legacy, "pickle": _in_pickle, "upper case": _in_upper_case_entry}
FILES = [
    *("scheduler.bin", "scheduler_1.bin", "random_states_0.pkl", "random_states_7.pkl", "custom_checkpoint_0.pkl"),
    *("custom_checkpoint_12.pkl", "scaler.pt", "sampler.bin", "dl_state_dict.bin", "dl_state_dict_1.bin"),
    *("optimizer.bin", "optimizer_1.bin", "pytorch_model.bin", "pytorch_model_1.bin", "pytorch_model_fsdp.bin"),
    *("pytorch_model_fsdp_1.bin", "pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_0_rank3.bin"),
    *("optimizer_0_rank0.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_1.pth"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FILES)
def test_code_in_a_file(tmp_path: Path, name: str, form: str) -> None:
    canary = tmp_path / "canary"
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / name).write_bytes(FORMS[form](Bomb(canary)))
    with pytest.raises(UnsafePickleError) as caught:
        scan_checkpoint(directory, allow_objects=SETTINGS)
    assert caught.value.actual == BOMB_NAME
    assert caught.value.path == str(directory / name)
    assert BOMB_NAME in str(caught.value)
    assert name in str(caught.value)
    assert not canary.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "fqn", ["optimizer.param_groups", "optimizer.state.model.norm.weight.exp_avg", "model.lm_head.weight"]
)
def test_code_in_an_item(copy: Path, tmp_path: Path, fqn: str, form: str) -> None:
    canary = tmp_path / "canary"
    folder = copy / ("optimizer_0" if fqn.startswith("optimizer") else "pytorch_model_fsdp_0")
    fqn = next(index.fqn for index in read_metadata(folder).storage_data if index.fqn.startswith(fqn))
    replace_item(folder, fqn, FORMS[form](Bomb(canary)))
    for directory in (copy, folder):
        with pytest.raises(UnsafePickleError) as caught:
            scan_checkpoint(directory, allow_objects=SETTINGS)
        assert caught.value.actual == BOMB_NAME
        assert fqn in str(caught.value)
    assert not canary.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrap", [bytes, bytearray, io.BytesIO])
def test_code_in_a_byte_string_of_an_item(copy: Path, tmp_path: Path, form: str, wrap: Any) -> None:
    canary = tmp_path / "canary"
    folder = copy / "optimizer_0"
    fqn = next(index.fqn for index in read_metadata(folder).storage_data if "param_groups" in index.fqn)
    inner = save_to_bytes([{"dataloader": (wrap(FORMS[form](Bomb(canary))),)}])
    replace_item(folder, fqn, save_to_bytes({"state": inner}))
    with pytest.raises(UnsafePickleError, match="in a byte string"):
        scan_checkpoint(copy, allow_objects=SETTINGS)
    assert not canary.exists()


def test_harmless_byte_strings_of_an_item(copy: Path) -> None:
    folder = copy / "optimizer_0"
    fqn = next(index.fqn for index in read_metadata(folder).storage_data if "param_groups" in index.fqn)
    values = [b"", b"\x80\x02", b"PK\x03\x04", b"\x80\x04 some bytes", pickle.dumps({"epoch": 1}), os.urandom(99)]
    replace_item(folder, fqn, save_to_bytes(values))
    scan_checkpoint(copy, allow_objects=SETTINGS)


def test_pickles_nested_without_end(copy: Path) -> None:
    folder = copy / "optimizer_0"
    fqn = next(index.fqn for index in read_metadata(folder).storage_data if "param_groups" in index.fqn)
    value: Any = 1
    for _ in range(9):
        value = pickle.dumps(value)
    replace_item(folder, fqn, save_to_bytes(value))
    with pytest.raises(UnsafePickleError, match="not checked further"):
        scan_checkpoint(copy, allow_objects=SETTINGS)


def test_code_in_the_metadata(copy: Path, tmp_path: Path) -> None:
    for folder in ("optimizer_0", "pytorch_model_fsdp_0"):
        metadata = read_metadata(copy / folder)
        metadata.planner_data = Bomb(tmp_path / "canary")
        write_metadata(copy / folder, metadata)
        with pytest.raises(UnsafePickleError, match=BOMB_NAME):
            scan_checkpoint(copy, allow_objects=SETTINGS)
        shutil.rmtree(copy / folder)
    assert not (tmp_path / "canary").exists()


def test_code_in_items_that_dcp_itself_wrote(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(3), "x": Bomb(tmp_path / "canary")}, checkpoint_id=tmp_path / "app")
    with pytest.raises(UnsafePickleError, match="item 'x'"):
        scan_checkpoint(tmp_path / "app")
    assert not (tmp_path / "canary").exists()


def test_the_attacks_are_real(copy: Path, tmp_path: Path) -> None:
    """The same files do run code when the usual loaders open them, so the tests above test something."""
    for index, form in enumerate(("zip", "legacy", "pickle", "upper case")):
        canary = tmp_path / f"canary_{index}"
        try:
            torch.load(io.BytesIO(FORMS[form](Bomb(canary))), weights_only=False)
        except RuntimeError:
            assert form in ("pickle", "upper case")
        assert canary.exists() or form == "upper case"
    canary = tmp_path / "item"
    replace_item(copy / "optimizer_0", "optimizer.param_groups.0.lr", _in_zip(Bomb(canary)))
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"optimizer.param_groups.0.lr": 0.0}, checkpoint_id=copy / "optimizer_0")
    assert canary.exists()


# -- archives whose loading runs code without any pickle -------------------------------------------------------------


def test_torchscript_and_tar_archives(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/constants.pkl", b"\x80\x02).")
    (tmp_path / "custom_checkpoint_0.pkl").write_bytes(stream.getvalue())
    with pytest.raises(UnsafePickleError, match="TorchScript"):
        scan_checkpoint(tmp_path)
    path = tmp_path / "custom_checkpoint_0.pkl"
    with tarfile.open(path, "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"\x80\x02N."))
    with pytest.raises(UnsafePickleError, match="tar"):
        scan_checkpoint(tmp_path)


def test_a_file_that_is_a_harmless_pickle_and_a_tar(tmp_path: Path) -> None:
    """torch.load looks for a tar first; the pickle at the file's start is only a disguise."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        # The member's name is the pickle of a byte string that swallows the rest of the header.
        info = tarfile.TarInfo(os.fsdecode(b"\x80\x02B\xff\x01"))
        tar.addfile(info)
    data = stream.getvalue()
    (tmp_path / "scheduler.bin").write_bytes(data)
    assert tarfile.is_tarfile(tmp_path / "scheduler.bin")
    with pytest.raises(UnsafePickleError, match="tar"):
        scan_checkpoint(tmp_path)


# -- incomplete, damaged, odd ----------------------------------------------------------------------------------------


def test_missing_parts(copy: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        scan_checkpoint(copy / "absent")
    (copy / "optimizer_0" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointIncompleteError, match="__1_0"):
        scan_checkpoint(copy, allow_objects=SETTINGS)
    (copy / "optimizer_0" / ".metadata").unlink()
    with pytest.raises(CheckpointIncompleteError, match=r"\.metadata"):
        scan_checkpoint(copy, allow_objects=SETTINGS)


def test_items_beyond_the_end_and_transformed_items(copy: Path) -> None:
    path = copy / "pytorch_model_fsdp_0" / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedCheckpointError, match="another save"):
        scan_checkpoint(copy, allow_objects=SETTINGS)
    path.write_bytes(data)
    metadata = read_metadata(path.parent)
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]
    write_metadata(path.parent, metadata)
    with pytest.raises(UnsupportedError, match=r"stream\.zstd"):
        scan_checkpoint(copy, allow_objects=SETTINGS)


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 2000, pickle.dumps(1) + b"more"])
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "scheduler.bin").write_bytes(content)
    with pytest.raises(DamagedCheckpointError) as caught:
        scan_checkpoint(tmp_path)
    assert caught.value.path == str(tmp_path / "scheduler.bin")


def test_files_that_no_load_opens_are_left_alone(copy: Path, tmp_path: Path) -> None:
    for name in ("training_args.bin", "notes.pkl", "custom_checkpoint_x.pkl", "model.safetensors"):
        (copy / name).write_bytes(_in_zip(Bomb(tmp_path / "canary")))
    scan_checkpoint(copy, allow_objects=SETTINGS)


@pytest.mark.parametrize(
    "arguments",
    [{"share": (2, 2)}, {"share": (-1, 2)}, {"allow_objects": "my.Class"}, {"allow_objects": ["os.system"]}],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        scan_checkpoint(tmp_path, **arguments)


def test_random_damage_to_any_file(copy: Path) -> None:
    generator = random.Random(2)
    files = [path for path in sorted(copy.rglob("*")) if path.is_file() and path.stat().st_size]
    for _ in range(150):
        path = generator.choice(files)
        data = path.read_bytes()
        damaged = bytearray(data)
        for _ in range(generator.randrange(1, 30)):
            damaged[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(damaged[: generator.randrange(1, len(data))] if generator.random() < 0.3 else damaged)
        try:
            scan_checkpoint(copy, allow_objects=SETTINGS)
        except AccelFsdpError:
            pass
        finally:
            path.write_bytes(data)


# -- dividing the work, and speed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_cover_everything(copy: Path, tmp_path: Path, world_size: int) -> None:
    """Code in any one file is found by at least one rank, whatever the number of ranks."""
    torch.save(torch.ones(2), copy / "pytorch_model_fsdp_0_rank5.bin")
    for path, _ in list(list_pickles(copy)):
        if path.suffix == ".metadata" or path.name == ".metadata" or path.suffix == ".distcp":
            continue
        data = path.read_bytes()
        path.write_bytes(_in_zip(Bomb(tmp_path / "canary")))
        refused = 0
        for rank in range(world_size):
            try:
                scan_checkpoint(copy, allow_objects=SETTINGS, share=(rank, world_size))
            except UnsafePickleError:
                refused += 1
        path.write_bytes(data)
        assert refused, path
    total = scan_checkpoint(copy, allow_objects=SETTINGS)
    parts = [scan_checkpoint(copy, allow_objects=SETTINGS, share=(rank, world_size)) for rank in range(world_size)]
    assert sum(part.files for part in parts) >= total.files
    for folder in ("optimizer_0", "pytorch_model_fsdp_0"):
        whole = scan_checkpoint(copy / folder).pickles - 1
        pieces = [scan_checkpoint(copy / folder, share=(rank, world_size)) for rank in range(world_size)]
        assert sum(piece.pickles - 1 for piece in pieces) == whole


def test_three_thousand_tensors_take_about_a_second(tmp_path: Path) -> None:
    state = {f"model.layers.{index}.weight": torch.full((8, index % 7 + 1), 1.0) for index in range(3000)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": state}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0")
    started = time.process_time()
    report = scan_checkpoint(tmp_path)
    assert report.pickles == 3001
    assert time.process_time() - started < 2.5  # 0.4 s on an idle core


def test_big_payloads_are_not_read(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(50_000_000, dtype=torch.uint8)}, tmp_path / "pytorch_model.bin")
    code = (
        "import sys, resource; from accel_fsdp_tools.formats.scan import scan_checkpoint; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; scan_checkpoint(sys.argv[1]); "
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8000"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env={**os.environ, "PYTHONPATH": "."})
