"""Fingerprints and statistics of what is in memory now, over all ranks: per tensor, whatever the sharding.

Each rank sums over what it holds (`shards`, `optimizer_shards`); `rank_sums` adds up and compares copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import RankMismatchError, ReplicaDivergenceError, UnsupportedError
from .extents import DTYPE_SIZES, count_elements
from .fingerprint import Fingerprint, fingerprint_tensor, fingerprint_value
from .live import get_raw_optimizer
from .optimizer_shards import (
    ParameterGroup,
    describe_parameter_groups,
    iterate_optimizer_shards,
    list_owned,
)
from .rank_sums import Entry, Indices, Key, add_up, add_up_statistics, list_indices
from .ranks import gather_all, run_together
from .shards import WHOLE, Layout, LocalShard, iterate_local_shards
from .statistics import TensorStatistics, can_measure, measure_tensor

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@dataclass(frozen=True)
class Divergence:
    """One tensor whose copies differ: which ranks don't have what most have, and what each distinct copy is."""

    name: str
    ranks: tuple[int, ...]
    copies: Mapping[str, tuple[int, ...]]  # fingerprint of a copy -> the ranks that hold it


@dataclass(frozen=True)
class Wanted:
    """What to sum up, and of which names (the same on every rank)."""

    fingerprints: bool = True
    statistics: bool = False
    is_chosen: Callable[[str], bool] = lambda name: True


@dataclass(frozen=True)
class Measured:
    """The fingerprints and statistics that were wanted, by name; a tensor among `divergences` has none."""

    fingerprints: Mapping[str, Fingerprint]
    divergences: tuple[Divergence, ...] = ()
    statistics: Mapping[str, TensorStatistics] = field(default_factory=dict)

    def require_equal_copies(self) -> Mapping[str, Fingerprint]:
        """Return the fingerprints.

        Raises:
            ReplicaDivergenceError: copies of a tensor differ between ranks.
        """
        if not self.divergences:
            return self.fingerprints
        first = self.divergences[0]
        more = f" and {len(self.divergences) - 1} other(s)" if len(self.divergences) > 1 else ""
        raise ReplicaDivergenceError(
            f"{first.name}{more} differ(s) between ranks that should hold copies: rank(s) "
            f"{', '.join(map(str, first.ranks))} have other values than the rest. A checkpoint keeps one copy. Make "
            "them equal (broadcast from rank 0), or find out what changed them on some ranks only.",
            fqn=first.name,
            ranks=first.ranks,
            divergences=self.divergences,
        )


@dataclass(frozen=True)
class LiveFingerprints:
    """Of all prepared models and optimizers, in Accelerate's order."""

    models: tuple[Mapping[str, Fingerprint], ...]
    optimizers: tuple[Mapping[str, Fingerprint], ...]


def fingerprint_accelerator(accelerator: Accelerator) -> LiveFingerprints:
    """Return the fingerprints of every model and optimizer that was prepared. See `fingerprint_model`. Collective."""
    pairs = zip(accelerator._models, accelerator._optimizers, strict=False)
    return LiveFingerprints(
        models=tuple(fingerprint_model(model) for model in accelerator._models),
        optimizers=tuple(fingerprint_optimizer(model, optimizer) for model, optimizer in pairs),
    )


def fingerprint_model(model: torch.nn.Module) -> Mapping[str, Fingerprint]:
    """Return the fingerprint of every parameter and persistent buffer, the same on every rank.

    Tied parameters appear under each of their names. The result depends on the values only: not on the number of
    ranks, the version of FSDP, or the way of sharding.

    Collective. Time: one pass over local memory, and two reductions of some 100 bytes per tensor. Peak memory: that
    of `fingerprint_tensor`.

    Raises:
        ReplicaDivergenceError: copies of a tensor differ between ranks.
        RankMismatchError: the ranks hold different tensors, or parts that don't make up the whole.
        UnsupportedError: a tensor's local share cannot be told.
    """
    return measure_model(model).require_equal_copies()


def measure_model(model: torch.nn.Module, wanted: Wanted = Wanted()) -> Measured:
    """Return what `fingerprint_model` does, with a list of differing copies instead of an error.

    Statistics cost on the CPU about as much again as fingerprints, on an accelerator little. Collective.
    """

    return measure_model_shards(lambda: iterate_local_shards(model), wanted)


def measure_model_shards(shards: Callable[[], Iterable[LocalShard]], wanted: Wanted = Wanted()) -> Measured:
    """Return what `measure_model` does for the shards of this rank that `shards` yields, or copies of them. Collective.

    What `shards` raises is raised on every rank.
    """

    def sum_locally() -> _Local:
        chosen = [shard for shard in shards() if wanted.is_chosen(shard.fqn)]
        return _Local({shard.fqn: shard.aliases for shard in chosen}, (_make_entry(shard, wanted) for shard in chosen))

    return _measure("fingerprinting the model", sum_locally, lambda key: key[0], wanted)


