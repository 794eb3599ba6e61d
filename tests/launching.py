"""What `accelerate launch` makes of a config, and scripts on ranks that get its environment without its start.

A launch imports everything once for itself and once per rank, which costs ten times what a small script does.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness import run_ranks

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "accelerate_configs"


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
