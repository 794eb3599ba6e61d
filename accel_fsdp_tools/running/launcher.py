"""torchrun's agent, which has started this process and may start it again (`accelerate launch` runs one, too).

Two things about it that a run has to know:

- It starts all ranks anew whatever exit code one ends with, as long as it has restarts left: also those that have saved
  because the machine is about to be taken away, or is broken. Only a signal to the agent itself prevents that.
- In torch 2.13 the ranks of a restart use the store that the ranks before them have used, and find the addresses of
  these there: they connect to nobody and hang, or end after some seconds, restart after restart. With
  `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` and the c10d rendezvous every restart gets a store of its own.
"""

from __future__ import annotations

import logging
import os
import signal

import psutil

logger = logging.getLogger(__name__)

AGENT_NAME = "pt_elastic"  # torch names the agent's main thread so
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def end_agent() -> None:
    """Let the agent of this node end its ranks instead of starting them anew. Not collective; done by local rank 0.

    Every rank has to be on its way out already: the agent sends all of them a SIGTERM.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" or _count_restarts_left() == 0:
        return
    for process in psutil.Process().parents():
        try:
            if process.name() == AGENT_NAME:
                process.send_signal(signal.SIGTERM)
                return
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    logger.warning("The launcher was not found: it may start this run again at once, where it should end.")


def explain_broken_restarts() -> str:
    """Say why the launcher's restarts will not work, and what to do; empty if it has none left, or they will."""
    if _count_restarts_left() == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "The launcher will not be able to restart the ranks in place (--max_restarts): those of a restart would use "
        "the store of the ranks before them and hang, or fail again and again. Start the launcher with "
        f"{OWN_STORE}=1 in its environment and the c10d rendezvous: --rdzv_backend c10d, or on one machine "
        "PET_STANDALONE=1 (docs/restarts.md)."
    )


def _count_restarts_left() -> int:
    allowed, made = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return max(int(allowed) - int(made), 0) if allowed.isdecimal() and made.isdecimal() else 0
