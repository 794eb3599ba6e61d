"""The plan of an export from a checkpoint: what goes into which directory, file and dtype. Nothing is written.

One directory, except for several adapters, which PEFT keeps in a directory each.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointNotFoundError, UnsupportedError, UsageError
from ..findings import Finding, Severity
from .adapters import DEFAULT, AdapterSet, collect_adapter, find_adapters
from .companions import Companions, find_companions, resolve_model
from .content import (
    Choices,
    Content,
    collect_model,
    collect_optimizer,
    find_facts,
    make_reverter,
    take_from_base,
)
from .foreign import describe_from_config
from .outputs import ONE_FILE, OutputFile, OutputTensor, split_into_files
from .select import Selection, select_model, select_optimizer
from .settling import choose_dtypes, settle_config

CHECKPOINT = "checkpoint"
"""The base model's weights are those in the checkpoint."""


@dataclass(frozen=True)
class Request:
    """What is to be exported. See `export_checkpoint`."""

    path: str | Path
    dtype: str
    max_shard_size: int | str
    model: str | Path | None
    index: int | None
    key: str | None
    state: str
    base: str | Path | None
    only: str | None
    adapter: str | None
    merge_adapter: str | Path | None
    choices: Choices


@dataclass(frozen=True)
class Part:
    """One directory of weights: `folder` inside the output, empty for the output itself."""

    folder: str
    content: Content
    files: tuple[OutputFile, ...]

    @property
    def outputs(self) -> Iterator[OutputTensor]:
        return (tensor for file in self.files for tensor in file.tensors)


@dataclass(frozen=True)
class Plan:
    """What will be written, and what is known of it.

    Attributes:
        selection: where it is taken from.
        parts: at least one.
        companions: what goes beside the weights.
        findings: so far.
        adapters: those that are exported, or merged.
        base: the directory of the base model that they are merged into, if there is one.
        is_merged: they are merged.
        describe_s: how long it took to find out about the architecture, mostly in a child process where it did.
    """

    selection: Selection
    parts: tuple[Part, ...]
    companions: Companions
    findings: tuple[Finding, ...]
    adapters: AdapterSet | None = None
    base: Path | None = None
    is_merged: bool = False
    describe_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for part in self.parts for file in part.files)


def make_plan(request: Request) -> Plan:
    """Find out what an export will write, and refuse what would be wrong. Reads headers and metadata only.

    Raises:
        As `export_checkpoint`.
    """
    if request.state == "optimizer":
        selection = select_optimizer(request.path, index=request.index)
        return _finish(request, selection, {"": collect_optimizer(selection)}, Companions())
    model = None if request.model is None else resolve_model(request.model)
    selection, is_flat = _select(request, model)
    found = None if is_flat else find_adapters(selection, model, request.adapter)
    if found is not None:
        return _plan_adapters(request, selection, found, model)
    for option, value in (("--adapter", request.adapter), ("--merge-adapter", request.merge_adapter)):
        if value is not None:
            raise UsageError(f"{option} is given, and {request.path} holds no adapters.", path=str(request.path))
    started = time.monotonic()
    facts = (
        describe_from_config(model, trust_remote_code=request.choices.trust_remote_code)
        if is_flat and model is not None
        else find_facts(selection, model, request.choices)
    )
    describe_s = time.monotonic() - started
    # The run's own config comes first.
    reverter = make_reverter([selection.assets, model], facts, request.choices)
    content = collect_model(selection, facts, request.choices, reverter)
    if request.base is not None and request.only is not None:
        content = take_from_base(content, resolve_model(request.base, weights=True), request.only)
    plan = _finish(request, selection, {"": content}, _find_companions(selection, content, model))
    return dataclasses.replace(plan, describe_s=describe_s)


def _select(request: Request, model: Path | None) -> tuple[Selection, bool]:
    """Return the model, and whether it took a config to tell what FSDP1's flat parameters consist of."""
    try:
        return select_model(request.path, index=request.index, key=request.key), False
    except UnsupportedError:
        if model is None:
            raise
        facts = describe_from_config(model, trust_remote_code=request.choices.trust_remote_code)
        further = {name for tie in facts.ties for name in (*tie.dropped, *tie.others)}
        layout = {name: shape for name, shape in facts.shapes.items() if name not in further}
        return select_model(request.path, index=request.index, key=request.key, layout=layout), True


