"""What every rank has written down of an attempt, step by step: JSON lines, one file per rank.

A `step` is an update of the optimizer. Values are digests, so that equal means equal in every bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .orders import find_records

BEGIN, STEP, KILLED, END, ERROR = "begin", "step", "killed", "end", "error"
TRAINING, EVALUATION = "training", "evaluation"  # the uses of a batch

Record = Mapping[str, Any]


@dataclass
class RankRecords:
    """The records of one rank."""

    rank: int
    begin: Record | None = None
    steps: dict[int, Record] = field(default_factory=dict)
    end: Record | None = None  # the orders were carried out to the end
    error: Record | None = None


@dataclass
class Attempt:
    """One life of the script: from its start to its end or its death."""

    name: str
    ranks: list[RankRecords]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def begin(self) -> Record | None:
        """Of rank 0: how training began."""
        return self.ranks[0].begin if self.ranks else None

    @property
    def first_step(self) -> int:
        """The number of updates that it began with."""
        return 0 if self.begin is None else int(self.begin["step"])

    @property
    def last_step(self) -> int:
        """The last update that all ranks have recorded."""
        return min((max(each.steps, default=self.first_step) for each in self.ranks), default=0)

    @property
    def has_ended(self) -> bool:
        """Whether every rank came to the end that was ordered."""
        return bool(self.ranks) and all(each.end is not None for each in self.ranks)

    def find_error(self) -> Record | None:
        """Return the error that a rank ended with, the earliest one; None if there is none."""
        errors = [each.error for each in self.ranks if each.error is not None]
        return min(errors, key=lambda each: float(each["time"]), default=None)

    def get_step(self, step: int) -> list[Record]:
        """Return what the ranks have recorded of one update, in their order."""
        return [each.steps[step] for each in self.ranks if step in each.steps]


def read_attempt(folder: Path, name: str) -> Attempt:
    """Return what an attempt has left: no ranks if nothing. A half-written last line is passed over."""
    found = {rank: _read_rank(rank, path) for rank, path in find_records(folder, name).items()}
    return Attempt(name, [found.get(rank, RankRecords(rank)) for rank in range(max(found, default=-1) + 1)])


def _read_rank(rank: int, path: Path) -> RankRecords:
    records = RankRecords(rank)
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # killed while it was written
            continue
        kind = record.get("kind")
        if kind == STEP:
            records.steps[record["step"]] = record
        elif kind == BEGIN:
            records.begin = record
        elif kind == END:
            records.end = record
        elif kind == ERROR:
            records.error = record
    _leave_evaluations_out(records)
    return records


def _leave_evaluations_out(records: RankRecords) -> None:
    """Take out the batches of loaders that only ever feed forward passes without gradients.

    An evaluation behind a save belongs to no update: the resumed run, which begins after it, does not make it again.
    What an evaluation does to training shows in the random generators and the parameters.
    """
    uses: dict[int, set[str]] = {}
    for record in records.steps.values():
        for batch in record["batches"]:
            uses.setdefault(batch["loader"], set()).add(batch["use"])
    others = {loader for loader, found in uses.items() if EVALUATION in found and TRAINING not in found}
    for step, record in records.steps.items():
        batches = [batch for batch in record["batches"] if batch["loader"] not in others]
        records.steps[step] = {**record, "batches": batches}
