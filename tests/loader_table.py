"""The page `docs/data-matrix.md`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

COLUMNS = ("mid-epoch, same ranks", "boundary, same ranks", "mid-epoch, other ranks", "boundary, other ranks")
_HEAD = """# Which loaders go on exactly

Written by `pytest -m matrix tests/test_loader_matrix.py`; the default test run takes a sample. Each line was run on two
ranks, saved at every batch, and resumed in fresh processes that had drawn other random numbers: in the middle of the
first and of the second pass, with the last batch of a pass in hand, and between passes. Every item carries random
numbers of Python, numpy and torch. "Other ranks" are three, with two samples per rank instead of three and
`elastic="exact"` ([elastic](elastic.md)).

On the same ranks:

- **exact**: every rank is handed what it is handed in the run that never stopped, to the bit, and so are the random
  generators after each batch, to the end of the second pass.
- **approximate**: the same ids in the same order (with `in_order=False`, and for streams in persistent workers: each of
  them once in its epoch, whichever come first and complete the last batch); what was drawn at random differs. The load
  report says why, and what makes it exact.
- **refused**: `load_state` raises before anything is loaded, or the loader at its first batch, and says what to do.

On other ranks **exact** and **approximate** say that all ranks together are handed, batch by batch, what they are
handed in the run that never stopped (with `in_order=False`: epoch by epoch), by the ids, to the end of the second pass.

`data_resume` is an argument of `load_state` and `Checkpointer`; where it is "any", it makes no difference.
[Resume](resume.md) explains the choices.
"""


def write_table(seen: Iterable[Any]) -> str:
    """The page for what was seen of each cell at each point."""
    reasons: dict[str, int] = {}
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for each in seen:
        text = each.verdict
        if each.reason:
            number = reasons.setdefault(_shorten(each.reason), len(reasons) + 1)
            text += f" ({number})"
        cell = each.cell
        key = (cell.is_stream, cell.source, cell.delivery, cell.workers, cell.data_resume)
        column = f"{each.where}, {each.ranks} ranks"
        before = rows.setdefault(key, {}).get(column)
        rows[key][column] = text if before in (None, text) else " / ".join(dict.fromkeys([*before.split(" / "), text]))
    lines = [_HEAD]
    for is_stream, title, column in ((False, "Datasets with indices", "sampler"), (True, "Streams", "stream")):
        names = [column, "batches reach", "workers", "data_resume", *COLUMNS]
        lines += [f"## {title}", "", f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
        lines += [f"| {' | '.join(row)} |" for row in _merge({k[1:]: v for k, v in rows.items() if k[0] == is_stream})]
        lines.append("")
    lines += ["## Why", "", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines) + "\n"


def _merge(rows: dict[tuple[str, ...], dict[str, str]]) -> list[list[str]]:
    """One row where all choices of `data_resume` come to the same."""
    merged: list[list[str]] = []
    groups: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    for (*key, choice), texts in rows.items():
        groups.setdefault(tuple(key), {})[choice] = tuple(texts[name] for name in COLUMNS)
    for group, choices in groups.items():
        if len(set(choices.values())) == 1:
            merged.append([*group, "any", *next(iter(choices.values()))])
        else:
            merged += [[*group, choice, *texts] for choice, texts in choices.items()]
    return merged


def _shorten(reason: str) -> str:
    prefix = "the data progress of this checkpoint cannot be restored: "
    text = reason.removeprefix(prefix).split(". Nothing was changed")[0]
    return re.sub(
        r"loader 0: the place of loader 0 \(\w+\)", "the place of loader 0", re.sub(r"\d+ batches", "N batches", text)
    )
