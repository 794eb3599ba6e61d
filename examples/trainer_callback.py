"""The HF Trainer under FSDP, killed and started again with the same command, ending bit for bit as if never stopped.

    accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml examples/trainer_callback.py --output-dir runs/t

What this package adds are the lines marked (1) to (3) in `main`; the rest is an ordinary Trainer script. The model is
a tiny random Llama that reads bytes, the text what the Python standard library says about itself (finetune_lm.py).
`bash examples/trainer_demo.sh` runs it without interruption and with, and compares.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import faults
import torch
from finetune_lm import PROMPT, append_line, continue_text, make_dataset, make_tiny, save_evidence
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from accel_fsdp_tools import FSDPCheckpointCallback, enable_cpu_fsdp, latest_checkpoint

SAVE_EVERY = 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train under FSDP with the HF Trainer, with exact resume.")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/trainer"), help="where everything goes")
    parser.add_argument("--samples", type=int, default=47, help="pieces of text to train on")
    parser.add_argument("--hang-limit", type=float, help="seconds that a step may take before its rank gives up")
    faults.add_arguments(parser)
    args = parser.parse_args()
    faults.check_arguments(parser, args, SAVE_EVERY)
    return args


class Log(TrainerCallback):
    """Writes a line per step, and fails when told to."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self.options = path, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.fresh = state.global_step == 0
        if state.is_world_process_zero:
            append_line(self.path, event="start", step=state.global_step, fresh=state.global_step == 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        if state.is_world_process_zero:
            epoch, lr = int(state.epoch - 1e-9), logs["learning_rate"]
            append_line(self.path, epoch=epoch, step=state.global_step, loss=logs["loss"], lr=lr)
        if self.fresh:
            faults.kill_all(self.options, step=state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.fresh:
            faults.fail_one(self.options, step=state.global_step + 1)


def main() -> None:
    args = parse_args()
    if not torch.accelerator.is_available():
        enable_cpu_fsdp()  # real FSDP on CPU cores, for machines without a GPU
    checkpoints = args.output_dir / "checkpoints"
    args.output_dir.mkdir(parents=True, exist_ok=True)
    training_args = TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    set_seed(0)
    tokenizer, model = make_tiny(dropout=0.1)
    callback = FSDPCheckpointCallback(export_to=args.output_dir / "model", hang_limits=args.hang_limit)  # (1)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=make_dataset(tokenizer, args.samples, seq_length=64),
        processing_class=tokenizer,
        callbacks=[callback, Log(args.output_dir / "log.jsonl", args)],  # (2)
    )
    trainer.train(resume_from_checkpoint=latest_checkpoint(checkpoints))  # (3) None where there is none

    save_evidence(trainer.accelerator, trainer.model, trainer.optimizer, args.output_dir / "digests.json")
    tokens = continue_text(trainer.model, tokenizer, PROMPT)
    if trainer.is_world_process_zero():
        if callback.report is not None:
            print(callback.report)
        loaded = continue_text(AutoModelForCausalLM.from_pretrained(args.output_dir / "model"), tokenizer, PROMPT)
        verdict = "as the model in training does" if loaded == tokens else "UNLIKE the model in training"
        print(f"exported; loaded back, it writes, {verdict}: {tokenizer.decode(loaded)!r}")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
