"""Buffers under FSDP1's mixed precision: recorded, verified, exported and resumed is what a state dict holds."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_fsdp_tools.errors import MismatchError
from accel_fsdp_tools.export import export_checkpoint
from accel_fsdp_tools.formats.checkpoint import name_section
from accel_fsdp_tools.manifest import read_manifest
from accel_fsdp_tools.opening import open_checkpoint
from accel_fsdp_tools.verify import verify_checkpoint
from tests.harness import run_ranks

F32, BF16 = "float32", "bfloat16"
# By what FSDP1 wraps and whether the root has parameters of its own: the dtypes of `stat` and `a.inner` in state dicts.
LAYOUTS = {
    "whole": (F32, F32),  # one unit
    "own": (F32, F32),  # a unit per layer, and a parameter beside them
    "bare": (BF16, F32),  # a unit per layer, and nothing but the buffer beside them
}
CASES = [
    ("whole", True, "SHARDED", False, "auto"),
    ("whole", False, "FULL", False, "full"),
    ("own", False, "SHARDED", True, "stats"),
    ("own", True, "FULL", False, "auto"),
    ("bare", True, "SHARDED", True, "full"),
    ("bare", False, "FULL", False, "stats"),
]


def _build(layout: str, orig: bool, kind: str, precision: str = "bf16") -> tuple[Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import PretrainedConfig, PreTrainedModel

    from accel_fsdp_tools import enable_cpu_fsdp

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)
            self.register_buffer("inner", torch.rand(5))
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.inner.mul_(0.9).add_(x.detach().float().mean() / 7)
            return self.linear(x) + self.inner.sum()

    class Net(PreTrainedModel):  # type: ignore[misc]
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.a, self.b = Layer(), Layer()
            self.register_buffer("stat", torch.rand(4))
            self.weight = torch.nn.Parameter(torch.rand(6)) if layout == "own" else None
            self.post_init()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.stat.mul_(0.9).add_(x.detach().float().mean() / 3)
            y: torch.Tensor = self.b(self.a(x)) + self.stat.sum()
            return y if self.weight is None else y * self.weight

    enable_cpu_fsdp()
    wrap: dict[str, Any] = {"auto_wrap_policy": "no_wrap"}
    if layout != "whole":
        wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Layer"]}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="FULL_SHARD",
        use_orig_params=orig,
        sync_module_states=False,
        cpu_ram_efficient_loading=False,
        state_dict_type=f"{kind}_STATE_DICT",
        **wrap,
    )
    accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin)
    torch.manual_seed(3)
    model = accelerator.prepare(Net(PretrainedConfig()))
    return accelerator, model, accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))


def _train(accelerator: Any, model: Any, optimizer: Any, seeds: range) -> None:
    for seed in seeds:  # the same on every rank, so that buffers stay copies
        x = torch.rand(2, 6, generator=torch.Generator().manual_seed(seed))
        accelerator.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _look(accelerator: Any, model: Any) -> dict[str, tuple[str, str]]:
    """Dtype and bytes of everything in the full state dict."""
    return {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            hashlib.sha256(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())).hexdigest(),
        )
        for name, tensor in accelerator.get_state_dict(model).items()
    }


def _save(folder: str, layout: str, orig: bool, kind: str, in_background: bool = False, precision: str = "bf16") -> Any:
    from accel_fsdp_tools import export_model, save_state, verify_model

    accelerator, model, optimizer = _build(layout, orig, kind, precision)
    out = Path(folder)
    export_model(accelerator, model, out / "untrained")
    untrained = _look(accelerator, model)
    _train(accelerator, model, optimizer, range(2))
    export_model(accelerator, model, out / "live")
    if in_background:
        save_state(accelerator, out / "saved", async_save=True).wait()
    else:
        save_state(accelerator, out / "saved")
    reports = [verify_model(accelerator, out / "saved", mode=mode) for mode in ("fingerprint", "full", "stats")]
    assert [report.ok for report in reports] == [True] * 3, reports
    saved = _look(accelerator, model)
    _train(accelerator, model, optimizer, range(2, 4))
    assert not verify_model(accelerator, out / "saved", mode="auto").ok
    return untrained, saved, _look(accelerator, model)


def _resume(folder: str, layout: str, orig: bool, kind: str, precision: str = "bf16", **arguments: Any) -> Any:
    from accel_fsdp_tools import load_state, verify_model

    accelerator, model, optimizer = _build(layout, orig, kind, precision)
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.add_(1)
    report = load_state(accelerator, Path(folder) / "saved", **arguments)
    loaded = _look(accelerator, model)
    buffer = next(each for name, each in model.named_buffers() if name.endswith("stat"))
    before = buffer.clone()
    buffer[1] += 1
    found = verify_model(accelerator, Path(folder) / "saved")
    assert {each.fqn for each in found.failures} == {"stat"}, found
    buffer.copy_(before)
    _train(accelerator, model, optimizer, range(2, 4))
    return loaded, _look(accelerator, model), str(report), report.states["model"].status.value


def _read(directory: Path) -> dict[str, tuple[str, str]]:
    from safetensors.torch import load_file

    return {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            hashlib.sha256(bytes(tensor.reshape(-1).view(torch.uint8).tolist())).hexdigest(),
        )
        for name, tensor in load_file(directory / "model.safetensors").items()
    }


@pytest.mark.parametrize(("layout", "orig", "kind", "in_background", "verify"), CASES)
def test_buffers_are_saved_verified_exported_and_resumed_as_state_dicts_have_them(
    tmp_path: Path, layout: str, orig: bool, kind: str, in_background: bool, verify: str
) -> None:
    untrained, saved, ended = run_ranks(_save, str(tmp_path), layout, orig, kind, in_background, folder=tmp_path / "r")[
        0
    ]
    stat, inner = LAYOUTS[layout]
    assert (saved["stat"][0], saved["a.inner"][0], saved["b.inner"][0]) == (stat, inner, inner)
    on_disk = open_checkpoint(tmp_path / "saved").get_section(name_section("model", 0)).tensors
    recorded = {each.fqn: each for each in read_manifest(tmp_path / "saved").models[0].tensors}
    expected = {name: dtype for name, (dtype, _) in saved.items()}
    assert {name: each.dtype for name, each in on_disk.items()} == expected
    assert {name: each.dtype for name, each in recorded.items()} == expected
    assert all(each.fingerprint for each in recorded.values())
    assert verify_checkpoint(tmp_path / "saved").ok
    export_checkpoint(tmp_path / "saved", tmp_path / "exported")
    assert _read(tmp_path / "exported") == _read(tmp_path / "live") == saved
    assert _read(tmp_path / "untrained") == untrained
    results = run_ranks(_resume, str(tmp_path), layout, orig, kind, verify=verify, folder=tmp_path / "resumed")
    assert results[0][:2] == (saved, ended)
    assert results[0][3] == "restored"


@pytest.mark.parametrize(("before", "now", "verify"), [("bare", "whole", "full"), ("whole", "bare", "auto")])
def test_other_units_are_no_reason_to_refuse_a_buffer(tmp_path: Path, before: str, now: str, verify: str) -> None:
    _, saved, _ = run_ranks(_save, str(tmp_path), before, True, "SHARDED", folder=tmp_path / "r")[0]
    loaded, _, report, _ = run_ranks(
        _resume, str(tmp_path), now, True, "SHARDED", verify=verify, folder=tmp_path / "resumed"
    )[0]
    assert loaded["stat"][0] == LAYOUTS[now][0] != saved["stat"][0]
    assert {name: each for name, each in loaded.items() if name != "stat"} == {
        name: each for name, each in saved.items() if name != "stat"
    }
    assert "1 buffer(s) have another dtype in the checkpoint than this run would save (stat)" in report


def test_a_buffer_rounded_by_another_precision_is_named_and_no_damage(tmp_path: Path) -> None:
    _, saved, _ = run_ranks(_save, str(tmp_path), "whole", True, "SHARDED", False, "no", folder=tmp_path / "r")[0]
    with pytest.raises(Exception, match="mixed precision is bf16, it was no") as error:
        run_ranks(_resume, str(tmp_path), "whole", True, "SHARDED", folder=tmp_path / "refused")
    assert MismatchError.__name__ in str(error.value)
    for verify in ("auto", "full", "stats"):
        loaded, _, report, _ = run_ranks(
            _resume,
            str(tmp_path),
            "whole",
            True,
            "SHARDED",
            allow=["mixed_precision"],
            verify=verify,
            folder=tmp_path / verify,
        )[0]
        assert loaded["stat"][1] != saved["stat"][1]  # rounded
        assert "stat is bfloat16 in memory and" in report


def _load_changed(folder: str) -> Any:
    from accel_fsdp_tools import load_state

    accelerator, model, _ = _build("bare", True, "SHARDED")
    buffers = {name: each for name, each in model.named_buffers() if each.is_floating_point()}
    for each in buffers.values():
        each.fill_(9)
    load_state(accelerator, Path(folder) / "saved", allow_unexpected=["weight"])
    assert {each.dtype for each in buffers.values()} == {torch.float32}  # no forward has been, so it is not cast yet
    return _look(accelerator, model)


def test_a_changed_model_gets_its_buffers_in_memory(tmp_path: Path) -> None:
    _, saved, _ = run_ranks(_save, str(tmp_path), "own", True, "SHARDED", folder=tmp_path / "r")[0]
    loaded = run_ranks(_load_changed, str(tmp_path), folder=tmp_path / "loaded")[0]
    assert loaded["stat"][0] == BF16
    assert {name: loaded[name] for name in loaded if name != "stat"} == {
        name: each for name, each in saved.items() if name not in ("stat", "weight")
    }
