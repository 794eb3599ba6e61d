"""`accel-fsdp health RUN_DIR`: does a run make progress, and which rank is behind?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .exits import GOOD, STALE
from .parsing import parse_amount

if TYPE_CHECKING:
    from ..running.judging import RankHealth, RunHealth

NAME = "health"
HELP = "say whether a run makes progress: step, phase and silence of every rank; exit code 4 if not"
DESCRIPTION = (
    "Read the heartbeats that the ranks of a run write into its folder (the root of a Checkpointer, the output_dir of "
    "a Trainer), and say which rank is behind and since when. For people, and for liveness probes: the exit code is 0 "
    "while all ranks make progress and when the run is over, 4 when a rank is silent for too long. Needs neither torch "
    "nor a GPU."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("root", metavar="RUN_DIR", type=Path, help="the folder that holds the checkpoints")
    parser.add_argument(
        "--max-age", metavar="SECONDS", type=parse_amount, default=120.0, help="silence between steps (default 120)"
    )
    parser.add_argument(
        "--max-phase-age",
        metavar="SECONDS",
        type=parse_amount,
        default=1800.0,
        help="silence while loading, saving, evaluating, before the first step; the run's own hang_limits rule where "
        "it has any (default 1800)",
    )
    parser.add_argument(
        "--startup-grace",
        metavar="SECONDS",
        type=parse_amount,
        default=300.0,
        help="after the start of the container, and after a process has ended: it may be starting again (default 300)",
    )
    parser.add_argument("--this-host", action="store_true", help="judge only the ranks of this host, as a probe should")
    parser.add_argument(
        "--exit-as-run",
        action="store_true",
        help="end with the run's own exit code, which launchers hide: 0 finished, 75 preempted, 69 unhealthy, 1 else",
    )
    parser.add_argument("--json", action="store_true", help="print what is known as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Judge, print, and return 0 if nobody has to do anything, 4 if a rank makes no progress."""
    from ..running.judging import Tolerance, judge_run

    root = arguments.root.expanduser().absolute()
    tolerance = Tolerance(arguments.max_age, arguments.max_phase_age, arguments.startup_grace)
    health = judge_run(root, tolerance, this_host=arguments.this_host)
    if arguments.json:
        print(json.dumps({"root": str(root), **health.to_dict()}, indent=1))
    else:
        print(_format(root, health).encode(errors="backslashreplace").decode())  # a file's name may be no text
    if arguments.exit_as_run:
        return health.exit_code
    return GOOD if health.ok else STALE


def _format(root: Path, health: RunHealth) -> str:
    from .tables import align

    lines = [str(root)]
    if health.ranks:
        lines.append(f"run {health.run_id}, attempt {health.attempt}, {len(health.ranks)} rank(s)")
        lines += align(
            [("rank", "host", "process", "step", "phase", "state", "silent for", ""), *map(_row, health.ranks)]
        )
        notes: dict[str, list[int]] = {}
        for each in health.ranks:
            if each.beat and each.beat.note:
                notes.setdefault(each.beat.note, []).append(each.rank)
        lines += [f"rank(s) {', '.join(map(str, ranks))}: {note}" for note, ranks in notes.items()]
    if health.num_left_over:
        lines.append(f"{health.num_left_over} heartbeat(s) of an earlier run are left over and do not count")
    if health.uses_own_clock:
        lines.append("ages are by this host's clock: nothing can be written beside the heartbeats")
    return "\n".join([*lines, health.summary])


def _row(each: RankHealth) -> tuple[str, ...]:
    from .list import format_age

    beat = each.beat
    if beat is None:
        return (str(each.rank), "", "", "", "", "", "", each.verdict)
    age = "" if each.age_s is None else format_age(each.age_s)
    return (
        str(each.rank),
        beat.host,
        str(beat.process_id),
        str(beat.step),
        beat.phase,
        beat.state,
        age,
        each.verdict,
    )
