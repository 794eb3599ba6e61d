"""A small training with the Trainer that resumes exactly, or never resumes.

accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml trainer.py [--fault never-resumes] --output-dir runs/a
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from accel_fsdp_tools import FSDPCheckpointCallback, enable_cpu_fsdp, latest_checkpoint


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        ids = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        ids[int(torch.randint(0, 8, ()))] = 3  # a mask, drawn from the global generator
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=("never-resumes",))
    parser.add_argument("--output-dir", required=True)
    args = parser.parse_args()
    enable_cpu_fsdp()
    set_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, attention_dropout=0.2, **sizes))
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=9,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=[FSDPCheckpointCallback()])
    newest = None if args.fault else latest_checkpoint(args.output_dir)
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()