def fingerprint_optimizer(model: torch.nn.Module, optimizer: Any) -> Mapping[str, Fingerprint]:
    """Return the fingerprint of every optimizer state and of every option of its parameter groups.

    Names are `state.<parameter>.<state>` (for tied parameters under each of their names) and
    `param_groups.<number>.<option>`. States that no rank has are left out.

    Args:
        model: the prepared model.
        optimizer: the optimizer, or Accelerate's wrapper of it.

    Collective; time, memory and errors as for `fingerprint_model`.
    """
    return measure_optimizer(model, optimizer).require_equal_copies()


def measure_optimizer(model: torch.nn.Module, optimizer: Any, wanted: Wanted = Wanted()) -> Measured:
    """Return what `fingerprint_optimizer` does, with a list of differences instead of an error. Collective."""
    raw = get_raw_optimizer(optimizer)
    return measure_optimizer_shards(lambda: OptimizerShards.read(model, raw), wanted)


@dataclass(frozen=True)
class OptimizerShards:
    """What this rank holds of an optimizer: its parameters, their states, and the parameter groups."""

    parameters: Iterable[LocalShard]
    states: Iterable[LocalShard]
    groups: Iterable[ParameterGroup]

    @classmethod
    def read(cls, model: torch.nn.Module, raw: torch.optim.Optimizer) -> OptimizerShards:
        """Look at a live optimizer; states are looked at one by one, as they are iterated."""
        owned = list_owned(model, raw)
        return cls(
            tuple(held.shard for held in owned),
            iterate_optimizer_shards(model, raw, owned),
            describe_parameter_groups(model, raw, owned),
        )


def measure_optimizer_shards(read: Callable[[], OptimizerShards], wanted: Wanted = Wanted()) -> Measured:
    """Return what `measure_optimizer` does for what `read` returns, or copies of it. Collective.

    What `read` raises is raised on every rank.
    """

    def sum_locally() -> _Local:
        held = read()
        entries = _iterate_optimizer_entries(held, wanted)
        return _Local({shard.fqn: shard.aliases for shard in held.parameters}, entries)

    return _measure("fingerprinting the optimizer", sum_locally, _name_optimizer_key, wanted)


def _name_optimizer_key(key: Key) -> str:
    name, state = key
    return f"{name[1:]}.{state}" if name.startswith(_GROUPS) else f"state.{name}.{state}"


_GROUPS = "\0param_groups."  # no parameter is named like this


def _make_entry(shard: LocalShard, wanted: Wanted) -> Entry:
    key = (shard.fqn, shard.state or "")
    if shard.kind == "value":
        return _make_value_entry(key, shard.value)
    has_statistics = wanted.statistics and can_measure(shard.dtype)
    size = DTYPE_SIZES.get(shard.dtype, 0)
    fingerprint, statistics = Fingerprint(), TensorStatistics()
    for part, tensor in shard.iterate_pieces():
        if wanted.fingerprints:
            fingerprint += fingerprint_tensor(tensor, part, shard.shape)
        else:
            fingerprint += Fingerprint(num_bytes=part.numel * size)
        if has_statistics:
            # Not block by block with the fingerprint: each has tables that would push the other's out of the cache.
            statistics += measure_tensor(tensor)
    return Entry(
        key,
        fingerprint,
        shard.layout,
        count_elements(shard.shape) * size,
        f"{shard.dtype} {shard.shape}",
        statistics if has_statistics else None,
    )


def _make_value_entry(key: Key, value: Any) -> Entry:
    try:
        fingerprint = fingerprint_value(value)
    except UnsupportedError as error:
        raise error.with_facts(fqn=_name_optimizer_key(key)) from error
    return Entry(key, fingerprint, WHOLE, fingerprint.num_bytes, "value")


def _iterate_optimizer_entries(held: OptimizerShards, wanted: Wanted) -> Iterator[Entry]:
    for shard in held.states:
        is_summed = shard.kind != "value" or wanted.fingerprints
        if is_summed and wanted.is_chosen(_name_optimizer_key((shard.fqn, shard.state or ""))):
            yield _make_entry(shard, wanted)
    if not wanted.fingerprints:
        return  # what is no tensor has no statistics
    for number, group in enumerate(held.groups):
        # In which order FSDP1 flattens parameters is of no consequence.
        for option, value in {"params": sorted(group.names), **group.options}.items():
            yield _make_value_entry((f"{_GROUPS}{number}", option), value)


