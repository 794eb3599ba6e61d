"""`verify_checkpoint`: what real writers write verifies, and every fault is found and named."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_fsdp_tools import open_checkpoint, verify_checkpoint
from accel_fsdp_tools.errors import CheckpointNotFoundError, UsageError
from accel_fsdp_tools.extents import get_whole
from accel_fsdp_tools.files import list_files, seal_files
from accel_fsdp_tools.findings import Finding, Severity, VerifyReport
from accel_fsdp_tools.fingerprint import Fingerprint, combine, fingerprint_tensor
from accel_fsdp_tools.formats.reading import read_part
from accel_fsdp_tools.formats.zips import open_torch_zip, open_window
from accel_fsdp_tools.manifest import (
    DIRECTORY,
    MANIFEST_PATH,
    ModelFacts,
    OptimizerFacts,
    TensorFacts,
    write_manifest,
)
from tests.attacks import BOMB_NAME, Bomb, read_metadata, replace_item, save_to_bytes, write_metadata
from tests.harness import run_ranks
from tests.manifests import edit_manifest, flip_bit, make_manifest, reseal
from tests.training import Setup, build, train_batch

ROOT = Path(__file__).parent.parent
SHARDED = Setup(num_items=24, accumulation=1, num_layers=1)
FULL = dataclasses.replace(SHARDED, fsdp_version=1, state_dict_type="FULL_STATE_DICT")
FLAT = dataclasses.replace(SHARDED, fsdp_version=1, use_orig_params=False, mixed_precision="bf16", tie=True)

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
EMBEDDING = "model.embed_tokens.weight"


class Registered:
    """What a user registers for checkpointing."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded here")


def _save(folder: str, setup: Setup) -> dict[str, Any]:
    """Save `early` and `late` with us and `plain` with Accelerate; return the fingerprints of `early`'s memory."""
    from accel_fsdp_tools import save_state, track
    from accel_fsdp_tools.live_fingerprints import fingerprint_accelerator

    objects = build(setup, seed=1)
    accelerator = objects.accelerator
    accelerator.register_for_checkpointing(Registered())
    track(accelerator)
    fingerprints: dict[str, Any] = {}
    for number, batch in enumerate(objects.loader):
        with accelerator.accumulate(objects.model):
            train_batch(objects, batch)
        if number == 1:
            save_state(accelerator, f"{folder}/early")
            accelerator.save_state(f"{folder}/plain")
            live = fingerprint_accelerator(accelerator)
            fingerprints["model"] = {name: str(each) for name, each in live.models[0].items()}
            fingerprints["optimizer"] = {name: str(each) for name, each in live.optimizers[0].items()}
        if number == 2:
            break
    save_state(accelerator, f"{folder}/late")
    return fingerprints


def _record(path: Path, fingerprints: dict[str, Any]) -> None:
    """Put fingerprints into a manifest, as a save that records them does."""

    def record(raw: dict[str, Any]) -> None:
        for tensor in raw["models"][0]["tensors"]:
            tensor["fingerprint"] = fingerprints["model"][tensor["fqn"]]
        raw["optimizers"][0]["fingerprints"] = fingerprints["optimizer"]

    edit_manifest(path, record)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of three kinds of run, each with `early`, `late` and `plain` in it."""
    folder = tmp_path_factory.mktemp("made")
    setups = {"sharded": SHARDED, "full": FULL, "flat": FLAT}
    with ThreadPoolExecutor(len(setups)) as pool:  # most of a run is waiting for each other
        runs = {
            name: pool.submit(run_ranks, _save, str(folder / name), setup, folder=folder / f"{name}-ranks")
            for name, setup in setups.items()
        }
    for name, run in runs.items():
        _record(folder / name / "early", run.result()[0])
    return {name: folder / name for name in setups}


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Copies one of the made checkpoints to where it may be damaged."""

    def make(kind: str = "sharded", which: str = "early") -> Path:
        target = tmp_path / f"{kind}-{which}"
        shutil.copytree(made[kind] / which, target)
        return target

    return make


def _find(report: VerifyReport, code: str, severity: Severity = Severity.FAILURE) -> list[Finding]:
    found = [each for each in report.findings if each.code == code and each.severity is severity]
    assert found, f"no {severity.value} {code!r} in {report}"
    return found


