"""Several nodes, which are launchers of their own on this machine, and what becomes of a run that loses one."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from accel_fsdp_tools.running.heartbeat import list_beats
from tests.harness import find_free_port
from tests.launches import (
    EXAMPLE,
    LAUNCH,
    ON_TWO_CPUS,
    ROOT,
    SUPERVISE,
    assert_identical,
    make_environment,
    read_log,
    read_starts,
    run,
    train_whole,
    wait_for_step,
)

pytestmark = pytest.mark.timeout(900)
LONG = ["--steps", "150", "--save-every", "20", "--samples", "400"]


class Nodes:
    """Two nodes that meet on loopback, with a rank each. Their output goes to `folder`."""

    def __init__(self, folder: Path, *, elastic: bool = False, backend: str = "c10d", restarts: int = 3) -> None:
        self.folder = folder
        self._elastic, self._backend, self._restarts = elastic, backend, restarts
        self._port = find_free_port()
        self._started: list[subprocess.Popen[str]] = []

    def start(self, number: int, output: Path, *options: str) -> subprocess.Popen[str]:
        """Start the launcher of node 0, which the others look for, or node 1."""
        at = f"127.0.0.1:{self._port}"
        flags = ["--rdzv_backend", self._backend, "--max_restarts", str(self._restarts)]
        variables = {}
        if self._elastic:  # as many nodes as come: a matter of torchrun's, which `accelerate launch` has no flag for
            variables = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": at, "PET_RDZV_ID": "run"}
            flags += ["--num_machines", "1", "--num_processes", "1", "--main_process_port", "0"]
            flags += ["--rdzv_conf", f"is_host={int(number == 0)},last_call_timeout=3"]
        else:
            flags += ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(number)]
            flags += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(self._port)]
            if self._backend == "c10d":
                flags += ["--rdzv_conf", f"is_host={int(number == 0)}"]
        config = ["--config_file", "accelerate_configs/fsdp2_cpu.yaml"]
        command = [*SUPERVISE, output / "checkpoints", "--", *LAUNCH, *config, *flags, *EXAMPLE]
        with (self.folder / f"node_{number}.log").open("a") as log:
            process = subprocess.Popen(
                [str(each) for each in [*command, "--output-dir", output, *options]],
                cwd=ROOT,
                env=make_environment(**variables),
                stdout=log,
                stderr=log,
                text=True,
            )
        self._started.append(process)
        return process

    def read_logs(self) -> str:
        return "".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                kill_node(process)
            process.wait(30)


def kill_node(launcher: subprocess.Popen[str]) -> None:
    """All processes of a node at once, as when it loses its power."""
    for process in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended by itself meanwhile
            process.send_signal(signal.SIGKILL)


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    given = Nodes(tmp_path, **getattr(request, "param", {}))
    yield given
    given.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_whole(tmp_path_factory.mktemp("whole"), *LONG)


def _wait(processes: list[subprocess.Popen[str]], timeout_s: float = 600.0) -> list[int]:
    return [process.wait(timeout_s) for process in processes]


@pytest.mark.matrix
def test_a_node_that_is_lost_and_comes_back_is_waited_for(whole: Path, nodes: Nodes, tmp_path: Path) -> None:
    output = tmp_path / "run"
    launchers = [nodes.start(number, output, *LONG) for number in (0, 1)]
    wait_for_step(output, 30)
    kill_node(launchers[1])
    launchers[1].wait(30)
    launchers[1] = nodes.start(1, output, *LONG)
    assert _wait(launchers) == [0, 0], nodes.read_logs()
    assert_identical(whole, output)
    assert len(read_starts(output)) == 2


@pytest.mark.matrix
@pytest.mark.parametrize("nodes", [{"backend": "static", "restarts": 0}], indirect=True)
def test_with_the_static_rendezvous_all_launchers_are_started_again(whole: Path, nodes: Nodes, tmp_path: Path) -> None:
    output = tmp_path / "run"
    launchers = [nodes.start(number, output, *LONG) for number in (0, 1)]
    wait_for_step(output, 30)
    kill_node(launchers[1])
    assert launchers[0].wait(200) == 1, nodes.read_logs()
    assert _wait([nodes.start(number, output, *LONG) for number in (0, 1)]) == [0, 0], nodes.read_logs()
    assert_identical(whole, output)
    assert len(read_starts(output)) == 2


# -- a node that is gone for good -----------------------------------------------------------------------------------


def _read_losses(output: Path) -> list[dict[int, float]]:
    """The losses of each start, by step."""
    starts: list[dict[int, float]] = []
    for line in read_log(output):
        if line.get("event") == "start":
            starts.append({})
        else:
            starts[-1][line["step"]] = line["loss"]
    return starts


def _assert_same_samples(expected: dict[int, float], actual: dict[int, float]) -> None:
    """In the first steps of a start: sums over other ranks round differently, and after fifty steps that can be seen.

    With other samples the second digit would be another.
    """
    steps = [step for step in actual if step in expected][:20]
    assert steps
    assert all(math.isclose(actual[step], expected[step], rel_tol=1e-4) for step in steps)


def test_fewer_ranks_go_on_with_the_same_samples(tmp_path: Path) -> None:
    """Two ranks are killed after step 12, before its save; one goes on from step 8, and accumulates twice as often."""
    options = ["--output-dir", tmp_path / "run", "--update-size", "8", "--dropout", "0"]
    assert run(*ON_TWO_CPUS, *EXAMPLE, *options, "--kill-at-step", "12").returncode != 0
    alone = run(*ON_TWO_CPUS, "--num_processes", "1", *EXAMPLE, *options)
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert "2 rank(s), now 1" in alone.stdout or "samples per update" in alone.stdout, alone.stdout
    assert read_starts(tmp_path / "run", "ranks") == [2, 1]
    before, after = _read_losses(tmp_path / "run")
    assert list(after) == [9, 10, 11, 12]
    _assert_same_samples(before, after)


@pytest.mark.matrix
@pytest.mark.parametrize("nodes", [{"elastic": True}], indirect=True)
def test_nodes_that_go_and_come_change_the_number_of_ranks(nodes: Nodes, tmp_path: Path) -> None:
    """torchrun goes on with the node that is left, and takes in one that comes; nobody starts anything by hand."""
    options = [*LONG, "--update-size", "8", "--dropout", "0"]
    (expected,) = _read_losses(train_whole(tmp_path / "whole", *options))
    output = tmp_path / "run"
    launchers = [nodes.start(number, output, *options) for number in (0, 1)]
    wait_for_step(output, 30)
    kill_node(launchers[1])
    launchers[1].wait(30)
    wait_for_step(output, 50)  # from step 20 on by one rank
    ((_, beat),) = list_beats(output / "checkpoints")
    rank = psutil.Process(beat.process_id)
    rank.suspend()  # or it would have done all before the other node is there
    launchers[1] = nodes.start(1, output, *options)
    _wait_for_text(nodes.folder / "node_0.log", f"Sending process {beat.process_id} closing signal SIGTERM")
    rank.resume()
    assert _wait(launchers) == [0, 0], nodes.read_logs()
    assert read_starts(output, "ranks") == [2, 1, 2]
    losses = _read_losses(output)
    for each in losses:
        _assert_same_samples(expected, each)
    # The rank that torchrun has ended, to take the node in, has saved: no step was lost.
    assert max(losses[1]) == read_starts(output)[2]


def _wait_for_text(path: Path, text: str, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()[-3000:]
        time.sleep(0.1)
