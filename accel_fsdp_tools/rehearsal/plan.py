"""What a rehearsal is to do, checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from .launching import parse_elastic, set_num_processes

DEFAULT_TIMEOUT_S = 1800.0
DEFAULT_TOLERANCE = 0.01


@dataclass(frozen=True)
class Plan:
    """See `Plan.make`."""

    command: tuple[str, ...]
    resume_command: tuple[str, ...]
    steps: int
    kill_at: int
    save_at: int
    kill_rank: int | None
    elastic: tuple[int, int] | None
    tolerance: float
    timeout_s: float

    @classmethod
    def make(
        cls,
        command: Sequence[str],
        *,
        steps: int,
        kill_at: int,
        save_at: int | None = None,
        kill_rank: int | None = None,
        elastic: str | None = None,
        elastic_args: Sequence[str] = (),
        tolerance: float = DEFAULT_TOLERANCE,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Plan:
        """Check what was asked for.

        Args:
            command: how the script is launched.
            steps: updates of a run without a break; it is ended then.
            kill_at: the update after which the run that is broken off is killed.
            save_at: the update after which it saves, in addition to the script's own saves. Two before the kill, so
                that updates are lost and made again.
            kill_rank: the rank that is killed; None kills all.
            elastic: "2:1" runs on two ranks and resumes on one.
            elastic_args: added to the script's arguments where it resumes on another number of ranks.
            tolerance: how far losses may be apart on another number of ranks, relative to the loss.
            timeout_s: of one run.

        Raises:
            UsageError: that cannot be done; says why.
        """
        if not command:
            raise UsageError("Say how the script is launched: accel-fsdp rehearse ... -- accelerate launch train.py")
        save_at = max(1, kill_at - 2) if save_at is None else save_at
        if not 1 <= save_at < kill_at < steps:
            raise UsageError(
                f"save at {save_at}, kill at {kill_at}, {steps} steps: the checkpoint has to come before the kill, and "
                "the kill before the end (1 <= --save-at < --kill-at < --steps)",
                actual=(save_at, kill_at, steps),
            )
        numbers = None if elastic is None else parse_elastic(elastic)
        if numbers is None and elastic_args:
            raise UsageError("--elastic-args is for --elastic, which was not given", actual=list(elastic_args))
        first, second = list(command), list(command)
        if numbers is not None:
            first = set_num_processes(command, numbers[0])
            second = [*set_num_processes(command, numbers[1]), *elastic_args]
        return cls(tuple(first), tuple(second), steps, kill_at, save_at, kill_rank, numbers, tolerance, timeout_s)
