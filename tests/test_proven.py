"""Shares that are as they were at the save are not summed up again; all else is, and a digest never is a finding."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_fsdp_tools import live_fingerprints
from accel_fsdp_tools.compare_live import is_odd
from accel_fsdp_tools.extents import Box, Run
from accel_fsdp_tools.files import list_files, seal_files
from accel_fsdp_tools.findings import Severity
from accel_fsdp_tools.fingerprint import fingerprint_tensor
from accel_fsdp_tools.local_digests import (
    RankDigests,
    ShareDigest,
    digest_shard,
    digest_shards,
    get_digests_path,
    has_digests,
    read_digests,
    write_digests,
)
from accel_fsdp_tools.manifest import DIRECTORY, Manifest, OptimizerFacts
from accel_fsdp_tools.proven import HoldingRecord
from accel_fsdp_tools.shards import LocalShard
from tests.harness import run_ranks
from tests.manifests import make_manifest, reseal
from tests.training import Setup, build, train_batch

BASE = Setup(num_items=12, accumulation=1)
SETUPS = {
    "fsdp2": dataclasses.replace(BASE, frozen=True),
    "fsdp1-flat-tied": dataclasses.replace(BASE, fsdp_version=1, use_orig_params=False, tie=True),
}
TEXT = "1:00000000000000ff:00000000000000aa:24"  # any fingerprint: it only has to be the same


# -- with ranks -----------------------------------------------------------------------------------------------------


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Count the tensors that are summed up; on this rank."""
    counted = [0]

    def count(*arguments: Any) -> Any:
        counted[0] += 1
        return fingerprint_tensor(*arguments)

    live_fingerprints.fingerprint_tensor = count
    try:
        yield counted
    finally:
        live_fingerprints.fingerprint_tensor = fingerprint_tensor


@dataclasses.dataclass
class Seen:
    """What a verification said on one rank: failures and hints by code and name, tensors summed up."""

    failures: set[tuple[str, str | None]]
    hints: set[tuple[str, str | None]]
    num_summed: int


def _look(objects: Any, path: Path, mode: str = "fingerprint") -> Seen:
    from accel_fsdp_tools import verify_model

    with _counting() as counted:
        report = verify_model(objects.accelerator, path, mode=mode)
    named = [
        {(each.code, each.fqn) for each in report.findings if each.severity is severity}
        for severity in (Severity.FAILURE, Severity.HINT)
    ]
    return Seen(*named, counted[0])


