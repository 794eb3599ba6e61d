"""How fast `verify_checkpoint` reads, beside `cat` of the same files: both in one run, alternating.

    python benchmarks/verify_offline.py
    python benchmarks/verify_offline.py --size 4e9 --rounds 9 --threads 4 --json

A random checkpoint of two ranks is written with `dcp.save`, with a manifest of sizes, checksums and fingerprints.
Then, in turns: `cat` to /dev/null, verify with checksums only, with CRCs too (the default), with a scan for NaN, and
with fingerprints. All of it comes from the page cache after a first pass, which is the hardest case: the processor is
all that is measured. Only medians and ratios of one run mean something. Peak memory is that of the verifying process
above its start, with all modules imported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # a clone is measured without being installed

CAT = "cat"
VARIANTS: dict[str, dict[str, bool]] = {
    "checksums": {"crcs": False},
    "+ crcs (default)": {},
    "+ crcs, scan": {"scan": True},
    "+ crcs, fingerprints": {"fingerprints": True},
}
TARGET_RATIO = 0.5
WORLD_SIZE = 2
COLUMNS = 4096


def write_checkpoint(folder: Path, num_bytes: int) -> None:
    """Write a model of `num_bytes` (fp32 and bf16 matrices, cut by rows between two ranks) and its manifest.

    Each rank's file is written by a process of its own, as in a real save.
    """
    processes = [
        subprocess.Popen([sys.executable, __file__, "--write", str(rank), "--size", str(num_bytes), str(folder)])
        for rank in range(WORLD_SIZE)
    ]
    if any(process.wait() for process in processes):
        raise SystemExit("writing the checkpoint failed")


def write_rank(folder: Path, rank: int, num_bytes: int) -> None:
    """Save as one of the ranks; rank 0 writes the manifest."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    torch.manual_seed(rank)
    rows = max(WORLD_SIZE, int(num_bytes / 24 / COLUMNS / 4) // WORLD_SIZE * WORLD_SIZE)
    tensors: dict[str, Any] = {}
    for index in range(24):
        dtype = torch.bfloat16 if index % 4 == 3 else torch.float32
        count = rows * 2 if dtype == torch.bfloat16 else rows
        local = torch.randn(count // WORLD_SIZE, COLUMNS).to(dtype)
        tensors[f"layers.{index}.weight"] = DTensor.from_local(local, mesh, [Shard(0)])
        tensors[f"layers.{index}.bias"] = torch.randn(COLUMNS)
    dcp.save({"model": tensors}, checkpoint_id=str(folder / "checkpoint" / "pytorch_model_fsdp_0"))
    if rank == 0:
        write_manifest(folder / "checkpoint")
    dist.barrier()
    dist.destroy_process_group()


def write_manifest(directory: Path) -> None:
    """Record sizes, checksums and fingerprints of what was written."""
    from accel_fsdp_tools.files import list_files, seal_files
    from accel_fsdp_tools.fingerprint import combine, fingerprint_bytes
    from accel_fsdp_tools.formats.reading import read_part
    from accel_fsdp_tools.manifest import Lineage, Manifest, ModelFacts, TensorFacts, Topology
    from accel_fsdp_tools.manifest import write_manifest as write
    from accel_fsdp_tools.opening import open_checkpoint

    facts = []
    for name, tensor in open_checkpoint(directory).tensors.items():
        found = combine(
            fingerprint_bytes(read_part(tensor, part), tensor.dtype, part, tensor.shape) for part in tensor.parts
        )
        facts.append(TensorFacts(name, tensor.dtype, tensor.shape, True, "parameter", fingerprint=str(found)))
    files = tuple(seal_files(directory, list_files(directory)))
    (directory / "accel_fsdp_tools").mkdir()
    write(
        directory,
        Manifest(
            created_at="2026-01-01T00:00:00+00:00",
            step=1,
            epoch=0,
            lineage=Lineage("benchmark", "benchmark", 0),
            topology=Topology(0, "FSDP"),
            versions={},
            states={name: {} for name in ("model", "optimizer", "scheduler", "rng", "data")},
            files=files,
            models=(ModelFacts("Benchmark", tuple(facts)),),
            optimizers=(),
            num_schedulers=0,
            num_dataloaders=0,
            num_custom_objects=0,
            accelerate={},
        ),
    )


def measure(checkpoint: Path, rounds: int, threads: int) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each variant, and the peak of memory above the start in bytes."""
    from accel_fsdp_tools import verify_checkpoint

    files = [str(path) for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    start_rss = read_status("VmRSS")
    seconds: dict[str, list[float]] = {name: [] for name in (CAT, *VARIANTS)}
    for number in range(-1, rounds):  # the first round warms the page cache up and does not count
        names = list(seconds)
        for name in names if number % 2 == 0 else reversed(names):
            begin = time.perf_counter()
            if name == CAT:
                with open(os.devnull, "wb") as sink:  # noqa: PTH123
                    subprocess.run(["cat", *files], stdout=sink, check=True)
            else:
                report = verify_checkpoint(checkpoint, num_threads=threads, **VARIANTS[name])  # type: ignore[arg-type]
                if not report.ok:
                    raise SystemExit(str(report))
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds, read_status("VmHWM") - start_rss


def read_status(name: str) -> int:
    """Return one of this process's figures of memory in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--size", type=float, default=1e9, help="bytes of the model (default 1e9)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write_rank(options.folder, options.write, int(options.size))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        write_checkpoint(Path(name), int(options.size))
        checkpoint = Path(name) / "checkpoint"
        num_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        seconds, peak = measure(checkpoint, options.rounds, options.threads)
    report(seconds, peak, num_bytes, options)


def report(seconds: dict[str, list[float]], peak: int, num_bytes: int, options: argparse.Namespace) -> None:
    """Print medians, and ratios of `cat`'s speed within each round."""
    rows = {
        name: {
            "median_s": statistics.median(times),
            "gb_per_s": num_bytes / 1e9 / statistics.median(times),
            "speed_of_cat": statistics.median(cat / own for cat, own in zip(seconds[CAT], times, strict=True)),
        }
        for name, times in seconds.items()
    }
    from accel_fsdp_tools.crc import find_crc32

    if options.json:
        facts = {"bytes": num_bytes, "threads": options.threads, "peak_bytes": peak, "rows": rows, "seconds": seconds}
        print(json.dumps(facts, indent=1))
        return
    print(f"{num_bytes / 1e9:.2f} GB, {options.threads} threads, {os.cpu_count()} cores, CRC-32 by {find_crc32()[0]}")
    print(f"{'':24} median s    GB/s   of cat's speed")
    for name, row in rows.items():
        print(f"{name:24} {row['median_s']:8.3f} {row['gb_per_s']:7.2f} {row['speed_of_cat']:10.2f}")
    print(f"peak memory above the start: {peak / 1e6:.0f} MB")
    reached = rows["+ crcs (default)"]["speed_of_cat"]
    print(f"aim: over {TARGET_RATIO} of cat's speed; {'reached' if reached > TARGET_RATIO else 'NOT reached'}")


if __name__ == "__main__":
    main()
