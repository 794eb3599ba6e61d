"""Exports from end to end: equal to `save_pretrained`, refused where they would be wrong, nothing left of a failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_fsdp_tools import errors
from accel_fsdp_tools.cli.main import main
from accel_fsdp_tools.export import export_checkpoint
from accel_fsdp_tools.export.target import REPORT_NAME
from accel_fsdp_tools.formats.reading import read_array
from accel_fsdp_tools.manifest import DIRECTORY
from accel_fsdp_tools.opening import open_checkpoint
from tests.exporting import compare_directories, save_with_reference
from tests.harness import run_ranks
from tests.manifests import edit_manifest

SAVED: dict[str, dict[str, Any]] = {
    "fsdp2": {"architecture": "llama", "max_shard_size": "5KB"},
    "fsdp2-tied-bf16": {"architecture": "llama_tied", "dtype": "bfloat16"},
    "fsdp2-experts": {"architecture": "mixtral", "max_shard_size": "6KB"},
    "fsdp1-full": {"architecture": "llama_tied", "fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT"},
    "fsdp1": {"architecture": "llama", "fsdp_version": 1},
    "plain": {"architecture": "llama", "plain": True},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return checkpoint and reference of a case, made when first asked for."""
    folder = tmp_path_factory.mktemp("saved")

    def get(name: str) -> tuple[Path, Path]:
        checkpoint, reference = folder / name / "checkpoint", folder / name / "reference"
        if not checkpoint.exists():
            run_ranks(save_with_reference, str(checkpoint), str(reference), folder=folder / name, **SAVED[name])
        return checkpoint, reference

    return get


