"""Exports from memory: equal to `save_pretrained` and to the export of a checkpoint, and without a trace in the run."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from accel_fsdp_tools import errors, export_live, live_proving, live_writing, views
from accel_fsdp_tools.export.load_values import check_loaded_values
from accel_fsdp_tools.export.target import REPORT_NAME
from accel_fsdp_tools.export_live import export_model
from accel_fsdp_tools.fingerprint import Fingerprint
from accel_fsdp_tools.formats.reading import read_array
from accel_fsdp_tools.opening import open_checkpoint
from tests.exporting import compare_directories, make_tokenizer
from tests.harness import run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "fsdp2": {"architecture": "llama", "limit": "5KB"},
    "fsdp2-experts": {"architecture": "mixtral", "limit": "6KB"},
    "fsdp1-tied": {"architecture": "llama_tied", "fsdp_version": 1},
    "fsdp1-flat-experts": {"architecture": "mixtral", "fsdp_version": 1, "use_orig_params": False},
}
MOMENTS = ("begun", "forward", "backward")


def _hash(*tensors: torch.Tensor | None) -> str:
    data = (b"none" if each is None else each.detach().reshape(-1).view(torch.uint8).tolist() for each in tensors)
    return hashlib.sha256(b"".join(bytes(each) for each in data)).hexdigest()


def _look_at(model: Any, optimizer: Any) -> tuple[Any, ...]:
    """Everything that an export must leave alone, as this rank has it."""
    parameters = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    gradients = [None if each.grad is None else each.grad for each in model.parameters()]
    gradients = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
    return (
        _hash(*parameters),
        _hash(*gradients),
        [tuple(each.shape) for each in parameters],
        [module.training for module in model.modules()],
        _hash(torch.get_rng_state()),
        hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest(),  # type: ignore[union-attr]
        hash(random.getstate()),
        len(optimizer.state_dict()["state"]),
    )


def _train_and_export(folder: str, exports: bool, **case: Any) -> tuple[Any, ...]:
    """One update, then exports at several moments of the next one, then another. Returns how it ended here."""
    from accel_fsdp_tools import Checkpointer, enable_cpu_fsdp, save_state
    from tests.architectures import build_architecture
    from tests.training import Setup, build_accelerator

    enable_cpu_fsdp()
    name = case["architecture"]
    layer = "MixtralDecoderLayer" if name == "mixtral" else "LlamaDecoderLayer"
    setup = Setup(
        fsdp_version=case.get("fsdp_version", 2), use_orig_params=case.get("use_orig_params", True), accumulation=1
    )
    accelerator = build_accelerator(setup, wrap=[layer])
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(11)
    model = build_architecture(name)
    if setup.use_orig_params:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    out, limit = Path(folder), case.get("limit", "50GB")
    model.train()

    def forward() -> torch.Tensor:
        logits = model(input_ids=torch.randint(37, (2, 5))).logits
        loss: torch.Tensor = torch.nn.functional.dropout(logits, 0.1).float().square().mean()
        return loss

    def export(moment: str) -> None:
        if exports:
            before = _look_at(model, optimizer)
            report = export_model(accelerator, accelerator.unwrap_model(model), out / moment, max_shard_size=limit)
            assert report.ok
            assert _look_at(model, optimizer) == before

    accelerator.backward(forward())
    optimizer.step()
    optimizer.zero_grad()
    if exports:
        save_state(accelerator, out / "checkpoint", tokenizer=make_tokenizer())
        checkpointer = Checkpointer(accelerator, out / "root", tokenizer=make_tokenizer())
        verify = "load" if name == "mixtral" and setup.use_orig_params else "output"
        report = checkpointer.export(out / "begun", max_shard_size=limit, report=True, verify=verify)
        assert "tensors read again" in report.proof["output"]
        if verify == "load":
            assert report.ok
            count = len(model.state_dict())
            assert report.proof["load"] == (
                "MixtralForCausalLM.from_pretrained: all keys found, none left over; "
                f"{count} tensors of the loaded model equal those in memory"
            )
        with torch.no_grad():
            export_model(accelerator, model, out / "bf16", dtype="bf16", max_shard_size=limit)
        _save_reference(accelerator, model, name, out / "reference", limit)
    loss = forward()
    export("forward")
    accelerator.backward(loss)
    export("backward")
    optimizer.step()
    optimizer.zero_grad()
    return _look_at(model, optimizer)


def _save_reference(accelerator: Any, model: Any, name: str, path: Path, limit: str) -> None:
    """What `save_pretrained` of the whole model writes; see `exporting.save_with_reference`."""
    from tests.architectures import build_architecture

    state_dict = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        whole = build_architecture(name)
        whole.load_state_dict({key: tensor.clone() for key, tensor in state_dict.items()})
        whole.save_pretrained(path, max_shard_size=limit)


@pytest.mark.parametrize("name", MODELS)
def test_equals_save_pretrained_and_changes_nothing(tmp_path: Path, name: str) -> None:
    from accel_fsdp_tools.export import export_checkpoint

    case = MODELS[name]
    with_exports = run_ranks(_train_and_export, str(tmp_path), True, folder=tmp_path / "ranks", **case)
    limit = case.get("limit", "50GB")
    reference = tmp_path / "reference"
    for moment in MOMENTS:
        assert compare_directories(tmp_path / moment, reference) == [], moment
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "offline", max_shard_size=limit)
    assert compare_directories(tmp_path / "begun", tmp_path / "offline") == []
    extra = {path.name for path in (tmp_path / "begun").iterdir()} - {path.name for path in reference.iterdir()}
    assert extra == {REPORT_NAME, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "offline-bf16", dtype="bf16", max_shard_size=limit)
    lacking = compare_directories(tmp_path / "bf16", tmp_path / "offline-bf16")
    assert set(lacking) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    leftovers = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert leftovers == []
    if name in ("fsdp2", "fsdp1-tied"):
        without = run_ranks(_train_and_export, str(tmp_path), False, folder=tmp_path / "again", **case)
        assert with_exports == without, "the run goes on as if nothing had been exported"


MESHES = (
    "fsdp2 HSDP",
    "fsdp2 TP odd",
    "fsdp2 columns",
    "fsdp2 ignored",
    "fsdp1 flat HYBRID",
    "fsdp1 NO_SHARD",
    "fsdp2 tied",
    "fsdp1 SHARD_GRAD_OP",
    "fsdp2 unsharded after forward",
    "fsdp1 activation checkpointing",
    "unsharded",
)


_BIG = 32 << 20


def _export_big(folder: Path) -> Callable[[], Any]:
    from torch.distributed.fsdp import fully_shard

    big = fully_shard(torch.nn.Linear(2048, _BIG // 4 // 2048, bias=False))
    accelerator: Any = SimpleNamespace(_models=[big])
    return lambda: export_model(accelerator, None, folder / "big", dtype="bf16", num_threads=1)


def _measure_peak(work: Callable[[], Any]) -> int:
    """Return by how many bytes this process grows at most while `work` runs."""

    def read(field: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split(f"{field}:")[1].split()[0]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


def _export_meshes(folder: str) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from tests.shard_cases import CASES, build_case, build_net, gather_whole, run

    dist.init_process_group("gloo")
    written: dict[str, Any] = {}
    original = live_writing.write_shards

    def spy(shards: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(shards, *args, **kwargs)
        written[name] = result.num_bytes
        return result

    with mock.patch.object(export_live, "write_shards", spy):
        for name in MESHES:
            case = CASES[name]
            model = build_case(case)
            run(model, torch.zeros(1, 2, dtype=torch.long))
            export_model(SimpleNamespace(_models=[model]), None, Path(folder) / name, num_threads=2)
            whole = gather_whole(model)
            if dist.get_rank() == 0:
                torch.save(whole, Path(folder) / f"{name}.pt")
        name = "DDP"
        export_model(SimpleNamespace(_models=[DistributedDataParallel(build_net())]), None, Path(folder) / name)
        name = "memory"
        written["peak"] = _measure_peak(_export_big(Path(folder)))
        name = "fsdp2 LoRA"
        model = build_case(CASES[name])
        export_model(SimpleNamespace(_models=[model]), model, Path(folder) / name)
        if dist.get_rank() == 0:
            CASES[name].prepare(build_net()).save_pretrained(Path(folder) / "LoRA reference")
    return written


def test_meshes_and_copies(tmp_path: Path) -> None:
    """HSDP, tensor parallelism, columns, unsharded: values right, every byte written by one rank, work shared."""
    from tests.shard_cases import build_net

    written = run_ranks(_export_meshes, str(tmp_path), world_size=4, folder=tmp_path / "ranks")
    for name in MESHES:
        whole = torch.load(tmp_path / f"{name}.pt")
        tensors = open_checkpoint(tmp_path / name).model.tensors
        assert list(tensors.keys() - whole.keys()) == []
        assert list(whole.keys() - tensors.keys()) == []
        for key, tensor in tensors.items():
            assert np.array_equal(read_array(tensor), whole[key].numpy()), f"{name}: {key}"
        amounts = [rank[name] for rank in written]
        assert sum(amounts) == sum(tensor.size_bytes for tensor in tensors.values()), name
        assert max(amounts) < 0.6 * sum(amounts), f"{name}: {amounts}"
    tensors = open_checkpoint(tmp_path / "DDP").model.tensors
    for key, value in build_net().state_dict().items():
        assert np.array_equal(read_array(tensors[key]), value.numpy()), f"DDP: {key}"
    assert (tmp_path / "big" / "model.safetensors").stat().st_size > _BIG // 2
    assert max(rank["peak"] for rank in written) < _BIG // 3, "less than the model, whatever its size"
    lora = tmp_path / "LoRA reference"
    assert set(compare_directories(tmp_path / "fsdp2 LoRA", lora)) <= {"README.md", "adapter_config.json"}
    # A set in the config: in which order PEFT writes it differs from process to process.
    ours, theirs = (json.loads((path / "adapter_config.json").read_text()) for path in (tmp_path / "fsdp2 LoRA", lora))
    assert {**ours, "target_modules": set(ours["target_modules"])} == {
        **theirs,
        "target_modules": set(theirs["target_modules"]),
    }


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_vl", "olmo_hybrid", "nomic_bert", "mamba", "t5"])
def test_a_single_process_converts_as_save_pretrained_does(tmp_path: Path, name: str) -> None:
    """Fused, joined, renamed, shared and odd parameters; no process group."""
    from tests.architectures import build_architecture

    model = build_architecture(name)
    model.save_pretrained(tmp_path / "reference", max_shard_size="6KB")
    accelerator: Any = SimpleNamespace(_models=[model])
    report = export_model(accelerator, None, tmp_path / "out", max_shard_size="6KB")
    assert report.ok
    assert compare_directories(tmp_path / "out", tmp_path / "reference") == []


def test_what_loads_into_other_values_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that were cast are only looked for, by name."""
    from tests.architectures import build_architecture

    def pretend(out: Path, kept: Any, **options: Any) -> Any:
        assert not kept
        return check_loaded_values(out, {"model.norm.weight": Fingerprint(), "more": Fingerprint()}, **options)

    monkeypatch.setattr(export_live, "check_loaded_values", pretend)
    accelerator: Any = SimpleNamespace(_models=[build_architecture("llama_tied")])
    count = len(accelerator._models[0].state_dict())
    report = export_model(accelerator, None, tmp_path / "out", dtype="bf16", verify="load")
    assert [finding.code for finding in report.failures] == ["load"]
    assert report.proof["load"] == (
        "LlamaForCausalLM.from_pretrained: all keys found, none left over; 0 tensors of the loaded model equal those "
        f"in memory, {count} were cast and are not compared; 1 differ (model.norm.weight); 1 are not in the loaded "
        "model (more)"
    )


