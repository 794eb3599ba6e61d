"""A resumed loader delivers what the loader of a run that never stopped delivers, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import stream_kinds
from tests.harness import run_ranks
from tests.loader_kinds import KINDS, Program, count_items

REFERENCE_SEED, RESUMED_SEED, AGAIN_SEED = 1, 77, 555
ALL_KINDS = KINDS | stream_kinds.KINDS


def _record_references(names: list[str], folder: Path) -> dict[str, list[Any]]:
    """Run each kind untracked, then tracked and saved at every point; both must deliver the same."""
    references = {}
    for name in names:
        kind = ALL_KINDS[name]
        expected = Program(kind, REFERENCE_SEED, is_tracked=not kind.is_unchanged).run()
        program = Program(kind, REFERENCE_SEED)
        actual = program.run(lambda point: program.save(folder / name / point, len(program.log)))  # noqa: B023
        assert actual == expected, f"{name}: being followed and saved changed the run"
        references[name] = expected
    return references


def _resume_all(
    folder: Path, references: list[dict[str, list[Any]]], seed: int, save_to: Path | None
) -> tuple[int, list[str]]:
    """Resume every kind from every point; return how many, and what went wrong."""
    num_resumed, failures = 0, []
    for name in references[0]:
        kind = ALL_KINDS[name]
        points = sorted((folder / name).iterdir()) if (folder / name).exists() else []
        for number, point in enumerate(points[:: 2 if len(references) == 1 else 1]):
            if len(list(point.glob("progress_*"))) < len(references):
                continue  # not every rank has this batch
            program = Program(kind, seed)
            target = save_to if number % 2 == 0 else None
            texts = _resume(program, point, references[program.rank][name], target)
            failures.extend(f"{name} at {point.name}: {text}" for text in texts)
            num_resumed += 1
    return num_resumed, failures


def _resume(program: Program, point: Path, reference: list[Any], save_to: Path | None) -> list[str]:
    torch.rand(5), random.random()
    start = program.load(point)
    assert program.num_reads == 0
    num_saves = 0

    def save(name: str) -> None:
        nonlocal num_saves  # soon after the resume (in the same epoch, where there is more of it)
        num_saves += 1
        if save_to is not None and num_saves == 2:
            program.save(save_to / point.parent.name / f"{point.name}_{name}", start + len(program.log))

    actual, expected = program.run(save), reference[start:]
    if actual != expected:
        where = next((i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), "length")
        return [f"differs at {where}, {len(actual)} events instead of {len(expected)}"]
    if program.kind.counts_reads and program.kind.break_after is None and program.num_reads != count_items(actual):
        return [f"{program.num_reads} items were read for {count_items(actual)} delivered"]
    return []


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.matrix)])
def test_every_kind_resumes_at_every_point(tmp_path: Path, world_size: int) -> None:
    names = [name for name, kind in KINDS.items() if kind.min_ranks <= world_size]
    _check_kinds(tmp_path, names, world_size, 120)


@pytest.mark.matrix
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("world_size", [2, 1])
@pytest.mark.parametrize("part", ["dispatch", "stream", "hf", "workers", "stateful"])
def test_every_other_kind_resumes_at_every_point(tmp_path: Path, world_size: int, part: str) -> None:
    if part == "stateful":
        pytest.importorskip("torchdata")
    _check_kinds(tmp_path, [name for name in stream_kinds.KINDS if name.startswith(part)], world_size, 800)


def _check_kinds(tmp_path: Path, names: list[str], world_size: int, timeout_s: float) -> None:
    settings: dict[str, Any] = {"world_size": world_size, "timeout_s": timeout_s}
    saved, saved_again = tmp_path / "saved", tmp_path / "again"
    references = run_ranks(_record_references, names, saved, **settings, folder=tmp_path / "a")
    assert all((saved / name / "0.0").is_dir() and (saved / name / "1.0").is_dir() for name in names)
    resumed = run_ranks(_resume_all, saved, references, RESUMED_SEED, saved_again, **settings, folder=tmp_path / "b")
    assert [failures for _, failures in resumed] == [[]] * world_size
    assert resumed[0][0] > 4 * len(names)
    again = run_ranks(_resume_all, saved_again, references, AGAIN_SEED, None, **settings, folder=tmp_path / "c")
    assert [failures for _, failures in again] == [[]] * world_size
    assert again[0][0] > len(names)
