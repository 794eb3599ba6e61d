"""What an export knows about an architecture, against what `save_pretrained` of the same model writes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from accel_fsdp_tools.architecture import ArchitectureFacts
from accel_fsdp_tools.architecture.moves import (
    Arrangement,
    add_dim,
    arrange_source,
    concatenate,
    drop_dim,
    narrow,
    permute,
    reshape,
    select,
)
from accel_fsdp_tools.describing import describe_architecture, record_architecture
from accel_fsdp_tools.describing.__main__ import build_from_config
from accel_fsdp_tools.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    ManifestError,
    ManifestVersionError,
    MismatchError,
    UnsupportedError,
)
from accel_fsdp_tools.export.foreign import describe_from_config
from accel_fsdp_tools.export.recipes import TieGroup, apply_recipes, locate_outputs
from accel_fsdp_tools.extents import Box, ByteRange, DiskTensor, Extent, Run, check_coverage, get_row_major_strides
from accel_fsdp_tools.formats.reading import read_part
from accel_fsdp_tools.live import describe_model
from accel_fsdp_tools.manifest import read_manifest
from accel_fsdp_tools.opening import open_checkpoint
from tests.architectures import ARCHITECTURES, build_architecture
from tests.checkpoints import get_bytes
from tests.harness import run_ranks

CONVERTED = [name for name, made in ARCHITECTURES.items() if made.is_converted]


def _save_pretrained(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Save with transformers and return the names in the order in which it puts them into files."""
    from transformers import modeling_utils

    order: list[str] = []
    split = modeling_utils.split_torch_state_dict_into_shards

    def note_order(state_dict: dict[str, torch.Tensor], **options: Any) -> Any:
        order.extend(state_dict)
        return split(state_dict, **options)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_utils, "split_torch_state_dict_into_shards", note_order)
        model.save_pretrained(folder)
    return order


def _check_outputs(outputs: Any, folder: Path, order: list[str], file_name: str = "model.safetensors") -> None:
    """Require the names, order, dtypes, shapes and bytes of what transformers wrote."""
    assert [name for name, _ in outputs] == order
    with safe_open(folder / file_name, framework="pt") as file:
        assert sorted(file.keys()) == sorted(order)
        for name, tensor in outputs:
            expected = file.get_tensor(name)
            assert tensor.fqn == name
            assert (tensor.shape, f"torch.{tensor.dtype}") == (tuple(expected.shape), str(expected.dtype)), name
            assert check_coverage(tensor.shape, tensor.parts).ok, name
            assert read_part(tensor) == get_bytes(expected), name


