"""The calls into Accelerate, with its surprises neutralised and put back.

Accelerate's automatic naming would ignore the directory it is given and delete folders that it did not make; its
optimizer wrappers turn torch's dummy step into nothing in the middle of an accumulation, and move an fp16 loss
scale. During a delegated call naming is off and the raw optimizers are in place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import layout
from .host_copies import HostCopies, weigh_tensors
from .live import find_fsdp2_shards, get_raw_optimizer, is_fsdp
from .ranks import get_control_group, get_world_size

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

Write = Callable[[], None]
_OF_FSDP = ("pytorch_model_fsdp", "optimizer")
_SMALL_BYTES = 1 << 20  # of tensors in a file: writing so little at once costs less than keeping it for later


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
def sync_later(directory: Path) -> Iterator[None]:
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
def failures_come_last() -> Iterator[None]:
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


@contextlib.contextmanager
def _write_later(copies: HostCopies, later: list[Write], *, is_gathered: bool) -> Iterator[None]:
    """Copy what Accelerate hands to its writers, and put the calls off; nothing else changes, so neither do the files.

    Files with few or no tensors, and those with objects that only a pickle can hold, are written at once.

    Args:
        is_gathered: FSDP makes the tensors of models and optimizers anew for each state dict, unless they are live.
    """
    import accelerate.utils.other as upstream
    import torch
    import torch.distributed.checkpoint as dcp

    save_file, save_safely, save_sharded = torch.save, upstream.safe_save_file, dcp.save
    failures: list[Exception] = []  # as in `failures_come_last`: a rank without memory must not leave the others alone

    def keep(write: Callable[..., Any], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        is_of_fsdp = is_gathered and (write is save_sharded or name.startswith(_OF_FSDP))
        try:
            staged = copies.copy_tree((name, len(later)), value, is_gathered=is_of_fsdp)
        except Exception as error:
            failures.append(error)
        else:
            later.append(partial(_save_sharded if write is save_sharded else write, staged, *args, **kwargs))

    def is_for_later(value: Any, target: Any) -> bool:
        return isinstance(target, (str, os.PathLike)) and (weigh_tensors(value) or 0) >= _SMALL_BYTES

    def keep_file(value: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if is_for_later(value, f):
            keep(save_file, Path(f).name, value, f, *args, **kwargs)
        else:
            now(value, f, *args, **kwargs)

    def keep_safe_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        if is_for_later(tensors, filename):
            keep(save_safely, Path(filename).name, dict(tensors), filename, *args, **kwargs)
        else:
            save_safely(tensors, filename, *args, **kwargs)

    def keep_sharded(state_dict: dict[str, Any], **kwargs: Any) -> None:
        keep(save_sharded, "sharded", state_dict, save_sharded, **kwargs)

    with failures_come_last():
        now = torch.save
        with (
            _attributes(torch, save=keep_file),
            _attributes(upstream, safe_save_file=keep_safe_file),
            _attributes(dcp, save=keep_sharded),
        ):
            yield
    if failures:
        raise failures[0]


def _save_sharded(state_dict: dict[str, Any], save: Callable[..., Any], **kwargs: Any) -> None:
    """Call `dcp.save` over the group of the thread that this runs on: the default group is that of the training."""
    save(state_dict, process_group=get_control_group() if get_world_size() > 1 else None, **kwargs)


def make_directories(accelerator: Accelerator, directory: Path) -> None:
    """Make the directories into which Accelerate will write. By rank 0, where its failure is told to all.

    Accelerate lets each rank make them between two collectives: one that cannot would leave the others waiting there.
    """
    kind = accelerator.state.fsdp_plugin.state_dict_type.name if is_fsdp(accelerator) else None
    if kind == layout.SHARDED:
        for index in range(len(accelerator._models)):
            layout.get_model_path(directory, index, kind).parent.mkdir()
        for index in range(len(accelerator._optimizers)):
            layout.get_optimizer_path(directory, index, kind).parent.mkdir()


def save_with_accelerate(accelerator: Accelerator, directory: Path) -> None:
    """Let Accelerate write into `directory`. Collective. The optimizers' state is as before afterwards.

    What it has written is not durable yet: the caller syncs every file.
    """
    with failures_come_last():
        _save(accelerator, directory)


def copy_with_accelerate(accelerator: Accelerator, directory: Path, copies: HostCopies) -> list[Write]:
    """Let Accelerate gather what it would write into `directory`, and copy that to host memory.

    Collective. The optimizers' state is as before afterwards. Small files are written at once.

    Returns:
        The calls that write the rest, from the copies, in the same order on every rank. Each may be collective (over
        the channel of its thread), so a rank makes all of them whatever happens. Nothing is durable afterwards.
    """
    later: list[Write] = []
    plugin = accelerator.state.fsdp_plugin if is_fsdp(accelerator) else None
    is_gathered = plugin is not None and (plugin.fsdp_version == 1 or plugin.state_dict_type.name == layout.FULL)
    with _write_later(copies, later, is_gathered=is_gathered):
        _save(accelerator, directory)
    return later


def iterate_live(accelerator: Accelerator) -> Iterator[torch.Tensor]:
    """Yield the memory that training goes on with: of parameters, buffers, optimizers. Not collective."""
    for model in accelerator._models:
        for module in model.modules():
            held = [*module._parameters.values(), *module._buffers.values()]
            handle = vars(module).get("_handle")  # of FSDP1
            flat = getattr(handle, "flat_param", None)
            held += [flat, *(getattr(flat, name, None) for name in ("_local_shard", "_full_param_padded"))]
            yield from _iterate_plain(held)
        yield from _iterate_plain(find_fsdp2_shards(model).values())
    for optimizer in map(get_raw_optimizer, accelerator._optimizers):
        for state in (*optimizer.state.values(), *optimizer.param_groups):
            yield from _iterate_plain(state.values())


def _iterate_plain(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    import torch

    for value in values:
        local = getattr(value, "_local_tensor", value)
        if isinstance(local, torch.Tensor) and not local.is_meta:
            yield local


def _save(accelerator: Accelerator, directory: Path) -> None:
    raw = [get_raw_optimizer(optimizer) for optimizer in accelerator._optimizers]
    with contextlib.ExitStack() as stack:
        stack.enter_context(neutral_naming(accelerator))
        stack.enter_context(sync_later(directory))
        if is_fsdp(accelerator):
            stack.enter_context(_attributes(accelerator, _optimizers=raw))
            stack.enter_context(_stateless_stay_stateless(raw))
        accelerator.save_state(str(directory))


def write_all(writes: list[Write]) -> None:
    """Make the calls that `copy_with_accelerate` has put off; a rank that fails goes on and raises at the end."""
    failures: list[Exception] = []
    for write in writes:
        try:
            write()
        except Exception as error:  # a full disk has as many classes as there are writers
            failures.append(error)
    if failures:
        raise failures[0]


def load_with_accelerate(accelerator: Accelerator, directory: Path, *, optimizers: bool, models: bool = True) -> None:
    """Let Accelerate load from `directory`, all but `optimizers` or `models` where the caller does it. Collective."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(neutral_naming(accelerator))
        if not optimizers:
            stack.enter_context(_attributes(accelerator, _optimizers=[]))
        if not models:
            stack.enter_context(_attributes(accelerator, _models=[]))
        accelerator.load_state(str(directory))
