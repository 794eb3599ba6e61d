"""Compare what is in memory with the bytes of a checkpoint, every rank its own shards, and name each difference."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .compare_live import EXACT, Reader, Tolerance, compare_shard, is_odd
from .disk_values import read_parameter_groups
from .errors import UnsupportedError
from .findings import Finding, Severity
from .fingerprint import fingerprint_value
from .formats.checkpoint import Checkpoint, Section, name_section
from .formats.reading import FileCache
from .live import unwrap_module
from .local_digests import ShareDigest, name_shard
from .names import list_adapter_names
from .opening import open_checkpoint
from .optimizer_shards import describe_parameter_groups, iterate_optimizer_parameters, iterate_optimizer_shards
from .prepared import NameFilter, Prepared, label_tensor
from .proven import HoldingRecord, Key
from .ranks import gather_all, get_rank, run_together
from .shards import LocalShard, iterate_local_shards

_OF_ONE_RANK = ("value", "scheduler", "scaler", "rng", "data")
_SAMPLED_SHARE = 0.1
_MAX_FINDINGS_PER_RANK = 20
_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def compare_with_disk(
    prepared: Prepared,
    directory: Path,
    is_chosen: NameFilter,
    counts: dict[str, int],
    *,
    is_sample: bool = False,
    tolerance: Tolerance = EXACT,
    odd: set[str] | None = None,
    plain: Container[Key] = (),
    record: HoldingRecord | None = None,
) -> tuple[list[Finding], int, set[str]]:
    """Return what differs, of all ranks, how many failures beyond the first of each rank are not listed, and all names.

    Every rank reads only what it holds. Collective; the same result on every rank.

    Args:
        is_sample: compare only some tensors whole, and of the others the first and last rows.
        odd: labels are added of tensors that hold NaN or infinity, or on some rank nothing but zeros.
        plain: what held nothing of the kind at the save.
        record: is told what this rank holds again as it did at the save, so that the memory is read once.
    """
    mine: list[Finding] = []
    seen = {"tensors": 0, "elements": 0}
    is_whole = _make_sampler(prepared) if is_sample else None

    def compare() -> None:
        checkpoint = open_checkpoint(directory)
        with FileCache() as files:
            reader = Reader(files)
            adapters = [_Adapters.read(prepared, checkpoint, index) for index in range(len(prepared.models))]
            for key, shard, section, names in _iterate_pairs(prepared, checkpoint, adapters):
                label = label_tensor(*key)
                if not is_chosen(label):
                    continue
                if shard.kind == "value":
                    if record is not None:
                        record.note(key, shard)
                    continue
                seen["tensors"] += 1
                only_ends = is_whole is not None and not is_whole(label)
                digest = record.begin(key, shard) if record is not None else None
                is_put_off = digest is not None and key in plain
                way = _Way(reader, only_ends, tolerance, None if is_put_off else odd, digest)
                mine.extend(_compare_one(label, shard, section, names, way))
                is_same = record is not None and record.note(key, shard, digest)
                if is_put_off and not is_same and odd is not None and is_odd(shard):
                    odd.add(label)
                seen["elements"] += sum(part.numel for part in shard.parts)
            mine.extend(_find_left_over(prepared, checkpoint, adapters, is_chosen))
            mine.extend(note for each in adapters for note in each.describe())
            mine.extend(_compare_groups(prepared, checkpoint, is_chosen))

    run_together("comparing memory with the checkpoint", compare)
    findings, omitted, everyone = gather_findings(mine, seen)
    names = {each.fqn for each in findings}
    if any(each["findings"] > _MAX_FINDINGS_PER_RANK for each in everyone):
        names |= {name for each in gather_all([finding.fqn for finding in mine]) for name in each}
    if odd is not None:
        odd.update(*gather_all(sorted(odd)))
    counts["tensors"] = max(counts["tensors"], *(each["tensors"] for each in everyone))
    counts["elements"] = sum(each["elements"] for each in everyone)
    return findings, omitted, {name for name in names if name is not None}


def gather_findings(mine: list[Finding], seen: dict[str, int]) -> tuple[list[Finding], int, list[dict[str, int]]]:
    """Return the first findings of every rank, failures before hints, what was omitted, and every rank's counts.

    What all ranks see alike (a shape, a missing name) is there once; values differ rank by rank. Collective.
    """
    rank = get_rank()
    order = list(Severity)
    ranked = sorted(
        (dataclasses.replace(finding, rank=rank) for finding in mine), key=lambda each: order.index(each.severity)
    )
    left = ranked[_MAX_FINDINGS_PER_RANK:]
    num_failures = sum(each.severity is Severity.FAILURE for each in left)
    seen = {**seen, "findings": len(mine)}
    everyone = gather_all((ranked[:_MAX_FINDINGS_PER_RANK], num_failures, len(left) - num_failures, seen))
    unique: dict[tuple[Any, ...], Finding] = {}
    for findings, *_ in everyone:
        for finding in findings:
            key = (finding.code, finding.fqn, finding.rank if finding.code in _OF_ONE_RANK else None)
            other = unique.setdefault(key, finding)
            if finding.facts.get("deviation", 0.0) > other.facts.get("deviation", 0.0):
                unique[key] = finding
    results = list(unique.values())
    num_hints = sum(each[2] for each in everyone)
    if num_hints:
        text = f"{num_hints} more hint(s) of the kinds above are not listed"
        results.append(Finding("omitted", Severity.NOTE, text, facts={"count": num_hints}))
    return results, sum(each[1] for each in everyone), [each[3] for each in everyone]


def _iterate_pairs(
    prepared: Prepared, checkpoint: Checkpoint, adapters: Sequence[_Adapters]
) -> Iterator[tuple[Key, LocalShard, Section, Sequence[str]]]:
    """Yield every local shard with the section that it was loaded from, and the names that it may have there."""
    for index, model in enumerate(prepared.models):
        section = checkpoint.get_section(name_section("model", index))
        for shard in iterate_local_shards(model):
            if shard.fqn not in adapters[index].absent:
                yield ("model", index, shard.fqn), shard, section, adapters[index].list_names(shard)
    for index, optimizer in enumerate(prepared.optimizers):
        section = checkpoint.get_section(name_section("optimizer", index))
        numbers = _number_parameters(prepared, index)  # without FSDP parameters are known by these
        for shard in iterate_optimizer_shards(prepared.models[index], optimizer):
            number = [str(numbers[shard.fqn])] if shard.fqn in numbers else []
            yield ("optimizer", index, name_shard(shard)), shard, section, [shard.fqn, *shard.aliases, *number]


@dataclass(frozen=True)
class _Adapters:
    """What is particular about a PEFT model's file: names without the adapter's, and perhaps nothing of the base model.

    The Trainer saves adapters alone, under the names of their own files (FSDP2, sharded) or the model's.
    """

    adapters: tuple[str, ...] = ()
    absent: frozenset[str] = frozenset()  # frozen parameters, if the file has none of them

    @classmethod
    def read(cls, prepared: Prepared, checkpoint: Checkpoint, index: int) -> _Adapters:
        model = prepared.models[index]
        found = getattr(unwrap_module(model), "peft_config", None)
        if not isinstance(found, dict):
            return cls()
        plain = cls(tuple(found))
        saved = checkpoint.get_section(name_section("model", index)).tensors
        frozen = [shard for shard in iterate_local_shards(model) if not shard.requires_grad]
        if any(name in saved for shard in frozen for name in plain.list_names(shard)):
            return plain
        return cls(plain.adapters, frozenset(shard.fqn for shard in frozen))

    def list_names(self, shard: LocalShard) -> list[str]:
        """Return the names under which a tensor of the model may be on disk."""
        names = (shard.fqn, *shard.aliases)
        return [*names, *(each for name in names for each in list_adapter_names(name, self.adapters))]

    def describe(self) -> list[Finding]:
        if not self.absent:
            return []
        text = f"{len(self.absent)} frozen tensor(s) of the base model are not in the checkpoint, only the adapter is"
        return [Finding("base", Severity.NOTE, text, facts={"count": len(self.absent)})]


@dataclass(frozen=True)
class _Way:
    """How one share is compared; see `compare_shard`."""

    reader: Reader
    only_ends: bool
    tolerance: Tolerance
    odd: set[str] | None
    digest: ShareDigest | None


def _compare_one(
    label: str,
    shard: LocalShard,
    section: Section,
    names: Sequence[str],
    way: _Way,
) -> list[Finding]:
    state = "" if shard.state is None else f".{shard.state}"
    prefix = "" if shard.state is None else "state."
    for name in names:
        disk = section.tensors.get(f"{prefix}{name}{state}")
        if disk is not None:
            return compare_shard(
                label,
                shard,
                disk,
                reader=way.reader,
                only_ends=way.only_ends,
                tolerance=way.tolerance,
                odd=way.odd,
                digest=way.digest,
            )
    message = f"{label} is in memory and not in the checkpoint"
    return [Finding("missing", Severity.FAILURE, message, fqn=label)]


def _number_parameters(prepared: Prepared, index: int) -> dict[str, int]:
    """Return the numbers that torch gives an optimizer's parameters, by name."""
    shards = iterate_optimizer_parameters(prepared.models[index], prepared.optimizers[index])
    return {shard.fqn: number for number, shard in enumerate(shards)}


