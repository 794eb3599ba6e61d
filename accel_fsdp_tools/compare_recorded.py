"""Compare what is in memory with what the manifest recorded from memory at the save. No disk is read.

Fingerprints tell any difference, statistics only coarse ones, in numbers for people. Also here: what a look at the
values alone says (NaN, infinity, nothing but zeros), and which parameters are trained now that were not, or reverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .findings import Finding, Severity
from .live_fingerprints import Measured, Wanted, measure_model, measure_optimizer
from .manifest import Manifest, ModelFacts
from .prepared import NameFilter, Prepared, label_tensor, skip_aliases
from .proven import Key
from .shards import iterate_local_shards
from .statistics import RELATIVE_TOLERANCE, TensorStatistics, get_cast_precision

_MAX_HINTS = 20  # of one kind
_SHOWN = 5


@dataclass(frozen=True)
class Measurement:
    """What was summed up of one model or optimizer; `is_chosen` leaves out what is not to be compared."""

    kind: str
    index: int
    measured: Measured
    is_chosen: NameFilter
    dtypes: Mapping[str, str] = field(default_factory=dict)
    proven: frozenset[str] = frozenset()  # not summed up: they are what was recorded
    rounded: Mapping[str, str] = field(default_factory=dict)  # in memory, where FSDP1 casts buffers back to `dtypes`

    def list_statistics(self) -> dict[str, TensorStatistics]:
        """Return the chosen tensors' statistics by label."""
        found = self.measured.statistics.items()
        return {label_tensor(self.kind, self.index, name): each for name, each in found if self.is_chosen(name)}


def measure_prepared(
    prepared: Prepared,
    is_chosen: NameFilter,
    *,
    fingerprints: bool = False,
    statistics: bool = False,
    proven: frozenset[Key] = frozenset(),
) -> tuple[Measurement, ...]:
    """Sum up all models and optimizers, over all ranks. Collective; one pass over local memory, nothing is copied.

    Args:
        proven: what is left out, because it has the fingerprint that was recorded.
    """
    measurements = []
    for index, model in enumerate(prepared.models):
        names = _get_names(proven, "model", index)
        chosen = skip_aliases(model, is_chosen)
        measured = measure_model(model, Wanted(fingerprints, statistics, _leave_out(names, chosen)))
        shards = [(shard.fqn, shard.dtype, shard.as_in_memory().dtype) for shard in iterate_local_shards(model)]
        dtypes, rounded = ({each[0]: each[place] for each in shards} for place in (1, 2))
        measurements.append(Measurement("model", index, measured, chosen, dtypes, names, rounded))
    for index, optimizer in enumerate(prepared.optimizers):
        names = _get_names(proven, "optimizer", index)
        model = prepared.models[index]
        chosen = skip_aliases(model, is_chosen)
        measured = measure_optimizer(model, optimizer, Wanted(fingerprints, statistics, _leave_out(names, chosen)))
        measurements.append(Measurement("optimizer", index, measured, chosen, proven=names))
    return tuple(measurements)


def _get_names(proven: frozenset[Key], kind: str, index: int) -> frozenset[str]:
    return frozenset(key[2] for key in proven if key[:2] == (kind, index))


def _leave_out(names: frozenset[str], is_chosen: NameFilter) -> NameFilter:
    return lambda name: name not in names and is_chosen(name)


def list_all_statistics(measurements: Iterable[Measurement]) -> dict[str, TensorStatistics]:
    """Return the statistics of everything that was measured, by label."""
    return {label: each for measurement in measurements for label, each in measurement.list_statistics().items()}


# -- fingerprints ---------------------------------------------------------------------------------------------------


def compare_fingerprints(measurements: Iterable[Measurement], manifest: Manifest) -> tuple[list[Finding], int]:
    """Return what is not what was in memory at the save, and how much was compared.

    Not collective; the same on every rank.
    """
    findings: list[Finding] = []
    num_compared = 0
    # Copies that differed between ranks at the save have no fingerprint, and may differ again.
    unknown = set(manifest.states["model"].get("divergent", ()))
    for each in measurements:
        if each.kind == "model":
            saved = {tensor.fqn: tensor.fingerprint for tensor in manifest.models[each.index].tensors}
        else:
            saved = {**dict.fromkeys(unknown), **manifest.optimizers[each.index].fingerprints}
        names = sorted(filter(each.is_chosen, set(saved) | set(each.measured.fingerprints) | each.proven))
        num_compared += len(names)
        findings += _match(each, names, saved)
        findings += _report_divergence(each, unknown)
    return findings, num_compared


def _report_divergence(measurement: Measurement, unknown: set[str]) -> Iterator[Finding]:
    for each in measurement.measured.divergences:
        if each.name in unknown:
            continue
        name = label_tensor(measurement.kind, measurement.index, each.name)
        message = f"{name} differs between ranks that should hold copies (rank(s) {', '.join(map(str, each.ranks))})"
        yield Finding("replica", Severity.FAILURE, message, fqn=name, facts={"ranks": list(each.ranks)})


