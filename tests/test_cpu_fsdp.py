"""FSDP on CPU ranks is the real one, only where it was asked for, and never something else in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.cpu_fsdp import enable_cpu_fsdp
from accel_fsdp_tools.errors import CallOrderError, UsageError
from tests.harness import find_free_port, run_ranks

REPOSITORY = Path(__file__).parent.parent
LEARNING_RATE = 0.1


def _build_plugin(version: int, **kwargs: Any) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    from tests.models import LAYER_CLASS

    if version == 1:
        kwargs.setdefault("use_orig_params", True)
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER_CLASS],
        **kwargs,
    )


def _make_batches(count: int, world_size: int) -> Any:
    import torch

    return torch.randint(0, 101, (count, 2 * world_size, 8), generator=torch.Generator().manual_seed(0))


def _train_whole(batches: Any) -> Any:
    """Train without Accelerate or FSDP on all the data; return the state dict that every FSDP run should reach."""
    import torch

    from tests.models import build_tiny_llama

    model = build_tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for batch in batches:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _train(version: int, precision: str, launched: bool = True) -> dict[str, Any]:
    """Train a few steps under FSDP as a user would; return what shows that it was FSDP, and how exact it was."""
    if not launched:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    enable_cpu_fsdp()
    enable_cpu_fsdp()
    import torch
    from accelerate import Accelerator
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    from tests.models import LAYER_CLASS, build_tiny_llama

    accelerator = Accelerator(fsdp_plugin=_build_plugin(version), mixed_precision=precision)
    enable_cpu_fsdp()
    model = build_tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    whole = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    dtypes = []
    projection = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    projection.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))

    batches = _make_batches(3, accelerator.num_processes)
    for batch in batches:
        rows = batch[2 * accelerator.process_index :][:2]
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        optimizer.zero_grad()

    parameters = list(model.parameters())
    wrapper: Any = FullyShardedDataParallel if version == 1 else FSDPModule
    wrapped = [getattr(m, "module", m) for m in model.modules() if isinstance(m, wrapper)]
    layers = [module for module in wrapped if type(module).__name__.endswith(LAYER_CLASS)]
    held = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    state = accelerator.get_state_dict(model)  # collective
    error = None
    if accelerator.is_main_process:
        expected = _train_whole(batches)
        assert list(state) == list(expected)
        error = max(float((state[name].float() - value).abs().max()) for name, value in expected.items())
    return {
        "type": str(accelerator.distributed_type),
        "device": str(accelerator.device),
        "rank": accelerator.process_index,
        "world size": accelerator.num_processes,
        "backend": torch.distributed.get_backend(),
        "root is FSDP": isinstance(model, wrapper),
        "FSDP layers": len(layers),
        "DTensors": sum(isinstance(parameter, DTensor) for parameter in parameters),
        "share": sum(tensor.numel() for tensor in held) / whole,
        "parameter dtypes": {str(tensor.dtype) for tensor in held},
        "compute dtypes": {str(dtype) for dtype in dtypes},
        "error": error,
    }


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_is_real_and_trains_like_one_process(tmp_path: Path, version: int, precision: str) -> None:
    results = run_ranks(_train, version, precision, folder=tmp_path)
    for rank, result in enumerate(results):
        assert (result["type"], result["device"], result["backend"]) == ("DistributedType.FSDP", "cpu", "gloo")
        assert (result["rank"], result["world size"]) == (rank, 2)
        assert result["root is FSDP"]
        assert result["FSDP layers"] == 2
        assert result["DTensors"] == (21 if version == 2 else 0)
        assert 0.45 < result["share"] < 0.55
        assert result["parameter dtypes"] == {"torch.float32"}
        assert result["compute dtypes"] == {"torch.bfloat16" if precision == "bf16" else "torch.float32"}
    assert sum(result["share"] for result in results) == pytest.approx(1, abs=0.01)
    assert results[0]["error"] < (1e-6 if precision == "no" else 1e-2)


def test_a_process_without_a_launcher_is_the_only_rank(tmp_path: Path) -> None:
    (result,) = run_ranks(_train, 2, "no", launched=False, world_size=1, folder=tmp_path)
    assert (result["type"], result["world size"], result["share"]) == ("DistributedType.FSDP", 1, 1)
    assert result["DTensors"] == 21
    assert result["error"] < 1e-6


def _describe_state(enable: bool, plugin: bool) -> tuple[str, int, bool, str, str]:
    if enable:
        enable_cpu_fsdp()
    from accelerate import Accelerator

    accelerator = Accelerator(fsdp_plugin=_build_plugin(2) if plugin else None)
    state = accelerator.state
    main = accelerator.is_main_process
    return str(state.distributed_type), state.num_processes, main, str(state.device), str(state.backend)


def test_without_the_switch_accelerate_ignores_the_plugin(tmp_path: Path) -> None:
    # The reason for the switch. When this fails, Accelerate has learned it.
    alone = ("DistributedType.NO", 1, True, "cpu", "None")
    assert run_ranks(_describe_state, False, True, folder=tmp_path) == [alone, alone]


def test_nothing_changes_where_fsdp_is_not_asked_for(tmp_path: Path) -> None:
    plain = run_ranks(_describe_state, False, False, folder=tmp_path / "plain")
    assert run_ranks(_describe_state, True, False, folder=tmp_path / "enabled") == plain


def _collect_refusals() -> dict[str, str]:
    """Build an Accelerator for each impossible setting; return the messages. No attempt may spoil the next."""
    enable_cpu_fsdp()
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    attempts: dict[str, tuple[int, dict[str, Any], str | None]] = {
        "fp16": (2, {}, "fp16"),
        "fp8": (1, {}, "fp8"),
        "fp16 policy": (2, {"mixed_precision_policy": half}, None),
        "sync": (1, {"sync_module_states": True}, None),
        "efficient": (1, {"cpu_ram_efficient_loading": True}, None),
        "hybrid": (1, {"sharding_strategy": "HYBRID_SHARD"}, None),
        "offload 1": (1, {"cpu_offload": True}, None),
        "offload 2": (2, {"cpu_offload": True}, None),
    }
    messages = {}
    for name, (version, kwargs, precision) in attempts.items():
        os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)  # a plugin leaves it behind for the next
        try:
            Accelerator(fsdp_plugin=_build_plugin(version, **kwargs), mixed_precision=precision)
        except UsageError as error:
            messages[name] = str(error)
        assert AcceleratorState._shared_state == {}
    accelerator = Accelerator(fsdp_plugin=_build_plugin(2), mixed_precision="bf16")
    assert str(accelerator.distributed_type) == "DistributedType.FSDP"
    return messages


def test_what_cannot_work_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (messages,) = run_ranks(_collect_refusals, world_size=1, folder=tmp_path)
    for name in ("fp16", "fp8", "fp16 policy"):
        assert '"bf16"' in messages[name]
    assert "'fp8'" in messages["fp8"]
    for name in ("sync", "efficient"):
        assert "fsdp_sync_module_states: false" in messages[name]
    assert "HYBRID_SHARD" in messages["hybrid"]
    for name in ("offload 1", "offload 2"):
        assert "fsdp_offload_params: false" in messages[name]


def _call_in_wrong_order() -> list[str]:
    from accelerate import Accelerator
    from accelerate.state import PartialState

    messages = []
    PartialState()
    try:
        enable_cpu_fsdp()
    except CallOrderError as error:
        messages.append(str(error))
    PartialState._reset_state()
    enable_cpu_fsdp()
    PartialState()  # FSDP is not asked for yet, so this process stands alone
    try:
        Accelerator(fsdp_plugin=_build_plugin(2))
    except CallOrderError as error:
        messages.append(str(error))
    return messages


def test_wrong_order_is_refused(tmp_path: Path) -> None:
    (messages,) = run_ranks(_call_in_wrong_order, world_size=1, folder=tmp_path)
    assert ["too late" in messages[0], "ACCELERATE_USE_FSDP=true" in messages[1]] == [True, True]


def test_a_visible_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with pytest.raises(UsageError, match=r"sees an accelerator .*cuda.*CUDA_VISIBLE_DEVICES"):
        enable_cpu_fsdp()


# The scripts below are what a user would write for GPUs, after their first two lines.

_ACCELERATOR_SCRIPT = """
from accel_fsdp_tools.cpu_fsdp import enable_cpu_fsdp
enable_cpu_fsdp()
import json, os, sys
import torch
from accelerate import Accelerator
from tests.models import build_tiny_llama

