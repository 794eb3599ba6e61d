"""What launchers make of a signal and of a dead rank: torchrun itself, its agent and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.cli.main import main
from tests.training import read_root

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.matrix


@contextmanager
def _launch(log: Path, environment: dict[str, str], **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    arguments = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    arguments += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.launched", json.dumps(settings)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    with log.open("w") as file:
        process = subprocess.Popen(arguments, env=variables, stdout=file, stderr=file, cwd=ROOT, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(log: Path, text: str, process: subprocess.Popen[bytes], timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        has_ended = process.poll() is not None  # asked first: it may write this and end in between
        found = log.read_text()
        if text in found:
            return
        assert not has_ended, found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_the_launcher_passes_a_signal_on_and_waits(tmp_path: Path, name: str) -> None:
    root, log = tmp_path / "root", tmp_path / "log"
    environment = {
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90",
    }
    with _launch(log, environment, root=str(root), pause_s=0.3) as process:
        _wait_for(log, "batch 3", process)
        process.send_signal(getattr(signal, name))
        assert process.wait(250) == 1, "whatever its workers end with"
    text = log.read_text()
    assert f"{name} came; saved {root}/step_" in text
    assert "ends with exit code 75" in text
    assert len(read_root(root)) == 1
    assert main(["health", str(root), "--exit-as-run"]) == 75
    assert main(["health", str(root), "--max-age", "0", "--startup-grace", "0"]) == 0, "over, and well"


def test_workers_of_a_dead_rank_end_before_the_launcher_kills_them(tmp_path: Path) -> None:
    """Rank 0 hangs in C, as NCCL does: SIGTERM comes from the launcher, and no step ever ends."""
    root, log = tmp_path / "root", tmp_path / "log"
    settings = {"stuck": [0, 3], "die": [1, 3], "last_words_s": 2.0}
    with _launch(log, {}, root=str(root), **settings) as process:
        assert process.wait(250) == 1
    text = log.read_text()
    assert "has ended, so no step will end" in text
    assert "in block" in text
    assert "forcefully exiting via" not in text, "the launcher had to kill"
    assert "exitcode  : 7 " in text, "the root cause"
    assert read_root(root) == []
    assert main(["health", str(root), "--exit-as-run"]) == 1
