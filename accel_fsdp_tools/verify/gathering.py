"""Collects findings while checks run, and makes the report of them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import AccelFsdpError, UnsafePickleError, UnsupportedError
from ..findings import Finding, Severity, VerifyReport

_PER_PLACE = 5  # findings of one code about one file; a damaged file needs no list of a thousand tensors
_PER_CODE = 200


class Gatherer:
    """The findings of one verification, in the order of the checks. Not for several threads at once.

    Findings beyond a limit per code and file are counted, not kept.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._findings: list[Finding] = []
        self._seen: set[tuple[str, str | None, str]] = set()
        self._places: Counter[tuple[str, str | None]] = Counter()
        self._codes: Counter[str] = Counter()
        self._omitted: Counter[Severity] = Counter()
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._findings)

    def fail(self, code: str, message: str, **where: Any) -> None:
        """Add a failure: the checkpoint is not what was saved. `where` is as `add` takes it."""
        self.add(Severity.FAILURE, code, message, **where)

    def hint(self, code: str, message: str, **where: Any) -> None:
        """Add something that is worth a look and proves nothing by itself."""
        self.add(Severity.HINT, code, message, **where)

    def note(self, code: str, message: str, **where: Any) -> None:
        """Add something that could not be checked, and why."""
        self.add(Severity.NOTE, code, message, **where)

    def add(
        self,
        severity: Severity,
        code: str,
        message: str,
        *,
        fqn: str | None = None,
        path: str | Path | None = None,
        rank: int | None = None,
        **facts: Any,
    ) -> None:
        """Add a finding, once. Paths inside the checkpoint become relative to it; further keywords become facts."""
        shown = None if path is None else self.shorten(path)
        message = message.replace(f"{self._root}{os.sep}", "")
        key = (code, shown, message)
        if key in self._seen:
            return
        place = (code, shown)
        if (shown is not None and self._places[place] >= _PER_PLACE) or self._codes[code] >= _PER_CODE:
            self._omitted[severity] += 1
            return
        self._seen.add(key)
        self._places[place] += 1
        self._codes[code] += 1
        self._findings.append(Finding(code, severity, message, fqn, shown, rank, facts))

    def add_error(self, error: Exception, *, fqn: str | None = None, path: str | Path | None = None) -> None:
        """Turn what a reader raised into a finding; what is only not known to the reader becomes a note."""
        place = getattr(error, "path", None) or path
        name = getattr(error, "fqn", None) or fqn
        rank = getattr(error, "rank", None)
        if isinstance(error, UnsupportedError):
            self.note("unsupported", str(error), fqn=name, path=place, rank=rank)
        elif isinstance(error, UnsafePickleError):
            self.fail("unsafe_pickle", str(error), fqn=name, path=place, rank=rank)
        elif isinstance(error, FileNotFoundError):  # CheckpointIncompleteError is one
            self.fail("missing_file", str(error), fqn=name, path=place, rank=rank)
        elif isinstance(error, AccelFsdpError):
            self.fail("damaged", str(error), fqn=name, path=place, rank=rank)
        elif isinstance(error, OSError):
            self.fail("unreadable", f"{place or self._root} cannot be read: {error}", fqn=name, path=place)
        else:
            self.fail(
                "damaged",
                f"{place or self._root} cannot be understood ({type(error).__name__}: {str(error)[:200]})",
                fqn=name,
                path=place,
            )

    def shorten(self, path: str | Path) -> str:
        """Return a path relative to the checkpoint where it lies inside, with forward slashes."""
        text = Path(path)
        return text.relative_to(self._root).as_posix() if text.is_relative_to(self._root) else str(path)

    def make_report(self, mode: str, seconds: float) -> VerifyReport:
        """Return what was found: failures first, then hints, then notes; each in the order of the checks."""
        order = list(Severity)
        findings = sorted(self._findings, key=lambda each: order.index(each.severity))
        for severity in (Severity.HINT, Severity.NOTE):
            if self._omitted[severity]:
                text = f"{self._omitted[severity]} more {severity.value}(s) of the kinds above are not listed"
                findings.append(Finding("omitted", Severity.NOTE, text))
        counts = {name: count for name, count in self.counts.items() if count}
        return VerifyReport(
            str(self._root), mode, tuple(findings), counts, seconds, omitted=self._omitted[Severity.FAILURE]
        )
