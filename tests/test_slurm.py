"""examples/slurm as it is, on two local "nodes": signalled as Slurm does it, requeued, and ending bit-identical."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fake_slurm import FakeSlurm
from tests.launches import ROOT, assert_identical, compare, read_starts, train_whole, wait_for_step

pytestmark = pytest.mark.timeout(900)
SCRIPTS = sorted((ROOT / "examples" / "slurm").iterdir())
LONG = ["--steps", "120", "--save-every", "100", "--samples", "400"]  # long enough to be signalled in between


def test_scripts_are_sound() -> None:
    assert [script.name for script in SCRIPTS] == ["node.sh", "train.sbatch"]
    for script in SCRIPTS:
        assert script.stat().st_mode & 0o111
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", *SCRIPTS], check=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_whole(tmp_path_factory.mktemp("whole"), *LONG)


@pytest.mark.matrix
@pytest.mark.parametrize("everything", [False, True])
def test_a_time_limit_ends_in_the_queue_and_then_bit_identical(whole: Path, tmp_path: Path, everything: bool) -> None:
    slurm, output = FakeSlurm(tmp_path / "slurm"), tmp_path / "run"
    job = slurm.start(*LONG, RUN_DIR=str(output))
    wait_for_step(output, 20)
    slurm.signal(signal.SIGUSR1, everything=everything)
    ended = slurm.wait(job)
    assert "exit code 75" in ended.output, ended.output + _read_logs(output)
    assert (ended.code, ended.is_requeued) == (0, True)

    ended = slurm.wait(slurm.start(*LONG, RUN_DIR=str(output)))
    assert (ended.code, ended.is_requeued) == (0, False), ended.output + _read_logs(output)
    first, second = read_starts(output)
    assert first == 0
    assert second >= 20
    assert_identical(whole, output)
    logs = [path.relative_to(output / "logs").parts for path in (output / "logs").rglob("stdout.log")]
    assert len({(job, node) for job, node, *_ in logs}) == 4  # two starts on two nodes, one rank each


@pytest.mark.matrix
def test_what_is_cancelled_stays_out_of_the_queue(tmp_path: Path) -> None:
    slurm, output = FakeSlurm(tmp_path / "slurm"), tmp_path / "run"
    job = slurm.start(*LONG, RUN_DIR=str(output))
    wait_for_step(output, 5)
    slurm.cancel()
    slurm.signal(signal.SIGTERM)
    job.send_signal(signal.SIGTERM)
    ended = slurm.wait(job)
    assert "exit code 75" in ended.output, ended.output + _read_logs(output)
    assert not ended.is_requeued


@pytest.mark.matrix
def test_an_unhealthy_node_is_left_out_of_the_next_job(uninterrupted: Path, tmp_path: Path) -> None:
    slurm, output = FakeSlurm(tmp_path / "slurm"), tmp_path / "run"
    fault = tmp_path / "fault"
    fault.touch()
    options = ["--health", f"test ! -e {fault}"]
    ended = slurm.wait(slurm.start(*options, RUN_DIR=str(output), EXCLUDED="node9"))
    assert (ended.code, ended.is_requeued) == (0, False), ended.output + _read_logs(output)
    submitted = json.loads((slurm.folder / "submitted").read_text())
    host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
    assert submitted["excluded"] == f"node9,{host}"
    assert submitted["arguments"] == [
        f"--exclude=node9,{host}",
        "examples/slurm/train.sbatch",
        "--model",
        "tiny",
        *options,
    ]
    fault.unlink()
    ended = slurm.wait(slurm.start(*options, RUN_DIR=str(output)))
    assert ended.code == 0, ended.output + _read_logs(output)
    assert compare(uninterrupted, output).returncode == 0


@pytest.mark.matrix
def test_a_rank_that_is_killed_is_restarted_within_the_job(uninterrupted: Path, tmp_path: Path) -> None:
    slurm, output = FakeSlurm(tmp_path / "slurm"), tmp_path / "run"
    ended = slurm.wait(slurm.start("--fail-at-step", "10", "--fail-rank", "0", RUN_DIR=str(output)))
    assert ended.code == 0, ended.output + _read_logs(output)
    assert_identical(uninterrupted, output, starts=[0, 8])


@pytest.mark.matrix
def test_a_node_that_goes_down_ends_the_job_which_then_goes_on(whole: Path, tmp_path: Path) -> None:
    slurm, output = FakeSlurm(tmp_path / "slurm"), tmp_path / "run"
    options = [*LONG[:2], "--save-every", "20", *LONG[4:]]
    job = slurm.start(*options, RUN_DIR=str(output))
    wait_for_step(output, 30)
    slurm.kill_node(1)
    ended = slurm.wait(job)
    assert ended.is_requeued, ended.output + _read_logs(output)
    ended = slurm.wait(slurm.start(*options, RUN_DIR=str(output)))
    assert ended.code == 0, ended.output + _read_logs(output)
    assert_identical(whole, output)
    assert len(read_starts(output)) == 2


def test_failures_are_counted_until_there_is_a_new_checkpoint(tmp_path: Path) -> None:
    slurm, output = FakeSlurm(tmp_path / "slurm"), tmp_path / "run"
    (slurm.folder / "bin" / "accelerate").write_text("#!/bin/sh\nexit 1\n")
    for is_requeued in (True, True, False):
        ended = slurm.wait(slurm.start(RUN_DIR=str(output)))
        assert ended.is_requeued == is_requeued, ended.output
    assert ended.code != 0
    assert "failed 3 times without a new checkpoint" in ended.output
    (output / "checkpoints" / "step_00000004").mkdir(parents=True)
    assert slurm.wait(slurm.start(RUN_DIR=str(output))).is_requeued


def _read_logs(output: Path) -> str:
    return "".join(path.read_text()[-3000:] for path in sorted((output / "logs").rglob("node-*.log")))
