"""The random generators of a rank: captured, saved, restored whole or not at all, derived for new ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp_tools import numpy_memory
from accel_fsdp_tools import rng as rng_module
from accel_fsdp_tools.errors import DataProgressError, RngStateError
from accel_fsdp_tools.numpy_memory import RememberedState, remember_numpy
from accel_fsdp_tools.rank_state import get_rank_paths, read_rank_state, write_rank_state
from accel_fsdp_tools.rng import (
    RngSnapshot,
    decode_numpy_state,
    decode_python_state,
    derive,
    encode_numpy_state,
    encode_python_state,
)


@pytest.fixture(autouse=True)
def _unchanged_rng() -> Iterator[None]:
    before = RngSnapshot.capture()
    yield
    before.restore()


def _draw() -> list[float]:
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())),
        float(torch.randn(())),
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_draws=st.integers(0, 5))
def test_a_restored_snapshot_draws_the_same_numbers(seed: int, num_draws: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(num_draws):  # an odd number of Gaussians leaves one cached in Python and in numpy
        random.gauss(0, 1), np.random.randn(), torch.randn(3)
    snapshot = RngSnapshot.capture()
    tensors = snapshot.to_tensors("now")
    expected = [_draw() for _ in range(3)]
    torch.rand(7), random.random(), np.random.rand(700)
    again = RngSnapshot.from_tensors(tensors, "now", rank=0, path="file")
    assert again.compute_digest() == snapshot.compute_digest()
    assert again.restore() == ()
    assert [_draw() for _ in range(3)] == expected


def test_capture_draws_nothing_and_is_not_changed_by_later_draws() -> None:
    snapshot = RngSnapshot.capture()
    digest = snapshot.compute_digest()
    _draw(), np.random.rand(2000), torch.rand(2000)
    assert snapshot.compute_digest() == digest != RngSnapshot.capture().compute_digest()


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_every_numpy_bit_generator_survives_its_tensor(name: str) -> None:
    generator = np.random.Generator(getattr(np.random, name)(5))
    generator.integers(10, size=3, dtype=np.uint32)
    tensor = encode_numpy_state(generator.bit_generator.state)
    expected = generator.random(5).tolist()
    generator.bit_generator.state = decode_numpy_state(tensor)
    assert generator.random(5).tolist() == expected


def test_python_state_survives_its_tensor_with_and_without_a_cached_gaussian() -> None:
    dice = random.Random(3)
    for _ in range(2):
        assert decode_python_state(encode_python_state(dice.getstate())) == dice.getstate()
        dice.gauss(0, 1)


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
@pytest.mark.parametrize("fault", ["missing", "short", "wrong type"])
def test_a_faulty_generator_is_named_with_rank_and_file(name: str, fault: str) -> None:
    tensors = RngSnapshot.capture().to_tensors("now")
    key = f"now/{name}"
    if fault == "missing":
        del tensors[key]
    else:
        tensors[key] = tensors[key][:-1] if fault == "short" else tensors[key].to(torch.float32)
    with pytest.raises(RngStateError) as caught:
        RngSnapshot.from_tensors(tensors, "now", rank=1, path="rng_rank_00001.safetensors")
    assert (caught.value.rank, caught.value.facts["generator"]) == (1, name)
    assert "rank 1" in str(caught.value)
    assert name in str(caught.value)
    assert "rng_rank_00001.safetensors" in str(caught.value)


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_nothing_is_restored_if_one_generator_cannot_be(name: str) -> None:
    snapshot = RngSnapshot.capture()
    broken = {"python": (3, (1, 2), None), "numpy": {"bit_generator": "PCG64"}, "torch": torch.zeros(3)}
    parts: dict[str, Any] = {"python": snapshot.python, "numpy": snapshot.numpy, "torch": snapshot.torch}
    _draw()
    before = RngSnapshot.capture().compute_digest()
    with pytest.raises(RngStateError, match=name):
        RngSnapshot(**{**parts, name: broken[name]}).restore()
    assert RngSnapshot.capture().compute_digest() == before


class _FakeDevice:
    """Stands for `torch.cuda` with one generator, of the current device."""

    def __init__(self) -> None:
        self.state = torch.arange(16, dtype=torch.uint8)
        self.is_broken = False

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        self.state = state.clone()


def test_a_device_generator_is_captured_restored_and_unused_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = _FakeDevice()
    monkeypatch.setattr(rng_module, "find_device_modules", lambda: {"cuda": device})
    snapshot = RngSnapshot.capture()
    assert RngSnapshot.capture(devices=False).find_missing_devices() == ("cuda",)
    assert snapshot.find_missing_devices() == ()
    tensors = snapshot.to_tensors("now")
    device.state += 1
    loaded = RngSnapshot.from_tensors(tensors, "now", rank=0, path="file")
    assert loaded.restore() == ()
    assert device.state.tolist() == list(range(16))
    torch.manual_seed(8)
    before = RngSnapshot.capture().compute_digest()
    with pytest.raises(RngStateError, match="cuda"):
        RngSnapshot(loaded.python, loaded.numpy, loaded.torch, {"cuda": torch.zeros(3)}).restore()
    assert RngSnapshot.capture().compute_digest() == before

    monkeypatch.setattr(rng_module, "find_device_modules", dict)  # the same file on a machine without one
    torch.manual_seed(9)
    assert loaded.restore() == ("cuda",)
    assert torch.equal(torch.get_rng_state(), snapshot.torch)


def test_device_modules_are_those_that_torch_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    rng_module.find_device_modules.cache_clear()
    fake = SimpleNamespace(get_rng_state=None, is_available=lambda: True)
    monkeypatch.setattr(torch, "xpu", fake)
    assert rng_module.find_device_modules()["xpu"] is fake
    rng_module.find_device_modules.cache_clear()


def test_derived_generators_are_deterministic_and_differ_between_ranks() -> None:
    base = RngSnapshot.capture()
    digests = [derive(base, rank).compute_digest() for rank in range(4)]
    assert len(set(digests)) == 4
    assert digests == [derive(base, rank).compute_digest() for rank in range(4)]
    assert derive(7, 2).compute_digest() != derive(8, 2).compute_digest()
    assert derive(base, 1).restore() == ()
    first = _draw()
    assert len(set(first)) == len(first)
    # Spelled out, so that another version of this package derives the same.
    derive(7, 2).restore()
    assert [random.randrange(1000), int(np.random.randint(1000)), int(torch.randint(1000, ()))] == [112, 1, 27]


def test_rank_files_hold_what_was_written_and_no_pickle(tmp_path: Path) -> None:
    snapshot = RngSnapshot.capture()
    paths = write_rank_state(tmp_path / "new", 3, rng=snapshot, loaders=[], extra={"accelerator_step": 4})
    assert [path.name for path in paths] == ["rng_rank_00003.safetensors", "progress_rank_00003.json"]
    state = read_rank_state(tmp_path / "new", 3)
    assert state.rng.compute_digest() == snapshot.compute_digest()
    assert (state.rank, state.loaders, state.extra) == (3, [], {"accelerator_step": 4})


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("fault", ["missing", "empty", "truncated", "other rank", "garbage"])
def test_a_faulty_rank_file_is_an_error_that_names_rank_and_path(tmp_path: Path, which: int, fault: str) -> None:
    for rank in (0, 1):
        write_rank_state(tmp_path, rank, rng=RngSnapshot.capture(), loaders=[], extra={})
    path = get_rank_paths(tmp_path, 1)[which]
    content = path.read_bytes()
    if fault == "missing":
        path.unlink()
    elif fault == "other rank":
        path.write_bytes(get_rank_paths(tmp_path, 0)[which].read_bytes())
    else:
        path.write_bytes({"empty": b"", "truncated": content[:-9], "garbage": b"\xff" * 99}[fault])
    with pytest.raises((RngStateError, DataProgressError)) as caught:
        read_rank_state(tmp_path, 1)
    assert isinstance(caught.value, RngStateError if which == 0 else DataProgressError)
    assert caught.value.rank == 1
    assert str(path) in str(caught.value)
    read_rank_state(tmp_path, 0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    draws=st.lists(st.sampled_from(["random", "randn", "many", "bytes", "seed", "restore"]), max_size=6),
)
def test_numpys_state_is_read_from_memory_as_numpy_tells_it(seed: int, draws: list[str]) -> None:
    before = np.random.get_state(legacy=False)
    np.random.seed(seed)
    for draw in draws:
        {
            "random": np.random.rand,
            "randn": np.random.randn,
            "many": lambda: np.random.rand(1000),
            "bytes": lambda: np.random.bytes(3),
            "seed": lambda: np.random.seed(seed // 2),
            "restore": lambda: np.random.set_state(before),
        }[draw]()
        state, expected = remember_numpy(), np.random.get_state(legacy=False)
        assert isinstance(state, RememberedState)  # not numpy's own answer
        assert encode_numpy_state(state).equal(encode_numpy_state(expected))
        assert state["state"]["key"].dtype == np.uint32


def test_numpy_is_asked_where_memory_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(4))
        snapshot = RngSnapshot.capture()
        expected = np.random.rand(3).tolist()
        assert snapshot.numpy["bit_generator"] == "PCG64"
        snapshot.restore()
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)
    monkeypatch.setattr(numpy_memory, "_find_gauss", lambda: None)  # a numpy that keeps it elsewhere
    assert not isinstance(remember_numpy(), RememberedState)
