"""Every configuration times every fault: a clean load verifies, and each fault is caught and named.

The default run takes each kind of configuration once, with all faults in memory and a share of those on disk, so dealt
out that every fault occurs with both kinds of state dicts. `pytest -m matrix` runs everything and writes
`docs/verify-matrix.md`.

What is caught where, and what nothing could catch (and why), is stated with the faults in `matrix_disk`.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_fsdp_tools import verify_checkpoint
from accel_fsdp_tools.errors import AccelFsdpError
from accel_fsdp_tools.files import list_files
from accel_fsdp_tools.findings import Finding, VerifyReport
from tests import matrix, matrix_table
from tests.harness import RankError, run_ranks
from tests.manifests import flip_bit
from tests.matrix import CELLS, CONFIGURATIONS, NOT_RUN, SAMPLED, Cell, choose_sample
from tests.matrix_disk import ADAPTED, DISK_FAULTS, FULL, SHARDED, WHOLE, adapt, list_disk_faults
from tests.matrix_memory import MEMORY_FAULTS, is_named

TABLE = Path(__file__).parent.parent / "docs" / "verify-matrix.md"
MODES = ("auto", "full")
_NUM_AT_ONCE = 2  # runs: each waits a good part of its time
_DISK_SHARE = 8  # the default run takes every eighth damaged checkpoint of a cell


@dataclass(frozen=True)
class Plan:
    """What to do in one cell."""

    cell: Cell
    memory: tuple[tuple[str, str], ...]  # fault, mode
    disk: tuple[tuple[str, str], ...]  # fault, variant
    narrow: bool

    def __str__(self) -> str:
        return str(self.cell)


@dataclass
class Outcome:
    """What every rank saw, and what `verify_checkpoint` said of each damaged copy."""

    ranks: list[dict[str, Any]]
    offline: dict[tuple[str, str], VerifyReport] = field(default_factory=dict)


def _is_narrow_possible(cell: Cell) -> bool:
    return not cell.configuration.endswith("bf16")


def _plan_all(cell: Cell) -> Plan:
    """Everything on as few ranks as the configuration runs on; on more ranks, disk faults by turns."""
    if cell.world != CONFIGURATIONS[cell.configuration].worlds[0]:
        return replace(_plan_some(list(CONFIGURATIONS).index(cell.configuration), cell), memory=_ALL_IN_MEMORY)
    return Plan(cell, _ALL_IN_MEMORY, tuple(list_disk_faults(cell.kind)), _is_narrow_possible(cell))


def _plan_some(index: int, cell: Cell) -> Plan:
    memory = tuple((fault, MODES[(index // 2 + number) % 2]) for number, fault in enumerate(MEMORY_FAULTS))
    disk = list_disk_faults(cell.kind)[index // 2 % _DISK_SHARE :: _DISK_SHARE]
    return Plan(cell, memory, tuple(disk), index % 8 < 2 and _is_narrow_possible(cell))


_ALL_IN_MEMORY = tuple((fault, mode) for fault in MEMORY_FAULTS for mode in MODES)
SAMPLE = [_plan_some(index, cell) for index, cell in enumerate(choose_sample())]
PRODUCT = [_plan_all(cell) for cell in CELLS]


# -- on the ranks ------------------------------------------------------------------------------------------------------


def _save(folder: str, cell: Cell) -> None:
    from accel_fsdp_tools import save_state, track

    run = matrix.build(cell)
    track(run.accelerator)
    run.train(2)
    save_state(run.accelerator, f"{folder}/early")
    run.train(1)
    save_state(run.accelerator, f"{folder}/late")


def _summarize(findings: tuple[Finding, ...]) -> list[tuple[str, str, str | None, int | None]]:
    return [(each.severity.value, each.code, each.fqn, each.rank) for each in findings]


def _describe(error: BaseException) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "expected": isinstance(error, AccelFsdpError),
        "text": str(error),
        "fqn": getattr(error, "fqn", None),
    }


def _load(folder: str, plan: Plan) -> dict[str, Any]:
    """Load the damaged copies one after another, then the good one, and plant faults into what was loaded."""
    from accel_fsdp_tools import load_state, verify_model

    run = matrix.build(plan.cell)
    accelerator, good = run.accelerator, f"{folder}/early"
    seen: dict[str, Any] = {"disk": {}, "memory": {}}
    for number, (name, variant) in enumerate(plan.disk):
        run.spoil()
        mode = DISK_FAULTS[name].verify if variant == ADAPTED else "auto"
        try:
            load_state(accelerator, f"{folder}/{number}", verify=mode, allow_after_step=True)
            seen["disk"][name, variant] = None
        except Exception as error:
            seen["disk"][name, variant] = _describe(error)
    run.spoil()
    seen["report"] = str(load_state(accelerator, good, allow_after_step=True))
    seen["clean"] = verify_model(accelerator, good, mode="full")
    for name, mode in plan.memory:
        with MEMORY_FAULTS[name](run) as planted:
            seen["memory"][name, mode] = planted, _summarize(verify_model(accelerator, good, mode=mode).failures)
    seen["undone"] = verify_model(accelerator, good, mode="full")
    if plan.narrow:
        seen["narrow"] = _load_narrow(good, plan.cell)
    return seen


def _load_narrow(path: str, cell: Cell) -> tuple[dict[str, Any], list[Any]]:
    """Load into a model of another dtype: refused; let through, the cast is named."""
    from accel_fsdp_tools import load_state, verify_model

    run = matrix.build(cell, dtype=torch.bfloat16)
    try:
        load_state(run.accelerator, path)
    except AccelFsdpError as error:
        refusal = _describe(error)
    load_state(run.accelerator, path, strict=False, verify="files")
    return refusal, _summarize(verify_model(run.accelerator, path, mode="full", optimizers=False).findings)


# -- here --------------------------------------------------------------------------------------------------------------


def _run(plan: Plan, folder: Path) -> Outcome:
    states = folder / "states"
    states.mkdir()
    world = plan.cell.world
    run_ranks(_save, str(states), plan.cell, world_size=world, folder=folder / "save")
    offline = {}
    for number, (name, variant) in enumerate(plan.disk):
        copy = states / str(number)
        shutil.copytree(states / "early", copy)
        DISK_FAULTS[name].damage(copy, states / "late")
        adapt(copy, variant)
        offline[name, variant] = verify_checkpoint(copy, fingerprints=variant == ADAPTED)
    ranks = run_ranks(_load, str(states), plan, world_size=world, folder=folder / "load", timeout_s=240)
    shutil.rmtree(folder)
    return Outcome(ranks, offline)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Outcome]]]:
    """The runs of all plans that were selected, some at a time."""
    selected = [
        item.callspec.params["plan"]
        for item in request.session.items
        if item.path == request.path and "plan" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    pool = ThreadPoolExecutor(_NUM_AT_ONCE)
    yield {str(plan): pool.submit(_run, plan, tmp_path_factory.mktemp("cell")) for plan in selected}
    pool.shutdown(cancel_futures=True)


def _check(plan: Plan, outcome: Outcome) -> None:
    first, *others = outcome.ranks
    for seen in outcome.ranks:
        assert "memory was compared with the checkpoint" in seen["report"]
        assert seen["clean"].ok, str(seen["clean"])
        assert seen["clean"].counts["elements"] > 500
        assert seen["undone"].ok, str(seen["undone"])
    for fault, mode in plan.memory:
        planted = next(seen["memory"][fault, mode][0] for seen in outcome.ranks if seen["memory"][fault, mode][0])
        found = first["memory"][fault, mode][1]
        assert all(other["memory"][fault, mode][1] == found for other in others), "all ranks get the same verdict"
        assert planted.name in {name for _, _, name, _ in found}, f"{fault}, {mode}: {planted}, {found}"
        if planted.rank is not None and not fault.startswith("step"):
            assert {(name, rank) for _, code, name, rank in found if code == "value"} == {
                (planted.name, planted.rank)
            }, f"{fault}, {mode}: {planted}, {found}"
    for name, variant in plan.disk:
        _check_damaged(name, variant, outcome)
    if plan.narrow:
        for seen in outcome.ranks:
            refusal, found = seen["narrow"]
            assert refusal["type"] == "MismatchError"
            assert "another dtype" in refusal["text"]
            named = {name for _, code, name, _ in found if code == "dtype"}
            assert any(is_named(str(name), "blocks.0.up.weight") for name in named), found


def _check_damaged(name: str, variant: str, outcome: Outcome) -> None:
    fault, where = DISK_FAULTS[name], f"{name}, {variant}"
    report = outcome.offline[name, variant]
    named = {fault.named, *(Path(each.path).name for each in report.failures if each.path)}
    if variant in fault.offline:
        assert not report.ok, where
        assert any(each.fqn or each.path or fault.named in each.message for each in report.failures), (
            f"{where}: {report}"
        )
    if variant in fault.load:
        errors = [seen["disk"][name, variant] for seen in outcome.ranks]
        assert None not in errors, f"{where}: loaded on rank(s) {[i for i, each in enumerate(errors) if not each]}"
        for error in errors:
            assert error["expected"], f"{where}: {error}"
        assert any(each["fqn"] or any(text in each["text"] for text in named) for each in errors), f"{where}: {errors}"


@pytest.mark.parametrize("plan", SAMPLE, ids=str)
def test_a_clean_load_verifies_and_faults_are_named(outcomes: Mapping[str, Future[Outcome]], plan: Plan) -> None:
    _check(plan, outcomes[str(plan)].result())


def test_the_sample_holds_every_configuration_and_every_fault() -> None:
    assert {plan.cell.configuration for plan in SAMPLE} == set(SAMPLED) <= set(CONFIGURATIONS)
    for kind in matrix.KINDS:
        plans = [plan for plan in SAMPLE if plan.cell.kind == kind]
        assert {each for plan in plans for each in plan.disk} == set(list_disk_faults(kind))
        assert {each for plan in plans for each in plan.memory} == {(f, m) for f in MEMORY_FAULTS for m in MODES}
        assert any(plan.narrow for plan in plans)
    assert {plan.cell.world for plan in SAMPLE} == {2, 4}


@pytest.mark.matrix
@pytest.mark.parametrize("plan", PRODUCT, ids=str)
def test_the_product(outcomes: Mapping[str, Future[Outcome]], plan: Plan) -> None:
    _check(plan, outcomes[str(plan)].result())


@pytest.mark.matrix
def test_the_table_is_written(outcomes: Mapping[str, Future[Outcome]]) -> None:
    if not {str(plan) for plan in PRODUCT} <= outcomes.keys():
        pytest.skip("only a part of the product was run")
    seen = [record for plan in PRODUCT for record in _record(plan, outcomes[str(plan)].result())]
    TABLE.write_text(matrix_table.write_table(seen))


def _record(plan: Plan, outcome: Outcome) -> Iterator[matrix_table.Record]:
    """Yield for the table what caught each fault in one cell."""
    first = outcome.ranks[0]
    for fault, mode in plan.memory:
        codes = {code for _, code, _, _ in first["memory"][fault, mode][1]}
        yield matrix_table.Record(plan.cell, fault, f"`verify_model`, {mode}", tuple(sorted(codes)))
    if plan.narrow:
        refusal, found = first["narrow"]
        for tool, codes in (
            ("`load_state`", {refusal["type"]}),
            ("`verify_model`, full", {code for _, code, name, _ in found if code == "dtype"}),
        ):
            yield matrix_table.Record(plan.cell, matrix_table.NARROW, tool, tuple(sorted(codes)))
    for name, variant in plan.disk:
        codes = {each.code for each in outcome.offline[name, variant].failures}
        yield matrix_table.Record(plan.cell, name, "`verify_checkpoint`", tuple(sorted(codes)), variant)
        error = first["disk"][name, variant]
        yield matrix_table.Record(plan.cell, name, "`load_state`", (error["type"],) if error else (), variant)


def test_the_table_is_that_of_these_configurations_and_faults() -> None:
    text = TABLE.read_text()
    for name in (*CONFIGURATIONS, *MEMORY_FAULTS, *DISK_FAULTS, *NOT_RUN):
        assert name in text, f"{name}: run pytest -m matrix tests/test_verify_matrix.py"


def test_a_full_file_that_lacks_a_tensor_is_refused_before_any_rank_waits(tmp_path: Path) -> None:
    # torch strips torch.compile's prefix from the keys on rank 0 alone, which then fails while the others wait.
    cell = Cell("FSDP2 compile", FULL, 2)
    plan = Plan(cell, (), tuple(each for each in list_disk_faults(FULL) if each[0] == "key missing"), narrow=False)
    outcome = _run(plan, tmp_path)
    _check(plan, outcome)
    for seen in outcome.ranks:
        assert {error["type"] for (_, variant), error in seen["disk"].items() if variant != WHOLE} == {
            "CheckpointIncompleteError"
        }


# -- what can't run ----------------------------------------------------------------------------------------------------


def _train_offloaded() -> None:
    run = matrix.build(CELLS[0], configuration=matrix.OFFLOADED_1)
    run.train(1)


def test_what_is_said_not_to_run_does_not(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(RankError, match="Cannot access accelerator device"):
        run_ranks(_train_offloaded, folder=tmp_path / "r")
    assert matrix.OFFLOADED_1.name in NOT_RUN


# -- single bits -------------------------------------------------------------------------------------------------------

_FLIPS_PER_FILE = 2
_FLIPS_PER_KIND = 200


def _name_kind(name: str) -> str:
    """Return the name of a file without numbers of ranks."""
    return re.sub(r"(__|random_states_|_rank_)\d+", r"\1N", name)


def _list_flips(path: Path, per_kind: int | None) -> list[tuple[str, int, int]]:
    """Return files, bytes and bits: some of every file, or so many of every kind of file."""
    generator = random.Random(7)
    names = list_files(path)
    if per_kind is None:
        chosen = [name for name in names for _ in range(_FLIPS_PER_FILE)]
    else:
        kinds: dict[str, list[str]] = {}
        for name in names:
            kinds.setdefault(_name_kind(name), []).append(name)
        chosen = [files[number % len(files)] for files in kinds.values() for number in range(per_kind)]
    return [(name, generator.randrange((path / name).stat().st_size), generator.randrange(8)) for name in chosen]


def _flip_and_load(path: str, cell: Cell, per_kind: int | None) -> list[tuple[str, dict[str, Any] | None, bool]]:
    """Flip one bit of one file, try to load, look whether anything was loaded, flip it back; and the next one."""
    from accel_fsdp_tools import load_state
    from accel_fsdp_tools.live import get_raw_optimizer
    from accel_fsdp_tools.shards import iterate_local_shards

    def read_memory() -> tuple[Any, ...]:
        pieces = [piece for shard in iterate_local_shards(run.model) for _, piece in shard.iterate_pieces()]
        values = b"".join(bytes(piece.contiguous().reshape(-1).view(torch.uint8)) for piece in pieces)
        state = len(get_raw_optimizer(run.optimizer).state), run.scheduler.state_dict()["last_epoch"]
        return values, state, bytes(torch.get_rng_state()), random.getstate()

    run = matrix.build(cell)
    run.spoil()
    accelerator = run.accelerator
    before = read_memory()
    results = []
    for name, place, bit in _list_flips(Path(path), per_kind):
        if accelerator.is_main_process:
            flip_bit(Path(path) / name, place, bit)
        accelerator.wait_for_everyone()
        error = None
        try:
            load_state(accelerator, path)
        except AccelFsdpError as caught:
            error = _describe(caught)
        results.append((name, error, read_memory() == before))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            flip_bit(Path(path) / name, place, bit)
    accelerator.wait_for_everyone()
    load_state(accelerator, path)
    assert read_memory() != before
    return results


@pytest.mark.parametrize(
    "per_kind", [None, pytest.param(_FLIPS_PER_KIND, marks=(pytest.mark.matrix, pytest.mark.timeout(1800)))]
)
@pytest.mark.parametrize("kind", matrix.KINDS)
def test_load_state_finds_a_flipped_bit_before_it_loads_anything(
    tmp_path: Path, kind: str, per_kind: int | None
) -> None:
    cell = Cell("FSDP2", kind, 2)
    run_ranks(_save, str(tmp_path), cell, folder=tmp_path / "save")
    names = list_files(tmp_path / "early")
    assert len(names) == (17 if kind == SHARDED else 13)
    num_kinds = len({_name_kind(name) for name in names})
    assert num_kinds == (11 if kind == SHARDED else 9)
    expected = _FLIPS_PER_FILE * len(names) if per_kind is None else per_kind * num_kinds
    ranks = run_ranks(_flip_and_load, str(tmp_path / "early"), cell, per_kind, folder=tmp_path / "load", timeout_s=1800)
    for results in ranks:
        assert len(results) == expected
        for name, error, is_untouched in results:
            assert error is not None, name
            assert name in error["text"], f"{name}: {error}"
            assert is_untouched, name
