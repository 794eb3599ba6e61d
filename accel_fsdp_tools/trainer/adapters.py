"""PEFT's adapters under FSDP1, which Accelerate saves empty.

Of a PEFT model the Trainer saves the adapter alone. Under FSDP1 the state dict that PEFT picks it from has other names
than its modules, so nothing is picked: the checkpoint holds no adapter, and no error is raised (accelerate 1.15, peft
0.21). Here the trained parameters are picked by FSDP's own names. Under FSDP2 Accelerate's way is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointIncompleteError
from ..live import describe_model, unwrap_module
from ..names import clean_fqn, list_adapter_names
from ..opening import open_checkpoint

if TYPE_CHECKING:
    from transformers import Trainer

_MAX_NAMES = 3
ADAPTER_FILE = "adapter_model.safetensors"


def is_adapter_of_fsdp1(trainer: Trainer) -> bool:
    """Whether the Trainer's own saves of this model would be empty."""
    is_peft = hasattr(unwrap_module(trainer.model), "peft_config")
    return is_peft and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1


@contextmanager
def adapters_kept(trainer: Trainer) -> Iterator[None]:
    """Let Accelerate save and load the trained parameters of a PEFT model under FSDP1 for the time of a training."""
    import accelerate.utils.fsdp_utils as module

    get, load = module._get_model_state_dict, module._set_model_state_dict

    def get_model_state_dict(model: Any, adapter_only: bool = False, sd_options: Any = None) -> Any:
        if not (adapter_only and is_adapter_of_fsdp1(trainer)):
            return get(model, adapter_only=adapter_only, sd_options=sd_options)
        trained = {tensor.fqn for tensor in describe_model(model).tensors if tensor.requires_grad}
        return {name: value for name, value in model.state_dict().items() if clean_fqn(name) in trained}

    def set_model_state_dict(model: Any, state_dict: Any, adapter_only: bool = False, sd_options: Any = None) -> Any:
        if not (adapter_only and is_adapter_of_fsdp1(trainer)):
            return load(model, state_dict, adapter_only=adapter_only, sd_options=sd_options)
        return model.load_state_dict(state_dict, strict=False)

    module._get_model_state_dict, module._set_model_state_dict = get_model_state_dict, set_model_state_dict
    try:
        yield
    finally:
        module._get_model_state_dict, module._set_model_state_dict = get, load


def check_adapter(trainer: Trainer, directory: Path) -> None:
    """Make sure that a checkpoint of a PEFT model holds what was trained. Not collective: the main process asks.

    Raises:
        CheckpointIncompleteError: it does not (case P01).
    """
    module = unwrap_module(trainer.model)
    adapters = getattr(module, "peft_config", None)
    if not isinstance(adapters, dict):
        return
    section = next(each for each in open_checkpoint(directory).sections if each.name == "model")
    missing = []
    for tensor in describe_model(trainer.model).tensors:
        names = [tensor.fqn, *list_adapter_names(tensor.fqn, adapters)]
        if tensor.requires_grad and not any(name in section.tensors for name in names):
            missing.append(tensor.fqn)
    if missing:
        shown = ", ".join(missing[:_MAX_NAMES]) + (", ..." if len(missing) > _MAX_NAMES else "")
        raise CheckpointIncompleteError(
            f"{directory} lacks {len(missing)} trained tensor(s) of the adapter: {shown}. Saved like this the training "
            "would be lost. Update accelerate and peft, or train under FSDP2.",
            path=str(directory),
            fqn=missing[0],
        )