@pytest.fixture
def copied(saved: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> Path:
    """A checkpoint of FSDP2 that a test may damage."""
    return Path(shutil.copytree(saved("fsdp2")[0], tmp_path / "checkpoint"))


@pytest.mark.parametrize("name", SAVED)
def test_equals_save_pretrained(
    saved: Callable[[str], tuple[Path, Path]], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, reference = saved(name)
    if name != "plain":  # what was one tensor in memory is not compared once more
        monkeypatch.setattr("accel_fsdp_tools.export.content.are_equal", lambda *_: pytest.fail("ties were read"))
    out = tmp_path / "out"
    model = {"model": reference} if name == "plain" else {}
    report = export_checkpoint(
        checkpoint, out, max_shard_size=SAVED[name].get("max_shard_size", "50GB"), report=True, **model
    )
    assert report.ok
    assert compare_directories(out, reference) == []
    extra = {path.name for path in out.iterdir()} - {path.name for path in reference.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert extra == {REPORT_NAME} | (set() if name == "plain" else tokenizer)
    written = json.loads((out / REPORT_NAME).read_text())
    assert written["ok"] is True
    assert set(written["seconds"]) == {"plan", "architecture", "copy"}
    assert written["num_tensors"] == report.num_tensors > 10
    if name == "plain":
        assert "none were recorded" in report.proof["fingerprints"]
    else:
        assert "those of the live model" in report.proof["fingerprints"]
        assert report.proof["crc"].startswith("0 stored items"), "all have fingerprints, experts included"
    if name == "plain":
        return  # what follows would ask transformers in a child process once more
    # And once more from the inner directory, or file.
    inner = next(path for path in checkpoint.iterdir() if path.name.startswith("pytorch_model_fsdp"))
    export_checkpoint(inner, tmp_path / "again", max_shard_size=SAVED[name].get("max_shard_size", "50GB"))
    assert compare_directories(tmp_path / "again", reference) == []


def test_loads_and_computes_the_same(saved: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    checkpoint, _ = saved("fsdp2-experts")
    report = export_checkpoint(checkpoint, tmp_path / "out", verify="load")
    assert report.proof["load"].startswith("MixtralForCausalLM.from_pretrained: all keys found")
    assert report.proof["load"].endswith("logits equal those of the checkpoint's model")


def test_needs_no_torch(saved: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    code = (
        "import sys; from accel_fsdp_tools.cli.main import main; code = main(['export', *sys.argv[1:]]); "
        "sys.exit(code or ('torch' in sys.modules) * 10 or ('transformers' in sys.modules) * 11)"
    )
    checkpoint, reference = saved("fsdp2-experts")
    arguments = [str(checkpoint), str(tmp_path / "out"), "--max-shard-size", "6KB", "--quiet"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert compare_directories(tmp_path / "out", reference) == []


def test_config_and_weights_agree_about_the_dtype(saved: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """Case E01: fp32 weights under a config that says bf16."""
    path = Path(shutil.copytree(saved("fsdp2")[0], tmp_path / "checkpoint"))
    config_path = path / DIRECTORY / "model_0" / "config.json"
    config_path.write_text(json.dumps({**json.loads(config_path.read_text()), "dtype": "bfloat16"}))
    kept = export_checkpoint(path, tmp_path / "kept")
    assert kept.dtypes == {"float32": kept.num_tensors}
    (finding,) = (each for each in kept.findings if each.code == "dtype")
    assert "--dtype config" in finding.message
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["dtype"] == "float32"
    cast = export_checkpoint(path, tmp_path / "cast", dtype="config")
    assert cast.dtypes == {"bfloat16": cast.num_tensors}
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in open_checkpoint(tmp_path / "kept").model.tensors.items():
        whole = torch.from_numpy(read_array(tensor).copy())
        other = torch.from_numpy(read_array(open_checkpoint(tmp_path / "cast").model.tensors[name]).copy())
        assert torch.equal(whole.to(torch.bfloat16).view(torch.int16), other.view(torch.int16)), name


def _flip_payload(path: Path) -> None:
    file = next((path / "pytorch_model_fsdp_0").glob("__1_0.distcp"))
    data = bytearray(file.read_bytes())
    section = open_checkpoint(path).model
    extent = next(
        each for tensor in section.tensors.values() for each in tensor.extents if each.bytes.path == str(file)
    )
    data[extent.offset + 5] ^= 4
    file.write_bytes(data)


def _drop_rank(path: Path) -> None:
    next((path / "pytorch_model_fsdp_0").glob("__1_0.distcp")).unlink()


def _change_fingerprint(path: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        tensors = raw["models"][0]["tensors"]
        tensors[2]["fingerprint"] = tensors[3]["fingerprint"]

    edit_manifest(path, change)


def _break_manifest(path: Path) -> None:
    (path / DIRECTORY / "manifest.json").write_text("{")


DAMAGE: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "a flipped bit": (_flip_payload, errors.DamagedCheckpointError, "CRC"),
    "a rank's file is missing": (_drop_rank, errors.CheckpointIncompleteError, "__1_0.distcp"),
    "not what was in memory": (_change_fingerprint, errors.DamagedCheckpointError, "fingerprint"),
    "a broken manifest": (_break_manifest, errors.ManifestError, "manifest"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_damage_is_refused_and_leaves_everything_as_it_was(copied: Path, tmp_path: Path, name: str, dtype: str) -> None:
    out = tmp_path / "results" / "out"
    export_checkpoint(copied, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    damage, error, text = DAMAGE[name]
    damage(copied)
    with pytest.raises(error, match=text):
        export_checkpoint(copied, out, overwrite=True, dtype=dtype)
    with pytest.raises(error):
        export_checkpoint(copied, out.parent / "other", dtype=dtype, verify="off")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in out.parent.iterdir()] == ["out"], "nothing is left"


def test_targets(copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(copied, out)  # an empty directory is as good as none
    with pytest.raises(errors.UsageError, match="--overwrite"):
        export_checkpoint(copied, out)
    (out / "stale.safetensors").write_bytes(b"")
    export_checkpoint(copied, out, overwrite=True)
    assert not (out / "stale.safetensors").exists(), "replaced, not mixed"
    for wrong, text in (
        (copied, "is the checkpoint itself"),
        (tmp_path, "holds it"),
        (copied / "inside", "inside the checkpoint"),
        (copied / "scheduler.bin", "inside the checkpoint"),
    ):
        with pytest.raises(errors.UsageError, match=text):
            export_checkpoint(copied, wrong, overwrite=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(errors.UsageError, match="no earlier export"):
        export_checkpoint(copied, home, overwrite=True)
    (home / "model.safetensors").write_bytes(b"")
    (home / "pytorch_model_fsdp_0").mkdir()
    (home / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"")
    with pytest.raises(errors.UsageError, match="resume from"):
        export_checkpoint(copied, home, overwrite=True)
    assert (home / "thesis.tex").exists()
    # The Trainer's output folder: a model that was saved into it, beside the checkpoints.
    for part in ("pytorch_model_fsdp_0/.metadata", "trainer_state.json"):
        output = tmp_path / f"output of {Path(part).name}"
        (output / "checkpoint-3" / part).parent.mkdir(parents=True)
        (output / "checkpoint-3" / part).write_bytes(b"")
        (output / "model.safetensors").write_bytes(b"")
        with pytest.raises(errors.UsageError, match="resume from"):
            export_checkpoint(copied, output, overwrite=True)
        assert (output / "checkpoint-3" / part).exists()


def test_leftovers_of_a_killed_export_are_swept(copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = (
        "import os, sys; from accel_fsdp_tools.export import offline; "
        "offline.write_rest = lambda *a, **k: os._exit(9); offline.export_checkpoint(*sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(copied), str(out)], check=False)
    assert done.returncode == 9
    (left,) = (path for path in tmp_path.iterdir() if path.name.startswith(".out.partial-"))
    mine = tmp_path / left.name.replace(left.name.split("-")[-2], str(os.getpid()))
    mine.mkdir()  # of an export that lives
    export_checkpoint(copied, out)
    assert not left.exists()
    assert mine.exists()


def test_a_full_disk_is_noticed_before_the_first_byte(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(errors.StorageError, match="GB left"):
        export_checkpoint(copied, tmp_path / "a" / "out")
    assert not (tmp_path / "a").exists()


def test_a_plan_writes_nothing(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(copied), str(out), "--dry-run", "--max-shard-size", "5KB"]) == 0
    assert not out.exists()
    text = capsys.readouterr().out
    assert "would export" in text
    assert "model-00001-of-" in text
    assert "memory: about" in text
    assert main(["export", str(copied), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def _write_bin(path: Path, state: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    torch.save(state, path / "pytorch_model.bin")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def _make_llama(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from tests.models import build_tiny_llama

    model = build_tiny_llama(hidden_size=16, num_layers=1, **options)
    return {name: each.clone() for name, each in model.state_dict().items()}, model.config.to_diff_dict() | {
        "architectures": ["LlamaForCausalLM"]
    }


@pytest.fixture
def asks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers about a config in this process: importing it in a child takes most of a test's time."""
    from accel_fsdp_tools.describing import describe_architecture
    from accel_fsdp_tools.describing.__main__ import build_from_config
    from accel_fsdp_tools.export import content

    def describe(directory: Path, *, trust_remote_code: bool = False) -> Any:
        return describe_architecture(build_from_config(directory, trust_remote_code=trust_remote_code))

    monkeypatch.setattr(content, "describe_from_config", describe)


@pytest.mark.usefixtures("asks_here")
def test_names_that_do_not_fit_the_architecture(tmp_path: Path) -> None:
    """Cases E02 and E14: missing, unexpected, tied weights that differ."""
    state, config = _make_llama(tie=True)
    path = _write_bin(tmp_path / "ties", {f"module.{name}": each for name, each in state.items()}, config)
    export_checkpoint(path, tmp_path / "equal")
    names = open_checkpoint(tmp_path / "equal").model.tensors
    assert "lm_head.weight" not in names
    assert len(names) == len(state) - 1
    torch.save({**state, "lm_head.weight": state["lm_head.weight"] + 1}, path / "pytorch_model.bin")
    with pytest.raises(errors.MismatchError, match="--untie"):
        export_checkpoint(path, tmp_path / "differ")
    report = export_checkpoint(path, tmp_path / "untied", untie=True, verify="load")
    assert report.proof["load"].endswith("logits equal those of the checkpoint's model")
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False
    less = {name: each for name, each in state.items() if "q_proj" not in name} | {"more.weight": torch.ones(3)}
    torch.save(less, path / "pytorch_model.bin")
    with pytest.raises(errors.CheckpointIncompleteError, match="q_proj"):
        export_checkpoint(path, tmp_path / "no")
    with pytest.raises(errors.MismatchError, match=r"more\.weight"):
        export_checkpoint(path, tmp_path / "no", allow_missing=True)
    report = export_checkpoint(path, tmp_path / "yes", allow_missing=True, allow_unexpected=True, verify="load")
    assert "keys missing" in report.proof["load"]
    assert report.proof["load"] in [each.message for each in report.failures]
    assert {each.code for each in report.findings} >= {"missing", "unexpected"}
    assert "more.weight" in open_checkpoint(tmp_path / "yes").model.tensors
    assert not (tmp_path / "no").exists()


def test_without_a_config_names_stay(tmp_path: Path) -> None:
    state = {"module.a._orig_mod.w": torch.arange(6.0).reshape(2, 3), "module.b": torch.tensor(3)}
    path = _write_bin(tmp_path / "bare", state)
    report = export_checkpoint(path, tmp_path / "out", dtype="bf16")
    assert {each.code for each in report.findings} == {"architecture", "config"}
    found = open_checkpoint(tmp_path / "out").model.tensors
    assert {name: tensor.dtype for name, tensor in found.items()} == {"a.w": "bfloat16", "b": "int64"}
    assert read_array(found["b"]).item() == 3


def test_overflow_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write_bin(tmp_path / "big", {"a": torch.tensor([1.0, 1e6, float("inf")]), "b": torch.ones(2)})
    assert main(["export", str(path), str(tmp_path / "out"), "--dtype", "fp16"]) == 3
    assert "a: 1 finite values became infinite" in capsys.readouterr().out


def test_a_key_inside_the_files(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, ema = {"w": torch.zeros(3, 2)}, {"module.w": torch.ones(3, 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a group, which is meant
        dcp.save({"model": model, "ema": ema}, checkpoint_id=tmp_path / "both", no_dist=True)
    export_checkpoint(tmp_path / "both", tmp_path / "model")
    assert read_array(open_checkpoint(tmp_path / "model").model.tensors["w"]).sum() == 0
    export_checkpoint(tmp_path / "both", tmp_path / "ema", key="ema")
    assert read_array(open_checkpoint(tmp_path / "ema").model.tensors["w"]).sum() == 6
    with pytest.raises(errors.UsageError, match="ema"):
        export_checkpoint(tmp_path / "both", tmp_path / "no", key="nonsense")


@pytest.mark.usefixtures("asks_here")
def test_a_partial_update(tmp_path: Path) -> None:
    state, config = _make_llama()
    base = _write_bin(tmp_path / "base", state, config)
    export_checkpoint(base, tmp_path / "hf")
    trained = _write_bin(tmp_path / "trained", {name: each + 1 for name, each in state.items()}, config)
    report = export_checkpoint(trained, tmp_path / "out", base=tmp_path / "hf", only="*.mlp.*")
    assert any(each.code == "base" for each in report.findings)
    for name, tensor in open_checkpoint(tmp_path / "out").model.tensors.items():
        expected = state[name] + 1 if ".mlp." in name else state[name]
        assert torch.equal(torch.from_numpy(read_array(tensor).copy()), expected), name
    with pytest.raises(errors.UsageError, match="matches no tensor"):
        export_checkpoint(trained, tmp_path / "no", base=tmp_path / "hf", only="*.nothing.*")
    with pytest.raises(errors.UsageError, match="belong together"):
        export_checkpoint(trained, tmp_path / "no", only="*")


def test_an_optimizer_is_no_model(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="--state optimizer"):
        export_checkpoint(copied / "optimizer_0", tmp_path / "out")
    report = export_checkpoint(copied, tmp_path / "out", state="optimizer")
    assert report.ok
    assert list(report.files) == ["optimizer.safetensors"]


def test_ambiguous_paths_list_the_choices(copied: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for step in (1, 2):
        shutil.copytree(copied, root / f"step_{step:08d}")
    with pytest.raises(errors.UsageError, match="step_00000001, step_00000002"):
        export_checkpoint(root, tmp_path / "out")
    shutil.rmtree(root / "step_00000001")
    assert export_checkpoint(root, tmp_path / "out").ok
    (root / "step_00000002" / "pytorch_model_fsdp_1").mkdir()
    shutil.copytree(
        copied / "pytorch_model_fsdp_0", root / "step_00000002" / "pytorch_model_fsdp_1", dirs_exist_ok=True
    )
    with pytest.raises(errors.UsageError, match="--model-index"):
        export_checkpoint(root, tmp_path / "two")


REMOTE = {
    "architectures": ["Model"],
    "auto_map": {"AutoConfig": "modeling.Config", "AutoModel": "modeling.Model"},
    "model_type": "mine",
}


def test_remote_code_is_copied_and_not_run(tmp_path: Path) -> None:
    """Case E17."""
    marker = tmp_path / "ran"
    state = {"w": torch.ones(2, 2)}
    path = _write_bin(tmp_path / "remote", state, REMOTE)
    (path / "modeling.py").write_text(f"open({str(marker)!r}, 'w').write('ran')\n")
    with pytest.raises(errors.UnsupportedError, match="--trust-remote-code"):
        export_checkpoint(path, tmp_path / "out")
    assert not marker.exists()


def test_help_is_fast_and_quiet() -> None:
    for module in ("accel_fsdp_tools.export", "accel_fsdp_tools.verify"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-X", "importtime", "-m", module, "--help"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "Warning" not in done.stderr
        assert not imported & {"numpy", "torch", "safetensors", "transformers", "huggingface_hub"}
