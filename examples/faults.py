"""What the demos and the tests do to the examples' runs, to show that these survive it. Yours needs none of this."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import time

HOW = ("kill", "hang", "hang-with-gil", "raise", "signal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that make a run fail. Each takes effect in a run that started fresh, so only once."""
    parser.add_argument(
        "--kill-at-step", type=int, help="kill all ranks (SIGKILL) at this step of a run that started fresh"
    )
    parser.add_argument("--fail-at-step", type=int, help="make one rank fail in the middle of this step of such a run")
    parser.add_argument("--fail-how", choices=HOW, default="kill", help="what happens to that rank")
    parser.add_argument("--fail-rank", type=int, default=1, help="which rank that is")


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, save_every: int) -> None:
    """Refuse a fault before the first checkpoint: the next run would start fresh and meet it again."""
    for name in ("kill_at_step", "fail_at_step"):
        step = getattr(args, name)
        if step is not None and step <= save_every:
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} must be greater than {save_every}, the step of the first checkpoint")


def kill_all(args: argparse.Namespace, *, step: int) -> None:
    """Die at the end of step `step`, if that is the one, together with all other ranks."""
    if step == args.kill_at_step:
        import torch

        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)  # no clean-up, no last save


def fail_one(args: argparse.Namespace, *, step: int) -> None:
    """Fail in the middle of step `step`, if that is the one and this is the rank."""
    if step != args.fail_at_step or int(os.environ["RANK"]) != args.fail_rank:
        return
    print(f"rank {args.fail_rank}: {args.fail_how} in step {step}", flush=True)
    if args.fail_how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif args.fail_how == "signal":
        os.kill(os.getpid(), signal.SIGUSR1)  # no fault: the run saves at the end of the step, and ends
        return
    elif args.fail_how == "raise":
        raise RuntimeError(f"rank {args.fail_rank} was told to fail in step {step}")
    sleep = time.sleep if args.fail_how == "hang" else ctypes.PyDLL(None).sleep  # which keeps the GIL
    while True:
        sleep(3600)
