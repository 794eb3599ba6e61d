"""Kinds of loaders beyond a sampler per rank: dispatched batches, streams, workers, stateful loaders."""

from __future__ import annotations

from tests.loader_kinds import BucketBatchSampler, Kind, LateCollator, NoisyDataset, OwnNoiseDataset, _make
from torch.utils.data import DataLoader

_DISPATCH = {"dispatch_batches": True}

KINDS: dict[str, Kind] = {
    "dispatch": Kind(_make(), _DISPATCH, num_epochs=3),  # the last group is (3, 2): completed by the first samples
    "dispatch_remainder": Kind(_make(num_items=20), _DISPATCH),  # the last group is (2,)
    "dispatch_even": Kind(_make(num_items=24), _DISPATCH),
    "dispatch_seedable": Kind(_make(), {**_DISPATCH, "use_seedable_sampler": True}),
    "dispatch_split": Kind(_make(batch_size=6), {**_DISPATCH, "split_batches": True}),
    "dispatch_split_uneven": Kind(_make(num_items=21, batch_size=6), {**_DISPATCH, "split_batches": True}),
    "dispatch_drop_last": Kind(_make(drop_last=True), _DISPATCH),
    "dispatch_breaks": Kind(_make(), _DISPATCH, break_after=3, num_epochs=3),
    "dispatch_batch_sampler": Kind(
        lambda seed: DataLoader(NoisyDataset(23), batch_sampler=BucketBatchSampler(23, 3, seed)), _DISPATCH
    ),
    "dispatch_own_noise": Kind(lambda seed: DataLoader(OwnNoiseDataset(23, seed), batch_size=3, shuffle=True), _DISPATCH),
    "dispatch_late_collator": Kind(
        lambda seed: DataLoader(NoisyDataset(23), batch_size=3, shuffle=True, collate_fn=LateCollator(5)), _DISPATCH
    ),
    "dispatch_with_eval": Kind(_make(), _DISPATCH, make_eval=_make(num_items=7)),
}

for _kind in KINDS.values():
    _kind.counts_reads = False
