"""What an export of the model in memory will hold, and which live tensor feeds which part of which file.

Rank 0 asks transformers (`describe_model`) and tells the others; from there on it is arithmetic on names and shapes,
which every rank does for itself with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .architecture.facts import AdapterFacts, ArchitectureFacts
from .architecture.outputs import OutputFacts
from .assets import write_model_assets
from .describing import describe_architecture
from .errors import MismatchError, UnsupportedError, UsageError
from .export.adapters import DEFAULT, Adapter, AdapterSet, check_name, collect_adapter
from .export.companions import CONFIG_NAME, Companions, find_companions
from .export.content import Choices, Content, collect_tensors
from .export.lora import Update
from .export.outputs import ONE_FILE, OutputFile, split_into_files
from .export.planning import list_jobs
from .export.recipes import locate_outputs
from .export.select import ModelTensors
from .export.settling import choose_dtypes, settle_config
from .extents import DTYPE_SIZES, ByteRange, DiskTensor, Extent, count_elements, get_whole
from .findings import Finding, Severity
from .fingerprint import Fingerprint
from .live_reverting import NOT_STARTED, Group, list_groups
from .live_writing import Feed, list_feeds
from .shards import LocalShard, iterate_local_shards

if TYPE_CHECKING:
    import torch


_GENERATION_NAME = "generation_config.json"


@dataclass(frozen=True)
class Description:
    """What rank 0 found out about a model: small, and told to all ranks.

    Attributes:
        facts: `ArchitectureFacts` as JSON holds them.
        companions: config, and files that lie where only rank 0 sees them.
        problems: what of these could not be saved, and why.
    """

    facts: Mapping[str, Any]
    companions: Companions
    problems: Mapping[str, str]


@dataclass(frozen=True)
class LivePlan:
    """What goes into one directory of weights. The same on every rank, but for `shards`.

    Attributes:
        folder: inside the output, empty for the output itself: PEFT keeps each adapter in a directory of its own.
        shards: this rank's, under the names that the architecture's facts have.
        feeds: outputs by the live tensor that goes into them.
        groups: what only transformers can compute, with the live tensors that this takes.
        summed: outputs that are cast or converted, so that only the ranks together know their fingerprints.
        checked: live tensors that these are made of, but for groups.
        kept: fingerprints of live tensors that nothing casts, by each of their names in the model.
        num_cast: how many names there are of others.
        updates: what adapters add to live tensors, by their first names, where they are merged.
    """

    folder: str
    content: Content
    files: tuple[OutputFile, ...]
    companions: Companions
    findings: tuple[Finding, ...]
    class_name: str
    shards: tuple[LocalShard, ...]
    feeds: Mapping[str, Sequence[Feed]]
    groups: tuple[Group, ...]
    summed: frozenset[str]
    checked: frozenset[str]
    kept: Mapping[str, Fingerprint]
    num_cast: int
    updates: Mapping[str, Sequence[Update]] = field(default_factory=dict)


def describe_model(model: torch.nn.Module, folder: Path, tokenizer: Any) -> Description:
    """Return what is to be known about a prepared model. Its small files are written into `folder`. Not collective.

    Raises:
        UnsupportedError: transformers cannot say what it would write for this model.
    """
    facts = describe_architecture(model)
    problems = write_model_assets(model, folder, tokenizer=tokenizer)
    companions = find_companions([folder]) if folder.is_dir() else Companions()
    return Description(facts.to_dict(), companions, problems)


def make_plans(
    model: torch.nn.Module,
    described: Description,
    fingerprints: Mapping[str, Fingerprint],
    *,
    dtype: str,
    max_shard_size: int | str,
    adapter: str | None,
    merge_adapter: bool,
) -> tuple[LivePlan, ...]:
    """Return the plan of each directory, at least one. Not collective.

    Args:
        model: prepared.
        described: by rank 0.
        fingerprints: of the live tensors, by each of their names.
        dtype, max_shard_size, adapter, merge_adapter: as for `export_model`.

    Raises:
        UnsupportedError: something that is written has a dtype without a file format, or is computed of nothing.
        MismatchError: the model's tensors are not those that were described.
        UsageError: the config's dtype is wanted and no config states one, or there is no such adapter.
    """
    facts = ArchitectureFacts.from_dict(described.facts)
    shards = tuple(iterate_local_shards(model))
    tensors, owners = _list_tensors(shards, facts)
    known = {name: fingerprints[owner] for name, owner in owners.items()}
    live = _Live(facts, shards, tensors, owners, known)
    companions = described.companions
    if facts.peft is None:
        if adapter is not None or merge_adapter:
            what = "merge_adapter is given" if adapter is None else f"adapter is {adapter!r}"
            raise UsageError(f"{what}, and {facts.class_name} has no adapters.", actual=adapter)
        content = collect_tensors(tensors, known, facts, Choices(), NOT_STARTED)
        beside = {name: path for name, path in companions.files.items() if name not in content.texts}
        companions = Companions(companions.config or content.config, beside)
        chosen, hints = choose_dtypes(content, dtype, companions)
        findings = (*content.findings, *hints, *_judge(described, companions, content))
        files = split_into_files(chosen, max_shard_size, stem=content.stem)
        companions = settle_config(companions, content, chosen)
        return (_finish(live, "", content, facts.outputs, files, companions, findings),)
    if merge_adapter:
        return (_plan_merged(live, described, dtype=dtype, max_shard_size=max_shard_size, adapter=adapter),)
    plans: list[LivePlan] = []
    beside = {name: path for name, path in companions.files.items() if name != _GENERATION_NAME}
    for each in _choose_adapters(facts, adapter):
        folder = "" if adapter is not None or each.name == DEFAULT else each.name
        content = collect_adapter(_locate_adapter(each, tensors, known, facts))
        chosen, _ = choose_dtypes(content, dtype, Companions())
        files = split_into_files(chosen, ONE_FILE, stem=content.stem)
        own = Companions(None, {} if plans else beside)  # the config is the base model's
        findings = (*content.findings, *(() if plans else _judge(described, own, content)))
        plans.append(_finish(live, folder, content, each.outputs, files, own, findings))
    return tuple(plans)


@dataclass(frozen=True)
class _Live:
    """The live tensors: this rank's shards, all as if each lay in one place, their first names, their fingerprints."""

    facts: ArchitectureFacts
    shards: tuple[LocalShard, ...]
    tensors: Mapping[str, DiskTensor]
    owners: Mapping[str, str]
    known: Mapping[str, Fingerprint]


