"""A checkpoint that would run code when loaded is refused by `load_state`, wherever the code hides."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.errors import AccelFsdpError, UnsafePickleError
from accel_fsdp_tools.files import list_files, seal_files
from accel_fsdp_tools.manifest import MANIFEST_PATH, read_manifest, write_manifest
from tests.attacks import BOMB_NAME, Bomb, replace_item, save_to_bytes
from tests.harness import run_ranks
from tests.training import Setup, build, train_batch

SHARDED = ("pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "optimizer_0 item")
FULL = ("pytorch_model_fsdp.bin", "optimizer.bin")
COMMON = ("scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "custom_checkpoint_0.pkl")


class Counter:
    """What a user registers; its state may hold an object of a class of its own."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@dataclasses.dataclass
class Mine:
    number: int


def _setup(kind: str) -> Setup:
    return Setup(num_items=24, accumulation=1, state_dict_type=kind)


def _save(path: str, kind: str, value: Any) -> None:
    from accel_fsdp_tools import save_state, track

    objects = build(_setup(kind), seed=1)
    objects.accelerator.register_for_checkpointing(Counter(value))
    track(objects.accelerator)
    for batch in objects.loader:
        with objects.accelerator.accumulate(objects.model):
            train_batch(objects, batch)
        break
    save_state(objects.accelerator, path)


def _load_all(paths: list[str], kind: str, allow_objects: tuple[str, ...] = ()) -> dict[str, Any]:
    from accel_fsdp_tools import load_state

    objects = build(_setup(kind), seed=2)
    counter = Counter()
    objects.accelerator.register_for_checkpointing(counter)
    results: dict[str, Any] = {}
    for path in paths:
        try:
            load_state(objects.accelerator, path, allow_objects=allow_objects)
            results[path] = counter.value
        except AccelFsdpError as error:
            results[path] = error
    return results


def _plant(directory: Path, place: str, canary: Path) -> None:
    bomb = Bomb(canary)
    if place == "optimizer_0 item":
        replace_item(directory / "optimizer_0", "optimizer.param_groups.0.lr", save_to_bytes(bomb))
    elif place.endswith(".metadata"):
        (directory / place).write_bytes(pickle.dumps(bomb))
    else:
        (directory / place).write_bytes(save_to_bytes({"state": bomb}))


def _seal_again(directory: Path) -> None:
    """An attacker who can change files can change the checksums as well."""
    files = tuple(seal_files(directory, [name for name in list_files(directory) if name != MANIFEST_PATH]))
    write_manifest(directory, dataclasses.replace(read_manifest(directory), files=files))


@pytest.mark.parametrize(("kind", "places"), [("SHARDED_STATE_DICT", SHARDED), ("FULL_STATE_DICT", FULL)])
def test_code_is_refused_in_every_place_of_a_checkpoint(tmp_path: Path, kind: str, places: tuple[str, ...]) -> None:
    run_ranks(_save, str(tmp_path / "good"), kind, 7, folder=tmp_path / "r0")
    canary = tmp_path / "canary"
    paths = []
    for place in (*places, *COMMON):
        for is_ours in (True, False):
            path = tmp_path / f"{place.replace('/', '_')}-{is_ours}"
            shutil.copytree(tmp_path / "good", path)
            _plant(path, place, canary)
            if is_ours:
                _seal_again(path)
            else:
                shutil.rmtree(path / "accel_fsdp_tools")
            paths.append(str(path))
    for results in run_ranks(_load_all, [*paths, str(tmp_path / "good")], kind, folder=tmp_path / "r1"):
        assert results.pop(str(tmp_path / "good")) == 7
        for path in paths:
            error = results[path]
            assert isinstance(error, UnsafePickleError), f"{path}: {error!r}"
            assert error.actual == BOMB_NAME, f"{path}: {error}"
            assert BOMB_NAME in str(error)
    assert not canary.exists()


def test_a_registered_object_of_an_own_class_needs_to_be_named(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(_save, path, "SHARDED_STATE_DICT", Mine(3), folder=tmp_path / "r0")
    name = f"{Mine.__module__}.{Mine.__qualname__}"
    for results in run_ranks(_load_all, [path], "SHARDED_STATE_DICT", folder=tmp_path / "r1"):
        assert isinstance(results[path], UnsafePickleError)
        assert f"allow_objects=['{name}']" in str(results[path]) or name in str(results[path])
    for results in run_ranks(_load_all, [path], "SHARDED_STATE_DICT", (name,), folder=tmp_path / "r2"):
        assert results[path] == Mine(3)
