"""What it costs to prove a load, beside the load itself: `verify_model` in each mode, alternating in one run.

    python benchmarks/verify_load.py
    python benchmarks/verify_load.py --parameters 50e6 --rounds 9 --json

A random Llama is trained for one step under FSDP on gloo ranks and saved once. Then, again and again and in changing
order: plain `accelerator.load_state` with the files in the page cache, and `verify_model` in the modes "full",
"fingerprint", "stats" and "sample". A duration is that of the slowest rank. Only medians and ratios of one run mean
something. Peak memory of each is what a rank's resident memory rose by while it ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from save_overhead import Options, build, check_room, read_rss, run_ranks, watch_peak

LOAD = "load"
MODES = ("full", "fingerprint", "stats", "sample")
TARGETS = {"full": 0.8, "fingerprint": 0.3}
TARGET_BYTES = 256e6


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank saw: seconds of every round and the greatest rise of resident memory, by what was done."""

    rank: int
    parameters: int
    num_bytes: int
    seconds: dict[str, list[float]]
    rise_bytes: dict[str, int]


def measure(options: Options) -> RankResult:
    """Load and verify in turns and return what this rank saw."""
    import torch.distributed as dist

    from accel_fsdp_tools import save_state, verify_model

    accelerator, num_parameters = build(options)
    path = Path(options.directory) / "checkpoint"
    save_state(accelerator, path)
    kinds = (LOAD, *MODES)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    rise: dict[str, int] = dict.fromkeys(kinds, 0)
    for turn in range(-options.warm_up, options.pairs):
        for kind in kinds if turn % 2 else tuple(reversed(kinds)):
            gc.collect()
            dist.barrier()
            before = read_rss()
            with watch_peak() as read_peak:
                start = time.perf_counter()
                if kind == LOAD:
                    accelerator.load_state(str(path))
                else:
                    report = verify_model(accelerator, path, mode=kind)
                    if not report.ok:
                        raise SystemExit(str(report))
                elapsed = time.perf_counter() - start
                peak = read_peak()
            if turn >= 0:
                seconds[kind].append(elapsed)
                rise[kind] = max(rise[kind], peak - before - get_file_pages())
    num_bytes = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    accelerator.end_training()
    return RankResult(int(os.environ["RANK"]), num_parameters, num_bytes, seconds, rise)


def get_file_pages() -> int:
    """Resident bytes that are pages of mapped files (torch's libraries): in the peak, and not in `read_rss`."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Rss")
    )
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssFile", "RssShmem"))


def evaluate(options: Options, ranks: list[RankResult]) -> dict[str, Any]:
    """Turn what the ranks saw into the report."""
    slowest = {
        kind: [max(times) for times in zip(*(each.seconds[kind] for each in ranks), strict=True)]
        for kind in (LOAD, *MODES)
    }
    return {
        "setup": {**dataclasses.asdict(options), "parameters": ranks[0].parameters, "bytes": ranks[0].num_bytes},
        "load_average": os.getloadavg(),
        "kinds": {
            kind: {
                "median": statistics.median(times),
                "min": min(times),
                "max": max(times),
                "ratio": statistics.median(a / b for a, b in zip(times, slowest[LOAD], strict=True)),
                "ratio_of_minima": min(times) / min(slowest[LOAD]),
                "target": TARGETS.get(kind),
                "rise_bytes": max(each.rise_bytes[kind] for each in ranks),
            }
            for kind, times in slowest.items()
        },
    }


def print_report(report: dict[str, Any]) -> None:
    setup = report["setup"]
    print(
        f"\n{setup['parameters'] / 1e6:.0f}M parameters, {setup['bytes'] / 1e9:.2f} GB, FSDP{setup['fsdp_version']} "
        f"{setup['state_dict_type']}, {setup['ranks']} ranks, {setup['pairs']} rounds, load average "
        f"{report['load_average'][0]:.1f}\n"
    )
    print(f"{'seconds':14} {'median':>8} {'min':>8} {'max':>8} {'ratio':>7} {'of min':>7} {'target':>7} {'memory':>9}")
    for kind, values in report["kinds"].items():
        target = f"{values['target']:7.2f}" if values["target"] else " " * 7
        print(
            f"{kind:14} {values['median']:8.3f} {values['min']:8.3f} {values['max']:8.3f} {values['ratio']:7.2f} "
            f"{values['ratio_of_minima']:7.2f} {target} {values['rise_bytes'] / 1e6:6.0f} MB"
        )
    worst = max(report["kinds"][mode]["rise_bytes"] for mode in MODES)
    print(f"\nmemory of verification: {worst / 1e6:.0f} MB, target below {TARGET_BYTES / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=250e6, help="about how many (default 250e6)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that don't (default 1)")
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument(
        "--state-dict-type", choices=("SHARDED_STATE_DICT", "FULL_STATE_DICT"), default="SHARDED_STATE_DICT"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank (default 1)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verify_load_") as directory:
        options = Options(
            directory=directory,
            parameters=int(arguments.parameters),
            pairs=arguments.rounds,
            warm_up=arguments.warm_up,
            fsdp_version=arguments.fsdp_version,
            state_dict_type=arguments.state_dict_type,
            ranks=arguments.ranks,
            threads=arguments.threads,
        )
        check_room(options)
        report = evaluate(options, run_ranks(options, measure))
    print(json.dumps(report, indent=1)) if arguments.json else print_report(report)


if __name__ == "__main__":
    sys.exit(main())
