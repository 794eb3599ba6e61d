"""The plan of an export against the libraries that it must equal: safetensors, huggingface_hub, transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from accel_fsdp_tools.errors import UnsupportedError, UsageError
from accel_fsdp_tools.export.copying import copy_tensors
from accel_fsdp_tools.export.outputs import (
    OutputFile,
    OutputTensor,
    build_index,
    get_total_bytes,
    lay_out,
    parse_size,
    split_into_files,
)
from accel_fsdp_tools.extents import DiskTensor
from accel_fsdp_tools.opening import open_checkpoint
from tests.checkpoints import make_tensor
from tests.models import build_tiny_llama

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def plan(tensors: Mapping[str, torch.Tensor]) -> list[OutputTensor]:
    """Return what to write for tensors in memory; nothing is known of where they are."""
    found = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        found.append(OutputTensor(name, DiskTensor(name, dtype, tuple(tensor.shape), ()), dtype))
    return found


def get_header(tensors: dict[str, torch.Tensor]) -> bytes:
    data = save(tensors, metadata={"format": "pt"})
    return data[: 8 + int.from_bytes(data[:8], "little")]


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
names = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__")
states = st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=12)


@settings(max_examples=150, deadline=None)
@given(states)
def test_header_is_the_one_that_safetensors_writes(state: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in state.items()}
    file = lay_out("x.safetensors", plan(tensors))
    assert file.header == get_header(tensors)
    assert file.size_bytes == len(save(tensors, metadata={"format": "pt"}))


def test_header_of_every_dtype_and_of_names_to_escape() -> None:
    tensors = {f"t{index:02}": make_tensor(dtype, 3, 4) for index, dtype in enumerate(DTYPES)}
    tensors |= {name: torch.zeros(2) for name in ('a"b\\c', "\n\t\r\b\f\x00\x1f\x7f", "é.ü/😀\u2028", "", " ")}
    tensors["pairs"] = torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert lay_out("x.safetensors", plan(tensors)).header == get_header(tensors)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=14), st.integers(0, 400))
def test_split_is_that_of_huggingface_hub(state: list[tuple[torch.dtype, tuple[int, ...]]], limit: int) -> None:
    tensors = {f"{7 * index % 15}.w": torch.zeros(shape, dtype=dtype) for index, (dtype, shape) in enumerate(state)}
    expected = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    files = split_into_files(plan(tensors), limit)
    assert [file.name for file in files] == list(expected.filename_to_tensors)
    for file in files:
        assert {each.name for each in file.tensors} == set(expected.filename_to_tensors[file.name])
    assert get_total_bytes(files) == expected.metadata["total_size"]
    index = build_index(files, 1)
    assert (index is not None) == expected.is_sharded
    if index is not None:
        assert json.loads(index)["weight_map"] == expected.tensor_to_filename


@pytest.mark.parametrize("size", [1, 3000, 20_000, "40KB", "0.1MB", " 60 kb", "5GB", "50GB", 10**12])
def test_files_of_a_model_are_those_of_save_pretrained(tmp_path: Path, size: int | str) -> None:
    """Names, headers, values and index, byte for byte; the source is one file that torch wrote."""
    model = build_tiny_llama(num_layers=2)
    model.save_pretrained(tmp_path / "expected", max_shard_size=size)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    tensors = open_checkpoint(tmp_path / "pytorch_model.bin").model.tensors
    outputs = [OutputTensor(name, tensors[name], tensors[name].dtype) for name in model.state_dict()]
    files = split_into_files(outputs, size)
    (tmp_path / "found").mkdir()
    copy_tensors(files, tmp_path / "found")
    index = build_index(files, model.num_parameters())
    if index is not None:
        (tmp_path / "found" / "model.safetensors.index.json").write_bytes(index)
    expected = {path.name: path for path in (tmp_path / "expected").glob("model*")}
    found = {path.name: path for path in (tmp_path / "found").iterdir()}
    assert sorted(found) == sorted(expected)
    for name, path in expected.items():
        assert found[name].read_bytes() == path.read_bytes(), name


@pytest.mark.parametrize(
    ("size", "expected"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), (" 2Tb ", 2 * 10**12), (7, 7), ("0KB", 0)]
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["5", "5GiB", "GB", "", "xMB", "infGB", "nanMB", "-1GB", -1])
def test_sizes_that_are_none(size: int | str) -> None:
    with pytest.raises(UsageError):
        parse_size(size)


def test_an_adapter_has_its_own_name() -> None:
    tensors = plan({"a": torch.zeros(4), "b": torch.zeros(4)})
    assert [file.name for file in split_into_files(tensors, stem="adapter_model")] == ["adapter_model.safetensors"]
    assert split_into_files(tensors, 16, stem="m")[1].name == "m-00002-of-00002.safetensors"
    assert split_into_files([]) == ()
    assert build_index((), 0) is None


@pytest.mark.parametrize("dtype", ["complex128", "complex32"])
def test_what_safetensors_cannot_hold_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'some\.name' has the dtype complex"):
        OutputTensor("some.name", DiskTensor("x", dtype, (2,), ()), dtype)
    with pytest.raises(UnsupportedError, match="'pair'"):
        OutputTensor("pair", DiskTensor("x", "float4_e2m1fn_x2", (), ()), "float4_e2m1fn_x2")


def test_casts_and_names_that_cannot_be_are_refused() -> None:
    whole = DiskTensor("x", "int64", (2,), ())
    with pytest.raises(UnsupportedError, match="'steps': int64 is not cast to bfloat16"):
        OutputTensor("steps", whole, "bfloat16")
    for name in ("__metadata__", "\ud800"):
        with pytest.raises(UnsupportedError, match="cannot be a name"):
            OutputTensor(name, whole, "int64")


def test_two_tensors_of_one_name_are_refused() -> None:
    twice = plan({"a": torch.zeros(4)}) * 2
    for attempt in (lambda: split_into_files(twice, 4), lambda: lay_out("x", twice)):
        with pytest.raises(UsageError, match="Two tensors would be called 'a'"):
            attempt()


def test_sizes_beyond_32_bits() -> None:
    big = OutputTensor("big", DiskTensor("big", "float32", (3 << 30,), ()), "bfloat16")
    small = OutputTensor("small", DiskTensor("small", "int8", (3,), ()), "int8")
    file = lay_out("x", [small, big])
    assert file.offsets[1] - file.offsets[0] == 6 << 30
    assert math.prod(big.shape) * 2 == big.size_bytes
    assert [each.name for each in split_into_files([big, small], "5GB")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_too_long_a_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_fsdp_tools.export.outputs._MAX_HEADER_BYTES", 64)
    with pytest.raises(UnsupportedError, match="header"):
        _ = OutputFile("x.safetensors", tuple(plan({"a name": torch.zeros(1)}))).header
