"""A small but real training under FSDP on two ranks, which tests run straight through, kill, and resume.

Dropout, AdamW, warm-up and cosine, shuffling, gradient accumulation: everything whose state a resume needs.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 101
SEQUENCE = 8


@dataclass(frozen=True)
class Setup:
    """What to train and how; the same for the uninterrupted and the resumed run."""

    fsdp_version: int = 2
    state_dict_type: str = "SHARDED_STATE_DICT"
    use_orig_params: bool = True
    mixed_precision: str = "no"
    num_items: int = 37
    batch_size: int = 3
    accumulation: int = 2
    num_epochs: int = 3
    save_every: int = 2
    keep_last: int | None = 2
    unused_parameter: bool = False
    frozen: bool = False
    num_layers: int = 2
    seedable: bool = False
    dispatch: bool = False
    stateful: bool = False
    tie: bool = False
    optimizer: str = "AdamW"
    async_save: bool = False
    mesh: tuple[int, int, int] | None = None  # replicas, shards, tensor-parallel ranks (which hold replicas here)


@dataclass
class Log:
    """What one rank saw: per update a loss and a learning rate, the ids of every batch, digests at the end."""

    losses: dict[int, list[str]] = field(default_factory=dict)
    rates: dict[int, str] = field(default_factory=dict)
    ids: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    parameters: str = ""
    optimizer: str = ""
    position: Any = None
    saved: list[int] = field(default_factory=list)


class Items:
    """Token sequences that know their index, deterministic."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (SEQUENCE,), generator=generator)
        return {"id": index, "input_ids": tokens}


@dataclass
class Objects:
    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any


def build_accelerator(setup: Setup, *, wrap: list[str] | None = None) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    from accel_fsdp_tools import enable_cpu_fsdp
    from tests.models import LAYER_CLASS

    enable_cpu_fsdp()
    arguments: dict[str, Any] = {
        "fsdp_version": setup.fsdp_version,
        "state_dict_type": setup.state_dict_type,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": wrap or [LAYER_CLASS],
    }
    if setup.fsdp_version == 1:
        arguments |= {
            "sharding_strategy": "FULL_SHARD",
            "use_orig_params": setup.use_orig_params,
            "sync_module_states": False,
            "cpu_ram_efficient_loading": False,
        }
    parallelism = None
    if setup.mesh is not None:
        names = ("dp_replicate_size", "dp_shard_size", "tp_size")
        parallelism = ParallelismConfig(**dict(zip(names, setup.mesh, strict=True)))
    return Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**arguments),
        parallelism_config=parallelism,
        gradient_accumulation_steps=setup.accumulation,
        mixed_precision=setup.mixed_precision,
        dataloader_config=_dataloader_config(setup),
    )


def _dataloader_config(setup: Setup) -> Any:
    from accelerate.utils import DataLoaderConfiguration

    return DataLoaderConfiguration(
        use_seedable_sampler=setup.seedable,
        dispatch_batches=setup.dispatch or None,
        use_stateful_dataloader=setup.stateful,
    )


def build(setup: Setup, *, seed: int) -> Objects:
    """Prepare everything; the weights are the same for every seed, what is drawn later is not."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader
    from transformers import get_cosine_schedule_with_warmup

    from tests.models import build_tiny_llama

    accelerator = build_accelerator(setup)
    rank = accelerator.process_index
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = build_tiny_llama(vocab_size=VOCABULARY, num_layers=setup.num_layers, tie=setup.tie, attention_dropout=0.2)
    model.train()
    if setup.mesh is not None and setup.mesh[2] > 1:
        model._tp_size = setup.mesh[2]
    if setup.unused_parameter:
        with torch.random.fork_rng(devices=[]):
            model.unused = torch.nn.Linear(5, 3)
    if setup.frozen:
        model.model.layers[0].mlp.requires_grad_(False)
    if setup.fsdp_version == 1 and not setup.use_orig_params:
        # Flat parameters exist only after wrapping; an optimizer built before would hold what is no longer trained.
        model = accelerator.prepare(model)
    groups = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if setup.optimizer == "AdamW":
        optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.01)
    else:
        optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9 if setup.optimizer == "momentum" else 0.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 4, 60)
    loader = DataLoader(Items(setup.num_items), batch_size=setup.batch_size, shuffle=True)
    if accelerator._models:
        optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
    else:
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    torch.manual_seed(seed + 1000 * (rank + 1))  # dropout differs between the ranks
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    return Objects(accelerator, model, optimizer, scheduler, loader)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def digest_tensors(named: dict[str, Any]) -> str:
    """Return one number for the exact bytes of this rank's local tensors."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(named):
        value = _local(named[name])
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode() + data)
        else:
            digest.update(f"{name}={value!r}".encode())
    return digest.hexdigest()


def digest_model(model: Any) -> str:
    return digest_tensors({name: parameter.data for name, parameter in model.named_parameters()})


