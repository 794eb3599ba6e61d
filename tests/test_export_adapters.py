"""Adapters: exported as PEFT writes them, merged as PEFT merges them, refused where that would be a guess.

A merged weight may differ from PEFT's in the last bits, because libraries add the product of two matrices up in
different orders. What is allowed for is a few roundings of the product's terms; names, shapes and files are the same.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_fsdp_tools import errors
from accel_fsdp_tools.architecture import ArchitectureFacts, OutputFacts
from accel_fsdp_tools.cli.main import main
from accel_fsdp_tools.describing import describe_architecture
from accel_fsdp_tools.describing.__main__ import build_from_config
from accel_fsdp_tools.export import export_checkpoint, merging, plans
from accel_fsdp_tools.export.casting import cast_block
from accel_fsdp_tools.export.copying import copy_tensors
from accel_fsdp_tools.export.lora import Update
from accel_fsdp_tools.export.merged import MergedTensor
from accel_fsdp_tools.export.outputs import OutputTensor, split_into_files
from accel_fsdp_tools.export.select import select_model
from accel_fsdp_tools.extents import DTYPE_SIZES
from accel_fsdp_tools.formats.reading import read_array, read_part
from accel_fsdp_tools.formats.safetensors_reader import read_safetensors
from accel_fsdp_tools.live import describe_model
from accel_fsdp_tools.manifest import DIRECTORY
from accel_fsdp_tools.opening import open_checkpoint
from tests.adapters import add_adapters, build_base, load_into_live_model, make_tokens, train_and_save
from tests.exporting import compare_directories
from tests.harness import run_ranks
from tests.manifests import edit_manifest

# PEFT 0.21 with a newer transformers, and what it says about adapters that are as they are on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

PLAIN: dict[str, dict[str, Any]] = {
    "default": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
}
TWO: dict[str, dict[str, Any]] = {
    "default": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["q_proj", "down_proj", "embed_tokens"],
        "modules_to_save": ["norm"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 3},
        "alpha_pattern": {"down_proj": 5},
        "task_type": "CAUSAL_LM",
    },
    "style": {
        "r": 2,
        "lora_alpha": 7,
        "target_modules": ["k_proj", "down_proj"],
        "modules_to_save": ["lm_head"],
        "task_type": "CAUSAL_LM",
    },
}

# Every pair of version, state-dict type and activation checkpointing.
SAVED: dict[str, dict[str, Any]] = {
    "fsdp2": {"configs": PLAIN},
    "fsdp2-full-checkpointing": {"configs": TWO, "state_dict_type": "FULL_STATE_DICT", "checkpointing": True},
    "fsdp1-checkpointing": {"configs": TWO, "fsdp_version": 1, "checkpointing": True},
    "fsdp1-full": {"configs": PLAIN, "fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT"},
}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}

Saved = Callable[[str], tuple[Path, list[tuple[Any, list[str]]]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder of a case, and what its ranks returned; made when first asked for."""
    folder = tmp_path_factory.mktemp("adapters")
    known: dict[str, list[tuple[Any, list[str]]]] = {}

    def get(name: str) -> tuple[Path, list[tuple[Any, list[str]]]]:
        if name not in known:
            place = folder / name
            known[name] = run_ranks(train_and_save, str(place), folder=place / "ranks", **SAVED[name])
        return folder / name, known[name]

    return get


