"""After a load: what is in memory is what was saved, and every planted fault is found and named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools import errors
from accel_fsdp_tools.errors import AccelFsdpError
from accel_fsdp_tools.findings import VerifyReport
from accel_fsdp_tools.manifest import MANIFEST_PATH, read_manifest
from tests.harness import run_ranks
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
    manifest = json.loads((path / MANIFEST_PATH).read_text())
    tensor = manifest["models"][0]["tensors"][3]
    tensor["fingerprint"] = manifest["models"][0]["tensors"][4]["fingerprint"]
    (path / MANIFEST_PATH).write_text(json.dumps(manifest))
    for error in run_ranks(_load, str(path), BASE, folder=tmp_path / "r1"):
        assert isinstance(error, errors.DamagedCheckpointError)
        assert error.fqn == tensor["fqn"]
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
