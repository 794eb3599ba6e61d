"""`accel-fsdp verify PATH`: is a checkpoint on disk whole and undamaged?"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from .exits import DIFFERENCE, GOOD
from .parsing import parse_count

NAME = "verify"
HELP = "check that a checkpoint is whole, undamaged, consistent and harmless to load"
DESCRIPTION = (
    "Check a checkpoint on disk: files, sizes and checksums, the CRCs inside torch's files, that every tensor is there "
    "exactly once, that model and optimizer belong together, and that no pickle could run code. Works without a GPU "
    "and on checkpoints of plain Accelerate, the Trainer and torch, too. Nothing is loaded, executed or written."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint's directory, or a file of one")
    parser.add_argument("--scan", action="store_true", help="also look for NaN, infinity and all-zero tensors (hints)")
    parser.add_argument(
        "--fingerprints",
        action="store_true",
        help="also compare every tensor with the fingerprint taken from memory at the save",
    )
    parser.add_argument(
        "--no-crc", action="store_true", help="leave out the CRCs inside torch's files: checksums of a manifest only"
    )
    parser.add_argument(
        "--allow-object",
        metavar="NAME",
        action="append",
        default=[],
        help="a class that registered objects may consist of (full dotted name; repeatable)",
    )
    parser.add_argument("--threads", metavar="N", type=parse_count, default=2, help="files read at once (default 2)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="print failures only, and nothing if there are none")


def run(arguments: argparse.Namespace) -> int:
    """Verify, print, and return 0 if the checkpoint is as it was saved, 3 if not."""
    from ..verify import verify_checkpoint
    from .progress import ByteProgress
    from .tables import format_report

    is_silent = arguments.quiet or arguments.json
    with contextlib.nullcontext() if is_silent else ByteProgress(sys.stderr, "verify") as progress:
        report = verify_checkpoint(
            arguments.path,
            scan=arguments.scan,
            fingerprints=arguments.fingerprints,
            crcs=not arguments.no_crc,
            allow_objects=arguments.allow_object,
            num_threads=arguments.threads,
            progress=progress,
        )
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1, default=str))
    elif not (arguments.quiet and report.ok):
        print(format_report(report, only_failures=arguments.quiet))
    return GOOD if report.ok else DIFFERENCE
