"""Conversions that only transformers can compute: padding with zeros, picking by a list. The rest of such a model is
copied."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from accel_fsdp_tools.describing import describe_architecture
from accel_fsdp_tools.errors import UnsupportedError
from accel_fsdp_tools.export import export_checkpoint
from accel_fsdp_tools.export.copying import copy_tensors
from accel_fsdp_tools.export.outputs import OutputTensor, split_into_files
from accel_fsdp_tools.export.proof import OutputProof, list_expected
from accel_fsdp_tools.export.recipes import apply_recipes
from accel_fsdp_tools.export.reverting import RevertedTensor, Reverter
from accel_fsdp_tools.opening import open_checkpoint
from tests.exporting import compare_directories
from tests.harness import run_ranks

_COMPUTED = {"model.llm.unembed.weight"}
_QUERIES = {"model.llm.middle_cycle_cross_pass_queries", "model.llm.middle_cycle_cross_pass_kv_queries"}


def _build(is_loop: bool) -> Any:
    import transformers

    shape = {
        "vocab_size": 40,
        "unpadded_vocab_size": 37,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 8,
        "d_rel": 4,
        "rel_extent": 8,
        "moe_intermediate_size": 12,
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
        "sliding_window_size": 8,
        "eos_token_id": 2,
    }
    loop = {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        if is_loop:
            model = transformers.Inkling2LoopForCausalLM(transformers.Inkling2LoopTextConfig(**shape, **loop))
        else:
            model = transformers.Inkling2ForCausalLM(transformers.Inkling2TextConfig(**shape))
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


def _save(model: Any, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint without a manifest, and what transformers writes."""
    model.save_pretrained(folder / "reference")
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": dict(model.state_dict())}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp", folder / "reference"


def test_what_is_computed_is_what_transformers_writes(tmp_path: Path) -> None:
    """In one child, several groups, more than it keeps; all else is copied."""
    model = _build(is_loop=True)
    checkpoint, reference = _save(model, tmp_path)
    facts = describe_architecture(model)
    tensors = open_checkpoint(checkpoint).model.tensors
    with pytest.raises(UnsupportedError, match="computed by transformers"):
        apply_recipes(tensors, facts)
    reverter = Reverter(reference)
    try:
        applied = apply_recipes(tensors, facts, reverter)
        made = {name for name, source in applied.outputs if isinstance(source, RevertedTensor)}
        assert _COMPUTED < made < _COMPUTED | _QUERIES
        out = tmp_path / "out"
        out.mkdir()
        files = split_into_files([OutputTensor(name, source, source.dtype) for name, source in applied.outputs])
        proof = OutputProof(out, files, ())
        result = copy_tensors(files, out, again=proof, num_threads=2)
        proof.conclude(list_expected(result))
        assert (out / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
        # Not what this model makes of it: another shape was recorded.
        unembed = dict(applied.outputs)["model.llm.unembed.weight"]
        wrong = RevertedTensor(
            unembed.fqn, "float32", (41, 16), {"lm_head.weight": tensors["lm_head.weight"]}, reverter
        )
        with pytest.raises(UnsupportedError, match=r"transformers makes .*40, 16.* of it here.*41, 16.* was expected"):
            copy_tensors(split_into_files([OutputTensor("w", wrong, "float32")]), tmp_path)
        # What it cannot convert: a vector in the place of a cube.
        query = next(name for name in tensors if name.endswith("message_input.query"))
        vector = next(each for each in tensors.values() if len(each.shape) == 1)
        reverter._held.clear()  # groups go by their names
        broken = RevertedTensor(query, "float32", (4, 16), {query: vector}, reverter)
        with pytest.raises(UnsupportedError, match="which has failed: IndexError"):
            copy_tensors(split_into_files([OutputTensor("w", broken, "float32")]), tmp_path)
    finally:
        reverter.close()
        reverter.close()


def test_a_child_that_fails_is_one_clear_error(tmp_path: Path) -> None:
    tensor = next(iter(_save_one(tmp_path).values()))
    reverter = Reverter(tmp_path)
    reverter._command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    lost = RevertedTensor("made", "float32", tensor.shape, {"w": tensor}, reverter)
    with pytest.raises(UnsupportedError, match="which has failed: no such model"):
        copy_tensors(split_into_files([OutputTensor("made", lost, "float32")]), tmp_path)
    reverter.close()


def _prepare(model: Any, fsdp_version: int = 2, use_orig_params: bool = True) -> tuple[Any, Any]:
    from tests.training import Setup, build_accelerator

    layers = sorted({type(each).__name__ for each in model.modules() if type(each).__name__.endswith("DecoderLayer")})
    setup = Setup(fsdp_version=fsdp_version, use_orig_params=use_orig_params, accumulation=1)
    accelerator = build_accelerator(setup, wrap=layers)
    if not use_orig_params:
        return accelerator, accelerator.prepare(model)
    return accelerator, accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]


