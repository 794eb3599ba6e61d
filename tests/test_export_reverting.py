"""Conversions that only transformers can compute: padding with zeros, picking by a list. The rest of such a model is
copied."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from accel_fsdp_tools import export_live, live_reverting
from accel_fsdp_tools.describing import describe_architecture
from accel_fsdp_tools.describing.reverting import build_reference, describe_conversions
from accel_fsdp_tools.errors import (
    AccelFsdpError,
    CallOrderError,
    DamagedCheckpointError,
    RankFailedError,
    RankMismatchError,
    RankMissingError,
    UnsupportedError,
)
from accel_fsdp_tools.export import export_checkpoint
from accel_fsdp_tools.export.copying import copy_tensors
from accel_fsdp_tools.export.outputs import OutputTensor, split_into_files
from accel_fsdp_tools.export.proof import OutputProof, list_expected
from accel_fsdp_tools.export.recipes import apply_recipes
from accel_fsdp_tools.export.reverting import RevertedTensor, Reverter
from accel_fsdp_tools.formats.reading import read_array
from accel_fsdp_tools.opening import open_checkpoint
from tests.exporting import compare_directories
from tests.harness import collect, run_ranks, start_ranks

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


def test_from_a_live_model_in_a_single_process(tmp_path: Path) -> None:
    from accel_fsdp_tools import export_model

    model = _build(is_loop=True)
    model.save_pretrained(tmp_path / "reference")
    export_model(SimpleNamespace(_models=[model]), None, tmp_path / "out")  # type: ignore[arg-type]
    assert compare_directories(tmp_path / "out", tmp_path / "reference") == []


def _build_doubling(num_layers: int, rows: int, columns: int) -> Any:
    """A model whose weights are written doubled, each by itself."""
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Multiply(ConversionOps):  # type: ignore[misc]
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
            return {
                key: self.factor * (each[0] if isinstance(each, list) else each) for key, each in input_dict.items()
            }

        @property
        def reverse_op(self) -> Multiply:
            return Multiply(1 / self.factor)

    class Net(PreTrainedModel):  # type: ignore[misc]
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(columns, rows) for _ in range(num_layers))
            self.post_init()

    torch.manual_seed(5)
    model: Any = Net(PretrainedConfig())
    model._weight_conversions = [WeightConverter("weight", "weight", operations=[Multiply(0.5)])]
    return model


def _shard_doubling(num_layers: int, rows: int, columns: int) -> tuple[Any, Any]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = fully_shard(_build_doubling(num_layers, rows, columns))
    return SimpleNamespace(_models=[model]), model


_BIG = (1023, 1024)
_BIG_BYTES = 4 * 1023 * 1024
_NUM_BIG = 16


def _export_big(folder: str) -> tuple[int, str]:
    from torch.distributed.fsdp import fully_shard

    from accel_fsdp_tools import export_model
    from tests.test_export_live import _measure_peak

    accelerator, model = _shard_doubling(2, 5, 6)
    export_model(accelerator, model, Path(folder) / "small", num_threads=1)  # what is imported is no part of it
    accelerator._models = [fully_shard(_build_doubling(_NUM_BIG, *_BIG))]
    proof: list[str] = []
    ctypes.CDLL(None).malloc_trim(0)  # what was freed when the model was cut would be used again, and not counted

    def export() -> None:
        proof.append(export_model(accelerator, None, Path(folder) / "big", num_threads=1).proof["fingerprints"])

    return _measure_peak(export), proof[0]


def test_memory_is_that_of_a_group(tmp_path: Path) -> None:
    """Three ranks take turns with 16 groups, the last turn has one: far less than all weights, gathered or not."""
    found = run_ranks(_export_big, str(tmp_path), world_size=3, folder=tmp_path / "ranks")
    tensors = open_checkpoint(tmp_path / "big").model.tensors
    for name, value in _build_doubling(_NUM_BIG, *_BIG).state_dict().items():
        expected = 2 * value if name.endswith("weight") else value
        assert np.array_equal(read_array(tensors[name]), expected.numpy()), name
    assert max(peak for peak, _ in found) < 5 * _BIG_BYTES
    assert f"{_NUM_BIG} tensors that are cast or converted compared with theirs" in found[0][1]


_SMALL = (5, 7, 8)
_MESHES = ("copies of shards", "columns", "whole", "unsharded")


def _export_meshes(folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.nn.parallel import DistributedDataParallel

    from accel_fsdp_tools import export_model

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    models = (
        fully_shard(_build_doubling(*_SMALL), mesh=mesh),
        fully_shard(_build_doubling(*_SMALL), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1)),
        DistributedDataParallel(_build_doubling(*_SMALL)),
        fully_shard(_build_doubling(*_SMALL)),
    )
    models[3].unshard()
    for name, model in zip(_MESHES, models, strict=True):
        export_model(SimpleNamespace(_models=[model]), None, Path(folder) / name)  # type: ignore[arg-type]


def test_meshes_and_copies(tmp_path: Path) -> None:
    run_ranks(_export_meshes, str(tmp_path), world_size=4, folder=tmp_path / "ranks")
    _build_doubling(*_SMALL).save_pretrained(tmp_path / "reference")
    wanted = (tmp_path / "reference" / "model.safetensors").read_bytes()
    for name in _MESHES:
        assert (tmp_path / name / "model.safetensors").read_bytes() == wanted, name


def _fail(*_: Any, **__: Any) -> None:
    raise OSError(5, "no more of this")


def _provoke(folder: str) -> dict[str, tuple[type[BaseException], str, int | None]]:
    """Let one rank fail at each place of a conversion; return what this rank raised."""
    import torch.distributed as dist

    from accel_fsdp_tools import export_model

    accelerator, model = _shard_doubling(3, 5, 6)
    raised: dict[str, tuple[type[BaseException], str, int | None]] = {}
    revert, put = live_reverting.revert, live_reverting._put
    build_reference = live_reverting.build_reference
    local = next(model.parameters()).to_local()

    def cut(*args: Any) -> Any:
        return {name: tensor[1:] for name, tensor in revert(*args).items()}

    def flip(whole: torch.Tensor, part: Any, block: torch.Tensor) -> None:
        block[1] ^= 4
        put(whole, part, block)

    def change(*args: Any) -> Any:
        local.detach().add_(1)
        return build_reference(*args)

    def attempt(name: str, rank: int, target: Any, attribute: str, value: Any) -> None:
        patch = mock.patch.object(target, attribute, value) if dist.get_rank() == rank else nullcontext()
        try:
            with patch:
                export_model(accelerator, model, Path(folder) / "out")
        except AccelFsdpError as error:
            raised[name] = type(error), str(error), error.rank
        else:
            raised[name] = type(None), "nothing", None

    attempt("shares", 1, export_live, "list_holdings", _fail)
    attempt("parts", 1, live_reverting, "_list_parts", _fail)
    attempt("room", 1, live_reverting, "_make_room", _fail)
    attempt("read", 1, live_reverting, "fingerprint_bytes", _fail)
    attempt("keep", 0, live_reverting, "_put", _fail)
    attempt("arrive", 1, live_reverting, "_put", flip)
    attempt("reference", 0, live_reverting, "build_reference", _fail)
    attempt("convert", 1, live_reverting, "revert", _fail)
    attempt("shape", 0, live_reverting, "revert", cut)
    attempt("write", 1, live_reverting, "write_shards", _fail)
    attempt("sync", 0, live_reverting, "fsync_file", _fail)
    attempt("change", 1, live_reverting, "build_reference", change)
    return raised


def test_one_rank_that_fails_is_the_same_error_everywhere(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    first, second = run_ranks(_provoke, str(tmp_path / "results"), folder=tmp_path / "ranks")
    assert first == second
    gathering = "gathering what is converted together: rank {} failed with OSError"
    expected: dict[str, tuple[type[BaseException], str, int | None]] = {
        "shares": (RankFailedError, "looking at the shares: rank 1 failed", 1),
        "parts": (RankFailedError, "looking at the parts: rank 1 failed", 1),
        "room": (RankFailedError, gathering.format(1), 1),
        "read": (RankFailedError, gathering.format(1), 1),
        "keep": (RankFailedError, gathering.format(0), 0),
        "arrive": (DamagedCheckpointError, "weight has not arrived as it was sent", 1),
        "reference": (RankFailedError, "looking at the model: rank 0 failed", 0),
        "convert": (UnsupportedError, "which has failed: OSError", 1),
        "shape": (UnsupportedError, "transformers makes float32 [4, 6] of the values, and float32 [5, 6] was", 0),
        "write": (RankFailedError, "converting weights back: rank 1 failed", 1),
        "sync": (RankFailedError, "writing what was converted: rank 0 failed", 0),
        "change": (CallOrderError, "layers.0.weight changed while it was exported", None),
    }
    assert first.keys() == expected.keys()
    for name, (kind, text, rank) in expected.items():
        assert first[name][0] is kind, f"{name}: {first[name]}"
        assert text in first[name][1], f"{name}: {first[name]}"
        assert first[name][2] == rank, f"{name}: {first[name]}"
    assert list((tmp_path / "results").iterdir()) == [], "nothing is left"


def _die_on_the_way(folder: str) -> None:
    import torch.distributed as dist

    from accel_fsdp_tools import export_model

    accelerator, model = _shard_doubling(3, 5, 6)
    if dist.get_rank() == 1:
        live_reverting.fingerprint_bytes = lambda *_: os._exit(9)
    export_model(accelerator, model, Path(folder) / "out")


def test_a_rank_that_dies_while_all_send_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    folder = tmp_path / "ranks"
    outcomes = collect(start_ranks(_die_on_the_way, str(tmp_path / "results"), folder=folder), folder=folder)
    assert [outcome.exit_code for outcome in outcomes] == [1, 9]
    assert isinstance(outcomes[0].error, RankMissingError), outcomes[0]
    assert outcomes[0].error.missing_ranks == (1,)
    assert list((tmp_path / "results").iterdir()) == []


def _sleep_while_reading(folder: str) -> None:
    import torch.distributed as dist

    from accel_fsdp_tools import export_model

    accelerator, model = _shard_doubling(1, 5, 6)
    if dist.get_rank() == 1:
        find = live_reverting.fingerprint_bytes

        def dawdle(*args: Any) -> Any:
            time.sleep(5)
            return find(*args)

        live_reverting.fingerprint_bytes = dawdle
    export_model(accelerator, model, Path(folder) / "out")


def test_a_rank_that_is_slow_to_read_is_named(tmp_path: Path) -> None:
    """It, and not the one that has waited for it: its own work is no waiting."""
    (tmp_path / "results").mkdir()
    folder = tmp_path / "ranks"
    processes = start_ranks(
        _sleep_while_reading,
        str(tmp_path / "results"),
        folder=folder,
        environment={"ACCEL_FSDP_TOOLS_TIMEOUT_S": "2"},
    )
    for outcome in collect(processes, folder=folder):
        assert isinstance(outcome.error, RankMissingError), outcome
        assert outcome.error.missing_ranks == (1,), outcome.error
    assert list((tmp_path / "results").iterdir()) == []


def _export_different(folder: str) -> list[str]:
    """Export models that rank 1 would convert otherwise than rank 0, each by itself to the same names and shapes."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from accel_fsdp_tools import export_model

    dist.init_process_group("gloo")
    raised = []
    for case in ("none", "factor", "same"):
        model = _build_doubling(2, 5, 6)
        if dist.get_rank() == 1 and case == "none":
            model._weight_conversions = []
        elif dist.get_rank() == 1 and case == "factor":
            model._weight_conversions[0].operations[0].factor = 0.25
        try:
            accelerator: Any = SimpleNamespace(_models=[fully_shard(model)])
            export_model(accelerator, None, Path(folder) / case)
        except RankMismatchError as error:
            raised.append(f"{error.rank}: {error}")
        else:
            raised.append("nothing")
    return raised


def test_ranks_that_would_convert_in_different_ways_are_refused(tmp_path: Path) -> None:
    """The plan is rank 0's, and a group is converted by the model of the rank that has it: values would be wrong."""
    (tmp_path / "results").mkdir()
    first, second = run_ranks(_export_different, str(tmp_path / "results"), folder=tmp_path / "ranks")
    assert first == second
    assert first[2] == "nothing"
    for text in first[:2]:
        assert text.startswith("1: transformers would convert the weights in another way on rank 1 than on rank 0")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["same"]


def test_a_loaded_model_is_converted_as_one_that_was_built(tmp_path: Path) -> None:
    """from_pretrained keeps the conversions that it has used, and one rank may have loaded what others built."""
    for is_loop in (True, False):
        model = _build(is_loop)
        model.save_pretrained(tmp_path / str(is_loop))
        loaded = type(model).from_pretrained(tmp_path / str(is_loop))
        assert len(loaded._weight_conversions) > 1
        digests = {describe_conversions(build_reference(each)) for each in (model, loaded)}
        assert len(digests) == 1
        loaded._weight_conversions = [each for each in loaded._weight_conversions if not hasattr(each, "operations")]
        assert describe_conversions(build_reference(loaded)) not in digests


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
