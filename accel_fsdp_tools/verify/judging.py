"""What the bytes of the files told, as findings: checksums, CRCs, values, fingerprints."""

from __future__ import annotations

from collections.abc import Mapping

from ..extents import DTYPE_SIZES, DiskTensor
from ..files import CHECKSUM_ALGORITHM
from ..fingerprint import Fingerprint, fingerprint_bytes
from ..formats.reading import BLOCK_BYTES, FileCache, read_part
from ..manifest import MANIFEST_PATH
from .gathering import Gatherer
from .passes import FileResult, Wanted, split_part
from .plans import Key, Plans
from .ranks import find_rank
from .subject import PARSING_ERRORS, Subject
from .tensors import Located
from .values import SCANNED_DTYPES, Values

_SHOWN = 3


def judge_files(results: list[FileResult], gather: Gatherer, *, crcs: bool) -> None:
    """Compare checksums with the manifest's, and say which items do not match their CRC."""
    num_without = sum(result.num_without_crc for result in results)
    for result in results:
        plan = result.plan
        gather.counts["files"] += 1
        gather.counts["bytes"] += result.num_bytes
        gather.counts["checksums"] += result.checksum is not None
        gather.counts["crcs"] += result.num_crcs
        for error in result.errors:
            gather.add_error(error, path=plan.file.path)
        if result.checksum is not None and result.checksum != plan.checksum:
            gather.fail(
                "checksum",
                f"{plan.name} is damaged: its {CHECKSUM_ALGORITHM} is {result.checksum}, {plan.checksum} was written. "
                "Restore it from a copy, or use another checkpoint.",
                path=plan.file.path,
                expected=plan.checksum,
                actual=result.checksum,
            )
        for span in result.bad_entries:
            owners = plan.owners.get(span.offset, [])
            named = f"{', '.join(key.fqn for key in owners[:_SHOWN])} (entry {span.label})" if owners else span.label
            gather.fail(
                "crc",
                f"{plan.name}: the bytes of {named} at byte {span.offset} do not match the CRC-32 that was stored with "
                "them: they changed after they were written.",
                path=plan.file.path,
                fqn=owners[0].fqn if owners else None,
                rank=find_rank(plan.name),
                offset=span.offset,
                length=span.length,
            )
    if crcs and num_without and not gather.counts["crcs"]:
        gather.note(
            "no_crc",
            f"{num_without} item(s) have no CRC-32: it was not computed when they were written "
            "(torch.serialization.set_crc32_options(False)), so that damage to them is found by checksums only.",
        )


def note_unprotected(subject: Subject, results: list[FileResult], gather: Gatherer) -> None:
    """Say which files nothing is known about that could show damage: no checksum, no CRC."""
    bare = [
        result.plan.name
        for result in results
        if not result.num_crcs and result.plan.name not in (*subject.expected, MANIFEST_PATH)
    ]
    if bare:
        shown = ", ".join(bare[:_SHOWN]) + (", ..." if len(bare) > _SHOWN else "")
        gather.note(
            "unprotected",
            f"{len(bare)} file(s) have neither a checksum nor a CRC to compare with ({shown}): damage that leaves them "
            "readable is not found",
        )


def look_at_scattered(
    plans: Plans, wanted: Wanted, values: dict[Key, Values], fingerprints: dict[Key, Fingerprint], gather: Gatherer
) -> None:
    """Read what could not be looked at in passing, one block of elements after another."""
    for located, scans in ((plans.scattered, wanted.values), (plans.strided, False)):
        for each in located:
            key = Key(each.section.name, each.tensor.fqn)
            try:
                _look(each, key, scans, key in wanted.fingerprints, values, fingerprints)
            except PARSING_ERRORS as error:
                gather.add_error(error, fqn=key.fqn, path=each.extent.bytes.path)


def _look(
    each: Located,
    key: Key,
    scans: bool,
    sums: bool,
    values: dict[Key, Values],
    fingerprints: dict[Key, Fingerprint],
) -> None:
    tensor, extent = each.tensor, each.extent
    scans = scans and tensor.dtype in SCANNED_DTYPES
    if not (scans or sums):
        return
    alone = DiskTensor(tensor.fqn, tensor.dtype, tensor.shape, (extent,))
    seen, total = Values(), Fingerprint()
    with FileCache() as files:
        for part in split_part(extent.part, tensor.shape, BLOCK_BYTES // DTYPE_SIZES[tensor.dtype]):
            block = memoryview(read_part(alone, part, files=files))
            if scans:
                seen.look(block, tensor.dtype)
            if sums:
                total += fingerprint_bytes(block, tensor.dtype, part, tensor.shape)
    if scans:
        values.setdefault(key, Values()).add(seen)
    if sums:
        fingerprints[key] = fingerprints.get(key, Fingerprint()) + total


def judge_values(values: Mapping[Key, Values], gather: Gatherer) -> None:
    """Report tensors that hold NaN or infinity, or nothing but zeros."""
    for key, seen in values.items():
        gather.counts["scanned tensors"] += 1
        where = f"{key.section}: {key.fqn}"
        if seen.num_nan:
            gather.hint(
                "nan",
                f"{where} holds {seen.num_nan} NaN among {seen.num_elements} numbers",
                fqn=key.fqn,
                count=seen.num_nan,
            )
        if seen.num_inf:
            gather.hint(
                "inf",
                f"{where} holds {seen.num_inf} infinite among {seen.num_elements} numbers",
                fqn=key.fqn,
                count=seen.num_inf,
            )
        if seen.is_zero and seen.num_elements > 1:
            gather.hint("zeros", f"{where}: all {seen.num_elements} numbers are zero", fqn=key.fqn)


def judge_fingerprints(recorded: Mapping[Key, Fingerprint], found: Mapping[Key, Fingerprint], gather: Gatherer) -> None:
    """Compare with what was in memory at the save. Tensors whose bytes could not be read are findings already."""
    for key, expected in recorded.items():
        actual = found.get(key, Fingerprint())
        gather.counts["fingerprints"] += 1
        if actual != expected:
            gather.fail(
                "fingerprint",
                f"{key.section}: {key.fqn} is not what was in memory at the save (fingerprint {actual}, recorded "
                f"{expected}). Don't use this checkpoint.",
                fqn=key.fqn,
                expected=str(expected),
                actual=str(actual),
            )
