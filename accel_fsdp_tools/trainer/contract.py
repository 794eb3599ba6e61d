"""Whether a Trainer can be served, and how it differs from the run that a checkpoint is of. Not collective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import layout
from ..contract import Difference
from ..errors import CheckpointIncompleteError, UnsupportedError, UsageError
from ..live import describe_model
from ..manifest import Manifest
from ..opening import open_checkpoint

if TYPE_CHECKING:
    from transformers import Trainer

TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
_MAX_NAMES = 5

# The Trainer computes its place in the data from the number of updates and these, as they are today.
_OF_POSITION = {
    "world_size": "number of ranks",
    "train_batch_size": "batch size per device",
    "gradient_accumulation_steps": "gradient accumulation",
    "num_examples": "examples in the training set",
    "drop_last": "dataloader_drop_last",
}
# What people change on purpose; the Trainer takes today's. Told, never refused.
_OF_SCHEDULE = {
    "max_steps": "updates in all",
    "learning_rate": "learning rate",
    "lr_scheduler_type": "scheduler",
    "warmup_steps": "warm-up steps",
    "weight_decay": "weight decay",
}


def check_trainer(trainer: Trainer) -> None:
    """Make sure that this Trainer's checkpoints are ones that the callback can complete.

    Raises:
        UnsupportedError, UsageError: they are not; says why, and what to do.
    """
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError(
            "This Trainer runs under DeepSpeed, which keeps its checkpoints in its own way. Use FSDPCheckpointCallback "
            "under FSDP, and DeepSpeed's own checkpoints here."
        )
    if not trainer.is_fsdp_enabled:
        raise UsageError(
            "FSDPCheckpointCallback is for runs under FSDP, and this Trainer has none. Launch with an FSDP config of "
            "Accelerate, or set fsdp and fsdp_config in TrainingArguments."
        )
    if trainer.is_fsdp_xla_enabled:
        raise UnsupportedError("FSDPCheckpointCallback does not handle FSDP on XLA devices")
    if args.save_only_model:
        raise UsageError(
            "save_only_model=True leaves optimizer, scheduler and random states out, so nothing that is saved can be "
            "resumed from (and under SHARDED_STATE_DICT it writes nothing at all). Leave it False. For weights alone "
            "give the callback export_to=, or call trainer.save_model()."
        )
    if args.enable_jit_checkpoint:
        raise UsageError(
            "enable_jit_checkpoint=True lets each rank decide by itself when to save after a SIGTERM: where they do so "
            "at different steps, the collectives of a save meet those of the training, and the run crashes or hangs; "
            "and what it saves is not completed. "
            "FSDPCheckpointCallback does that for all ranks at the same step (on_signal=): leave it False."
        )
    if args.save_on_each_node:
        raise UnsupportedError(
            "save_on_each_node=True writes a part of each checkpoint on every node's own disk. Save to storage that "
            "all nodes share, and leave it False."
        )
    if trainer.accelerator.state.fsdp_plugin.state_dict_type.name == layout.LOCAL:
        raise UnsupportedError(
            "The state-dict type is LOCAL_STATE_DICT, which cannot be loaded again. Set "
            '"state_dict_type": "SHARDED_STATE_DICT" in fsdp_config.',
            expected=layout.SHARDED,
            actual=layout.LOCAL,
        )


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """Return what the meaning of a position depends on, and what the schedule does, JSON-able."""
    args = trainer.args
    return {
        "world_size": args.world_size,
        "train_batch_size": trainer._train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "num_examples": _count_examples(trainer),
        "drop_last": args.dataloader_drop_last,
        "max_steps": args.max_steps if args.max_steps > 0 else f"{args.num_train_epochs:g} epoch(s)",
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "warmup_steps": args.warmup_steps,
        "weight_decay": args.weight_decay,
    }


def _count_examples(trainer: Trainer) -> int | None:
    from torch.utils.data import IterableDataset

    if trainer.train_dataset is None or isinstance(trainer.train_dataset, IterableDataset):
        return None
    try:
        return len(trainer.train_dataset)
    except TypeError:
        return None


def count_skipped(trainer: Trainer) -> int:
    """Return how many batches of its epoch the Trainer takes for done after a load, computed as it does."""
    step, num_accumulated = int(trainer.state.global_step), int(trainer.args.gradient_accumulation_steps)
    try:
        num_updates = max(math.ceil(len(trainer.callback_handler.train_dataloader) / num_accumulated), 1)
    except TypeError:  # a stream: all updates are one epoch
        num_updates = int(trainer.state.max_steps)
    return step % num_updates * num_accumulated


def compare_runs(trainer: Trainer, manifest: Manifest) -> tuple[list[Difference], list[str]]:
    """Return what would shift the data, and what else is set differently today, in words."""
    saved = manifest.extra.get("trainer")
    if not isinstance(saved, Mapping):
        return [], []
    today = describe_run(trainer)
    shifts = [
        Difference("data", f"{label}: {saved.get(name)} at the save, {today[name]} now")
        for name, label in _OF_POSITION.items()
        if saved.get(name) != today[name]
    ]
    notes = [
        f"{label} was {saved.get(name)} at the save and is {today[name]} now, which the Trainer uses"
        for name, label in _OF_SCHEDULE.items()
        if saved.get(name) != today[name]
    ]
    return shifts, notes


def compare_models(trainer: Trainer, directory: Path, manifest: Manifest | None) -> list[Difference]:
    """Return how the model differs from the one that was saved, by names and shapes."""
    live = {tensor.fqn: tensor.shape for tensor in describe_model(trainer.model).tensors}
    if manifest is not None and manifest.models:
        saved = {tensor.fqn: tensor.shape for tensor in manifest.models[0].tensors}
    else:
        section = next((each for each in open_checkpoint(directory).sections if each.name.startswith("model")), None)
        if section is None or hasattr(trainer.model, "peft_config"):
            return []  # of an adapter the Trainer saves under other names than the model has
        saved = {name: tuple(tensor.shape) for name, tensor in section.tensors.items()}
        tied = {name for group in describe_model(trainer.model).ties if saved.keys() & set(group) for name in group}
        live = {name: shape for name, shape in live.items() if name in saved or name not in tied}
    differences = []
    for what, names in (
        ("are in the checkpoint and not in the model", sorted(saved.keys() - live.keys())),
        ("are in the model and not in the checkpoint", sorted(live.keys() - saved.keys())),
        ("have another shape", sorted(name for name in saved.keys() & live.keys() if saved[name] != live[name])),
    ):
        if names:
            shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
            differences.append(Difference("model", f"{len(names)} tensor(s) {what}: {shown}", fatal=True))
    return differences


def check_complete(directory: Path, world_size: int) -> list[str]:
    """Make sure that everything is there without which the Trainer would go on with something fresh, in silence.

    Returns:
        What is missing and only costs exactness, in words.

    Raises:
        CheckpointIncompleteError: the optimizer, the scheduler or the Trainer's own state is missing.
    """
    kind = layout.detect_state_dict_type(directory)
    needed = {
        "the weights": layout.get_model_path(directory, 0, kind),
        "the optimizer": layout.get_optimizer_path(directory, 0, kind),
        "the learning-rate scheduler": directory / SCHEDULER,
        "the Trainer's state": directory / TRAINER_STATE,
    }
    missing = [f"{what} ({path.name})" for what, path in needed.items() if not path.exists()]
    if missing:
        raise CheckpointIncompleteError(
            f"{directory} lacks {', '.join(missing)}. The Trainer would train on with fresh ones and say nothing. "
            "Resume from another checkpoint (latest_checkpoint(output_dir) names the newest whole one).",
            path=str(directory),
        )
    names = [f"rng_state_{rank}.pth" for rank in range(world_size)] if world_size > 1 else ["rng_state.pth"]
    lacking = [name for name in names if not (directory / name).is_file()]
    return [f"{', '.join(lacking)} is missing: those ranks draw other random numbers"] if lacking else []


def describe_kind(trainer: Trainer, directory: Path) -> tuple[str | None, str]:
    """Return the state-dict type of a checkpoint's files, and of this run."""
    return layout.detect_state_dict_type(directory), trainer.accelerator.state.fsdp_plugin.state_dict_type.name
