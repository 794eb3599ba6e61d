"""`verify_model`: is what sits in memory what was saved? Asked on every rank, of its own shards, answered together.

Two ways that complement each other. Fingerprints: the live shards are summed again and compared with what was recorded
from the live shards at the save; no disk is read, and any number of ranks gives the same sums. Full: every rank
compares its shards with the checkpoint's bytes, read by this package's own readers, and names the place.
"""

from __future__ import annotations

import fnmatch
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compare_live import compare_shard
from .errors import DamagedCheckpointError, UsageError
from .findings import Finding, Severity, VerifyReport
from .formats.checkpoint import Checkpoint, Section
from .formats.reading import FileCache
from .live import get_raw_optimizer
from .live_fingerprints import measure_model, measure_optimizer
from .manifest import Manifest, has_manifest, read_manifest
from .opening import open_checkpoint
from .optimizer_shards import iterate_optimizer_shards
from .ranks import gather_all, get_rank, run_together
from .shards import LocalShard, iterate_local_shards

if TYPE_CHECKING:
    from accelerate import Accelerator

MODES = ("auto", "full", "fingerprint", "sample", "off")
_SAMPLED_SHARE = 0.1
_MAX_FINDINGS_PER_RANK = 20
_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def verify_model(
    accelerator: Accelerator,
    path: str | Path,
    *,
    mode: str = "auto",
    layers: str | None = None,
    optimizers: bool = True,
) -> VerifyReport:
    """Compare the prepared models and optimizers in memory with the checkpoint at `path`, on every rank.

    Collective: every rank reads only what it holds, and all get the same report. Nothing is gathered; peak memory is
    two blocks of 8 MiB, time in mode "full" that of reading the checkpoint once, spread over the ranks.

    Args:
        mode: "fingerprint" sums the live shards and compares with what was recorded at the save, without reading
            the disk. "full" compares every element with the bytes on disk. "sample" does so for the first and the
            last rows of every part, and all of embeddings, the first and the last layer and a seeded tenth of the rest.
            "auto" takes fingerprints where they were recorded and compares in full what they say differs, or
            everything where there are none. "off" compares nothing.
        layers: a pattern (`*.layers.0.*`) that narrows any mode to parameters of matching names.
        optimizers: compare optimizer states too.

    Raises:
        UsageError: the mode is unknown, or fingerprints were asked for and none were recorded.
        RankFailedError: a rank could not read its part.
    """
    if mode not in MODES:
        raise UsageError(f"mode is {mode!r}; use one of {', '.join(MODES)}", actual=mode)
    started = time.monotonic()
    directory = Path(path).expanduser().absolute()
    manifest = read_manifest(directory) if has_manifest(directory) else None
    recorded = manifest is not None and any(
        tensor.fingerprint is not None for facts in manifest.models for tensor in facts.tensors
    )
    if mode == "fingerprint" and not recorded:
        raise UsageError(f"{directory} has no recorded fingerprints; use mode='full'", path=str(directory))
    is_chosen = _make_filter(layers)
    counts: dict[str, int] = {"tensors": 0}
    findings: list[Finding] = []
    suspects: set[str] | None = None
    if mode == "fingerprint" or (mode == "auto" and recorded):
        assert manifest is not None  # noqa: S101 - recorded says so
        findings += _compare_fingerprints(accelerator, manifest, is_chosen, optimizers, counts)
        suspects = {finding.fqn for finding in findings if finding.fqn is not None}
    used = mode
    if mode == "auto":
        used = "fingerprint" if recorded else "full"
    omitted = 0
    if used in ("full", "sample") or (mode == "auto" and suspects):
        chosen = is_chosen if suspects is None else suspects.__contains__
        disk, omitted = _compare_with_disk(accelerator, directory, chosen, optimizers, used == "sample", counts)
        named = {finding.fqn for finding in disk}
        # A full comparison says where, or that the load has cast. The bare fingerprint stays for what equals the disk:
        # then the file itself is not what was saved.
        findings = [finding for finding in findings if finding.fqn not in named] + disk
    return VerifyReport(
        path=str(directory),
        mode=used,
        findings=tuple(findings),
        counts=counts,
        seconds=time.monotonic() - started,
        omitted=omitted,
    )


