"""One rank's failure is every rank's failure; a missing rank is named."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest

from accel_fsdp_tools import ranks
from accel_fsdp_tools.errors import MismatchError, RankFailedError, RankMissingError, UsageError
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


def _one_never_arrives() -> None:
    _init()
    ranks.gather_all(0)
    if ranks.get_rank() == 1:
        time.sleep(60)
    ranks.wait_for_ranks("saving", timeout_s=2)


def test_missing_rank_is_named_within_the_timeout(tmp_path: Path) -> None:
    processes = start_ranks(_one_never_arrives, world_size=2, folder=tmp_path)
    started = time.monotonic()
    outcomes = collect(processes, folder=tmp_path, grace_s=0.5)
    assert time.monotonic() - started < 40
    error = outcomes[0].error
    assert isinstance(error, RankMissingError)
    assert error.missing_ranks == (1,)
    assert "rank(s) 1" in str(error)


def _die() -> None:
    _init()
    if ranks.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather_all(0)


def test_harness_reports_a_killed_rank(tmp_path: Path) -> None:
    outcomes = collect(start_ranks(_die, folder=tmp_path), folder=tmp_path)
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