def _codes(report: VerifyReport, severity: Severity = Severity.FAILURE) -> set[str]:
    return {each.code for each in report.findings if each.severity is severity}


# -- what is good is good --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sharded", "full", "flat"])
@pytest.mark.parametrize("which", ["early", "late", "plain"])
def test_what_real_writers_write_verifies(made: dict[str, Path], kind: str, which: str) -> None:
    report = verify_checkpoint(made[kind] / which, scan=True, fingerprints=which == "early")
    assert report.ok, str(report)
    assert _codes(report, Severity.HINT) <= {"zeros"}, str(report)
    assert report.counts["crcs"] > 30
    assert report.counts["tensors"] == report.counts["scanned tensors"]
    if which == "early":
        assert report.counts["fingerprints"] >= report.counts["tensors"], "optimizer options are compared, too"
        assert _codes(report, Severity.NOTE) == set()
    if which == "plain":
        assert "no_manifest" in _codes(report, Severity.NOTE)
    else:
        assert report.counts["checksums"] == report.counts["files"] - 1


def test_a_renamed_checkpoint_is_as_good(copy: Callable[..., Path], tmp_path: Path) -> None:
    path = copy().rename(tmp_path / "another name")
    assert verify_checkpoint(path).ok


def test_parts_of_a_checkpoint_and_single_files_can_be_given(made: dict[str, Path]) -> None:
    for path in (
        made["sharded"] / "plain" / MODEL,
        made["sharded"] / "plain" / OPTIMIZER / ".metadata",
        made["full"] / "plain" / "pytorch_model_fsdp.bin",
    ):
        report = verify_checkpoint(path)
        assert report.ok, str(report)
        assert report.counts["tensors"] >= 12


def test_progress_ends_at_the_total(made: dict[str, Path]) -> None:
    for crcs in (True, False):
        for which in ("early", "plain"):
            done: list[int] = []
            totals: list[int] = []
            verify_checkpoint(
                made["sharded"] / which,
                crcs=crcs,
                progress=lambda now, total, done=done, totals=totals: (done.append(now), totals.append(total)),
            )
            assert done == sorted(done)
            assert done[-1] == totals[-1] > 100_000


class _Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(8) + index
        return {"input_ids": tokens, "labels": tokens}