def _plan_merged(
    live: _Live, described: Description, *, dtype: str, max_shard_size: int | str, adapter: str | None
) -> LivePlan:
    from .export.merging import collect_merged

    facts, peft = live.facts, live.facts.peft
    assert peft is not None  # noqa: S101 - for the type checker
    if peft.base is None:
        raise UnsupportedError(
            f"What the merged {facts.class_name} would be written as cannot be worked out: {peft.problem}. Export the "
            "adapter, and merge it with PEFT's merge_and_unload.",
            actual=peft.problem,
        )
    if adapter is None and not peft.active:
        names = ", ".join(each.name for each in peft.adapters)
        raise UsageError(f"No adapter is active; say with adapter= which one to merge: {names}.", actual=names)
    chosen_names = (adapter,) if adapter is not None else peft.active
    chosen_facts = [_choose_adapters(facts, name)[0] for name in chosen_names]
    adapters = tuple(_locate_adapter(each, live.tensors, {}, facts) for each in chosen_facts)
    found = AdapterSet(adapters, peft.active, peft, has_base=True, has_ties=bool(facts.ties))
    memory = ModelTensors(Path("memory"), live.tensors, None, None)
    merged = collect_merged(memory, found, adapters, None, None, Choices(), NOT_STARTED)
    owners = {name: tensor.extents[0].bytes.path for name, tensor in merged.tensors.items()}
    first = {owner: live.known[name] for name, owner in live.owners.items()}
    plain = {output.name: output.source for output in merged.facts.outputs if output.source is not None}
    kept = {name: first[owners[source]] for name, source in plain.items() if source not in merged.updates}
    content = replace(merged.content, fingerprints=kept, sources={}, converted=frozenset())
    beside = {name: path for name, path in described.companions.files.items() if name not in content.texts}
    companions = Companions(content.config or described.companions.config, beside)
    chosen, hints = choose_dtypes(content, dtype, companions)
    files = split_into_files(chosen, max_shard_size, stem=content.stem)
    findings = (*content.findings, *hints, *_judge(described, companions, content))
    base = replace(
        live, tensors=merged.tensors, owners=owners, known={name: first[owner] for name, owner in owners.items()}
    )
    updates = {owners[name]: each for name, each in merged.updates.items()}
    companions = settle_config(companions, content, chosen)
    return _finish(base, "", content, merged.facts.outputs, files, companions, findings, updates)


