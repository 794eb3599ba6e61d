"""A run that is asked to stop, hangs, or sits on a bad node: real ranks, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.errors import AccelFsdpError
from accel_fsdp_tools.manifest import read_manifest
from accel_fsdp_tools.running import HangLimits, Preempted, Unhealthy
from accel_fsdp_tools.running.heartbeat import list_beats
from accel_fsdp_tools.running.judging import Tolerance, judge_run
from accel_fsdp_tools.survey import survey_root
from tests.harness import RankOutcome, collect, find_free_port, run_ranks, start_ranks
from tests.training import Log, Setup, assert_continues, read_root, train

ROOT = Path(__file__).parent.parent
# Two epochs of 8 batches and 4 updates.
SETUP = Setup(num_items=48, accumulation=2, num_epochs=2, save_every=100, keep_last=None)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Log]:
    folder = tmp_path_factory.mktemp("whole")
    return run_ranks(train, str(folder / "root"), SETUP, folder=folder / "r")


def _train(
    root: str,
    setup: Setup = SETUP,
    *,
    signals: dict[int, int] | None = None,
    at_point: tuple[int, str] | None = None,
    sleep_at: tuple[int, int] | None = None,
    options: dict[str, Any] | None = None,
    perturb: bool = False,
) -> Log:
    """Train; `signals` says before which batch SIGTERM reaches which rank, `at_point` in which save."""
    rank = int(os.environ["RANK"])

    def on_batch(checkpointer: Any, number: int) -> None:
        if (signals or {}).get(rank) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        if sleep_at == (rank, number):
            time.sleep(100)

    def on_point(checkpointer: Any, point: str) -> None:
        if at_point == (rank, point):
            os.kill(os.getpid(), signal.SIGTERM)

    return train(root, setup, options=options, on_batch=on_batch, on_point=on_point, perturb=perturb)


def _run(tmp_path: Path, name: str, *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[RankOutcome]:
    folder = tmp_path / name
    processes = start_ranks(_train, str(tmp_path / "root"), *args, folder=folder, **kwargs)
    return collect(processes, folder=folder, timeout_s=timeout_s)


def _read_logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("log_*.txt")))


def _require(outcomes: list[RankOutcome], kind: type[BaseException]) -> list[Any]:
    for each in outcomes:
        assert isinstance(each.error, kind), f"rank {each.rank}: exit {each.exit_code}\n{each.error_text}"
    return [each.error for each in outcomes]


def _resume(tmp_path: Path, name: str, setup: Setup = SETUP) -> list[Log]:
    return run_ranks(_train, str(tmp_path / "root"), setup, perturb=True, folder=tmp_path / name)


def _exchange() -> dict[str, list[int]]:
    import torch.distributed as dist

    from accel_fsdp_tools import ranks
    from accel_fsdp_tools.running import agreement as module

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agreement = module.Agreement()
    module.LONG_STEP_S = 100.0  # whatever else the machine does
    seen = {"short steps": [agreement.exchange(5 if (rank, step) == (1, 2) else 0) for step in range(5)]}
    seen["asked"] = [agreement.ask(rank), agreement.ask(0)]
    module.LONG_STEP_S = 0.5
    time.sleep(0.6 if rank == 1 else 0)  # one rank's step is long: both wait from the next on
    first = [agreement.exchange(0)]
    time.sleep(0.6 if rank == 1 else 0)
    seen["long steps"] = first + [agreement.exchange(7 if (rank, step) == (0, 1) else 0) for step in range(2)]
    module.LONG_STEP_S = 100.0
    agreement.ask(0)
    seen["begun"] = [agreement.exchange(9)]  # read at the next step
    ranks._main._close_group()  # as after a rank has stalled, which all have been told
    seen["broken"] = [agreement.exchange(0) for _ in range(3)]
    agreement.close(wait=True)
    return seen


def test_ranks_agree_one_step_later_or_at_once(tmp_path: Path) -> None:
    for seen in run_ranks(_exchange, folder=tmp_path / "r"):
        assert seen == {
            "short steps": [0, 0, 0, 5, 0],
            "asked": [1, 0],
            "long steps": [0, 0, 7],
            "begun": [0],
            "broken": [0, 0, 0],
        }


@pytest.mark.parametrize(
    ("signals", "is_async"),
    [({1: 4}, False), ({0: 4, 1: 7}, True)],
    ids=["one rank, in mid-accumulation", "both, at different steps, saving in the background"],
)
def test_a_signal_makes_all_ranks_save_at_one_step(
    tmp_path: Path, reference: list[Log], signals: dict[int, int], is_async: bool
) -> None:
    setup = Setup(**{**SETUP.__dict__, "async_save": is_async, "save_every": 2 if is_async else 100})
    errors = _require(_run(tmp_path, "r1", setup, signals=signals), Preempted)
    assert len({each.step for each in errors}) == 1
    step = errors[0].step
    # It came in step 2, and is known to all one step later at the latest.
    assert step in (2, 3), step
    assert errors[0].code == 75
    assert "rank 1 on" in str(errors[0]) or 0 in signals
    root = tmp_path / "root"
    assert read_root(root)[-1] == errors[0].path.name == f"step_{step:08d}"
    assert {each.name for each in survey_root(root)} == set(read_root(root)), "the heartbeats are no checkpoint"
    beats = [beat for _, beat in list_beats(root)]
    assert [(each.rank, each.state, each.step) for each in beats] == [(0, "preempted", step), (1, "preempted", step)]
    assert all("SIGTERM came" in each.note and f"step_{step:08d}" in each.note for each in beats)
    assert judge_run(root, Tolerance()).ok
    assert_continues(reference, _resume(tmp_path, "r2"))
    assert [beat.state for _, beat in list_beats(root)] == ["finished"] * 2


def test_a_signal_in_a_save_ends_the_run_with_that_save(tmp_path: Path) -> None:
    setup = Setup(**{**SETUP.__dict__, "save_every": 3})
    errors = _require(_run(tmp_path, "r1", setup, at_point=(1, "save.checksums")), Preempted)
    assert [each.step for each in errors] == [3, 3]
    assert read_root(tmp_path / "root") == ["step_00000003"]
    assert read_manifest(tmp_path / "root" / "step_00000003").lineage.parent_id is None, "it was saved once"


def _resume_and_signal(root: str, *, fresh: bool) -> str:
    from accel_fsdp_tools import run_loads

    load = run_loads.load_newest

    def load_with_signal(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        return load(*args, **kwargs)

    run_loads.load_newest = load_with_signal
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Preempted) as caught:
        train(root, SETUP)
    assert signal.getsignal(signal.SIGUSR1) != before, "a process on its way out keeps its handlers"
    return str(caught.value)


def test_a_signal_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    texts = run_ranks(_resume_and_signal, str(tmp_path / "root"), fresh=True, folder=tmp_path / "r1")
    assert all("rank 1 on" in text and "SIGUSR1 came; nothing was trained since the load" in text for text in texts)
    assert read_root(tmp_path / "root") == []


def _stop_in_the_last_step(root: str) -> tuple[Log, bool]:
    before = signal.getsignal(signal.SIGTERM)
    log = _train(root, signals={1: 16})
    return log, signal.getsignal(signal.SIGTERM) == before


@pytest.mark.matrix
def test_a_signal_in_the_last_step_is_heard_or_too_late(tmp_path: Path) -> None:
    """Steps here are short, so that what comes in the last one is read at none: the training is over."""
    results = run_ranks(_stop_in_the_last_step, str(tmp_path / "root"), folder=tmp_path / "r1")
    assert [max(log.losses) for log, _ in results] == [7, 7]
    assert all(is_restored for _, is_restored in results)
    assert [beat.state for _, beat in list_beats(tmp_path / "root")] == ["finished"] * 2


def _fail_on_one(root: str) -> Log:
    def check() -> bool:
        return os.environ["RANK"] != "1"

    return _train(root, options={"health": check, "health_every": 3})


def test_an_unhealthy_rank_makes_all_save_and_leave(tmp_path: Path, reference: list[Log]) -> None:
    root, folder = tmp_path / "root", tmp_path / "r1"
    outcomes = collect(start_ranks(_fail_on_one, str(root), folder=folder), folder=folder)
    errors = _require(outcomes, Unhealthy)
    assert [each.code for each in errors] == [69, 69]
    assert len({each.step for each in errors}) == 1
    assert all("rank 1 on" in str(each) and "health check check returned False" in str(each) for each in errors)
    assert all("rank 0" not in str(each) for each in errors)
    assert [beat.state for _, beat in list_beats(root)] == ["unhealthy"] * 2
    assert not judge_run(root, Tolerance(step_s=0, startup_s=0)).ok
    assert_continues(reference, _resume(tmp_path, "r2"))


@pytest.mark.matrix
def test_an_unhealthy_node_is_named_with_what_its_command_said(tmp_path: Path) -> None:
    command = 'test "$LOCAL_RANK" != 0 || { echo "GPU 3: 17 errors"; exit 4; }'
    errors = _require(_run(tmp_path, "r1", options={"health": command, "health_every": 1}), Unhealthy)
    assert all("GPU 3: 17 errors" in str(each) and "ended with 4" in str(each) for each in errors)


def _hang(root: str) -> None:
    """The one that waits gives up first: else it may have lost the connection before its own time is up."""
    limits = HangLimits(step_s=(6, 9)[int(os.environ["RANK"])], first_step_s=60, saving_s=60, loading_s=60)
    _train(root, sleep_at=(1, 7), options={"hang_limits": limits})


def test_a_rank_that_hangs_ends_and_so_do_those_that_wait_for_it(tmp_path: Path) -> None:
    started, folder = time.monotonic(), tmp_path / "r1"
    outcomes = collect(start_ranks(_hang, str(tmp_path / "root"), folder=folder), folder=folder, timeout_s=90)
    assert [each.exit_code for each in outcomes] == [1, 1]
    assert time.monotonic() - started < 60
    for rank, (limit_s, place) in enumerate(((6, "all_gather"), (9, "on_batch"))):
        text = (folder / f"log_{rank}.txt").read_text()
        assert f"Timeout (0:00:0{limit_s})!" in text
        assert place in text, text
    beats = [beat for _, beat in list_beats(tmp_path / "root")]
    assert [(each.state, each.phase, each.step) for each in beats] == [("running", "step", 3)] * 2
    health = judge_run(tmp_path / "root", Tolerance(step_s=0, startup_s=0))
    assert [each.verdict for each in health.ranks] == ["gone", "gone"]
    assert "has been gone since" in health.summary
    assert "step 3, phase step" in health.summary


def _evaluate_for_long(root: str) -> Log:
    def on_batch(checkpointer: Any, number: int) -> None:
        if number == 7:
            with checkpointer.phase("evaluation"):
                time.sleep(8)
                assert list_beats(Path(root))[int(os.environ["RANK"])][1].phase == "evaluation"

    limits = HangLimits(step_s=6, first_step_s=60, saving_s=60, loading_s=60, evaluation_s=60)
    return train(root, SETUP, options={"hang_limits": limits, "on_signal": ()}, on_batch=on_batch)


@pytest.mark.matrix
def test_an_evaluation_may_take_longer(tmp_path: Path) -> None:
    run_ranks(_evaluate_for_long, str(tmp_path / "root"), folder=tmp_path / "r1")


# -- processes as a launcher starts them ------------------------------------------------------------------------------


class _Launched:
    """Two ranks as processes of their own, whose exit codes are those that a launcher would see."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir()
        self.logs = [folder / f"log_{rank}.txt" for rank in range(2)]
        port = str(find_free_port())
        self.processes = []
        for rank, log in enumerate(self.logs):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            environment |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
            arguments = [sys.executable, "-m", "tests.launched", json.dumps(settings)]
            with log.open("w") as file:
                self.processes.append(subprocess.Popen(arguments, env=environment, stdout=file, stderr=file, cwd=ROOT))

    def wait_for(self, text: str, rank: int = 0, timeout_s: float = 200.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self.processes[rank].poll() is not None  # asked first: it may write this and end in between
            log = self.logs[rank].read_text()
            if text in log:
                return
            assert not has_ended, log
            assert time.monotonic() < deadline, log
            time.sleep(0.05)

    def wait(self, timeout_s: float = 90.0) -> list[int]:
        """Return the exit codes."""
        killer = threading.Timer(timeout_s, lambda: [each.kill() for each in self.processes])
        killer.start()
        codes = [each.wait() for each in self.processes]
        killer.cancel()
        return codes

    def __enter__(self) -> _Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes:
            each.kill()
            each.wait()


def test_processes_end_with_the_documented_code(tmp_path: Path) -> None:
    with _Launched(tmp_path / "r1", root=str(tmp_path / "root"), pause_s=0.4) as run:
        run.wait_for("batch 3")
        run.processes[1].send_signal(signal.SIGUSR1)
        run.wait_for("SIGUSR1: this process saves at the end of its step", 1)
        assert run.wait() == [75, 75], _read_logs(tmp_path / "r1")
    assert len(read_root(tmp_path / "root")) == 1


@pytest.mark.matrix
def test_a_repeated_signal_stops_at_once_and_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """In the middle of a save; the next start goes on from the one before."""
    root = tmp_path / "root"
    settings = {"root": str(root), "save_every": 2, "hold_at": "save.checksums", "hold_step": 4, "repeat_s": 0.3}
    with _Launched(tmp_path / "r1", **settings) as run:
        for rank in range(2):
            run.wait_for("holding", rank)
        for process in run.processes:
            process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert [each.poll() for each in run.processes] == [None, None]
        for process in run.processes:
            process.send_signal(signal.SIGTERM)
        assert run.wait(10.0) == [143, 143], _read_logs(tmp_path / "r1")
    assert read_root(root) == ["step_00000002"]
    assert {beat.state for _, beat in list_beats(root)} == {"stopped"}
    logs = run_ranks(train, str(root), SETUP, folder=tmp_path / "r2")
    assert [log.position.step for log in logs] == [2, 2]


@pytest.mark.matrix
def test_a_rank_that_waits_for_a_dead_one_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """As torchrun does it: one rank dies, the others are sent SIGTERM. Here the other hangs in C and can't notice."""
    with _Launched(tmp_path / "r1", root=str(tmp_path / "root"), stuck=[0, 3], die=[1, 3], last_words_s=1.0) as run:
        run.wait_for("stuck")
        assert run.processes[1].wait(60) == 7
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.processes[0].wait(20) == 143
    text = run.logs[0].read_text()
    assert "rank 1 (process" in text
    assert "has ended, so no step will end" in text
    assert "in on_batch" in text, "the stacks say where it hung"


def _die(root: str) -> None:
    def on_batch(checkpointer: Any, number: int) -> None:
        if number == 5 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)  # both: they save at the end of step 2 or 3, which never comes

    try:
        train(root, SETUP, on_batch=on_batch)
    except (RuntimeError, AccelFsdpError) as error:
        raise RuntimeError("the connection broke") from error


@pytest.mark.matrix
def test_no_save_hangs_with_a_dead_rank(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    outcomes = collect(start_ranks(_die, str(tmp_path / "root"), folder=folder), folder=folder, grace_s=60)
    assert outcomes[0].error_text is not None, "it hung"
    assert "the connection broke" in outcomes[0].error_text or isinstance(outcomes[0].error, Preempted)


@pytest.mark.matrix
def test_one_process_alone_stops_too(tmp_path: Path) -> None:
    """Without other ranks there is nobody to agree with: at the end of the very step."""
    errors = _require(_run(tmp_path, "r1", signals={0: 4}, world_size=1), Preempted)
    assert [each.step for each in errors] == [2]
    assert read_root(tmp_path / "root") == ["step_00000002"]
