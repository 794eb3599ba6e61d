"""`accel-fsdp`: finds the command, runs it, and turns what it raises into an exit code.

A command is a module of this package that is listed in `COMMANDS` and has

    NAME, HELP, DESCRIPTION           for `--help`
    add_arguments(parser)             its arguments
    run(arguments) -> int             an exit code; imports what it needs when it is called

argparse, because it starts in a tenth of the time of typer: `--help` and shell completion should not be felt.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from .. import __version__
from .exits import DIFFERENCE, FAILED, GOOD, INTERRUPTED, STALE, USAGE

COMMANDS = ("verify", "export", "list", "prune", "pin", "health", "supervise", "rehearse")

_EXITS = (
    f"exit codes: {GOOD} good, {FAILED} failed, {USAGE} usage, {DIFFERENCE} verification found a difference, "
    f"{STALE} a run makes no progress"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `accel-fsdp` and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Who names a command waits for that one alone; everything else is answered with all of them in view.
    chosen = [name for name in COMMANDS if [name] == list(arguments[:1])]
    return _run(build_parser(chosen or COMMANDS), arguments)


def run_module(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run one command as `python -m accel_fsdp_tools.<name>` and return its exit code."""
    command = _load(name)
    parser = argparse.ArgumentParser(prog=f"python -m accel_fsdp_tools.{name}", **_describe(command))
    _add(command, parser)
    return _run(parser, arguments)


def build_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of these commands."""
    parser = argparse.ArgumentParser(
        prog="accel-fsdp",
        description="Tools for checkpoints of Hugging Face Accelerate and the Trainer under FSDP.",
        epilog=_EXITS,
    )
    parser.add_argument("--version", action="version", version=f"accel-fsdp-tools {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        command = _load(name)
        _add(command, commands.add_parser(command.NAME, help=command.HELP, **_describe(command)))
    return parser


def _load(name: str) -> ModuleType:
    return import_module(f".{name}", __package__)


def _describe(command: ModuleType) -> dict[str, Any]:
    return {"description": command.DESCRIPTION, "epilog": _EXITS}


def _add(command: ModuleType, parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough; without this Python complains once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _explain(error)
    return code


def _explain(error: Exception) -> int:
    """Say what went wrong; an error that this package does not raise on purpose keeps its traceback."""
    from ..errors import AccelFsdpError, CheckpointNotFoundError, UsageError

    if not isinstance(error, AccelFsdpError | OSError):
        raise error
    print(f"error: {error}", file=sys.stderr)
    return USAGE if isinstance(error, UsageError | CheckpointNotFoundError) else FAILED
