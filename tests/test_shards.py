"""Every tensor's parts on all ranks tile it exactly once and hold its values, under every kind of sharding."""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from accel_fsdp_tools.errors import UnsupportedError, UsageError
from accel_fsdp_tools.extents import Box, Run, check_coverage, get_whole
from accel_fsdp_tools.fingerprint import Fingerprint, fingerprint_tensor, fingerprint_value
from accel_fsdp_tools.live_fingerprints import (
    ReplicaDivergenceError,
    fingerprint_model,
    fingerprint_optimizer,
    measure_model,
)
from accel_fsdp_tools.optimizer_shards import describe_parameter_groups, iterate_optimizer_shards
from accel_fsdp_tools.placements import Cut, compute_boxes, iterate_local_boxes
from accel_fsdp_tools.rank_sums import RankMismatchError
from accel_fsdp_tools.shards import WHOLE, LocalShard, iterate_local_shards

from .harness import run_ranks, run_ranks_expecting
from .shard_cases import CASES, WORLD_2_AND_4, build_case, build_net, gather_whole, run, step

CASES_AND_WORLDS = [(name, world) for name, case in CASES.items() for world in case.worlds]


def _flatten(shard: LocalShard) -> dict[str, Any]:
    assert shard.tensor is None or shard.tensor.untyped_storage().resizable()  # FSDP1 resizes them
    return {
        "dtype": shard.dtype,
        "shape": shard.shape,
        "kind": shard.kind,
        "requires_grad": shard.requires_grad,
        "aliases": shard.aliases,
        "layout": shard.layout,
        "value": shard.value,
        "pieces": [(part, tensor.clone()) for part, tensor in shard.iterate_pieces()],
    }


def _is_view_of_live_memory(model: torch.nn.Module) -> bool:
    first, again = (
        [tensor.data_ptr() for shard in iterate_local_shards(model) for _, tensor in shard.iterate_pieces()]
        for _ in range(2)
    )
    return first == again


def _inspect(name: str) -> dict[str, Any]:
    """Shard, look, make an update, look again."""
    case = CASES[name]
    model = build_case(case)
    report: dict[str, Any] = {"first": {s.fqn: _flatten(s) for s in iterate_local_shards(model)}}
    report["first fingerprints"] = fingerprint_model(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, betas=(0.9, 0.98))
    vocabulary = dict(case.options).get("vocabulary", 23)
    step(model, optimizer, vocabulary)
    # A forward without its backward: SHARD_GRAD_OP and FSDP2's root leave everything unsharded.
    loss = run(model, torch.zeros(1, 2, dtype=torch.long)).float().sum()
    report["unsharded"] = _is_unsharded(model)
    report["views"] = _is_view_of_live_memory(model)
    report["shards"] = {s.fqn: _flatten(s) for s in iterate_local_shards(model)}
    report["count"] = len(list(iterate_local_shards(model)))
    report["fingerprints"] = fingerprint_model(model)
    states = iterate_optimizer_shards(model, optimizer)
    report["states"] = {(s.fqn, s.state): _flatten(s) for s in states}
    report["groups"] = describe_parameter_groups(model, optimizer)
    report["optimizer fingerprints"] = fingerprint_optimizer(model, optimizer)
    loss.backward()
    report["whole"] = gather_whole(model)
    return report


def _is_unsharded(model: torch.nn.Module) -> bool:
    """Whether FSDP has registered whole parameters in the place of shards at this moment."""
    handles = [module._handle for module in model.modules() if getattr(module, "_handle", None) is not None]
    groups = [
        module._get_fsdp_state()._fsdp_param_groups for module in model.modules() if isinstance(module, FSDPModule)
    ]
    return any(handle._skipped_use_sharded_views for handle in handles) or any(
        group.is_unsharded for each in groups for group in each
    )


def _inspect_all(names: list[str]) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    reports = {}
    for name in names:
        try:
            reports[name] = _inspect(name)
        except Exception:
            reports[name] = traceback.format_exc()
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """What every rank saw, by case and number of ranks; all cases of one world in one set of processes."""
    found = {}
    for world in WORLD_2_AND_4:
        names = [name for name, size in CASES_AND_WORLDS if size == world]
        ranks = run_ranks(_inspect_all, names, world_size=world, folder=tmp_path_factory.mktemp("ranks"))
        for name in names:
            found[name, world] = [report[name] for report in ranks]
    return found


