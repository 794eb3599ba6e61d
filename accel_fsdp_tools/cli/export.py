"""`accel-fsdp export CKPT OUT`: a checkpoint becomes a Hugging Face directory."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from .exits import DIFFERENCE, GOOD
from .parsing import parse_count, parse_index

NAME = "export"
HELP = "turn a checkpoint into the directory that save_pretrained would have written"
DESCRIPTION = (
    "Write the weights of a checkpoint as safetensors with config and tokenizer, as save_pretrained of the whole model "
    "would have: from a sharded or full FSDP checkpoint of Accelerate, the Trainer or torch, at the speed of a file "
    "copy, without a GPU, in memory that does not grow with the model. What is written is proven equal to the "
    "checkpoint before the directory appears."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="CKPT", type=Path, help="a checkpoint's directory, or one inside it")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write")
    parser.add_argument(
        "--dtype",
        choices=("keep", "bf16", "fp16", "fp32", "config"),
        default="keep",
        help="of floating tensors (default: as they are; config: what the model's config states)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="50GB", help="of one file, such as 5GB (default 50GB)"
    )
    parser.add_argument(
        "--model", metavar="DIR", help="directory or hub id with config and tokenizer, where the checkpoint has none"
    )
    parser.add_argument("--model-index", metavar="N", type=parse_index, help="which of several models")
    parser.add_argument("--key", metavar="KEY", help="place of a state dict inside the files (ema, app.model)")
    parser.add_argument(
        "--state",
        choices=("model", "optimizer"),
        default="model",
        help="optimizer: write its tensors as they are, for analysis",
    )
    parser.add_argument("--base", metavar="DIR", help="a model to take all tensors from that --only does not match")
    parser.add_argument("--only", metavar="PATTERN", help="tensors to take from the checkpoint, such as '*.layers.0.*'")
    parser.add_argument("--adapter", metavar="NAME", help="of a checkpoint with PEFT adapters only this one")
    parser.add_argument(
        "--merge-adapter",
        metavar="BASE",
        help="merge the adapter into the base model in this directory (or hub id), or in the checkpoint: 'checkpoint'",
    )
    parser.add_argument("--untie", action="store_true", help="write tied weights that differ, both")
    parser.add_argument("--allow-missing", action="store_true", help="export although tensors are missing")
    parser.add_argument(
        "--allow-unexpected", action="store_true", help="write tensors that the architecture does not have, too"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that lies beside the config, where it is needed"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export, once this one is proven")
    parser.add_argument(
        "--verify",
        choices=("output", "load", "off"),
        default="output",
        help="read the output again (default); load: also with transformers, and compare logits; off: neither",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    parser.add_argument("--report", action="store_true", help="write export_report.json beside the weights")
    parser.add_argument("--threads", metavar="N", type=parse_count, help="default: one per processor")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing if all went well")


def run(arguments: argparse.Namespace) -> int:
    """Export, print, and return 0 if all was written and proven, 3 if a cast lost values."""
    from ..export import export_checkpoint
    from .progress import ByteProgress

    is_silent = arguments.quiet or arguments.json
    with contextlib.nullcontext() if is_silent else ByteProgress(sys.stderr, "export") as progress:
        report = export_checkpoint(
            arguments.path,
            arguments.out,
            dtype=arguments.dtype,
            max_shard_size=arguments.max_shard_size,
            model=arguments.model,
            model_index=arguments.model_index,
            key=arguments.key,
            state=arguments.state,
            base=arguments.base,
            only=arguments.only,
            adapter=arguments.adapter,
            merge_adapter=arguments.merge_adapter,
            untie=arguments.untie,
            allow_missing=arguments.allow_missing,
            allow_unexpected=arguments.allow_unexpected,
            trust_remote_code=arguments.trust_remote_code,
            overwrite=arguments.overwrite,
            verify=arguments.verify,
            dry_run=arguments.dry_run,
            report=arguments.report,
            num_threads=arguments.threads,
            progress=progress,
        )
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1, default=str))
    elif not (arguments.quiet and report.ok):
        print(report)
    return GOOD if report.ok else DIFFERENCE
