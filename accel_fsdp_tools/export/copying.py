"""Tensors of a checkpoint, streamed into safetensors files at the speed of a file copy.

Every byte passes once through one re-used buffer per thread, where it is checked, cast and summed while it is in the
processor's cache. What was read is compared with the fingerprints of the manifest where there are any, which prove
more, else with the CRCs that the checkpoint stores; what was written is remembered as a CRC per tensor, for `proof`,
and can be read again at once. No torch.

A block of zeros is not written: the files are made of zeros. So what is found at its place when it is read again has
got there by its own write, and was not there before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ..fingerprint import Fingerprint
from ..formats.reading import FileCache
from ..meter import Meter, Progress
from .computed import Source
from .copied import CopiedTensor, CopyResult, Findings
from .copier import Copier, ReadsAgain
from .outputs import OutputFile
from .passing import PassingSources
from .planning import get_gather_bytes, list_jobs, plan_units
from .source_checks import check_recorded, check_stored
from .workers import count_threads, run_units
from .writing import Writer, create_files, remove_files, sync_files

__all__ = ["CopiedTensor", "CopyResult", "copy_tensors"]


def copy_tensors(
    files: Sequence[OutputFile],
    directory: Path,
    *,
    num_threads: int | None = None,
    check_crcs: bool = True,
    fingerprints: Mapping[str, Fingerprint] | None = None,
    vouched: Collection[str] = (),
    proven: Collection[str] = (),
    passing: PassingSources | None = None,
    again: ReadsAgain | None = None,
    progress: Progress | None = None,
    sync: bool = True,
) -> CopyResult:
    """Write safetensors files with the tensors of a checkpoint, cast where the plan says so.

    All or nothing: after a failure none of the files is left. Not collective.

    Args:
        files: the plan, from `outputs.split_into_files`.
        directory: exists; holds none of the files.
        num_threads: default: one per processor, at most 16.
        check_crcs: compare every item that is read with the CRC-32 that the checkpoint stores for it, those excepted
            that hold only tensors with fingerprints, or vouched for or proven.
        fingerprints: what the sources of these tensors should be, by the tensors' names in the output.
        vouched: names of tensors of which no CRC is computed, since the proof will compare the output with the
            fingerprint of the live tensor or with the CRC of the stored items, from one end to the other.
        proven: names of tensors whose sources have been compared already (`prove_tensors`), or are in `passing`.
        passing: sources that are not written themselves, to be compared with their fingerprints on the way.
        again: is told of every range as soon as it is written, by the thread that wrote it.
        progress: called with bytes of source tensors.
        sync: make files and directory durable at the end.

    Returns:
        the counts, and what the proof needs. Peak memory: 3 MB per thread (10 MB where float8 is cast), and
        34 MB for all threads where tensors must be gathered from parts that are cut or stored by columns. What
        computed tensors need comes on top, see there.

    Raises:
        DamagedCheckpointError: a hole or overlap, a file cut off, bytes whose CRC or fingerprint is another.
        CheckpointIncompleteError: a file of the checkpoint is missing.
        StorageError: the output cannot be written, or the storage is full.
        UnsupportedError: a file would need too long a header.
    """
    threads = count_threads(num_threads)
    jobs = list_jobs(files)
    create_files(files, directory)
    try:
        findings = Findings(
            frozenset(fingerprints or ()), frozenset(vouched), frozenset(proven), passing, check_crcs=check_crcs
        )
        num_bytes_read = sum(job.source.size_bytes for job in jobs)
        meter = Meter(num_bytes_read, progress)

        if again is not None:
            again.open_files()

        @contextmanager
        def enter_copier() -> Iterator[Copier]:
            reader = nullcontext() if again is None else again.enter_reader()
            with FileCache() as sources, Writer(directory) as writer, reader as read_again:
                yield Copier(sources, writer, findings, meter, read_again)

        units = plan_units(
            jobs,
            check_crcs=check_crcs,
            gather_bytes=get_gather_bytes(threads),
            settled=findings.settled,
        )
        run_units(units, enter_copier, threads)
        num_checked, num_unchecked = findings.check_items() if check_crcs else (0, len(findings.items))
        tensors = {job.tensor.name: findings.sum_up(job) for job in jobs}
        for job in jobs:
            expected = (fingerprints or {}).get(job.tensor.name)
            if expected is not None:
                _check_sums(job.tensor.name, job.source, tensors[job.tensor.name].fingerprint, expected)
        for name, (source, expected) in (passing.expected if passing else {}).items():
            _check_sums(name, source, findings.get_sums(name), expected)
        if sync:
            sync_files(files, directory)
    except BaseException:
        remove_files(files, directory)
        raise
    num_bytes_written = sum(job.tensor.size_bytes for job in jobs)
    return CopyResult(tensors, num_checked, num_unchecked, num_bytes_read, num_bytes_written)


def _check_sums(name: str, source: Source, actual: Fingerprint | None, expected: Fingerprint) -> None:
    if actual != expected:
        check_stored(name, source)
        check_recorded(name, actual, expected)
