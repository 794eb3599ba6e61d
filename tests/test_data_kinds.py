"""Every kind of data under real FSDP training: stopped, resumed in new processes, and bit for bit the same.

`test_progress.py` compares what the loaders hand out at every possible moment. Here a model trains on it, and the ids
of each rank, every loss and learning rate, parameters and optimizer are compared with the run that never stopped.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import collect, run_ranks, start_ranks
from tests.loader_kinds import KINDS as SAMPLED
from tests.loader_kinds import seed_everything
from tests.stream_kinds import KINDS as OTHERS
from tests.training import digest_model, digest_optimizer

# A stop in the middle of the second epoch, and one with its last batch in hand.
POINTS = ("middle", "end")
# Left out: loops that break, which have no batch at the end of an epoch; noise of another width than the model's
# input; ranks with unequal numbers of batches, which FSDP cannot train on.
LEFT_OUT = {"breaks", "breaks_seedable", "own_noise", "uneven_count", "uneven_torch_synchronised"}
# Batches in a pass, which a stream does not say.
LENGTHS = {"stream_shuffled_dispatched": 4, "stream_stateful_own": 4, "hf_interleaved_dispatched": 6,
           "hf_shuffled_dispatched": 4, "stateful_hf_own": 4}  # fmt: skip
KINDS = SAMPLED | {name: OTHERS[name] for name in ("dispatch", "stateful", *LENGTHS)}
if importlib.util.find_spec("torchdata") is None:
    KINDS = {name: kind for name, kind in KINDS.items() if not name.startswith("stateful")}
NAMES = [name for name in KINDS if name not in LEFT_OUT]


@dataclass
class Trace:
    """What a rank saw of one kind: id lists, losses and rates by batch number, and how it ended."""

    ids: list[tuple[int, list[int]]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    rates: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    model: str = ""
    optimizer: str = ""
    exact: bool = True
    report: str = ""


def _build(name: str, seed: int) -> tuple[Any, ...]:
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin

    from accel_fsdp_tools import enable_cpu_fsdp

    enable_cpu_fsdp()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    kind = KINDS[name]
    settings = dict(kind.config)
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"),
        rng_types=settings.pop("rng_types", None),
        dataloader_config=DataLoaderConfiguration(**settings),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 7), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(7, 1)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    seed_everything(seed + 100 * accelerator.process_index)
    loaders = [kind.make(seed)] + ([kind.make_eval(seed)] if kind.make_eval else [])
    model, optimizer, scheduler, *loaders = accelerator.prepare(model, optimizer, scheduler, *loaders)
    return accelerator, model, optimizer, scheduler, loaders


def _features(batch: Any) -> tuple[list[int], Any]:
    import torch

    values = batch.to(torch.float32).reshape(len(batch), -1)
    return [int(value) for value in values[:, 0]], torch.stack([values[:, 0] / 23, values.sum(1) / 100], dim=1)


def _train(name: str, root: Path, seed: int, point: str | None, *, save: bool) -> Trace:
    """Train one kind; `point` is where to resume from, `save` whether to save at both points on the way."""
    from accel_fsdp_tools import Checkpointer

    accelerator, model, optimizer, scheduler, loaders = _build(name, seed)
    trace = Trace()
    folder = root / name
    with Checkpointer(accelerator, folder, keep_last=None, train_dataloader=loaders[0]) as checkpointer:
        names = {path.name: path for path in sorted(folder.iterdir())} if folder.exists() else {}
        steps = [path for label, path in names.items() if label.startswith("step_")]
        position = checkpointer.resume(steps[0 if point == "middle" else -1] if point else None, fresh=point is None)
        if position.report is not None:
            trace.exact, trace.report = position.report.exact, str(position.report)
        length = len(loaders[0]) if name not in LENGTHS else LENGTHS[name]
        middle = max(1, length // 2)
        for epoch in range(position.epoch, KINDS[name].num_epochs):
            number = position.batch if epoch == position.epoch else 0
            for batch in loaders[0]:
                number += 1
                ids, inputs = _features(batch)
                with accelerator.accumulate(model):
                    loss = (model(inputs) - inputs[:, :1]).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                trace.ids.append((epoch, ids))
                trace.losses.append(loss.item().hex())
                trace.rates.append(scheduler.get_last_lr()[0].hex())
                checkpointer.step(loss=loss)
                if len(loaders) > 1 and number == 1:
                    trace.ids.extend((-1, _features(extra)[0]) for extra in loaders[1])
                if save and epoch == 1 and number in {middle, length}:
                    checkpointer.save()
            trace.ends.append(epoch)
    trace.model, trace.optimizer = digest_model(model), digest_optimizer(optimizer)
    return trace


def _train_all(root: str, *, seed: int, point: str | None = None, save: bool = False, kill: bool = False) -> Any:
    traces = {name: _train(name, Path(root), seed, point, save=save) for name in NAMES}
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return traces


def test_every_kind_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = run_ranks(_train_all, str(tmp_path / "whole"), seed=1, folder=tmp_path / "r0")
    root = str(tmp_path / "killed")
    outcomes = collect(
        start_ranks(_train_all, root, seed=1, save=True, kill=True, folder=tmp_path / "r1"), folder=tmp_path / "r1"
    )
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
    for turn, point in enumerate(POINTS):
        resumed = run_ranks(_train_all, root, seed=50 + turn, point=point, folder=tmp_path / f"r{turn + 2}")
        for rank in range(2):
            for name in NAMES:
                _compare(whole[rank][name], resumed[rank][name], f"{name}, {point}, rank {rank}")


def _compare(whole: Trace, part: Trace, where: str) -> None:
    assert part.exact, f"{where}:\n{part.report}"
    assert part.ends == whole.ends[-len(part.ends) :], f"{where}: the code after an epoch"
    assert 1 in part.ends, f"{where}: the second epoch's end has to run"
    for attribute in ("ids", "losses", "rates"):
        values, expected = getattr(part, attribute), getattr(whole, attribute)
        assert values == expected[len(expected) - len(values) :], f"{where}: {attribute}"
    assert len(part.losses) < len(whole.losses), f"{where}: nothing was skipped"
    assert (part.model, part.optimizer) == (whole.model, whole.optimizer), where
