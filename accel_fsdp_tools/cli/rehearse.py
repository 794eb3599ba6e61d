"""`accel-fsdp rehearse -- accelerate launch train.py`: does this script resume exactly?"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .exits import DIFFERENCE, FAILED, GOOD
from .parsing import parse_amount, parse_count, parse_index, parse_positive

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
    parser.add_argument("--steps", metavar="N", type=parse_count, default=12, help="updates of a run (default 12)")
    parser.add_argument(
        "--kill-at", metavar="N", type=parse_count, default=5, help="the update after which it is killed (default 5)"
    )
    parser.add_argument(
        "--save-at",
        metavar="N",
        type=parse_count,
        help="the update after which it saves, besides its own saves (default: two before the kill)",
    )
    parser.add_argument("--kill-rank", metavar="RANK", type=parse_index, help="the rank to kill (default: all)")
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
        type=parse_amount,
        default=0.01,
        help="with --elastic: how far losses may be apart, relatively (default 0.01)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=parse_positive,
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


def run(arguments: argparse.Namespace) -> int:
    """Rehearse, print, and return 0 if the resume is exact, 3 if not, 1 if no resume could be tried."""
    from ..errors import UsageError
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
    if arguments.html is not None:
        _check_page(arguments.html)
    folder = _make_folder(arguments.dir)
    try:
        with _ending_children():
            report = rehearse(plan, folder, _tell)
    except UsageError:  # nothing has run
        if arguments.dir is None:
            shutil.rmtree(folder)
        raise
    except BaseException:
        _tell(f"records and logs: {folder}")
        raise
    finally:
        if not arguments.keep:
            for checkpoints in folder.glob("*/checkpoints"):
                shutil.rmtree(checkpoints)
    is_removed = report.ok and arguments.dir is None and not arguments.keep
    if is_removed:
        shutil.rmtree(folder)
    try:
        if arguments.json:
            print(json.dumps(report.to_dict(), indent=1, default=str))
        else:
            print(format_rehearsal(report, None if is_removed else folder))
    finally:  # whoever reads the text may have seen enough
        if arguments.html is not None:
            write_page(report, arguments.html)
    if report.ok:
        return GOOD
    return FAILED if report.verdict is Verdict.FAILED else DIFFERENCE


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _ending_children() -> Iterator[None]:
    """Let a signal that ends this process end the script, too: it has a session of its own, and would go on."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    previous = {each: signal.signal(each, leave) for each in heard}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def _check_page(path: Path) -> None:
    """Find out before the runs whether the page can be written after them."""
    from ..errors import UsageError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"--html {path} cannot be written: {error.strerror}", path=str(path)) from error


def _make_folder(given: Path | None) -> Path:
    from ..errors import UsageError

    if given is None:
        return Path(tempfile.mkdtemp(prefix="accel_fsdp_rehearsal_"))
    folder = given.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty; a rehearsal wants a folder of its own", path=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--dir {folder} cannot be made: {error.strerror}", path=str(folder)) from error
    return folder
