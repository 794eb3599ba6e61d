"""Exact, proven and durable checkpoints for the Trainer of transformers: `FSDPCheckpointCallback`.

`callback` is what users add; `hooks` reaches into the Trainer where its events don't suffice; `run` holds what one call
of `train` knows; `choosing`, `contract`, `loading` and `saving` are the parts of that.
"""

from .callback import FSDPCheckpointCallback

__all__ = ["FSDPCheckpointCallback"]
