"""How fast an export is, beside `cp` of the same bytes, `accelerate merge-weights` and torch's consolidation.

    python benchmarks/export.py
    python benchmarks/export.py --model moe --params 0.5 --rounds 3 --cold
    python benchmarks/export.py --params 4 --only "export, fingerprints" --rounds 1 --json

A random checkpoint with the names and shapes of a Llama (`--model tied`: with tied embeddings; `moe`: a Mixtral, whose
experts are fused in memory and taken apart by an export) is written by the real `torch.distributed.checkpoint`, one
process per rank, and a second time as the rank files that torch's consolidation takes, unless `--only` leaves it out.
"ours" has a manifest with fingerprints and what is known of the architecture, "foreign" are the same files without.

Then all ways run in turns, in one run, each in a process of its own, start included; its output is deleted afterwards
and is not counted. Nobody syncs: `os.fsync` does nothing in the processes that export. Only medians and ratios of one
run mean something. `--cold` drops the checkpoint from the page cache before each (needs nothing but Linux). Needs disk
space for twice the checkpoint (three times with torch's consolidation). Peak memory is that of the process; of exports
without that of the process that they ask about a config.

A virtual machine may give memory that is free back to its host, and get it back page by page, which takes several times
as long as what is measured here; the deleted output of one run is such memory for the next. So each way runs twice in a
row, and the second run, which counts, mostly finds the memory that the first has left (`--in-a-row 1`: once, in half of
the time). Where the runs of one kind are far apart all the same (`--json` has them all), the fastest ones say what the
software does, and the others what the host does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_fsdp_tools.extents import DiskTensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # a clone is measured without being installed

CP, MERGE, CONSOLIDATE = "cp", "accelerate merge-weights", "torch consolidation"
OURS, FOREIGN = "ours", "foreign"
EXPORTS: dict[str, list[str]] = {  # the checkpoint, and flags of the command
    "export, crcs": [FOREIGN, "--verify=off"],
    "export, crcs, read again": [FOREIGN],
    "export, crcs, read again, config": [FOREIGN, "--model"],
    "export, fingerprints": [OURS, "--verify=off"],
    "export, fingerprints, read again": [OURS],
    "export, bf16, crcs": [FOREIGN, "--dtype=bf16", "--verify=off"],
    "export, bf16, crcs, read again": [FOREIGN, "--dtype=bf16"],
    "export, bf16, fingerprints, read again": [OURS, "--dtype=bf16"],
}
# `cp` does not sync either, and how fast the disk is, is not the question.
EXPORT = """
import os, sys
os.fsync = lambda descriptor: None
from accel_fsdp_tools.cli.main import run_module
code = run_module("export", sys.argv[1:])
import resource
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""
AIMS = {
    "export, crcs": 0.9,
    "export, crcs, read again": 0.9,
    "export, fingerprints": 1.1,
    "export, fingerprints, read again": 1.1,
    "export, bf16, crcs": 1.3,
    "export, bf16, crcs, read again": 1.3,
    "export, bf16, fingerprints, read again": 1.3,
}
TIED = ("model.embed_tokens.weight", "lm_head.weight")
MAX_PEAK_MB = 100
MODEL_DIRECTORY = "pytorch_model_fsdp_0"  # Accelerate's


def build_config(kind: str, num_params: float) -> Any:
    """Return the transformers config of a model of about so many parameters."""
    from transformers import LlamaConfig, MixtralConfig

    hidden = max(256, round((num_params / 16 / 14) ** 0.5 / 128) * 128)
    inner, vocabulary = hidden * 11 // 4 // 128 * 128, 32000
    num_experts = 8 if kind == "moe" else 1
    per_layer = hidden * hidden * 5 // 2 + num_experts * 3 * hidden * inner
    num_embeddings = 1 if kind == "tied" else 2
    shape = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": max(1, round((num_params - num_embeddings * vocabulary * hidden) / per_layer)),
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64 // 4 or 1,
        "vocab_size": vocabulary,
        "tie_word_embeddings": kind == "tied",
        "dtype": "float32",
    }
    return MixtralConfig(**shape, num_local_experts=num_experts) if kind == "moe" else LlamaConfig(**shape)


def describe(folder: Path, options: argparse.Namespace) -> None:
    """Write the model's config, names and shapes as it has them in memory, and what an export has to know of it."""
    import torch
    from transformers import AutoModelForCausalLM

    from accel_fsdp_tools.describing import describe_architecture

    config = build_config(options.model, options.params * 1e9)
    config.architectures = ["MixtralForCausalLM" if options.model == "moe" else "LlamaForCausalLM"]
    config.save_pretrained(folder / "config")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    (folder / "shapes.json").write_text(json.dumps(shapes))
    (folder / "architecture.json").write_text(json.dumps(describe_architecture(model).to_dict()))