def _match(measurement: Measurement, names: Iterable[str], saved: Mapping[str, str | None]) -> Iterator[Finding]:
    live = measurement.measured.fingerprints
    for name in names:
        label = label_tensor(measurement.kind, measurement.index, name)
        expected = saved.get(name)
        actual = str(live[name]) if name in live else expected if name in measurement.proven else None
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


# -- statistics -----------------------------------------------------------------------------------------------------


def has_statistics(manifest: Manifest | None) -> bool:
    """Whether the manifest records statistics of any tensor."""
    return manifest is not None and any(
        tensor.statistics is not None for facts in manifest.models for tensor in facts.tensors
    )


@dataclass
class _Comparison:
    """What one tensor's statistics said."""

    verdict: str
    finding: Finding | None = None


def compare_statistics(
    measurements: Iterable[Measurement],
    manifest: Manifest | None,
    counts: dict[str, int],
    before: Mapping[str, TensorStatistics] | None = None,
) -> tuple[list[Finding], dict[str, dict[str, Any]]]:
    """Return what differs from the statistics recorded at the save, and a row of numbers for every tensor.

    Args:
        before: the statistics by label as they were before a load; what did not change in it is told then.

    Not collective; the same on every rank.
    """
    findings: list[Finding] = []
    rows: dict[str, dict[str, Any]] = {}
    unchanged: dict[str, str] = {}  # label and verdict
    for each in measurements:
        saved = _read_recorded(each, manifest)
        live = each.measured.statistics
        counts["tensors"] += len(live)
        for name in sorted(set(saved) | set(live)):
            if not each.is_chosen(name):
                continue
            label = label_tensor(each.kind, each.index, name)
            compared = _compare_one(each, name, label, saved, manifest)
            findings += [compared.finding] if compared.finding is not None else []
            counts["statistics"] += name in live and saved.get(name) is not None
            if name in live:
                is_unchanged = before is not None and before.get(label) == live[name]
                rows[label] = {**live[name].describe(), "verdict": compared.verdict}
                if before is not None:
                    rows[label]["changed"] = not is_unchanged
                if is_unchanged:
                    unchanged[label] = compared.verdict
    if before is not None:
        findings = [*_judge_unchanged(unchanged, len(rows)), *findings]
    counted = f"{counts['statistics']} of {counts['tensors']}"
    text = (
        f"statistics are the weakest comparison: {counted} tensors have the counts and, within {RELATIVE_TOLERANCE:g}, "
        "the sums recorded at the save or are named above. A few wrong bits, or elements in another order, don't show; "
        "fingerprint, full and auto do find them"
    )
    return [*findings, Finding("weak", Severity.NOTE, text)], rows


def _read_recorded(each: Measurement, manifest: Manifest | None) -> dict[str, TensorStatistics | None]:
    """Return the recorded statistics by name; None for what was saved and has none."""
    if manifest is None:
        return {}
    raw: dict[str, Mapping[str, Any] | None]
    if each.kind == "model":
        raw = _list_of_model(manifest.models[each.index])
    else:
        facts = manifest.optimizers[each.index]
        names = [name for name in facts.fingerprints if not name.startswith("param_groups.")]
        divergent = manifest.states["model"].get("divergent", ())
        raw = {**dict.fromkeys([*names, *divergent]), **facts.statistics}
    return {name: None if one is None else TensorStatistics.parse(one, name) for name, one in raw.items()}


def _list_of_model(facts: ModelFacts) -> dict[str, Mapping[str, Any] | None]:
    return {tensor.fqn: tensor.statistics for tensor in facts.tensors}


def _compare_one(
    each: Measurement,
    name: str,
    label: str,
    recorded: Mapping[str, TensorStatistics | None],
    manifest: Manifest | None,
) -> _Comparison:
    expected, actual = recorded.get(name), each.measured.statistics.get(name)
    if expected is None:
        if manifest is None or name in recorded:
            return _Comparison("not recorded")
        message = f"{label} is in memory and was not there when the checkpoint was saved"
        return _Comparison("not saved", Finding("statistics", Severity.FAILURE, message, fqn=label))
    if actual is None:
        message = f"{label} was saved and is not in memory"
        return _Comparison("missing", Finding("statistics", Severity.FAILURE, message, fqn=label))
    saved_dtype = _find_dtype(each, name, manifest)
    live_dtype = each.dtypes.get(name, saved_dtype)
    facts: dict[str, Any] = {"expected": expected.to_dict(), "actual": actual.to_dict()}
    if not expected.is_close(actual, precision=get_cast_precision(saved_dtype, live_dtype)):
        live_dtype = each.rounded.get(name, live_dtype)
    if not expected.is_close(actual, precision=get_cast_precision(saved_dtype, live_dtype)):
        old, new = expected.describe(), actual.describe()
        changes = [f"{key} {_show(old[key])} -> {_show(new[key])}" for key in new if _show(old[key]) != _show(new[key])]
        what = ", ".join(changes) or f"the sum {expected.total!r} -> {actual.total!r}"
        message = f"{label} is not what was saved, its statistics say: {what}"
        return _Comparison("DIFFERS", Finding("statistics", Severity.FAILURE, message, fqn=label, facts=facts))
    if saved_dtype != live_dtype:
        message = f"{label} is {live_dtype} in memory and was {saved_dtype} when it was saved: the load has cast it"
        facts = {"expected": saved_dtype, "actual": live_dtype}
        return _Comparison("cast", Finding("dtype", Severity.HINT, message, fqn=label, facts=facts))
    return _Comparison("as saved")


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _find_dtype(each: Measurement, name: str, manifest: Manifest | None) -> str:
    tensors = manifest.models[each.index].tensors if manifest is not None and each.kind == "model" else ()
    return next((tensor.dtype for tensor in tensors if tensor.fqn == name), "")


