"""`accel-fsdp supervise RUN_DIR -- accelerate launch ...`: a launcher that schedulers can signal, and understand."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parsing import parse_index

NAME = "supervise"
HELP = "run a launcher: signals reach the ranks, and the exit code is theirs"
DESCRIPTION = (
    "Run `accelerate launch` or torchrun under a scheduler. SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGQUIT and SIGHUP (not "
    "under nohup) reach the launcher as the SIGTERM that it passes on, so that the ranks save and end. The exit code "
    "is 0 when the training is over, 75 when it was stopped and everything is saved, 69 when a health check failed "
    "and everything is saved, and otherwise that of the launcher. On several nodes, one for each launcher. Sets "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which restarts in place (--max_restarts) need."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("root", metavar="RUN_DIR", type=Path, help="the folder that holds the checkpoints")
    parser.add_argument("command", metavar="COMMAND", nargs="+", help="the launcher and its arguments, after a --")
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=parse_index,
        help="how long the ranks may take to save, before the launcher kills them (default: torchrun's 30)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the launcher, and return the exit code of its ranks."""
    from ..running.supervising import supervise

    return supervise(arguments.command, arguments.root.expanduser().absolute(), grace_s=arguments.grace)