def _plan_adapters(request: Request, selection: Selection, found: AdapterSet, model: Path | None) -> Plan:
    if request.base is not None:
        raise UsageError(
            "--base and --only update a whole model in part, and this checkpoint holds adapters. Leave them out, or "
            "merge first (--merge-adapter)."
        )
    chosen = found.choose(request.adapter)
    if request.merge_adapter is None:
        contents = {
            "" if request.adapter is not None or each.name == DEFAULT else each.name: collect_adapter(each)
            for each in chosen
        }
        whole = _find_companions(selection, next(iter(contents.values())), model)
        plan = _finish(request, selection, contents, whole)
        # An adapter's directory with a config.json would be taken for a model's.
        files = {name: path for name, path in whole.files.items() if name != "generation_config.json"}
        beside = Companions(None, {name: path for name, path in files.items() if not name.endswith(".py")})
        return dataclasses.replace(plan, companions=beside, adapters=dataclasses.replace(found, adapters=chosen))
    if request.adapter is None:
        if not found.active:
            names = ", ".join(each.name for each in chosen)
            raise UsageError(f"Say with --adapter which one to merge: {names}.", actual=names)
        chosen = tuple(found.choose(name)[0] for name in found.active)
    from .merging import collect_merged

    base = None if request.merge_adapter == CHECKPOINT else _resolve_base(request.merge_adapter)
    content = collect_merged(selection, found, chosen, base, model, request.choices).content
    plan = _finish(request, selection, {"": content}, _find_companions(selection, content, model, base))
    return dataclasses.replace(plan, adapters=dataclasses.replace(found, adapters=chosen), base=base, is_merged=True)


def _resolve_base(base: str | Path) -> Path:
    try:
        return resolve_model(base, weights=True)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"--merge-adapter {base}: {error.message} The word {CHECKPOINT} takes the base model's weights from the "
            "checkpoint itself.",
            **error.facts,
        ) from error


def _finish(request: Request, selection: Selection, contents: dict[str, Content], companions: Companions) -> Plan:
    parts, findings = [], []
    for folder, content in contents.items():
        outputs, more = choose_dtypes(content, request.dtype, companions)
        is_model = content.stem == "model"
        if is_model:
            companions = settle_config(companions, content, outputs)
        size = request.max_shard_size if content.stem != "adapter_model" else ONE_FILE
        parts.append(Part(folder, content, split_into_files(outputs, size, stem=content.stem)))
        # Adapters are in float32 whatever the model is in: nothing to hint at.
        findings += [*content.findings, *(more if is_model else ())]
    findings += _judge_companions(companions, parts[0].content.stem)
    return Plan(selection, tuple(parts), companions, tuple(findings))


def _find_companions(
    selection: Selection, content: Content, model: Path | None, base: Path | None = None
) -> Companions:
    # The run's own config comes first, the tokenizer that was named explicitly too.
    companions = find_companions([each for each in (model, selection.assets, base) if each is not None])
    own = find_companions([selection.assets]) if selection.assets is not None else Companions()
    files = {name: source for name, source in companions.files.items() if name not in content.texts}
    return Companions(own.config or content.config or companions.config, files)


def _judge_companions(companions: Companions, stem: str) -> tuple[Finding, ...]:
    if stem == "optimizer":
        return ()
    findings = []
    if companions.config is None and stem == "model":
        message = "there is no config.json, without which from_pretrained does not load this: give --model"
        findings.append(Finding("config", Severity.HINT, message))
    elif not companions.has_tokenizer:
        message = (
            "there is no tokenizer: give --model, or save it with the checkpoints (tokenizer= of Checkpointer and "
            "save_state)"
        )
        findings.append(Finding("tokenizer", Severity.NOTE, message))
    return tuple(findings)
