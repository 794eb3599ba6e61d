"""`accel-fsdp rehearse -- accelerate launch train.py`: does this script resume exactly?"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from .exits import DIFFERENCE, FAILED, GOOD

NAME = "rehearse"
HELP = "run your own script without a break, then killed and resumed, and say whether it resumes exactly"
DESCRIPTION = (
    "Run a script that uses Checkpointer or FSDPCheckpointCallback, unchanged, in a folder of its own: once straight "
    "through, once killed and resumed. Compare batches, random generators, learning rate, loss, gradients, parameters "
    "and optimizer at every step, and name the first thing that differs and its likely cause. The script's own "
    "checkpoints are not touched. Exit code 3 if the resume is not exact."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--steps", metavar="N", type=_parse_count, default=12, help="updates of a run (default 12)")
    parser.add_argument(
        "--kill-at", metavar="N", type=_parse_count, default=5, help="the update after which it is killed (default 5)"
    )
    parser.add_argument(
        "--save-at",
        metavar="N",
        type=_parse_count,
        help="the update after which it saves, besides its own saves (default: two before the kill)",
    )
    parser.add_argument("--kill-rank", metavar="RANK", type=_parse_rank, help="the rank to kill (default: all)")
    parser.add_argument(
        "--elastic", metavar="N:M", help="run on N processes and resume on M; what must be the same then is compared"
    )
    parser.add_argument(
        "--elastic-args",
        metavar="ARGS",
        type=shlex.split,
        default=[],
        help='arguments added to the script\'s own where it resumes on M processes ("--accumulate 2")',
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        default=0.01,
        help="with --elastic: how far losses may be apart, relatively (default 0.01)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=1800.0,
        help="of each of the three or four runs (default 1800)",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots of both runs")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--dir",
        metavar="DIR",
        type=Path,
        help="a new folder for checkpoints, records and logs, on storage that all nodes share (default: temporary)",
    )
    parser.add_argument("--keep", action="store_true", help="keep everything; otherwise checkpoints go at the end")
    parser.add_argument(
        "command", metavar="-- COMMAND", nargs=argparse.REMAINDER, help="how you start the script, with its arguments"
    )


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give 1 or more")
    return int(text)


def _parse_rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no rank; give 0 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Rehearse, print, and return 0 if the resume is exact, 3 if not, 1 if no resume could be tried."""
    from ..rehearsal.page import write_page
    from ..rehearsal.plan import Plan
    from ..rehearsal.rehearse import rehearse
    from ..rehearsal.report import Verdict
    from .rehearsal_text import format_rehearsal

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    plan = Plan.make(
        command,
        steps=arguments.steps,
        kill_at=arguments.kill_at,
        save_at=arguments.save_at,
        kill_rank=arguments.kill_rank,
        elastic=arguments.elastic,
        elastic_args=arguments.elastic_args,
        tolerance=arguments.tolerance,
        timeout_s=arguments.timeout,
    )
    folder = _make_folder(arguments.dir)
    is_removed = False
    try:
        report = rehearse(plan, folder, lambda text: print(text, file=sys.stderr, flush=True))
        is_removed = report.ok and arguments.dir is None and not arguments.keep
    finally:
        if is_removed:
            shutil.rmtree(folder)
        elif not arguments.keep:
            for checkpoints in folder.glob("*/checkpoints"):
                shutil.rmtree(checkpoints)
    if arguments.html is not None:
        write_page(report, arguments.html)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1, default=str))
    else:
        print(format_rehearsal(report, None if is_removed else folder))
    if report.ok:
        return GOOD
    return FAILED if report.verdict is Verdict.FAILED else DIFFERENCE


def _make_folder(given: Path | None) -> Path:
    from ..errors import UsageError

    if given is None:
        return Path(tempfile.mkdtemp(prefix="accel_fsdp_rehearsal_"))
    folder = given.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty; a rehearsal wants a folder of its own", path=str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
