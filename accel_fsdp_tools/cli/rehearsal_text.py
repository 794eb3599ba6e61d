"""A rehearsal's report as text for a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..rehearsal.comparing import ORDER
from ..rehearsal.report import RehearsalReport, RunFacts, list_points
from .tables import align, get_width, wrap

_MAX_DIFFERENCES = 6


def format_rehearsal(report: RehearsalReport, folder: Path | None) -> str:
    """Return the report as text: the runs, both runs step by step, the verdict and its cause last.

    Args:
        folder: where records and logs are; None if nothing was kept.
    """
    lines = ["", *_format_runs(report.runs)]
    points = _format_points(report)
    lines += ["", *points] if points else []
    if report.log_tail:
        lines += ["", f"the end of {report.runs[-1].log}:", *(f"  | {line}" for line in report.log_tail.splitlines())]
    lines += ["", *_indent(f"{report.verdict.value.upper()}: {report.headline}", "")]
    if report.cause is not None:
        lines += _indent(report.cause.title, "  likely cause: ")
        for fact in report.cause.evidence:
            lines += _indent(fact, "    - ")
        lines += _indent(report.cause.advice, "  what to do:   ")
    others = report.differences[1:]
    if others:
        lines += ["  then differ:"]
        for each in others[:_MAX_DIFFERENCES]:
            lines += _indent(each.describe(report.compared), "    - ")
        if len(others) > _MAX_DIFFERENCES:
            lines += [f"    ... and {len(others) - _MAX_DIFFERENCES} more (--json lists all)"]
    for note in report.notes:
        lines += _indent(note, "  note: ")
    if folder is not None:
        lines += [f"  records and logs: {folder}"]
    return "\n".join(lines)


def _indent(text: str, head: str) -> list[str]:
    first, *others = [part for line in text.splitlines() or [""] for part in wrap(line, get_width() - len(head))]
    return [head + first, *(" " * len(head) + other for other in others)]


def _format_runs(runs: Any) -> list[str]:
    rows = [("run", "ranks", "steps", "seconds", "exit code")]
    return align([*rows, *map(_make_row, runs)])


def _make_row(run: RunFacts) -> tuple[str, ...]:
    steps = f"{run.first_step + 1} to {run.last_step}" if run.last_step > run.first_step else "none"
    exit_code = "stopped" if run.exit_code is None else str(run.exit_code)
    return run.name, str(run.world_size), steps, f"{run.seconds:.1f}", exit_code


def _format_points(report: RehearsalReport) -> list[str]:
    """Both runs side by side, from the first step on that both have made."""
    pair = [report.attempts.get(name) for name in report.compared]
    if pair[0] is None or pair[1] is None:
        return []
    first, second = ({point["step"]: point for point in list_points(attempt)} for attempt in pair if attempt)
    first_difference: dict[int, str] = {}
    for each in sorted(report.differences, key=lambda each: ORDER[each.thing]):
        first_difference.setdefault(each.step, each.thing.value)
    names = [f"loss {name}" for name in report.compared]
    rows = [("step", *names, "learning rate", "gradient norm", "differs in")]
    for step in sorted(first.keys() & second.keys()):
        one, other = first[step], second[step]
        rows.append(
            (
                f"{step:>4}",
                format_number(one["loss"]),
                format_number(other["loss"]),
                _pair(one["lrs"][:1], other["lrs"][:1]),
                _pair([one["gradient_norm"]], [other["gradient_norm"]]),
                first_difference.get(step, ""),
            )
        )
    return align(rows) if len(rows) > 1 else []


def _pair(one: list[float | None], other: list[float | None]) -> str:
    texts = [format_number(each[0]) if each else "" for each in (one, other)]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} / {texts[1]}"


def format_number(value: float | None) -> str:
    """Return a number as short as it can be compared by eye."""
    return "" if value is None else f"{value:.6g}"
