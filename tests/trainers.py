"""Runs of transformers' Trainer under FSDP on the CPU, for tests: what each rank trained on, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY, NUM_EXAMPLES, LENGTH = 101, 23, 8
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


@dataclass(frozen=True)
class Setup:
    """One run. 23 examples on 2 ranks with batches of 2 and accumulation 2 are 3 updates per epoch."""

    folder: str
    fsdp: int = 2
    state: str = SHARDED
    resume: Any = None
    with_callback: bool = True
    callback: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    draws: bool = True  # the dataset draws from the global generator, as the collator of a masked language model does
    lora: bool = False
    is_stream: bool = False
    stop_at: int | None = None
    saves_at_epochs: bool = False  # a callback of the user's, whatever `save_strategy` is
    num_examples: int = NUM_EXAMPLES
    hidden_size: int = 16
    with_optimizer: bool = True


@dataclass
class Outcome:
    """What one rank saw: per micro-batch the update, the examples and the loss; and what the run said of itself."""

    batches: list[tuple[int, list[int], float]] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)
    seen_at_save: list[list[str]] = field(default_factory=list)
    report: dict[str, Any] | None = None
    best: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    extra: Any = None

    def after(self, step: int) -> list[tuple[int, list[int], float]]:
        return [each for each in self.batches if each[0] >= step]


def make_model(setup: Setup) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setup.hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
        max_position_embeddings=32,
    )
    model: Any = LlamaForCausalLM(config)
    if setup.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.1))
    return model


def make_dataset(setup: Setup) -> Any:
    import torch

    class Examples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return setup.num_examples

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
            if setup.draws:
                ids = torch.where(torch.rand(LENGTH) < 0.3, torch.zeros_like(ids), ids)
            return {"input_ids": ids, "labels": ids.clone(), "index": index}

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            examples = Examples()
            return (examples[index] for index in range(len(examples)))

    return Stream() if setup.is_stream else Examples()


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}


def make_arguments(setup: Setup) -> Any:
    from transformers import TrainingArguments

    fsdp_config: dict[str, Any] = {
        "version": setup.fsdp,
        "state_dict_type": setup.state,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    if setup.fsdp == 1:
        fsdp_config |= {"use_orig_params": True, "sync_module_states": False}
    defaults: dict[str, Any] = {
        "output_dir": setup.folder,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "fsdp": "full_shard auto_wrap" if setup.fsdp == 1 else True,
        "fsdp_config": fsdp_config,
        "use_cpu": True,
        "learning_rate": 1e-2,
        "remove_unused_columns": False,
        "seed": 3,
    }
    return TrainingArguments(**{**defaults, **setup.arguments})


def make_trainer(setup: Setup, outcome: Outcome, *, callbacks: list[Any] | None = None) -> Any:
    """Return a Trainer that notes into `outcome`, with the callback under test."""
    from transformers import Trainer, TrainerCallback

    from accel_fsdp_tools import FSDPCheckpointCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            outcome.seen_at_save.append(list_checkpoints(setup.folder))
            if state.global_step == setup.stop_at:
                control.should_training_stop = True
            return control

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_save |= setup.saves_at_epochs
            return control

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "learning_rate" in logs:
                outcome.rates[state.global_step] = logs["learning_rate"]

    class Noting(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            examples = inputs.pop("index").tolist()
            loss = super().training_step(model, inputs, num_items_in_batch)
            outcome.batches.append((self.state.global_step, examples, loss.item()))
            return loss

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs.pop("index")
            return super().prediction_step(model, inputs, *args, **kwargs)

    model = make_model(setup)
    chosen = [FSDPCheckpointCallback(**setup.callback)] if setup.with_callback else []
    return Noting(
        model=model,
        args=make_arguments(setup),
        train_dataset=make_dataset(setup),
        eval_dataset=make_dataset(dataclasses.replace(setup, num_examples=5)),
        data_collator=collate,
        callbacks=[Watch(), *chosen, *(callbacks or [])],
    )


def find_callback(trainer: Any) -> Any:
    """Return the callback under test."""
    from accel_fsdp_tools import FSDPCheckpointCallback

    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, FSDPCheckpointCallback))


def train(setup: Setup) -> Outcome:
    """Train on this rank and return what it saw."""
    from accel_fsdp_tools import enable_cpu_fsdp
    from accel_fsdp_tools.live_fingerprints import fingerprint_model

    enable_cpu_fsdp()
    outcome = Outcome()
    trainer = make_trainer(setup, outcome)
    trainer.train(resume_from_checkpoint=setup.resume)
    if setup.with_callback:
        report = find_callback(trainer).report
        outcome.report = None if report is None else report.to_dict()
    outcome.best = trainer.state.best_model_checkpoint
    outcome.fingerprints = {name: str(each) for name, each in fingerprint_model(trainer.model).items()}
    return outcome


def list_checkpoints(folder: str | Path) -> list[str]:
    """Return the names of what looks like the Trainer's checkpoints."""
    return sorted(path.name for path in Path(folder).glob("*checkpoint-*"))
