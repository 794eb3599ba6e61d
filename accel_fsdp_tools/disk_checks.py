"""Is what lies on disk what was written? Dealt out to the ranks, so that no byte is read by two of them.

With a manifest the files' checksums, without one the CRC-32s that torch stores for every item and never compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .crc import crc32
from .errors import AccelFsdpError, CheckpointIncompleteError, DamagedCheckpointError
from .extents import ByteRange
from .files import FileFacts, check_files
from .findings import Finding, Severity
from .formats.checkpoint import Checkpoint
from .formats.file_cache import FileCache
from .formats.zips import ZIP_MAGIC, Payload, TorchZip, open_torch_zip, open_window
from .manifest import Manifest
from .opening import open_checkpoint
from .ranks import gather_all, get_rank, get_world_size, run_together

_BLOCK_BYTES = 1 << 20
_SHARED_BYTES = 64 << 20  # of a zip longer than this (a full state dict) every rank checks some entries
_ZIP_SUFFIXES = (".bin", ".pt", ".pth", ".pkl")
_DATA_SUFFIX = ".distcp"
_MAX_FINDINGS = 20
_NUM_THREADS = 2


def check_disk(
    directory: Path, manifest: Manifest | None, counts: dict[str, int], *, skips_tensors: bool = False
) -> list[Finding]:
    """Return what is not as it was written. Collective; the same findings on every rank.

    Args:
        skips_tensors: leave out DCP's data files: their tensors were compared with memory, and memory with what was
            recorded at the save. Only with a manifest.

    Peak memory: a block of 1 MiB per thread.
    """
    mine: list[Finding] = []
    seen = {"checksums": 0, "crcs": 0, "without": 0}
    if manifest is not None:
        listed = [file for file in manifest.files if not (skips_tensors and file.path.endswith(_DATA_SUFFIX))]
        files = listed[get_rank() :: get_world_size()]
        run_together("checking the files", lambda: mine.extend(_check_sums(directory, files, seen)))
    else:
        run_together("checking the items' CRC-32", lambda: mine.extend(_check_items(directory, seen)))
    everyone = gather_all((mine[:_MAX_FINDINGS], seen))
    for name in ("checksums", "crcs"):
        if total := sum(each[name] for _, each in everyone):
            counts[name] = total
    findings = [finding for found, _ in everyone for finding in found]
    if num_without := sum(each["without"] for _, each in everyone):
        text = f"{num_without} item(s) have no CRC-32: the writer had switched it off. Damage to them is not found"
        findings.append(Finding("no_crc", Severity.NOTE, text))
    return findings


def _check_sums(directory: Path, files: Sequence[FileFacts], seen: dict[str, int]) -> list[Finding]:
    def check(file: FileFacts) -> Finding | None:
        try:
            check_files(directory, [file], num_threads=1)
        except (CheckpointIncompleteError, DamagedCheckpointError) as error:
            code = "missing_file" if isinstance(error, CheckpointIncompleteError) else "checksum"
            facts = {"expected": error.expected, "actual": error.actual}
            return Finding(code, Severity.FAILURE, str(error), path=file.path, rank=get_rank(), facts=facts)
        return None

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = list(pool.map(check, files))
    seen["checksums"] += len(found)
    return [finding for finding in found if finding is not None]


def _check_items(directory: Path, seen: dict[str, int]) -> list[Finding]:
    checkpoint = open_checkpoint(directory)
    rank, loads = get_rank(), [0] * get_world_size()

    def is_mine(length: int) -> bool:
        """Give work to whoever has least; every rank comes to the same division."""
        owner = loads.index(min(loads))
        loads[owner] += length
        return owner == rank

    findings: list[Finding] = []
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with FileCache() as files:
        for item in _list_zips(directory, checkpoint):
            is_shared = item.length > _SHARED_BYTES
            if not is_shared and not is_mine(item.length):
                continue
            with open_window(Path(item.path)) as window:
                archive = open_torch_zip(window.narrow(item.offset, item.length, f"{window.label}, one of its items"))
                for name, payload in _list_payloads(archive, seen, is_shared):
                    if is_shared and not is_mine(payload.size_bytes):
                        continue
                    seen["crcs"] += 1
                    found = _compute_crc(item.path, payload, files, buffer)
                    if found != payload.crc32:
                        findings.append(_describe(item.path, name, payload, found, checkpoint))
    return findings


def _list_zips(directory: Path, checkpoint: Checkpoint) -> list[ByteRange]:
    """Return every zip of the checkpoint, the largest first: items of DCP files, and whole files."""
    items = {item for section in checkpoint.sections for item in section.zips}
    items |= {blob.bytes for blob in checkpoint.blobs.values()}
    known = {item.path for item in items}
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.suffix in _ZIP_SUFFIXES and str(path) not in known and path.is_file():
            with open_window(path) as window:
                if window.length > len(ZIP_MAGIC) and window.read(0, len(ZIP_MAGIC)) == ZIP_MAGIC:
                    items.add(ByteRange(str(path), 0, window.length))
    return sorted(items, key=lambda item: (-item.length, item.path, item.offset))


def _list_payloads(archive: TorchZip, seen: dict[str, int], is_shared: bool) -> list[tuple[str, Payload]]:
    """Return the entries that have a CRC-32, the largest first."""
    payloads = []
    for name, entry in archive.entries.items():
        if entry.crc32 is not None:
            payloads.append((name, archive.locate(name)))
        elif entry.size_bytes and (not is_shared or get_rank() == 0):
            seen["without"] += 1
    return sorted(payloads, key=lambda pair: (-pair[1].size_bytes, pair[0]))


def _compute_crc(path: str, payload: Payload, files: FileCache, buffer: memoryview) -> int:
    found = 0
    for start in range(0, payload.size_bytes, len(buffer)):
        block = buffer[: min(len(buffer), payload.size_bytes - start)]
        files.read_into(path, payload.offset + start, block)
        found = crc32(block, found)
    return found


def _describe(path: str, name: str, payload: Payload, found: int, checkpoint: Checkpoint) -> Finding:
    owner = _find_owner(path, payload.offset, checkpoint)
    what = f"{owner} (entry {name})" if owner else f"entry {name}"
    message = (
        f"{Path(path).name}: the bytes of {what} at byte {payload.offset} do not match the CRC-32 that was stored with "
        "them: they changed after they were written"
    )
    facts = {"expected": payload.crc32, "actual": found, "offset": payload.offset}
    return Finding("crc", Severity.FAILURE, message, fqn=owner, path=path, rank=get_rank(), facts=facts)


def _find_owner(path: str, offset: int, checkpoint: Checkpoint) -> str | None:
    """Return the label of a tensor whose bytes are there."""
    for label, tensor in checkpoint.tensors.items():
        try:
            if any((extent.bytes.path, extent.bytes.offset) == (path, offset) for extent in tensor.extents):
                return label
        except AccelFsdpError:
            continue  # an item that cannot be read is a finding of its own
    return None
