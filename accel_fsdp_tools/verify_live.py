"""`verify_model`: is what sits in memory what was saved? Asked on every rank, of its own shards, answered together.

Ways that complement each other. Fingerprints: the live shards are summed again and compared with what was recorded
from the live shards at the save; no disk is read, and any number of ranks gives the same sums. Full: every rank
compares its shards with the checkpoint's bytes, read by this package's own readers, and names the place. Statistics
are weaker, and for people to read.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .compare_disk import compare_with_disk
from .compare_live import EXACT, Tolerance
from .compare_recorded import (
    Measurement,
    compare_fingerprints,
    compare_requires_grad,
    compare_statistics,
    find_odd_values,
    has_statistics,
    list_all_statistics,
    list_plain,
    measure_prepared,
)
from .disk_checks import check_disk
from .errors import DamagedCheckpointError, MismatchError, UsageError
from .findings import PLAIN_VERDICTS, Finding, VerifyReport
from .manifest import Manifest, find_manifest
from .prepared import NameFilter, Prepared, get_prepared, make_filter
from .proven import HoldingRecord, Key
from .ranks import run_together
from .statistics import TensorStatistics

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

MODES = ("auto", "full", "fingerprint", "sample", "stats", "off")
_READS_DISK = ("auto", "full", "sample")


def verify_model(
    accelerator_or_model: Accelerator | torch.nn.Module,
    path: str | Path,
    *,
    mode: str = "auto",
    layers: str | None = None,
    optimizers: bool = True,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> VerifyReport:
    """Compare models and optimizers in memory with the checkpoint at `path`, on every rank.

    Collective: every rank reads only what it holds, and all get the same report. Nothing is gathered; peak memory is
    two blocks of 1 MiB and what fingerprints take (some ten blocks more with a tolerance). What a rank holds exactly as
    at the save is told by a hash; only the rest is summed up. Time in mode "full": that of reading the checkpoint once
    to compare, and what is not in sharded data files once more for checksums, both spread over the ranks.

    Args:
        accelerator_or_model: an accelerator stands for everything it has prepared; a model (plain, compiled, wrapped
            by PEFT or by FSDP 1 or 2) is compared with the checkpoint's first model.
        mode: "fingerprint" sums the live shards and compares with what was recorded at the save, without reading
            the disk. "full" compares every element with the bytes on disk, and what is on disk with what was written
            (checksums of the manifest, else the CRC-32s that torch stores) and saved (fingerprints). "sample" compares
            the first and the last rows of every part, and all of embeddings, the first and the last layer and a seeded
            tenth of the rest. "stats" compares counts, sums and largest values with those recorded at the save: the
            weakest, but in numbers for people (`report.statistics`). "auto" takes fingerprints where they were
            recorded and compares in full what they say differs, or everything where there are none. "off" compares
            nothing.
        layers: a pattern (`*.layers.0.*`) that narrows any mode to parameters of matching names.
        optimizers: compare optimizer states and hyper-parameters too.
        atol: floating-point values count as equal to the saved ones within `atol + rtol * abs(saved)`; for modes that
            read the disk. The largest such deviation is a hint.
        rtol: see `atol`.

    Raises:
        UsageError: the mode is unknown, or what it compares with was not recorded.
        MismatchError: the checkpoint holds fewer models or optimizers than are prepared.
        RankFailedError: a rank could not read its part.
    """
    return compare_with_checkpoint(
        get_prepared(accelerator_or_model, optimizers=optimizers),
        Path(path).expanduser().absolute(),
        mode=mode,
        is_chosen=make_filter(layers),
        is_whole=layers is None,
        tolerance=Tolerance(atol, rtol),
    )


def compare_with_checkpoint(
    prepared: Prepared,
    directory: Path,
    *,
    mode: str,
    is_chosen: NameFilter = lambda name: True,
    tolerance: Tolerance = EXACT,
    is_whole: bool = True,
    checks_sums: bool = True,
    before: Mapping[str, TensorStatistics] | None = None,
) -> VerifyReport:
    """Do what `verify_model` promises. Collective.

    Args:
        is_whole: `is_chosen` leaves nothing out.
        checks_sums: in mode "full", compare the files with the checksums of the manifest, if there is one. False
            where that has just been done.
        before: the statistics from before a load (`take_statistics`), to tell what did not change in it.
    """
    started = time.monotonic()
    manifest = find_manifest(directory)
    _check_arguments(prepared, directory, manifest, mode, tolerance, before)
    has_fingerprints = _has_fingerprints(manifest)
    used = mode
    if mode == "auto":
        used = "fingerprint" if has_fingerprints and tolerance.is_exact else "full"
    counts: dict[str, int] = {"tensors": 0}
    if used == "off":
        return VerifyReport(str(directory), used, (), counts)
    rows: Mapping[str, Mapping[str, object]] = {}
    findings: list[Finding] = []
    hints: list[Finding] = []
    record = None
    if manifest is not None and has_fingerprints and used in ("fingerprint", "full"):
        record = HoldingRecord(directory, manifest, is_chosen)
    disk: list[Finding] = []
    named: set[str] = set()
    odd: set[str] = set()
    omitted = 0
    if used in ("full", "sample"):  # first, since it tells the record what memory holds
        disk, omitted, named = compare_with_disk(
            prepared,
            directory,
            is_chosen,
            counts,
            is_sample=used == "sample",
            tolerance=tolerance,
            odd=odd if used == "full" else None,
            plain=list_plain(manifest) if manifest is not None and record is not None else (),
            record=record,
        )
    elif record is not None:
        run_together("comparing with what each rank held", partial(record.compare_all, prepared))
    proven = record.agree() if record is not None else frozenset()
    measurements = _measure(prepared, is_chosen, used, has_fingerprints, proven)
    if manifest is not None:
        hints += compare_requires_grad(prepared, manifest, is_chosen)
        if record is not None:
            differences, num_compared = compare_fingerprints(measurements, manifest)
            findings += differences
            counts["tensors"] = max(counts["tensors"], num_compared)
    if used == "stats":
        counts["statistics"] = 0
        differences, rows = compare_statistics(measurements, manifest, counts, before)
        findings += differences
    if used == "stats":
        hints += find_odd_values(measurements)
    suspects = {finding.fqn for finding in findings if finding.fqn is not None}
    if mode == "auto" and used == "fingerprint" and suspects:
        disk, omitted, named = compare_with_disk(
            prepared, directory, suspects.__contains__, counts, tolerance=tolerance
        )
    # A full comparison says where, or that the load has cast. The bare fingerprint stays for what equals the disk: then
    # the file itself is not what was saved.
    findings = [finding for finding in findings if finding.fqn not in named] + disk
    if odd:
        hints += find_odd_values(measure_prepared(prepared, _choose_labels(odd), statistics=True))
    damage = []
    if used == "full" and (checks_sums or manifest is None):
        # What equals memory, which has the fingerprints of the save, is what was saved: no need to read it again.
        # Of what the load has cast, memory does not tell.
        is_cast = any(each.code == "dtype" for each in disk)
        skips_tensors = has_fingerprints and tolerance.is_exact and is_whole and bool(prepared.optimizers)
        skips_tensors = skips_tensors and not is_cast
        damage = check_disk(directory, manifest, counts, skips_tensors=skips_tensors)
    return VerifyReport(
        path=str(directory),
        mode=used,
        findings=(*findings, *damage, *hints),
        counts=counts,
        seconds=time.monotonic() - started,
        omitted=omitted,
        statistics=rows,
    )


def _measure(
    prepared: Prepared, is_chosen: NameFilter, used: str, has_fingerprints: bool, proven: frozenset[Key]
) -> tuple[Measurement, ...]:
    wants_fingerprints = has_fingerprints and used in ("fingerprint", "full")
    wants_statistics = used == "stats"
    if not wants_fingerprints and not wants_statistics:
        return ()
    return measure_prepared(
        prepared, is_chosen, fingerprints=wants_fingerprints, statistics=wants_statistics, proven=proven
    )


def _choose_labels(labels: set[str]) -> NameFilter:
    """Return a filter of names within a model or optimizer that some of these labels may belong to."""
    return lambda name: any(label == name or label.endswith(f".{name}") for label in labels)


def take_statistics(prepared: Prepared) -> dict[str, TensorStatistics]:
    """Return the statistics of everything in memory by label, to be compared after a load. Collective."""
    return list_all_statistics(measure_prepared(prepared, lambda name: True, statistics=True))


def _has_fingerprints(manifest: Manifest | None) -> bool:
    return manifest is not None and any(
        tensor.fingerprint is not None for facts in manifest.models for tensor in facts.tensors
    )


def _check_arguments(
    prepared: Prepared,
    directory: Path,
    manifest: Manifest | None,
    mode: str,
    tolerance: Tolerance,
    before: Mapping[str, TensorStatistics] | None,
) -> None:
    if mode not in MODES:
        raise UsageError(f"mode is {mode!r}; use one of {', '.join(MODES)}", actual=mode)
    if not tolerance.is_exact and mode not in _READS_DISK:
        raise UsageError(f"atol and rtol are for modes that compare with the disk; mode is {mode!r}", actual=mode)
    if not (tolerance.atol >= 0 and tolerance.rtol >= 0):
        raise UsageError(f"atol is {tolerance.atol}, rtol is {tolerance.rtol}; neither may be negative")
    if mode == "fingerprint" and not _has_fingerprints(manifest):
        raise UsageError(f"{directory} has no recorded fingerprints; use mode='full'", path=str(directory))
    if mode == "stats" and before is None and not has_statistics(manifest):
        raise UsageError(f"{directory} has no recorded statistics; use mode='full'", path=str(directory))
    if manifest is None:
        return
    for what, live, saved in (
        ("model", len(prepared.models), len(manifest.models)),
        ("optimizer", len(prepared.optimizers), len(manifest.optimizers)),
    ):
        if live > saved:
            raise MismatchError(
                f"{directory} holds {saved} {what}(s), {live} are prepared. Give one model, or optimizers=False, or "
                "the checkpoint of this run.",
                path=str(directory),
                expected=saved,
                actual=live,
            )


def require_verified(report: VerifyReport) -> None:
    """Raise if the report holds a failure: every rank has the same report, so every rank raises the same.

    Raises:
        DamagedCheckpointError: names the first differences: parameter, index, expected and actual value.
    """
    if report.ok:
        return
    first = report.failures[0]
    odd = {name: row for name, row in report.statistics.items() if row.get("verdict") not in (None, *PLAIN_VERDICTS)}
    shown = dataclasses.replace(report, statistics=odd)
    raise DamagedCheckpointError(
        f"What was loaded is not what was saved. {shown}\nDon't train on: load another checkpoint, or look at this "
        "one with accel-fsdp verify.",
        path=report.path,
        fqn=first.fqn,
        rank=first.rank,
        expected=first.facts.get("expected"),
        actual=first.facts.get("actual"),
    )
