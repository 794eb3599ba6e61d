"""A launcher with restarts left: ranks that die, hang or raise are started anew in place, those that leave are not.

Each run has to end bit for bit where the one ends to which nothing happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_fsdp_tools.running.heartbeat import Beat, Heartbeat, list_beats
from accel_fsdp_tools.running.launcher import explain_broken_restarts
from tests.launches import (
    EXAMPLE,
    ON_TWO_CPUS,
    SUPERVISE,
    assert_identical,
    compare,
    make_environment,
    read_starts,
    run,
    start,
    wait_for_step,
)

pytestmark = pytest.mark.timeout(900)
FAIL_AT, LAST_CHECKPOINT = 10, 8
RESTARTS = ("--max_restarts", "3")


def _fail(how: str, rank: int = 1) -> list[str]:
    limit_s = 6 if how.startswith("hang") else 100  # on a busy machine a rank that raises takes seconds to end
    return ["--fail-at-step", str(FAIL_AT), "--fail-how", how, "--fail-rank", str(rank), "--hang-limit", str(limit_s)]


def _train(output: Path, *options: str, supervised: bool = True) -> subprocess.CompletedProcess[str]:
    launch = [*ON_TWO_CPUS, *RESTARTS, *EXAMPLE, "--output-dir", output, *options]
    if supervised:
        launch = [*SUPERVISE, output / "checkpoints", "--", *launch]
    return run(*launch, PET_STANDALONE="1")


def _read_states(output: Path) -> dict[int, str]:
    return {beat.rank: beat.state for _, beat in list_beats(output / "checkpoints")}


# -- started anew in place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        ("hang-with-gil", 1),
        pytest.param("kill", 0, marks=pytest.mark.matrix),
        pytest.param("kill", 1, marks=pytest.mark.matrix),
        pytest.param("hang", 0, marks=pytest.mark.matrix),
        pytest.param("raise", 1, marks=pytest.mark.matrix),
    ],
)
def test_ends_the_same_after_a_restart_in_place(uninterrupted: Path, tmp_path: Path, how: str, rank: int) -> None:
    result = _train(tmp_path / "run", *_fail(how, rank))
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"rank {rank}: {how} in step {FAIL_AT}" in result.stdout
    assert ("Timeout (0:00:06)!" in result.stderr) == how.startswith("hang")
    assert "restart the ranks in place" not in result.stderr  # no warning
    assert_identical(uninterrupted, tmp_path / "run", starts=[0, LAST_CHECKPOINT])
    assert _read_states(tmp_path / "run") == {0: "finished", 1: "finished"}


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["kill", "hang-with-gil", "raise"])
def test_the_trainer_ends_the_same_after_a_restart_in_place(tmp_path: Path, how: str) -> None:
    def train(output: Path, *options: str) -> None:
        launch = [*ON_TWO_CPUS, *RESTARTS, "examples/trainer_callback.py", "--output-dir", output, *options]
        result = run(*SUPERVISE, output / "checkpoints", "--", *launch, PET_STANDALONE="1")
        assert result.returncode == 0, result.stderr[-3000:]

    train(tmp_path / "whole")
    train(tmp_path / "restarted", *_fail(how))
    assert_identical(tmp_path / "whole", tmp_path / "restarted", starts=[0, LAST_CHECKPOINT])


@pytest.mark.matrix
def test_a_restart_that_fails_again_and_again_ends(tmp_path: Path) -> None:
    """The budget is the launcher's; a checkpoint that no run gets past is the Checkpointer's affair."""
    script = tmp_path / "script.py"
    script.write_text(f"import os\nopen(f'{tmp_path}/' + os.environ['TORCHELASTIC_RESTART_COUNT'], 'w')\nexit(3)\n")
    result = run(*SUPERVISE, tmp_path, "--", *ON_TWO_CPUS, *RESTARTS, script, PET_STANDALONE="1")
    assert result.returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "script.py"]


# -- not started anew -----------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_ranks_that_have_saved_upon_a_signal_are_not_started_anew(uninterrupted: Path, tmp_path: Path) -> None:
    """The signal reaches one rank alone, and is one that torchrun knows nothing of."""
    options = _fail("signal")
    result = _train(tmp_path / "run", *options)
    assert "SIGUSR1 came; saved" in result.stderr
    assert result.returncode == 75, result.stderr[-3000:]
    assert read_starts(tmp_path / "run") == [0]
    assert _read_states(tmp_path / "run") == {0: "preempted", 1: "preempted"}
    again = _train(tmp_path / "run", *options)
    assert again.returncode == 0, again.stderr[-3000:]
    assert_identical(uninterrupted, tmp_path / "run")
    assert read_starts(tmp_path / "run")[1:] in ([FAIL_AT], [FAIL_AT + 1])  # ranks agree at the next step


@pytest.mark.matrix
def test_ranks_of_an_unhealthy_node_are_not_started_anew_on_it(uninterrupted: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    fault.touch()
    options = ["--health", f"test ! -e {fault}"]
    result = _train(tmp_path / "run", *options)
    assert result.returncode == 69, result.stderr[-3000:]
    assert len(read_starts(tmp_path / "run")) == 1
    assert set(_read_states(tmp_path / "run").values()) == {"unhealthy"}
    fault.unlink()
    again = _train(tmp_path / "run", *options)
    assert again.returncode == 0, again.stderr[-3000:]
    assert compare(uninterrupted, tmp_path / "run").returncode == 0


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_supervisor_is_one_to_the_run(tmp_path: Path, number: signal.Signals) -> None:
    long = ["--steps", "400", "--save-every", "200"]
    launch = [*ON_TWO_CPUS, *RESTARTS, *EXAMPLE, "--output-dir", tmp_path / "run", *long]
    process = start(*SUPERVISE, tmp_path / "run" / "checkpoints", "--", *launch, PET_STANDALONE="1")
    wait_for_step(tmp_path / "run", 5)
    process.send_signal(number)
    _, error = process.communicate(timeout=200)
    assert process.returncode == 75, error[-3000:]
    assert len(read_starts(tmp_path / "run")) == 1


# -- the supervisor alone -------------------------------------------------------------------------------------------


def test_a_signal_when_all_is_over_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """`srun --kill-on-bad-exit` sends one to the nodes that end last."""
    code = (
        "import os, pathlib, signal, sys; from accel_fsdp_tools.running import supervising as s; judge = s.judge_run; "
        "ended = []; "
        "s.judge_run = lambda *_: (ended and os.kill(os.getpid(), signal.SIGTERM), ended.append(1), judge(*_))[2]; "
        f"sys.exit(s.supervise(['sh', '-c', 'exit 7'], pathlib.Path({str(tmp_path)!r})))"
    )
    assert run(sys.executable, "-c", code).returncode == 7


@pytest.mark.parametrize(
    ("state", "launcher", "code"),
    [
        ("preempted", 1, 75),
        ("preempted", 0, 75),
        ("unhealthy", 1, 69),
        ("failed", 1, 1),
        ("running", 9, 9),
        ("finished", 0, 0),
        ("", 1, 1),
        ("", 0, 0),
    ],
)
def test_the_exit_code_is_what_the_ranks_say(tmp_path: Path, state: str, launcher: int, code: int) -> None:
    """What an earlier run has said is not this one's: with no state at all this run never began."""
    Heartbeat(tmp_path, Beat.begin(0, 1, "old", 1)).finish("unhealthy")
    script = (
        "import pathlib, sys; from accel_fsdp_tools.running.heartbeat import Beat, Heartbeat; "
        f"Heartbeat(pathlib.Path({str(tmp_path)!r}), Beat.begin(0, 1, 'new', 2)).finish({state!r})"
    )
    script = f"{script if state else 'import sys'}; sys.exit({launcher})"
    assert run(*SUPERVISE, tmp_path, "--", sys.executable, "-c", script).returncode == code