def _read_config(path: Path) -> dict[str, Any]:
    """PEFT's configs have sets in them, which come out in any order."""
    found = json.loads((path / "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in found.items()}


def _check_adapter(out: Path, reference: Path) -> None:
    assert (out / "adapter_model.safetensors").read_bytes() == (reference / "adapter_model.safetensors").read_bytes()
    assert _read_config(out) == _read_config(reference)
    assert len((out / "adapter_config.json").read_text()) == len((reference / "adapter_config.json").read_text())


def _read(tensor: Any) -> torch.Tensor:
    """Return a tensor of a checkpoint in float32."""
    if tensor.dtype in ("bfloat16", "float16"):
        out = memoryview(bytearray(4 * tensor.numel))
        cast_block(memoryview(read_part(tensor)), tensor.dtype, "float32", out)
        return torch.frombuffer(out, dtype=torch.float32).reshape(tensor.shape)
    return torch.from_numpy(read_array(tensor).copy())


def _check_merged(out: Path, merged: Path, extra: set[str] = TOKENIZER) -> None:
    """Everything but the bits of sums is the same."""
    ours, theirs = open_checkpoint(out).model.tensors, open_checkpoint(merged).model.tensors
    assert {name: (each.dtype, each.shape) for name, each in ours.items()} == {
        name: (each.dtype, each.shape) for name, each in theirs.items()
    }
    for name, tensor in theirs.items():
        eps = {"bfloat16": 2**-7, "float16": 2**-10}.get(tensor.dtype, 2**-20)
        torch.testing.assert_close(_read(ours[name]), _read(tensor), rtol=eps, atol=2**-20, msg=name)
    different = set(compare_directories(out, merged))
    assert different <= {name for name in different if name.endswith(".safetensors")}
    for path in merged.glob("*.safetensors"):
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert (out / path.name).read_bytes()[: 8 + length] == path.read_bytes()[: 8 + length], "header"
    assert {path.name for path in out.iterdir()} - {path.name for path in merged.iterdir()} == extra


@pytest.mark.parametrize("name", SAVED)
def test_save_zero_load(saved: Saved, name: str) -> None:
    """Case P01: equal on every rank after the adapter was zeroed."""
    _, outcomes = saved(name)
    assert [wrong for _, wrong in outcomes] == [[], []]


@pytest.mark.parametrize("name", SAVED)
def test_adapter_directory_is_pefts(saved: Saved, tmp_path: Path, name: str) -> None:
    """Case P03: and it gives the live model's logits."""
    from peft import PeftModel

    place, outcomes = saved(name)
    report = export_checkpoint(place / "step", tmp_path / "out")
    assert report.ok
    configs = SAVED[name]["configs"]
    for adapter in configs:
        folder = "." if adapter == "default" else adapter
        _check_adapter(tmp_path / "out" / folder, place / "reference" / folder)
    assert {path.name for path in (tmp_path / "out").iterdir()} == TOKENIZER | {
        "adapter_model.safetensors",
        "adapter_config.json",
        *(each for each in configs if each != "default"),
    }
    count = report.num_tensors
    assert f"{count} of {count} tensors compared" in report.proof["fingerprints"] or "style" in configs
    if name.startswith("fsdp2"):
        loaded = PeftModel.from_pretrained(build_base("llama_tied"), tmp_path / "out").eval()
        with torch.no_grad():
            logits = loaded(input_ids=make_tokens()).logits.numpy()
        np.testing.assert_allclose(logits, outcomes[0][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("kind", ["checkpoint", "directory"])
def test_merged_is_merge_and_unload(saved: Saved, tmp_path: Path, name: str, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    place, outcomes = saved(name)
    base = "checkpoint" if kind == "checkpoint" else place / "base"
    report = export_checkpoint(place / "step", tmp_path / "out", merge_adapter=base)
    _check_merged(tmp_path / "out", place / "merged")
    num_merged = 4 if SAVED[name]["configs"] is PLAIN else 5
    finding = next(each for each in report.findings if each.code == "merged")
    assert f"adapter default merged into {num_merged} tensors" in finding.message
    is_plain = SAVED[name]["configs"] is PLAIN
    assert any(each.code == "tied" for each in report.findings) != is_plain, "embeddings that are tied to the head"
    if is_plain:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        with torch.no_grad():
            logits = model(input_ids=make_tokens()).logits.numpy()
        np.testing.assert_allclose(logits, outcomes[0][0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SAVED)
def test_from_a_live_model(saved: Saved, tmp_path: Path, name: str) -> None:
    """All adapters, one of them, and merged, from the shards in memory; the load that follows finds them unchanged."""
    place, _ = saved(name)
    configs = SAVED[name]["configs"]
    for adapter in configs:
        folder = "." if adapter == "default" else adapter
        _check_adapter(place / "live" / folder, place / "reference" / folder)
    assert {path.name for path in (place / "live").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        *(each for each in configs if each != "default"),
    }
    _check_merged(place / "live merged", place / "merged")
    if "style" in configs:
        ours = load_file(place / "live style" / "adapter_model.safetensors")
        theirs = load_file(place / "reference" / "style" / "adapter_model.safetensors")
        assert {key: value.to(torch.bfloat16) for key, value in theirs.items()}.keys() == ours.keys()
        assert all(torch.equal(ours[key], value.to(torch.bfloat16)) for key, value in theirs.items())


def test_one_of_two_adapters(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = saved("fsdp1-checkpointing")
    step = str(place / "step")
    assert main(["export", step, str(tmp_path / "one"), "--adapter", "style", "--dtype", "bf16", "--quiet"]) == 0
    ours = load_file(tmp_path / "one" / "adapter_model.safetensors")
    theirs = load_file(place / "reference" / "style" / "adapter_model.safetensors")
    assert {name: each.to(torch.bfloat16) for name, each in theirs.items()}.keys() == ours.keys()
    assert all(torch.equal(theirs[name].to(torch.bfloat16), each) for name, each in ours.items())
    # The one that was not in use is merged with its own copy of the head, and the other's norm stays as it was.
    assert main(["export", step, str(tmp_path / "m"), "--adapter", "style", "--merge-adapter", "checkpoint"]) == 0
    other = ["--adapter", "style", "--merge-adapter", str(place / "base")]
    assert main(["export", step, str(tmp_path / "other"), *other]) == 0
    assert compare_directories(tmp_path / "other", tmp_path / "m") == []
    whole = add_adapters(build_base("llama_tied"), TWO)
    whole.load_state_dict(_read_state(place / "step"))
    whole.set_adapter("style")
    whole.merge_and_unload().save_pretrained(tmp_path / "merged")
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("m", "merged"))
    assert ours.keys() == theirs.keys()
    assert "lm_head.weight" in ours
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"] is False
    for name, each in theirs.items():
        torch.testing.assert_close(ours[name], each, rtol=1e-6, atol=1e-6)
    for arguments, text in (
        (["--adapter", "nix"], "default, style"),
        (["--adapter", "style", "--merge-adapter", "no/where"], "The word checkpoint"),
        (["--base", str(place), "--only", "*"], "whole model"),
    ):
        assert main(["export", step, str(tmp_path / "no"), *arguments]) != 0
        assert text in capsys.readouterr().err


def _read_state(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(read_array(each).copy()) for name, each in open_checkpoint(path).model.tensors.items()
    }


def test_merging_needs_no_torch(saved: Saved, tmp_path: Path) -> None:
    code = (
        "import sys; from accel_fsdp_tools.cli.main import main; code = main(['export', *sys.argv[1:]]); "
        "sys.exit(code or ('torch' in sys.modules) * 10 or ('transformers' in sys.modules) * 11)"
    )
    place, _ = saved("fsdp2")
    arguments = [str(place / "step"), str(tmp_path / "out"), "--merge-adapter", str(place / "base"), "--quiet"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_loads_into_a_live_model(saved: Saved, tmp_path: Path) -> None:
    """Case P07."""
    place, outcomes = saved("fsdp2")
    export_checkpoint(place / "step", tmp_path / "out")
    for logits in run_ranks(load_into_live_model, str(tmp_path / "out"), PLAIN, folder=tmp_path / "ranks"):
        np.testing.assert_allclose(logits, outcomes[0][0], rtol=1e-5, atol=1e-5)


def test_checked_by_loading(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, _ = saved("fsdp2")

    def describe(directory: Path, **_: Any) -> Any:  # in this process, to save a child the imports
        return describe_architecture(build_from_config(directory, trust_remote_code=False))

    monkeypatch.setattr(merging, "describe_from_config", describe)
    report = export_checkpoint(place / "step", tmp_path / "out", verify="load")
    assert report.proof["load"] == (
        "PeftModel.from_pretrained: all keys found, none left over; logits equal those of the checkpoint's model"
    )
    report = export_checkpoint(
        place / "only", tmp_path / "m", model=place / "reference", merge_adapter=place / "base", verify="load"
    )
    _check_merged(tmp_path / "m", place / "merged", extra=set())
    assert report.proof["load"].startswith("LlamaForCausalLM.from_pretrained: all keys found, none left over; logits")
    report = export_checkpoint(place / "only", tmp_path / "only", model=place / "reference", verify="load")
    assert report.proof["load"].startswith("not loaded: of the base model there is no config.json")


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-full-checkpointing"])
def test_checkpoints_of_adapters_alone(saved: Saved, tmp_path: Path, name: str) -> None:
    """Case P05, as Accelerate and the Trainer write them."""
    place, _ = saved(name)
    with pytest.raises(errors.UnsupportedError, match=r"adapter_config\.json is missing"):
        export_checkpoint(place / "only", tmp_path / "out")
    export_checkpoint(place / "only", tmp_path / "out", model=place / "reference")
    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    theirs = load_file(place / "reference" / "adapter_model.safetensors")
    assert theirs.keys() - ours.keys() <= {"base_model.model.model.embed_tokens.base_layer.weight"}  # frozen
    assert ours
    assert all(torch.equal(theirs[key], each) for key, each in ours.items())
    size = sum(each.size_bytes for each in open_checkpoint(place / "only").model.tensors.values())
    exported = sum(each.numel() * each.element_size() for each in ours.values())
    # What requires gradients; PEFT leaves a copy of the head among it that belongs to the adapter not in use.
    assert size - exported in (0, 37 * 16 * 4)
    # The Trainer's checkpoints: PEFT's own files, beside other things.
    trainer = Path(shutil.copytree(place / "reference", tmp_path / "checkpoint-3"))
    (trainer / "trainer_state.json").write_text("{}")
    export_checkpoint(trainer, tmp_path / "again")
    _check_adapter(tmp_path / "again", place / "reference")


def test_checkpoints_of_others(saved: Saved, tmp_path: Path) -> None:
    place, _ = saved("fsdp2-full-checkpointing")
    foreign = Path(shutil.copytree(place / "step", tmp_path / "foreign", ignore=shutil.ignore_patterns(DIRECTORY)))
    with pytest.raises(errors.UnsupportedError, match="its adapter 'default'"):
        export_checkpoint(foreign, tmp_path / "out")
    export_checkpoint(foreign, tmp_path / "out", model=place / "reference")
    _check_adapter(tmp_path / "out", place / "reference")
    _check_adapter(tmp_path / "out" / "style", place / "reference" / "style")
    with pytest.raises(errors.UsageError, match="Say with --adapter which one to merge: default, style"):
        export_checkpoint(foreign, tmp_path / "m", model=place / "reference", merge_adapter="checkpoint")
    with pytest.raises(errors.UnsupportedError, match="Which architecture the base model has is not known"):
        export_checkpoint(
            foreign, tmp_path / "m", model=place / "reference", merge_adapter="checkpoint", adapter="default"
        )


def _change_fingerprint(path: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        tensor = next(each for each in raw["models"][0]["tensors"] if "lora_A" in each["fqn"])
        tensor["fingerprint"] = raw["models"][0]["tensors"][0]["fingerprint"]

    edit_manifest(path, change)


def _flip(path: Path) -> None:
    tensors = open_checkpoint(path).model.tensors
    extent = next(each for name, each in tensors.items() if "q_proj.base_layer" in name).extents[0]
    data = bytearray(Path(extent.bytes.path).read_bytes())
    data[extent.offset + 1] ^= 4
    Path(extent.bytes.path).write_bytes(data)


@pytest.mark.parametrize(("damage", "text"), [(_change_fingerprint, "fingerprint"), (_flip, "fingerprint|CRC")])
def test_damage_is_found(saved: Saved, tmp_path: Path, damage: Callable[[Path], None], text: str) -> None:
    place, _ = saved("fsdp2")
    path = Path(shutil.copytree(place / "step", tmp_path / "step"))
    damage(path)
    with pytest.raises(errors.DamagedCheckpointError, match=text):
        export_checkpoint(path, tmp_path / "out", merge_adapter="checkpoint")
    assert not (tmp_path / "out").exists()


# Without FSDP: the same for many kinds of layers.

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bf16": ("llama", "bfloat16", {"target_modules": ["q_proj", "down_proj", "embed_tokens"]}),
    "bf16 adapter": ("llama", "bfloat16", {"target_modules": ["q_proj", "embed_tokens"], "autocast": False}),
    "fp16": ("llama", "float16", {"target_modules": ["q_proj"], "r": 3, "use_rslora": True}),
    "Conv1D": ("gpt2", "float32", {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
    "all biases": ("gpt2", "float32", {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
    "some biases": ("bert", "float32", {"target_modules": ["query"], "bias": "lora_only"}),
    "LoRA with biases": ("bert", "float32", {"target_modules": ["query", "dense"], "lora_bias": True}),
    "convolution": ("llava", "float32", {"target_modules": ["patch_embedding", "q_proj"]}),
    "experts beside it": ("mixtral", "float32", {"target_modules": ["q_proj"]}),
    "renamed": ("qwen2_vl", "float32", {"target_modules": ["q_proj", "qkv"]}),
    "one becomes three": ("olmo_hybrid", "float32", {"target_modules": "all-linear"}),
    "joined": ("nomic_bert", "float32", {"target_modules": "all-linear"}),
    "reordered rows": ("hrm_text", "float32", {"target_modules": "all-linear"}),
}
CONVERTED = ("joined", "reordered rows")


def _save(
    folder: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: str, options: dict[str, Any]
) -> tuple[Any, Path]:
    """Return a PEFT model and a checkpoint of it that says what a manifest would."""
    options = {"r": 4, "lora_alpha": 6, **options}
    autocast = options.pop("autocast", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of what is done on purpose
        model = add_adapters(build_base(architecture, dtype), {"default": options}, autocast=autocast)
        with torch.no_grad():
            torch.manual_seed(3)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and name.endswith("bias"):
                    parameter.normal_()
        folder.mkdir(exist_ok=True)
        model.save_pretrained(folder / "reference")
        build_base(architecture, dtype).save_pretrained(folder / "base")
    return model, _save_state(folder, monkeypatch, model)


def _save_state(folder: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> Path:
    folder.mkdir(exist_ok=True)
    facts = dataclasses.replace(describe_model(model), architecture=describe_architecture(model).to_dict())
    path = folder / "pytorch_model.bin"
    torch.save(model.state_dict(), path)

    def select(given: Any, **options: Any) -> Any:
        return dataclasses.replace(select_model(given, **options), facts=facts)

    monkeypatch.setattr(plans, "select_model", select)
    return path


def test_several_adapters_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT rounds to the weight's dtype after each one, so their order matters in bfloat16."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    configs = {"default": options, "style": {**options, "r": 3, "target_modules": ["q_proj", "down_proj"]}}
    model = add_adapters(build_base("llama", "bfloat16"), configs)
    model.base_model.set_adapter(["style", "default"])
    path = _save_state(tmp_path / "saved", monkeypatch, model)
    report = export_checkpoint(path, tmp_path / "out", merge_adapter="checkpoint")
    assert any("adapter style, default merged into 6 tensors" in each.message for each in report.findings)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    _check_merged(tmp_path / "out", tmp_path / "merged", extra=set())
    export_checkpoint(path, tmp_path / "one", merge_adapter="checkpoint", adapter="style")
    one, both = (load_file(tmp_path / each / "model.safetensors") for each in ("one", "out"))
    assert [name for name in both if not torch.equal(one[name], both[name])] == [
        f"model.layers.{layer}.self_attn.{each}_proj.weight" for layer in (0, 1) for each in "qv"
    ]


@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, path = _save(tmp_path / "saved", monkeypatch, *CASES[name])
    export_checkpoint(path, tmp_path / "adapter")
    _check_adapter(tmp_path / "adapter", path.parent / "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
    export_checkpoint(path, tmp_path / "out", merge_adapter="checkpoint")
    _check_merged(tmp_path / "out", tmp_path / "merged", extra=set())
    if name in CONVERTED:
        with pytest.raises(errors.UnsupportedError, match="is converted by transformers when it is saved"):
            export_checkpoint(path, tmp_path / "no", merge_adapter=path.parent / "base")
        return
    export_checkpoint(path, tmp_path / "other", merge_adapter=path.parent / "base")
    assert compare_directories(tmp_path / "other", tmp_path / "out") == []
    cast = export_checkpoint(path, tmp_path / "cast", merge_adapter="checkpoint", dtype="bf16")
    assert cast.dtypes == {"bfloat16": cast.num_tensors}
    for key, each in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "cast" / "model.safetensors")[key], each.to(torch.bfloat16)), key


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "DoRA": ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "DoRA scales"),
    "experts": ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj"]}, "fused experts"),
    "tokens": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
        "single rows of the embeddings",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_only_plain_lora_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    architecture, options, text = REFUSED[name]
    _, path = _save(tmp_path / "saved", monkeypatch, architecture, "float32", options)
    export_checkpoint(path, tmp_path / "adapter")
    _check_adapter(tmp_path / "adapter", path.parent / "reference")
    with pytest.raises(errors.UnsupportedError, match=text):
        export_checkpoint(path, tmp_path / "no", merge_adapter="checkpoint")
    assert not (tmp_path / "no").exists()


def test_other_methods_are_exported_and_not_merged(tmp_path: Path) -> None:
    from peft import IA3Config, PromptTuningConfig, get_peft_model

    config = IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
    for number, each in enumerate([config, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)]):
        place = tmp_path / str(number)
        get_peft_model(build_base(), each).save_pretrained(place / "reference")
        export_checkpoint(place / "reference", place / "out")
        _check_adapter(place / "out", place / "reference")
        with pytest.raises(errors.UnsupportedError, match="only LoRA is merged here"):
            export_checkpoint(place / "reference", place / "no", merge_adapter=place)


def _write_adapter(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], **config}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def _make_pair(rank: int = 2, rows: int = 6, columns: int = 4, module: str = "q") -> dict[str, torch.Tensor]:
    stem = f"base_model.model.{module}"
    return {f"{stem}.lora_A.weight": torch.ones(rank, columns), f"{stem}.lora_B.weight": torch.ones(rows, rank)}


def test_adapters_that_are_none(tmp_path: Path) -> None:
    """What PEFT and Accelerate have written under FSDP: nothing at all, or one rank's pieces."""
    empty = _write_adapter(tmp_path / "empty", {})
    with pytest.raises(errors.CheckpointIncompleteError, match="has no tensors"):
        export_checkpoint(empty, tmp_path / "out")
    pieces = {**_make_pair(), "base_model.model.q.lora_A.weight": torch.ones(3)}
    with pytest.raises(errors.DamagedCheckpointError, match="piece of a sharded matrix"):
        export_checkpoint(_write_adapter(tmp_path / "pieces", pieces), tmp_path / "out")
    bare = tmp_path / "bare"
    bare.mkdir()
    torch.save({f"base_model.model.{name}": torch.ones(2) for name in "ab"}, bare / "pytorch_model.bin")
    with pytest.raises(errors.CheckpointIncompleteError, match="has no tensors"):
        export_checkpoint(bare, tmp_path / "out", model=empty)
    torch.save({"w": torch.ones(2)}, bare / "pytorch_model.bin")
    for options in ({"adapter": "default"}, {"merge_adapter": "checkpoint"}):
        with pytest.raises(errors.UsageError, match="holds no adapters"):
            export_checkpoint(bare, tmp_path / "out", **options)
    with pytest.raises(errors.UsageError, match="part of the model"):
        export_checkpoint(bare, tmp_path / "out", state="optimizer", adapter="default")


def test_adapters_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(directory: Path, **_: Any) -> ArchitectureFacts:
        return ArchitectureFacts("Net", {"q.weight": (6, 4)}, (OutputFacts("q.weight", (6, 4), source="q.weight"),))

    monkeypatch.setattr(merging, "describe_from_config", describe)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "net"}')
    save_file({"q.weight": torch.zeros(6, 4)}, base / "model.safetensors")
    good = _write_adapter(tmp_path / "good", _make_pair())
    report = export_checkpoint(good, tmp_path / "out", merge_adapter=base)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["q.weight"], torch.full((6, 4), 4.0))
    assert "config.json" in report.companions
    for number, (tensors, config, error, text) in enumerate(
        (
            (_make_pair(), {"r": 3}, errors.MismatchError, "rank 2 and adapter_config.json says 3"),
            (_make_pair(rows=5), {}, errors.MismatchError, "they are of another model"),
            (_make_pair(module="k"), {}, errors.UnsupportedError, "no such module"),
            (_make_pair(), {"init_lora_weights": "pissa"}, errors.UnsupportedError, "--merge-adapter checkpoint"),
            ({**_make_pair(), "base_model.model.n": torch.ones(1)}, {}, errors.UnsupportedError, "trained with the"),
        )
    ):
        path = _write_adapter(tmp_path / str(number), tensors, **config)
        with pytest.raises(error, match=text):
            export_checkpoint(path, tmp_path / "no", merge_adapter=base)
    with pytest.raises(errors.UnsupportedError, match="an adapter and no base model"):
        export_checkpoint(good, tmp_path / "no", merge_adapter="checkpoint", model=base)
    save_file({"other": torch.zeros(6, 4)}, base / "model.safetensors")
    with pytest.raises(errors.CheckpointIncompleteError, match=r"lacks 1 tensors of Net.*q\.weight"):
        export_checkpoint(good, tmp_path / "no", merge_adapter=base)


@pytest.mark.parametrize(("shape", "rank"), [((1100, 1000), 16), ((3, 1 << 20), 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_weights(tmp_path: Path, shape: tuple[int, int], rank: int, dtype: str) -> None:
    """The same bytes with any number of threads; as near to the exact sum as torch is."""
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    tensors = {
        "w": torch.randn(shape).to(kind),
        "a": torch.randn(rank, shape[1]),
        "b": torch.randn(shape[0], rank),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    disk = read_safetensors(tmp_path / "in.safetensors").tensors
    merged = MergedTensor("w", disk["w"], (Update(disk["a"], disk["b"], 0.3),))
    written = []
    for threads in (1, 3):
        out = tmp_path / str(threads)
        out.mkdir()
        result = copy_tensors(split_into_files([OutputTensor("w", merged, dtype)]), out, num_threads=threads)
        written.append((out / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    assert result.num_bytes_written == tensors["w"].numel() * DTYPE_SIZES[dtype]
    ours = load_file(out / "model.safetensors")["w"]
    expected = tensors["w"].clone()
    expected += (tensors["b"] @ tensors["a"]) * 0.3
    terms = 0.3 * (tensors["b"].abs() @ tensors["a"].abs()) + tensors["w"].float().abs()
    rounding = 2**-22 if dtype == "float32" else 2**-7
    assert ((ours.float() - expected.float()).abs() <= 4 * 2**-23 * terms + rounding * expected.float().abs()).all()
