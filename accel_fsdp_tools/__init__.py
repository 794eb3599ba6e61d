"""Complete, exact and durable checkpoints for Hugging Face Accelerate under FSDP.

The names below are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .background import PendingSave
    from .checkpointer import Checkpointer
    from .cpu_fsdp import enable_cpu_fsdp
    from .export import ExportReport, export_checkpoint
    from .export_live import export_model
    from .latest import latest_checkpoint
    from .load import load_state
    from .opening import open_checkpoint
    from .position import Position
    from .report import LoadReport
    from .running import HangLimits, Preempted, Unhealthy
    from .save import save_state
    from .tracking import track
    from .trainer import FSDPCheckpointCallback
    from .verify import verify_checkpoint
    from .verify_live import verify_model

__version__ = "0.1.0"

_HOMES = {
    "Checkpointer": "checkpointer",
    "ExportReport": "export",
    "FSDPCheckpointCallback": "trainer",
    "HangLimits": "running",
    "LoadReport": "report",
    "PendingSave": "background",
    "Position": "position",
    "Preempted": "running",
    "Unhealthy": "running",
    "enable_cpu_fsdp": "cpu_fsdp",
    "errors": "errors",
    "export_checkpoint": "export",
    "export_model": "export_live",
    "latest_checkpoint": "latest",
    "load_state": "load",
    "open_checkpoint": "opening",
    "save_state": "save",
    "track": "tracking",
    "verify_checkpoint": "verify",
    "verify_model": "verify_live",
}

__all__ = [
    "Checkpointer",
    "ExportReport",
    "FSDPCheckpointCallback",
    "HangLimits",
    "LoadReport",
    "PendingSave",
    "Position",
    "Preempted",
    "Unhealthy",
    "__version__",
    "enable_cpu_fsdp",
    "errors",
    "export_checkpoint",
    "export_model",
    "latest_checkpoint",
    "load_state",
    "open_checkpoint",
    "save_state",
    "track",
    "verify_checkpoint",
    "verify_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_HOMES[name]}", __name__)
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
