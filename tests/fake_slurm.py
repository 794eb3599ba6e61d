"""As much of Slurm as a batch script meets: `srun`, `scontrol`, `squeue` and `sbatch`, whose nodes are local processes.

Signals go where Slurm sends them: to the tasks themselves and to nothing below them, which is what its cgroup plugin
does, or to every process of the step, as those that follow the process tree do.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness import find_free_port
from tests.launches import ROOT, make_environment

_SRUN = """
import contextlib, os, signal, subprocess, sys, time
import psutil
command = sys.argv[1:]
options = []
while command[0].startswith("--"):
    options.append(command.pop(0))
assert "--kill-on-bad-exit=1" in options, options
output = next(each.split("=", 1)[1] for each in options if each.startswith("--output="))
tasks = []
for node in range(int(os.environ["SLURM_NNODES"])):
    log = open(output.replace("%n", str(node)), "a")
    tasks.append(
        subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(node)}, stdout=log, stderr=subprocess.STDOUT)
    )
with open(os.environ["FAKE_SLURM"] + "/tasks", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
killed_at = None
while any(task.poll() is None for task in tasks):
    time.sleep(0.05)
    if killed_at is None and any(task.poll() for task in tasks):
        killed_at = time.monotonic()
        for task in tasks:
            if task.poll() is None:
                task.terminate()
    if killed_at is not None and time.monotonic() > killed_at + 30:
        for task in tasks:
            if task.poll() is None:
                for process in [*psutil.Process(task.pid).children(recursive=True), task]:  # its cgroup
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
sys.exit(max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks))
"""
_SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("127.0.0.1\\n127.0.0.1")
else:
    assert sys.argv[1:] == ["requeue", os.environ["SLURM_JOB_ID"]], sys.argv
    open(os.environ["FAKE_SLURM"] + "/requeued", "w").close()
"""
_SQUEUE = "import os; print(open(os.environ['FAKE_SLURM'] + '/state').read())"
_SBATCH = """
import json, os, sys
with open(os.environ["FAKE_SLURM"] + "/submitted", "w") as file:
    json.dump({"arguments": sys.argv[1:], "excluded": os.environ.get("EXCLUDED")}, file)
"""
_ACCEL_FSDP = "import sys; from accel_fsdp_tools.cli.main import main; sys.exit(main())"
_PROGRAMS = {"srun": _SRUN, "scontrol": _SCONTROL, "squeue": _SQUEUE, "sbatch": _SBATCH, "accel-fsdp": _ACCEL_FSDP}


@dataclass
class Ended:
    """How a job ended. `is_requeued`: it has put itself back into the queue."""

    code: int
    output: str
    is_requeued: bool


class FakeSlurm:
    """A cluster of two nodes in `folder`, on which one job runs at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        binaries = folder / "bin"
        binaries.mkdir(parents=True)
        for name, code in _PROGRAMS.items():
            (binaries / name).write_text(f"#!{sys.executable}\n{code}")
            (binaries / name).chmod(0o755)
        (binaries / "accelerate").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m accelerate.commands.accelerate_cli "$@"\n'
        )
        (binaries / "accelerate").chmod(0o755)
        self.num_restarts = 0
        # The script makes the port from it, from 20000 on.
        self._job_id = next(port for port in iter(find_free_port, None) if port >= 20000) - 20000

    def start(self, *options: str, **variables: str) -> subprocess.Popen[str]:
        """Start the batch script, as `sbatch examples/slurm/train.sbatch OPTIONS` would."""
        for name in ("tasks", "requeued", "submitted"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "state").write_text("RUNNING")
        environment = make_environment(
            PATH=f"{self.folder / 'bin'}:{os.environ['PATH']}",
            FAKE_SLURM=str(self.folder),
            SLURM_JOB_ID=str(self._job_id),
            SLURM_JOB_NODELIST="node[0-1]",
            SLURM_NNODES="2",
            SLURM_GPUS_ON_NODE="1",
            SLURM_RESTART_COUNT=str(self.num_restarts),
            CONFIG="accelerate_configs/fsdp2_cpu.yaml",
            **variables,
        )
        return subprocess.Popen(
            ["bash", "examples/slurm/train.sbatch", "--model", "tiny", *options],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def signal(self, number: signal.Signals, *, everything: bool = False) -> None:
        """Signal the tasks of the step, or with `everything` all that these have started."""
        for task in self._read_tasks():
            below = task.children(recursive=True) if everything else []
            for process in [task, *below]:
                process.send_signal(number)

    def kill_node(self, node: int) -> None:
        """A node goes down: all its processes at once."""
        task = self._read_tasks()[node]
        for process in [task, *task.children(recursive=True)]:
            process.kill()

    def cancel(self) -> None:
        """What `scancel` does to the job's state."""
        (self.folder / "state").write_text("COMPLETING")

    def wait(self, job: subprocess.Popen[str], timeout_s: float = 600.0) -> Ended:
        """Wait for the job's end; a job that is started next is its restart."""
        try:
            output, _ = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            job.kill()
            self.kill_node(0)
            self.kill_node(1)
            raise
        self.num_restarts += 1
        return Ended(job.returncode, output, (self.folder / "requeued").exists())

    def _read_tasks(self) -> list[psutil.Process]:
        deadline = time.monotonic() + 30
        while not (self.folder / "tasks").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return [psutil.Process(int(number)) for number in (self.folder / "tasks").read_text().split()]
