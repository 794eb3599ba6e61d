"""What each rank held at a save, as one hash per tensor of its own share: a fast way to see that it holds it again.

A fingerprint adds up over any sharding and costs several times what a hash does. Mostly a load is on as many ranks as
the save, sharded alike; then every rank can tell by a hash that its share is what it was, and the fingerprint of the
whole is what it was, too. Equal digests accept; different ones say nothing, and the fingerprint decides.

    digests_rank_00000.json     by model and optimizer: name -> xxh3_64 of the fingerprint that the manifest records,
                                dtype, shape, which parts the rank holds, and their bytes

The fingerprint is in it so that a digest vouches for that one only: where the manifest says another, nothing is proven.
Only tensors in host memory are hashed: on an accelerator the fingerprint is fast. A name with null was held and not
hashed. Nothing here is collective: each rank writes and reads its own file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from .fingerprint import iterate_bytes
from .manifest import DIRECTORY, Manifest
from .shards import LocalShard

FORMAT = "accel_fsdp_tools.digests"
VERSION = 1
_DIGEST = re.compile("[0-9a-f]{16}")

Digests = Mapping[str, "str | None"]  # None: held, and not hashed


@dataclass(frozen=True)
class RankDigests:
    """One rank's digests of every model and optimizer. What is not named, the rank held nothing of."""

    models: Sequence[Digests]
    optimizers: Sequence[Digests]


def get_digests_path(rank: int) -> str:
    """Return where a rank's file lies inside a checkpoint."""
    return f"{DIRECTORY}/digests_rank_{rank:05d}.json"


def name_shard(shard: LocalShard) -> str:
    """Return the name by which a manifest has a fingerprint of this tensor or state."""
    return shard.fqn if shard.state is None else f"state.{shard.fqn}.{shard.state}"


def is_held(shard: LocalShard) -> bool:
    """Whether this rank has anything of it."""
    return shard.kind == "value" or bool(shard.parts)


class ShareDigest:
    """The digest of what this rank holds of a tensor, to be fed with the bytes of the local tensor in their order."""

    def __init__(self, shard: LocalShard, fingerprint: str) -> None:
        """Begin with where the bytes belong.

        Args:
            fingerprint: of the whole tensor.
        """
        tensor = shard.tensor
        sizes = () if tensor is None else tuple(tensor.shape)
        # Which parts, and in which order their elements lie in the local tensor, follows from these.
        header = repr((fingerprint, shard.dtype, shard.shape, sizes, shard.parts))
        self._digest = xxhash.xxh3_64(header.encode())
        self._bytes_left = 0 if tensor is None else tensor.numel() * tensor.element_size()

    def update(self, block: memoryview) -> None:
        """Add the bytes that follow."""
        self._digest.update(block)
        self._bytes_left -= len(block)

    def finish(self) -> str | None:
        """Return the digest; None if it was not given as many bytes as there are."""
        return None if self._bytes_left else self._digest.hexdigest()


def can_digest(shard: LocalShard) -> bool:
    """Whether this rank holds something of a tensor in host memory."""
    return shard.tensor is not None and bool(shard.parts) and shard.tensor.device.type == "cpu"


def digest_shard(shard: LocalShard, fingerprint: str) -> str | None:
    """Return the digest of what this rank holds of a tensor; None for what is not in host memory, or no tensor.

    Reads the memory once, without a copy where it is contiguous. `fingerprint` is that of the whole tensor.
    """
    if shard.tensor is None or not can_digest(shard):
        return None
    digest = ShareDigest(shard, fingerprint)
    for block in iterate_bytes(shard.tensor):
        digest.update(block)
    return digest.finish()


def digest_shards(shards: Iterable[LocalShard], fingerprints: Mapping[str, str]) -> dict[str, str | None]:
    """Return the digests of all that this rank holds of some tensors, by name.

    Args:
        fingerprints: of the whole tensors, by name.
    """
    found: dict[str, str | None] = {}
    for shard in filter(is_held, shards):
        name = name_shard(shard)
        found[name] = digest_shard(shard, fingerprints[name]) if name in fingerprints else None
    return found


def write_digests(directory: Path, rank: int, digests: RankDigests, *, world_size: int) -> list[Path]:
    """Write a rank's file into the checkpoint at `directory`, and return its path.

    None is written, and nothing returned, where nothing could be hashed. Syncing it to disk is the caller's part.
    """
    every = [*digests.models, *digests.optimizers]
    if any(every) and not any(digest for each in every for digest in each.values()):
        return []
    record = {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "world_size": world_size,
        "models": [dict(each) for each in digests.models],
        "optimizers": [dict(each) for each in digests.optimizers],
    }
    path = directory / get_digests_path(rank)
    path.write_text(json.dumps(record, separators=(",", ":")), encoding="utf-8")
    return [path]


def has_digests(manifest: Manifest, world_size: int) -> bool:
    """Whether every rank of a run of this size may have digests to compare with."""
    if manifest.topology.world_size != world_size:
        return False
    listed = {file.path for file in manifest.files}
    return all(get_digests_path(rank) in listed for rank in range(world_size))


def read_digests(directory: Path, rank: int, manifest: Manifest) -> RankDigests | None:
    """Return what `write_digests` wrote; None if it cannot be relied on.

    It is relied on only if it is, byte for byte, the file that the manifest lists. That it is not is for those to tell
    who check files: here it only means that fingerprints have to be summed up.
    """
    name = get_digests_path(rank)
    listed = next((file for file in manifest.files if file.path == name), None)
    try:
        data = (directory / name).read_bytes()
    except OSError:
        return None
    if listed is None or len(data) != listed.size_bytes or xxhash.xxh3_128_hexdigest(data) != listed.checksum:
        return None
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return _parse(raw, rank, manifest)


def _parse(raw: Any, rank: int, manifest: Manifest) -> RankDigests | None:
    if not isinstance(raw, dict) or (raw.get("format"), raw.get("version")) != (FORMAT, VERSION):
        return None
    if (raw.get("rank"), raw.get("world_size")) != (rank, manifest.topology.world_size):
        return None
    found: dict[str, list[Digests]] = {}
    for kind, count in (("models", len(manifest.models)), ("optimizers", len(manifest.optimizers))):
        listed = raw.get(kind)
        if not isinstance(listed, list) or len(listed) != count or not all(map(_are_digests, listed)):
            return None
        found[kind] = listed
    return RankDigests(found["models"], found["optimizers"])


def _are_digests(each: Any) -> bool:
    return isinstance(each, dict) and all(
        digest is None or (isinstance(digest, str) and _DIGEST.fullmatch(digest)) for digest in each.values()
    )