accelerator = Accelerator()
model = build_tiny_llama()
optimizer = torch.optim.AdamW(model.parameters())
dataset = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state(sys.argv[1] + "/state")
"""

_TRAINER_SCRIPT = """
from accel_fsdp_tools.cpu_fsdp import enable_cpu_fsdp
enable_cpu_fsdp()
import json, os, sys
import torch
from transformers import Trainer, TrainingArguments
from tests.models import build_tiny_llama

options = json.loads(sys.argv[2])
model = build_tiny_llama()
dataset = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
arguments = TrainingArguments(
    sys.argv[1], max_steps=2, per_device_train_batch_size=2, save_steps=2, report_to="none", bf16=True, **options
)
trainer = Trainer(model, arguments, train_dataset=dataset)
trainer.train()
accelerator, model = trainer.accelerator, trainer.model_wrapped
"""

_REPORT = """
parameter = next(model.parameters())
report = {
    "type": str(accelerator.distributed_type),
    "version": accelerator.state.fsdp_plugin.fsdp_version,
    "rank": accelerator.process_index,
    "world size": torch.distributed.get_world_size(),
    "precision": accelerator.mixed_precision,
    "root": [base.__name__ for base in type(model).__mro__],
    "parameter": type(parameter).__name__,
    "held": sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters()),
}
with open(f"{sys.argv[1]}/report_{os.environ['RANK']}.json", "w") as file:
    json.dump(report, file)
