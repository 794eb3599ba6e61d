"""What `save_state` costs beside plain `accelerator.save_state`: both in one run, alternating.

    python benchmarks/save_overhead.py
    python benchmarks/save_overhead.py --parameters 50e6 --pairs 9 --fsdp-version 1 --json

A random Llama is trained for one step under FSDP on gloo ranks, then saved again and again: plain, ours, ours, plain,
... Before each save all ranks meet with nothing left to write back; a checkpoint is deleted, and the deletion synced,
outside the timed part. A duration is that of the slowest rank. Only medians and ratios of one run mean something:
storage and machine load differ from minute to minute. The README beside this file explains the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import platform
import queue
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # a clone is measured without being installed; spawned ranks import this file too

PLAIN, OURS = "plain", "ours"
TARGET_RATIO = 1.10
VOCABULARY, HIDDEN, INTERMEDIATE = 32_000, 1024, 2816
BYTES_PER_PARAMETER = 12  # fp32 weight, exp_avg, exp_avg_sq

# What a save consists of, each part ending at a point of `accel_fsdp_tools.phases`. Every part ends with an agreement
# of the ranks, so a part is as long as its slowest rank. `save.manifest` and `save.renamed` exist on rank 0 only.
PARTS = (
    ("agreement before", "save.staged", "barrier, checks, same target, staging directory, shared storage"),
    ("Accelerate", "save.delegated", "accelerator.save_state itself, without DCP's syncs"),
    ("RNG and progress", "save.progress", "config, this rank's generators and dataloader positions"),
    ("fingerprints", "save.fingerprints", "sums over the live shards; fsync and xxh3_128 of the files go on meanwhile"),
    ("fsync and checksum", "save.synced", "what is left of fsync and xxh3_128 of every file"),
    ("manifest", "save.manifest", "manifest.json with fsync"),
    ("commit", "save.renamed", "fsync of every directory, rename"),
    ("agreement after", "end", "fsync of the directories above, the owner's mark, the last agreement"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure; the same on every rank."""

    directory: str
    parameters: int
    pairs: int
    warm_up: int
    fsdp_version: int
    state_dict_type: str
    ranks: int
    threads: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """One save as one rank saw it: wall and CPU seconds, and how the wall divides (ours only)."""

    kind: str
    seconds: float
    cpu_seconds: float
    points: dict[str, float]
    work: dict[str, float]


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank reports."""

    rank: int
    parameters: int
    num_bytes: int
    samples: list[Sample]
    base_rss: int
    peak_rss: dict[str, int]


def read_rss() -> int:
    """Resident bytes of this process, without the pages of mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


@contextlib.contextmanager
def watch_peak() -> Iterator[Callable[[], int]]:
    """Reset the kernel's high-water mark; the value yielded reads it (resident bytes, Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")

    def read() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    yield read


def choose_layers(parameters: int) -> tuple[int, int]:
    """Return (layers, hidden size) of a Llama with about `parameters` parameters."""
    hidden = HIDDEN if parameters >= 100_000_000 else 256
    embeddings = 2 * VOCABULARY * hidden
    intermediate = hidden * INTERMEDIATE // HIDDEN
    per_layer = 4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden
    return max(1, round((parameters - embeddings) / per_layer)), hidden


def build(options: Options) -> tuple[Any, int]:
    """Prepare model, AdamW, scheduler and dataloader under FSDP, and train one step."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    from accel_fsdp_tools import enable_cpu_fsdp, track

    enable_cpu_fsdp()
    arguments: dict[str, Any] = {
        "fsdp_version": options.fsdp_version,
        "state_dict_type": options.state_dict_type,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
    }
    if options.fsdp_version == 1:
        arguments |= {"use_orig_params": True, "sync_module_states": False, "cpu_ram_efficient_loading": False}
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**arguments))
    layers, hidden = choose_layers(options.parameters)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * INTERMEDIATE // HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    tokens = torch.randint(VOCABULARY, (64, 8), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(tokens, batch_size=1, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    track(accelerator)
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        break
    gc.collect()
    return accelerator, num_parameters


def measure(options: Options) -> RankResult:
    """Save in turns and return what this rank saw."""
    import torch.distributed as dist

    accelerator, num_parameters = build(options)
    rank = dist.get_rank()
    root = Path(options.directory)
    base_rss = read_rss()
    samples: list[Sample] = []
    peaks = {PLAIN: 0, OURS: 0}
    num_bytes = 0
    # The first saves pay for the page cache's first touch of memory that a virtual machine's host has not given yet.
    for pair in range(-options.warm_up, options.pairs):
        for kind in (PLAIN, OURS) if pair % 2 == 0 else (OURS, PLAIN):
            target = root / kind
            gc.collect()
            if rank == 0:
                os.sync()
            dist.barrier()
            with watch_peak() as read_peak:
                sample = save_once(accelerator, kind, target)
                peak = read_peak()
            dist.barrier()
            if pair >= 0:
                samples.append(sample)
                peaks[kind] = max(peaks[kind], peak)
            if rank == 0:
                num_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
                seconds = f"{sample.seconds:6.2f} s"
                print(f"{'warm-up' if pair < 0 else f'pair {pair + 1}':8} {kind:6} {seconds}", file=sys.stderr)
                shutil.rmtree(target)
                os.sync()
            dist.barrier()
    accelerator.end_training()
    return RankResult(rank, num_parameters, num_bytes, samples, base_rss, peaks)


