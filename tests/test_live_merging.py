"""Adapters added to parts of weights, however these are cut; whole exports are in `test_export_adapters`."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accel_fsdp_tools import export_model
from accel_fsdp_tools.errors import CallOrderError, UnsupportedError, UsageError
from accel_fsdp_tools.export.lora import Update
from accel_fsdp_tools.export.merged import Delta
from accel_fsdp_tools.extents import Box, ByteRange, DiskTensor, Extent, Part, Run, get_whole
from accel_fsdp_tools.fingerprint import Fingerprint
from accel_fsdp_tools.live_merging import WeightMerge, gather_merges
from accel_fsdp_tools.shards import LocalShard
from tests.adapters import add_adapters, build_base
from tests.checkpoints import get_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]


def _place(name: str, shape: tuple[int, ...]) -> DiskTensor:
    item = ByteRange(name, 0, 4 * math.prod(shape))
    return DiskTensor(name, "float32", shape, (Extent(get_whole(shape), item),))


def _list_parts(shape: tuple[int, ...]) -> list[Part]:
    numel = math.prod(shape)
    inner = (0,) * (len(shape) - 1)
    parts: list[Part] = [get_whole(shape), Run(0, numel), Run(1, numel - 2), Run(numel // 2, 1), Run(3, 4)]
    parts += [Box((2, *inner), (3, *shape[1:])), Box((0, *inner), (0, *shape[1:]))]
    if len(shape) > 1:
        parts.append(Box((1, 1, *inner[1:]), (4, shape[1] - 2, *shape[2:])))
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 5), (6, 4, 2, 3), (9,)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_part_is_merged_as_the_whole_is(dtype: torch.dtype, shape: tuple[int, ...], is_transposed: bool) -> None:
    """Numbers that are exact in every order, two adapters one after the other."""
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> torch.Tensor:
        return torch.randint(-4, 5, size, generator=generator).float()

    weight, row = draw(*shape).to(dtype), math.prod(shape[1:])
    expected, values, updates = weight.clone(), {}, []
    for number, rank in enumerate((2, 3)):
        if len(shape) == 1:
            b = draw(*shape)
            added, pair = 0.5 * b, (None, b)
        elif is_transposed:
            a, b = draw(rank, shape[0]), draw(row, rank)
            added, pair = 0.5 * (b @ a).t(), (a, b)
        else:
            a, b = draw(rank, row), draw(shape[0], rank)
            added, pair = 0.5 * (b @ a), (a, b)
        expected = (expected.float() + added.reshape(shape)).to(dtype)
        names = [None if each is None else f"{place}{number}" for place, each in zip("ab", pair, strict=True)]
        values |= {name: each.numpy() for name, each in zip(names, pair, strict=True) if name is not None}
        a_place, b_place = (
            None if name is None else _place(name, tuple(each.shape)) for name, each in zip(names, pair, strict=True)
        )
        updates.append(Update(a_place, b_place, 0.5, is_transposed))
    name = str(dtype).removeprefix("torch.")
    deltas = [Delta(update, name, lambda tensor: values[tensor.fqn]) for update in updates]
    merge = WeightMerge(name, shape, deltas)
    for part in _list_parts(shape):
        if isinstance(part, Run):
            piece, wanted = (each.reshape(-1)[part.start : part.start + part.length] for each in (weight, expected))
        else:
            slices = tuple(slice(a, a + n) for a, n in zip(part.offsets, part.sizes, strict=True))
            piece, wanted = weight[slices], expected[slices]
        data = bytearray(get_bytes(piece))
        assert bytes(merge(part, memoryview(data))) == get_bytes(wanted), part
        assert bytes(data) == get_bytes(piece), "live memory is only read"


def test_a_matrix_that_changed_is_noticed() -> None:
    a, b = torch.randn(2, 4), torch.randn(3, 2)
    shards = [LocalShard(name, "float32", tuple(t.shape), (get_whole(tuple(t.shape)),), t, "parameter") for name, t in
              (("a", a), ("b", b))]  # fmt: skip
    weight = LocalShard("w", "float32", (3, 4), (), None, "parameter")
    updates = {"w": [Update(_place("a", (2, 4)), _place("b", (3, 2)), 1.0)]}
    from accel_fsdp_tools.fingerprint import fingerprint_tensor

    known = {each.fqn: fingerprint_tensor(each.tensor, each.parts[0], each.shape) for each in shards}  # type: ignore[arg-type]
    merge = gather_merges(updates, {"w": weight}, shards, known)["w"]
    found = np.frombuffer(merge(get_whole((3, 4)), memoryview(bytearray(48))), np.float32).reshape(3, 4)
    np.testing.assert_allclose(found, (b @ a).numpy(), rtol=1e-6)
    with pytest.raises(CallOrderError, match="b changed while it was exported"):
        gather_merges(updates, {"w": weight}, shards, {**known, "b": Fingerprint()})


def test_what_cannot_be_merged_is_said(tmp_path: Path) -> None:
    def export(model: Any, **options: Any) -> None:
        export_model(SimpleNamespace(_models=[model]), None, tmp_path / "out", **options)  # type: ignore[arg-type]

    for options, match in (({"adapter": "default"}, "adapter is 'default'"), ({"merge_adapter": True}, "has no adapt")):
        with pytest.raises(UsageError, match=match):
            export(build_base(), **options)
    lora = {"r": 4, "target_modules": ["q_proj"]}
    model = add_adapters(build_base(), {"default": {**lora, "use_dora": True}, "a/b": lora})
    with pytest.raises(UsageError, match=r"no adapter 'style'; the model has default, a/b"):
        export(model, adapter="style")
    with pytest.raises(UsageError, match="'a/b' cannot be written into a directory"):
        export(model)
    with pytest.raises(UnsupportedError, match="DoRA scales"):
        export(model, merge_adapter=True)
    assert not (tmp_path / "out").exists()
    export(model, adapter="default")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
