"""The matrix of loaders: what is said to be exact is, bit for bit; what is said to be approximate keeps the ids.

On another number of ranks the samples of every batch of all ranks together are compared.

By default a sample in which the columns meet pairwise. `pytest -m matrix tests/test_loader_matrix.py` runs all and
writes `docs/data-matrix.md`.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.errors import DataProgressError
from accel_fsdp_tools.ranks import gather_all
from tests.harness import run_ranks
from tests.loader_cells import NUM_RANKS, OTHER_NUM_RANKS, Cell, choose_sample, list_cells
from tests.loader_kinds import Program, fork_workers
from tests.loader_table import write_table

TABLE = Path(__file__).parent.parent / "docs" / "data-matrix.md"
REFERENCE_SEED, RESUMED_SEED = 1, 77


@dataclass(frozen=True)
class Seen:
    """What became of one cell at one point on one rank."""

    cell: Cell
    where: str
    verdict: str
    reason: str
    failure: str
    more_and_less: Counter[Any] = field(default_factory=Counter)  # ids beyond the reference's, less those that lack
    ids: tuple[frozenset[Any], frozenset[Any]] = (frozenset(), frozenset())  # delivered, and expected, in any order
    ranks: str = "same"


def _record(cells: list[Cell], folder: Path) -> list[list[Any]]:
    """Run every cell to its end, saving at every point; returns the logs."""
    fork_workers()
    logs = []
    for number, cell in enumerate(cells):
        program = Program(cell.kind, REFERENCE_SEED)
        logs.append(
            program.run(lambda point, n=number, p=program: p.save(folder / str(n) / point, len(p.log)))  # type: ignore[misc]
        )
    return logs


def _choose_points(folder: Path, is_sample: bool) -> dict[str, str]:
    """The middle of the first and the second pass, the last batch in hand, and between passes."""
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: tuple(map(int, name.split("."))))
    last = max((name for name in names if name.startswith("0.")), key=lambda name: int(name.split(".")[1]))
    points = {"0.2": "mid-epoch", last: "boundary"}
    return points if is_sample else {**points, "1.1": "mid-epoch", "1.0": "boundary"}


def _resume_all(cells: list[Cell], folder: Path, logs: list[list[list[Any]]], is_sample: bool) -> list[Seen]:
    fork_workers()
    seen = []
    for number, cell in enumerate(cells):
        for point, where in _choose_points(folder / str(number), is_sample).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = Program(cell.kind, RESUMED_SEED)
            log = logs[program.rank][number]
            start, refusal = 0, None
            try:
                start = program.load(folder / str(number) / point, statuses=("restored", "approximate"))
            except DataProgressError as error:
                refusal = str(error)
            refusals = [each for each in gather_all(refusal) if each is not None]  # load_state raises on every rank
            if refusals:
                seen.append(Seen(cell, where, "refused", refusals[0], ""))
                continue
            assert program.outcomes is not None
            reasons = [outcome.reason for outcome in program.outcomes if outcome.reason]
            verdict = "approximate" if reasons else "exact"
            try:
                actual = program.run()
            except DataProgressError as error:
                if not (cell.is_stream and "persistent" in cell.workers):  # noise that nobody can repeat
                    raise AssertionError(f"{cell.name}, {point}") from error
                seen.append(Seen(cell, where, "refused", str(error), ""))
                continue
            reason, rest = reasons[0] if reasons else "", log[start:]
            is_free = "in_order" in cell.workers and cell.delivery == "dispatched"
            if is_free or (cell.is_stream and "persistent" in cell.workers and verdict != "exact"):
                # What comes first, and completes the last batch, may be other; nothing is lost.
                ids = frozenset(_count_ids(actual)), frozenset(_count_ids(rest))
                seen.append(Seen(cell, where, verdict, reason, "", ids=ids))
            elif "in_order" in cell.workers:
                difference = _count_ids(actual)
                difference.subtract(_count_ids(rest))
                seen.append(Seen(cell, where, verdict, reason, "", difference))
            else:
                failure = _compare(actual, rest, verdict)
                seen.append(Seen(cell, where, verdict, reason, f"{point}: {failure}" if failure else ""))
    return seen


def _compare(actual: list[Any], expected: list[Any], verdict: str) -> str:
    if verdict == "exact":
        if actual == expected:
            return ""
        index = next((i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), "length")
        return f"not exact at event {index} of {len(expected)}"
    return "" if _list_ids(actual) == _list_ids(expected) else "other ids"


def _resume_elsewhere(cells: list[Cell], folder: Path, logs: list[list[list[Any]]], is_sample: bool) -> list[Seen]:
    """On another number of ranks; rank 0 compares for all."""
    fork_workers()
    seen = []
    for number, cell in enumerate(cells):
        for point, where in _choose_points(folder / str(number), is_sample).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = Program(cell.other_kind, RESUMED_SEED)
            refusal = None
            try:
                program.load_from(folder / str(number) / point, NUM_RANKS)
            except DataProgressError as error:
                refusal = error.message
            refusals = gather_all(refusal)
            if any(refusals):
                failure = "" if len(set(refusals)) == 1 else f"{point}: ranks refuse for different reasons: {refusals}"
                seen.append(Seen(cell, where, "refused", refusals[0], failure, ranks="other"))
                continue
            assert program.outcomes is not None
            reason = next((outcome.reason for outcome in program.outcomes if outcome.reason), "")
            start = program.first_epoch, program.first_batch
            actual = _merge_ids(gather_all(program.run()), start)
            expected = {
                place: ids for place, ids in _merge_ids([log[number] for log in logs]).items() if place >= start
            }
            if "in_order" in cell.workers:
                is_equal = {(e, i) for (e, _), ids in actual.items() for i in ids} == {
                    (e, i) for (e, _), ids in expected.items() for i in ids
                }
            else:
                is_equal = actual == expected
            failure = "" if is_equal else f"{point}: on other ranks other samples: {actual} instead of {expected}"
            seen.append(Seen(cell, where, "approximate" if reason else "exact", reason, failure, ranks="other"))
    return seen


def _merge_ids(logs: list[Any], start: tuple[int, int] = (0, 0)) -> dict[tuple[int, int], list[int]]:
    """The samples of all ranks by epoch and batch; the first batches have the numbers from `start` on."""
    merged: dict[tuple[int, int], list[int]] = {}
    for log in logs:
        numbers: Counter[int] = Counter({start[0]: start[1]})
        for epoch, ids in _list_ids(log):
            place = epoch, numbers[epoch]
            merged[place] = sorted([*merged.get(place, ()), *ids])
            numbers[epoch] += 1
    return merged


def _list_ids(log: list[Any]) -> list[Any]:
    return [(event[1], [int(row[0]) for row in event[2]]) for event in log if event[0] == "train"]


def _count_ids(log: list[Any]) -> Counter[Any]:
    return Counter((epoch, number) for epoch, ids in _list_ids(log) for number in ids)


def _run(tmp_path: Path, cells: list[Cell], *, is_sample: bool) -> list[Seen]:
    logs = run_ranks(_record, cells, tmp_path / "saved", folder=tmp_path / "a", timeout_s=2000)
    arguments = cells, tmp_path / "saved", logs, is_sample
    seen = run_ranks(_resume_all, *arguments, folder=tmp_path / "b", timeout_s=2000)
    elsewhere = run_ranks(
        _resume_elsewhere, *arguments, world_size=OTHER_NUM_RANKS, folder=tmp_path / "c", timeout_s=2000
    )
    failures = [
        f"{each.cell.name}, {each.where}, rank {rank}: {each.failure}"
        for rank, mine in enumerate([*seen, elsewhere[0]])
        for each in mine
        if each.failure
    ]
    for pair in zip(*seen, strict=True):
        difference = Counter(pair[0].more_and_less)
        difference.update(pair[1].more_and_less)
        if any(difference.values()):
            failures.append(f"{pair[0].cell.name}, {pair[0].where}: {difference}")
        if pair[0].ids[0] | pair[1].ids[0] != pair[0].ids[1] | pair[1].ids[1]:
            failures.append(f"{pair[0].cell.name}, {pair[0].where}: samples are lost or added")
    assert failures == []
    return [*seen[0], *elsewhere[0]]


def _list_runnable() -> list[Cell]:
    has_torchdata = importlib.util.find_spec("torchdata") is not None
    return [cell for cell in list_cells() if has_torchdata or "stateful" not in cell.delivery]


def test_a_sample_of_the_matrix(tmp_path: Path) -> None:
    cells = choose_sample(_list_runnable())
    seen = _run(tmp_path, cells, is_sample=True)
    verdicts = Counter((each.ranks, each.verdict) for each in seen)
    assert verdicts["same", "exact"] > 2 * verdicts["same", "approximate"] > 0
    assert verdicts["same", "refused"] > 0
    assert verdicts["other", "exact"] > 0
    assert verdicts["other", "refused"] > 0


@pytest.mark.matrix
@pytest.mark.timeout(4000)
def test_the_whole_matrix(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    TABLE.write_text(write_table(_run(tmp_path, list_cells(), is_sample=False)))
