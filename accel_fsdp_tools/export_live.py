"""`export_model`: the model in memory becomes a Hugging Face directory, written by all ranks together, proven equal.

Every rank writes the parts that it holds to their places in the same files. Gathered are, one group at a time, only
tensors that transformers computes with when it converts them back. What was in memory is known by its fingerprints,
which are summed first, in a pass of their own; the files are read again at the end, by all ranks together, and must
have the same.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .assets import check_tokenizer
from .errors import UsageError
from .export.companions import Companions, write_companions
from .export.load_values import check_loaded_values
from .export.outputs import MAX_SHARD_SIZE, OutputFile, parse_size
from .export.report import ExportReport
from .export.settling import DTYPES, PROOFS, build_report, find_overflows, join_proofs, write_rest
from .export.target import REPORT_NAME, check_space, check_target, replacing
from .export.workers import count_threads
from .export.writing import create_files
from .files import fsync_directory, write_json_durably
from .findings import Finding, Severity
from .fingerprint import Fingerprint
from .live import unwrap_module
from .live_fingerprints import fingerprint_model
from .live_merging import gather_merges
from .live_planning import LivePlan, describe_model, make_plans
from .live_proving import add_counts, agree_on_expected, describe_source, prove_output
from .live_reverting import write_groups
from .live_writing import choose_mine, list_holdings, write_shards
from .ranks import gather_all, get_rank, get_world_size, run_on_each, run_on_main, run_together, wait_for_ranks
from .shards import LocalShard
from .views import wait_until_seen

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def export_model(
    accelerator: Accelerator,
    model: torch.nn.Module | None,
    out: str | Path,
    *,
    dtype: str = "keep",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    adapter: str | None = None,
    merge_adapter: bool = False,
    tokenizer: Any = None,
    overwrite: bool = False,
    verify: str = "output",
    report: bool = False,
    num_threads: int | None = None,
    timeout_s: float | None = None,
) -> ExportReport:
    """Write the directory that `save_pretrained` of the whole model would write, from the shards in memory.

    The same directory that `export_checkpoint` makes of a checkpoint saved at this moment, without the checkpoint. At
    any time, during training or after it, also between forward, backward and update: the model is only read. Its
    mode, gradients, what FSDP has gathered, and all random generators are as before.

    Every rank writes what it holds to its places in the same files; where several hold copies (HSDP, NO_SHARD, plain
    data parallelism), they take turns. The directory appears by a rename when all of it is proven; if any rank fails,
    all raise the same, nothing is left, and what was at `out` before is still there.

    Collective: every rank makes the same call.

    Args:
        accelerator: that prepared the model.
        model: prepared by FSDP 1 or 2 (any mesh), or plain; None is the only prepared one.
        out: the directory to write, the same on every rank, on storage that all ranks share; must not exist, or be
            empty, without `overwrite`.
        dtype: "keep", or "bf16", "fp16", "fp32" for all floating tensors, or "config" for the dtype that the model's
            config states. Rounded to nearest even, as torch does.
        max_shard_size: of a file, as for `save_pretrained`.
        adapter: of a PEFT model only this adapter, written into `out` itself. Without it all are written as PEFT does,
            "default" into `out` and others into directories of their own.
        merge_adapter: write the base model with the adapters that are in use (or `adapter`) merged into it instead. The
            live model stays as it is. The adapters' matrices are needed whole on every rank while this is done.
        tokenizer: tokenizer or processor to write beside the weights.
        overwrite: replace an earlier export at `out`, once the new one is proven.
        verify: "output" reads everything that was written again and compares it; "load" also loads it with
            transformers, in a process that rank 0 starts while the others wait, and compares the tensors of the loaded
            model with those in memory; "off" does neither. Copies on several ranks are compared in any case.
        report: write `export_report.json` beside the weights.
        num_threads: of each rank; default: its share of the node's processors.
        timeout_s: how long to wait for a rank that does not arrive.

    Returns:
        what was written and how it was proven, the same on every rank. Time: two passes over local memory and that of
        writing and reading this rank's share. Peak memory: that of `live_writing.write_shards`, whatever the size of
        the model; where transformers computes what it writes, that of `live_reverting.write_groups`.

    Raises:
        UsageError: an argument cannot be right, or differs between ranks; nothing was written.
        StorageError: the storage is not shared between ranks, not writable or full.
        ReplicaDivergenceError: ranks that should hold copies of a tensor hold different values.
        UnsupportedError: what transformers or PEFT would write cannot be copied from memory, or not computed.
        DamagedCheckpointError: what was read again is not what was in memory.
        RankMissingError, RankFailedError: another rank did not arrive, or failed.
    """
    clock = _Clock()
    wait_for_ranks("export_model", timeout_s=timeout_s)
    target = Path(out).expanduser().absolute()
    prepared = run_on_each(
        "checking the export",
        lambda: _check_arguments(accelerator, model, dtype, max_shard_size, verify, tokenizer),
    )
    _require_same(
        out=str(target),
        dtype=dtype,
        max_shard_size=max_shard_size,
        adapter=adapter,
        merge_adapter=merge_adapter,
        overwrite=overwrite,
        verify=verify,
        report=report,
    )
    run_on_main("looking at the target", lambda: check_target(target, None, overwrite=overwrite))
    fingerprints = fingerprint_model(prepared)
    clock.note("fingerprints")
    threads = num_threads or _count_own_threads()
    with tempfile.TemporaryDirectory() as folder:  # of this process, but only rank 0's is used
        described = run_on_main(
            "describing the model", lambda: describe_model(prepared, Path(folder) / "model", tokenizer)
        )
        plans = run_on_each(
            "planning the export",
            lambda: make_plans(
                prepared,
                described,
                fingerprints,
                dtype=dtype,
                max_shard_size=max_shard_size,
                adapter=adapter,
                merge_adapter=merge_adapter,
            ),
        )
        run_on_each("planning the proof", lambda: _check_loadable(plans[0], verify))
        size_bytes = sum(file.size_bytes for plan in plans for file in plan.files)
        run_on_main("looking for space", lambda: check_space(target, size_bytes))
        holdings = run_together("looking at the shares", lambda: list_holdings(plans[0].shards))
        mine = run_on_each("dividing the work", lambda: choose_mine(plans[0].shards, holdings, get_rank()))
        clock.note("plan")
        with _replacing_together(target) as staging:
            proofs: dict[str, dict[str, str]] = {}
            findings: tuple[Finding, ...] = ()
            for plan in plans:
                proofs[plan.folder], more = _write_part(
                    prepared, plan, staging, mine, fingerprints, verify, threads, clock
                )
                findings += more
            proof = join_proofs(proofs)
            run_on_main("writing the config", lambda: write_companions(staging, plans[0].companions))
            if verify == "load":
                proof["load"], more = run_on_main("loading the export", lambda: _check_load(plans[0], staging))
                findings += more
                clock.note("load")

            def finish() -> ExportReport:
                done = _report(plans, target, proof, findings, clock.seconds)
                if report:
                    write_json_durably(staging / REPORT_NAME, done.to_dict())
                fsync_directory(staging)
                return done

            done = run_on_main("finishing the export", finish)
    return done


def _write_part(
    model: torch.nn.Module,
    plan: LivePlan,
    staging: Path,
    mine: Sequence[LocalShard],
    fingerprints: Mapping[str, Fingerprint],
    verify: str,
    threads: int,
    clock: _Clock,
) -> tuple[dict[str, str], tuple[Finding, ...]]:
    """Write and prove one directory of weights; return the proof, and what casts have lost. Collective."""
    directory = staging / plan.folder if plan.folder else staging

    def make_files() -> None:
        if plan.folder:
            directory.mkdir()
            fsync_directory(staging)
        create_files(plan.files, directory)

    run_on_main("making the files", make_files)
    wait_until_seen("looking for the shared storage", staging.parent, lambda: _look(plan.files, directory))
    weights = {shard.fqn: shard for shard in plan.shards if shard.fqn in plan.updates}
    merges = gather_merges(plan.updates, weights, mine, fingerprints) if plan.updates else {}
    written = run_on_each(
        "writing the export",
        lambda: write_shards(mine, plan.feeds, directory, summed=plan.summed, merges=merges, num_threads=threads),
    )
    if plan.groups:
        computed = write_groups(
            plan.groups,
            plan.shards,
            mine,
            directory,
            model=model,
            fingerprints=fingerprints,
            merges=merges,
            num_threads=threads,
        )
        written.add_outputs(computed)
    expected = agree_on_expected(plan, written, fingerprints)
    clock.note("write")
    proof = {"fingerprints": describe_source(plan), "output": "not read again (verify=off)"}
    if verify != "off":
        proof["output"] = prove_output(plan, directory, expected, threads)
        clock.note("proof")
    run_on_main("writing the index", lambda: write_rest(directory, plan.files, plan.content, Companions()))
    where = f"{plan.folder}/" if plan.folder else ""
    counts = {f"{where}{name}": count for name, count in add_counts(written.num_overflowed).items()}
    return proof, find_overflows(counts)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def note(self, phase: str) -> None:
        """Give the time since the last note to `phase`."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def _check_arguments(
    accelerator: Accelerator,
    model: torch.nn.Module | None,
    dtype: str,
    max_shard_size: int | str,
    verify: str,
    tokenizer: Any,
) -> torch.nn.Module:
    """Return the model to export."""
    for name, value, known in (("dtype", dtype, DTYPES), ("verify", verify, PROOFS)):
        if value not in known:
            raise UsageError(f"{name} is {value!r}; use one of {', '.join(known)}", actual=value)
    parse_size(max_shard_size)
    check_tokenizer(tokenizer)
    prepared = list(accelerator._models)
    if model is None:
        if len(prepared) != 1:
            raise UsageError(f"{len(prepared)} models are prepared; say which one to export (model=).")
        found: torch.nn.Module = prepared[0]
        return found
    if not callable(getattr(model, "named_modules", None)):
        raise UsageError(f"model is a {type(model).__name__}; give the prepared model.", actual=type(model).__name__)
    # What is inside a wrapper (`unwrap_model`) does not hold all that the wrapper holds.
    return next((each for each in prepared if unwrap_module(each) is unwrap_module(model)), model)