def save_once(accelerator: Any, kind: str, target: Path) -> Sample:
    """Save once, timed; ours with a time stamp at every point."""
    from accel_fsdp_tools import phases, save_state, sealing

    points: dict[str, float] = {}
    work: dict[str, float] = {}
    seal_files = sealing.seal_files

    def seal(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return seal_files(*args, **kwargs)
        finally:
            work["seal"] = work.get("seal", 0.0) + time.perf_counter() - begin

    if kind == PLAIN:
        start, cpu = time.perf_counter(), time.process_time()
        accelerator.save_state(str(target))
        return Sample(kind, time.perf_counter() - start, time.process_time() - cpu, {}, {})
    with mock.patch.object(sealing, "seal_files", seal):
        previous = phases.set_observer(lambda point: points.setdefault(point, time.perf_counter() - start))
        try:
            start, cpu = time.perf_counter(), time.process_time()
            save_state(accelerator, target)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        finally:
            phases.set_observer(previous)
    points["end"] = seconds
    return Sample(kind, seconds, cpu_seconds, points, work)


def rank_main(rank: int, port: int, options: Options, results: Any, measure: Callable[[Options], Any]) -> None:
    """Entry point of a rank's process; puts what `measure` returns, or the text of an error into `results`."""
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(options.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(options.threads),
            "ACCELERATE_USE_FSDP": "true",
        }
    )
    try:
        import torch

        torch.set_num_threads(options.threads)
        results.put(measure(options))
    except BaseException:
        results.put(f"rank {rank}:\n{traceback.format_exc()}")
        raise


def run_ranks(options: Options, measure: Callable[[Options], Any] = measure) -> list[Any]:
    """Spawn the ranks and return their results (with a `rank` each); the first failure ends all of them."""
    import multiprocessing

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = int(server.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, port, options, results, measure)) for rank in range(options.ranks)
    ]
    found: list[Any] = []
    try:
        for process in processes:
            process.start()
        while len(found) < options.ranks:
            try:
                result = results.get(timeout=1.0)
            except queue.Empty:
                dead = [process.exitcode for process in processes if process.exitcode is not None]
                if len(dead) > len(found):
                    raise SystemExit(f"a rank ended without a result (exit codes {dead}); out of memory?") from None
                continue
            if isinstance(result, str):
                raise SystemExit(result)
            found.append(result)
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return sorted(found, key=lambda result: result.rank)


