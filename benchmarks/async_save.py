"""How long a save stops the training, in the foreground and in the background, and what the latter costs meanwhile.

    python benchmarks/async_save.py
    python benchmarks/async_save.py --parameters 50e6 --rounds 5 --fsdp-version 1 --json

A random Llama is trained under FSDP on gloo ranks and saved in three ways, in changing order within one run: plain
`accelerator.save_state`, this package's `save_state`, and the same with `async_save=True`. Training goes on while the
last one is written; the same number of steps follows with nothing to write. A duration is that of the slowest rank.
Only medians and ratios of one run mean something. The README beside this file explains the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for a spawned rank as well

from save_overhead import build, check_room, run_ranks, summarise

PLAIN, SYNC, ASYNC = "plain", "sync", "async"
NAMES = {PLAIN: "accelerator.save_state", SYNC: "save_state", ASYNC: "save_state(async_save=True)"}
TARGET_RATIO = 0.15


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure; the same on every rank. Fields of `save_overhead.Options` mean the same."""

    directory: str
    parameters: int
    rounds: int
    warm_up: int
    fsdp_version: int
    state_dict_type: str
    ranks: int
    threads: int
    sequence: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """One save as one rank saw it, in seconds: how long training stood still, and until all was committed.

    `busy` are the steps of the training while the save was being written, `quiet` as many after it.
    """

    kind: str
    blocked_s: float
    total_s: float
    busy: list[float] = dataclasses.field(default_factory=list)
    quiet: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank reports."""

    rank: int
    parameters: int
    samples: list[Sample]


def train_step(accelerator: Any, tokens: Any) -> float:
    """Train on `tokens` and return the seconds that it took."""
    model, optimizer = accelerator._models[0], accelerator._optimizers[0]
    start = time.perf_counter()
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def save_once(accelerator: Any, kind: str, target: Path, tokens: Any) -> Sample:
    """Save in one of the three ways, timed."""
    import torch
    import torch.distributed as dist

    from accel_fsdp_tools import save_state

    start = time.perf_counter()
    if kind != ASYNC:
        if kind == PLAIN:
            accelerator.save_state(str(target))
        else:
            save_state(accelerator, target)
        seconds = time.perf_counter() - start
        return Sample(kind, seconds, seconds)
    pending = save_state(accelerator, target, async_save=True)
    blocked_s = time.perf_counter() - start
    busy = []
    is_over = torch.zeros(1, dtype=torch.int64)
    while not is_over.item():
        busy.append(train_step(accelerator, tokens))
        is_over.fill_(int(pending.done))  # rank 0 decides for all when to stop
        dist.broadcast(is_over, 0)
    pending.wait()
    total_s = time.perf_counter() - start
    dist.barrier()
    return Sample(kind, blocked_s, total_s, busy, [train_step(accelerator, tokens) for _ in busy])


def measure(options: Options) -> RankResult:
    """Save in turns and return what this rank saw."""
    import torch
    import torch.distributed as dist

    accelerator, num_parameters = build(options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1000, (1, options.sequence), generator=generator)
    train_step(accelerator, tokens)
    samples: list[Sample] = []
    kinds = [PLAIN, SYNC, ASYNC]
    for number in range(-options.warm_up, options.rounds):
        for kind in kinds:
            target = Path(options.directory) / kind
            gc.collect()
            if dist.get_rank() == 0:
                os.sync()
            dist.barrier()
            sample = save_once(accelerator, kind, target, tokens)
            dist.barrier()
            if number >= 0:
                samples.append(sample)
            if dist.get_rank() == 0:
                when = "warm-up" if number < 0 else f"round {number + 1}"
                print(f"{when:9} {kind:6} {sample.blocked_s:6.2f} s of {sample.total_s:6.2f} s", file=sys.stderr)
                shutil.rmtree(target)
                os.sync()
            dist.barrier()
        kinds = kinds[1:] + kinds[:1]
    rank = dist.get_rank()
    accelerator.end_training()
    return RankResult(rank, num_parameters, samples)


def median_step(ranks: list[list[float]]) -> float:
    """Return the median over steps of the slowest rank's seconds."""
    return statistics.median(max(steps) for steps in zip(*ranks, strict=True))