def _require_same(**arguments: Any) -> None:
    """Make sure that all ranks were given the same arguments. Collective."""
    everyone = gather_all({name: repr(value) for name, value in arguments.items()})
    for rank, others in enumerate(everyone):
        for name, value in others.items():
            if value != everyone[0][name]:
                raise UsageError(
                    f"Ranks were given different arguments: {name} is {everyone[0][name]} on rank 0 and {value} on "
                    f"rank {rank}. Give every rank the same (a time stamp in a name has to come from rank 0).",
                    rank=rank,
                    expected=everyone[0][name],
                    actual=value,
                )


def _count_own_threads() -> int:
    """Return this rank's share of the processors of its node."""
    return max(1, count_threads(None) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@contextmanager
def _replacing_together(target: Path) -> Iterator[Path]:
    """Do what `replacing` does, by rank 0 for all. Collective."""
    with ExitStack() as own:
        staging = run_on_main("making room for the export", lambda: own.enter_context(replacing(target)))
        yield staging
        run_on_main("putting the export in its place", own.close)


def _look(files: Sequence[OutputFile], staging: Path) -> str | None:
    """Return what this rank does not see of the files that rank 0 has made."""
    for file in files:
        path = staging / file.name
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError:
            return f"does not see {path}, which rank 0 has made"
        if size_bytes != file.size_bytes:
            return f"sees {size_bytes} bytes of {path}, which rank 0 has made with {file.size_bytes}"
    return None


def _check_loadable(plan: LivePlan, verify: str) -> None:
    if verify == "load" and plan.content.stem == "model" and plan.companions.config is None:
        raise UsageError("verify is 'load', and the model has no config to load with. Use verify='output'.")


def _check_load(plan: LivePlan, staging: Path) -> tuple[str, tuple[Finding, ...]]:
    """Return what loading the export showed, and a finding if it was not the model in memory."""
    if plan.content.stem != "model":
        return "not loaded: of an adapter's base model nothing but the live one is known here", ()
    check = check_loaded_values(staging, plan.kept, num_cast=plan.num_cast)
    return str(check), () if check.ok else (Finding("load", Severity.FAILURE, str(check)),)


def _report(
    plans: Sequence[LivePlan],
    target: Path,
    proof: Mapping[str, str],
    findings: tuple[Finding, ...],
    seconds: Mapping[str, float],
) -> ExportReport:
    first, *others = (
        build_report(
            plan.content,
            plan.files,
            Companions() if plan.folder else plan.companions,
            path=plan.class_name,
            out=str(target),
            source=f"in memory of {get_world_size()} rank(s)",
            proof=proof,
            findings=(*(finding for each in plans for finding in each.findings), *findings),
            seconds=dict(seconds),
        ).move_into(plan.folder)
        for plan in plans
    )
    for other in others:
        first = first.add(other)
    beside = sorted(plans[0].companions.files) if plans[0].folder else ()  # in the output itself all the same
    return replace(first, companions=(*first.companions, *beside))
