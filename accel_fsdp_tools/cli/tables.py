"""Tables for people: aligned, wrapped, readable in 100 columns."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from ..findings import Finding, Severity, VerifyReport

_MIN_WIDTH, _MAX_WIDTH = 60, 100


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def format_report(report: VerifyReport, *, only_failures: bool = False) -> str:
    """Return the report as text: what was looked at, a table of findings, the verdict last."""
    findings = report.failures if only_failures else report.findings
    lines = [] if only_failures else [report.path, f"  {report.mode}", f"  {_format_counts(report)}"]
    if findings:
        lines += ["", *_format_table(findings), ""] if not only_failures else _format_table(findings)
    if report.omitted:
        lines.append(f"... and {report.omitted} more failure(s) of the kinds above")
    lines.append(_format_verdict(report))
    return "\n".join(lines)


def _format_counts(report: VerifyReport) -> str:
    parts = [
        f"{count / 1e9:.2f} GB" if name == "bytes" and count >= 1e8 else f"{count} {name}"
        for name, count in report.counts.items()
    ]
    rate = report.counts.get("bytes", 0) / max(report.seconds, 1e-9) / 1e9
    return f"{', '.join(parts)} in {report.seconds:.2f} s ({rate:.2f} GB/s)"


def _format_verdict(report: VerifyReport) -> str:
    counts = {severity: sum(each.severity is severity for each in report.findings) for severity in Severity}
    counts[Severity.FAILURE] += report.omitted
    shown = ", ".join(f"{count} {severity.value}{'s' * (count != 1)}" for severity, count in counts.items() if count)
    verdict = "OK: nothing differs from what was saved" if report.ok else "DIFFERENT: this is not what was saved"
    return f"{verdict} ({shown})" if shown else verdict


def _format_table(findings: Iterable[Finding]) -> list[str]:
    rows = [(each.severity.value, each.code, _get_place(each), each.message) for each in findings]
    width = min(max(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MIN_WIDTH), _MAX_WIDTH)
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    indent = first + second + 4
    lines = []
    for severity, code, place, message in rows:
        head = f"{severity:<{first}}  {code:<{second}}  "
        text = [*([place] if place else []), *_wrap(message, width - indent)]
        lines += [head + text[0], *(" " * indent + line for line in text[1:])]
    return lines


def _get_place(finding: Finding) -> str:
    """Return file, tensor and rank in one line of their own: names are long, and are what one searches for."""
    parts = [finding.path or "", finding.fqn or "", f"rank {finding.rank}" if finding.rank is not None else ""]
    return "  ".join(part for part in parts if part)


def _wrap(message: str, width: int) -> list[str]:
    # Paths and names stay whole, so that they can be copied.
    return textwrap.wrap(message, width, break_long_words=False, break_on_hyphens=False) or [""]
