"""How fast an export is, beside `cp` of the same bytes, `accelerate merge-weights` and torch's consolidation.

    python benchmarks/export.py
    python benchmarks/export.py --params 0.25 --world-size 4 --rounds 5 --cold
    python benchmarks/export.py --params 4 --only cp,export --json

A random checkpoint with the names and shapes of a Llama is written by the real `torch.distributed.checkpoint`, one
process per rank (and a second time as the rank files that torch's consolidation takes, unless `--only` leaves it
out). Then all ways run in turns, in one run, each in a process of its own, start included; its output is deleted
afterwards and is not counted. Only medians and ratios of one run mean something. `--cold` drops the checkpoint from
the page cache before each (needs nothing but Linux). Needs disk space for twice the checkpoint (three times with
torch's consolidation). Peak memory is that of the process, everything imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # a clone is measured without being installed

CP, MERGE, CONSOLIDATE = "cp", "accelerate merge-weights", "torch consolidation"
EXPORTS: dict[str, list[str]] = {
    "export, crcs": [],
    "export, crcs, read again": ["--prove"],
    "export, crcs, fingerprints": ["--fingerprints"],
    "export, crcs, fingerprints read again": ["--fingerprints", "--prove"],
    "export, bf16": ["--dtype", "bfloat16"],
    "export, bf16, read again": ["--dtype", "bfloat16", "--prove"],
}
AIMS = {"export, crcs": 0.9, "export, crcs, fingerprints": 1.1, "export, bf16": 1.3}
MAX_PEAK_MB = 100
MODEL_DIRECTORY = "pytorch_model_fsdp_0"  # Accelerate's


def list_shapes(num_params: float) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a Llama of about so many parameters."""
    hidden = max(256, round((num_params / 16 / 14) ** 0.5 / 128) * 128)
    inner, vocabulary = hidden * 11 // 4 // 128 * 128, 32000
    layer = {
        **{f"self_attn.{name}_proj.weight": (hidden, hidden) for name in ("q", "o")},
        **{f"self_attn.{name}_proj.weight": (hidden // 4, hidden) for name in ("k", "v")},
        **{f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    per_layer = sum(shape[0] * (shape[1] if shape[1:] else 1) for shape in layer.values())
    num_layers = max(1, round((num_params - 2 * vocabulary * hidden) / per_layer))
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        **{f"model.layers.{index}.{name}": shape for index in range(num_layers) for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }


def write_checkpoint(folder: Path, options: argparse.Namespace) -> None:
    """Write the checkpoint, each rank's part by a process of its own, as in a real save."""
    command = [sys.executable, __file__, str(folder), "--params", str(options.params)]
    command += ["--world-size", str(options.world_size), *(["--consolidated"] if options.consolidated else [])]
    ranks = [subprocess.Popen([*command, "--write", str(rank)]) for rank in range(options.world_size)]
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit("writing the checkpoint failed")


def write_rank(folder: Path, options: argparse.Namespace) -> None:
    """Save as one of the ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, world_size = options.write, options.world_size
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(rank)) * 0.02
    tensors: dict[str, Any] = {}
    for name, shape in list_shapes(options.params * 1e9).items():
        local = torch.empty(shape[0] // world_size, *shape[1:])  # every dimension is a multiple of 64
        flat = local.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            part = flat[start : start + noise.numel()]
            part.copy_(noise[: part.numel()])
        tensors[name] = DTensor.from_local(local, mesh, [Shard(0)])
    dcp.save({"model": tensors}, checkpoint_id=str(folder / MODEL_DIRECTORY))
    if options.consolidated:
        writer = dcp.HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


def run_export(options: argparse.Namespace) -> None:
    """Be the process that exports, and print its seconds by stage."""
    from accel_fsdp_tools.export.copying import copy_tensors
    from accel_fsdp_tools.export.outputs import OutputTensor, split_into_files
    from accel_fsdp_tools.export.proof import list_expected, prove_output
    from accel_fsdp_tools.fingerprint import Fingerprint
    from accel_fsdp_tools.opening import open_checkpoint

    begin = time.perf_counter()
    out = Path(options.run)
    tensors = open_checkpoint(options.folder / MODEL_DIRECTORY).model.tensors
    outputs = [OutputTensor(name, each, options.dtype or each.dtype) for name, each in tensors.items()]
    files = split_into_files(outputs)
    recorded = {}
    if options.fingerprints:
        lines = (options.folder / "fingerprints.json").read_text()
        recorded = {name: Fingerprint.parse(text) for name, text in json.loads(lines).items()}
    out.mkdir()
    opened = time.perf_counter()
    # A tensor that keeps its dtype has one fingerprint before and after: read again, it is compared there.
    in_flight = {} if options.prove and options.dtype is None else recorded
    result = copy_tensors(files, out, num_threads=options.threads, fingerprints=in_flight, sync=False)
    copied = time.perf_counter()
    if options.prove:
        again = recorded if options.dtype is None else {}
        prove_output(out, files, list_expected(result, again), num_threads=options.threads)
    stages = {"open_s": opened - begin, "copy_s": copied - opened, "prove_s": time.perf_counter() - copied}
    print(json.dumps(stages))


def write_fingerprints(folder: Path) -> None:
    """Record what the manifest of a save would record. Not in the measuring process: see `measure`."""
    from accel_fsdp_tools.fingerprint import combine, fingerprint_bytes
    from accel_fsdp_tools.formats.reading import read_part
    from accel_fsdp_tools.opening import open_checkpoint

    found = {
        name: str(
            combine(fingerprint_bytes(read_part(each, part), each.dtype, part, each.shape) for part in each.parts)
        )
        for name, each in open_checkpoint(folder / MODEL_DIRECTORY).model.tensors.items()
    }
    (folder / "fingerprints.json").write_text(json.dumps(found))


def run_consolidation(options: argparse.Namespace) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
    from torch.distributed.checkpoint._hf_utils import _metadata_fn  # noqa: F401 - says early that torch has moved it

    names = list_shapes(options.params * 1e9)
    out = Path(options.run)
    out.mkdir()
    consolidate_safetensors_files(
        str(options.folder / "shards"), str(out), dict.fromkeys(names, 1), num_threads=options.threads or 2
    )


def list_commands(folder: Path, out: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Return what to run, by name."""
    checkpoint = folder / MODEL_DIRECTORY
    own = [sys.executable, __file__, str(folder), "--params", str(options.params), "--run", str(out)]
    own += ["--threads", str(options.threads)] if options.threads else []
    commands = {CP: ["cp", "-r", str(checkpoint), str(out)]}
    commands |= {name: [*own, *arguments] for name, arguments in EXPORTS.items()}
    commands[MERGE] = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    commands[MERGE] += [str(checkpoint), str(out)]
    commands[CONSOLIDATE] = [*own, "--consolidate"]
    return {name: command for name, command in commands.items() if _is_chosen(name, options)}


def _is_chosen(name: str, options: argparse.Namespace) -> bool:
    return name == CP or not options.only or any(name.startswith(each) for each in options.only.split(","))


def drop_from_cache(folder: Path) -> None:
    """Ask the kernel to forget the contents of all files; only clean pages can go, so they are synced first."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(
    commands: dict[str, list[str]], out: Path, rounds: int, before: Callable[[], None]
) -> dict[str, list[dict[str, float]]]:
    """Run everything in turns; return for each run the seconds, the peak memory and what the process told.

    Linux counts what this process had when it forked as the child's, so this process must stay small.
    """
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(rounds):
        names = list(commands)
        for name in names if number % 2 == 0 else reversed(names):
            before()
            begin = time.perf_counter()
            process = subprocess.Popen(
                commands[name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
            )
            output, errors = process.stdout.read(), process.stderr.read()  # type: ignore[union-attr] # pipes
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
            if status:
                raise SystemExit(f"{name} failed:\n{output}{errors}")
            stages = json.loads(output) if name in EXPORTS else {}
            cpu = usage.ru_utime + usage.ru_stime
            runs[name].append({"seconds": seconds, "cpu": cpu, "peak_mb": usage.ru_maxrss / 1e3, **stages})
            shutil.rmtree(out)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--params", type=float, default=1.0, help="billions of fp32 parameters (default 1)")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", help="beginnings of the names to run beside cp, with commas between")
    parser.add_argument("--cold", action="store_true", help="drop the checkpoint from the page cache before each")
    parser.add_argument("--json", action="store_true")
    for name in ("--write", "--run", "--dtype"):
        parser.add_argument(name, type=int if name == "--write" else str, help=argparse.SUPPRESS)
    for name in ("--record", "--consolidated", "--consolidate", "--fingerprints", "--prove"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write_rank(options.folder, options)
    elif options.record:
        write_fingerprints(options.folder)
    elif options.run is not None:
        (run_consolidation if options.consolidate else run_export)(options)
    else:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            compare(Path(name), options)


def compare(folder: Path, options: argparse.Namespace) -> None:
    options.consolidated = _is_chosen(CONSOLIDATE, options)
    write_checkpoint(folder, options)
    if any(_is_chosen(name, options) for name, arguments in EXPORTS.items() if "--fingerprints" in arguments):
        subprocess.run([sys.executable, __file__, str(folder), "--record"], check=True)
    out = folder / "out"
    commands = list_commands(folder, out, options)

    def prepare() -> None:
        if options.cold:
            drop_from_cache(folder)

    if not options.cold:
        measure({CP: commands[CP]}, out, 1, prepare)  # warms the page cache up
    runs = measure(commands, out, options.rounds, prepare)
    num_bytes = sum(path.stat().st_size for path in (folder / MODEL_DIRECTORY).iterdir())
    report(runs, num_bytes, options)


def report(runs: dict[str, list[dict[str, float]]], num_bytes: int, options: argparse.Namespace) -> None:
    """Print medians, and ratios to `cp` within each round."""
    rows = {}
    for name, own in runs.items():
        ratios = [each["seconds"] / cp["seconds"] for each, cp in zip(own, runs[CP], strict=True)]
        rows[name] = {key: statistics.median(each[key] for each in own) for key in own[0]}
        rows[name] |= {"of_cp": statistics.median(ratios), "peak_mb": max(each["peak_mb"] for each in own)}
    if options.json:
        print(json.dumps({"bytes": num_bytes, "rows": rows, "runs": runs}, indent=1))
        return
    where = "from disk" if options.cold else "from the page cache"
    print(f"{num_bytes / 1e9:.2f} GB of {options.world_size} ranks, {where}, {os.cpu_count()} cores, no syncs")
    print(f"{'':40} median s   of cp   cpu s   peak MB")
    for name, row in rows.items():
        stages = "".join(f"  {key.removesuffix('_s')} {row[key]:.2f}" for key in row if key.endswith("_s"))
        print(f"{name:40} {row['seconds']:8.2f} {row['of_cp']:7.2f} {row['cpu']:7.2f} {row['peak_mb']:9.0f}{stages}")
    for name, aim in AIMS.items():
        if name in rows:
            reached = rows[name]["of_cp"] <= aim
            print(f"aim: {name} at most {aim} of cp; {'reached' if reached else 'NOT reached'}")
    peak = max((row["peak_mb"] for name, row in rows.items() if name in EXPORTS), default=0)
    print(f"aim: exports in at most {MAX_PEAK_MB} MB; {'reached' if peak <= MAX_PEAK_MB else 'NOT reached'}")


if __name__ == "__main__":
    main()