def _cut_up(state: Mapping[str, torch.Tensor], path: Path) -> dict[str, DiskTensor]:
    """Write tensors the way that checkpoints cut them: rows, columns, runs of elements, other strides."""
    found: dict[str, DiskTensor] = {}
    with path.open("wb") as file:
        for number, (name, tensor) in enumerate(state.items()):
            shape, values = tuple(tensor.shape), tensor.detach()
            pieces: list[tuple[Any, torch.Tensor, tuple[int, ...] | None]] = []
            kind = number % 4 if values.numel() > 2 and shape else 4
            if kind == 0 and shape[0] > 2:  # rows, unevenly
                bounds = [0, shape[0] // 3, shape[0] // 3 + 1, shape[0]]
                pieces = [(_box(shape, 0, a, b), values[a:b], None) for a, b in itertools.pairwise(bounds) if b > a]
            elif kind == 1:  # runs of FSDP1's flat parameters
                bounds = [0, values.numel() // 3, 2 * values.numel() // 3 + 1, values.numel()]
                flat = values.reshape(-1)
                pieces = [(Run(a, b - a), flat[a:b], None) for a, b in itertools.pairwise(bounds) if b > a]
            elif kind == 2 and shape[-1] > 1:  # columns
                bounds = [0, shape[-1] // 2, shape[-1]]
                last = len(shape) - 1
                pieces = [(_box(shape, last, a, b), values[..., a:b], None) for a, b in itertools.pairwise(bounds)]
            elif kind == 3:  # stored column by column
                order = tuple(reversed(range(len(shape))))
                turned = get_row_major_strides(tuple(shape[dim] for dim in order))
                pieces = [(_box(shape, 0, 0, shape[0]), values.permute(order), tuple(reversed(turned)))]
            for part, piece, strides in pieces or [(Box((0,) * len(shape), shape), values, None)]:
                data = get_bytes(piece)
                item = ByteRange(str(path), file.tell(), len(data) + 3)
                file.write(b"\x7f\x7f\x7f" + data)  # the item begins before the extent
                extent = Extent(part, item, strides, start=3)
                found.setdefault(name, DiskTensor(name, str(values.dtype)[6:], shape, ()))
                found[name] = dataclasses.replace(found[name], extents=(*found[name].extents, extent))
    return found


def _box(shape: tuple[int, ...], dim: int, start: int, end: int) -> Box:
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, end - start
    return Box(tuple(offsets), tuple(sizes))


def _round_trip(facts: ArchitectureFacts) -> ArchitectureFacts:
    return ArchitectureFacts.from_dict(json.loads(json.dumps(facts.to_dict(), allow_nan=False)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_are_those_of_save_pretrained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_architecture(name)
    state = model.state_dict()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    cut = _cut_up(state, tmp_path / "cut")
    before = torch.get_rng_state(), model.config.to_json_string()
    facts = describe_architecture(model)
    assert (torch.get_rng_state().tolist(), model.config.to_json_string()) == (before[0].tolist(), before[1])
    order = _save_pretrained(model, tmp_path / "out", monkeypatch)
    assert _round_trip(facts) == facts
    whole = open_checkpoint(tmp_path / "dcp").tensors
    for tensors in (whole, cut):
        applied = apply_recipes(tensors, _round_trip(facts))
        assert (applied.missing, applied.lost, applied.unexpected) == ((), (), ())
        assert bool(applied.converted) == ARCHITECTURES[name].is_converted
        _check_outputs(applied.outputs, tmp_path / "out", order)
        for tie in applied.ties:  # nothing is dropped that is not somewhere else
            assert {get_bytes(state[each]) for each in (tie.source, *tie.dropped)} == {get_bytes(state[tie.kept])}
        written = {name for _, needed in applied.converted.items() for name in needed}
        written |= {output.source for output in facts.outputs if output.source}
        assert set(state) == written | {each for tie in applied.ties for each in tie.dropped} | set(applied.ignored)
    assert facts.class_name == type(model).__name__
    assert facts.num_parameters == model.num_parameters()
    for file, content in (("config.json", facts.config), ("generation_config.json", facts.generation_config)):
        path = tmp_path / "out" / file
        assert (json.loads(path.read_text()) if path.exists() else None) == content


def test_the_list_covers_what_it_should() -> None:
    """Ties, ignored keys, fused experts, permuted rows: each is in the list of architectures."""
    facts = {name: describe_architecture(build_architecture(name)) for name in ("marian", "hrm_text", "llama_tied")}
    assert facts["marian"].ignored == ("model.decoder.embed_positions.weight", "model.encoder.embed_positions.weight")
    assert any(len(each.moves) > 1 or len(each.moves[0].axes) > 2 for each in facts["hrm_text"].outputs if each.moves)
    assert facts["llama_tied"].ties[0].dropped == ("lm_head.weight",)
    assert len(CONVERTED) >= 4


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "t5", "bart", "llava", "mamba", "hrm_text"])
def test_facts_from_a_config_alone(name: str, tmp_path: Path) -> None:
    """In a child process for one of them, which is what an export does; the rest here, to save the imports."""
    model = build_architecture(name)
    model.save_pretrained(tmp_path)
    facts = describe_architecture(model)
    if name == "llava":
        found = describe_from_config(tmp_path)
    else:
        found = describe_architecture(build_from_config(tmp_path, trust_remote_code=False))
    assert found.config is not None
    # A config that was read states more than one that was built; the tensors are what counts.
    same = {"config": None, "generation_config": None}
    assert dataclasses.replace(found, **same) == dataclasses.replace(facts, **same)


def test_configs_that_cannot_be_built_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no config\.json"):
        describe_from_config(tmp_path)
    code = "raise SystemExit('the code of a checkpoint has run')\n"
    (tmp_path / "modeling_mine.py").write_text(code)
    (tmp_path / "configuration_mine.py").write_text(code)
    config = {
        "model_type": "mine",
        "architectures": ["MineForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_mine.MineConfig",
            "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"transformers cannot build the model.*trust-remote-code") as caught:
        describe_from_config(tmp_path)
    assert "has run" not in str(caught.value.actual)


def _make_moe() -> tuple[ArchitectureFacts, dict[str, DiskTensor]]:
    facts = describe_architecture(build_architecture("qwen3_moe"))
    tensors = {
        name: DiskTensor(name, "float32", shape, (Extent(Box((0,) * len(shape), shape), ByteRange("/none", 0, 4)),))
        for name, shape in facts.shapes.items()
    }
    return facts, tensors


def test_missing_and_unexpected_tensors_are_listed() -> None:
    facts, tensors = _make_moe()
    gone = "model.layers.1.mlp.experts.gate_up_proj"
    del tensors[gone]
    tensors["new.weight"] = dataclasses.replace(tensors["lm_head.weight"], fqn="new.weight")
    applied = apply_recipes(tensors, facts)
    assert (applied.missing, applied.unexpected) == ((gone,), ("new.weight",))
    assert len(applied.lost) == 22
    assert all("layers.1.mlp.experts" in name for name in applied.lost)
    assert len(applied.outputs) + len(applied.lost) == len(facts.outputs)


def test_other_shapes_and_dtypes_are_refused() -> None:
    facts, tensors = _make_moe()
    name = "model.layers.0.mlp.experts.down_proj"
    wrong = {**tensors, name: dataclasses.replace(tensors[name], shape=(10, 16, 12))}
    with pytest.raises(MismatchError, match=r"down_proj is \[10, 16, 12\], not \[11, 16, 12\]"):
        apply_recipes(wrong, facts)
    conv = describe_architecture(build_architecture("nomic_bert"))
    parts = next(output for output in conv.outputs if len(output.needed) > 1).needed
    kinds = {
        name: DiskTensor(name, "bfloat16" if name == parts[0] else "float32", shape, ())
        for name, shape in conv.shapes.items()
    }
    with pytest.raises(MismatchError, match="several dtypes"):
        apply_recipes(kinds, conv)


def test_a_hole_in_a_fused_tensor_is_found_in_what_is_cut_out(tmp_path: Path) -> None:
    model = build_architecture("qwen3_moe")
    tensors = _cut_up(model.state_dict(), tmp_path / "cut")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = tensors[name]
    (tmp_path / "raw").write_bytes(get_bytes(model.state_dict()[name]))
    item = ByteRange(str(tmp_path / "raw"), 0, (tmp_path / "raw").stat().st_size)
    tensors[name] = dataclasses.replace(whole, extents=(Extent(Box((0, 0, 0), (7, *whole.shape[1:])), item),))
    outputs = dict(apply_recipes(tensors, describe_architecture(model)).outputs)
    read_part(outputs["model.layers.0.mlp.experts.6.up_proj.weight"])
    with pytest.raises(DamagedCheckpointError, match="hole"):
        read_part(outputs["model.layers.0.mlp.experts.7.up_proj.weight"])


def test_a_tie_is_read_under_whichever_name_is_there(tmp_path: Path) -> None:
    model = build_architecture("llama_tied")
    facts, tensors = describe_architecture(model), _cut_up(model.state_dict(), tmp_path / "cut")
    both = apply_recipes(tensors, facts)
    assert both.ties == (TieGroup("model.embed_tokens.weight", "model.embed_tokens.weight", ("lm_head.weight",)),)
    del tensors["model.embed_tokens.weight"]
    applied = apply_recipes(tensors, facts)
    assert applied.ties == (TieGroup("model.embed_tokens.weight", "lm_head.weight", ()),)
    assert not applied.missing
    written = dict(applied.outputs)["model.embed_tokens.weight"]
    assert read_part(written) == get_bytes(model.lm_head.weight)
    del tensors["lm_head.weight"]
    assert apply_recipes(tensors, facts).missing == ("model.embed_tokens.weight",)


def test_an_undeclared_tie_is_told_and_kept() -> None:
    model = build_architecture("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    facts = describe_architecture(model)
    names = tuple(f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    (tie,) = facts.ties
    assert (tie.names, tie.dropped) == (names, ())
    assert set(names) <= {output.name for output in facts.outputs}


class _Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 6))
        self.empty = torch.nn.Parameter(torch.randn(0, 6))


def _convert(change: Any, monkeypatch: pytest.MonkeyPatch) -> ArchitectureFacts:
    from transformers import core_model_loading

    def revert(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**state, "made": change(state["model.layers.0.mlp.gate_proj.weight"])}

    with monkeypatch.context() as patch:
        patch.setattr(core_model_loading, "revert_weight_conversion", revert)
        return describe_architecture(build_architecture("llama"))


def _write_in_place(source: torch.Tensor) -> torch.Tensor:
    copy = source.clone()
    copy[1:3].zero_()
    return copy


@pytest.mark.parametrize(
    ("change", "operation"),
    [
        (lambda each: each * 2, "mul"),
        (lambda each: (each + 1)[:2].contiguous(), "add"),
        (lambda each: each.to(torch.bfloat16), "_to_copy"),
        (lambda each: torch.cat([each, each.new_zeros(1, 16)]), "new_zeros"),
        (_write_in_place, "zero_"),
        (lambda each: each.flip(0), "flip"),
        (lambda each: each.view(torch.int32), "view"),
        (lambda each: torch.empty(3), "a constant"),
    ],
)
def test_what_is_computed_is_never_taken_for_a_copy(
    change: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = _convert(change, monkeypatch)
    made = facts.outputs[-1]
    assert (made.name, made.source, made.moves, made.operation) == ("made", None, (), operation)
    assert _round_trip(facts) == facts
    tensors = {name: DiskTensor(name, "float32", shape, ()) for name, shape in facts.shapes.items()}
    with pytest.raises(UnsupportedError, match="made of LlamaForCausalLM is computed by transformers"):
        apply_recipes(tensors, facts)


@pytest.mark.parametrize(
    "change",
    [
        lambda each: each[:5],  # the beginning of a source is not the source
        lambda each: each[5:],
        lambda each: each[-3:].t(),
        lambda each: each[1::3],
        lambda each: torch.stack([each[:4], each[4:8]], 2),
        lambda each: each.t().reshape(5, 64),
        lambda each: torch.cat([each[3:], each[:3]]).unflatten(0, (4, 5)).transpose(1, 2).flatten(1),
        lambda each: torch.cat(each.reshape(5, 4, 16).unbind(1)[::-1], dim=1),
        lambda each: each.unsqueeze(0).squeeze(0).clone(),
        lambda each: each[7, 3],
    ],
)
def test_what_is_moved_is_followed(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = _convert(change, monkeypatch)
    state = build_architecture("llama").state_dict()
    for rotation in range(4):  # so that the tensor is cut in each of the ways
        names = list(state)[rotation:] + list(state)[:rotation]
        tensors = _cut_up({name: state[name] for name in names}, tmp_path / f"cut_{rotation}")
        made = dict(apply_recipes(tensors, _round_trip(facts)).outputs)["made"]
        expected = change(state["model.layers.0.mlp.gate_proj.weight"])
        assert made.shape == tuple(expected.shape)
        assert read_part(made) == get_bytes(expected)


def _realize(value: Arrangement, sources: Mapping[str, np.ndarray]) -> np.ndarray:
    result = np.full(value.shape, -1, dtype=np.int64)
    for move in value.moves:
        for index in np.ndindex(*(axis.size for axis in move.axes)):
            target, origin = list(move.target), list(move.origin)
            for place, axis in zip(index, move.axes, strict=True):
                target[axis.target_dim] += place * axis.target_step
                origin[axis.source_dim] += place * axis.source_step
            assert result[tuple(target)] == -1
            result[tuple(target)] = sources[move.source][tuple(origin)]
    return result


def _factorize(number: int, random_: random.Random) -> tuple[int, ...]:
    sizes = []
    while number > 1 and random_.random() < 0.8:
        sizes.append(random_.choice([each for each in range(2, number + 1) if number % each == 0]))
        number //= sizes[-1]
    sizes += [number] if number > 1 else []
    sizes += [1] if random_.random() < 0.3 else []
    random_.shuffle(sizes)
    return tuple(sizes)


def test_moves_are_right_for_random_rearrangements() -> None:
    random_ = random.Random(3)
    for _ in range(400):
        number = random_.choice([1, 6, 12, 24, 30, 36, 60])
        shape = _factorize(number, random_)
        sources = {"a": np.arange(number).reshape(shape), "b": np.arange(number, 2 * number)}
        value, array = arrange_source("a", shape), sources["a"]
        for kind in random_.choices(["permute", "narrow", "view", "join", "select", "add", "drop", "turn"], k=5):
            dim = random_.randrange(len(value.shape)) if value.shape else None
            if kind == "permute":
                order = random_.sample(range(len(value.shape)), len(value.shape))
                value, array = permute(value, order), array.transpose(order)
            elif kind == "view":
                shape = _factorize(array.size, random_)
                value, array = reshape(value, shape), array.reshape(shape)
            elif kind == "add":
                value, array = add_dim(value, 0), array[None]
            elif kind == "drop" and 1 in value.shape:
                place = value.shape.index(1)
                value, array = drop_dim(value, place), array.squeeze(place)
            elif dim is None:
                continue
            elif kind == "narrow":
                start = random_.randrange(value.shape[dim])
                count = random_.randint(1, value.shape[dim] - start)
                value, array = narrow(value, dim, start, count), array.take(range(start, start + count), axis=dim)
            elif kind == "select":
                at = random_.randrange(value.shape[dim])
                value, array = select(value, dim, at), array.take(at, axis=dim)
            elif kind == "turn":
                at = random_.randint(0, value.shape[dim])
                rest = value.shape[dim] - at
                value = concatenate([narrow(value, dim, at, rest), narrow(value, dim, 0, at)], dim)
                array = np.concatenate(
                    [array.take(range(at, at + rest), axis=dim), array.take(range(at), axis=dim)], dim
                )
            elif kind == "join" and array.size == number:
                other = reshape(arrange_source("b", (number,)), value.shape)
                value = concatenate([value, other], dim)
                array = np.concatenate([array, sources["b"].reshape(array.shape)], dim)
        assert value.shape == array.shape
        assert (_realize(value, sources) == array).all()


def test_many_experts_are_few_lines() -> None:
    facts, _ = _make_moe()
    assert len(facts.to_dict()["outputs"]) < len(facts.outputs) / 2
    names = [output.name for output in _round_trip(facts).outputs]
    assert names == [output.name for output in facts.outputs]
    assert "model.layers.1.mlp.experts.10.up_proj.weight" in names


def _damage(change: Any) -> dict[str, Any]:
    facts, _ = _make_moe()
    body = json.loads(json.dumps(facts.to_dict()))
    change(body, next(each for each in body["outputs"] if isinstance(each, dict)))
    return body


@pytest.mark.parametrize(
    "change",
    [
        lambda body, made: body.pop("outputs"),
        lambda body, made: body.update(shapes=[]),
        lambda body, made: made["series"].__setitem__(1, 12),  # an expert more than there are
        lambda body, made: made["series"].__setitem__(1, 10**12),
        lambda body, made: made["steps"][0].__setitem__(0, -1),
        lambda body, made: made["moves"][0].__setitem__(0, "elsewhere"),
        lambda body, made: made["moves"][0][2].__setitem__(1, 5),
        lambda body, made: made["moves"][0][3][0].__setitem__(0, 10**6),
        lambda body, made: made["moves"][0][3][0].__setitem__(2, 0),
        lambda body, made: made.update(shape=[3, -1]),
        lambda body, made: body["outputs"].__setitem__(0, "no.such.tensor"),
        lambda body, made: body.update(ignored="lm_head.weight"),
    ],
)
def test_damaged_facts_are_refused(change: Any) -> None:
    with pytest.raises(ManifestError, match="incomplete or damaged"):
        ArchitectureFacts.from_dict(_damage(change))


def test_facts_of_other_versions() -> None:
    body = _damage(lambda body, made: body.update(version=2))
    with pytest.raises(ManifestVersionError, match="Upgrade"):
        ArchitectureFacts.from_dict(body)
    assert ArchitectureFacts.from_dict(_damage(lambda body, made: body.update(later="x"))) == _make_moe()[0]


def test_recording_is_done_once_and_again_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_architecture("llama")
    first = record_architecture(model, describe_model(model))
    assert record_architecture(model, describe_model(model)) is first
    model.config.rope_parameters["rope_theta"] = 77.0
    second = record_architecture(model, describe_model(model))
    assert (first["config"]["rope_parameters"]["rope_theta"], second["config"]["rope_parameters"]["rope_theta"]) == (
        10000.0,
        77.0,
    )
    model.resize_token_embeddings(40)
    third = record_architecture(model, describe_model(model))
    assert third["shapes"]["lm_head.weight"] == [40, 16]


def test_an_architecture_that_cannot_be_described_does_not_stop_a_save(caplog: pytest.LogCaptureFixture) -> None:
    model = build_architecture("llama")
    model.config.strange = float("inf")
    model.num_parameters = None  # what a class of a user may do to us
    body = record_architecture(model, describe_model(model))
    assert "not recorded" in caplog.text
    facts = ArchitectureFacts.from_dict(json.loads(json.dumps(body)))
    assert facts.problem is not None
    assert "TypeError" in facts.problem
    with pytest.raises(UnsupportedError, match="Give --model"):
        apply_recipes({}, facts)


class DistributedDataParallel(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_do_not_show() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    expected = describe_architecture(build_architecture("qwen3_moe"))
    model = build_architecture("qwen3_moe")
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    compiled = torch.compile(model, backend="eager")
    for wrapped in (model, compiled, DistributedDataParallel(compiled)):
        assert describe_architecture(wrapped) == expected


def test_models_that_others_write_differently_are_refused() -> None:
    for name, value in (("hf_quantizer", object()), ("_hf_peft_config_loaded", True)):
        model = build_architecture("llama")
        vars(model)[name] = value
        with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM (is quantized|holds adapters)"):
            describe_architecture(model)


def test_a_module_of_ones_own_is_exported_as_it_is() -> None:
    facts = describe_architecture(torch.nn.Sequential(_Own(), torch.nn.BatchNorm1d(6)))
    assert not facts.is_transformers
    assert facts.config is None
    assert [(each.name, each.source) for each in facts.outputs] == [(name, name) for name in facts.shapes]
    assert facts.shapes["1.num_batches_tracked"] == ()
    assert facts.shapes["0.empty"] == (0, 6)
    assert _round_trip(facts) == facts


def _prepare_and_save(folder: str, version: int, flat: bool, kind: str) -> tuple[Any, Any]:
    """Save a wrapped model as a checkpoint, and as transformers does before it is wrapped; return what is known."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from accel_fsdp_tools import enable_cpu_fsdp, save_state

    enable_cpu_fsdp()
    arguments: dict[str, Any] = {
        "fsdp_version": version,
        "state_dict_type": "SHARDED_STATE_DICT",
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Qwen3MoeDecoderLayer" if kind == "moe" else "LlamaDecoderLayer"],
    }
    if version == 1:
        arguments |= {"sharding_strategy": "FULL_SHARD", "use_orig_params": not flat, "sync_module_states": False}
        arguments |= {"cpu_ram_efficient_loading": False}
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**arguments))
    model = build_architecture("qwen3_moe" if kind == "moe" else "llama_tied")
    if kind == "peft":
        model = _add_adapters(model)
    if accelerator.is_main_process:
        model.save_pretrained(Path(folder) / "out")
        if kind == "peft":
            base = copy.deepcopy(model).unload()
            base.save_pretrained(Path(folder) / "base")
    before = describe_architecture(model).to_dict()
    if version == 1:  # an optimizer made before would hold parameters that flat ones replace
        model = accelerator.prepare(model)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    if version == 1:
        accelerator.prepare(optimizer)
    else:
        model, _ = accelerator.prepare(model, optimizer)
    save_state(accelerator, Path(folder) / "step", step=1)
    return before, record_architecture(model, describe_model(model))


def _add_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        config = LoraConfig(
            r=3, target_modules=["q_proj", "up_proj"], modules_to_save=["norm"], init_lora_weights=False
        )
        wrapped = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "modules_to_save" in name:
                    parameter.normal_()
    return wrapped


def _run_wrapped(folder: Path, version: int, flat: bool, kind: str) -> tuple[ArchitectureFacts, dict[str, DiskTensor]]:
    """Return the facts recorded in the manifest, the same as before wrapping and on all ranks, and the tensors."""
    outcomes = run_ranks(_prepare_and_save, str(folder), version, flat, kind, folder=folder / "ranks")
    recorded = read_manifest(folder / "step").models[0].architecture
    assert recorded is not None
    for before, after in outcomes:
        assert ArchitectureFacts.from_dict(json.loads(json.dumps(before))) == ArchitectureFacts.from_dict(recorded)
        assert json.loads(json.dumps(after)) == recorded
    return ArchitectureFacts.from_dict(recorded), dict(open_checkpoint(folder / "step").models[0].tensors)


@pytest.mark.parametrize(("version", "flat"), [(2, False), (1, True), (1, False)])
def test_a_wrapped_model_is_described_as_the_whole_one(version: int, flat: bool, tmp_path: Path) -> None:
    facts, tensors = _run_wrapped(tmp_path, version, flat, "moe")
    assert (facts.class_name, facts.config["architectures"]) == ("Qwen3MoeForCausalLM", ["Qwen3MoeForCausalLM"])
    applied = apply_recipes(tensors, facts)
    assert len(applied.converted) == 66
    assert (applied.missing, applied.unexpected) == ((), ())
    _check_outputs(applied.outputs, tmp_path / "out", [output.name for output in facts.outputs])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == facts.config


def test_adapters_of_a_wrapped_model(tmp_path: Path) -> None:
    facts, tensors = _run_wrapped(tmp_path, 2, False, "peft")
    assert facts.peft is not None
    assert (facts.peft.problem, facts.peft.active) == (None, ("default",))
    (adapter,) = facts.peft.adapters
    outputs = locate_outputs(adapter.outputs, tensors, facts)
    _check_outputs(outputs, tmp_path / "out", [each.name for each in adapter.outputs], "adapter_model.safetensors")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert {key: sorted(each) if isinstance(each, list) else each for key, each in config.items()} == {
        key: sorted(each) if isinstance(each, list) else each for key, each in adapter.config.items()
    }
    base = facts.peft.base
    assert base is not None
    assert base.class_name == "LlamaForCausalLM"
    stripped = {name: dataclasses.replace(tensors[fqn], fqn=name) for name, fqn in facts.peft.base_names.items()}
    applied = apply_recipes(stripped, base)
    assert (applied.missing, applied.unexpected) == ((), ())
    _check_outputs(applied.outputs, tmp_path / "base", [output.name for output in base.outputs])
    assert json.loads((tmp_path / "base" / "config.json").read_text()) == base.config
