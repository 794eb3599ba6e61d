"""After a load: what is in memory is what was saved, and every planted fault is found and named."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools import errors
from accel_fsdp_tools.errors import AccelFsdpError
from accel_fsdp_tools.findings import VerifyReport
from accel_fsdp_tools.manifest import read_manifest
from tests.harness import run_ranks
from tests.manifests import edit_manifest
from tests.training import Objects, Setup, build, train_batch

BASE = Setup(num_items=24, accumulation=1)
SETUPS = {
    "fsdp2": BASE,
    "fsdp2-full-tied": dataclasses.replace(BASE, state_dict_type="FULL_STATE_DICT", tie=True),
    "fsdp1": dataclasses.replace(BASE, fsdp_version=1, frozen=True),
    "fsdp1-flat": dataclasses.replace(BASE, fsdp_version=1, use_orig_params=False),
    "fsdp1-full": dataclasses.replace(BASE, fsdp_version=1, state_dict_type="FULL_STATE_DICT"),
    "fsdp2-bf16-unused": dataclasses.replace(BASE, mixed_precision="bf16", unused_parameter=True, frozen=True),
}


def _train(objects: Objects) -> None:
    for batch in objects.loader:
        with objects.accelerator.accumulate(objects.model):
            train_batch(objects, batch)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _save_then_verify(path: str, setup: Setup) -> dict[str, VerifyReport]:
    from accel_fsdp_tools import save_state, track, verify_model

    objects = build(setup, seed=1)
    track(objects.accelerator)
    _train(objects)
    save_state(objects.accelerator, path)
    return {mode: verify_model(objects.accelerator, path, mode=mode) for mode in ("full", "fingerprint", "sample")}


def _plant_faults(path: str, setup: Setup) -> dict[str, VerifyReport]:
    """Load, then change memory in one place at a time; each change is undone again."""
    import torch

    from accel_fsdp_tools import load_state, verify_model

    objects = build(setup, seed=2)
    accelerator = objects.accelerator
    load_state(accelerator, path)
    rank = accelerator.process_index
    reports = {}
    raw = objects.optimizer.optimizer

    def check(name: str, tensor: Any, change: Callable[[Any], Any]) -> None:
        local = _local(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor)
        before = local.clone()
        if rank == 1:
            change(local)
        reports[name] = verify_model(accelerator, path)
        reports[f"{name}, full"] = verify_model(accelerator, path, mode="full")
        local.copy_(before)

    held = [parameter for parameter in objects.model.parameters() if _local(parameter.data).numel() > 8]
    first, last = held[0], held[-1]

    def flip(local: Any) -> None:
        local.view(-1).view(torch.int32)[3] ^= 1 << 7

    def swap(local: Any) -> None:
        flat = local.view(-1)
        flat[:2] = flat[:2].flip(0).clone()

    check("one bit", first, flip)
    check("two elements swapped", last, swap)
    check("zeroed", first, lambda local: local.zero_())
    state = next(
        raw.state[parameter] for group in raw.param_groups for parameter in group["params"] if raw.state[parameter]
    )
    check("optimizer moment", state["exp_avg_sq"], lambda local: local.view(-1)[:1].add_(1.0))
    for group in raw.param_groups:
        group["weight_decay"] = 0.5
    reports["hyper-parameter"] = verify_model(accelerator, path)
    for group in raw.param_groups:
        group["weight_decay"] = 0.01
    reports["undone"] = verify_model(accelerator, path)
    return reports


@pytest.mark.parametrize("name", SETUPS)
def test_a_clean_load_verifies_and_planted_faults_are_found(tmp_path: Path, name: str) -> None:
    setup, path = SETUPS[name], str(tmp_path / "c")
    for reports in run_ranks(_save_then_verify, path, setup, folder=tmp_path / "r0"):
        for mode, report in reports.items():
            assert report.ok, f"{mode}: {report}"
            assert report.counts["tensors"] >= 20
        assert reports["full"].counts["elements"] > 3 * 10_000
        assert reports["sample"].counts["elements"] <= reports["full"].counts["elements"]
    first, *others = run_ranks(_plant_faults, path, setup, folder=tmp_path / "r1")
    for other in others:
        assert {key: str(report.findings) for key, report in other.items()} == {
            key: str(report.findings) for key, report in first.items()
        }, "all ranks get the same verdict"
    assert first.pop("undone").ok
    report = first.pop("hyper-parameter")
    assert any("weight_decay" in str(finding.fqn) for finding in report.failures)
    for fault, report in first.items():
        assert not report.ok, fault
        finding = report.failures[0]
        assert finding.code == "value", f"{fault}: {report}"
        assert finding.rank == 1, f"{fault}: {report}"
        assert ("exp_avg_sq" in str(finding.fqn)) == fault.startswith("optimizer"), f"{fault}: {report}"
        assert finding.facts["expected"] != finding.facts["actual"]
        assert finding.facts["num_different"] >= 1


def _load(path: str, setup: Setup, **arguments: Any) -> Any:
    from accel_fsdp_tools import load_state

    objects = build(setup, seed=2)
    try:
        return load_state(objects.accelerator, path, **arguments)
    except AccelFsdpError as error:
        return error


def test_load_state_refuses_what_was_not_in_memory_at_the_save(tmp_path: Path) -> None:
    """Files that are whole, with checksums that fit, but that are not what the run held."""
    good, path = tmp_path / "good", tmp_path / "bad"
    run_ranks(_save_then_verify, str(good), BASE, folder=tmp_path / "r0")
    shutil.copytree(good, path)

    def exchange(raw: dict[str, Any]) -> None:
        tensors = raw["models"][0]["tensors"]
        tensors[3]["fingerprint"] = tensors[4]["fingerprint"]

    edit_manifest(path, exchange)
    name = read_manifest(path).models[0].tensors[3].fqn
    for error in run_ranks(_load, str(path), BASE, folder=tmp_path / "r1"):
        assert isinstance(error, errors.DamagedCheckpointError)
        assert error.fqn == name
        assert "not what was in memory" in str(error)
    for report in run_ranks(_load, str(path), BASE, verify="files", folder=tmp_path / "r2"):
        assert report.exact, "without the comparison nothing tells"
    for report in run_ranks(_load, str(good), BASE, folder=tmp_path / "r3"):
        assert "memory was compared with the checkpoint (fingerprint" in str(report)


def test_a_checkpoint_without_fingerprints_is_compared_in_full(tmp_path: Path) -> None:
    run_ranks(_save_then_verify, str(tmp_path / "c"), BASE, folder=tmp_path / "r0")
    shutil.rmtree(tmp_path / "c" / "accel_fsdp_tools")
    for report in run_ranks(_load, str(tmp_path / "c"), BASE, folder=tmp_path / "r1"):
        assert "memory was compared with the checkpoint (full" in str(report)
    for error in run_ranks(_load, str(tmp_path / "c"), BASE, verify="fingerprint", folder=tmp_path / "r2"):
        assert isinstance(error, errors.UsageError)


def test_fingerprints_hold_for_another_fsdp_and_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_save_then_verify, str(tmp_path / "c"), BASE, folder=tmp_path / "r0")
    assert read_manifest(tmp_path / "c").optimizers[0].fingerprints
    other = dataclasses.replace(BASE, fsdp_version=1)
    for report in run_ranks(_load, str(tmp_path / "c"), other, strict=False, world_size=3, folder=tmp_path / "r1"):
        assert not isinstance(report, Exception), report
        assert "(fingerprint" in str(report)


def _build_with_batch_norm() -> tuple[Any, Any]:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from accel_fsdp_tools import enable_cpu_fsdp

    enable_cpu_fsdp()
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    return accelerator, accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def _save_with_uneven_buffers(path: str) -> None:
    import torch

    from accel_fsdp_tools import save_state

    accelerator, model = _build_with_batch_norm()
    model(torch.full((4, 3), float(accelerator.process_index)))
    save_state(accelerator, path)


def _load_uneven_buffers(path: str) -> Any:
    from accel_fsdp_tools import load_state

    return load_state(_build_with_batch_norm()[0], path)


def test_buffers_that_differ_between_ranks_are_not_called_exact(tmp_path: Path) -> None:
    run_ranks(_save_with_uneven_buffers, str(tmp_path / "c"), folder=tmp_path / "r0")
    for report in run_ranks(_load_uneven_buffers, str(tmp_path / "c"), folder=tmp_path / "r1"):
        assert not report.exact
        assert report.model.status == "approximate"
        assert "differed between ranks" in str(report)


def _save_with_odd_values(path: str, setup: Setup, is_plain: bool) -> None:
    """Save a model with NaN, infinity and a tensor of zeros."""
    from accel_fsdp_tools import save_state, track
    from accel_fsdp_tools.shards import iterate_local_shards

    objects = build(setup, seed=1)
    track(objects.accelerator)
    _train(objects)
    for shard in iterate_local_shards(objects.model):
        assert shard.tensor is not None
        local = shard.tensor.view(-1)
        if "down_proj" in shard.fqn and local.numel():
            local[0], local[-1] = float("nan"), float("inf")
        if "o_proj" in shard.fqn:
            local.zero_()
    if is_plain:
        objects.accelerator.save_state(path)
    else:
        save_state(objects.accelerator, path)


def _compare_in_more_ways(path: str, setup: Setup) -> dict[str, VerifyReport]:
    """Load, then look with tolerances, at statistics, flags and hyper-parameters; each change is undone again."""
    import torch

    from accel_fsdp_tools import load_state, verify_model
    from accel_fsdp_tools.shards import iterate_local_shards

    objects = build(setup, seed=2)
    accelerator = objects.accelerator
    load_state(accelerator, path, verify="files")
    reports: dict[str, VerifyReport] = {}

    def look(name: str, **arguments: Any) -> None:
        reports[name] = verify_model(accelerator, path, **arguments)

    look("clean, full", mode="full")
    look("clean, stats", mode="stats")
    look("layer, stats", mode="stats", layers="*.layers.0.*")
    shards = {shard.fqn: shard for shard in iterate_local_shards(objects.model)}
    tensor = shards["model.layers.1.mlp.down_proj.weight"].tensor
    assert tensor is not None
    local = tensor.view(-1)
    before = local.clone()
    if accelerator.process_index == 1:
        local.view(torch.int32)[1] ^= 1
    look("one bit, stats", mode="stats")
    look("one bit, full", mode="full")
    if accelerator.process_index == 1:
        local[1:5] *= 1.5
    look("scaled, stats", mode="stats")
    look("scaled, sample", mode="sample")
    local.copy_(before)
    if accelerator.process_index == 1:
        local[2] += 0.001
    look("near, exact", mode="full")
    look("near, atol", mode="full", atol=0.01)
    look("near, small atol", mode="full", atol=1e-5)
    look("near, rtol", mode="auto", rtol=10.0)
    local.copy_(before)
    if accelerator.process_index == 1:
        local.view(torch.int32)[0 if local[0].isnan() else -1] ^= 1  # of a NaN and an infinity: other NaNs
        assert local.isnan().any()
    look("other NaN, exact", mode="full")
    look("other NaN, atol", mode="full", atol=1e-9)
    local.copy_(before)
    if setup.use_orig_params or setup.fsdp_version == 2:
        frozen = next(each for name, each in objects.model.named_parameters() if "layers.1" in name and "down" in name)
        frozen.requires_grad_(False)
        look("frozen", mode="fingerprint")
        frozen.requires_grad_(True)
    raw = objects.optimizer.optimizer
    raw.param_groups[0]["lr"] *= 2
    look("rate, full", mode="full")
    raw.param_groups[0]["lr"] /= 2
    look("undone", mode="full")
    reports["model"] = verify_model(objects.model, path, mode="full")
    reports["compiled"] = verify_model(torch.compile(objects.model), path, mode="full")
    return reports


MORE = {name: SETUPS[name] for name in ("fsdp2", "fsdp1-flat", "fsdp2-full-tied")}


def _find(report: VerifyReport, code: str) -> list[Any]:
    return [finding for finding in report.findings if finding.code == code]


@pytest.mark.parametrize(
    "name", [name if number == 1 else pytest.param(name, marks=pytest.mark.matrix) for number, name in enumerate(MORE)]
)
def test_tolerance_statistics_flags_and_hints(tmp_path: Path, name: str) -> None:
    setup, path = MORE[name], str(tmp_path / "c")
    run_ranks(_save_with_odd_values, path, setup, False, folder=tmp_path / "r0")
    first, second = run_ranks(_compare_in_more_ways, path, setup, folder=tmp_path / "r1")
    assert {key: str(report.findings) for key, report in first.items()} == {
        key: str(report.findings) for key, report in second.items()
    }
    for key in ("clean, full", "clean, stats", "layer, stats", "undone", "model", "compiled"):
        report = first[key]
        assert report.ok, f"{key}: {report}"
        assert {"nan", "inf", "zeros"} <= {finding.code for finding in report.findings}, f"{key}: {report}"
        assert any("o_proj" in str(finding.fqn) for finding in _find(report, "zeros"))
    # Tensors equal memory, which has the fingerprints of the save: their files need not be read once more.
    files = [file.path for file in read_manifest(Path(path)).files if not file.path.endswith(".distcp")]
    assert first["clean, full"].counts["checksums"] == len(files)
    clean = first["clean, stats"]
    assert clean.counts["statistics"] >= 60
    assert "weakest" in str(clean)
    assert "down_proj" in str(clean)
    row = clean.statistics["model.norm.weight"]
    assert (row["count"], row["zeros"], row["verdict"]) == (32, 0, "as saved")
    assert row["mean"] == pytest.approx(1, abs=0.2)
    assert len(first["layer, stats"].statistics) < len(clean.statistics) / 2
    assert first["one bit, stats"].ok, "that is how weak they are"
    assert not first["one bit, full"].ok
    failure = first["scaled, stats"].failures[0]
    assert failure.code == "statistics"
    assert "down_proj" in str(failure.fqn)
    assert failure.facts["expected"]["sum_squares"] < failure.facts["actual"]["sum_squares"]
    assert "DIFFERS" in str(first["scaled, stats"])
    assert not first["scaled, sample"].ok
    for key in ("near, exact", "near, small atol", "other NaN, exact"):
        (failure,) = first[key].failures
        assert (failure.code, failure.rank) == ("value", 1), f"{key}: {first[key]}"
    for key in ("near, atol", "near, rtol", "other NaN, atol"):
        assert first[key].ok, f"{key}: {first[key]}"
        (hint,) = _find(first[key], "deviation")
        assert hint.facts["num_near"] == 1
        assert hint.facts["deviation"] == pytest.approx(0 if "NaN" in key else 0.001, rel=1e-3)
    if "frozen" in first:
        assert first["frozen"].ok
        (hint,) = _find(first["frozen"], "requires_grad")
        assert "layers.1.mlp.down_proj" in hint.message
        assert "frozen now and were trained" in hint.message
    (failure,) = first["rate, full"].failures
    assert failure.fqn == "optimizer.param_groups.0.lr"
    assert failure.facts["actual"] == 2 * failure.facts["expected"]


def _verify_plain_models(path: str) -> dict[str, VerifyReport]:
    """In one process, without FSDP, without an accelerator: a model that was given the checkpoint's values."""
    import torch

    from accel_fsdp_tools import open_checkpoint, verify_model
    from accel_fsdp_tools.formats.reading import read_part
    from tests.models import build_tiny_llama

    model = build_tiny_llama(vocab_size=101, num_layers=2)
    with torch.no_grad():
        for name, tensor in open_checkpoint(path).model.tensors.items():
            values = torch.frombuffer(read_part(tensor), dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)
            model.get_parameter(name).copy_(values)
    reports = {f"plain, {mode}": verify_model(model, path, mode=mode) for mode in ("auto", "full", "stats", "sample")}
    with torch.no_grad():
        model.model.norm.weight[3] += 1
    reports["changed"] = verify_model(model, path)
    with pytest.raises(errors.UsageError, match="neither a model"):
        verify_model(object(), path)  # type: ignore[arg-type]
    return reports


