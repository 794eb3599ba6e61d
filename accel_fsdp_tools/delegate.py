"""The calls into Accelerate, with its surprises neutralised and put back.

Accelerate's automatic naming would ignore the directory it is given and delete folders that it did not make; its
optimizer wrappers turn torch's dummy step into nothing in the middle of an accumulation, and move an fp16 loss
scale. During a delegated call naming is off and the raw optimizers are in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .live import get_raw_optimizer, is_fsdp

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextlib.contextmanager
def _attributes(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes for the duration of the context and put the old values back."""
    old = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(target, name, value)


@contextlib.contextmanager
def neutral_naming(accelerator: Accelerator) -> Iterator[None]:
    """Switch Accelerate's automatic naming, limit and counter off for a call."""
    configuration = accelerator.project_configuration
    with _attributes(
        configuration,
        automatic_checkpoint_naming=False,
        total_limit=None,
        iteration=configuration.iteration,
    ):
        yield


@contextlib.contextmanager
def _stateless_stay_stateless(optimizers: list[Any]) -> Iterator[None]:
    """Keep optimizers that have no state yet as they are.

    To learn the names of an empty optimizer's state torch takes a step with zero gradients (`_init_optim_state`,
    torch 2.13). The moments are zero, but the step count is 1 from then on: a run that saves before its first
    update would train differently from one that does not.
    """
    empty = [optimizer for optimizer in optimizers if not optimizer.state]
    try:
        yield
    finally:
        for optimizer in empty:
            optimizer.state.clear()


@contextlib.contextmanager
def _sync_later(directory: Path) -> Iterator[None]:
    """Keep DCP from waiting for the storage after each file that it writes below `directory`.

    The caller makes every file of the checkpoint durable before there is a manifest, all of them at once and with
    the checksums computed meanwhile. DCP's own syncs, the model's before the optimizer's is written, would only keep
    processor and storage waiting for each other in turns. Writers to other places are as before. Should Accelerate
    come to its writer in another way, nothing but the time saved is lost.
    """
    import torch.distributed.checkpoint as dcp

    original: Any = dcp.FileSystemWriter

    class Writer(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if Path(self.path).absolute().is_relative_to(directory):
                self.sync_files = False

    dcp.FileSystemWriter = Writer
    try:
        yield
    finally:
        dcp.FileSystemWriter = original


@contextlib.contextmanager
def _failures_come_last() -> Iterator[None]:
    """Let a rank whose file cannot be written take part in the collectives that follow, and fail at the end.

    Between two files Accelerate enters collectives (FSDP gathers the optimizer after rank 0 has written the model). A
    rank that left at the first failed write would leave the others waiting there until their time is up.
    """
    import torch

    original = torch.save
    failures: list[Exception] = []

    def save(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except (OSError, RuntimeError) as error:  # torch's own zip writer raises RuntimeError for a full disk
            failures.append(error)

    torch.save = save
    try:
        yield
    finally:
        torch.save = original
    if failures:
        raise failures[0]


def save_with_accelerate(accelerator: Accelerator, directory: Path) -> None:
    """Let Accelerate write into `directory`. Collective. The optimizers' state is as before afterwards.

    What it has written is not durable yet: the caller syncs every file.
    """
    raw = [get_raw_optimizer(optimizer) for optimizer in accelerator._optimizers]
    with contextlib.ExitStack() as stack:
        stack.enter_context(neutral_naming(accelerator))
        stack.enter_context(_failures_come_last())
        stack.enter_context(_sync_later(directory))
        if is_fsdp(accelerator):
            stack.enter_context(_attributes(accelerator, _optimizers=raw))
            stack.enter_context(_stateless_stay_stateless(raw))
        accelerator.save_state(str(directory))


def load_with_accelerate(accelerator: Accelerator, directory: Path, *, optimizers: bool) -> None:
    """Let Accelerate load from `directory`; without `optimizers` their states are left to the caller. Collective."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(neutral_naming(accelerator))
        if not optimizers:
            stack.enter_context(_attributes(accelerator, _optimizers=[]))
        accelerator.load_state(str(directory))
