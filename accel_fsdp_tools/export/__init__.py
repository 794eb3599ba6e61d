"""Export: any checkpoint becomes the Hugging Face directory that `save_pretrained` would have written. No torch.

Loaded when first used: `python -m accel_fsdp_tools.export --help` imports this package, and nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .offline import export_checkpoint
    from .report import ExportReport

__all__ = ["ExportReport", "export_checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "export_checkpoint":
        from .offline import export_checkpoint

        return export_checkpoint
    if name == "ExportReport":
        from .report import ExportReport

        return ExportReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