def _judge_unchanged(unchanged: Mapping[str, str], num_tensors: int) -> Iterator[Finding]:
    wrong = [label for label, verdict in unchanged.items() if verdict == "DIFFERS"]
    names = list(unchanged)
    message = f"{len(names)} of {num_tensors} tensors did not change in the load"
    facts = {"unchanged": len(names), "tensors": num_tensors, "names": names[:100]}
    if wrong:
        more = f"{message}, and {len(wrong)} of these are not what was saved: nothing was loaded into {_list(wrong)}"
        yield Finding("unchanged", Severity.FAILURE, more, fqn=wrong[0], facts={**facts, "names": wrong[:100]})
    elif names and "not recorded" in unchanged.values():
        more = f"{message} ({_list(names)}), and what was saved is not recorded: look whether they were loaded"
        yield Finding("unchanged", Severity.HINT, more, facts=facts)
    elif names:
        yield Finding("unchanged", Severity.NOTE, f"{message}: they held what was saved before", facts=facts)


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


# -- values and flags -----------------------------------------------------------------------------------------------


def find_odd_values(measurements: Iterable[Measurement]) -> list[Finding]:
    """Return hints for tensors that hold NaN or infinity, or nothing but zeros. Not collective."""
    found: dict[str, list[Finding]] = {"nan": [], "inf": [], "zeros": []}
    for label, seen in list_all_statistics(measurements).items():
        where = f"{label} holds"
        if seen.num_nan:
            text = f"{where} {seen.num_nan} NaN among {seen.count} numbers"
            found["nan"].append(Finding("nan", Severity.HINT, text, fqn=label, facts={"count": seen.num_nan}))
        if seen.num_inf:
            text = f"{where} {seen.num_inf} infinite among {seen.count} numbers"
            found["inf"].append(Finding("inf", Severity.HINT, text, fqn=label, facts={"count": seen.num_inf}))
        if seen.num_nonzero == 0 and seen.count > 1:
            found["zeros"].append(Finding("zeros", Severity.HINT, f"{where} nothing but {seen.count} zeros", fqn=label))
    findings = []
    for code, hints in found.items():
        findings += hints[:_MAX_HINTS]
        if len(hints) > _MAX_HINTS:
            text = f"{len(hints) - _MAX_HINTS} more tensors with {code} are not listed"
            findings.append(Finding("omitted", Severity.NOTE, text, facts={"count": len(hints) - _MAX_HINTS}))
    return findings


def list_plain(manifest: Manifest) -> set[Key]:
    """Return what is known to have held neither NaN nor infinity nor only zeros at the save."""
    plain: set[Key] = set()
    for kind, index, recorded in (
        *(("model", index, _list_of_model(facts)) for index, facts in enumerate(manifest.models)),
        *(("optimizer", index, facts.statistics) for index, facts in enumerate(manifest.optimizers)),
    ):
        for name, raw in recorded.items():
            seen = TensorStatistics.parse(raw, name) if raw is not None else TensorStatistics()
            if not seen.num_nan and not seen.num_inf and seen.num_nonzero:
                plain.add((kind, index, name))
    return plain


def compare_requires_grad(prepared: Prepared, manifest: Manifest, is_chosen: NameFilter) -> list[Finding]:
    """Return hints that name parameters which are trained now and were frozen at the save, or reverse.

    Hints: to freeze or thaw parameters between a save and a load is what fine-tuning does. Not collective; the same
    on every rank.
    """
    findings = []
    for index, model in enumerate(prepared.models):
        saved = {tensor.fqn: tensor.requires_grad for tensor in manifest.models[index].tensors}
        changed: dict[bool, list[str]] = {True: [], False: []}
        for shard in iterate_local_shards(model):
            label = label_tensor("model", index, shard.fqn)
            expected = saved.get(shard.fqn, shard.requires_grad)
            if shard.kind == "parameter" and is_chosen(shard.fqn) and expected != shard.requires_grad:
                changed[shard.requires_grad].append(label)
        for is_trained, names in changed.items():
            if names:
                now, was = ("trained", "frozen") if is_trained else ("frozen", "trained")
                message = f"{len(names)} parameter(s) are {now} now and were {was} at the save: {_list(names)}"
                facts = {"expected": not is_trained, "actual": is_trained, "names": names}
                findings.append(Finding("requires_grad", Severity.HINT, message, fqn=names[0], facts=facts))
    return findings