def _train_with_trainer(folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    from accel_fsdp_tools import enable_cpu_fsdp
    from tests.models import LAYER_CLASS, build_tiny_llama

    enable_cpu_fsdp()
    config = {
        "fsdp_version": 2,
        "transformer_layer_cls_to_wrap": [LAYER_CLASS],
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    arguments = TrainingArguments(
        folder,
        max_steps=1,
        save_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config=config,
    )
    Trainer(build_tiny_llama(num_layers=1), arguments, train_dataset=_Sequences()).train()


def test_what_the_trainer_writes_verifies_and_a_flipped_bit_is_found(tmp_path: Path) -> None:
    environment = {"ACCELERATE_USE_FSDP": "true"}
    run_ranks(_train_with_trainer, str(tmp_path / "t"), folder=tmp_path / "r", environment=environment)
    path = tmp_path / "t" / "checkpoint-1"
    report = verify_checkpoint(path, scan=True)
    assert report.ok, str(report)
    assert report.counts["tensors"] == 48
    for name in ("rng_state_1.pth", "scheduler.pt", f"{OPTIMIZER}/__1_0.distcp"):
        flip_bit(path / name, 120)  # in data.pkl
    report = verify_checkpoint(path)
    assert {each.path for each in _find(report, "crc")} == {
        "rng_state_1.pth",
        "scheduler.pt",
        f"{OPTIMIZER}/__1_0.distcp",
    }


# -- flipped bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_flipped_bit_anywhere_in_any_file_is_found(copy: Callable[..., Path], kind: str) -> None:
    # One bit in every file at once: the finding for each file has to come from that file's own bytes.
    path = copy(kind)
    names = [name for name in list_files(path) if name != MANIFEST_PATH]
    generator = random.Random(kind)
    for _ in range(200):
        flips = [
            (path / name, generator.randrange((path / name).stat().st_size), generator.randrange(8)) for name in names
        ]
        for flip in flips:
            flip_bit(*flip)
        report = verify_checkpoint(path)
        assert {each.path for each in _find(report, "checksum")} == set(names), flips
        for flip in flips:
            flip_bit(*flip)
    assert verify_checkpoint(path).ok


def _list_protected(path: Path, start: int, length: int) -> Iterator[range]:
    """Yield the bytes of a file that a zip's CRCs cover."""
    with open_window(path) as window:
        archive = open_torch_zip(window.narrow(start, length, "item"))
        for name in archive.entries:
            payload = archive.locate(name)
            yield range(payload.offset, payload.offset + payload.size_bytes)


def _save_small(directory: Path) -> dict[str, torch.Tensor]:
    """Save a small state dict with torch alone, in one process."""
    import torch.distributed.checkpoint as dcp

    generator = torch.Generator().manual_seed(0)
    state = {
        "weight": torch.randn(20, 30, generator=generator),
        "transposed": torch.randn(12, 7, generator=generator).t(),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(5),
        "empty": torch.zeros(0, 3),
    }
    dcp.save({"model": state, "note": "hello"}, checkpoint_id=str(directory), no_dist=True)
    return state


def _read(path: Path) -> dict[str, bytes]:
    return {name: bytes(read_part(tensor)) for name, tensor in open_checkpoint(path).tensors.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_without_a_manifest_crcs_find_every_bit_of_tensors_and_pickles(tmp_path: Path) -> None:
    _save_small(tmp_path / "c")
    assert verify_checkpoint(tmp_path / "c").ok
    file = next((tmp_path / "c").glob("*.distcp"))
    protected: list[range] = []
    for info in read_metadata(tmp_path / "c").storage_data.values():
        protected += _list_protected(file, info.offset, info.length)
    covered = {position for each in protected for position in each}
    generator = random.Random(0)
    for position in generator.sample(sorted(covered), 200):
        bit = generator.randrange(8)
        flip_bit(file, position, bit)
        assert _find(verify_checkpoint(tmp_path / "c"), "crc")[0].path == file.name
        flip_bit(file, position, bit)
    good = _read(tmp_path / "c")
    # The rest is alignment, names, times and flags: not covered by a CRC, and not what a tensor is made of.
    for position in generator.sample(sorted(set(range(file.stat().st_size)) - covered), 100):
        flip_bit(file, position)
        if verify_checkpoint(tmp_path / "c").ok:
            assert _read(tmp_path / "c") == good
        flip_bit(file, position)
    assert verify_checkpoint(tmp_path / "c").ok


def test_without_a_manifest_the_damaged_tensor_is_named(copy: Callable[..., Path]) -> None:
    path = copy("full", "plain")
    with open_window(path / "optimizer.bin") as window:
        archive = open_torch_zip(window)
        offset = max((archive.locate(name) for name in archive.entries), key=lambda each: each.size_bytes).offset
    flip_bit(path / "optimizer.bin", offset + 5)
    (finding,) = _find(verify_checkpoint(path), "crc")
    assert finding.path == "optimizer.bin"
    assert finding.fqn is not None
    assert finding.fqn.startswith("state.")
    assert finding.fqn in finding.message


def test_a_flipped_bit_in_dcps_metadata_never_raises(copy: Callable[..., Path]) -> None:
    path = copy("sharded", "plain")
    file = path / MODEL / ".metadata"
    good = file.read_bytes()
    generator = random.Random(3)
    found = 0
    for _ in range(60):
        file.write_bytes(good)
        flip_bit(file, generator.randrange(len(good)), generator.randrange(8))
        found += not verify_checkpoint(path).ok
    assert found > 40, "nothing protects it without a manifest, but little of it can change without a contradiction"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_crcs_that_were_not_computed_are_a_note(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        _save_small(tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify_checkpoint(tmp_path / "c")
    assert report.ok, str(report)
    assert "no_crc" in _codes(report, Severity.NOTE)
    assert "unprotected" in _codes(report, Severity.NOTE)


# -- faults that leave every file readable, with a manifest that was adapted to them as well ---------------------------

Fault = Callable[[Path, dict[str, Path]], None]
FAULTS: dict[str, tuple[Fault, str, set[str], str]] = {}
"""By name: what to do, the code where the manifest is as it was, those where it was adapted, a text of a message.

"changed" stands for a size or checksum."""


def _fault(name: str, *, code: str, adapted: set[str], text: str = "") -> Callable[[Fault], Fault]:
    def register(function: Fault) -> Fault:
        FAULTS[name] = (function, code, adapted, text)
        return function

    return register


@_fault("payload", code="changed", adapted={"crc", "fingerprint"}, text=EMBEDDING)
def _flip_payload(path: Path, made: dict[str, Path]) -> None:
    infos = read_metadata(path / MODEL).storage_data
    info = next(info for index, info in infos.items() if index.fqn.endswith(EMBEDDING))
    start = max(_list_protected(path / MODEL / info.relative_path, info.offset, info.length), key=len).start
    flip_bit(path / MODEL / info.relative_path, start + 1000)


@_fault("truncated", code="changed", adapted={"damaged", "fingerprint"})
def _truncate(path: Path, made: dict[str, Path]) -> None:
    file = path / MODEL / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 100)


@_fault("ranks exchanged", code="changed", adapted={"damaged"}, text=EMBEDDING)
def _exchange(path: Path, made: dict[str, Path]) -> None:
    zero, one = path / MODEL / "__0_0.distcp", path / MODEL / "__1_0.distcp"
    zero.rename(path / "x")
    one.rename(zero)
    (path / "x").rename(one)


@_fault("shard of another step", code="changed", adapted={"fingerprint"})
def _take_shard_of_another_step(path: Path, made: dict[str, Path]) -> None:
    shutil.copy(made["sharded"] / "late" / MODEL / "__1_0.distcp", path / MODEL)


@_fault("chunk removed", code="changed", adapted={"hole", "fingerprint"}, text="[51:101, 0:32]")
def _remove_chunk(path: Path, made: dict[str, Path]) -> None:
    metadata = read_metadata(path / MODEL)
    key = next(name for name in metadata.state_dict_metadata if name.endswith(EMBEDDING))
    removed = metadata.state_dict_metadata[key].chunks.pop()
    metadata.storage_data = {
        index: info
        for index, info in metadata.storage_data.items()
        if (index.fqn, index.offset) != (key, removed.offsets)
    }
    write_metadata(path / MODEL, metadata)


@_fault("chunk twice", code="changed", adapted={"overlap", "fingerprint"})
def _repeat_chunk(path: Path, made: dict[str, Path]) -> None:
    metadata = read_metadata(path / MODEL)
    key = next(name for name in metadata.state_dict_metadata if name.endswith(EMBEDDING))
    metadata.state_dict_metadata[key].chunks.append(metadata.state_dict_metadata[key].chunks[0])
    write_metadata(path / MODEL, metadata)


@_fault("chunk outside", code="changed", adapted={"outside", "shape"})
def _shrink_tensor(path: Path, made: dict[str, Path]) -> None:
    metadata = read_metadata(path / MODEL)
    key = next(name for name in metadata.state_dict_metadata if name.endswith(EMBEDDING))
    metadata.state_dict_metadata[key].size = torch.Size((90, 32))
    write_metadata(path / MODEL, metadata)


@_fault("file missing", code="missing_file", adapted={"incomplete"}, text="scheduler")
def _remove_scheduler(path: Path, made: dict[str, Path]) -> None:
    (path / "scheduler.bin").unlink()


@_fault("shard missing", code="missing_file", adapted={"missing_file"}, text="__1_0.distcp")
def _remove_shard(path: Path, made: dict[str, Path]) -> None:
    (path / OPTIMIZER / "__1_0.distcp").unlink()


@_fault("rank's file missing", code="missing_file", adapted={"missing_file", "incomplete"}, text="rng_rank_00001")
def _remove_rank_file(path: Path, made: dict[str, Path]) -> None:
    (path / DIRECTORY / "rng_rank_00001.safetensors").unlink()


@_fault("ranks' random states exchanged", code="changed", adapted={"rank_state"}, text="rank 1")
def _exchange_rank_states(path: Path, made: dict[str, Path]) -> None:
    folder = path / DIRECTORY
    (folder / "rng_rank_00000.safetensors").rename(folder / "x")
    (folder / "rng_rank_00001.safetensors").rename(folder / "rng_rank_00000.safetensors")
    (folder / "x").rename(folder / "rng_rank_00001.safetensors")


@_fault("progress damaged", code="changed", adapted={"rank_state"}, text="progress_rank_00000")
def _damage_progress(path: Path, made: dict[str, Path]) -> None:
    (path / DIRECTORY / "progress_rank_00000.json").write_text('{"format": "accel_fsdp_tools.progress", "rank": 0')


@_fault("stale shard", code="unlisted", adapted={"stale"}, text="__2_0.distcp")
def _add_stale_shard(path: Path, made: dict[str, Path]) -> None:
    shutil.copy(path / MODEL / "__1_0.distcp", path / MODEL / "__2_0.distcp")


@_fault("stale random states", code="unlisted", adapted={"stale"}, text="random_states_2")
def _add_stale_random_states(path: Path, made: dict[str, Path]) -> None:
    shutil.copy(path / "random_states_1.pkl", path / "random_states_2.pkl")


@_fault("optimizer of another model", code="changed", adapted={"parameters"}, text="q_proj")
def _rename_parameter(path: Path, made: dict[str, Path]) -> None:
    file = path / OPTIMIZER / ".metadata"
    data = file.read_bytes()
    assert b"self_attn.q_proj" in data
    file.write_bytes(data.replace(b"self_attn.q_proj", b"self_attn.x_proj"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(copy: Callable[..., Path], made: dict[str, Path], name: str) -> None:
    damage, code, adapted, text = FAULTS[name]
    path = copy()
    damage(path, made)
    report = verify_checkpoint(path)
    assert not report.ok
    assert (code == "changed" and {"checksum", "size"} & _codes(report)) or code in _codes(report), str(report)
    reseal(path)
    report = verify_checkpoint(path, fingerprints=True)
    assert not report.ok
    assert adapted & _codes(report) == adapted, str(report)
    assert any(text in str(each.to_dict()) for each in report.failures), str(report)
    assert not {"checksum", "size", "unlisted"} & _codes(report)


def test_what_a_stranger_left_is_a_hint_and_what_a_load_would_open_a_failure(copy: Callable[..., Path]) -> None:
    path = copy()
    (path / "notes.txt").write_text("mine")
    report = verify_checkpoint(path)
    assert report.ok
    assert [each.path for each in _find(report, "unlisted", Severity.HINT)] == ["notes.txt"]
    torch.save({}, path / "custom_checkpoint_1.pkl")
    report = verify_checkpoint(path)
    assert [each.path for each in _find(report, "unlisted")] == ["custom_checkpoint_1.pkl"]


# -- manifests that are missing, newer, or contradict the files --------------------------------------------------------


def test_a_checkpoint_without_its_manifest_is_unfinished(copy: Callable[..., Path], tmp_path: Path) -> None:
    path = copy()
    partial = tmp_path / "root" / ".partial" / "run" / "step_1"
    shutil.copytree(path, partial)
    assert _codes(verify_checkpoint(partial)) == {"unfinished"}
    (path / MANIFEST_PATH).unlink()
    assert _codes(verify_checkpoint(path)) == {"manifest"}


FACTS = dataclasses.asdict(TensorFacts("", "float32", (2,), True, "parameter"))
NOTHING = str(Fingerprint())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda raw: raw.update(version=99), "manifest_version"),
        (lambda raw: raw.update(version="x"), "manifest"),
        (lambda raw: raw.pop("topology"), "manifest"),
        (lambda raw: raw["files"].append({"path": "../x", "size_bytes": 1, "checksum": ""}), "manifest"),
        (lambda raw: raw["models"][0]["tensors"][0].update(dtype="bfloat16"), "dtype"),
        (lambda raw: raw["models"][0]["tensors"][0].update(shape=[32, 101]), "shape"),
        (lambda raw: raw["models"][0]["tensors"].pop(), "extra_tensor"),
        (
            lambda raw: raw["models"][0]["tensors"].append({**raw["models"][0]["tensors"][0], "fqn": "x"}),
            "missing_tensor",
        ),
        (lambda raw: raw["models"][0]["tensors"][0].update(fingerprint="1:0:0:0"), "manifest"),
        (lambda raw: raw.update(num_schedulers=2), "incomplete"),
        (lambda raw: raw["accelerate"].update(has_scaler=True), "incomplete"),
        (lambda raw: raw["topology"].update(world_size=3), "missing_file"),
        (lambda raw: raw["optimizers"][0]["fingerprints"].update({"param_groups.0.lr": NOTHING}), "fingerprint"),
    ],
)
def test_a_manifest_that_differs_from_the_files_is_found(
    copy: Callable[..., Path], change: Callable[[dict[str, Any]], None], code: str
) -> None:
    path = copy()
    edit_manifest(path, change)
    assert code in _codes(verify_checkpoint(path, fingerprints=True))


@pytest.mark.parametrize("num_flips", [50, pytest.param(200, marks=pytest.mark.matrix)])
def test_a_flipped_bit_in_the_manifest_is_found(copy: Callable[..., Path], num_flips: int) -> None:
    path = copy()
    file = path / MANIFEST_PATH
    good = file.read_bytes()
    generator = random.Random(4)
    for _ in range(num_flips):
        flip = generator.randrange(len(good)), generator.randrange(8)
        flip_bit(file, *flip)
        report = verify_checkpoint(path)
        # The case of an exponent or an escape: another byte that says the same.
        assert not report.ok or json.loads(file.read_bytes()) == json.loads(good), flip
        flip_bit(file, *flip)
    assert verify_checkpoint(path).ok


@pytest.mark.parametrize(
    "change",
    [
        {"topology": {"world_size": 10**15, "distributed_type": "FSDP"}},
        {"topology": {"world_size": "two", "distributed_type": "FSDP"}},
        {"models": [{"class_name": "M", "tensors": [{**FACTS, "fqn": 1, "dtype": None, "shape": [-5]}]}]},
        {"optimizers": [{"class_name": "", "num_param_groups": "", "num_parameters": "", "fingerprints": 3}]},
        {"optimizers": [{**dataclasses.asdict(OptimizerFacts("", 1, 1, 0)), "fingerprints": 3}]},
        {"accelerate": None},
    ],
)
def test_a_manifest_of_wrong_types_never_raises(copy: Callable[..., Path], change: dict[str, Any]) -> None:
    path = copy()
    edit_manifest(path, lambda raw: raw.update(change))
    assert not verify_checkpoint(path, fingerprints=True).ok


def test_a_manifest_that_is_no_json_does_not_stop_the_other_checks(copy: Callable[..., Path]) -> None:
    path = copy()
    (path / MANIFEST_PATH).write_bytes(b"\xff{")
    flip_bit(path / "scheduler.bin", 200)
    report = verify_checkpoint(path)
    assert "manifest" in _codes(report)
    assert _codes(report) & {"crc", "damaged"}


def test_parameters_in_16_bits_of_a_mixed_precision_run_are_a_hint(copy: Callable[..., Path], tmp_path: Path) -> None:
    path = copy("flat")
    assert "precision" not in _codes(verify_checkpoint(path), Severity.HINT)
    model = {"weight": torch.ones(3, 2, dtype=torch.bfloat16)}
    optimizer = {"state": {"weight": {"exp_avg": torch.ones(3, 2), "step": torch.tensor(1.0)}}}
    (tmp_path / "c").mkdir()
    torch.save(model, tmp_path / "c" / "pytorch_model.bin")
    torch.save(optimizer, tmp_path / "c" / "optimizer.bin")
    report = verify_checkpoint(tmp_path / "c")
    assert report.ok, str(report)
    (finding,) = _find(report, "precision", Severity.HINT)
    assert "fp32 master weights" in finding.message


# -- single ranks, pickles, values -----------------------------------------------------------------------------------


def test_rank_files_of_another_age_or_size_are_hints(copy: Callable[..., Path]) -> None:
    path = copy("sharded", "plain")
    os.utime(path / MODEL / "__0_0.distcp", (1, 1))
    with (path / "random_states_1.pkl").open("ab") as file:
        file.write(bytes(100_000))
    report = verify_checkpoint(path)
    assert _find(report, "rank_age", Severity.HINT)[0].rank == 0
    assert _find(report, "rank_size", Severity.HINT)[0].path == "random_states_0.pkl"


def test_random_states_without_a_manifest(copy: Callable[..., Path]) -> None:
    path = copy("sharded", "plain")
    shutil.copy(path / "random_states_1.pkl", path / "random_states_2.pkl")
    report = verify_checkpoint(path)
    assert report.ok
    assert _find(report, "stale", Severity.HINT)[0].rank == 2
    (path / "random_states_2.pkl").unlink()
    (path / "random_states_0.pkl").unlink()
    (finding,) = _find(verify_checkpoint(path), "missing_file")
    assert (finding.path, finding.rank) == ("random_states_0.pkl", 0)


@pytest.mark.parametrize(
    "place", ["scheduler.bin", f"{MODEL}/.metadata", f"{OPTIMIZER} item", "custom_checkpoint_0.pkl"]
)
def test_a_hostile_pickle_is_named_and_not_executed(copy: Callable[..., Path], tmp_path: Path, place: str) -> None:
    path, canary = copy(), tmp_path / "canary"
    if place.endswith("item"):
        replace_item(path / OPTIMIZER, "optimizer.param_groups.0.lr", save_to_bytes(Bomb(canary)))
    elif place.endswith(".metadata"):
        (path / place).write_bytes(pickle.dumps(Bomb(canary)))
    else:
        (path / place).write_bytes(save_to_bytes({"state": Bomb(canary)}))
    reseal(path)
    findings = _find(verify_checkpoint(path, fingerprints=True, allow_objects=["collections.Counter"]), "unsafe_pickle")
    assert all(BOMB_NAME in each.message for each in findings)
    assert {each.path for each in findings} == {place.replace(" item", "/__1_0.distcp").replace("//", "/")}
    assert not canary.exists()


VALUES = {
    "nan32": (torch.float32, [1.0, float("nan"), 2.0], (1, 0)),
    "inf64": (torch.float64, [float("-inf"), float("nan"), float("inf")], (1, 2)),
    "bf16": (torch.bfloat16, [float("nan"), -float("inf"), -1.0], (1, 1)),
    "fp16": (torch.float16, [float("inf"), 0.0, -float("nan")], (1, 1)),
    "e5m2": (torch.float8_e5m2, [float("nan"), 1.0, float("-inf")], (1, 1)),
    "e4m3": (torch.float8_e4m3fn, [float("nan"), 1.0, -1.0], (1, 0)),
    "complex": (torch.complex64, [complex(float("nan"), 1.0), 1.0, complex(0, float("inf"))], (1, 1)),
    "zero": (torch.float32, [0.0, -0.0, 0.0], (0, 0)),
    "zero16": (torch.bfloat16, [0.0, -0.0, 0.0], (0, 0)),
    "good": (torch.float32, [3e38, -3e38, 1e-45], (0, 0)),
    "good16": (torch.float16, [65504.0, -65504.0, 1.0], (0, 0)),
    "integers": (torch.int64, [0, 0, 0], (0, 0)),
}


def test_nan_infinity_and_zeros_are_hints_with_their_number(tmp_path: Path) -> None:
    tensors = {name: torch.tensor(values, dtype=dtype) for name, (dtype, values, _) in VALUES.items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert not _codes(verify_checkpoint(tmp_path), Severity.HINT)
    report = verify_checkpoint(tmp_path, scan=True)
    assert report.ok
    found: dict[tuple[str, str], int] = {
        (each.code, str(each.fqn)): each.facts.get("count", 0) for each in report.findings if each.fqn
    }
    expected = {
        (code, name): count
        for name, (_, _, counts) in VALUES.items()
        for code, count in zip(("nan", "inf"), counts, strict=True)
        if count
    }
    assert found == {**expected, ("zeros", "zero"): 0, ("zeros", "zero16"): 0}


def test_shared_strided_and_partial_storages(tmp_path: Path) -> None:
    base = torch.arange(40, dtype=torch.float32)
    base[7] = float("nan")
    tensors = {
        "all": base,
        "tied": base,
        "first": base[:10],
        "second": base[5:20],
        "clean": base[20:].view(4, 5).t(),
        "transposed": torch.arange(6.0).view(2, 3).t(),
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    facts = tuple(
        TensorFacts(name, "float32", tuple(each.shape), True, "parameter", fingerprint=_sum(each))
        for name, each in tensors.items()
    )
    manifest = dataclasses.replace(
        make_manifest(files=tuple(seal_files(tmp_path, ["pytorch_model.bin"]))), models=(ModelFacts("M", facts),)
    )
    (tmp_path / DIRECTORY).mkdir()
    write_manifest(tmp_path, manifest)
    report = verify_checkpoint(tmp_path, scan=True, fingerprints=True)
    assert {each.fqn for each in _find(report, "nan", Severity.HINT)} == {"all", "tied", "first", "second"}
    assert report.counts["fingerprints"] == 6
    assert not _codes(report) & {"fingerprint", "crc", "checksum"}, str(report)
    edit_manifest(tmp_path, lambda raw: raw["models"][0]["tensors"][5].update(fingerprint=_sum(torch.arange(6.0))))
    assert _find(verify_checkpoint(tmp_path, fingerprints=True), "fingerprint")[0].fqn == "transposed"


def _sum(tensor: torch.Tensor) -> str:
    return str(combine([fingerprint_tensor(tensor, get_whole(tuple(tensor.shape)), tuple(tensor.shape))]))


def test_optimizers_of_other_parameters_without_a_manifest(copy: Callable[..., Path], tmp_path: Path) -> None:
    path = copy("full", "plain")
    state = torch.load(path / "optimizer.bin", weights_only=True)
    state["state"]["other.weight"] = state["state"].pop(EMBEDDING)
    torch.save(state, path / "optimizer.bin")
    assert "other.weight" in _find(verify_checkpoint(path), "parameters")[0].message
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    (tmp_path / "n").mkdir()
    torch.save(model.state_dict(), tmp_path / "n" / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "n" / "optimizer.bin")
    report = verify_checkpoint(tmp_path / "n")
    assert report.ok, str(report)
    assert "unnamed_optimizer" in _codes(report, Severity.NOTE)
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "n" / "pytorch_model.bin")
    assert "parameters" in _codes(verify_checkpoint(tmp_path / "n"))


# -- the edges -------------------------------------------------------------------------------------------------------


def test_what_is_no_checkpoint(made: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(tmp_path / "nothing")
    with pytest.raises(UsageError, match="holds 3 checkpoints"):
        verify_checkpoint(made["sharded"])
    with pytest.raises(UsageError, match="num_threads"):
        verify_checkpoint(tmp_path, num_threads=0)
    assert _codes(verify_checkpoint(tmp_path)) == {"incomplete"}
    shutil.copytree(made["sharded"] / "plain" / MODEL, tmp_path / "only" / MODEL)
    assert verify_checkpoint(tmp_path).ok, "a directory that holds exactly one stands for it"
    (tmp_path / "only" / MODEL / ".metadata").unlink()
    for path in (tmp_path / "only", tmp_path / "only" / MODEL):
        (finding,) = _find(verify_checkpoint(path), "missing_file")
        assert ".metadata" in finding.message
    (tmp_path / "file").write_bytes(b"no checkpoint")
    assert not verify_checkpoint(tmp_path / "file").ok


def test_links_are_followed_and_what_they_hide_is_found(copy: Callable[..., Path], tmp_path: Path) -> None:
    path = copy()
    (path / "scheduler.bin").rename(tmp_path / "elsewhere")
    (path / "scheduler.bin").symlink_to(tmp_path / "elsewhere")
    assert verify_checkpoint(path).ok
    (tmp_path / "elsewhere").unlink()
    assert "missing_file" in _codes(verify_checkpoint(path))


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    numbers = 200_000_000
    header = json.dumps({"w": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:  # sparse: 800 MB of zeros that take no space
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * numbers)
    code = """
import sys
from accel_fsdp_tools import open_checkpoint, verify_checkpoint
def read(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name + ":"))
before = read("VmRSS")
report = verify_checkpoint(sys.argv[1], scan=True)
assert [each.code for each in report.findings if each.fqn] == ["zeros"], report
assert "torch" not in sys.modules
print((read("VmHWM") - before) // 1024)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 64, "megabytes"
