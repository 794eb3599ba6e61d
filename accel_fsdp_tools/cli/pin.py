"""`accel-fsdp pin PATH`: a checkpoint stays, whatever the policy says."""

from __future__ import annotations

import argparse
from pathlib import Path

from .exits import GOOD

NAME = "pin"
HELP = "keep a checkpoint, whatever the rules of its run say"
DESCRIPTION = (
    "Pin a checkpoint of a Checkpointer: neither its run nor `accel-fsdp prune` removes it until it is unpinned. Works "
    "while the run goes on. The checkpoint itself is not changed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=Path, help="the checkpoint's directory")
    parser.add_argument("--undo", action="store_true", help="take the pin back")


def run(arguments: argparse.Namespace) -> int:
    """Pin or unpin, and return 0."""
    from ..manifest import read_manifest
    from ..records import pin, unpin

    path = arguments.path.expanduser().absolute()
    manifest = read_manifest(path)
    if arguments.undo:
        unpin(path.parent, manifest.lineage.checkpoint_id)
    else:
        pin(path.parent, manifest.lineage.checkpoint_id, name=path.name)
    print(f"{'unpinned' if arguments.undo else 'pinned'} {path.name} (step {manifest.step})")
    return GOOD
