"""`export_checkpoint`: a checkpoint becomes a Hugging Face directory, proven equal, without torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError
from ..extents import DiskTensor
from ..files import fsync_directory, write_json_durably
from ..findings import Finding, Severity
from ..fingerprint import Fingerprint
from ..meter import Progress
from .companions import Companions, resolve_model, write_companions
from .content import Choices, Content
from .copying import CopyResult, copy_tensors
from .outputs import MAX_SHARD_SIZE, parse_size
from .passing import PassingSources
from .plans import Part, Plan, Request, make_plan
from .proof import OutputProof, ProofResult, list_expected, prove_tensors
from .report import ExportReport
from .settling import DTYPES, PROOFS, build_report, find_overflows, join_proofs, write_rest
from .source_checks import find_stored_crc
from .target import REPORT_NAME, check_space, check_target, replacing
from .workers import count_threads

STATES = ("model", "optimizer")
_MERGE_BYTES = 20 << 20  # per thread; the matrices of one layer's adapter come on top


def export_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str = "keep",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    model: str | Path | None = None,
    model_index: int | None = None,
    key: str | None = None,
    state: str = "model",
    base: str | Path | None = None,
    only: str | None = None,
    adapter: str | None = None,
    merge_adapter: str | Path | None = None,
    untie: bool = False,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    verify: str = "output",
    dry_run: bool = False,
    report: bool = False,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the directory that `save_pretrained` of the whole model would have written, straight from a checkpoint.

    Same names, shapes, dtypes, values, files and index. Bytes are copied from where they lie in the checkpoint's
    files to where they belong in the output, through small buffers: no model is built, nothing is gathered. The
    directory appears by a rename when everything in it is proven; a failed export leaves nothing.

    Args:
        path: a checkpoint that `open_checkpoint` opens: of this package, Accelerate, the Trainer, torch, as DCP
            directory, full file, rank files or safetensors; or a directory inside it.
        out: the directory to write; must not exist, or be empty, without `overwrite`.
        dtype: "keep", or "bf16", "fp16", "fp32" for all floating tensors, or "config" for the dtype that the model's
            config states. Rounded to nearest even, as torch does. Integers, booleans and eight-bit floats stay.
        max_shard_size: of a file, as for `save_pretrained`.
        model: a directory or hub id with config.json, tokenizer and so on, for what the checkpoint does not hold.
        model_index: which of several models (or optimizers).
        key: the place of a state dict inside the files (`ema`), instead of the model.
        state: "optimizer" writes an optimizer's tensors as they are, for analysis.
        base, only: take the tensors that match the pattern `only` from the checkpoint, all others from the model in
            the directory `base`.
        adapter: of a checkpoint with PEFT adapters only this one, written into `out` itself. Without it all are
            written as PEFT does, "default" into `out` and others into directories of their own.
        merge_adapter: merge the adapters that are in use (or `adapter`) into the base model and write that. A directory
            or hub id with the base model's weights, or "checkpoint" for those in the checkpoint.
        untie: write tied weights that differ, both; without it they are refused.
        allow_missing: export although tensors of the architecture are missing.
        allow_unexpected: write tensors that the architecture does not have, too.
        trust_remote_code: let transformers run code that lies beside the config, where it is asked about the
            architecture, and for `verify="load"`.
        overwrite: replace an earlier export at `out`, once the new one is proven.
        verify: "output" reads everything that was written again and compares it; "load" also loads it with
            transformers and compares logits with those of the checkpoint's model; "off" does neither. What is read
            from the checkpoint is compared with its CRCs in any case.
        dry_run: plan and check, write nothing.
        report: write `export_report.json` beside the weights.
        num_threads: default: one per processor.
        progress: called with bytes done and bytes in all.

    Returns:
        what was written and how it was proven. Time: from disk that of a file copy. Peak memory: about 50 MB, whatever
        the size of the model; for merged adapters, 20 MB and one layer's adapter matrices per thread more.

    Raises:
        UsageError, StorageError: nothing was written.
        CheckpointNotFoundError, CheckpointIncompleteError, DamagedCheckpointError: the checkpoint is not whole.
        MismatchError: it is not one of this architecture, or tied weights differ.
        UnsupportedError: it cannot be exported without guessing.
    """
    started = time.monotonic()
    _finish_own_save()
    _check_arguments(dtype, max_shard_size, state, verify, base, only, adapter, merge_adapter)
    target = Path(out).expanduser().absolute()
    check_target(target, Path(path).expanduser().absolute(), overwrite=overwrite)
    choices = Choices(untie, allow_missing, allow_unexpected, trust_remote_code)
    request = Request(
        path, dtype, max_shard_size, model, model_index, key, state, base, only, adapter, merge_adapter, choices
    )
    plan = make_plan(request)
    if verify == "load":
        _check_loadable(plan)
    check_space(target, plan.size_bytes)
    seconds = {"plan": time.monotonic() - started - plan.describe_s, "architecture": plan.describe_s}
    if dry_run:
        return _report(plan, target, {}, seconds, (), count_threads(num_threads))
    with replacing(target) as staging:
        proofs, overflows = {}, {}
        failures: tuple[Finding, ...] = ()
        for part in plan.parts:
            proofs[part.folder], more = _write_part(part, staging, verify, seconds, num_threads, progress)
            overflows.update(more)
        proof = join_proofs(proofs)
        write_companions(staging, plan.companions)
        if verify == "load":
            with _timed(seconds, "load"):
                proof["load"], is_loadable = _check_load(plan, staging, request)
            if not is_loadable:
                failures = (Finding("load", Severity.FAILURE, proof["load"]),)
        done = _report(plan, target, proof, seconds, (*find_overflows(overflows), *failures), None)
        if report:
            write_json_durably(staging / REPORT_NAME, done.to_dict())
    return done


