"""Between what is exported and the files: dtypes, the config that says so, what lies beside the weights, the report.

The same for a checkpoint and for a model in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import write_durably
from ..findings import Finding, Severity
from .companions import Companions, get_dtype, set_dtype, write_companions
from .content import FLOATS, Content
from .outputs import OutputFile, OutputTensor, build_index
from .report import ExportReport

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "keep": None, "config": None}
PROOFS = ("output", "load", "off")
_BYTES_PER_S = 0.8e9  # for estimates


def choose_dtypes(
    content: Content, dtype: str, companions: Companions
) -> tuple[list[OutputTensor], tuple[Finding, ...]]:
    """Return what is written in which dtype, and a hint where that is not what the config states.

    Raises:
        UsageError: the config's dtype is wanted and no config states one.
    """
    stated = get_dtype(companions.config or {})
    wanted = stated if dtype == "config" else DTYPES[dtype]
    if dtype == "config" and wanted is None:
        raise UsageError("dtype is 'config', and no config states one; give --model or a dtype.")
    outputs = [
        OutputTensor(
            name,
            tensor,
            wanted if wanted is not None and tensor.dtype in FLOATS else tensor.dtype,
            content.storages.get(name),
        )
        for name, tensor in content.outputs
    ]
    found = Counter(output.dtype for output in outputs if output.dtype in FLOATS)
    main = found.most_common(1)[0][0] if found else None
    if dtype == "keep" and stated is not None and main is not None and main != stated:
        message = (
            f"the config says {stated} and the weights are {main}, as they were trained; they are kept, and the "
            f"exported config says so. --dtype config casts them to {stated}"
        )
        return outputs, (Finding("dtype", Severity.HINT, message, facts={"expected": stated, "actual": main}),)
    return outputs, ()


def settle_config(companions: Companions, content: Content, outputs: Sequence[OutputTensor]) -> Companions:
    """Make the config say what the tensors are."""
    if companions.config is None or content.stem != "model":
        return companions
    config = dict(companions.config)
    dtypes = {output.name: output.dtype for output in outputs}
    if content.first_parameter in dtypes:
        config = set_dtype(config, dtypes[content.first_parameter])
    if content.is_untied:
        config["tie_word_embeddings"] = False
    return replace(companions, config=config)


def find_overflows(counts: Mapping[str, int]) -> tuple[Finding, ...]:
    """Return a finding for each tensor in which a cast has made finite values infinite; `counts` says how many."""
    return tuple(
        Finding(
            "overflow",
            Severity.FAILURE,
            f"{name}: {count} finite values became infinite in the cast; export it as bf16 or fp32",
            fqn=name,
            facts={"num_overflowed": count},
        )
        for name, count in counts.items()
        if count
    )


def write_rest(directory: Path, files: Sequence[OutputFile], content: Content, companions: Companions) -> None:
    """Write all that lies beside the weights: index, config, tokenizer and so on."""
    index = build_index(files, content.num_parameters)
    if index is not None:
        write_durably(directory / f"{content.stem}.safetensors.index.json", index)
    for name, text in content.texts.items():
        write_durably(directory / name, text.encode())
    write_companions(directory, companions)


def build_report(
    content: Content,
    files: Sequence[OutputFile],
    companions: Companions,
    *,
    path: str,
    out: str,
    source: str,
    proof: Mapping[str, str],
    findings: tuple[Finding, ...],
    seconds: Mapping[str, float],
    planned_threads: int | None = None,
) -> ExportReport:
    """Return the report of an export, or of a plan for so many threads."""
    outputs = [output for file in files for output in file.tensors]
    num_bytes = sum(output.size_bytes for output in outputs)
    dtypes: dict[str, int] = dict(Counter(output.dtype for output in outputs).most_common())
    config: list[Any] = ["config.json"] if companions.config is not None else []
    return ExportReport(
        path=path,
        out=out,
        source=source,
        files={file.name: file.size_bytes for file in files},
        companions=tuple(config + sorted({*content.texts, *companions.files})),
        num_tensors=len(outputs),
        num_parameters=content.num_parameters or sum(output.source.numel for output in outputs),
        num_bytes=num_bytes,
        dtypes=dtypes,
        proof=proof,
        findings=findings,
        seconds=seconds,
        is_plan=planned_threads is not None,
        peak_bytes=(40 << 20) + (planned_threads or 0) * (3 << 20),
        estimate_s=num_bytes / _BYTES_PER_S if planned_threads is not None else None,
    )


def join_proofs(proofs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the links of the proof; of several directories each behind its name."""
    if len(proofs) == 1:
        return dict(next(iter(proofs.values())))
    keys = dict.fromkeys(key for proof in proofs.values() for key in proof)
    return {key: "; ".join(f"{folder or '.'}: {proof[key]}" for folder, proof in proofs.items()) for key in keys}
