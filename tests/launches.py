"""Start the examples, and compare what they leave: as people do, with `accelerate launch`, or on forked ranks.

A launch imports everything once for itself and once per rank, which costs ten times what a small script does. Ranks
that are forked get the environment that the launch would have given them.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness import run_ranks

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "accelerate_configs"
CONFIG = "fsdp2_cpu.yaml"
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
ON_TWO_CPUS = (*LAUNCH, "--config_file", CONFIGS / CONFIG)
SUPERVISE = (sys.executable, "-m", "accel_fsdp_tools.cli", "supervise")
EXAMPLE = ("examples/finetune_lm.py", "--model", "tiny")
NUM_STEPS = 12


def make_environment(**variables: str) -> dict[str, str]:
    """Return the environment for an example: nothing is downloaded, and the package is this one."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}


def run(*command: Any, timeout_s: float = 600.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the root of the project, to its end."""
    process = start(*command, **variables)
    try:
        out, error = process.communicate(timeout=timeout_s)
    except BaseException:
        process.terminate()  # torchrun ends its ranks, which are in sessions of their own
        process.communicate(timeout=60)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def train_whole(output: Path, *options: str) -> Path:
    """Launch the example without a break, and return the folder that it has filled."""
    result = run(*ON_TWO_CPUS, *EXAMPLE, "--output-dir", output, *options)
    assert result.returncode == 0, result.stderr[-3000:]
    return output


def start(*command: Any, **variables: str) -> subprocess.Popen[str]:
    """Start a command in the root of the project."""
    return subprocess.Popen(
        [str(each) for each in command],
        cwd=ROOT,
        env=make_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def compare(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run examples/compare_runs.py."""
    return run(sys.executable, "examples/compare_runs.py", *arguments)


def assert_identical(reference: Path, other: Path, *, starts: list[int] | None = None) -> None:
    """Both runs computed the same in every bit, and the other one was started at these steps, if they are known."""
    result = compare(reference, other)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "identical, bit for bit" in result.stdout, (result.stdout, result.stderr)
    assert starts is None or read_starts(other) == starts


def read_log(output: Path) -> list[dict[str, Any]]:
    """Return what the example has logged: a line per start and step."""
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def read_starts(output: Path, what: str = "step") -> list[int]:
    """Return the step at which each start of a run began, or its number of ranks."""
    return [line[what] for line in read_log(output) if line.get("event") == "start"]


def wait_for_step(output: Path, step: int, timeout_s: float = 400.0) -> None:
    """Wait until a run has logged this step."""
    log, deadline = output / "log.jsonl", time.monotonic() + timeout_s
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        if time.monotonic() > deadline:
            raise AssertionError(f"step {step} was not reached within {timeout_s:g} s")
        time.sleep(0.05)


def merge_arguments(config: str, *flags: str) -> Any:
    """Return the arguments that `accelerate launch --config_file CONFIG FLAGS script.py` arrives at."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments = ["--config_file", str(CONFIGS / config), *flags, "script.py"]
    return _validate_launch_command(launch_command_parser().parse_args(arguments))[0]


def read_launch_environment(config: str, *flags: str) -> dict[str, str]:
    """Return the variables that the launched processes get because of the config."""
    from accelerate.utils import launch

    with mock.patch.object(launch, "is_port_in_use", return_value=False):
        environment = launch.prepare_multi_gpu_env(merge_arguments(config, *flags))
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return {key: value for key, value in environment.items() if key.startswith(prefixes)}


def _run_script(script: str, options: tuple[str, ...]) -> None:
    sys.argv = [script, *options]
    sys.path.insert(0, str((ROOT / script).parent))
    os.chdir(ROOT)
    runpy.run_path(script, run_name="__main__")


def run_script(script: str, *options: str | Path, config: str, folder: Path) -> str:
    """Run a script of this repository as `accelerate launch` would, and return what rank 0 printed.

    Raises `RankError` if it fails.
    """
    run_ranks(_run_script, script, tuple(map(str, options)), folder=folder, environment=read_launch_environment(config))
    return (folder / "log_0.txt").read_text()