def _find_left_over(
    prepared: Prepared, checkpoint: Checkpoint, adapters: Sequence[_Adapters], is_chosen: NameFilter
) -> Iterator[Finding]:
    """Yield what a model's section holds and no model has (case V03)."""
    for index, model in enumerate(prepared.models):
        names = {name for shard in iterate_local_shards(model) for name in adapters[index].list_names(shard)}
        for name in sorted(set(checkpoint.get_section(name_section("model", index)).tensors) - names):
            label = label_tensor("model", index, name)
            if is_chosen(label):
                message = f"{label} is in the checkpoint and not in memory"
                yield Finding("left over", Severity.FAILURE, message, fqn=label)


def _compare_groups(prepared: Prepared, checkpoint: Checkpoint, is_chosen: NameFilter) -> Iterator[Finding]:
    """Compare the hyper-parameters of every parameter group, and which parameters it has, with those on disk."""
    for index, optimizer in enumerate(prepared.optimizers):
        section = checkpoint.get_section(name_section("optimizer", index))
        saved = read_parameter_groups(section)
        live = {
            f"param_groups.{number}.{option}": value
            for number, group in enumerate(describe_parameter_groups(prepared.models[index], optimizer))
            for option, value in {"params": sorted(group.names), **group.options}.items()
        }
        for name in sorted(live.keys() & saved.keys()):
            label = label_tensor("optimizer", index, name)
            if not is_chosen(label):
                continue
            expected, actual = saved[name], live[name]
            try:
                is_equal = fingerprint_value(expected) == fingerprint_value(actual)
            except UnsupportedError:
                is_equal = repr(expected) == repr(actual)
            if not is_equal:
                message = f"{label} is {_shorten(expected)} in the checkpoint and {_shorten(actual)} in memory"
                facts = {"expected": expected, "actual": actual}
                yield Finding("hyper-parameter", Severity.FAILURE, message, fqn=label, facts=facts)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _make_sampler(prepared: Prepared) -> Callable[[str], bool]:
    """Return which tensors a sample compares whole; the same choice on every rank and in every run."""
    numbers: dict[str, int] = {}
    for model in prepared.models:
        for shard in iterate_local_shards(model):
            for match in _NUMBER.finditer(shard.fqn):
                stem = shard.fqn[: match.start()]
                numbers[stem] = max(numbers.get(stem, 0), int(match[1]))

    def is_whole(label: str) -> bool:
        if "embed" in label or "lm_head" in label:
            return True
        for match in _NUMBER.finditer(label):
            stem = label[: match.start()].removeprefix("optimizer.state.")
            if int(match[1]) in (0, numbers.get(stem, -1)):
                return True
        return random.Random(label).random() < _SAMPLED_SHARE

    return is_whole
