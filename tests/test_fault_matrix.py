"""A save that fails anywhere leaves the old checkpoint or the new one, whole, and every rank says the same.

The default run takes one cell per point. The whole product is marked `matrix` and writes `docs/fault-matrix.md`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault_matrix import KINDS, MODES, PLACES, Verdict, choose_sample, generate_cells, run_cells
from tests.fault_table import write_table

TABLE = Path(__file__).parent.parent / "docs" / "fault-matrix.md"


def _check(verdicts: list[Verdict]) -> None:
    problems = [f"{each.cell.name}: {problem}" for each in verdicts for problem in each.problems]
    assert not problems, "\n".join(problems)


def test_one_fault_at_every_point(tmp_path: Path) -> None:
    sample = choose_sample()
    assert {cell.place for cell in sample} == set(PLACES)
    assert {cell.kind for cell in sample} == set(KINDS)
    assert {(cell.victim, cell.mode) for cell in sample} == {(victim, mode) for victim in (0, 1) for mode in MODES}
    _check(run_cells(sample, tmp_path))


def test_the_table_is_that_of_these_points() -> None:
    text = TABLE.read_text()
    for name in PLACES:
        assert f"| {name} |" in text, f"{name}: run pytest -m matrix tests/test_fault_matrix.py"


@pytest.fixture(scope="module")
def seen() -> list[Verdict]:
    return []


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", PLACES)
def test_every_fault_at_a_point(tmp_path: Path, seen: list[Verdict], place: str) -> None:
    verdicts = run_cells([cell for cell in generate_cells() if cell.place == place], tmp_path)
    seen += verdicts
    _check(verdicts)


@pytest.mark.matrix
def test_the_table_is_written(seen: list[Verdict]) -> None:
    if len(seen) < len(generate_cells()):
        pytest.skip("only a part of the product was run")
    TABLE.write_text(write_table(seen))