def evaluate(options: Options, ranks: list[RankResult]) -> dict[str, Any]:
    """Turn what the ranks saw into the report."""
    saves = list(zip(*(each.samples for each in ranks), strict=True))
    of = {kind: [save for save in saves if save[0].kind == kind] for kind in NAMES}
    blocked = {kind: [max(sample.blocked_s for sample in save) for save in of[kind]] for kind in NAMES}
    total = {kind: [max(sample.total_s for sample in save) for save in of[kind]] for kind in NAMES}
    busy = [median_step([each.busy for each in save]) for save in of[ASYNC]]
    quiet = [median_step([each.quiet for each in save]) for save in of[ASYNC]]
    lost = [max(sum(each.busy) - sum(each.quiet) for each in save) for save in of[ASYNC]]

    def compare(values: list[float], others: list[float]) -> dict[str, float]:
        return summarise([value / other for value, other in zip(values, others, strict=True)])

    return {
        "setup": {
            **dataclasses.asdict(options),
            "parameters": ranks[0].parameters,
            "cores": len(os.sched_getaffinity(0)),
        },
        "blocked_s": {kind: summarise(values) for kind, values in blocked.items()},
        "total_s": {kind: summarise(values) for kind, values in total.items()},
        "ratio": {
            "sync": compare(blocked[SYNC], blocked[PLAIN]),
            "async": {**compare(blocked[ASYNC], blocked[PLAIN]), "target": TARGET_RATIO},
        },
        "steps": {
            "num_per_save": statistics.median(len(save[0].busy) for save in of[ASYNC]),
            "busy_s": summarise(busy),
            "quiet_s": summarise(quiet),
            "slowdown": compare(busy, quiet),
            "lost_s": summarise(lost),
            # Training stood still, and was slower afterwards: both, against a plain save.
            "cost_ratio": compare([a + b for a, b in zip(blocked[ASYNC], lost, strict=True)], blocked[PLAIN]),
        },
    }


def print_report(report: dict[str, Any]) -> None:
    """Print what `evaluate` found, for people."""
    setup, ratio, steps = report["setup"], report["ratio"], report["steps"]
    print(
        f"\n{setup['parameters'] / 1e6:.0f}M parameters, FSDP{setup['fsdp_version']} {setup['state_dict_type']}, "
        f"{setup['ranks']} ranks on {setup['cores']} cores, {setup['rounds']} rounds\n"
    )
    print(f"{'training stands still, seconds':32} {'median':>8} {'min':>8} {'max':>8} {'until committed':>16}")
    for kind, values in report["blocked_s"].items():
        total = report["total_s"][kind]["median"]
        print(f"{NAMES[kind]:32} {values['median']:8.3f} {values['min']:8.3f} {values['max']:8.3f} {total:16.3f}")
    for kind in (SYNC, ASYNC):
        values = ratio[kind]
        print(f"{kind + ' against plain':32} {values['median']:8.3f} {values['min']:8.3f} {values['max']:8.3f}")
    verdict = "reached" if ratio["async"]["median"] <= TARGET_RATIO else "MISSED"
    print(f"target for async: at most {TARGET_RATIO:.2f}: {verdict}\n")
    print(f"{'training while it is written':32} {'median':>8} {'min':>8} {'max':>8}")
    rows = {
        "a step meanwhile, s": "busy_s",
        "a step afterwards, s": "quiet_s",
        "slowdown of a step": "slowdown",
        "lost in all steps of a save, s": "lost_s",
        "standstill and loss, of a plain": "cost_ratio",
    }
    for name, key in rows.items():
        values = steps[key]
        print(f"{name:32} {values['median']:8.3f} {values['min']:8.3f} {values['max']:8.3f}")
    print(f"{steps['num_per_save']:g} steps per save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=250e6, help="about how many (default 250e6)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of three saves after the warm-up (default 7)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that don't count (default 2)")
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument(
        "--state-dict-type", choices=("SHARDED_STATE_DICT", "FULL_STATE_DICT"), default="SHARDED_STATE_DICT"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank (default 1)")
    parser.add_argument("--sequence", type=int, default=32, help="tokens of a training step per rank (default 32)")
    parser.add_argument("--directory", type=Path, help="where to save (default: a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = vars(parser.parse_args())
    as_json, folder = arguments.pop("json"), arguments.pop("directory")
    arguments["parameters"] = int(arguments["parameters"])
    if min(arguments[name] for name in ("parameters", "rounds", "ranks", "threads", "sequence")) < 1:
        parser.error("--parameters, --rounds, --ranks, --threads and --sequence must be positive")
    with tempfile.TemporaryDirectory(prefix="async_save_", dir=folder) as directory:
        options = Options(directory=directory, **arguments)
        check_room(options)  # type: ignore[arg-type]
        report = evaluate(options, run_ranks(options, measure))
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)


if __name__ == "__main__":
    main()