def _change_digests(path: Path, change: Any) -> None:
    """Change what rank 1's record says, on rank 0, and let the manifest agree with it."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        file = path / get_digests_path(1)
        raw = json.loads(file.read_text())
        change(raw)
        file.write_text(json.dumps(raw))
        reseal(path)
    dist.barrier()


def _spoil_one(raw: dict[str, Any]) -> None:
    name = next(iter(raw["models"][0]))
    raw["models"][0][name] = "0" * 16


def _go_through_changes(path: str, setup: Setup) -> dict[str, Any]:
    """Save, load, and verify with one thing changed at a time, in memory or in the records."""
    import torch.distributed as dist

    from accel_fsdp_tools import load_state, save_state, track
    from accel_fsdp_tools.shards import iterate_local_shards

    objects = build(setup, seed=1)
    track(objects.accelerator)
    for batch in objects.loader:
        with objects.accelerator.accumulate(objects.model):
            train_batch(objects, batch)
    saved = save_state(objects.accelerator, path)
    save_state(objects.accelerator, f"{path}-async", async_save=True).wait()
    rank = dist.get_rank()
    seen: dict[str, Any] = {
        "records": [(Path(each) / get_digests_path(rank)).read_text() for each in (path, f"{path}-async")]
    }
    load_state(objects.accelerator, path, allow_after_step=True)
    seen["clean"], seen["clean full"] = _look(objects, saved), _look(objects, saved, "full")

    shards = list(iterate_local_shards(objects.model))
    held = next(each for each in shards if each.parts and each.kind == "parameter" and len(each.shape) == 2)
    seen["name"] = held.fqn
    flat = held.tensor.reshape(-1)
    before = flat.clone()
    if rank == 1:
        flat[3:4].view(torch.int32).bitwise_xor_(1)
    seen["flipped"], seen["flipped full"] = _look(objects, saved), _look(objects, saved, "full")
    if rank == 1:
        flat[3] = math.nan
    seen["nan"] = _look(objects, saved, "full")
    flat.copy_(before)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, before)
    if len({each.numel() for each in everyone}) == 1:
        flat.copy_(everyone[1 - rank])
        seen["exchanged"] = _look(objects, saved)
        flat.copy_(before)

    _change_digests(saved, _spoil_one)
    seen["wrong digest"], seen["wrong digest full"] = _look(objects, saved), _look(objects, saved, "full")
    if rank == 0:
        with (saved / get_digests_path(0)).open("a") as file:
            file.write(" ")
    dist.barrier()
    seen["damaged record"] = _look(objects, saved)
    dist.barrier()
    if rank == 0:
        (saved / get_digests_path(1)).unlink()
    dist.barrier()
    seen["no record"], seen["no record full"] = _look(objects, saved), _look(objects, saved, "full")
    return seen


@pytest.mark.parametrize("name", SETUPS)
def test_only_what_is_not_proven_is_summed_up(tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint"
    ranks = run_ranks(_go_through_changes, str(path), SETUPS[name], folder=tmp_path / "ranks")
    for seen in ranks:
        assert seen["records"][0] == seen["records"][1]  # of a save in the background the same
        for case in ("clean", "clean full"):
            assert not seen[case].failures
            assert seen[case].num_summed == 0
        num_all = seen["no record"].num_summed
        assert num_all > 20
        changed = seen["name"] if not name.endswith("flat-tied") else ranks[1]["name"]
        assert ("fingerprint", changed) in seen["flipped"].failures
        assert {each for _, each in seen["flipped"].failures} == {changed}
        assert ("value", changed) in seen["flipped full"].failures
        assert seen["flipped"].num_summed <= 1
        assert seen["flipped full"].num_summed <= 1
        assert ("value", changed) in seen["nan"].failures
        assert ("nan", changed) in seen["nan"].hints
        if "exchanged" in seen:
            assert {each for _, each in seen["exchanged"].failures} >= {seen["name"]}
        for case in ("wrong digest", "wrong digest full"):
            assert not seen[case].failures
            assert seen[case].num_summed <= 1
        assert not seen["damaged record"].failures
        assert seen["damaged record"].num_summed == num_all
        assert not seen["no record"].failures
        assert seen["no record full"].failures == {("missing_file", None), ("checksum", None)}  # of both records
        assert seen["no record full"].num_summed == num_all
    assert max(seen["wrong digest"].num_summed for seen in ranks) == 1


def _load_as(path: str, setup: Setup) -> Seen:
    from accel_fsdp_tools import load_state

    objects = build(setup, seed=3)
    with _counting() as counted:
        load_state(objects.accelerator, path, strict=False)
    seen = _look(objects, Path(path), "full")
    assert counted[0] == seen.num_summed
    return seen


def _save(path: str, setup: Setup) -> None:
    from accel_fsdp_tools import save_state, track

    objects = build(setup, seed=1)
    track(objects.accelerator)
    for batch in objects.loader:
        with objects.accelerator.accumulate(objects.model):
            train_batch(objects, batch)
    save_state(objects.accelerator, path)


def test_other_shares_and_other_ranks_are_summed_up(tmp_path: Path) -> None:
    """FSDP 1 cuts elsewhere than FSDP 2; three ranks hold other shares than two."""
    path = tmp_path / "checkpoint"
    run_ranks(_save, str(path), BASE, folder=tmp_path / "save")
    for number, (setup, world_size) in enumerate([(dataclasses.replace(BASE, fsdp_version=1), 2), (BASE, 3)]):
        seen = run_ranks(_load_as, str(path), setup, world_size=world_size, folder=tmp_path / f"r{number}")
        for each in seen:
            assert not each.failures
            assert each.num_summed > 20


# -- without ---------------------------------------------------------------------------------------------------------


def _make_shard(tensor: torch.Tensor | None, **changes: Any) -> LocalShard:
    shape = () if tensor is None else tuple(tensor.shape)
    whole = (Box((0,) * len(shape), shape),) if tensor is not None and tensor.numel() else ()
    dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
    kind = "value" if tensor is None else "parameter"
    return dataclasses.replace(LocalShard("w", dtype, shape, whole, tensor, kind), **changes)


def test_a_digest_is_of_bytes_and_of_where_they_belong() -> None:
    tensor = torch.arange(6.0)
    shard = _make_shard(tensor)
    same = digest_shard(shard, TEXT)
    assert same is not None
    doubled = torch.stack((tensor, tensor), dim=1)[:, 0]
    assert not doubled.is_contiguous()
    assert digest_shard(_make_shard(doubled), TEXT) == same
    others = [
        digest_shard(_make_shard(tensor.clone().add_(1)), TEXT),
        digest_shard(shard, TEXT.replace("ff", "fe")),
        digest_shard(_make_shard(tensor.reshape(2, 3)), TEXT),
        digest_shard(_make_shard(tensor.view(torch.int32)), TEXT),
        digest_shard(dataclasses.replace(shard, shape=(12,)), TEXT),
        digest_shard(dataclasses.replace(shard, shape=(12,), parts=(Box((6,), (6,)),)), TEXT),
        digest_shard(dataclasses.replace(shard, parts=(Run(0, 6),)), TEXT),
    ]
    assert len({same, *others}) == 1 + len(others)
    assert None not in others


def test_what_can_have_no_digest_is_named_if_it_is_held() -> None:
    shards = [
        _make_shard(torch.zeros(()), fqn="0-d"),
        _make_shard(torch.zeros(0, 3), fqn="empty"),
        _make_shard(torch.zeros(3), fqn="elsewhere", parts=()),
        _make_shard(None, fqn="w", state="step", value=3),
        _make_shard(torch.zeros(3, device="meta"), fqn="no host memory"),
        _make_shard(torch.zeros(3), fqn="no fingerprint"),
        _make_shard(torch.complex(torch.ones(3), torch.ones(3)).conj(), fqn="conjugate"),
    ]
    texts = dict.fromkeys(("0-d", "empty", "elsewhere", "state.w.step", "no host memory", "conjugate"), TEXT)
    found = digest_shards(shards, texts)
    assert {name for name, digest in found.items() if digest} == {"0-d", "conjugate"}
    assert {name for name, digest in found.items() if not digest} == {
        "state.w.step",
        "no host memory",
        "no fingerprint",
    }


def test_a_digest_that_was_not_given_everything_is_none() -> None:
    shard = _make_shard(torch.arange(4, dtype=torch.uint8))
    digest = ShareDigest(shard, TEXT)
    digest.update(memoryview(b"\0\1\2"))
    assert digest.finish() is None
    digest.update(memoryview(b"\3"))
    assert digest.finish() == digest_shard(shard, TEXT)


def _write(
    path: Path, models: list[Any], optimizers: list[Any], *, change: Any = None, world_size: int = 1
) -> Manifest:
    """Write a record of rank 0 and the manifest that lists it."""
    (path / DIRECTORY).mkdir(parents=True)
    write_digests(path, 0, RankDigests(models, optimizers), world_size=world_size)
    file = path / get_digests_path(0)
    if change is not None:
        raw = json.loads(file.read_text())
        file.write_text(change(raw) or json.dumps(raw))
    manifest = make_manifest(files=tuple(seal_files(path, list_files(path))))
    model = manifest.models[0]
    tensors = tuple(dataclasses.replace(model.tensors[0], fqn=name, fingerprint=TEXT) for name in ("w", "v"))
    return dataclasses.replace(
        manifest,
        topology=dataclasses.replace(manifest.topology, world_size=1),
        models=(dataclasses.replace(model, tensors=tensors),),
        optimizers=(OptimizerFacts("AdamW", 1, 1, 0, fingerprints={"state.w.step": TEXT}),),
    )


def _agree(path: Path, manifest: Manifest, *shards: LocalShard) -> set[str]:
    record = HoldingRecord(path, manifest, lambda name: True)
    for shard in shards:
        name = shard.fqn if shard.state is None else f"state.{shard.fqn}.{shard.state}"
        record.note(("model" if shard.state is None else "optimizer", 0, name), shard)
    return {name for _, _, name in record.agree()}


def test_a_tensor_is_proven_by_what_ranks_hold_and_not_by_what_none_holds(tmp_path: Path) -> None:
    shard, step = _make_shard(torch.arange(6.0)), _make_shard(None, state="step", value=3)
    nothing = dataclasses.replace(shard, parts=())
    known = digest_shards([shard], {"w": TEXT})
    manifest = _write(tmp_path / "a", [known], [{"state.w.step": None}])
    assert _agree(tmp_path / "a", manifest, shard, step) == {"w"}
    assert _agree(tmp_path / "a", manifest, nothing) == set()
    assert _agree(tmp_path / "a", manifest, _make_shard(torch.arange(6.0) + 1)) == set()
    assert _agree(tmp_path / "a", manifest, shard, dataclasses.replace(shard, fqn="v")) == {"w"}
    step_now = _make_shard(torch.tensor(3.0), state="step")
    assert _agree(tmp_path / "a", manifest, shard, step_now) == {"w"}
    other = dataclasses.replace(manifest.models[0].tensors[0], fingerprint=TEXT.replace("ff", "fe"))
    changed = dataclasses.replace(manifest, models=(dataclasses.replace(manifest.models[0], tensors=(other,)),))
    assert _agree(tmp_path / "a", changed, shard) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: "no JSON",
        lambda raw: "[]",
        lambda raw: raw.update(version=2),
        lambda raw: raw.update(rank=1),
        lambda raw: raw.update(world_size=2),
        lambda raw: raw.update(models=[]),
        lambda raw: raw.update(optimizers=[[]]),
        lambda raw: raw["models"][0].update(w=3),
        lambda raw: raw["models"][0].update(w="?"),
    ],
)
def test_a_record_that_makes_no_sense_proves_nothing(tmp_path: Path, change: Any) -> None:
    shard = _make_shard(torch.arange(6.0))
    known = digest_shards([shard], {"w": TEXT})
    assert _agree(tmp_path / "good", _write(tmp_path / "good", [known], [{}]), shard) == {"w"}
    manifest = _write(tmp_path / "bad", [known], [{}], change=change)
    assert read_digests(tmp_path / "bad", 0, manifest) is None
    assert _agree(tmp_path / "bad", manifest, shard) == set()


def test_a_record_is_relied_on_only_as_the_manifest_lists_it(tmp_path: Path) -> None:
    shard = _make_shard(torch.arange(6.0))
    path = tmp_path / "checkpoint"
    manifest = _write(path, [digest_shards([shard], {"w": TEXT})], [{}])
    assert has_digests(manifest, 1)
    assert not has_digests(manifest, 2)
    assert not has_digests(dataclasses.replace(manifest, files=()), 1)
    file = path / get_digests_path(0)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"digests", b"digestz"))
    assert read_digests(path, 0, manifest) is None
    file.write_bytes(data[:-1])
    assert read_digests(path, 0, manifest) is None
    file.unlink()
    assert read_digests(path, 0, manifest) is None
    assert _agree(path, manifest, shard) == set()
    shutil.rmtree(path)
    (path / DIRECTORY).mkdir(parents=True)
    assert write_digests(path, 0, RankDigests([{"w": None}], [{}]), world_size=1) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0], False),
        ([0.0, -0.0], True),
        ([0.0, 1e-30], False),  # its square is zero
        ([1e30, -1e30], False),  # the sum of squares is infinite
        ([math.nan, 1.0], True),
        ([math.inf, 1.0], True),
        ([1e30, math.nan], True),
    ],
)
def test_odd_values_are_told_from_very_small_and_very_large_ones(
    dtype: torch.dtype, values: list[float], expected: bool
) -> None:
    if dtype == torch.float16 and any(abs(each) in (1e30, 1e-30) for each in values):
        pytest.skip("beyond the range of float16")
    assert is_odd(_make_shard(torch.tensor(values, dtype=dtype))) is expected
