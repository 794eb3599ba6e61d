"""`verify_checkpoint`: all checks, one after another, each with findings of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import UsageError
from ..findings import VerifyReport
from ..fingerprint import Fingerprint
from ..meter import Progress
from .gathering import Gatherer
from .inventory import check_inventory
from .judging import judge_files, judge_fingerprints, judge_values, look_at_scattered, note_unprotected
from .optimizers import check_optimizers
from .passes import Wanted, read_files
from .pickles import check_pickles
from .plans import Key, make_plans
from .ranks import check_ranks
from .recorded import read_fingerprints, sum_values
from .subject import PARSING_ERRORS, Subject, find_root, open_subject
from .tensors import Located, check_against_manifest, check_tensors
from .values import Values


def verify_checkpoint(
    path: str | Path,
    *,
    scan: bool = False,
    fingerprints: bool = False,
    crcs: bool = True,
    allow_objects: Iterable[str] = (),
    num_threads: int = 2,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a checkpoint on disk: is it whole, undamaged, consistent, and harmless to load?

    Nothing is loaded into a model, nothing in the files is executed, nothing is written, and no torch is needed. Works
    on checkpoints of this package, of plain Accelerate, the Trainer and `dcp.save`; what cannot be known without a
    manifest is a note of the report. `docs/verify.md` lists every finding.

    Args:
        path: a checkpoint's directory, one inside it, a file, or a directory that holds exactly one checkpoint.
        scan: look for NaN, infinity and all-zero tensors too (hints, not failures).
        fingerprints: sum every tensor's bytes again, and compare with what the manifest recorded from memory.
        crcs: compare the items of torch's files with the CRC-32s stored in them. Without, a checkpoint with a manifest
            is read at the speed of its checksums; one without a manifest is hardly checked.
        allow_objects: classes (full dotted names) that registered objects may consist of, as for `load_state`.
        num_threads: how many files are read at the same time.
        progress: called with the bytes read and the bytes to read, from any thread, never from two at once.

    Returns:
        The report. Its `ok` is False if anything is not as it was saved. Damage of any kind is a finding, no error.
        Each byte is read once. Peak memory: some 1 MiB per thread and 8 kB per tensor and rank.

    Raises:
        CheckpointNotFoundError: `path` does not exist.
        UsageError: it holds several checkpoints, or an argument makes no sense.
    """
    if num_threads < 1:
        raise UsageError(f"num_threads is {num_threads}; give at least 1", actual=num_threads)
    if isinstance(allow_objects, str):
        raise UsageError(f"allow_objects: give a list of names, [{allow_objects!r}]", actual=allow_objects)
    started = time.perf_counter()
    root = find_root(path)
    gather = Gatherer(root if root.is_dir() else root.parent)
    subject = open_subject(root, gather)
    located: list[Located] = []
    for check in (
        lambda: check_inventory(subject, gather),
        lambda: check_ranks(subject, gather),
        lambda: check_pickles(subject, gather, allow_objects=allow_objects),
        lambda: located.extend(check_tensors(subject, gather)),
        lambda: check_against_manifest(subject, gather),
        lambda: check_optimizers(subject, gather),
    ):
        _guard(check, gather)
    recorded: dict[Key, Fingerprint] = {}
    if fingerprints:
        _guard(lambda: recorded.update(_get_recorded(subject, gather)), gather)
    wanted = Wanted(crcs, scan, frozenset(recorded))
    plans = make_plans(subject, located)
    results = read_files(plans.files, wanted, num_threads=num_threads, progress=progress)
    judge_files(results, gather, crcs=crcs)
    note_unprotected(subject, results, gather)
    values: dict[Key, Values] = {}
    sums = sum_values(subject, recorded, gather)
    for result in results:
        for key, seen in result.values.items():
            values.setdefault(key, Values()).add(seen)
        for key, total in result.fingerprints.items():
            sums[key] = sums.get(key, Fingerprint()) + total
    look_at_scattered(plans, wanted, values, sums, gather)
    judge_values(values, gather)
    judge_fingerprints(recorded, sums, gather)
    return gather.make_report(_describe_mode(wanted, subject), time.perf_counter() - started)


def _guard(check: Callable[[], object], gather: Gatherer) -> None:
    """Run a check; what contradicts itself so much that a check can't go on must not hide what others find."""
    try:
        check()
    except PARSING_ERRORS as error:
        gather.add_error(error)


def _get_recorded(subject: Subject, gather: Gatherer) -> dict[Key, Fingerprint]:
    recorded = read_fingerprints(subject, gather)
    if not recorded:
        gather.note(
            "no_fingerprints",
            "The manifest records no fingerprints, so what was in memory at the save is not known"
            if subject.manifest is not None
            else "Without a manifest there are no fingerprints to compare with",
        )
    return recorded


def _describe_mode(wanted: Wanted, subject: Subject) -> str:
    steps = ["structure"]
    if subject.expected:
        steps.append("checksums")
    if wanted.crcs:
        steps.append("crcs")
    if wanted.values:
        steps.append("values")
    if wanted.fingerprints:
        steps.append("fingerprints")
    return "offline: " + ", ".join(steps)