def test_signals_reach_the_launcher_as_one_sigterm(tmp_path: Path) -> None:
    """torchrun would die of a SIGUSR1; what reaches the whole process group reaches it through the supervisor alone."""
    code = (
        "import os, signal, sys, time; count = []; "
        "signal.signal(signal.SIGTERM, lambda *_: count.append(1)); "
        "print(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'], flush=True); "
        "os.kill(os.getpid(), signal.SIGUSR1); deadline = time.monotonic() + 60\n"
        "while not count and time.monotonic() < deadline: time.sleep(0.05)\n"
        "time.sleep(1.0); sys.exit(40 + len(count))"
    )
    command = [*SUPERVISE, tmp_path, "--grace", "77", "--", sys.executable, "-c", code]
    process = subprocess.Popen(
        [str(each) for each in command],
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "77\n"
    for number in (signal.SIGQUIT, signal.SIGUSR1, signal.SIGTERM):
        os.killpg(process.pid, number)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 41, error
    assert error.count("came; the launcher gets a SIGTERM") == 1


def test_a_terminal_that_closes_ends_nothing_under_nohup(tmp_path: Path) -> None:
    """torchrun alone takes the SIGHUP for itself, nohup or not."""
    command = "kill -HUP $PPID; sleep 0.2; exit 7"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ended = run(*SUPERVISE, tmp_path, "--", "sh", "-c", command)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.returncode == 7


def test_a_launcher_that_is_ending_its_ranks_is_asked_twice_at_most(tmp_path: Path) -> None:
    launcher = (
        "import os, signal, sys, time; count = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: (count.append(1), os.write(1, b'heard\\n')))\n"
        f"os.write(1, b'ready\\n')\nwhile not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.05)\n"
        "sys.exit(40 + len(count))"
    )
    code = (
        "import pathlib, sys; from accel_fsdp_tools.running import supervising as s; s.REPEAT_S = 0.1; "
        f"sys.exit(s.supervise([sys.executable, '-c', {launcher!r}], pathlib.Path({str(tmp_path)!r})))"
    )
    process = start(sys.executable, "-c", code)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() in ("ready\n", "heard\n")
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "heard\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    (tmp_path / "end").touch()
    _, error = process.communicate(timeout=100)
    assert process.returncode == 42, error
    assert "is ending its ranks already" in error


def test_a_launch_whose_restarts_cannot_work_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_RESTARTS", "3"), ("RESTART_COUNT", "0"), ("USE_AGENT_STORE", "True")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in explain_broken_restarts()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert explain_broken_restarts() == ""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert explain_broken_restarts() == ""


@pytest.mark.matrix
@pytest.mark.parametrize(("variables", "num_starts"), [({}, {1}), ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, {2})])
def test_torchs_restart_in_place_needs_a_store_of_its_own(
    tmp_path: Path, variables: dict[str, str], num_starts: set[int]
) -> None:
    """On plain torchrun. Once the first part fails, torch is mended, and the variable can go from the docs."""
    script = tmp_path / "script.py"
    script.write_text(
        "import datetime, os, pathlib, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=20))\n"
        "dist.barrier()\n"
        "pathlib.Path(os.environ['OUT'], os.environ['TORCHELASTIC_RESTART_COUNT']).touch()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1: os.kill(os.getpid(), 9)\n"
        "dist.barrier()\n"
    )
    counts = set()
    for number in range(3):  # which of the old addresses a rank reads is a race
        out = tmp_path / f"out_{number}"
        out.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        run(*torchrun, "--max-restarts", "1", script, OUT=str(out), **variables)
        counts.add(len(list(out.iterdir())))
    assert num_starts <= counts
    assert not variables or counts == num_starts