@contextmanager
def _patched(on_rank: int, target: Any, name: str, value: Any) -> Iterator[None]:
    import torch.distributed as dist

    if dist.get_rank() != on_rank:
        yield
        return
    with mock.patch.object(target, name, value):
        yield


def _fail(*_: Any, **__: Any) -> None:
    raise OSError(5, "the disk is on fire")


def _provoke(folder: str) -> dict[str, tuple[type[BaseException], str, int | None]]:
    """Make exports fail in every way, over an earlier export; return what this rank raised."""
    import torch.distributed as dist

    from tests.shard_cases import CASES, build_case, build_net

    dist.init_process_group("gloo")
    views.VISIBILITY_S = 0.3
    model = build_case(CASES["fsdp2"])
    out, rank = Path(folder) / "out", dist.get_rank()
    accelerator: Any = SimpleNamespace(_models=[model])
    export_model(accelerator, model, out)
    original = live_writing.write_shards

    def change_first(shards: Any, *args: Any, **kwargs: Any) -> Any:
        shards[0].tensor.add_(1)
        result = original(shards, *args, **kwargs)
        shards[0].tensor.sub_(1)
        return result

    def flip_after(shards: Any, feeds: Any, directory: Path, **kwargs: Any) -> Any:
        result = original(shards, feeds, directory, **kwargs)
        with (directory / "model.safetensors").open("r+b") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))  # this rank's part: the other may be writing still
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        return result

    def shift(self: Any, job: Any, dtype: str, part: Any, data: Any) -> None:
        offset = job.offset + 4 * (job.tensor.name == "embedding.weight")
        write(self, live_writing.Job(job.tensor, job.file, offset), dtype, part, data)

    write = live_writing._Worker._write
    raised: dict[str, tuple[type[BaseException], str, int | None]] = {}

    def expect(name: str, make: Callable[[], Any]) -> None:
        try:
            make()
        except errors.AccelFsdpError as error:
            raised[name] = type(error), str(error), error.rank
        else:
            raised[name] = type(None), "nothing", None

    def export(**options: Any) -> Callable[[], Any]:
        return lambda: export_model(accelerator, model, out, **{"overwrite": True, **options})

    with _patched(1, live_writing.Writer, "write", _fail):
        expect("write", export())
    with _patched(1, export_live, "_look", lambda *_: "does not see model.safetensors"):
        expect("shared", export())
    with _patched(0, export_live, "create_files", _fail):
        expect("create", export())
    with _patched(1, live_proving, "sum_output", _fail):
        expect("read", export())
    with _patched(0, export_live, "write_rest", _fail):
        expect("config", export())
    with _patched(0, export_live, "write_shards", flip_after):
        expect("flip", export())
    with _patched(1, live_writing._Worker, "_write", shift):
        expect("place", export())
    with _patched(1, export_live, "write_shards", change_first):
        expect("changed", export(dtype="bf16"))
        expect("changed unseen", export())
    expect("exists", export(overwrite=False))
    expect("arguments", export(dtype="bf16" if rank else "fp16"))
    expect("dtype", export(dtype="int4"))
    expect("config dtype", export(dtype="config"))
    expect("no config", export(verify="load"))
    whole = build_net()
    if rank == 1:
        with torch.no_grad():
            whole.head.weight[3, 1] += 1
    expect("copies", lambda: export_model(accelerator, whole, Path(folder) / "other"))
    expect("none", lambda: export_model(SimpleNamespace(_models=[]), None, out))  # type: ignore[arg-type]
    (Path(folder) / "checkpoint").mkdir(exist_ok=True)
    (Path(folder) / "checkpoint" / ".metadata").touch()
    expect("inside", lambda: export_model(accelerator, model, Path(folder) / "checkpoint" / "out"))
    return raised


