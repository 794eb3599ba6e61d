"""What an export did: files, proof, findings, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..findings import Finding, Severity


@dataclass(frozen=True)
class ExportReport:
    """The result of an export, or its plan.

    Attributes:
        path, out: the checkpoint and the directory written.
        source: the format of the checkpoint, in words.
        files: size in bytes of every file of weights, by name.
        companions: names of the files beside them.
        num_tensors, num_parameters, num_bytes: of the tensors written.
        dtypes: number of tensors by their dtype.
        proof: the links of the proof, each with what was compared: `crc`, `fingerprints`, `output`, and `load` where
            it was asked for. A link that could not be made is there with the reason.
        findings: hints and notes; failures only where the caller allowed them (`allow_missing`).
        seconds: by phase.
        is_plan: nothing was written.
        peak_bytes: estimate of the memory needed beyond the interpreter, for a plan.
    """

    path: str
    out: str
    source: str
    files: Mapping[str, int]
    companions: tuple[str, ...]
    num_tensors: int
    num_parameters: int
    num_bytes: int
    dtypes: Mapping[str, int]
    proof: Mapping[str, str]
    findings: tuple[Finding, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    is_plan: bool = False
    peak_bytes: int = 0
    estimate_s: float | None = None

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.severity is Severity.FAILURE)

    @property
    def ok(self) -> bool:
        """Whether everything was written and proven and nothing had to be allowed."""
        return not self.failures

    def move_into(self, folder: str) -> ExportReport:
        """Return the report with the names of files inside a directory of that name; empty for none."""
        if not folder:
            return self
        return replace(
            self,
            files={f"{folder}/{name}": size for name, size in self.files.items()},
            companions=tuple(f"{folder}/{name}" for name in self.companions),
        )

    def add(self, other: ExportReport) -> ExportReport:
        """Return the report of two directories of weights that were written by one export."""
        dtypes = Counter(self.dtypes)
        dtypes.update(other.dtypes)
        return replace(
            self,
            files={**self.files, **other.files},
            companions=(*self.companions, *other.companions),
            num_tensors=self.num_tensors + other.num_tensors,
            num_parameters=self.num_parameters + other.num_parameters,
            num_bytes=self.num_bytes + other.num_bytes,
            dtypes=dict(dtypes.most_common()),
            estimate_s=None if self.estimate_s is None else self.estimate_s + (other.estimate_s or 0.0),
        )

    def __str__(self) -> str:
        verb = "would export" if self.is_plan else "exported"
        total = sum(self.seconds.values())
        rate = f", {self.num_bytes / 1e9 / total:.2f} GB/s" if total > 0 and not self.is_plan else ""
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in self.dtypes.items())
        amount = f"{self.num_parameters:,} parameters, {format_bytes(self.num_bytes)}{rate}"
        lines = [
            f"{verb} {self.path} ({self.source})",
            f"  to {self.out}",
            f"  {self.num_tensors} tensors ({dtypes}), {amount}",
        ]
        lines += [f"    {name}  {format_bytes(size)}" for name, size in _shorten(self.files)]
        if self.companions:
            lines.append(f"    {', '.join(self.companions)}")
        if self.is_plan:
            estimate = f", about {self.estimate_s:.0f} s" if self.estimate_s is not None else ""
            lines.append(f"  memory: about {format_bytes(self.peak_bytes)}{estimate}")
        lines += [f"  proof, {name}: {text}" for name, text in self.proof.items()]
        if self.seconds and not self.is_plan:
            lines.append("  time: " + ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items()))
        for severity in Severity:
            lines += [
                f"  {severity.value:<8}{each.code:<14} {each.message}"
                for each in self.findings
                if each.severity is severity
            ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "out": self.out,
            "source": self.source,
            "ok": self.ok,
            "is_plan": self.is_plan,
            "files": dict(self.files),
            "companions": list(self.companions),
            "num_tensors": self.num_tensors,
            "num_parameters": self.num_parameters,
            "num_bytes": self.num_bytes,
            "dtypes": dict(self.dtypes),
            "proof": dict(self.proof),
            "seconds": dict(self.seconds),
            "findings": [finding.to_dict() for finding in self.findings],
        }


def _shorten(files: Mapping[str, int], limit: int = 12) -> list[tuple[str, int]]:
    listed = list(files.items())
    if len(listed) <= limit:
        return listed
    rest = listed[limit - 1 :]
    return [*listed[: limit - 1], (f"... and {len(rest)} more", sum(size for _, size in rest))]


def format_bytes(size: int) -> str:
    """Return a size for people, in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:,} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
        size = size / 1000  # type: ignore[assignment]
    raise AssertionError("unreachable")
