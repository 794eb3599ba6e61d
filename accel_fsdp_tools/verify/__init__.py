"""Offline verification: whether a checkpoint on disk is whole, undamaged and consistent. No torch.

Loaded when first used: `python -m accel_fsdp_tools.verify --help` imports this package, and nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .offline import verify_checkpoint

__all__ = ["verify_checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "verify_checkpoint":
        from .offline import verify_checkpoint

        return verify_checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
