"""Signals, hangs and health checks under transformers' Trainer."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.running import HangLimits, Preempted, Unhealthy
from accel_fsdp_tools.running.heartbeat import list_beats
from tests.harness import collect, run_ranks, start_ranks
from tests.trainers import Outcome, Setup, find_callback, list_checkpoints, make_trainer

NO_SAVES = {"save_strategy": "no"}


def _train(setup: Setup, *, at_substep: dict[int, int] | None = None, at_point: tuple[int, str] | None = None) -> Any:
    """Train; a signal reaches a rank in the middle of accumulating for an update, or in a save."""
    from transformers import TrainerCallback

    from accel_fsdp_tools import enable_cpu_fsdp, phases
    from accel_fsdp_tools.live_fingerprints import fingerprint_model

    enable_cpu_fsdp()
    rank = int(os.environ["RANK"])
    seen: list[str] = []

    class Signals(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if (at_substep or {}).get(rank) == state.global_step:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"evaluated at {state.global_step}")

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(find_callback(trainer).run.guard._heartbeat.beat.phase)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append("ended")

    def observe(point: str) -> None:
        if at_point == (rank, point):
            os.kill(os.getpid(), signal.SIGTERM)

    phases.set_observer(observe)
    outcome = Outcome(extra=seen)
    trainer = make_trainer(setup, outcome, callbacks=[Signals()])
    try:
        trainer.train(resume_from_checkpoint=setup.resume)
    except (Preempted, Unhealthy) as error:
        assert trainer.args.save_total_limit is None
        return error, outcome
    outcome.fingerprints = {name: str(each) for name, each in fingerprint_model(trainer.model).items()}
    report = find_callback(trainer).report
    outcome.report = None if report is None else report.to_dict()
    return None, outcome


def test_a_signal_makes_the_trainer_save_and_leave(tmp_path: Path) -> None:
    whole = Setup(str(tmp_path / "whole"), arguments=NO_SAVES)
    references = [outcome for _, outcome in run_ranks(_train, whole, folder=tmp_path / "r0")]
    assert list_checkpoints(whole.folder) == []

    setup = Setup(str(tmp_path / "root"), arguments={**NO_SAVES, "eval_strategy": "epoch"})
    results = run_ranks(_train, setup, at_substep={1: 1}, folder=tmp_path / "r1")
    for error, outcome in results:
        assert isinstance(error, Preempted)
        assert error.code == 75
        assert outcome.extra == [], "neither evaluated nor ended"
    step = results[0][0].step
    assert [error.step for error, _ in results] == [step, step]
    assert step in (2, 3)
    assert list_checkpoints(setup.folder) == [f"checkpoint-{step}"]
    assert [beat.state for _, beat in list_beats(Path(setup.folder))] == ["preempted"] * 2

    again = replace(setup, resume=True, arguments=NO_SAVES)
    for (error, outcome), reference in zip(run_ranks(_train, again, folder=tmp_path / "r2"), references, strict=True):
        assert error is None
        assert outcome.report["exact"], outcome.report
        assert outcome.batches == reference.after(step)
        assert outcome.fingerprints == reference.fingerprints
        assert outcome.extra == ["ended"]
    assert [beat.state for _, beat in list_beats(Path(setup.folder))] == ["finished"] * 2


@pytest.mark.matrix
def test_a_signal_in_a_save_ends_the_trainer_with_that_save(tmp_path: Path) -> None:
    setup = Setup(str(tmp_path / "root"), arguments={"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2})
    results = run_ranks(_train, setup, at_point=(1, "save.checksums"), folder=tmp_path / "r1")
    assert [(type(error), error.step) for error, _ in results] == [(Preempted, 2)] * 2
    assert list_checkpoints(setup.folder) == ["checkpoint-2"]
    for _, outcome in results:
        assert {each for each in outcome.extra if each != "evaluation"} == {"evaluated at 2"}
        assert "evaluation" in outcome.extra, "the phase of the heartbeats, and of the watchdog"


def _train_on_a_bad_node(setup: Setup) -> Any:
    checks = iter([True, False])
    callback = {"health": lambda: os.environ["RANK"] != "1" or next(checks), "health_every": 2}
    return _train(replace(setup, callback=callback))


@pytest.mark.matrix
def test_an_unhealthy_rank_makes_the_trainer_save_and_leave(tmp_path: Path) -> None:
    setup = Setup(str(tmp_path / "root"), arguments=NO_SAVES)
    for error, _ in run_ranks(_train_on_a_bad_node, setup, folder=tmp_path / "r1"):
        assert isinstance(error, Unhealthy)
        assert error.code == 69
        assert "rank 1 on" in str(error)
        assert error.step in (4, 5)
    assert len(list_checkpoints(setup.folder)) == 1


def _hang(setup: Setup) -> None:
    import time

    from transformers import TrainerCallback

    from accel_fsdp_tools import enable_cpu_fsdp

    enable_cpu_fsdp()

    class Hang(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and os.environ["RANK"] == "0":
                time.sleep(100)

    make_trainer(setup, Outcome(), callbacks=[Hang()]).train()


@pytest.mark.matrix
def test_a_hanging_trainer_ends(tmp_path: Path) -> None:
    limits = HangLimits(step_s=6, first_step_s=60, saving_s=60, loading_s=60, evaluation_s=60)
    setup = Setup(str(tmp_path / "root"), arguments=NO_SAVES, callback={"hang_limits": limits})
    folder = tmp_path / "r1"
    outcomes = collect(start_ranks(_hang, setup, folder=folder), folder=folder, timeout_s=100)
    assert [each.exit_code for each in outcomes] == [1, 1]
    assert "in on_substep_end" in (folder / "log_0.txt").read_text()
    assert [beat.step for _, beat in list_beats(Path(setup.folder))] == [2, 2]
