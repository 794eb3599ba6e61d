"""What watching over a run costs per step: agreeing on a signal in two ways, the watchdog, the heartbeats.

    python benchmarks/running.py
    python benchmarks/running.py --ranks 4 --step-ms 20 --steps 300 --json

Ranks on this machine under gloo make steps of a fixed length (half computation, half sleep, of slightly different
length on each rank, with a reduction of the training's at the end, which makes them wait for each other as FSDP does).
After each step follows one of these, in turn: asking rank 0 by a blocking broadcast, asking all by a blocking
reduction, beginning a reduction that is read a step later, which is what `Checkpointer.step` does; and all of
`RunGuard.step`. Each figure is the time inside the call, which is what a step is longer by: medians, and the slowest
one in a hundred.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone is measured without being installed

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from accel_fsdp_tools.ranks import broadcast, get_control_group
from accel_fsdp_tools.running import HangLimits, RunGuard, Watching
from accel_fsdp_tools.running.agreement import Agreement
from accel_fsdp_tools.running.heartbeat import Beat, Heartbeat
from accel_fsdp_tools.running.watchdog import Watchdog


def _reduce() -> None:
    flag = torch.zeros(1, dtype=torch.int64)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=get_control_group())
    assert flag.item() == 0


def _make_ways(root: Path) -> dict[str, Callable[[int], Any]]:
    agreement = Agreement()
    watchdog = Watchdog()
    guard = RunGuard(root / "guard", Watching(hang_limits=HangLimits(600), health=lambda: True, health_every=100))
    guard.begin("run", 1)
    heartbeat = Heartbeat(root / "alone", Beat.begin(dist.get_rank(), dist.get_world_size(), "run", 1))
    return {
        "blocking broadcast of an object": lambda step: broadcast(False),
        "blocking reduction": lambda step: _reduce(),
        "reduction read one step later": lambda step: agreement.exchange(0),
        "watchdog armed anew": lambda step: watchdog.arm(600),
        "heartbeat told": lambda step: heartbeat.tell_step(step),
        "RunGuard.step, all of it": guard.step,
    }


def _make_step(step_s: float) -> Callable[[], None]:
    """One step of the training: it computes, waits as for a GPU, and meets the others."""
    rank = dist.get_rank()
    matrix, gradients = torch.rand(200, 200), torch.zeros(1000)

    def make_step() -> None:
        end = time.perf_counter() + step_s / 2
        while time.perf_counter() < end:
            matrix.mm(matrix)
        time.sleep(step_s / 2 * (1 + 0.02 * rank))
        dist.all_reduce(gradients)

    return make_step


def _measure(rank: int, options: argparse.Namespace, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    ways = _make_ways(Path(folder))
    make_step = _make_step(options.step_ms / 1000)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(options.steps + 10):
        for name, way in ways.items():
            make_step()
            started = time.perf_counter()
            way(step)
            if step >= 10:
                times[name].append(time.perf_counter() - started)
    Path(folder, f"times_{rank}.json").write_text(json.dumps(times))
    dist.barrier()
    os._exit(0)  # the watchdog is armed and threads are running: nothing that is of interest here


def main() -> None:
    """Start the ranks, and print what they have measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of a step")
    parser.add_argument("--steps", type=int, default=300, help="of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, (options, port, folder), nprocs=options.ranks)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("times_*.json"))]
    report = {}
    for name in ranks[0]:
        values = sorted(1e6 * each for rank in ranks for each in rank[name])
        report[name] = {"median_us": statistics.median(values), "p99_us": values[len(values) * 99 // 100]}
    if options.json:
        print(json.dumps(report, indent=1))
        return
    print(
        f"{options.ranks} ranks, steps of {options.step_ms:g} ms, {options.steps} of each kind; microseconds per step"
    )
    for name, each in report.items():
        print(f"{name:<34} median {each['median_us']:8.1f}   99 of 100 within {each['p99_us']:8.1f}")


if __name__ == "__main__":
    main()