def test_a_plain_model_is_compared_as_it_is(tmp_path: Path) -> None:
    run_ranks(_save_then_verify, str(tmp_path / "c"), BASE, folder=tmp_path / "r0")
    (reports,) = run_ranks(_verify_plain_models, str(tmp_path / "c"), world_size=1, folder=tmp_path / "r1")
    changed = reports.pop("changed")
    for mode, report in reports.items():
        assert report.ok, f"{mode}: {report}"
    (failure,) = changed.failures
    assert (failure.fqn, failure.facts["index"]) == ("model.norm.weight", [3])


def _save_and_verify_adapters(path: str) -> dict[str, VerifyReport]:
    """A PEFT model under FSDP: frozen base, trained adapters."""
    import torch
    from peft import LoraConfig, get_peft_model

    from accel_fsdp_tools import save_state, verify_model
    from tests.models import build_tiny_llama
    from tests.training import build_accelerator

    accelerator = build_accelerator(BASE)
    model = get_peft_model(build_tiny_llama(vocab_size=101, num_layers=2), LoraConfig(target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    save_state(accelerator, path)
    reports = {mode: verify_model(model, path, mode=mode) for mode in ("auto", "full", "stats")}
    with torch.no_grad():
        adapter = next(each for name, each in model.named_parameters() if "lora_A" in name)
        _local(adapter.data).view(-1)[:1] += 1
    reports["changed"] = verify_model(model, path)
    return reports


def test_an_adapted_model(tmp_path: Path) -> None:
    for reports in run_ranks(_save_and_verify_adapters, str(tmp_path / "c"), folder=tmp_path / "r0"):
        changed = reports.pop("changed")
        for mode, report in reports.items():
            assert report.ok, f"{mode}: {report}"
        assert any("lora_B" in str(finding.fqn) for finding in _find(reports["stats"], "zeros")), "fresh ones are zero"
        assert {finding.rank for finding in changed.failures} <= {0, 1}
        assert "lora_A" in str(changed.failures[0].fqn)


def _verify_files(path: str, setup: Setup, change: str) -> VerifyReport:
    """Load what is good, then change a file, then look at disk and memory together."""
    from accel_fsdp_tools import load_state, verify_model

    objects = build(setup, seed=2)
    load_state(objects.accelerator, path)
    objects.accelerator.wait_for_everyone()
    if objects.accelerator.is_main_process:
        name, _, place = change.partition(":")
        data = bytearray((Path(path) / name).read_bytes())
        at = data.index(bytes.fromhex(place))
        data[at + 1] ^= 1
        (Path(path) / name).write_bytes(data)
    objects.accelerator.wait_for_everyone()
    return verify_model(objects.accelerator, path, mode="full")


@pytest.mark.parametrize("is_plain", [False, True])
def test_full_ties_the_files_to_what_was_written(tmp_path: Path, is_plain: bool) -> None:
    """A flip where no tensor is: in the scheduler's base rate, 0.003."""
    import struct

    run_ranks(_save_with_odd_values, str(tmp_path / "c"), BASE, is_plain, folder=tmp_path / "r0")
    change = f"scheduler.bin:{struct.pack('>d', 3e-3).hex()}"
    reports = run_ranks(_verify_files, str(tmp_path / "c"), BASE, change, folder=tmp_path / "r1")
    for report in reports:
        (failure,) = report.failures
        assert failure.code == ("crc" if is_plain else "checksum"), str(report)
        assert "scheduler.bin" in str(failure)
        assert report.counts["crcs" if is_plain else "checksums"] > 5


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_tensor_that_changed_in_a_file_of_somebody_else_is_named(tmp_path: Path, kind: str) -> None:
    """What is in memory is then what is in the file: only the CRC-32 in it tells."""
    from accel_fsdp_tools import open_checkpoint

    path = tmp_path / "c"
    setup = dataclasses.replace(BASE, state_dict_type=kind)
    run_ranks(_save_with_odd_values, str(path), setup, True, folder=tmp_path / "r0")
    extent = open_checkpoint(path).model.tensors["model.norm.weight"].extents[0]
    data = bytearray(Path(extent.bytes.path).read_bytes())
    data[extent.offset + 2] ^= 4
    Path(extent.bytes.path).write_bytes(data)
    for error in run_ranks(_load, str(path), setup, folder=tmp_path / "r1"):
        assert isinstance(error, errors.DamagedCheckpointError)
        assert "CRC-32" in str(error)
        assert error.fqn == "model.norm.weight"


def _load_nothing(path: str, setup: Setup, **arguments: Any) -> Any:
    """A load that leaves the model as it is, and calls that a success."""
    from unittest import mock

    with mock.patch("accelerate.accelerator.load_fsdp_model"):
        return _load(path, setup, **arguments)


def _load_twice(path: str, setup: Setup) -> Any:
    from accel_fsdp_tools import load_state

    objects = build(setup, seed=2)
    load_state(objects.accelerator, path)
    return load_state(objects.accelerator, path, verify="stats", allow_after_step=True)


def test_nothing_was_loaded_shows_at_a_glance(tmp_path: Path) -> None:
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    run_ranks(_save_then_verify, str(ours), BASE, folder=tmp_path / "r0")
    run_ranks(_save_with_odd_values, str(plain), BASE, True, folder=tmp_path / "r1")
    for error in run_ranks(_load_nothing, str(ours), BASE, verify="stats", folder=tmp_path / "r2"):
        assert isinstance(error, errors.DamagedCheckpointError), error
        text = str(error)
        assert "21 of 84 tensors did not change in the load, and 21 of these are not what was saved: nothing" in text
        assert text.count("DIFFERS, did not change in the load") == 21
        assert "  as saved" not in text, "an error shows what is wrong"
    for report in run_ranks(_load_nothing, str(plain), BASE, verify="stats", folder=tmp_path / "r3"):
        assert "hint: 21 of 84 tensors did not change in the load" in str(report), "a foreign one may be like that"
    for report in run_ranks(_load, str(ours), BASE, verify="stats", folder=tmp_path / "r4"):
        assert "memory was compared with the checkpoint (stats" in str(report)
        assert "did not change" not in str(report)
    for report in run_ranks(_load_twice, str(ours), BASE, folder=tmp_path / "r5"):
        assert "note: 84 of 84 tensors did not change in the load: they held what was saved before" in str(report)
        assert report.exact


def test_statistics_and_tolerances_that_cannot_be(tmp_path: Path) -> None:
    run_ranks(_save_with_odd_values, str(tmp_path / "c"), BASE, True, folder=tmp_path / "r0")
    assert run_ranks(_refuse, str(tmp_path / "c"), world_size=1, folder=tmp_path / "r1") == [4]


def _refuse(path: str) -> int:
    from accel_fsdp_tools import verify_model
    from tests.models import build_tiny_llama

    model, num_refused = build_tiny_llama(), 0
    for text, arguments in (
        ("no recorded statistics", {"mode": "stats"}),
        ("atol and rtol", {"mode": "fingerprint", "atol": 1.0}),
        ("negative", {"mode": "full", "rtol": -1.0}),
        ("mode is", {"mode": "thorough"}),
    ):
        with pytest.raises(errors.UsageError, match=text):
            verify_model(model, path, **arguments)  # type: ignore[arg-type]
        num_refused += 1
    return num_refused
