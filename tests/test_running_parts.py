"""The parts that watch over a run, each for itself: signals, the watchdog, health checks, heartbeats, their judge."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.cli.main import main
from accel_fsdp_tools.errors import UsageError
from accel_fsdp_tools.running import HangLimits, Preempted, Unhealthy, Watching
from accel_fsdp_tools.running.health import HealthCheck
from accel_fsdp_tools.running.heartbeat import Beat, Heartbeat, clear_beats, get_directory, list_beats
from accel_fsdp_tools.running.judging import Tolerance, judge_run
from accel_fsdp_tools.running.signals import SignalWatch, parse_signals

ROOT = Path(__file__).parent.parent


def _run_script(code: str, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run Python that has imported nothing; -1 where it hung."""
    preamble = "import ctypes, os, signal, sys, threading, time\n"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", preamble + textwrap.dedent(code), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


# -- arguments --------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused() -> None:
    for wrong in ("SIGTERM", ("SIGNONSENSE",), ("SIGKILL",), (15,), None):
        with pytest.raises(UsageError, match="on_signal"):
            parse_signals(wrong)
    for wrong in (0, -1, math.nan, math.inf, "60", True):
        with pytest.raises(UsageError, match="hang_limits"):
            Watching(hang_limits=wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"HangLimits\.saving_s"):
            HangLimits(60, saving_s=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at most a year"):
        HangLimits(1e12)
    with pytest.raises(UsageError, match="step_s is None"):
        HangLimits(None)  # type: ignore[arg-type]
    for wrong in (3, [], ["a", 3], "  "):
        with pytest.raises(UsageError, match="health is"):
            Watching(health=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no no-such-command"):
        Watching(health=["no-such-command", "--all"])
    for name in ("health_every", "health_timeout_s"):
        for wrong in (0, None, "x"):
            with pytest.raises(UsageError, match=name):
                Watching(**{name: wrong})


def test_limits_that_are_not_given_are_generous() -> None:
    limits = HangLimits(60, evaluation_s=90)
    assert [limits.get_limit_s(name) for name in ("step", "evaluation", "my own")] == [60, 90, 90]
    assert [limits.get_limit_s(name) for name in ("first step", "saving", "loading", "exporting")] == [1800] * 4
    assert HangLimits(600).get_limit_s("saving") == 6000


def test_what_a_stop_raises_survives_pickling() -> None:
    import pickle

    for kind, code in ((Preempted, 75), (Unhealthy, 69)):
        again = pickle.loads(pickle.dumps(kind("why", step=3, path=Path("a"))))
        assert (type(again), again.code, str(again), again.step, again.path) == (kind, code, "why", 3, Path("a"))


# -- the watchdog -----------------------------------------------------------------------------------------------------


def test_the_watchdog_ends_a_process_that_holds_the_gil() -> None:
    result = _run_script(
        """
        from accel_fsdp_tools.running.watchdog import Watchdog
        threading.Thread(target=time.sleep, args=(50,), name="another", daemon=True).start()
        Watchdog().arm(0.5)
        def hang_in_c():
            ctypes.PyDLL(None).sleep(50)  # PyDLL keeps the GIL
        hang_in_c()
        """
    )
    assert result.returncode == 1
    assert "Timeout (0:00:00.500000)!" in result.stderr
    assert "in hang_in_c" in result.stderr
    assert result.stderr.count("Thread 0x") == 2, "the stacks of all threads"


def test_progress_and_the_end_keep_the_watchdog_quiet() -> None:
    result = _run_script(
        """
        from accel_fsdp_tools.running.watchdog import Watchdog
        watchdog = Watchdog()
        for _ in range(4):
            watchdog.arm(2.0)
            time.sleep(0.7)
        watchdog.cancel()
        time.sleep(2.2)
        """
    )
    assert (result.returncode, result.stderr) == (0, "")


# -- signals ----------------------------------------------------------------------------------------------------------

_WATCH = """
from accel_fsdp_tools.running import signals
signals.REPEAT_S, signals.LAST_WORDS_S = 0.3, 0.5
told, tell = [], signals.tell
signals.tell = lambda text: (tell(text), told.append(text))
def wait_until_told(text=""):
    while not any(text in each for each in told):
        time.sleep(0.01)
def block():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # for ever, in C, without the GIL
def send(*names):  # each once the process has heard of the one before, and that one is over
    def work():
        for name in names:
            time.sleep(0.6)
            os.kill(os.getpid(), getattr(signal, name))
            wait_until_told()
    threading.Thread(target=work, daemon=True).start()
"""


def test_a_signal_sets_a_flag_and_earlier_handlers_hear_of_it() -> None:
    result = _run_script(
        _WATCH
        + """
signals.REPEAT_S = 30
def earlier(number, frame):
    print("earlier", number)
    raise SystemExit(3)
signal.signal(signal.SIGTERM, earlier)
watch = signals.SignalWatch(signals.parse_signals(["SIGTERM", "SIGUSR1"]))
watch.install()
assert watch.received is None
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)  # at once: the same request
wait_until_told("SIGTERM: this process")
assert watch.received is signal.SIGTERM
watch.restore()
assert signal.getsignal(signal.SIGTERM) is earlier
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
print("end")
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[-2] == "end"
    assert "earlier 15" in result.stdout
    assert "SystemExit(3), which is held back" in result.stderr
    assert "SIGTERM: this process saves at the end of its step" in result.stderr


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        ("send('SIGTERM', 'SIGTERM'); block()", 143, "SIGTERM once more: stopping at once"),
        ("send('SIGUSR1', 'SIGTERM'); block()", 143, "SIGTERM once more: stopping at once"),
        (
            "leave(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(2.2); tell('kept'); send('SIGTERM'); block()",
            75,
            "kept",
        ),
        ("lost.append('rank 3 has ended'); send('SIGTERM'); block()", 143, "rank 3 has ended, so no step will end"),
        (
            "lost.append('rank 3 has ended'); end()",
            5,
            "rank 3 has ended",
        ),
    ],
    ids=["repeated", "another one", "leaving", "a dead neighbour", "a dead neighbour, noticed"],
)
def test_a_process_that_cannot_react_is_ended(script: str, code: int, text: str) -> None:
    result = _run_script(
        _WATCH
        + f"""
lost = []
watch = signals.SignalWatch(
    signals.parse_signals(["SIGTERM", "SIGUSR1"]),
    find_lost=lambda: lost[0] if lost else None,
    clean_up=lambda code, text: print("cleaned up", code, flush=True),
)
watch.install()
def leave():
    signals.REPEAT_S = 2.0
    watch.begin_to_leave(75)
def end():
    signals.LAST_WORDS_S = 50
    send("SIGTERM")
    wait_until_told()
    sys.exit(5)
{script}
"""
    )
    assert result.returncode == code, result.stderr
    assert text in result.stderr
    assert ("cleaned up 143" in result.stdout) == (code == 143)
    assert ("in block" in result.stderr) == (code == 143 and "lost" in script), "the stacks where it hung"


def test_a_signal_while_python_ends_does_not_change_the_exit_code() -> None:
    """It has put the defaults back by then; to end a large process takes seconds."""
    result = _run_script(
        _WATCH
        + """
class Late:
    def __del__(self, kill=os.kill, process_id=os.getpid()):
        kill(process_id, 15)
late = Late()
watch = signals.SignalWatch(signals.parse_signals(["SIGTERM"]))
watch.install()
watch.begin_to_leave(75)
sys.exit(75)
"""
    )
    assert result.returncode == 75, result.stderr


def test_a_forked_child_is_no_rank() -> None:
    """A dataloader's worker: SIGTERM ends it, what says "stop soon" does not, and neither is heard by the rank."""
    result = _run_script(
        _WATCH
        + """
watch = signals.SignalWatch(signals.parse_signals(["SIGTERM", "SIGUSR1"]))
watch.install()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"ready")
    time.sleep(30)
    os._exit(0)
os.read(reader, 5)
os.kill(child, signal.SIGUSR1)
time.sleep(0.2)
assert os.waitpid(child, os.WNOHANG) == (0, 0)
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
time.sleep(0.2)
assert watch.received is None
"""
    )
    assert result.returncode == 0, result.stderr


def test_a_watch_that_ends_leaves_nothing_open_and_a_childs_end_is_its_own() -> None:
    result = _run_script(
        _WATCH
        + """
def watch():
    watch = signals.SignalWatch(signals.parse_signals(["SIGTERM"]))
    watch.install()
    return watch
num_open = len(os.listdir("/proc/self/fd"))
for _ in range(3):
    watch().restore()
while threading.active_count() > 1:
    time.sleep(0.01)
assert len(os.listdir("/proc/self/fd")) == num_open
watched = watch()
child = os.fork()
if child == 0:
    watched.restore()
    os._exit(0)
os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGTERM)
wait_until_told()  # by the thread, which still listens
"""
    )
    assert result.returncode == 0, result.stderr


def test_another_thread_cannot_watch_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    watch = SignalWatch(parse_signals(["SIGUSR2"]))
    thread = threading.Thread(target=watch.install)
    thread.start()
    thread.join()
    watch.restore()
    assert "SIGUSR2 cannot be watched" in caplog.text


# -- health checks ----------------------------------------------------------------------------------------------------


def _make_check(health: Any, *, every: int = 1, timeout_s: float = 10.0, is_first: bool = True) -> HealthCheck:
    return HealthCheck(health, every=every, timeout_s=timeout_s, is_first_of_node=is_first)


def _wait_for(check: HealthCheck, *, steps: int = 2000) -> str | None:
    try:
        for step in range(1, steps):
            problem = check.check(step)
            if problem is not None:
                return problem
            time.sleep(0.02)
        return None
    finally:
        check.close()


def test_a_function_is_called_every_so_often() -> None:
    steps: list[int] = []
    check = _make_check(lambda: steps.append(1), every=3)
    assert [check.check(step) for step in range(1, 8)] == [None] * 7
    assert len(steps) == 2

    def fail() -> None:
        raise ValueError("ECC")

    assert _make_check(fail).check(1) == "the health check fail raised ValueError: ECC"
    assert _make_check(lambda: True).check(1) is None
    assert "returned False" in str(_make_check(lambda: False, is_first=False).check(1)), "on every rank"


def test_a_command_runs_beside_the_training(tmp_path: Path) -> None:
    waits = f"until test -e {tmp_path}/go; do sleep 0.05; done"
    check = _make_check(rf"echo 17 errors; printf 'more\033\377\000' >&2; {waits}; exit 3")
    assert [check.check(step) for step in range(1, 8)] == [None] * 7
    (tmp_path / "go").touch()
    problem = _wait_for(check)
    assert problem is not None
    assert "ended with 3: 17 errors\nmore\ufffd\ufffd\ufffd" in problem, "nothing that moves a cursor"
    assert _wait_for(_make_check(["true"]), steps=20) is None
    assert _make_check(["false"], is_first=False).check(1) is None, "once per node"


def test_a_command_that_hangs_is_killed(tmp_path: Path) -> None:
    check = _make_check(f"echo $$ > {tmp_path}/pid; sleep 100", timeout_s=2.0)
    assert "did not end within 2 s" in str(_wait_for(check))
    process_id = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    unfinished = _make_check("sleep 100")
    unfinished.check(1)
    unfinished.close()


_GUARD = """
from pathlib import Path
from accel_fsdp_tools.running import RunGuard, Watching
root = Path(sys.argv[1])
command = f"echo $$ > {root}/new; mv {root}/new {root}/pid; exec sleep 100"
guard = RunGuard(root, Watching(health=command, health_every=1))
guard.begin("run", 1)
assert guard.step(1) is None
while not (root / "pid").exists():
    time.sleep(0.01)
process_id = int((root / "pid").read_text())
"""


def test_a_signal_to_every_process_of_a_job_is_no_bad_node(tmp_path: Path) -> None:
    """It ends the command of the health check as well, which has found nothing then."""
    script = """
for each in (process_id, os.getpid()):
    os.kill(each, signal.SIGTERM)
time.sleep(0.2)
print(guard.step(2).kind.__name__)
"""
    result = _run_script(_GUARD + script, str(tmp_path))
    assert result.stdout == "Preempted\n", result.stderr


def test_a_command_ends_with_a_run_that_nobody_closes(tmp_path: Path) -> None:
    result = _run_script(_GUARD, str(tmp_path))
    assert result.returncode == 0, result.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# -- heartbeats -------------------------------------------------------------------------------------------------------


def _make_beat(rank: int, world_size: int = 2, **facts: Any) -> Beat:
    values = {"phase": "step", "step": 100, "progress_at": time.time(), **facts}
    return dataclasses.replace(Beat.begin(rank, world_size, "run", 1), **values)


def _write(root: Path, beat: Beat, *, age_s: float = 0.0) -> Path:
    directory = get_directory(root)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank_{beat.rank:05d}.json"
    path.write_bytes(beat.encode())
    when = time.time() - age_s
    os.utime(path, (when, when))
    return path


def _read(root: Path) -> Beat:
    return list_beats(root)[0][1]


def _wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_heartbeats_tell_the_last_step_and_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heart = Heartbeat(tmp_path, _make_beat(0, step=0, phase="loading"))
    _wait_until(lambda: list_beats(tmp_path))
    inodes, started = set(), time.monotonic()
    for step in range(1, 200):
        heart.tell_step(step)
        inodes.add(list_beats(tmp_path)[0][0].stat().st_ino)
        time.sleep(0.002)
    assert len(inodes) <= 2 + (time.monotonic() - started), "once a second"
    _wait_until(lambda: _read(tmp_path).step == 199)
    monkeypatch.setattr("accel_fsdp_tools.running.heartbeat.EVERY_S", 100.0)
    time.sleep(1.1)  # from now on it waits for so long
    heart.tell_phase("saving", 60.0)
    _wait_until(lambda: _read(tmp_path).phase == "saving")
    assert _read(tmp_path).limit_s == 60.0
    heart.finish("preempted", "why")
    beat = _read(tmp_path)
    assert (beat.state, beat.note, beat.step, beat.process_id) == ("preempted", "why", 199, os.getpid())
    assert [path.name for path in get_directory(tmp_path).iterdir()] == ["rank_00000.json"]


def test_how_it_ended_is_not_overwritten_by_a_training_that_has_not_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated signal ends the run on a thread of its own, perhaps with a slow storage."""
    go_on, write = threading.Event(), Heartbeat._write
    monkeypatch.setattr(Heartbeat, "_write", lambda self, beat: (go_on.wait(60), write(self, beat)))
    heart = Heartbeat(tmp_path, _make_beat(0))
    heart.finish("stopped", "why", timeout_s=0.01)
    heart.tell_phase("saving", None)
    go_on.set()
    heart._thread.join(60)
    assert (_read(tmp_path).state, _read(tmp_path).note, _read(tmp_path).phase) == ("stopped", "why", "saving")


def test_heartbeats_that_cannot_be_written_are_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".accel_fsdp_tools").write_text("in the way")
    assert clear_beats(tmp_path) == []
    heart = Heartbeat(tmp_path, _make_beat(0))
    for phase in ("saving", "step", "saving"):
        time.sleep(0.05)
        heart.tell_phase(phase, None)
    heart.finish("finished")
    assert caplog.text.count("cannot write its heartbeat") == 1
    assert list_beats(tmp_path) == []


def test_heartbeats_are_cleared_beside_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It makes a file there to ask the storage for the time, and removes it."""
    path = _write(tmp_path, _make_beat(0))
    monkeypatch.setattr(Path, "iterdir", lambda self: iter([path.with_name(".clock.0"), path]))
    assert len(clear_beats(tmp_path)) == 1
    assert not path.exists()
    assert caplog.text == ""


def test_what_is_no_heartbeat_is_left_out(tmp_path: Path) -> None:
    path = _write(tmp_path, _make_beat(0))
    good = json.loads(path.read_text())
    facts = ({"step": "7"}, {"rank": True}, {"rank": -1}, {"rank": 2}, {"world_size": 10**9}, {"process_id": -5})
    wrongs = [json.dumps({**good, **each}) for each in facts]
    for wrong in ("", "[]", "{}", "[" * 60_000, " " * 70_000 + json.dumps(good), *wrongs):
        path.write_text(wrong)
        assert list_beats(tmp_path) == [], wrong
    path.write_text(json.dumps({**good, "new": 1, "progress_at": 5}))
    assert list_beats(tmp_path)[0][1].progress_at == 5
    (path.parent / "rank_00001.json.tmp").write_text(json.dumps(good))
    os.mkfifo(path.parent / "rank_00002.json")
    (path.parent / "rank_00003.json").symlink_to("nowhere")
    (path.parent / "a_folder").mkdir()
    assert len(list_beats(tmp_path)) == 1
    assert len(clear_beats(tmp_path)) == 1
    assert [each.name for each in path.parent.iterdir()] == ["a_folder"]


def _judge(root: Path, **options: Any) -> dict[int, str]:
    this_host = options.pop("this_host", False)
    return {each.rank: each.verdict for each in judge_run(root, Tolerance(**options), this_host=this_host).ranks}


def test_the_rank_behind_is_named(tmp_path: Path) -> None:
    _write(tmp_path, _make_beat(0, 3, step=481), age_s=200)
    _write(tmp_path, _make_beat(1, 3, step=480), age_s=300)
    _write(tmp_path, _make_beat(2, 3, step=481, phase="saving"), age_s=300)
    assert _judge(tmp_path) == {0: "stale", 1: "stale", 2: "good"}
    assert _judge(tmp_path, phase_s=100) == {0: "stale", 1: "stale", 2: "stale"}
    assert _judge(tmp_path, step_s=400) == {0: "good", 1: "good", 2: "good"}
    health = judge_run(tmp_path, Tolerance())
    assert not health.ok
    assert "rank 1 on" in health.summary
    assert re.search(r"\(30\d s\): step 480, phase step; 1 others stand at up to step 481", health.summary)
    _write(tmp_path, _make_beat(2, 3, phase="saving", limit_s=200.0), age_s=300)
    assert _judge(tmp_path)[2] == "stale", "the run's own limit"


def test_ends_are_told_apart(tmp_path: Path) -> None:
    other = {"host": "elsewhere"}
    gone = {"process_id": 2**22 - 1}
    for beat, age_s, verdict in (
        (_make_beat(0, 1), 5, "good"),
        (_make_beat(0, 1, **gone), 5, "starting"),
        (_make_beat(0, 1, **gone), 270, "starting"),
        (_make_beat(0, 1, **gone), 301, "gone"),
        (_make_beat(0, 1, process_started=1.0), 301, "gone"),
        (_make_beat(0, 1, namespace="pid:[1]", **gone), 5, "good"),
        (_make_beat(0, 1, namespace="pid:[1]", **gone), 121, "stale"),
        (_make_beat(0, 1, **gone, **other), 121, "stale"),
        (_make_beat(0, 1, state="failed"), 200, "starting"),
        (_make_beat(0, 1, state="failed"), 400, "ended"),
        (_make_beat(0, 1, state="unhealthy"), 400, "ended"),
        (_make_beat(0, 1, state="stopped"), 400, "ended"),
        (_make_beat(0, 1, state="finished", **gone), 1e6, "over"),
        (_make_beat(0, 1, state="preempted", **gone), 1e6, "over"),
    ):
        _write(tmp_path, beat, age_s=age_s)
        assert _judge(tmp_path) == {0: verdict}, beat
        assert judge_run(tmp_path, Tolerance()).ok == (verdict in ("good", "starting", "over"))
        code = {"finished": 0, "preempted": 75, "unhealthy": 69}.get(beat.state, 1)
        assert main(["health", str(tmp_path), "--exit-as-run"]) == code


def test_missing_ranks_and_left_overs(tmp_path: Path) -> None:
    for rank in range(4):
        _write(tmp_path, _make_beat(rank, 4, run_id="old"), age_s=1000)
    _write(tmp_path, _make_beat(0, 3, run_id="new"))
    _write(tmp_path, _make_beat(1, 3, run_id="new", host="elsewhere"), age_s=500)
    health = judge_run(tmp_path, Tolerance())
    assert {each.rank: each.verdict for each in health.ranks} == {0: "good", 1: "stale", 2: "missing"}
    assert health.num_left_over == 2
    assert "nothing was heard of rank(s) 2; rank 1 on elsewhere has made no progress" in health.summary
    assert _judge(tmp_path, this_host=True) == {0: "good"}
    _write(tmp_path, _make_beat(0, 3, run_id="new", state="preempted"))
    assert main(["health", str(tmp_path), "--exit-as-run"]) == 75
    before = clear_beats(tmp_path)
    assert len(before) == 4
    assert list_beats(tmp_path) == []


def test_before_there_are_heartbeats(tmp_path: Path) -> None:
    assert judge_run(tmp_path / "nothing", Tolerance(startup_s=1e9)).ok
    assert not judge_run(tmp_path / "nothing", Tolerance(startup_s=0)).ok


def test_ages_are_by_the_clock_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, _make_beat(0, 1), age_s=10)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10_000)  # whoever looks has another clock
    assert _judge(tmp_path) == {0: "good"}


def test_the_command_line_tells_people_and_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, _make_beat(0))
    _write(tmp_path, _make_beat(1, note="why \udc80", host="elsewhere"), age_s=130)
    assert main(["health", str(tmp_path)]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["rank", "host", "process", "step", "phase", "state", "silent", "for"]
    assert lines[4].split()[1:] == ["elsewhere", str(os.getpid()), "100", "step", "running", "2", "min", "stale"]
    assert lines[5] == r"rank(s) 1: why \udc80"
    assert lines[6].startswith("rank 1 on elsewhere has made no progress since")
    assert main(["health", str(tmp_path), "--max-age", "200", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert [each["verdict"] for each in told["ranks"]] == ["good", "good"]
    assert main(["health", str(tmp_path), "--this-host"]) == 0
    assert main(["health", str(tmp_path), "--max-age", "x"]) == 2
    assert main(["health", str(tmp_path / "nothing"), "--startup-grace", "0"]) == 4