def _finish_own_save() -> None:
    """Wait for this process, which may be writing that checkpoint in the background."""
    background = sys.modules.get("accel_fsdp_tools.background")  # who has not loaded it, saves nothing
    if background is not None:
        background.wait_alone()


def _check_arguments(
    dtype: str,
    max_shard_size: int | str,
    state: str,
    verify: str,
    base: str | Path | None,
    only: str | None,
    adapter: str | None,
    merge_adapter: str | Path | None,
) -> None:
    for name, value, known in (("dtype", dtype, DTYPES), ("state", state, STATES), ("verify", verify, PROOFS)):
        if value not in known:
            raise UsageError(f"{name} is {value!r}; use one of {', '.join(known)}", actual=value)
    parse_size(max_shard_size)
    if (base is None) != (only is None):
        raise UsageError("base and only belong together: which tensors to take, and where the others come from.")
    if state == "optimizer" and (base is not None or verify == "load" or dtype == "config"):
        raise UsageError("an optimizer's state has no base, no config and cannot be loaded by transformers.")
    if state == "optimizer" and (adapter is not None or merge_adapter is not None):
        raise UsageError("adapters are part of the model; leave --state optimizer out.")


def _check_loadable(plan: Plan) -> None:
    if plan.companions.config is None and (plan.adapters is None or plan.is_merged):
        raise UsageError("verify is 'load', and there is no config.json to load with. Give --model.")


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.monotonic() - started


def _write_part(
    part: Part,
    directory: Path,
    verify: str,
    seconds: dict[str, float],
    num_threads: int | None,
    progress: Progress | None,
) -> tuple[dict[str, str], dict[str, int]]:
    """Write and prove one directory of weights; return the proof, and in how many places casts have overflowed."""
    if part.folder:
        directory = directory / part.folder
        directory.mkdir()
        fsync_directory(directory.parent)
    vouched = _find_vouched(part) if verify != "off" else _Vouched({}, {})
    with _timed(seconds, "copy"), _close_reverter(part.content):
        copied, proven = _copy(part, directory, vouched, verify, num_threads, progress)
    proof = _describe_source(part, copied, vouched)
    proof["output"] = "not read again (verify=off)" if proven is None else _describe_output(proven, vouched)
    write_rest(directory, part.files, part.content, Companions())
    where = f"{part.folder}/" if part.folder else ""
    return proof, {f"{where}{name}": each.num_overflowed for name, each in copied.tensors.items()}


@dataclass(frozen=True)
class _Vouched:
    """What vouches for the tensors that are written as they are: a fingerprint of the live one, or a stored CRC."""

    fingerprints: Mapping[str, Fingerprint]
    crcs: Mapping[str, int]


def _find_vouched(part: Part) -> _Vouched:
    """Find what needs one comparison only, from the live model or the stored items to the output."""
    fingerprints, crcs = {}, {}
    for output in part.outputs:
        if output.dtype != output.source.dtype or output.name in part.content.converted:
            continue
        if output.name in part.content.fingerprints:
            fingerprints[output.name] = part.content.fingerprints[output.name]
            continue
        crc = find_stored_crc(output.source)
        if crc is not None:
            crcs[output.name] = crc
    return _Vouched(fingerprints, crcs)


