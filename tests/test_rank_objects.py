"""Values of registered objects survive without pickles, and each rank gets its own."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_fsdp_tools.errors import DamagedCheckpointError
from accel_fsdp_tools.rank_objects import encode_object, find_different, read_rank_objects, write_rank_objects
from tests.harness import run_ranks
from tests.training import Setup, build, train_batch

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_TREES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=12,
)


@given(state=_TREES)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    folder = tmp_path_factory.mktemp("o")
    encoded = encode_object(0, state)
    write_rank_objects(folder, 3, {0: encoded})
    back = read_rank_objects(folder, 3)[0]
    assert repr(back) == repr(state)
    assert encode_object(0, back).digest == encoded.digest


def test_tensors_and_arrays_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(6, dtype=torch.bfloat16)
    state = OrderedDict(
        view=base[::2],
        same=base,
        again=base,
        scalar=torch.tensor(3, dtype=torch.int64),
        empty=torch.empty(0, 4),
        array=np.array([[1.5, float("nan")]], dtype=np.float32),
        number=np.float64(0.1),
    )
    write_rank_objects(tmp_path, 1, {2: encode_object(2, state)})
    back = read_rank_objects(tmp_path, 1)[2]
    for name in ("view", "same", "again", "scalar", "empty"):
        assert back[name].dtype == state[name].dtype
        assert torch.equal(back[name], state[name])
    assert back["array"].tobytes() == state["array"].tobytes()
    assert back["array"].shape == (1, 2)
    assert type(back["number"]) is np.float64
    assert back["number"] == np.float64(0.1)


def test_what_would_need_a_pickle_is_named() -> None:
    assert encode_object(0, {"a": object()}).problem == "holds a builtins.object"
    assert encode_object(0, [torch.nn.Parameter(torch.ones(1))]).problem is not None


def test_damage_is_named(tmp_path: Path) -> None:
    assert read_rank_objects(tmp_path, 0) == {}
    write_rank_objects(tmp_path, 0, {0: encode_object(0, {"w": torch.ones(3)})})
    (tmp_path / "objects_rank_00000.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match="objects_rank_00000"):
        read_rank_objects(tmp_path, 0)
    (tmp_path / "objects_rank_00000.json").write_text("{")
    with pytest.raises(DamagedCheckpointError):
        read_rank_objects(tmp_path, 0)


def test_only_different_objects_count() -> None:
    assert find_different([["a", "b", ""], ["a", "c", "d"]], 1) == [1, 2]
    assert find_different([["a", "b"], ["a", ""]], 1) == []


class Value:
    """A registered object with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def _run(path: str, *, save: bool) -> Any:
    from accel_fsdp_tools import load_state, save_state, track

    objects = build(Setup(num_items=24, accumulation=1), seed=1)
    accelerator = objects.accelerator
    rank = accelerator.process_index
    mine = Value({"rank": rank, "weights": torch.full((3,), float(rank))} if save else None)
    shared = Value(["the same", 7] if save else None)
    accelerator.register_for_checkpointing(mine, shared)
    if save:
        track(accelerator)
        for batch in objects.loader:
            with accelerator.accumulate(objects.model):
                train_batch(objects, batch)
            break
        save_state(accelerator, path)
        return None
    report = load_state(accelerator, path)
    return mine.state, shared.state, report.exact


def test_every_rank_gets_its_own_value_back(tmp_path: Path) -> None:
    path = tmp_path / "c"
    run_ranks(_run, str(path), save=True, world_size=3, folder=tmp_path / "r0")
    written = sorted(each.name for each in path.rglob("objects_rank_*.json"))
    assert written == ["objects_rank_00001.json", "objects_rank_00002.json"]
    for rank, (mine, shared, exact) in enumerate(
        run_ranks(_run, str(path), save=False, world_size=3, folder=tmp_path / "r1")
    ):
        assert mine["rank"] == rank
        assert mine["weights"].tolist() == [rank] * 3
        assert shared == ["the same", 7]
        assert exact