def _assert_tiles(per_rank: list[dict[str, Any]], key: Any, whole: torch.Tensor | None) -> None:
    """Copies are equal; one of each, together, tile the tensor exactly once and hold its values."""
    shares: dict[Any, list[Any]] = defaultdict(list)
    for held in per_rank:
        if key in held:
            shares[held[key]["layout"]].append(held[key]["pieces"])
    first = next(held[key] for held in per_rank if key in held)
    pieces = []
    for copies in shares.values():
        pieces += copies[0]
        for copy in copies[1:]:
            assert [part for part, _ in copy] == [part for part, _ in copies[0]], key
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(copy, copies[0], strict=True)), key
    coverage = check_coverage(first["shape"], [part for part, _ in pieces])
    assert coverage.ok, (key, coverage)
    assert {(held[key]["shape"], held[key]["dtype"]) for held in per_rank if key in held} == {
        (first["shape"], first["dtype"])
    }
    if whole is None:
        return
    assert (tuple(whole.shape), str(whole.dtype)) == (first["shape"], f"torch.{first['dtype']}"), key
    for part, tensor in pieces:
        if isinstance(part, Run):
            expected = whole.reshape(-1)[part.start : part.start + part.length]
            assert torch.equal(tensor.reshape(-1), expected), (key, part)
        else:
            slices = (slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
            assert torch.equal(tensor, whole[tuple(slices)]), (key, part)


@pytest.mark.parametrize(("name", "world"), CASES_AND_WORLDS)
def test_parts_tile_every_tensor_once(reports: Any, name: str, world: int) -> None:
    ranks = reports[name, world]
    for rank, report in enumerate(ranks):
        assert not isinstance(report, str), f"rank {rank}:\n{report}"
    whole = ranks[0]["whole"]
    shards = [report["shards"] for report in ranks]
    assert all(report["count"] == len(held) for report, held in zip(ranks, shards, strict=True)), "a name came twice"
    assert all(list(held) == list(shards[0]) for held in shards), "names or order differ between ranks"
    names = {n for fqn, shard in shards[0].items() for n in (fqn, *shard["aliases"])}
    assert names == set(whole)
    assert all(report["views"] for report in ranks)
    for fqn in shards[0]:
        _assert_tiles(shards, fqn, whole[fqn])


@pytest.mark.parametrize(("name", "world"), CASES_AND_WORLDS)
def test_fingerprints_are_those_of_the_whole_tensors(reports: Any, name: str, world: int) -> None:
    ranks = reports[name, world]
    expected = {
        n: fingerprint_tensor(t, get_whole(tuple(t.shape)), tuple(t.shape)) for n, t in ranks[0]["whole"].items()
    }
    for report in ranks:
        assert report["fingerprints"] == expected


@pytest.mark.parametrize(("name", "world"), CASES_AND_WORLDS)
def test_fingerprints_of_fresh_models_do_not_depend_on_the_sharding(reports: Any, name: str, world: int) -> None:
    case = CASES[name]
    net = case.prepare(build_net(**dict(case.options)))
    assert reports[name, world][0]["first fingerprints"] == fingerprint_model(net)


@pytest.mark.parametrize(("name", "world"), CASES_AND_WORLDS)
def test_optimizer_states_tile_too(reports: Any, name: str, world: int) -> None:
    ranks = reports[name, world]
    states = [report["states"] for report in ranks]
    shapes = {fqn: shard["shape"] for fqn, shard in ranks[0]["shards"].items()}
    keys = {key for held in states for key in held}
    trained = {fqn for fqn, shard in ranks[0]["shards"].items() if shard["requires_grad"]}
    assert keys == {(fqn, state) for fqn in trained for state in ("exp_avg", "exp_avg_sq", "step")}
    for key in keys:
        _assert_tiles(states, key, None)
        first = next(held[key] for held in states if key in held)
        assert first["shape"] == (() if key[1] == "step" else shapes[key[0]])
    (group,) = ranks[0]["groups"]
    assert set(group.names) == trained
    assert group.options["betas"] == (0.9, 0.98)
    fingerprints = ranks[0]["optimizer fingerprints"]
    assert all(report["optimizer fingerprints"] == fingerprints for report in ranks)
    assert {f"state.{fqn}.{state}" for fqn, state in keys} <= set(fingerprints)
    assert {"param_groups.0.lr", "param_groups.0.betas", "param_groups.0.params"} <= set(fingerprints)


@pytest.mark.parametrize("name", ["fsdp1 SHARD_GRAD_OP", "fsdp2 unsharded after forward"])
def test_shards_were_looked_up_while_unsharded(reports: Any, name: str) -> None:
    assert all(report["unsharded"] for report in reports[name, 2])


def test_ties_and_facts_are_told(reports: Any) -> None:
    for name in ("fsdp1 tied", "fsdp2 tied"):
        report = reports[name, 2][0]
        assert report["shards"]["embedding.weight"]["aliases"] == ("head.weight",)
        assert report["fingerprints"]["head.weight"] == report["fingerprints"]["embedding.weight"]
    for name in ("fsdp1 frozen", "fsdp2 frozen"):
        shards = reports[name, 2][0]["shards"]
        assert not shards["blocks.0.up.weight"]["requires_grad"]
        assert shards["blocks.1.up.weight"]["requires_grad"]
    for name in ("fsdp1 ignored", "fsdp2 ignored"):
        assert reports[name, 2][1]["shards"]["head.weight"]["layout"] == WHOLE
    shards = reports["fsdp2", 2][0]["shards"]
    assert (shards["blocks.0.count"]["kind"], shards["blocks.0.count"]["dtype"]) == ("buffer", "int64")
    assert "blocks.0.scratch" not in shards
    kinds = {type(part) for part, _ in reports["fsdp1", 2][0]["shards"]["embedding.weight"]["pieces"]}
    assert kinds == {Run}


def test_optimizer_fingerprints_do_not_depend_on_the_flat_layout(reports: Any) -> None:
    # FSDP1 in its ways does the same arithmetic on the same batch.
    expected = reports["fsdp1", 2][0]["optimizer fingerprints"]
    for name in ("fsdp1 flat", "fsdp1 SHARD_GRAD_OP", "fsdp1 flat SHARD_GRAD_OP"):
        assert reports[name, 2][0]["optimizer fingerprints"] == expected


# Copies that differ


def _diverge(name: str, fqn: str, rank: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = build_case(CASES[name])
    if dist.get_rank() == rank:
        with torch.no_grad():
            for shard in iterate_local_shards(model):
                if shard.fqn == fqn and shard.tensor is not None:
                    assert shard.tensor.numel()
                    shard.tensor.reshape(-1)[0] += 1
    measured = measure_model(model)
    assert [each.name for each in measured.divergences] == [fqn]
    assert fqn not in measured.fingerprints
    assert len(measured.fingerprints) == len(list(iterate_local_shards(model))) - 1
    fingerprint_model(model)


@pytest.mark.parametrize(
    ("name", "fqn", "rank", "world"),
    [
        ("fsdp2 HSDP", "blocks.1.up.weight", 3, 4),
        ("fsdp1 HYBRID", "embedding.weight", 2, 4),
        ("fsdp1 flat NO_SHARD", "embedding.weight", 2, 4),
        ("fsdp2", "blocks.1.count", 3, 4),
        ("fsdp2 TP", "embedding.weight", 3, 4),
        ("unsharded", "head.weight", 1, 2),
    ],
)
def test_copies_that_differ_are_named(tmp_path: Path, name: str, fqn: str, rank: int, world: int) -> None:
    errors = run_ranks_expecting(
        ReplicaDivergenceError, _diverge, name, fqn, rank, world_size=world, folder=tmp_path / "ranks"
    )
    for error in errors:
        assert isinstance(error, ReplicaDivergenceError)
        assert error.fqn == fqn
        # Of two copies neither is the majority: the lower rank counts.
        assert error.ranks == (rank,)
        assert sorted(r for ranks in error.divergences[0].copies.values() for r in ranks)[-1] >= rank


def _hold_other_tensors() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net = build_net()
    if dist.get_rank() == 1:
        net.extra = torch.nn.Linear(2, 2)
    fingerprint_model(net)


def _hold_other_dtype() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net = build_net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    if dist.get_rank() == 1:
        net.head.weight.data = net.head.weight.data.double()
    fingerprint_model(net)


def _lose_a_shard() -> None:
    """Two meshes that nothing relates: neither rank is a copy of the other, so the tensor is there twice."""
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", [0, 3]), DeviceMesh("cpu", [1, 2])]
    mesh = meshes[0] if rank in (0, 3) else meshes[1]
    net = torch.nn.Linear(4, 6, bias=False)
    net.weight = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    fingerprint_model(net)


@pytest.mark.parametrize(
    ("function", "world", "message"),
    [
        (_hold_other_tensors, 2, "other names"),
        (_hold_other_dtype, 2, "head.weight has another dtype or shape"),
        (_lose_a_shard, 4, "weight has 96 bytes, and its shards on all ranks have 192"),
    ],
)
def test_ranks_that_do_not_fit_together(tmp_path: Path, function: Any, world: int, message: str) -> None:
    for error in run_ranks_expecting(RankMismatchError, function, world_size=world, folder=tmp_path / "ranks"):
        assert message in str(error)


# Through Accelerate: names agree with what the manifest records


def _compare_with_manifest_facts(fsdp_version: int) -> Mapping[str, Fingerprint]:
    from accel_fsdp_tools.live import describe_model
    from accel_fsdp_tools.live_fingerprints import fingerprint_accelerator

    from .training import Setup, build

    objects = build(Setup(fsdp_version=fsdp_version, tie=True), seed=0)
    live = fingerprint_accelerator(objects.accelerator)
    facts = describe_model(objects.model)
    sizes = {tensor.fqn: math.prod(tensor.shape) * 4 for tensor in facts.tensors}
    assert {name: fingerprint.num_bytes for name, fingerprint in live.models[0].items()} == sizes
    return live.models[0]


def test_names_are_those_of_the_manifest(tmp_path: Path) -> None:
    one = run_ranks(_compare_with_manifest_facts, 1, folder=tmp_path / "one")
    two = run_ranks(_compare_with_manifest_facts, 2, folder=tmp_path / "two")
    assert one[0] == one[1] == two[0] == two[1]


# Placements


@st.composite
def _cuttings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]:
    """A shape, a mesh, and per mesh dimension a tensor dimension (-1: replicated) and a split factor."""
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    cuts = [(draw(st.integers(-1, len(shape) - 1)), draw(st.sampled_from([1, 1, 2, 3]))) for _ in mesh]
    return shape, mesh, cuts


@settings(max_examples=300, deadline=None)
@given(_cuttings())
def test_boxes_are_what_torch_cuts_from_left_to_right(
    cutting: tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]],
) -> None:
    """Against torch's own splitting of a tensor of indices, for every rank of a mesh."""
    import itertools

    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    shape, mesh, dims = cutting
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        local = whole
        cuts = []
        for (dim, factor), count, index in zip(dims, mesh, coordinate, strict=True):
            if dim < 0:
                continue
            placement = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
            pieces, _ = placement._split_tensor(local, count, with_padding=False, contiguous=True)
            local = pieces[index]
            cuts.append(Cut(dim, count, index, factor))
        try:
            boxes = compute_boxes(shape, cuts, tuple(local.shape))
        except UnsupportedError as error:
            assert "more than one way" in str(error)  # noqa: PT017
            assert any(cut.split_factor > 1 for cut in cuts)
            continue
        if local.numel() == 0:
            assert boxes == ()
            continue
        for box, place in iterate_local_boxes(boxes):
            there = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            here = tuple(slice(o, o + n) for o, n in zip(place.offsets, place.sizes, strict=True))
            assert torch.equal(whole[there], local[here])
        assert sum(box.numel for box in boxes) == local.numel()


