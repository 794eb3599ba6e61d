"""What transformers and PEFT would write for a live model, worked out without its data.

As a program, `python -m accel_fsdp_tools.describing CONFIG_DIR`, the same from a config alone. Importing this imports
no torch; calling it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..architecture import ArchitectureFacts

if TYPE_CHECKING:
    import torch

    from ..manifest import ModelFacts

__all__ = ["describe_architecture", "record_architecture"]


def describe_architecture(model: torch.nn.Module) -> ArchitectureFacts:
    """Return what `save_pretrained` of the whole model would write, in terms of the names in a checkpoint.

    Works on models as they are: wrapped by FSDP1 (with or without original parameters), FSDP2, compiled, with
    adapters, on the meta device. Not collective. Memory: a few objects per module and tensor.

    Raises:
        UnsupportedError: transformers or PEFT cannot say what it would write for this model.
    """
    from .models import describe_model_architecture

    return describe_model_architecture(model)


def record_architecture(model: torch.nn.Module, facts: ModelFacts) -> Mapping[str, Any]:
    """Return the same as JSON for a manifest. Never raises: what cannot be described is recorded with the reason.

    Worked out once per model object (again when its tensors, ties or configs have changed), so that a save costs
    next to nothing. Not collective.

    Args:
        model: prepared.
        facts: what `live.describe_model` says about it.
    """
    from .models import record_model_architecture

    return record_model_architecture(model, facts)
