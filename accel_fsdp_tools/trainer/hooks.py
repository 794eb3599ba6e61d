"""What is reached for in a Trainer beyond its events, and put in place on the object alone; no class is changed.

    train                the checkpoint to resume from is chosen and checked before anything is loaded
    _save_checkpoint     what an abandoned save left at the same place is moved away, and a failing rank stops all
    _load_rng_state      random state comes back at the right moment
    evaluate, predict    the watchdog waits longer
    save_model           under SHARDED_STATE_DICT, where the Trainer writes nothing, the model is exported

and, while `train` runs, two functions in transformers' module: `skip_first_batches`, which is answered with the loader
that stands at its place already, and `load_fsdp_optimizer`, which leaves some optimizers empty.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from .. import layout
from ..errors import UnsupportedError, UsageError
from ..running import EVALUATION
from .run import TrainingRun

if TYPE_CHECKING:
    from transformers import Trainer

_METHODS = ("train", "_save_checkpoint", "_load_rng_state", "save_model", "_get_output_dir", "evaluate", "predict")
_MARK = "_accel_fsdp_tools_callback"
_FUNCTIONS = ("skip_first_batches", "load_fsdp_optimizer")


class Owner(Protocol):
    """What the hooks serve: the callback."""

    run: TrainingRun | None

    def open_run(self) -> TrainingRun:
        """Return a new run for a call of `train`."""

    def export_into(self, directory: Path) -> None:
        """Write the model beside whatever is in a directory."""


def find_trainer(callback: object) -> Trainer | None:
    """Return the Trainer whose constructor is calling `callback` right now, None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        handler = getattr(candidate, "callback_handler", None)
        if handler is not None and any(each is callback for each in getattr(handler, "callbacks", ())):
            return candidate
        frame = frame.f_back
    return None


def install(trainer: Trainer, owner: Owner) -> None:
    """Put the hooks in place.

    Raises:
        UnsupportedError: this version of transformers has no such places.
        UsageError: another callback has put its hooks there.
    """
    import transformers

    if _MARK in trainer.__dict__:
        raise UsageError("This Trainer has a FSDPCheckpointCallback already; give it one, once.")
    missing = [name for name in _METHODS if not callable(getattr(trainer, name, None))]
    missing += [name for name in _FUNCTIONS if not hasattr(transformers.trainer, name)]
    if missing:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no {', '.join(missing)} in its Trainer, which "
            "FSDPCheckpointCallback needs. Install a version that README.md names.",
            actual=transformers.__version__,
        )
    trainer.__dict__[_MARK] = owner
    _wrap(trainer, "train", functools.partial(_train, owner))
    _wrap(trainer, "_save_checkpoint", functools.partial(_save_checkpoint, trainer, owner))
    _wrap(trainer, "_load_rng_state", functools.partial(_load_rng_state, owner))
    _wrap(trainer, "save_model", functools.partial(_save_model, trainer, owner))
    for name in ("evaluate", "predict"):
        _wrap(trainer, name, functools.partial(_evaluate, owner))


def _wrap(trainer: Trainer, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(trainer, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    trainer.__dict__[name] = method


def _train(owner: Owner, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kwargs = name_arguments(original, args, kwargs)
    run = owner.run = owner.open_run()
    error: BaseException | None = None
    try:
        path = run.open(kwargs.get("resume_from_checkpoint"), kwargs.get("trial"))
        kwargs["resume_from_checkpoint"] = None if path is None else str(path)
        with _functions_replaced(run), run.adapters_kept():
            return original(**kwargs)
    except BaseException as raised:
        error = raised
        raise
    finally:
        run.close(error)


def _evaluate(owner: Owner, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if owner.run is None:
        return original(*args, **kwargs)
    with owner.run.guard.phase(EVALUATION):
        return original(*args, **kwargs)


def name_arguments(train: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; where a derived Trainer has `train(self, *args, **kwargs)`, by HF's names."""
    import transformers

    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in inspect.signature(train).parameters.values() if each.kind in positional]
    if len(names) < len(args):
        names = list(inspect.signature(transformers.Trainer.train).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


@contextmanager
def _functions_replaced(run: TrainingRun) -> Iterator[None]:
    import transformers.trainer as module

    old = {name: getattr(module, name) for name in _FUNCTIONS}

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if run.is_finished():
            return []
        if run.skip_by_itself(dataloader, num_batches):
            return dataloader
        return old["skip_first_batches"](dataloader, num_batches)

    def load_optimizer(
        plugin: Any, accelerator: Any, optimizer: Any, model: Any, input_dir: Any, **kwargs: Any
    ) -> None:
        run.load_optimizer(Path(input_dir))

    for name, function in zip(_FUNCTIONS, (skip_first_batches, load_optimizer), strict=True):
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in old.items():
            setattr(module, name, function)


def _save_checkpoint(trainer: Trainer, owner: Owner, original: Callable[..., Any], model: Any, trial: Any) -> None:
    run = owner.run
    if run is None:
        original(model, trial)
        return
    directory = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
    run.write(directory.absolute(), lambda: original(model, trial))


def _load_rng_state(owner: Owner, original: Callable[..., Any], checkpoint: Any) -> None:
    if owner.run is None or not owner.run.restore_rng():
        original(checkpoint)


def _save_model(
    trainer: Trainer, owner: Owner, original: Callable[..., Any], output_dir: Any = None, _internal_call: bool = False
) -> None:
    kind = trainer.accelerator.state.fsdp_plugin.state_dict_type.name if trainer.is_fsdp_enabled else None
    if _internal_call or kind != layout.SHARDED:
        original(output_dir, _internal_call)
        return
    owner.export_into(Path(trainer.args.output_dir if output_dir is None else output_dir))
    if trainer.args.push_to_hub:  # as the Trainer does after a save of the user's
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)