def require_verified(report: VerifyReport) -> None:
    """Raise if the report holds a failure: every rank has the same report, so every rank raises the same.

    Raises:
        DamagedCheckpointError: names the first differences: parameter, index, expected and actual value.
    """
    if report.ok:
        return
    first = report.failures[0]
    raise DamagedCheckpointError(
        f"What was loaded is not what was saved. {report}\nDon't train on: load another checkpoint, or look at this "
        "one with accel-fsdp verify.",
        path=report.path,
        fqn=first.fqn,
        rank=first.rank,
        expected=first.facts.get("expected"),
        actual=first.facts.get("actual"),
    )


def _make_filter(pattern: str | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda name: True

    def is_chosen(name: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")

    return is_chosen


def _section_name(kind: str, index: int) -> str:
    return kind if index == 0 else f"{kind}_{index}"


def _label(kind: str, index: int, name: str) -> str:
    """Name a tensor in findings as `Checkpoint.tensors` does."""
    return name if (kind, index) == ("model", 0) else f"{_section_name(kind, index)}.{name}"


# -- fingerprints ---------------------------------------------------------------------------------------------------


def _compare_fingerprints(
    accelerator: Accelerator,
    manifest: Manifest,
    is_chosen: Callable[[str], bool],
    optimizers: bool,
    counts: dict[str, int],
) -> list[Finding]:
    findings: list[Finding] = []
    # Copies that differed between ranks at the save have no fingerprint, and may differ again.
    unknown = set(manifest.states["model"].get("divergent", ()))
    for index, model in enumerate(accelerator._models):
        saved = {tensor.fqn: tensor.fingerprint for tensor in manifest.models[index].tensors}
        measured = measure_model(model)
        findings += _match("model", index, saved, measured.fingerprints, _skip_aliases(model, is_chosen), counts)
        findings += _report_divergence("model", index, measured.divergences, unknown)
    for index, wrapped in enumerate(accelerator._optimizers if optimizers else ()):
        recorded: dict[str, str | None] = {**dict.fromkeys(unknown), **manifest.optimizers[index].fingerprints}
        model = accelerator._models[index]
        measured = measure_optimizer(model, get_raw_optimizer(wrapped))
        findings += _match("optimizer", index, recorded, measured.fingerprints, _skip_aliases(model, is_chosen), counts)
        findings += _report_divergence("optimizer", index, measured.divergences, unknown)
    return findings


def _skip_aliases(model: Any, is_chosen: Callable[[str], bool]) -> Callable[[str], bool]:
    """Leave out the further names of tied parameters: they are one tensor, compared under its first name."""
    aliases = {alias for shard in iterate_local_shards(model) for alias in shard.aliases}

    def is_first_name(name: str) -> bool:
        parameter = name.removeprefix("state.").rpartition(".")[0] if name.startswith("state.") else name
        return parameter not in aliases and is_chosen(name)

    return is_first_name


def _report_divergence(kind: str, index: int, divergences: tuple[Any, ...], unknown: set[str]) -> Iterator[Finding]:
    for each in divergences:
        if each.name in unknown:
            continue
        name = _label(kind, index, each.name)
        message = f"{name} differs between ranks that should hold copies (rank(s) {', '.join(map(str, each.ranks))})"
        yield Finding("replica", Severity.FAILURE, message, fqn=name, facts={"ranks": list(each.ranks)})


def _match(
    kind: str,
    index: int,
    saved: Mapping[str, str | None],
    live: Mapping[str, Any],
    is_chosen: Callable[[str], bool],
    counts: dict[str, int],
) -> Iterator[Finding]:
    for name in sorted(set(saved) | set(live)):
        if not is_chosen(name):
            continue
        label = _label(kind, index, name)
        counts["tensors"] += 1
        expected = saved.get(name)
        actual = str(live[name]) if name in live else None
        if expected is None and name in saved:
            continue  # its copies differed at the save: nothing was recorded
        if expected == actual:
            continue
        if expected is None:
            message = f"{label} is in memory and was not there when the checkpoint was saved"
        elif actual is None:
            message = f"{label} was saved and is not in memory"
        else:
            message = f"{label} is not what was in memory when the checkpoint was saved"
        facts = {"expected": expected, "actual": actual}
        yield Finding("fingerprint", Severity.FAILURE, message, fqn=label, facts=facts)


# -- bytes ----------------------------------------------------------------------------------------------------------


def _compare_with_disk(
    accelerator: Accelerator,
    directory: Path,
    is_chosen: Callable[[str], bool],
    optimizers: bool,
    is_sample: bool,
    counts: dict[str, int],
) -> tuple[list[Finding], int]:
    mine: list[Finding] = []
    seen = {"tensors": 0, "elements": 0}
    is_whole = _make_sampler(accelerator) if is_sample else None

    def compare() -> None:
        checkpoint = open_checkpoint(directory)
        with FileCache() as files:
            for label, shard, section in _iterate_pairs(accelerator, checkpoint, optimizers):
                if not is_chosen(label):
                    continue
                seen["tensors"] += 1
                only_ends = is_whole is not None and not is_whole(label)
                mine.extend(_compare_one(label, shard, section, files, only_ends))
                seen["elements"] += sum(part.numel for part in shard.parts)
            mine.extend(_find_left_over(accelerator, checkpoint, is_chosen))

    run_together("comparing memory with the checkpoint", compare)
    rank = get_rank()
    ranked = [_with_rank(finding, rank) for finding in mine]
    everyone = gather_all((ranked[:_MAX_FINDINGS_PER_RANK], max(0, len(ranked) - _MAX_FINDINGS_PER_RANK), seen))
    counts["tensors"] = max(counts["tensors"], max(each["tensors"] for _, _, each in everyone))
    counts["elements"] = sum(each["elements"] for _, _, each in everyone)
    unique: dict[tuple[Any, ...], Finding] = {}
    for findings, _, _ in everyone:
        for finding in findings:
            # What every rank sees alike (a shape, a missing name) is said once; values differ rank by rank.
            key = (finding.code, finding.fqn, finding.rank if finding.code == "value" else None)
            unique.setdefault(key, finding)
    return list(unique.values()), sum(omitted for _, omitted, _ in everyone)


def _with_rank(finding: Finding, rank: int) -> Finding:
    import dataclasses

    return dataclasses.replace(finding, rank=rank)


def _iterate_pairs(
    accelerator: Accelerator, checkpoint: Checkpoint, optimizers: bool
) -> Iterator[tuple[str, LocalShard, Section]]:
    """Yield every local shard with the section of the checkpoint that it was loaded from."""
    for index, model in enumerate(accelerator._models):
        section = checkpoint.get_section(_section_name("model", index))
        for shard in iterate_local_shards(model):
            yield _label("model", index, shard.fqn), shard, section
    for index, wrapped in enumerate(accelerator._optimizers if optimizers else ()):
        section = checkpoint.get_section(_section_name("optimizer", index))
        for shard in iterate_optimizer_shards(accelerator._models[index], get_raw_optimizer(wrapped)):
            if shard.kind != "value":
                yield _label("optimizer", index, f"state.{shard.fqn}.{shard.state}"), shard, section


def _compare_one(label: str, shard: LocalShard, section: Section, files: FileCache, only_ends: bool) -> list[Finding]:
    state = "" if shard.state is None else f".{shard.state}"
    prefix = "" if shard.state is None else "state."
    for name in (shard.fqn, *shard.aliases):
        disk = section.tensors.get(f"{prefix}{name}{state}")
        if disk is not None:
            return compare_shard(label, shard, disk, files=files, only_ends=only_ends)
    message = f"{label} is in memory and not in the checkpoint"
    return [Finding("missing", Severity.FAILURE, message, fqn=label)]


def _find_left_over(
    accelerator: Accelerator, checkpoint: Checkpoint, is_chosen: Callable[[str], bool]
) -> Iterator[Finding]:
    """Yield what a model's section holds and no model has (case V03)."""
    for index, model in enumerate(accelerator._models):
        names = {name for shard in iterate_local_shards(model) for name in (shard.fqn, *shard.aliases)}
        for name in sorted(set(checkpoint.get_section(_section_name("model", index)).tensors) - names):
            label = _label("model", index, name)
            if is_chosen(label):
                message = f"{label} is in the checkpoint and not in memory"
                yield Finding("left over", Severity.FAILURE, message, fqn=label)


def _make_sampler(accelerator: Accelerator) -> Callable[[str], bool]:
    """Return which tensors a sample compares whole; the same choice on every rank and in every run."""
    numbers: dict[str, int] = {}
    for model in accelerator._models:
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