def digest_optimizer(optimizer: Any) -> str:
    raw = optimizer.optimizer
    named: dict[str, Any] = {}
    parameters = [parameter for group in raw.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in raw.state.get(parameter, {}).items():
            named[f"{index}.{name}"] = value
    for index, group in enumerate(raw.param_groups):
        for name, value in group.items():
            if name != "params":
                named[f"group{index}.{name}"] = value
    return digest_tensors(named)


def train_batch(objects: Objects, batch: Any) -> Any:
    """Forward, backward, and an update if the window is full; returns the loss."""
    output = objects.model(input_ids=batch["input_ids"], labels=batch["input_ids"])
    objects.accelerator.backward(output.loss)
    objects.optimizer.step()
    objects.scheduler.step()
    objects.optimizer.zero_grad()
    return output.loss.detach()


def train(
    root: str,
    setup: Setup,
    *,
    seed: int = 1,
    kill_at_step: int | None = None,
    kill_at_point: tuple[int, str] | None = None,
    stop_after_step: int | None = None,
    perturb: bool = False,
    options: dict[str, Any] | None = None,
    on_batch: Callable[[Any, int], None] | None = None,
    on_point: Callable[[Any, str], None] | None = None,
) -> Log:
    """Train with a `Checkpointer`, from the newest checkpoint of `root` if there is one.

    Args:
        kill_at_step: SIGKILL after this update, before anything else.
        kill_at_point: (update, phase): SIGKILL when the save after this update reaches the phase.
        perturb: spoil parameters and buffers before the resume, so that nothing can be right by accident.
        options: more arguments of the `Checkpointer`.
        on_batch: called with the `Checkpointer` and the number of the batch, counted in this process from 1.
        on_point: called with the `Checkpointer` at each point of a save.
    """
    import torch

    from accel_fsdp_tools import Checkpointer, phases

    objects = build(setup, seed=seed)
    accelerator = objects.accelerator
    if perturb:
        with torch.no_grad():
            for parameter in objects.model.parameters():
                _local(parameter.data).add_(0.5)
    log = Log()
    with Checkpointer(
        accelerator,
        root,
        save_every=setup.save_every,
        keep_last=setup.keep_last,
        async_save=setup.async_save,
        **(options or {}),
    ) as checkpointer:
        position = checkpointer.resume()
        log.position = position

        def observe(point: str) -> None:
            if kill_at_point == (checkpointer.num_steps, point):
                os.kill(os.getpid(), signal.SIGKILL)
            if on_point is not None:
                on_point(checkpointer, point)

        phases.set_observer(observe)
        for epoch in range(position.epoch, setup.num_epochs):
            for index, batch in enumerate(objects.loader):
                start = position.batch if epoch == position.epoch else 0
                log.ids[epoch, start + index] = batch["id"].tolist()
                if on_batch is not None:
                    on_batch(checkpointer, len(log.ids))
                with accelerator.accumulate(objects.model):
                    loss = train_batch(objects, batch)
                step = checkpointer.num_steps
                log.losses.setdefault(step, []).append(loss.item().hex())
                log.rates[step] = objects.scheduler.get_last_lr()[0].hex()
                saved = checkpointer.step(loss=loss)
                if saved is not None:
                    log.saved.append(checkpointer.num_steps)
                if kill_at_step == checkpointer.num_steps:
                    os.kill(os.getpid(), signal.SIGKILL)
                if stop_after_step == checkpointer.num_steps and accelerator.sync_gradients:
                    break
            else:
                continue
            break
        phases.set_observer(None)
    log.parameters = digest_model(objects.model)
    log.optimizer = digest_optimizer(objects.optimizer)
    return log


def assert_continues(reference: list[Log], resumed: list[Log]) -> None:
    """Require that every rank's resumed log is bit for bit the end of the uninterrupted one."""
    for rank, (whole, part) in enumerate(zip(reference, resumed, strict=True)):
        assert part.position is not None
        assert not part.position.fresh
        assert part.position.report.exact, str(part.position.report)
        assert part.ids, "the resumed run trained nothing"
        assert part.ids == {key: whole.ids[key] for key in part.ids}, f"rank {rank}: other samples"
        expected = {key for key in whole.ids if key >= (part.position.epoch, part.position.batch)}
        assert set(part.ids) == expected, f"rank {rank}: batches are missing or repeated"
        assert part.losses == {step: whole.losses[step] for step in part.losses}, f"rank {rank}: losses"
        assert part.rates == {step: whole.rates[step] for step in part.rates}, f"rank {rank}: learning rates"
        assert max(part.losses) == max(whole.losses)
        assert part.parameters == whole.parameters, f"rank {rank}: parameters"
        assert part.optimizer == whole.optimizer, f"rank {rank}: optimizer"


def read_root(root: Path) -> list[str]:
    """Return the names of the committed checkpoints."""
    return sorted(path.name for path in root.iterdir() if path.name.startswith("step_"))
