"""The small files that make weights a Hugging Face directory: config, generation config, tokenizer, remote code.

Written into every checkpoint, by transformers' own `save_pretrained` of each, so that an export months later needs
nothing else than the checkpoint. The config keeps the dtype that the run was configured with; an export states that
of the tensors it writes.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .live import get_class_name, unwrap_module

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

_last: tuple[Any, dict[str, bytes]] = (None, {})  # the tokenizer saved last, and its files


def check_tokenizer(tokenizer: Any) -> None:
    """Make sure that `tokenizer` (or processor) can be saved. Not collective.

    Raises:
        UsageError: it has no `save_pretrained`.
    """
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise UsageError(
            f"tokenizer is a {type(tokenizer).__name__}, which has no save_pretrained. Give the tokenizer or processor "
            "object itself, as AutoTokenizer.from_pretrained returns it.",
            actual=type(tokenizer).__name__,
        )


def write_assets(accelerator: Accelerator, directory: Path, *, tokenizer: Any = None) -> list[str]:
    """Write the small files of every prepared model into `directory/model_<index>`. Called by the main process only.

    A config that transformers refuses to save (it validates them) is no reason to lose a checkpoint: it is left out.

    Args:
        directory: made if there is anything to write.
        tokenizer: tokenizer or processor, saved beside each config; its files are remembered between saves.

    Returns:
        What was left out and why, in words; empty if nothing was.
    """
    problems = [
        f"the {name} of model {index} cannot be saved ({reason})"
        for index, model in enumerate(accelerator._models)
        for name, reason in write_model_assets(model, directory / f"model_{index}", tokenizer=tokenizer).items()
    ]
    for problem in problems:
        logger.warning("%s; an export of this checkpoint will ask for it with --model", problem)
    return problems


def write_model_assets(model: torch.nn.Module, target: Path, *, tokenizer: Any = None) -> dict[str, str]:
    """Write the small files of one prepared model into `target`. Not collective.

    Returns:
        What could not be saved ("config", "tokenizer") and why.
    """
    module = unwrap_module(model)
    parts: dict[str, Callable[[], None]] = {"config": partial(_write_config, module, target)}
    if tokenizer is not None:
        parts["tokenizer"] = partial(_write_tokenizer, tokenizer, target)
    problems: dict[str, str] = {}
    for name, write in parts.items():
        try:
            write()
        except (ValueError, TypeError, AttributeError, OSError, KeyError, NotImplementedError) as error:
            problems[name] = f"{type(error).__name__}: {error}"
    return problems


def _write_config(module: torch.nn.Module, target: Path) -> None:
    base = module.get_base_model() if hasattr(module, "peft_config") and hasattr(module, "get_base_model") else module
    config = getattr(base, "config", None)
    if config is None or not hasattr(config, "save_pretrained") or not hasattr(config, "to_diff_dict"):
        return
    target.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(config)
    if getattr(config, "dtype", None) is None:
        dtype = next((each.dtype for each in base.parameters() if each.is_floating_point()), None)
        config.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    config.architectures = [get_class_name(base)]
    if getattr(type(base), "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(base, target, config=config)
    config.save_pretrained(target)
    generation = getattr(base, "generation_config", None)
    if generation is not None and callable(getattr(base, "can_generate", None)) and base.can_generate():
        generation.save_pretrained(target)


def _write_tokenizer(tokenizer: Any, target: Path) -> None:
    global _last
    if _last[0] is not tokenizer:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            found = [path for path in Path(folder).rglob("*") if path.is_file()]
            _last = tokenizer, {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    for name, content in _last[1].items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
