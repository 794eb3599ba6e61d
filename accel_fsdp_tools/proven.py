"""Which tensors every rank holds again exactly as it did at the save: their fingerprints need not be summed up.

Each rank hashes its own shares and compares with its own record (`local_digests`). What has the same bytes at the same
places on every rank has the same fingerprint. All else is left to fingerprints, which judge: a digest never is the
reason for a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .local_digests import Digests, digest_shards, has_digests, name_shard, read_digests
from .manifest import Manifest
from .optimizer_shards import iterate_optimizer_shards
from .prepared import NameFilter, Prepared
from .rank_sums import reduce_array
from .ranks import get_rank, get_world_size, run_together
from .shards import LocalShard, iterate_local_shards

_OPEN, _NOTHING, _SAME = 0, 1, 2  # what a rank says of a tensor: not proven, held neither then nor now, held again


@dataclass(frozen=True)
class Proven:
    """Names of tensors that are as they were at the save, per model and optimizer; the same on every rank."""

    models: tuple[frozenset[str], ...] = ()
    optimizers: tuple[frozenset[str], ...] = ()

    def get_names(self, kind: str, index: int) -> frozenset[str]:
        """Return the names of one "model" or "optimizer"."""
        listed = self.models if kind == "model" else self.optimizers
        return listed[index] if index < len(listed) else frozenset()


NOTHING_PROVEN = Proven()


def find_proven(prepared: Prepared, directory: Path, manifest: Manifest, is_chosen: NameFilter) -> Proven:
    """Return the tensors that every rank holds as it recorded, among those that have a fingerprint in the manifest.

    Nothing is proven on another number of ranks, or where records are missing or damaged. Collective: one pass over
    host memory at the speed of xxh3, and one reduction of a few bytes per tensor. Nothing is copied.
    """
    if not has_digests(manifest, get_world_size()):
        return NOTHING_PROVEN
    models, optimizers = manifest.models[: len(prepared.models)], manifest.optimizers[: len(prepared.optimizers)]
    fingerprints = (*(each.fingerprints for each in models), *(each.fingerprints for each in optimizers))
    recorded = [{name: text for name, text in each.items() if is_chosen(name)} for each in fingerprints]
    said = [np.full(len(each), _OPEN, np.int8) for each in recorded]

    def compare() -> None:
        saved = read_digests(directory, get_rank(), manifest)
        if saved is None:
            return
        sources = (
            *(iterate_local_shards(model) for model in prepared.models),
            *(
                iterate_optimizer_shards(model, optimizer)
                for model, optimizer in zip(prepared.models, prepared.optimizers, strict=False)
            ),
        )
        then = (*saved.models[: len(models)], *saved.optimizers[: len(optimizers)])
        for words, chosen, shards, digests in zip(said, recorded, sources, then, strict=True):
            words[:] = _compare(chosen, shards, digests)

    run_together("comparing with what each rank held", compare)
    every = np.concatenate(said) if said else np.empty(0, np.int8)
    extremes = np.stack((every, -every))  # the smallest and, as its negative, the largest of what the ranks say
    reduce_array(extremes, "MIN")
    is_proven = iter(((extremes[0] >= _NOTHING) & (extremes[1] == -_SAME)).tolist())
    proven = [frozenset([name for name in each if next(is_proven)]) for each in recorded]
    return Proven(tuple(proven[: len(models)]), tuple(proven[len(models) :]))


def _compare(recorded: Mapping[str, str], shards: Iterable[LocalShard], saved: Digests) -> list[int]:
    """Return what this rank says of each tensor."""
    chosen = (shard for shard in shards if name_shard(shard) in recorded)
    held = digest_shards(chosen, recorded)
    words = []
    for name in recorded:
        if name not in held and name not in saved:
            words.append(_NOTHING)
        else:
            is_same = held.get(name) is not None and held[name] == saved.get(name)
            words.append(_SAME if is_same else _OPEN)
    return words