def summarise(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def split_sample(ranks: list[Sample]) -> dict[str, float]:
    """Divide one save of ours into `PARTS`, by the clock of rank 0."""
    points = ranks[0].points
    parts, last = {}, 0.0
    for name, point, _ in PARTS:
        parts[name] = points[point] - last
        last = points[point]
    return parts


def evaluate(options: Options, ranks: list[RankResult], load: list[tuple[float, ...]]) -> dict[str, Any]:
    """Turn what the ranks saw into the report."""
    by_save = list(zip(*(result.samples for result in ranks), strict=True))  # per save, one sample per rank
    seconds = {
        kind: [max(sample.seconds for sample in save) for save in by_save if save[0].kind == kind]
        for kind in (PLAIN, OURS)
    }
    cpu_seconds = {
        kind: [sum(sample.cpu_seconds for sample in save) for save in by_save if save[0].kind == kind]
        for kind in (PLAIN, OURS)
    }
    ours = [save for save in by_save if save[0].kind == OURS]
    split = [split_sample(list(save)) for save in ours]
    parts = {name: summarise([each[name] for each in split]) for name, _, _ in PARTS}
    work = [max(sample.work["seal"] for sample in save) for save in ours]
    pairs = [after / before for before, after in zip(seconds[PLAIN], seconds[OURS], strict=True)]
    return {
        "setup": {
            **dataclasses.asdict(options),
            "parameters": ranks[0].parameters,
            "checkpoint_bytes": ranks[0].num_bytes,
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "load_before_after": load,
        },
        "seconds": {kind: summarise(values) for kind, values in seconds.items()},
        "cpu_seconds": {kind: summarise(values) for kind, values in cpu_seconds.items()},
        "pairs": [
            {PLAIN: before, OURS: after, "ratio": after / before}
            for before, after in zip(seconds[PLAIN], seconds[OURS], strict=True)
        ],
        "ratio": {
            **summarise(pairs),
            "of_medians": statistics.median(seconds[OURS]) / statistics.median(seconds[PLAIN]),
            "of_minima": min(seconds[OURS]) / min(seconds[PLAIN]),
            "of_cpu": statistics.median(cpu_seconds[OURS]) / statistics.median(cpu_seconds[PLAIN]),
            "target": TARGET_RATIO,
        },
        "breakdown": parts,
        "seal_work": summarise(work),
        "rss": [
            {"rank": result.rank, "before": result.base_rss, **{f"peak_{k}": v for k, v in result.peak_rss.items()}}
            for result in ranks
        ],
    }


def print_report(report: dict[str, Any]) -> None:
    """Print what `evaluate` found, for people."""
    setup, ratio = report["setup"], report["ratio"]
    print(
        f"\n{setup['parameters'] / 1e6:.0f}M parameters, {setup['checkpoint_bytes'] / 1e9:.2f} GB per checkpoint, "
        f"FSDP{setup['fsdp_version']} {setup['state_dict_type']}, {setup['ranks']} ranks on {setup['cores']} cores, "
        f"{setup['pairs']} pairs\n"
    )
    print(f"{'seconds':28} {'median':>8} {'min':>8} {'max':>8}")
    names = {PLAIN: "accelerator.save_state", OURS: "accel_fsdp_tools.save_state"}
    for kind, values in report["seconds"].items():
        print(f"{names[kind]:28} {values['median']:8.3f} {values['min']:8.3f} {values['max']:8.3f}")
    print(f"{'ratio, pair by pair':28} {ratio['median']:8.3f} {ratio['min']:8.3f} {ratio['max']:8.3f}")
    print(f"ratio of medians {ratio['of_medians']:.3f}, of minima {ratio['of_minima']:.3f}")
    cpu = report["cpu_seconds"]
    print(
        f"CPU seconds, all ranks: {cpu[PLAIN]['median']:.2f} plain, {cpu[OURS]['median']:.2f} ours, "
        f"ratio {ratio['of_cpu']:.3f}"
    )
    verdict = "reached" if ratio["median"] <= ratio["target"] else "MISSED"
    print(f"target: at most {ratio['target']:.2f}: {verdict}\n")
    whole = report["seconds"][OURS]["median"]
    print(f"{'ours, by part':28} {'median':>8} {'min':>8} {'max':>8} {'share':>8}")
    for name, _, what in PARTS:
        part = report["breakdown"][name]
        share = part["median"] / whole
        print(f"{name:28} {part['median']:8.3f} {part['min']:8.3f} {part['max']:8.3f} {share:8.1%}   {what}")
    work = report["seal_work"]
    print(f"{'  slowest rank, no waiting':28} {work['median']:8.3f} {work['min']:8.3f} {work['max']:8.3f}")
    print("\nresident memory per rank, GB:")
    for each in report["rss"]:
        print(
            f"  rank {each['rank']}: {each['before'] / 1e9:.2f} before a save; peak {each['peak_plain'] / 1e9:.2f} "
            f"plain, {each['peak_ours'] / 1e9:.2f} ours"
        )
    before, after = setup["load_before_after"]
    print(f"load averages before {before}, after {after}")


def check_room(options: Options) -> None:
    """Refuse to start what would fill the disk or the memory of the machine."""
    needed = 1.2 * options.parameters * BYTES_PER_PARAMETER
    free = shutil.disk_usage(options.directory).free
    if free < 2 * needed:
        raise SystemExit(f"{options.directory} has {free / 1e9:.1f} GB free, {2 * needed / 1e9:.1f} GB are needed")
    # Every rank: the whole model while building, its shards with gradients and state, and what a save copies.
    memory = options.ranks * (1.5e9 + options.parameters * 4) + 2 * needed
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    if available < memory:
        raise SystemExit(f"about {memory / 1e9:.1f} GB of memory are needed, {available / 1e9:.1f} GB are available")


def parse_arguments() -> tuple[argparse.Namespace, Callable[[str], Options]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=250e6, help="about how many (default 250e6)")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of saves after the warm-up (default 9)")
    parser.add_argument("--warm-up", type=int, default=3, help="pairs of saves that don't count (default 3)")
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument(
        "--state-dict-type", choices=("SHARDED_STATE_DICT", "FULL_STATE_DICT"), default="SHARDED_STATE_DICT"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank (default 1)")
    parser.add_argument("--directory", type=Path, help="where to save (default: a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args()
    if min(arguments.pairs, arguments.ranks, arguments.threads, arguments.parameters) < 1 or arguments.warm_up < 0:
        parser.error("--pairs, --ranks, --threads and --parameters must be positive, --warm-up not negative")

    def make_options(directory: str) -> Options:
        return Options(
            directory=directory,
            parameters=int(arguments.parameters),
            pairs=arguments.pairs,
            warm_up=arguments.warm_up,
            fsdp_version=arguments.fsdp_version,
            state_dict_type=arguments.state_dict_type,
            ranks=arguments.ranks,
            threads=arguments.threads,
        )

    return arguments, make_options


def main() -> None:
    arguments, make_options = parse_arguments()
    if arguments.directory is not None:
        arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="save_overhead_", dir=arguments.directory) as directory:
        options = make_options(directory)
        check_room(options)
        before = os.getloadavg()
        ranks = run_ranks(options)
        report = evaluate(options, ranks, [before, os.getloadavg()])
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)


if __name__ == "__main__":
    main()
