"""What watches over a run: signals, the hang watchdog, heartbeats, health checks. No torch at import."""

from .exits import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNHEALTHY, Preempted, RunStopped, Unhealthy
from .guard import RunGuard, Stop, Watching
from .health import Health
from .signals import DEFAULT_SIGNALS
from .watchdog import ENDING, EVALUATION, EXPORTING, LOADING, SAVING, HangLimits

__all__ = [
    "DEFAULT_SIGNALS",
    "ENDING",
    "EVALUATION",
    "EXIT_PREEMPTED",
    "EXIT_SIGNAL",
    "EXIT_UNHEALTHY",
    "EXPORTING",
    "LOADING",
    "SAVING",
    "HangLimits",
    "Health",
    "Preempted",
    "RunGuard",
    "RunStopped",
    "Stop",
    "Unhealthy",
    "Watching",
]
