"""What an export of the model in memory must have written, and whether it has: sums over all ranks, compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .errors import DamagedCheckpointError, RankMismatchError
from .export.proof import sum_output
from .fingerprint import Fingerprint
from .live_planning import LivePlan
from .live_writing import Written, check_unchanged
from .rank_sums import Entry, add_up
from .ranks import gather_all, get_rank, get_world_size, run_on_each
from .shards import Layout


def agree_on_expected(
    plan: LivePlan, written: Written, fingerprints: Mapping[str, Fingerprint]
) -> Mapping[str, Fingerprint]:
    """Return the fingerprint of every output as it should be, the same on every rank. Collective.

    Where values are written as they are, it is the live tensor's. What was cast or converted is summed by the ranks
    that did so, and what they read for it is compared with the live tensors.
    """
    tensors = {tensor.name: tensor for file in plan.files for tensor in file.tensors}
    sizes = {name: tensors[name].size_bytes for name in sorted(plan.summed)}
    computed = _add_up(written.outputs, sizes)
    read = _add_up(written.sources, {name: fingerprints[name].num_bytes for name in sorted(plan.checked)})
    for name, found in read.items():
        check_unchanged(name, found, fingerprints[name])
    for name, size_bytes in sizes.items():
        if computed[name].num_bytes != size_bytes:
            raise RankMismatchError(
                f"{name} has {size_bytes} bytes, and the ranks together have written {computed[name].num_bytes}. All "
                "ranks must prepare the same model in the same way.",
                fqn=name,
                expected=size_bytes,
                actual=computed[name].num_bytes,
            )
    return {**plan.content.fingerprints, **computed}


def _add_up(sums: Mapping[str, Fingerprint], sizes: Mapping[str, int]) -> dict[str, Fingerprint]:
    """Return the sums over all ranks, of each of the tensors in `sizes` (their bytes). Collective."""
    layout = Layout("disjoint", (get_rank(),))
    entries = {
        (name, ""): Entry((name, ""), sums.get(name, Fingerprint()), layout, size, "") for name, size in sizes.items()
    }
    indices = [{"disjoint": (rank,)} for rank in range(get_world_size())]
    rows = add_up(list(entries), entries, indices)
    return {name: row.fingerprint for name, row in zip(sizes, rows, strict=True)}


def add_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Add up the counts of all ranks; few tensors have any. Collective."""
    total: dict[str, int] = {}
    for each in gather_all(dict(counts)):
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def prove_output(plan: LivePlan, staging: Path, expected: Mapping[str, Fingerprint], threads: int) -> str:
    """Read the files again, each rank its share, and compare them with what they should be. Collective."""
    share = run_on_each(
        "reading the export again",
        lambda: sum_output(staging, plan.files, index=get_rank(), count=get_world_size(), num_threads=threads),
    )
    places = {tensor.name: (file.name, tensor.size_bytes) for file in plan.files for tensor in file.tensors}
    found = _add_up(share, {name: size_bytes for name, (_, size_bytes) in places.items()})
    for name, fingerprint in found.items():
        if fingerprint != expected[name]:
            raise DamagedCheckpointError(
                f"{places[name][0]}: {name!r} is not what was in memory (its fingerprint is {fingerprint}, expected "
                f"{expected[name]}). The storage does not keep what is written, something else writes there, or the "
                "model was updated meanwhile. Export again.",
                path=str(staging / places[name][0]),
                fqn=name,
                expected=str(expected[name]),
                actual=str(fingerprint),
            )
    num_summed = len(plan.summed)
    return (
        f"{len(found)} tensors read again from the output, by {get_world_size()} ranks: {len(found) - num_summed} have "
        f"the fingerprints of the live model, {num_summed} those of what was cast or converted"
    )


def describe_source(plan: LivePlan) -> str:
    """Return what a report says of the fingerprints."""
    checked = plan.checked.union(*(group.live_names for group in plan.groups))
    made_of = f"; {len(checked)} tensors that are cast or converted compared with theirs" if checked else ""
    return f"taken of the live model on all ranks, copies compared{made_of}"