def write_checkpoint(folder: Path, options: argparse.Namespace) -> None:
    """Write the checkpoint, each rank's part by a process of its own, as in a real save; then it without a manifest."""
    own = [sys.executable, __file__, str(folder), "--params", str(options.params), "--model", options.model]
    subprocess.run([*own, "--step", "describe"], check=True)
    command = [*own, "--world-size", str(options.world_size), *(["--shards"] if options.shards else [])]
    ranks = [subprocess.Popen([*command, "--step", "write", "--rank", str(r)]) for r in range(options.world_size)]
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit("writing the checkpoint failed")
    subprocess.run([*own, "--step", "record"], check=True)
    shutil.copytree(folder / OURS / MODEL_DIRECTORY, folder / FOREIGN / MODEL_DIRECTORY, copy_function=os.link)


def write_rank(folder: Path, options: argparse.Namespace) -> None:
    """Save as one of the ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, world_size = options.rank, options.world_size
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    shapes = {name: (shape[0] // world_size, *shape[1:]) for name, shape in read_shapes(folder).items()}
    # All tensors are parts of the same noise, each from another place on: memory is that of the largest.
    noise = torch.randn(
        max(map(math.prod, shapes.values())) + len(shapes), generator=torch.Generator().manual_seed(rank)
    )
    noise *= 0.02
    tensors: dict[str, Any] = {}
    for place, (name, shape) in enumerate(shapes.items()):
        start = 0 if options.model == "tied" and name in TIED else place
        local = noise[start : start + math.prod(shape)].view(shape)
        tensors[name] = DTensor.from_local(local, mesh, [Shard(0)])
    dcp.save({"model": tensors}, checkpoint_id=str(folder / OURS / MODEL_DIRECTORY))
    if options.shards:
        writer = dcp.HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes = json.loads((folder / "shapes.json").read_text())
    return {name: tuple(shape) for name, shape in shapes.items()}


def write_manifest_of(folder: Path) -> None:
    """Record what a save with this package records, as far as an export looks at it."""
    from accel_fsdp_tools.architecture import ArchitectureFacts
    from accel_fsdp_tools.fingerprint import combine, fingerprint_bytes
    from accel_fsdp_tools.formats.reading import read_blocks
    from accel_fsdp_tools.manifest import (
        DIRECTORY,
        STATES,
        Lineage,
        Manifest,
        ModelFacts,
        TensorFacts,
        Topology,
        write_manifest,
    )
    from accel_fsdp_tools.opening import open_checkpoint

    def sum_up(tensor: DiskTensor) -> str:
        blocks = ((part, block) for whole in tensor.parts for part, block in read_blocks(tensor, whole))
        return str(combine(fingerprint_bytes(block, tensor.dtype, part, tensor.shape) for part, block in blocks))

    architecture = ArchitectureFacts.from_dict(json.loads((folder / "architecture.json").read_text()))
    checkpoint = folder / OURS
    found = open_checkpoint(checkpoint / MODEL_DIRECTORY).model.tensors
    tensors = tuple(
        TensorFacts(name, each.dtype, each.shape, True, "parameter", sum_up(each)) for name, each in found.items()
    )
    assets = checkpoint / DIRECTORY / "model_0"
    shutil.copytree(folder / "config", assets)
    model = ModelFacts(architecture.class_name, tensors, architecture=architecture.to_dict())
    manifest = Manifest(
        created_at="2026-01-01T00:00:00.000+00:00",
        step=1,
        epoch=0,
        lineage=Lineage("benchmark", "benchmark", 1),
        topology=Topology(2, "FSDP", 2, "SHARDED_STATE_DICT"),
        versions={},
        states={name: {} for name in STATES},
        files=(),
        models=(model,),
        optimizers=(),
        num_schedulers=0,
        num_dataloaders=0,
        num_custom_objects=0,
        accelerate={},
    )
    write_manifest(checkpoint, manifest)


def run_consolidation(options: argparse.Namespace) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names = read_shapes(options.folder)
    out = Path(options.run)
    out.mkdir()
    consolidate_safetensors_files(
        str(options.folder / "shards"), str(out), dict.fromkeys(names, 1), num_threads=options.threads or 2
    )


def list_commands(folder: Path, out: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Return what to run, by name."""
    checkpoint = folder / OURS / MODEL_DIRECTORY
    own = [sys.executable, __file__, str(folder), "--run", str(out)]
    own += ["--threads", str(options.threads)] if options.threads else []
    commands = {CP: ["cp", "-r", str(checkpoint), str(out)]}
    for name, (source, *flags) in EXPORTS.items():
        flags = [f"--model={folder / 'config'}" if flag == "--model" else flag for flag in flags]
        flags += [f"--threads={options.threads}"] if options.threads else []
        commands[name] = [sys.executable, "-c", EXPORT, str(folder / source), str(out), "--json", *flags]
    commands[MERGE] = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    commands[MERGE] += [str(checkpoint), str(out)]
    commands[CONSOLIDATE] = [*own, "--step", "consolidate"]
    return {name: command for name, command in commands.items() if _is_chosen(name, options)}


def _is_chosen(name: str, options: argparse.Namespace) -> bool:
    def chooses(text: str) -> bool:
        return name == text or (name.startswith(text) and text not in EXPORTS)

    return name == CP or not options.only or any(map(chooses, options.only))


