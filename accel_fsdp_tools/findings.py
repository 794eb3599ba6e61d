"""What a verification found: one finding per fault, and the report that carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Severity(str, Enum):
    """How much a finding matters.

    A failure means that the checkpoint, or what was loaded from it, is not what was saved. A hint is worth a look and
    proves nothing by itself. A note says what could not be checked, and why.
    """

    FAILURE = "failure"
    HINT = "hint"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One fact that a check brought to light.

    `code` is stable and meant for machines (`checksum`, `crc`, `hole`, `value`, ...); `message` says what is wrong,
    where, and for failures what to do. `rank` is None where no single rank is meant.
    """

    code: str
    severity: Severity
    message: str
    fqn: str | None = None
    path: str | None = None
    rank: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        where = {"fqn": self.fqn, "path": self.path, "rank": self.rank}
        return {
            "code": self.code,
            "severity": self.severity.value,
            "message": self.message,
            **{name: value for name, value in where.items() if value is not None},
            **({"facts": dict(self.facts)} if self.facts else {}),
        }


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification: what was compared, with which strength, and everything that was found.

    `counts` tells how much was really looked at (files, bytes, tensors, ...), so that an empty list of findings
    cannot be mistaken for an empty check. `omitted` counts failures beyond the first ones that are listed.
    `statistics`, where they were taken, are a row of numbers per tensor; `str()` shows them as a table in mode "stats".
    """

    path: str
    mode: str
    findings: tuple[Finding, ...]
    counts: Mapping[str, int]
    seconds: float = 0.0
    omitted: int = 0
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.severity is Severity.FAILURE)

    @property
    def ok(self) -> bool:
        return not self.failures and self.omitted == 0

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        verdict = "as it was saved" if self.ok else f"{len(self.failures) + self.omitted} failure(s)"
        lines = [f"verified {self.path} ({self.mode}; {counts}): {verdict}"]
        for severity in Severity:
            for finding in self.findings:
                if finding.severity is severity:
                    where = f" (rank {finding.rank})" if finding.rank is not None else ""
                    lines.append(f"  {severity.value:<8}{finding.code:<12} {finding.message}{where}")
        if self.omitted:
            lines.append(f"  ... and {self.omitted} more")
        if self.mode == "stats":
            lines += _format_table(self.statistics)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "mode": self.mode,
            "ok": self.ok,
            "counts": dict(self.counts),
            "seconds": self.seconds,
            "omitted": self.omitted,
            "findings": [finding.to_dict() for finding in self.findings],
            **({"statistics": {name: dict(row) for name, row in self.statistics.items()}} if self.statistics else {}),
        }


_MAX_ROWS = 200
PLAIN_VERDICTS = ("as saved", "not recorded")
_COLUMNS = ("count", "mean", "std", "norm", "abs_max", "zeros", "nan", "inf")


def _format_table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of statistics, a line per tensor: those that differ first, then in their own order."""
    if not rows:
        return []
    order = sorted(rows, key=lambda name: rows[name]["verdict"] in PLAIN_VERDICTS)
    shown = order[:_MAX_ROWS]
    width = max(len("tensor"), *map(len, shown))
    lines = [f"  {'tensor':<{width}}" + "".join(f"{column:>12}" for column in _COLUMNS) + "  verdict"]
    for name in shown:
        row = rows[name]
        cells = (f"{value:.4g}" if isinstance(value := row[column], float) else str(value) for column in _COLUMNS)
        unchanged = "" if row.get("changed", True) else ", did not change in the load"
        lines.append(f"  {name:<{width}}" + "".join(f"{cell:>12}" for cell in cells) + f"  {row['verdict']}{unchanged}")
    if len(order) > len(shown):
        lines.append(f"  ... and {len(order) - len(shown)} more tensors in report.statistics")
    return lines
