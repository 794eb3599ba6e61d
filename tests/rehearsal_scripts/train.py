"""A small training that resumes exactly, or has one of the faults that `accel-fsdp rehearse` has to find.

python train.py [--fault NAME]
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

from accel_fsdp_tools import Checkpointer, enable_cpu_fsdp

NUM_SAMPLES, BATCH_SIZE, WIDTH = 26, 2, 6
FAULTS = (
    "reseeded",  # the script seeds again after the resume: dropout draws what it drew at the beginning
    "own-generator",  # noise from a generator that no checkpoint knows
    "skipped-twice",  # the script skips by itself what the loader skips already
    "skip-first-batches",  # the same with Accelerate's function, which the package refuses
    "unprepared-optimizer",  # refused by the package
    "second-optimizer",  # one that the package never gets to see
    "unprepared-loader",  # the script iterates a loader that nobody follows
    "save-changes-model",  # a hook that runs at every save
    "unprepared-scheduler",  # made after the Checkpointer, which would have refused it
    "own-schedule",  # learning rates from a counter of the script's own
    "unseeded-data",  # the dataset draws from a generator with a seed of the moment
    "stateful-data",  # the dataset draws from a seeded generator that begins anew
    "draws-after-save",  # an evaluation that follows the save draws random numbers
    "noisy-op",  # an operation that gives other results every time
    "never-resumes",
    "never-steps",
    "too-short",
    "crashes-after-resume",
    "no-checkpointer",
)


class Data(Dataset):
    def __init__(self, fault: str | None) -> None:
        self.rows = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
        self.generator = None
        if fault == "unseeded-data":
            self.generator = np.random.default_rng()
        elif fault == "stateful-data":
            self.generator = _Hidden(5)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        noise = 0.0 if self.generator is None else self.generator.random()
        return {"x": self.rows[index] + noise, "y": self.rows[index].sum()}


class _Hidden:
    """Random numbers without any state that could be found and saved."""

    def __init__(self, seed: int) -> None:
        def draw() -> Any:
            state = np.random.default_rng(seed)
            while True:
                yield state.random()

        numbers = draw()
        self.random = lambda: next(numbers)


class Model(torch.nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Dropout(0.2), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 1)
        self.fault = fault
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        if self.fault == "own-generator":
            hidden = hidden + 0.1 * torch.randn(hidden.shape, generator=self.generator)
        if self.fault == "noisy-op":  # as atomics on a GPU do, only more of it
            hidden = hidden * (1 + (time.perf_counter_ns() % 1000) * 1e-7)
        return (self.head(hidden).squeeze(-1) - y).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--root", default="runs/never_touched")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--elastic", default="refuse")
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--evaluate-every", type=int, metavar="N", help="after step(), drawing no random numbers")
    args = parser.parse_args()
    fault = args.fault
    enable_cpu_fsdp()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(1)
    model = Model(fault)
    if fault == "second-optimizer":
        optimizer = torch.optim.AdamW(model.body.parameters(), lr=1e-2)
        other = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    else:
        optimizer, other = torch.optim.AdamW(model.parameters(), lr=1e-2), None
    seeded = torch.Generator().manual_seed(2)
    loader = DataLoader(Data(fault), batch_size=args.batch_size, shuffle=True, generator=seeded, drop_last=True)
    decay = lambda step: 0.9**step  # noqa: E731
    if fault == "unprepared-optimizer":
        model, loader = accelerator.prepare(model, loader)
        scheduler = None
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        scheduler = None
        if fault not in ("unprepared-scheduler", "own-schedule"):
            scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, decay))
    evaluate_every = 3 if fault == "draws-after-save" else args.evaluate_every
    if evaluate_every is not None:
        own = None if fault == "draws-after-save" else torch.Generator()
        evaluation = accelerator.prepare(DataLoader(Data(None), batch_size=4, generator=own))
    if fault == "unprepared-loader":
        loader = DataLoader(Data(fault), batch_size=args.batch_size, drop_last=True)
    if fault == "save-changes-model":
        accelerator.register_save_state_pre_hook(lambda *_: model.head.bias.data.add_(1e-3))
    model.train()
    if fault == "no-checkpointer":
        return
    with Checkpointer(
        accelerator, args.root, save_every=100, elastic=args.elastic, async_save=args.async_save
    ) as checkpointer:
        if fault == "unprepared-scheduler":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, decay)
        position = checkpointer.resume(fresh=fault == "never-resumes")
        if fault == "never-steps":
            return
        if fault == "crashes-after-resume" and not position.fresh:
            raise ValueError("the file of the vocabulary is gone")
        num_updates = 0
        is_first = True
        for _ in range(position.epoch, args.epochs):
            batches: Any = loader
            if fault == "skipped-twice" and is_first:
                batches = itertools.islice(loader, position.batch, None)
            if fault == "skip-first-batches" and is_first and position.batch:
                batches = skip_first_batches(loader, position.batch)
            for batch in batches:
                if fault == "too-short" and num_updates == 6:
                    return
                if fault == "reseeded" and is_first:
                    set_seed(1)
                is_first = False
                with accelerator.accumulate(model):
                    loss = model(**batch)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    if fault == "own-schedule":
                        for group in optimizer.param_groups:
                            group["lr"] = 1e-2 * decay(num_updates)
                    optimizer.step()
                    if other is not None:
                        other.step()
                        other.zero_grad()
                    if scheduler is not None:
                        scheduler.step()
                    optimizer.zero_grad()
                num_updates += 1
                checkpointer.step(loss=loss)
                if evaluate_every is not None and checkpointer.num_steps % evaluate_every == 0:
                    model.eval()
                    with torch.no_grad():
                        for batch in evaluation:
                            model(**batch)
                    model.train()


if __name__ == "__main__":
    main()