@dataclass(frozen=True)
class _Local:
    """What one rank sums: the names that every rank must know, with their aliases, and an entry for what it holds."""

    names: Mapping[str, tuple[str, ...]]
    entries: Iterator[Entry]


@dataclass(frozen=True)
class _Summary:
    """What ranks tell each other before the reduction; small."""

    names: str  # digest
    states: tuple[str, ...]
    others: tuple[Key, ...]  # keys that belong to no tensor of the model
    indices: Indices


def _measure(what: str, sum_locally: Callable[[], _Local], get_name: Callable[[Key], str], wanted: Wanted) -> Measured:
    names: dict[str, tuple[str, ...]] = {}
    entries: dict[Key, Entry] = {}

    def summarize() -> _Summary:
        local = sum_locally()
        names.update(local.names)
        entries.update((entry.key, entry) for entry in local.entries)
        return _Summary(
            names=hashlib.sha256("\0".join(names).encode()).hexdigest(),
            states=tuple(sorted({state for name, state in entries if name in names})),
            others=tuple(key for key in entries if key[0] not in names),
            indices=list_indices(entries.values()),
        )

    summaries = run_together(what, summarize)
    _check_same_names(what, summaries)
    # The same list on every rank, though some have states only for the parameters that they hold a part of.
    states = sorted({state for summary in summaries for state in summary.states})
    others = dict.fromkeys(key for summary in summaries for key in summary.others)
    keys = [*((name, state) for name in names for state in states), *others]
    indices = [summary.indices for summary in summaries]
    rows = add_up(keys, entries, indices)
    fingerprints: dict[str, Fingerprint] = {}
    different: list[Key] = []
    for key, row in zip(keys, rows, strict=True):
        if row.is_equal is None:
            continue  # no rank has it
        if not row.is_equal:
            different.append(key)
            continue
        fingerprint = row.get_fingerprint(what, get_name(key))
        for name in (key[0], *names.get(key[0], ())):
            fingerprints[get_name((name, key[1]))] = fingerprint
    statistics: dict[str, TensorStatistics] = {}
    if wanted.statistics:
        unequal = set(different)
        for key, numbers in zip(keys, add_up_statistics(keys, entries, indices), strict=True):
            if numbers is not None and key not in unequal:
                for name in (key[0], *names.get(key[0], ())):
                    statistics[get_name((name, key[1]))] = numbers
    return Measured(
        fingerprints if wanted.fingerprints else {},
        _find_divergences(different, entries, indices, get_name),
        statistics,
    )


def _check_same_names(what: str, summaries: Sequence[_Summary]) -> None:
    for rank, summary in enumerate(summaries):
        if summary.names != summaries[0].names:
            raise RankMismatchError(
                f"{what}: rank {rank} holds tensors of other names, or in another order, than rank 0. All ranks must "
                "prepare the same model in the same way.",
                rank=rank,
            )


_MAX_DIVERGENCES = 100


def _find_divergences(
    keys: Sequence[Key],
    entries: Mapping[Key, Entry],
    indices: Sequence[Indices],
    get_name: Callable[[Key], str],
) -> tuple[Divergence, ...]:
    """Find out which ranks differ, for the first so many tensors. Collective, but costs nothing where none do."""
    if not keys:
        return ()
    mine = {
        key: (entries[key].layout, str(entries[key].fingerprint)) for key in keys[:_MAX_DIVERGENCES] if key in entries
    }
    everyone = gather_all(mine)
    divergences = []
    for key in keys[:_MAX_DIVERGENCES]:
        # What each rank holds of each share. One that should have a share, by its others, and has not, holds nothing.
        shares: dict[Layout, dict[str, list[int]]] = {}
        schemes = {held[key][0].scheme for held in everyone if key in held}
        for rank, held in enumerate(everyone):
            if key in held:
                layout, text = held[key]
                shares.setdefault(layout, {}).setdefault(text, []).append(rank)
                continue
            for scheme in schemes & indices[rank].keys():
                layout = Layout(scheme, indices[rank][str(scheme)])
                shares.setdefault(layout, {}).setdefault("nothing", []).append(rank)
        copies: dict[str, tuple[int, ...]] = {}
        ranks: list[int] = []
        for share in shares.values():
            if len(share) > 1:
                copies.update((text, tuple(holders)) for text, holders in share.items())
                most = max(share.values(), key=lambda holders: (len(holders), -holders[0]))
                ranks += [rank for holders in share.values() if holders is not most for rank in holders]
        divergences.append(Divergence(get_name(key), tuple(sorted(ranks)), copies))
    return tuple(divergences)