def test_a_lone_strided_shard_is_several_boxes() -> None:
    # torch's own functions report the rows 0 to 5 as one box.
    boxes = compute_boxes((12, 5), [Cut(0, 2, 0, 2)], (6, 5))
    assert boxes == (Box((0, 0), (3, 5)), Box((6, 0), (3, 5)))


def test_cuts_from_right_to_left_are_told_by_the_local_shape() -> None:
    # 11 rows over tp=3 are 4, 4, 3; FSDP then cuts each in 3: the last rank of each axis holds row 10.
    cuts = [Cut(0, 3, 2, 3), Cut(0, 3, 2)]
    assert compute_boxes((11, 2), cuts, (1, 2)) == (Box((10, 0), (1, 2)),)
    assert compute_boxes((11, 2), [Cut(0, 3, 2, 3), Cut(0, 3, 0)], (0, 2)) == ()


def test_a_local_shape_that_fits_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="in no way"):
        compute_boxes((8, 2), [Cut(0, 2, 0)], (3, 2))


# Without ranks


def test_a_plain_model_in_one_process() -> None:
    net = build_net(tied=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    step(net, optimizer, 23)
    shards = list(iterate_local_shards(net))
    assert [shard.fqn for shard in shards if shard.aliases] == ["embedding.weight"]
    assert all(shard.tensor is not None and shard.parts for shard in shards)
    fingerprints = fingerprint_optimizer(net, optimizer)
    assert fingerprints["state.head.weight.momentum_buffer"].num_bytes == 23 * 10 * 4
    assert fingerprints["param_groups.0.lr"] == fingerprint_value(optimizer.param_groups[0]["lr"].item())


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_a_rowless_flat_parameter_is_refused() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = torch.nn.Linear(3, 2)
        net.weight = torch.nn.Parameter(torch.randn(3, 2).t())
        model = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
        with pytest.raises(UnsupportedError, match=r"weight: FSDP1 holds it not row by row"):
            list(iterate_local_shards(model))
    finally:
        dist.destroy_process_group()


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="none of the model's"):
        list(iterate_optimizer_shards(build_net(), torch.optim.SGD(build_net().parameters())))
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(UnsupportedError, match="object has no fingerprint") as caught:
        fingerprint_optimizer(net, optimizer)
    assert caught.value.fqn == "param_groups.0.hook"


def test_what_has_no_values_is_refused() -> None:
    with torch.device("meta"):
        net = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="weight is on the meta device"):
        list(iterate_local_shards(net))