@contextmanager
def _close_reverter(content: Content) -> Iterator[None]:
    try:
        yield
    finally:
        if content.reverter is not None:
            content.reverter.close()


def _copy(
    part: Part,
    directory: Path,
    vouched: _Vouched,
    verify: str,
    num_threads: int | None,
    progress: Progress | None,
) -> tuple[CopyResult, ProofResult | None]:
    passing = PassingSources(part.content.sources, part.outputs)
    sources = [found for name, found in part.content.sources.items() if name not in passing.expected]
    prove_tensors(
        [tensor for tensor, _ in sources],
        {tensor.fqn: fingerprint for tensor, fingerprint in sources},
        num_threads=num_threads,
    )
    proof = None if verify == "off" else OutputProof(directory, part.files, vouched.fingerprints)
    copied = copy_tensors(
        part.files,
        directory,
        num_threads=num_threads,
        fingerprints={k: each for k, each in part.content.fingerprints.items() if k not in vouched.fingerprints},
        vouched={*vouched.fingerprints, *vouched.crcs},
        proven=part.content.converted,
        passing=passing if passing.expected else None,
        again=proof,
        progress=progress,
    )
    if proof is None:
        return copied, None
    return copied, proof.conclude(list_expected(copied, vouched.fingerprints, vouched.crcs))


def _describe_output(proof: ProofResult, vouched: _Vouched) -> str:
    num_cast = proof.num_tensors - proof.num_fingerprints - len(vouched.crcs)
    return (
        f"{proof.num_tensors} tensors read again from the output: {proof.num_fingerprints} compared with the "
        f"fingerprints of the live model, {len(vouched.crcs)} with the CRCs of the checkpoint, {num_cast} with what "
        "was read and cast"
    )


def _describe_source(part: Part, copied: CopyResult, vouched: _Vouched) -> dict[str, str]:
    without = copied.num_items_without_crc
    vouching = (each.source for each in part.outputs if each.name in vouched.crcs)
    in_output = {extent.bytes for each in vouching if isinstance(each, DiskTensor) for extent in each.extents}
    proof = {
        "crc": f"{copied.num_items_checked + len(in_output)} stored items compared with their CRC-32"
        + (f"; {without} carry none" if without else "")
    }
    known = part.content.fingerprints.keys()
    settled = len(known) + len(part.content.converted)
    if settled:
        proof["crc"] += f"; {settled} tensors have fingerprints, which prove more, and need none"
    sources = len(part.content.sources)
    if not known and not sources:
        proof["fingerprints"] = "none were recorded when this was saved"
    else:
        total = sum(1 for _ in part.outputs)
        converted = f", and {sources} tensors that computed or converted ones are made of" if sources else ""
        proof["fingerprints"] = (
            f"{len(known)} of {total} tensors compared with those of the live model, taken at the save{converted}"
        )
    return proof


def _check_load(plan: Plan, staging: Path, request: Request) -> tuple[str, bool]:
    from .load_adapters import check_adapters
    from .load_check import check_load

    path, trusted = plan.selection.path, request.choices.trust_remote_code
    if plan.adapters is None:
        check = check_load(staging, path, index=request.index, key=request.key, trust_remote_code=trusted)
        return str(check), check.ok
    model = None if request.model is None else resolve_model(request.model)
    return check_adapters(plan, staging, model=model, index=request.index, key=request.key, trust_remote_code=trusted)


def _report(
    plan: Plan,
    out: Path,
    proof: Mapping[str, str],
    seconds: dict[str, float],
    more: tuple[Finding, ...],
    planned_threads: int | None,
) -> ExportReport:
    first, *others = (
        build_report(
            part.content,
            part.files,
            Companions() if part.folder else plan.companions,
            path=str(plan.selection.path),
            out=str(out),
            source=plan.selection.section.format,
            proof=proof,
            findings=(*plan.findings, *more),
            seconds=seconds,
            planned_threads=planned_threads,
        ).move_into(part.folder)
        for part in plan.parts
    )
    for other in others:
        first = first.add(other)
    extra = _MERGE_BYTES * (planned_threads or 0) if plan.is_merged else 0
    beside = sorted(plan.companions.files) if plan.parts[0].folder else ()  # in the output itself all the same
    return replace(first, companions=(*first.companions, *beside), peak_bytes=first.peak_bytes + extra)


__all__ = ["DTYPES", "PROOFS", "STATES", "ExportReport", "export_checkpoint"]
