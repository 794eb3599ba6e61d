"""Which tensors every rank holds again exactly as it did at the save: their fingerprints need not be summed up.

Each rank hashes its own shares and compares with its own record (`local_digests`). What has the same bytes at the same
places on every rank has the same fingerprint. All else is left to fingerprints, which judge: a digest never is the
reason for a finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .local_digests import ShareDigest, can_digest, digest_shard, has_digests, is_held, name_shard, read_digests
from .manifest import Manifest
from .optimizer_shards import iterate_optimizer_shards
from .prepared import NameFilter, Prepared
from .rank_sums import reduce_array
from .ranks import get_rank, get_world_size
from .shards import LocalShard, iterate_local_shards

Key = tuple[str, int, str]
"""Kind ("model" or "optimizer"), place among those of its kind, and name in the manifest."""

_OPEN, _NOTHING, _SAME = 0, 1, 2  # what a rank says of a tensor: not proven, held neither then nor now, held again


class HoldingRecord:
    """What this rank held at the save, of all that has a fingerprint in the manifest, and what it has again.

    Made on every rank, filled without the others, by `compare_all` or share by share, and agreed upon at the end.
    """

    def __init__(self, directory: Path, manifest: Manifest, is_chosen: NameFilter) -> None:
        """Read this rank's record. One that is missing or damaged, or of another number of ranks, proves nothing."""
        self._fingerprints: dict[Key, str] = {
            (kind, index, name): text
            for kind, each in (
                ("model", [facts.fingerprints for facts in manifest.models]),
                ("optimizer", [facts.fingerprints for facts in manifest.optimizers]),
            )
            for index, texts in enumerate(each)
            for name, text in texts.items()
            if is_chosen(name)
        }
        self._has_others = has_digests(manifest, get_world_size())
        found = read_digests(directory, get_rank(), manifest) if self._has_others else None
        self._saved: Mapping[Key, str | None] | None = None
        if found is not None:
            kinds = (("model", found.models), ("optimizer", found.optimizers))
            self._saved = {
                (kind, index, name): digest
                for kind, each in kinds
                for index, digests in enumerate(each)
                for name, digest in digests.items()
            }
        self._held: dict[Key, bool] = {}  # what this rank holds now, and whether it did then

    def begin(self, key: Key, shard: LocalShard) -> ShareDigest | None:
        """Return a digest to be fed while the bytes are at hand, for `note`; None if that would be of no use."""
        if self._saved is None or self._saved.get(key) is None or key not in self._fingerprints:
            return None
        # Of several parts the bytes come in another order than in the local tensor.
        return ShareDigest(shard, self._fingerprints[key]) if can_digest(shard) and len(shard.parts) == 1 else None

    def note(self, key: Key, shard: LocalShard, digest: ShareDigest | None = None) -> bool:
        """Compare one share with the record; returns whether it is what it was.

        Args:
            digest: what `begin` returned. Without it, or if it was not given everything, the share is read.
        """
        if key not in self._fingerprints or not is_held(shard):
            return False
        expected = None if self._saved is None else self._saved.get(key)
        found = digest.finish() if digest is not None else None
        if expected is not None and found is None:
            found = digest_shard(shard, self._fingerprints[key])
        self._held[key] = expected is not None and expected == found
        return self._held[key]

    def compare_all(self, prepared: Prepared) -> None:
        """Compare everything with the record: one pass over host memory. Nothing is copied."""
        if self._saved is None:
            return
        for index, model in enumerate(prepared.models):
            for shard in iterate_local_shards(model):
                self.note(("model", index, name_shard(shard)), shard)
        for index, optimizer in enumerate(prepared.optimizers):
            for shard in iterate_optimizer_shards(prepared.models[index], optimizer):
                self.note(("optimizer", index, name_shard(shard)), shard)

    def agree(self) -> frozenset[Key]:
        """Return what all ranks hold as they did, the same on every rank. Collective: a few bytes per tensor."""
        if not self._has_others:
            return frozenset()
        words = np.array([self._judge(key) for key in self._fingerprints], np.int8)
        extremes = np.stack((words, -words))  # the smallest and, as its negative, the largest of what the ranks say
        reduce_array(extremes, "MIN")
        is_proven = (extremes[0] >= _NOTHING) & (extremes[1] == -_SAME)
        return frozenset(key for key, flag in zip(self._fingerprints, is_proven.tolist(), strict=True) if flag)

    def _judge(self, key: Key) -> int:
        if self._saved is None:
            return _OPEN
        if key in self._held:
            return _SAME if self._held[key] else _OPEN
        return _OPEN if key in self._saved else _NOTHING
