"""Whether a run may save, may load, and how a checkpoint differs from the run: all before anything is changed.

Nothing here is collective, writes, or loads; every rank comes to its own verdict and the callers make them agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import layout
from .errors import (
    CallOrderError,
    CheckpointIncompleteError,
    MismatchError,
    UnsupportedError,
    UsageError,
)
from .formats.dcp import DcpMetadata, read_dcp_metadata
from .formats.opening import read_checkpoint
from .live import (
    describe_model,
    describe_optimizers,
    describe_topology,
    get_raw_optimizer,
    get_scheduler_classes,
    has_stepped,
    is_fsdp,
    list_explained,
)
from .manifest import Manifest, ModelFacts
from .model_changes import ModelPlan
from .names import clean_fqn
from .permissions import Permissions, name_argument
from .ranks import get_world_size

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

_SUPPORTED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU", "MULTI_MLU", "FSDP")
_MAX_NAMES = 8


@dataclass(frozen=True)
class Difference:
    """One way in which checkpoint and run differ, and the state whose exactness it costs.

    A fatal one makes the load impossible or senseless; any other is refused too unless the caller asked for
    `strict=False` or named it, and is then reported.
    """

    state: str
    text: str
    fatal: bool = False
    unavoidable: bool = False  # of the checkpoint, not of the run: reported, never refused
    argument: str | None = None  # of a load, that permits it: "elastic", or a name in `allow`


def check_setup(accelerator: Accelerator) -> None:
    """Make sure that models, optimizers and schedulers are prepared in a way that can be saved and loaded.

    Raises:
        UnsupportedError: an engine or a state-dict type that this package does not handle.
        CallOrderError: no model is prepared, or a scheduler or optimizer was left out of `prepare`.
        UsageError: optimizers and models do not pair up, or every process trains for itself.
    """
    num_launched = get_world_size()
    if accelerator.num_processes == 1 < num_launched:
        raise UsageError(
            f"{num_launched} processes were launched, and Accelerate takes each for the only one: all of them train on "
            "the same data, apart from each other. Without a GPU it does so unless it is told otherwise: ask for FSDP "
            "(accelerate launch with an FSDP config, or ACCELERATE_USE_FSDP=true) together with enable_cpu_fsdp(), or "
            "pass Accelerator(cpu=True).",
            expected=num_launched,
            actual=1,
        )
    kind = str(accelerator.distributed_type.value)
    if kind not in _SUPPORTED_TYPES:
        raise UnsupportedError(
            f"This run uses {kind}, which keeps its state in its own way. accel_fsdp_tools handles FSDP 1 and 2, DDP "
            "and single processes; use the engine's own checkpoints.",
            actual=kind,
        )
    if not accelerator._models:
        raise CallOrderError(
            "No model has been prepared on this accelerator. Call accelerator.prepare(model, optimizer, dataloader, "
            "scheduler) first, then save or load."
        )
    if is_fsdp(accelerator) and accelerator.state.fsdp_plugin.state_dict_type.name == layout.LOCAL:
        raise UnsupportedError(
            "fsdp_state_dict_type is LOCAL_STATE_DICT: Accelerate writes it and cannot load it again, and it binds the "
            "files to this very wrapping and world size. Set fsdp_state_dict_type: SHARDED_STATE_DICT, which is as "
            "fast and loads anywhere.",
            expected=layout.SHARDED,
            actual=layout.LOCAL,
        )
    describe_optimizers(accelerator)
    _check_schedulers(accelerator)


def _check_schedulers(accelerator: Accelerator) -> None:
    raws = [get_raw_optimizer(optimizer) for optimizer in accelerator._optimizers]
    known = {id(each) for each in (*raws, *accelerator._optimizers)}
    followed = set()
    for index, wrapped in enumerate(accelerator._schedulers):
        scheduler = getattr(wrapped, "scheduler", wrapped)
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            continue
        if id(optimizer) not in known:
            raise CallOrderError(
                f"Scheduler {index} ({type(scheduler).__name__}) drives an optimizer that was never prepared. Pass "
                "that optimizer to accelerator.prepare together with the model and the scheduler."
            )
        followed.add(id(get_raw_optimizer(optimizer)))
    for each in accelerator._custom_objects:
        if hasattr(each, "optimizer"):
            followed.add(id(get_raw_optimizer(each.optimizer)))
    for index, (raw, wrapped) in enumerate(zip(raws, accelerator._optimizers, strict=True)):
        # torch's schedulers mark the step function of the optimizer that they drive (torch 2.13).
        marked = any(hasattr(each.step, "_wrapped_by_lr_sched") for each in (raw, wrapped))
        if marked and id(raw) not in followed:
            raise CallOrderError(
                f"Optimizer {index} ({type(raw).__name__}) is driven by a learning-rate scheduler that was neither "
                "prepared nor registered, so its state would be lost. Pass the scheduler to accelerator.prepare, or "
                "to accelerator.register_for_checkpointing."
            )


def check_boundary(accelerator: Accelerator) -> None:
    """Make sure that no gradients are partly accumulated: they are in no checkpoint.

    Raises:
        CallOrderError: the run is in the middle of an accumulation window.
    """
    if not accelerator.sync_gradients:
        window = accelerator.gradient_accumulation_steps
        raise CallOrderError(
            f"Gradients are partly accumulated (micro-batch {accelerator.step % window} of {window}) and would be "
            "lost. Save when accelerator.sync_gradients is true, after optimizer.step(); Checkpointer.step() waits for "
            "that by itself."
        )


def check_not_stepped(accelerator: Accelerator, num_updates: int | None) -> None:
    """Make sure that no optimizer has made an update since it was built.

    Args:
        num_updates: as far as they were counted. An optimizer without state (plain SGD) shows them in no other way.

    Raises:
        CallOrderError: one has.
    """
    for index, optimizer in enumerate(accelerator._optimizers):
        raw = get_raw_optimizer(optimizer)
        if has_stepped(raw) or num_updates:
            raise CallOrderError(
                f"Optimizer {index} ({type(raw).__name__}) has made updates, or was loaded, already: loading now would "
                "discard that. Call load_state or Checkpointer.resume() after prepare and before the first step. To go "
                "back on purpose, pass allow_after_step=True, and start the data loop anew."
            )


def describe_models(accelerator: Accelerator) -> tuple[ModelFacts, ...]:
    """Return the facts of every prepared model."""
    return tuple(describe_model(model) for model in accelerator._models)


def check_complete(accelerator: Accelerator, directory: Path, kind: str | None, *, checks_names: bool = True) -> None:
    """Make sure that the files which Accelerate would load are there, before any rank enters a collective.

    Args:
        checks_names: a full file must hold every tensor of the model.

    Raises:
        CheckpointIncompleteError: a model's, optimizer's or scheduler's file is missing, or a full one lacks a tensor.
        UnsupportedError: the files are of a kind that cannot be loaded.
    """
    if kind in (layout.LOCAL, layout.RANK_FILES):
        raise UnsupportedError(
            f"{directory} was saved as {kind}: one file of raw shards per rank. Accelerate cannot load these through "
            "load_state. Load them in the run that wrote them (use_dcp=False) and save again with "
            "fsdp_state_dict_type: SHARDED_STATE_DICT.",
            path=str(directory),
            actual=kind,
        )
    for index in range(len(accelerator._models)):
        path = layout.get_model_path(directory, index, kind)
        _require(path, f"model {index}")
        if kind == layout.FULL and checks_names:
            _require_tensors(path, index, accelerator._models[index])
    for index in range(len(accelerator._optimizers)):
        _require(layout.get_optimizer_path(directory, index, kind), f"optimizer {index}")


def _require(path: Path, what: str) -> None:
    if not path.exists():
        raise CheckpointIncompleteError(
            f"{path} is missing: the checkpoint does not hold {what}, which this run has prepared. Use another "
            "checkpoint, or prepare what was prepared when it was saved.",
            path=str(path),
        )


def _require_tensors(path: Path, index: int, model: torch.nn.Module) -> None:
    """Rank 0 alone reads a full file: should it fail for want of a key, the others would wait in a collective."""
    facts = describe_model(model)
    saved = read_checkpoint(path).sections[0].tensors.keys()
    tied = {name for group in facts.ties if saved & set(group) for name in group}
    missing = [tensor.fqn for tensor in facts.tensors if tensor.fqn not in saved and tensor.fqn not in tied]
    if missing:
        raise CheckpointIncompleteError(
            f"{path} lacks {len(missing)} tensor(s) of model {index}: {_list_names(missing)}. Use another checkpoint, "
            "or prepare the model that was saved.",
            path=str(path),
            fqn=missing[0],
        )


def compare_with_manifest(
    accelerator: Accelerator, manifest: Manifest, plans: Sequence[ModelPlan] | None = None
) -> list[Difference]:
    """Return how the run differs from the one that the manifest describes.

    Args:
        plans: where the tensors of models that are not the saved ones come from.
    """
    differences = [
        *_compare_counts(
            accelerator,
            {
                "model": len(manifest.models),
                "optimizer": len(manifest.optimizers),
                "scheduler": manifest.num_schedulers,
                "dataloader": manifest.num_dataloaders,
                "registered object": manifest.num_custom_objects,
            },
        )
    ]
    for index, (saved, live) in enumerate(zip(manifest.models, describe_models(accelerator), strict=False)):
        dtypes = {tensor.fqn: tensor.dtype for tensor in saved.tensors}
        if plans is not None:
            differences += [Difference("model", text, fatal=True) for text in plans[index].problems]
            dtypes = {name: dtypes[source] for name, source in plans[index].sources.items()}
        else:
            differences += _compare_shapes(
                index,
                {tensor.fqn: tensor.shape for tensor in saved.tensors},
                {tensor.fqn: tensor.shape for tensor in live.tensors},
            )
        explained = list_explained(accelerator._models[index], dtypes)
        differences += _compare_dtypes(index, {k: v for k, v in dtypes.items() if k not in explained}, live)
    for index, (before, now) in enumerate(zip(manifest.optimizers, describe_optimizers(accelerator), strict=False)):
        if before.class_name != now.class_name or before.num_param_groups != now.num_param_groups:
            text = (
                f"optimizer {index} is {now.class_name} with {now.num_param_groups} parameter group(s), the "
                f"checkpoint's is {before.class_name} with {before.num_param_groups}"
            )
            differences.append(Difference("optimizer", text, fatal=True))
    before_classes = manifest.accelerate.get("schedulers")
    now_classes = get_scheduler_classes(accelerator)
    if before_classes is not None and len(before_classes) == len(now_classes) and before_classes != now_classes:
        text = f"the schedulers are {', '.join(now_classes)}, they were {', '.join(before_classes)} at the save"
        differences.append(Difference("scheduler", text, fatal=True))
    topology = describe_topology(accelerator)
    for name, label in (("mixed_precision", "mixed precision"), ("device_type", "device type")):
        was, now_is = getattr(manifest.topology, name), getattr(topology, name)
        if was != now_is:
            text = f"{label} is {now_is}, it was {was} at the save"
            differences.append(Difference("model", text, argument=name))
    if manifest.topology.world_size != topology.world_size:
        text = f"this run has {topology.world_size} rank(s), the checkpoint was saved by {manifest.topology.world_size}"
        differences += [Difference(state, text, argument="elastic") for state in ("rng", "data")]
    num_pending = manifest.states["optimizer"].get("num_pending", 0)
    if num_pending:
        text = f"{num_pending} backward pass(es) had been made since the last update; their gradients were not saved"
        differences.append(Difference("optimizer", text, unavoidable=True))
    if manifest.num_dataloaders == 0:
        differences.append(
            Difference(
                "data", "no dataloader was prepared, so nothing is known of the data's progress", unavoidable=True
            )
        )
    accumulation = manifest.accelerate.get("gradient_accumulation_steps")
    if accumulation not in (None, accelerator.gradient_accumulation_steps):
        text = f"gradient accumulation is {accelerator.gradient_accumulation_steps}, it was {accumulation} at the save"
        differences.append(Difference("data", text, argument="elastic"))
    return differences


def compare_without_manifest(accelerator: Accelerator, directory: Path, kind: str | None) -> list[Difference]:
    """Return how the run differs from a checkpoint of plain Accelerate, as far as its files tell."""
    differences = _compare_counts(
        accelerator,
        {
            "scheduler": layout.count_schedulers(directory),
            "registered object": layout.count_custom_objects(directory),
        },
    )
    if kind == layout.SHARDED:
        for index, live in enumerate(describe_models(accelerator)):
            metadata = read_dcp_metadata(layout.get_model_path(directory, index, kind).parent)
            saved = _get_dcp_shapes(metadata)
            shapes = {tensor.fqn: tensor.shape for tensor in live.tensors}
            differences += _compare_shapes(index, saved, shapes)
    saved_ranks = layout.count_random_states(directory)
    if saved_ranks != accelerator.num_processes:
        text = f"this run has {accelerator.num_processes} rank(s), the checkpoint was saved by {saved_ranks}"
        differences += [Difference(state, text) for state in ("rng", "data")]
    return differences


def _get_dcp_shapes(metadata: DcpMetadata) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for key, tensor in metadata.tensors.items():
        path = metadata.key_paths.get(key, (key,))
        name = ".".join(str(part) for part in (path[1:] if path[0] == "model" else path))
        shapes[clean_fqn(name)] = tuple(tensor.shape)
    return shapes


def _compare_counts(accelerator: Accelerator, saved: dict[str, int]) -> list[Difference]:
    live = {
        "model": len(accelerator._models),
        "optimizer": len(accelerator._optimizers),
        "scheduler": len(accelerator._schedulers),
        "dataloader": len(accelerator._dataloaders),
        "registered object": len(accelerator._custom_objects),
    }
    states = {"dataloader": "data", "registered object": "model"}
    return [
        Difference(
            states.get(name, name),
            f"this run has prepared {live[name]} {name}(s), the checkpoint holds {count}",
            fatal=name != "dataloader",
        )
        for name, count in saved.items()
        if live[name] != count
    ]


def _compare_shapes(
    index: int, saved: dict[str, tuple[int, ...]], live: dict[str, tuple[int, ...]]
) -> list[Difference]:
    differences = []
    for names, text in (
        (sorted(set(live) - set(saved)), "are in the model and not in the checkpoint"),
        (sorted(set(saved) - set(live)), "are in the checkpoint and not in the model"),
    ):
        if names:
            shown = f"model {index}: {len(names)} tensor(s) {text}: {_list_names(names)}"
            differences.append(Difference("model", shown, fatal=True))
    for name in sorted(set(saved) & set(live)):
        if saved[name] != live[name]:
            text = f"model {index}: {name} has shape {list(live[name])}, the checkpoint's has {list(saved[name])}"
            differences.append(Difference("model", text, fatal=True))
    return differences


def _compare_dtypes(index: int, dtypes: dict[str, str], live: ModelFacts) -> list[Difference]:
    changed = [tensor for tensor in live.tensors if dtypes.get(tensor.fqn, tensor.dtype) != tensor.dtype]
    if not changed:
        return []
    first = changed[0]
    text = (
        f"model {index}: {len(changed)} tensor(s) have another dtype ({first.fqn} is {first.dtype}, the checkpoint's "
        f"is {dtypes[first.fqn]}); torch casts them in silence"
    )
    return [Difference("model", text, argument="dtype")]


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def raise_on_differences(directory: Path, differences: list[Difference], permissions: Permissions) -> None:
    """Raise if any difference is fatal, or, under `strict`, if there is any that is not permitted by name.

    Raises:
        MismatchError: names every difference, and the argument that permits it. Nothing has been loaded.
    """
    strict = permissions.strict
    refused = [
        each
        for each in differences
        if each.fatal or (strict and not each.unavoidable and not permissions.permits(each.argument))
    ]
    if not refused:
        return
    lines = "\n".join(f"  - {each.text}{name_argument(each.argument)}" for each in refused)
    hint = (
        "Prepare the same objects, in the same order, as when it was saved."
        if any(difference.fatal for difference in refused)
        else "Make the run as it was, name what may differ, or pass strict=False to go on with what can be restored; "
        "the report then says what is not exact."
    )
    raise MismatchError(
        f"{directory} does not fit this run; nothing was loaded:\n{lines}\n{hint}",
        path=str(directory),
        actual=[difference.text for difference in refused],
    )


def parse_step(value: Any) -> int:
    """Return `value` as a step count.

    Raises:
        UsageError: it is not a whole number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"step is {value!r}; give a whole number of at least 0", actual=value)
    return value
