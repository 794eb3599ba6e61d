"""One rank's failure is every rank's failure; a missing rank is named."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest

from accel_fsdp_tools import meetings, ranks
from accel_fsdp_tools.errors import CallOrderError, MismatchError, RankFailedError, RankMissingError, UsageError
from tests.harness import collect, run_ranks, run_ranks_expecting, start_ranks


def _init() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def _gather() -> object:
    _init()
    values = ranks.gather_all(("rank", ranks.get_rank()))
    main = ranks.run_on_main("greet", lambda: f"from {ranks.get_rank()}")
    return values, main, ranks.run_together("square", lambda: ranks.get_rank() ** 2)


def test_values_reach_every_rank(tmp_path: Path) -> None:
    expected = ([("rank", 0), ("rank", 1), ("rank", 2)], "from 0", [0, 1, 4])
    assert run_ranks(_gather, world_size=3, folder=tmp_path) == [expected] * 3


def _fail_on_one(kind: str) -> None:
    _init()

    def part() -> None:
        if ranks.get_rank() == 1:
            if kind == "ours":
                raise MismatchError("vocabulary differs", expected=101, actual=100)
            if kind == "base":
                from torch.distributed.checkpoint.api import CheckpointException

                raise CheckpointException("disk", {1: (OSError("full"), None)})  # type: ignore[dict-item]
            raise OSError(28, "No space left on device")

    ranks.run_together("writing", part)


def test_our_error_keeps_class_and_facts_on_every_rank(tmp_path: Path) -> None:
    errors = run_ranks_expecting(MismatchError, _fail_on_one, "ours", folder=tmp_path)
    for error in errors:
        assert isinstance(error, MismatchError)
        assert (error.rank, error.expected, error.actual) == (1, 101, 100)


@pytest.mark.parametrize("kind", ["foreign", "base"])
def test_foreign_error_is_wrapped_and_names_the_rank(tmp_path: Path, kind: str) -> None:
    errors = run_ranks_expecting(RankFailedError, _fail_on_one, kind, folder=tmp_path)
    for error in errors:
        assert isinstance(error, RankFailedError)
        assert error.rank == 1
        assert error.what == "writing"
        assert "rank 1 failed" in str(error)
        assert error.cause_traceback is not None


def _fail_on_main() -> None:
    _init()
    ranks.run_on_main("renaming", lambda: (_ for _ in ()).throw(UsageError("taken", path="p")))


def test_main_failure_is_raised_everywhere(tmp_path: Path) -> None:
    for error in run_ranks_expecting(UsageError, _fail_on_main, folder=tmp_path):
        assert isinstance(error, UsageError)
        assert (error.rank, error.path) == (0, "p")


def _one_is_late(late: int, file: str | None) -> None:
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = {"init_method": f"file://{file}", "rank": rank, "world_size": world_size} if file else {}
    dist.init_process_group("gloo", **where)
    if rank == late:
        time.sleep(8)
    ranks.wait_for_ranks("saving", timeout_s=2)


@pytest.mark.parametrize(
    ("late", "store"),
    [
        (0, "tcp"),
        pytest.param(2, "file", marks=pytest.mark.matrix),
        pytest.param(2, "tcp", marks=pytest.mark.matrix),
        pytest.param(0, "file", marks=pytest.mark.matrix),
    ],
)
def test_missing_rank_is_named_by_all_others_on_the_first_call(tmp_path: Path, late: int, store: str) -> None:
    file = str(tmp_path / "store") if store == "file" else None
    processes = start_ranks(_one_is_late, late, file, world_size=3, folder=tmp_path / "ranks")
    outcomes = collect(processes, folder=tmp_path / "ranks", timeout_s=60)
    assert all(isinstance(outcome.error, RankMissingError) for outcome in outcomes), outcomes
    for outcome in outcomes:
        if outcome.rank != late:
            assert isinstance(outcome.error, RankMissingError)
            assert (outcome.error.missing_ranks, outcome.error.rank) == ((late,), late)
            assert f"saving: rank(s) {late} did not arrive" in str(outcome.error)
            assert outcome.error_time < outcomes[late].error_time, "did not wait for the late one"
    if store == "file" or late == 0:  # otherwise the store has gone with rank 0
        assert "came too late" in str(outcomes[late].error)


def _freeze_main() -> None:
    _init()
    if ranks.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.wait_for_ranks("saving", timeout_s=1)


@pytest.mark.matrix
def test_a_frozen_keeper_of_the_store_is_named(tmp_path: Path) -> None:
    outcomes = collect(start_ranks(_freeze_main, folder=tmp_path), folder=tmp_path, timeout_s=60, grace_s=0.5)
    error = outcomes[1].error
    assert isinstance(error, RankMissingError)
    assert error.missing_ranks == (0,)
    assert "does not answer" in str(error)


def _call_differently() -> None:
    _init()
    if ranks.get_rank() == 1:
        time.sleep(0.5)
    ranks.wait_for_ranks("load_state" if ranks.get_rank() == 1 else "save_state", timeout_s=30)


def test_different_calls_are_told_to_every_rank(tmp_path: Path) -> None:
    for error in run_ranks_expecting(CallOrderError, _call_differently, world_size=3, folder=tmp_path):
        assert isinstance(error, CallOrderError)
        assert "rank(s) 0, 2: save_state; rank(s) 1: load_state" in str(error)
        assert (error.rank, error.expected, error.actual) == (1, "save_state", "load_state")


def _collective_against_call() -> None:
    _init()
    if ranks.get_rank() == 1:
        ranks.gather_all(0)  # makes the control group
    else:
        ranks.wait_for_ranks("save_state", timeout_s=30)


def test_the_control_group_is_made_only_when_all_ranks_want_it(tmp_path: Path) -> None:
    for error in run_ranks_expecting(CallOrderError, _collective_against_call, folder=tmp_path):
        assert "rank(s) 0: save_state; rank(s) 1: making the group" in str(error)


def _meet_again() -> object:
    _init()
    failures = []
    for calls in (("a", "a"), ("a", "b")):
        if ranks.get_rank() == 0 and calls == ("a", "a"):
            time.sleep(3)
        try:
            ranks.wait_for_ranks(calls[ranks.get_rank()], timeout_s=1 if calls == ("a", "a") else 30)
        except (RankMissingError, CallOrderError) as error:
            failures.append(type(error).__name__)
    for _ in range(3):
        ranks.wait_for_ranks("again", timeout_s=30)
    ranks.gather_all(0)
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    names = ("call/0", "call/1", "call", "differs", "count", "verdict", "seen")
    left = [f"{g}/{name}" for g in range(1, 5) for name in names if store.check([f"accel_fsdp_tools/{g}/{name}"])]
    ranks.gather_all(0)
    return failures, left


def test_after_a_failure_the_ranks_meet_again_and_old_keys_go(tmp_path: Path) -> None:
    expected = (["RankMissingError", "CallOrderError"], [])
    assert run_ranks(_meet_again, folder=tmp_path) == [expected] * 2


@pytest.mark.parametrize("kind", ["hash", "file"])
@pytest.mark.parametrize("missing", [0, 1])
def test_other_stores(tmp_path: Path, kind: str, missing: int) -> None:
    import torch.distributed as dist

    shared = dist.HashStore()
    present = 3 - missing
    verdicts: dict[int, meetings.Verdict] = {}

    def meet(rank: int) -> None:
        store = shared if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 3)
        meeting = meetings.Meeting(dist.PrefixStore("default_pg", store), 1, rank, 3)
        verdicts[rank] = meeting.hold("saving", 2 if missing else 60)

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(present)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(verdicts) == list(range(present))
    assert {verdict.missing for verdict in verdicts.values()} == {(2,) if missing else None}


def _use_two_threads() -> tuple[list[int], list[int]]:
    """The main threads wait for each other while the ones in the background do, in another order on each rank."""
    _init()
    rank = ranks.get_rank()
    channel = ranks.Channel("background")
    with ranks.use_channel(channel):
        ranks.get_control_group()
    sums: dict[str, list[int]] = {"main": [], "background": []}
    done = threading.Event()

    def work() -> None:
        with ranks.use_channel(channel):
            for number in range(20):
                if rank == 1:
                    time.sleep(0.005)
                sums["background"].append(sum(ranks.gather_all(100 * number + rank)))
                ranks.wait_for_ranks("in the background", timeout_s=20)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    for number in range(20):
        if rank == 0:
            time.sleep(0.005)
        sums["main"].append(sum(ranks.gather_all(number + rank)))
        ranks.wait_for_ranks("in the foreground", timeout_s=20)
    # Rank 1 comes only when its thread is done, and that needs rank 0's, whose main thread waits in the store.
    if rank == 1:
        done.wait(20)
    ranks.wait_for_ranks("at the end", timeout_s=25)
    thread.join()
    channel.close()
    return sums["main"], sums["background"]


def test_threads_on_channels_of_their_own_do_not_disturb_each_other(tmp_path: Path) -> None:
    expected = ([2 * number + 1 for number in range(20)], [200 * number + 1 for number in range(20)])
    assert run_ranks(_use_two_threads, folder=tmp_path) == [expected] * 2


def _break(how: str, victim: int, folder: str) -> list[tuple[int | None, tuple[int, ...], str]]:
    """One rank dies or sleeps inside each of three stages; afterwards the ranks talk again, if all are alive."""
    _init()
    meetings.BREAK_S = 1.0
    rank = ranks.get_rank()
    ranks.gather_all(0)
    told = []
    for number, stage in enumerate((ranks.run_together, ranks.run_on_main, ranks.gather_all)):
        awake = Path(folder) / str(number)

        def part(awake: Path = awake) -> None:
            if rank != victim:
                return
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            while not awake.exists():
                time.sleep(0.02)

        if stage is not ranks.run_together and rank == victim and (rank or stage is ranks.gather_all):
            part()
        arguments = (0,) if stage is ranks.gather_all else ("writing", part)
        with pytest.raises(RankMissingError) as caught:
            stage(*arguments)
        if rank == 2 - (victim == 2):
            awake.touch()
        told.append((caught.value.rank, caught.value.missing_ranks, str(caught.value)))
        if how == "die":
            return told
        assert ranks.gather_all(rank) == [0, 1, 2]
    return told


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_rank_that_does_not_answer_is_named_and_the_ranks_talk_again(tmp_path: Path, victim: int) -> None:
    results = run_ranks(
        _break,
        "sleep",
        victim,
        str(tmp_path),
        world_size=3,
        folder=tmp_path / "r",
        environment={meetings.TIMEOUT_VARIABLE: "1"},
    )
    for rank, told in enumerate(results):
        for named, missing, text in told:
            assert (named, missing) == (victim, (victim,)), text
            assert ("came too late" in text) == (rank == victim)
    assert results[1 if victim == 0 else 0] == results[2]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.matrix), 2])
def test_a_rank_that_dies_is_named_long_before_the_timeout(tmp_path: Path, victim: int) -> None:
    processes = start_ranks(_break, "die", victim, str(tmp_path), world_size=3, folder=tmp_path / "r")
    outcomes = collect(processes, folder=tmp_path / "r", grace_s=30)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    told = [outcome.value[0] for outcome in outcomes if outcome.rank != victim]
    assert [(named, missing) for named, missing, _ in told] == [(victim, (victim,))] * 2, told


def _die() -> None:
    _init()
    if ranks.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather_all(0)


def test_harness_reports_a_killed_rank(tmp_path: Path) -> None:
    outcomes = collect(start_ranks(_die, folder=tmp_path), folder=tmp_path, grace_s=2.0)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert not outcomes[0].finished


def test_errors_survive_pickling() -> None:
    error = RankFailedError("boom", rank=3, what="saving", failed_ranks=(3, 4))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is RankFailedError
    assert (str(again), again.rank, again.what, again.failed_ranks) == ("boom", 3, "saving", (3, 4))


def test_single_process_needs_no_group() -> None:
    assert ranks.run_together("x", lambda: 5) == [5]
    assert ranks.run_on_main("x", lambda: 6) == 6
    ranks.wait_for_ranks("x")
    with pytest.raises(RankFailedError, match="rank 0 failed with KeyError"):
        ranks.run_together("x", lambda: {}["a"])


def test_bad_timeout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_FSDP_TOOLS_TIMEOUT_S", "soon")
    with pytest.raises(UsageError, match="soon"):
        ranks.get_timeout_s()


def test_ranks_that_were_restarted_in_place_meet_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent keeps its store, and with it the meetings of the ranks before.

    With a store of their own they must not: the agent of a node that has come back counts from 0, the others don't.
    """
    first = ranks.Channel().series
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert ranks.Channel().series == first
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    names = set()
    for count in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        names |= {ranks.Channel().series, ranks.Channel("background 1").series}
    assert len(names) == 6