def test_a_failure_is_the_same_everywhere_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    first, second = run_ranks(_provoke, str(folder), folder=tmp_path / "ranks")
    assert first == second, "all ranks raise the same"
    expected: dict[str, tuple[type[BaseException], str, int | None]] = {
        "write": (errors.RankFailedError, "writing the export: rank 1 failed with OSError", 1),
        "shared": (errors.StorageError, "rank 1 does not see model.safetensors", 1),
        "create": (errors.RankFailedError, "making the files: rank 0 failed", 0),
        "read": (errors.RankFailedError, "reading the export again: rank 1 failed", 1),
        "config": (errors.RankFailedError, "writing the index: rank 0 failed", 0),
        "flip": (errors.DamagedCheckpointError, "is not what was in memory", None),
        "place": (errors.DamagedCheckpointError, "is not what was in memory", None),
        "changed": (errors.CallOrderError, "changed while it was exported", None),
        "changed unseen": (errors.DamagedCheckpointError, "the model was updated meanwhile", None),
        "exists": (errors.UsageError, "exists and is not empty", 0),
        "arguments": (errors.UsageError, "dtype is 'fp16' on rank 0 and 'bf16' on rank 1", 1),
        "dtype": (errors.UsageError, "dtype is 'int4'", 0),
        "config dtype": (errors.UsageError, "no config states one", 0),
        "no config": (errors.UsageError, "no config to load with", 0),
        "copies": (errors.ReplicaDivergenceError, "head.weight", None),
        "none": (errors.UsageError, "0 models are prepared", 0),
        "inside": (errors.UsageError, "lies inside the checkpoint", 0),
    }
    assert first.keys() == expected.keys()
    for name, (kind, text, rank) in expected.items():
        assert first[name][0] is kind, f"{name}: {first[name]}"
        assert text in first[name][1], f"{name}: {first[name]}"
        assert first[name][2] == rank, f"{name}: {first[name]}"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "out"], "nothing is left"
    assert [path.name for path in (folder / "out").iterdir()] == ["model.safetensors"]
    from tests.shard_cases import build_net

    tensors = open_checkpoint(folder / "out").model.tensors
    for key, value in build_net().state_dict().items():
        assert np.array_equal(read_array(tensors[key]), value.numpy()), "the earlier export is intact"