"""


def _launch(folder: Path, launcher: list[str], script: str, *arguments: str) -> list[dict[str, Any]]:
    path = folder / "script.py"
    path.write_text(script + _REPORT)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-m", *launcher, str(path), str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return [json.loads(file.read_text()) for file in sorted(folder.glob("report_*.json"))]


def _accelerate_launch(config: str) -> list[str]:
    return ["accelerate.commands.launch", "--config_file", str(REPOSITORY / "accelerate_configs" / config)]


def _assert_two_ranks_of_one_group(reports: list[dict[str, Any]], version: int, precision: str) -> None:
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert (report["type"], report["version"]) == ("DistributedType.FSDP", version)
        assert (report["world size"], report["precision"]) == (2, precision)
        assert ("FullyShardedDataParallel" if version == 1 else "FSDPModule") in report["root"]
        assert report["parameter"] == ("DTensor" if version == 2 else "Parameter")
        assert 0 < report["held"] < 15_000
    assert sum(report["held"] for report in reports) >= 25_056


@pytest.mark.parametrize("version", [1, pytest.param(2, marks=pytest.mark.matrix)])  # the examples run under 2
def test_accelerate_launch_runs_an_unchanged_script(tmp_path: Path, version: int) -> None:
    reports = _launch(tmp_path, _accelerate_launch(f"fsdp{version}_cpu.yaml"), _ACCELERATOR_SCRIPT)
    _assert_two_ranks_of_one_group(reports, version, "no")
    written = {path.name for path in (tmp_path / "state").iterdir()}
    assert written >= {"pytorch_model_fsdp_0", "optimizer_0", "random_states_0.pkl", "random_states_1.pkl"}
    assert {path.name for path in (tmp_path / "state" / "optimizer_0").iterdir()} >= {"__1_0.distcp"}


@pytest.mark.matrix
def test_accelerate_launch_runs_the_trainer(tmp_path: Path) -> None:
    reports = _launch(tmp_path, _accelerate_launch("fsdp2_cpu.yaml"), _TRAINER_SCRIPT, "{}")
    _assert_two_ranks_of_one_group(reports, 2, "bf16")
    written = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert written >= {"pytorch_model_fsdp_0", "optimizer_0", "rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.matrix
def test_torchrun_runs_the_trainer_that_asks_for_fsdp_itself(tmp_path: Path) -> None:
    options = {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False}}
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(find_free_port())]
    reports = _launch(tmp_path, launcher, _TRAINER_SCRIPT, json.dumps(options))
    _assert_two_ranks_of_one_group(reports, 1, "bf16")
    assert (tmp_path / "checkpoint-2" / "pytorch_model_fsdp.bin").exists()