def drop_from_cache(folder: Path) -> None:
    """Ask the kernel to forget the contents of all files; only clean pages can go, so they are synced first."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(
    commands: dict[str, list[str]], out: Path, rounds: int, before: Callable[[], None], in_a_row: int = 1
) -> dict[str, list[dict[str, float]]]:
    """Run everything in turns; return for each run the seconds, the peak memory and what the process told."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(rounds):
        names = list(commands)
        for name in names if number % 2 == 0 else reversed(names):
            for _ in range(in_a_row):
                before()
                found = run_command(name, commands[name])
                shutil.rmtree(out)
            runs[name].append(found)
    return runs


def run_command(name: str, command: list[str]) -> dict[str, float]:
    """Run one command. Linux counts what this process had when it forked as the child's, so it must stay small."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},  # nobody who installs this compiles it every time
    )
    output, errors = process.stdout.read(), process.stderr.read()  # type: ignore[union-attr] # pipes
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"{name} failed:\n{output}{errors}")
    found = {"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss / 1e3}
    if name in EXPORTS:
        found["peak_mb"] = int(errors.split()[-1]) / 1e3
        found |= {f"{stage}_s": value for stage, value in json.loads(output)["seconds"].items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--params", type=float, default=1.0, help="billions of fp32 parameters (default 1)")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-a-row", type=int, default=2, help="runs at a time, of which the last counts (default 2)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", action="append", help="a name or the beginning of some; may be repeated")
    parser.add_argument("--cold", action="store_true", help="drop the checkpoint from the page cache before each")
    parser.add_argument("--model", choices=("llama", "tied", "moe"), default="llama")
    parser.add_argument("--json", action="store_true")
    # What the processes that this one starts are told.
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--shards", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is not None:
        STEPS[options.step](options)
    else:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            compare(Path(name), options)


STEPS: dict[str, Callable[[argparse.Namespace], None]] = {
    "describe": lambda options: describe(options.folder, options),
    "write": lambda options: write_rank(options.folder, options),
    "record": lambda options: write_manifest_of(options.folder),
    "consolidate": run_consolidation,
}


def compare(folder: Path, options: argparse.Namespace) -> None:
    options.shards = _is_chosen(CONSOLIDATE, options)
    write_checkpoint(folder, options)
    out = folder / "out"
    commands = list_commands(folder, out, options)

    def prepare() -> None:
        if options.cold:
            drop_from_cache(folder)

    measure(commands, out, 1, prepare)  # compiles modules, warms the page cache up
    runs = measure(commands, out, options.rounds, prepare, options.in_a_row)
    num_bytes = sum(path.stat().st_size for path in (folder / OURS / MODEL_DIRECTORY).iterdir())
    report(runs, num_bytes, options)


def report(runs: dict[str, list[dict[str, float]]], num_bytes: int, options: argparse.Namespace) -> None:
    """Print medians, and ratios to `cp` within each round."""
    rows = {}
    for name, own in runs.items():
        ratios = [each["seconds"] / cp["seconds"] for each, cp in zip(own, runs[CP], strict=True)]
        rows[name] = {key: statistics.median(each[key] for each in own) for key in own[0]}
        fastest = min(each["seconds"] for each in own) / min(each["seconds"] for each in runs[CP])
        rows[name] |= {"of_cp": statistics.median(ratios), "minima": fastest}
        rows[name] |= {"peak_mb": max(each["peak_mb"] for each in own)}
    if options.json:
        print(json.dumps({"bytes": num_bytes, "rows": rows, "runs": runs}, indent=1))
        return
    where = "from disk" if options.cold else "from the page cache"
    what = f"{options.model}, {num_bytes / 1e9:.2f} GB of {options.world_size} ranks"
    print(f"{what}, {where}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, no syncs")
    print(f"{'':40} median s   of cp  of cp, minima   cpu s   peak MB")
    for name, row in rows.items():
        stages = "".join(f"  {key.removesuffix('_s')} {row[key]:.2f}" for key in row if key.endswith("_s"))
        numbers = f"{row['seconds']:8.2f} {row['of_cp']:7.2f} {row['minima']:14.2f} {row['cpu']:7.2f}"
        print(f"{name:40} {numbers} {row['peak_mb']:9.0f}{stages}")
    for name, aim in AIMS.items():
        if name in rows:
            reached = rows[name]["of_cp"] <= aim
            print(f"aim: {name} at most {aim} of cp (median); {'reached' if reached else 'NOT reached'}")
    for name, row in rows.items():
        if name in EXPORTS and MERGE in rows:
            print(f"{rows[MERGE]['seconds'] / row['seconds']:.1f} times as fast as {MERGE}: {name}")
    peak = max((row["peak_mb"] for name, row in rows.items() if name in EXPORTS), default=0)
    print(f"aim: exports in at most {MAX_PEAK_MB} MB; {'reached' if peak <= MAX_PEAK_MB else 'NOT reached'}")


if __name__ == "__main__":
    main()