def _export_live(folder: str, is_loop: bool, fsdp_version: int, use_orig_params: bool) -> dict[str, Any]:
    from accel_fsdp_tools import export_model

    place = Path(folder)
    accelerator, model = _prepare(_build(is_loop), fsdp_version, use_orig_params)
    reports = {
        "keep": export_model(accelerator, model, place / "keep", max_shard_size="20KB", verify="load"),
        "bf16": export_model(accelerator, model, place / "bf16", dtype="bf16", num_threads=2),
    }
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        whole = _build(is_loop)
        for tensor in whole.state_dict().values():
            tensor.zero_()
        whole.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
        whole.save_pretrained(place / "keep reference", max_shard_size="20KB")
        whole.to(torch.bfloat16).save_pretrained(place / "bf16 reference")
    return {name: (report.ok, dict(report.proof)) for name, report in reports.items()}


@pytest.mark.parametrize(
    ("is_loop", "fsdp_version", "use_orig_params"), [(True, 2, True), (False, 1, True), (True, 1, False)]
)
def test_from_a_live_model(tmp_path: Path, is_loop: bool, fsdp_version: int, use_orig_params: bool) -> None:
    """Pieces of uneven sizes (a head of 37 rows), each group on one rank; what is moved goes its own way."""
    case = (is_loop, fsdp_version, use_orig_params)
    first, second = run_ranks(_export_live, str(tmp_path), *case, folder=tmp_path / "ranks")
    assert first == second
    for name in ("keep", "bf16"):
        is_ok, proof = first[name]
        assert is_ok, proof
        assert compare_directories(tmp_path / name, tmp_path / f"{name} reference") == []
        assert "tensors read again" in proof["output"]


_ADAPTER = {"default": {"r": 3, "target_modules": ["lm_head", "q_proj.linear"]}}


def _merge_live(folder: str) -> None:
    from accel_fsdp_tools import export_model, save_state
    from tests.adapters import add_adapters

    place = Path(folder)
    accelerator, model = _prepare(add_adapters(_build(True), _ADAPTER))
    save_state(accelerator, place / "step", step=1)
    export_model(accelerator, model, place / "live", merge_adapter=True)
    if accelerator.is_main_process:
        add_adapters(_build(True), _ADAPTER).merge_and_unload().save_pretrained(place / "merged")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_are_merged_before(tmp_path: Path) -> None:
    """A head with an adapter, which transformers pads when it writes it: from a live model, and from a checkpoint."""
    run_ranks(_merge_live, str(tmp_path), folder=tmp_path / "ranks")
    assert compare_directories(tmp_path / "live", tmp_path / "merged") == []
    report = export_checkpoint(tmp_path / "step", tmp_path / "out", merge_adapter="checkpoint")
    assert report.ok
    assert compare_directories(tmp_path / "out", tmp_path / "merged") == []
    base, saved = _save(_build(True), tmp_path)
    with pytest.raises(UnsupportedError, match=r"converted or left out when the base .* Merge from a checkpoint"):
        export_checkpoint(tmp_path / "step", tmp_path / "other", merge_adapter=saved)
    (base / "config.json").write_bytes((saved / "config.json").read_bytes())
    export_checkpoint(tmp_path / "step", tmp_path / "into base", merge_adapter=base)
    assert compare_directories(tmp_path / "into base", tmp_path / "merged") == []


def _save_one(folder: Path) -> Any:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": {"w": torch.randn(700, 700)}}, checkpoint_id=folder / "dcp", no_dist=True)
    return open_checkpoint(folder / "dcp").model.tensors


@pytest.mark.matrix
@pytest.mark.parametrize("is_loop", [True, False])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_whole_export(tmp_path: Path, is_loop: bool, dtype: str) -> None:
    model = _build(is_loop)
    checkpoint, reference = _save(model, tmp_path)
    if dtype == "bf16":
        model.to(torch.bfloat16).save_pretrained(reference)
    report = export_checkpoint(checkpoint, tmp_path / "out", model=reference, dtype=dtype, max_shard_size="20KB")
    assert report.ok
    model.save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    assert compare_directories(tmp_path / "out", tmp_path / "cut") == []
