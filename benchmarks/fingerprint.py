"""How fast fingerprints are beside a plain sum and xxh3 over the same memory, on one core.

    python benchmarks/fingerprint.py
    python benchmarks/fingerprint.py --megabytes 1024 --rounds 9 --json

Every way reads the same buffer in turn, round after round; the best time of each counts, since other work on the
machine only ever adds time. Ratios to the plain sum and to xxh3 of the same run mean more than gigabytes per second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone is measured without being installed

import numpy as np
import torch
import xxhash

from accel_fsdp_tools.extents import Box, Part, Run
from accel_fsdp_tools.fingerprint import fingerprint_bytes, fingerprint_tensor

COLUMNS = 8192


def build_ways(data: np.ndarray) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return what to time: name -> (bytes that it reads, function)."""
    rows = data.size // (4 * COLUMNS)
    shape = (rows, COLUMNS)
    tensor = torch.from_numpy(data).view(torch.float32).view(shape)
    misaligned = data[4 : data.size - 4]

    def run(values: np.ndarray, dtype: str, part: Part, whole: tuple[int, ...]) -> Callable[[], object]:
        return lambda: fingerprint_bytes(values, dtype, part, whole)

    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "numpy sum of 64-bit words": (data.size, lambda: data.view(np.uint64).sum()),
        "xxh3_128": (data.size, lambda: xxhash.xxh3_128(data).digest()),
        "fingerprint, fp32": (data.size, run(data, "float32", Run(0, data.size // 4), shape)),
        "fingerprint, bf16": (data.size, run(data, "bfloat16", Run(0, data.size // 2), (rows, 2 * COLUMNS))),
        "fingerprint, fp32 from an odd element": (
            misaligned.size,
            run(data[: misaligned.size], "float32", Run(1, misaligned.size // 4), shape),
        ),
    }
    for count in (4096, 1024, 64):
        part = Box((0, COLUMNS - count), (rows, count))
        size = rows * count * 4
        ways[f"fingerprint, fp32, rows of {count * 4} bytes"] = (size, run(data[:size], "float32", part, shape))
    odd = rows * 1023 * 2
    ways["fingerprint, bf16, rows of 2046 bytes"] = (
        odd,
        run(data[:odd], "bfloat16", Box((0, 1), (rows, 1023)), (rows, 2 * COLUMNS)),
    )
    transposed = tensor[: min(rows, 2048)].t()
    ways["fingerprint, fp32, transposed in memory"] = (
        transposed.numel() * 4,
        lambda: fingerprint_tensor(transposed, Run(0, transposed.numel()), tuple(transposed.shape)),
    )
    return ways


def measure(megabytes: int, rounds: int) -> dict[str, float]:
    """Return the best GB/s of every way."""
    data = np.random.default_rng(0).integers(0, 256, megabytes << 20, dtype=np.uint8)
    ways = build_ways(data)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds + 1):  # the first warms up
        for name, (_, function) in ways.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: size / best[name] / 1e9 for name, (size, _) in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="size of the buffer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speeds = measure(options.megabytes, options.rounds)
    if options.json:
        print(json.dumps(speeds, indent=1))
        return
    plain, xxh3 = speeds["numpy sum of 64-bit words"], speeds["xxh3_128"]
    print(f"{'':42} {'GB/s':>6} {'x sum':>6} {'x xxh3':>6}   (time, as a multiple)")
    for name, speed in speeds.items():
        print(f"{name:42} {speed:6.2f} {plain / speed:6.1f} {xxh3 / speed:6.1f}")


if __name__ == "__main__":
    main()
