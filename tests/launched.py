"""A training as a script of its own: `python -m tests.launched SETTINGS`, for tests that look at exit codes."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Train, with a pause, a hang or a death where the settings say so."""
    from accel_fsdp_tools.running import signals
    from tests.training import Setup, train

    signals.REPEAT_S = settings.get("repeat_s", signals.REPEAT_S)
    signals.LAST_WORDS_S = settings.get("last_words_s", signals.LAST_WORDS_S)
    rank = int(os.environ["RANK"])

    def on_batch(checkpointer: Any, number: int) -> None:
        print(f"batch {number}", flush=True)
        time.sleep(settings.get("pause_s", 0.0))
        if settings.get("die") == [rank, number]:
            time.sleep(1.0)
            os._exit(7)
        if settings.get("stuck") == [rank, number]:
            print("stuck", flush=True)
            block()

    def on_point(checkpointer: Any, point: str) -> None:
        if point == settings.get("hold_at") and checkpointer.num_steps == settings["hold_step"]:
            print("holding", flush=True)
            time.sleep(60)

    setup = Setup(num_items=48, accumulation=2, num_epochs=2, save_every=settings.get("save_every", 100))
    train(settings["root"], setup, on_batch=on_batch, on_point=on_point)


def block() -> None:
    """Hang in C without the GIL, where no signal interrupts: as in a collective whose other end is gone."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
