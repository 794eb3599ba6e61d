"""Offline verification: whether a checkpoint on disk is whole, undamaged and consistent. No torch."""

from .offline import verify_checkpoint

__all__ = ["verify_checkpoint"]