def _finish(
    live: _Live,
    folder: str,
    content: Content,
    outputs: Sequence[OutputFacts],
    files: tuple[OutputFile, ...],
    companions: Companions,
    findings: tuple[Finding, ...],
    updates: Mapping[str, Sequence[Update]] | None = None,
) -> LivePlan:
    updates = updates or {}
    converted = {
        output.name
        for output in outputs
        if output.source is None or any(live.owners[name] in updates for name in output.needed)
    }
    written = [tensor for file in files for tensor in file.tensors]
    summed = {each.name for each in written if each.name in converted or each.dtype != each.source.dtype}
    owners = live.owners
    jobs = list_jobs(files)
    feeds, groups = list_feeds(jobs, outputs, owners), list_groups(jobs, owners)
    cast = {name for group in groups if group.is_cast for name in group.live_names}
    kept = {
        name: live.known[name]
        for name, owner in owners.items()
        if owner not in updates
        and owner not in cast
        and all(feed.job.tensor.dtype == feed.job.source.dtype for feed in feeds.get(owner, ()))
    }
    return LivePlan(
        folder=folder,
        content=content,
        files=files,
        companions=companions,
        findings=findings,
        class_name=live.facts.class_name,
        shards=live.shards,
        feeds=feeds,
        groups=groups,
        summed=frozenset(summed),
        checked=frozenset(
            owners[name]
            for output in outputs
            if output.name in summed and output.operation is None
            for name in output.needed
        ),
        kept=kept,
        num_cast=len(owners) - len(kept),
        updates=updates,
    )


def _list_tensors(
    shards: Sequence[LocalShard], facts: ArchitectureFacts
) -> tuple[dict[str, DiskTensor], dict[str, str]]:
    """Return all live tensors under each of their names, as if each lay whole in one place, and their first names."""
    tensors: dict[str, DiskTensor] = {}
    owners: dict[str, str] = {}
    for shard in shards:
        if shard.dtype not in DTYPE_SIZES:
            raise UnsupportedError(
                f"{shard.fqn} has the dtype {shard.dtype}, which safetensors files cannot hold.", fqn=shard.fqn
            )
        num_bytes = count_elements(shard.shape) * DTYPE_SIZES[shard.dtype]
        place = ByteRange(shard.fqn, 0, num_bytes)
        for live_name in (shard.fqn, *shard.aliases):
            # DistributedDataParallel's prefix is no part of the model's names.
            name = live_name if live_name in facts.shapes else live_name.removeprefix("module.")
            tensors[name] = DiskTensor(name, shard.dtype, shard.shape, (Extent(get_whole(shard.shape), place),))
            owners[name] = shard.fqn
    return tensors, owners


def _choose_adapters(facts: ArchitectureFacts, name: str | None) -> Sequence[AdapterFacts]:
    """Return all adapters, or the one called `name`."""
    peft = facts.peft
    assert peft is not None  # noqa: S101 - for the type checker
    found = [each for each in peft.adapters if name in (None, each.name)]
    if peft.problem is not None and (not found or (name is None and peft.lacks_adapters)):
        raise UnsupportedError(
            f"What PEFT would write for this {facts.class_name} cannot be worked out: {peft.problem}. Use the model's "
            "own save_pretrained.",
            actual=peft.problem,
        )
    if not found:
        names = ", ".join(each.name for each in peft.adapters)
        raise UsageError(f"There is no adapter {name!r}; the model has {names}.", expected=name, actual=names)
    for each in found:
        check_name(each.name)
    return found


def _locate_adapter(
    adapter: AdapterFacts,
    tensors: Mapping[str, DiskTensor],
    fingerprints: Mapping[str, Fingerprint],
    facts: ArchitectureFacts,
) -> Adapter:
    missing = sorted({name for output in adapter.outputs for name in output.needed} - tensors.keys())
    if missing:
        raise MismatchError(f"The adapter {adapter.name!r} has tensors that the model lacks: {', '.join(missing[:8])}")
    plain = {output.name: output.source for output in adapter.outputs if output.source is not None}
    located = dict(locate_outputs(adapter.outputs, tensors, facts))
    known = {name: fingerprints[source] for name, source in plain.items() if source in fingerprints}
    return Adapter(adapter.name, adapter.config, located, known)


def _judge(described: Description, companions: Companions, content: Content) -> list[Finding]:
    findings = [
        Finding(name, Severity.HINT, f"the {name} cannot be saved ({reason}); put it there by other means")
        for name, reason in described.problems.items()
    ]
    if content.stem == "model" and companions.config is None:
        message = f"the model has no config that transformers could write, so there is no {CONFIG_NAME}"
        findings.append(Finding("config", Severity.HINT, message))
    elif not companions.has_tokenizer and "tokenizer" not in described.problems:
        findings.append(Finding("tokenizer", Severity.NOTE, "there is no tokenizer: give tokenizer="))
    return findings
