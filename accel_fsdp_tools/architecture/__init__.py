"""What an export must know about a model: which tensors `save_pretrained` writes, in which order, made of what.

Plain facts and their JSON, without torch. `describing` works them out.
"""

from __future__ import annotations

from .facts import AdapterFacts, ArchitectureFacts, PeftFacts, TieFacts
from .moves import Axis, Move
from .outputs import OutputFacts

__all__ = ["AdapterFacts", "ArchitectureFacts", "Axis", "Move", "OutputFacts", "PeftFacts", "TieFacts"]
