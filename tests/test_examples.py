"""The flagship example as people start it: run, kill, resume, compare; and a comparison that can fail."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launches import CONFIG, EXAMPLE, NUM_STEPS, ON_TWO_CPUS, compare, run, run_script

KILL_AT, LAST_CHECKPOINT = 10, 8


def _train(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(*ON_TWO_CPUS, *EXAMPLE, "--output-dir", output, *options)


@pytest.fixture(scope="module")
def runs(uninterrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `uninterrupted` and `interrupted`: the latter killed at step 10, then started again."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "uninterrupted").symlink_to(uninterrupted)
    kill = ["--kill-at-step", str(KILL_AT)]
    killed = _train(folder / "interrupted", *kill)
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    assert not (folder / "interrupted" / "digests.json").exists()

    resumed = _train(folder / "interrupted", *kill)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert f"step_{LAST_CHECKPOINT:08d} (step {LAST_CHECKPOINT}): exact" in resumed.stdout
    return folder


def test_resumed_run_equals_the_uninterrupted_one(runs: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "comparison.png"
    result = compare(runs / "uninterrupted", runs / "interrupted", "--plot", plot)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "identical, bit for bit" in result.stdout
    assert f"killed at step {KILL_AT}, resumed from the checkpoint of step {LAST_CHECKPOINT}" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def _train_with_trainer(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(*ON_TWO_CPUS, "examples/trainer_callback.py", "--output-dir", output, *options)


@pytest.mark.matrix
def test_the_trainer_ends_the_same_killed_or_not(tmp_path: Path) -> None:
    assert _train_with_trainer(tmp_path / "whole").returncode == 0
    kill = ["--kill-at-step", str(KILL_AT)]
    assert "SIGKILL" in _train_with_trainer(tmp_path / "killed", *kill).stderr
    resumed = _train_with_trainer(tmp_path / "killed", *kill)
    assert f"checkpoint-{LAST_CHECKPOINT} (step {LAST_CHECKPOINT}): exact" in resumed.stdout, resumed.stderr[-3000:]
    assert "as the model in training does" in resumed.stdout
    result = compare(tmp_path / "whole", tmp_path / "killed")
    assert "identical, bit for bit" in result.stdout


def test_the_example_with_the_trainer_runs(tmp_path: Path) -> None:
    options = ["--output-dir", tmp_path / "run", "--samples", "17"]
    printed = run_script("examples/trainer_callback.py", *options, config=CONFIG, folder=tmp_path / "ranks")
    assert "as the model in training does" in printed


def test_log_holds_every_step_and_those_computed_twice(runs: Path) -> None:
    lines = [json.loads(line) for line in (runs / "interrupted" / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [*range(1, KILL_AT + 1), *range(LAST_CHECKPOINT + 1, NUM_STEPS + 1)]


def test_only_the_last_checkpoints_are_kept(runs: Path) -> None:
    for name in ("uninterrupted", "interrupted"):
        kept = sorted(path.name for path in (runs / name / "checkpoints").glob("step_*"))
        assert kept == ["step_00000008", "step_00000012"]


def test_saved_model_is_an_ordinary_one(runs: Path) -> None:
    from safetensors import safe_open

    folder = runs / "interrupted" / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = set(file.keys())
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [259, 32]
    assert "lm_head.weight" not in names  # tied: written once


def _nudge_loss(folder: Path) -> None:
    lines = (folder / "log.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    record["loss"] = math.nextafter(record["loss"], math.inf)
    (folder / "log.jsonl").write_text("\n".join([*lines[:-1], json.dumps(record)]))


def _nudge_lr_before_the_kill(folder: Path) -> None:
    lines = (folder / "log.jsonl").read_text().splitlines()
    record = json.loads(lines[KILL_AT])  # step 10, which the resumed run computed again
    record["lr"] = math.nextafter(record["lr"], 0.0)
    (folder / "log.jsonl").write_text("\n".join([*lines[:KILL_AT], json.dumps(record), *lines[KILL_AT + 1 :]]))


def _drop_last_step(folder: Path) -> None:
    lines = (folder / "log.jsonl").read_text().splitlines()
    (folder / "log.jsonl").write_text("\n".join(lines[:-1]))


def _change_digest(folder: Path) -> None:
    digests = json.loads((folder / "digests.json").read_text())
    digests["rank 1/optimizer/model.norm.weight/exp_avg"] = "0" * 64
    (folder / "digests.json").write_text(json.dumps(digests))


def _drop_digest(folder: Path) -> None:
    digests = json.loads((folder / "digests.json").read_text())
    del digests["rank 0/parameters/model.norm.weight"]
    (folder / "digests.json").write_text(json.dumps(digests))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_nudge_loss, f"step {NUM_STEPS}, start 2"),
        (_nudge_lr_before_the_kill, f"step {KILL_AT}, start 1"),
        (_drop_last_step, f"step {NUM_STEPS} is missing"),
        (_change_digest, "rank 1/optimizer/model.norm.weight/exp_avg"),
        (_drop_digest, "rank 0/parameters/model.norm.weight"),
    ],
)
def test_comparison_names_the_smallest_difference(
    runs: Path, tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    for name in ("log.jsonl", "digests.json"):
        shutil.copy(runs / "interrupted" / name, spoiled)
    spoil(spoiled)
    result = compare(runs / "uninterrupted", spoiled)
    assert result.returncode == 1
    assert named in result.stdout
    assert "DIFFERENT" in result.stdout


def test_comparison_of_an_unfinished_run_is_refused(runs: Path, tmp_path: Path) -> None:
    result = compare(runs / "uninterrupted", tmp_path)
    assert result.returncode == 2
    assert "have both reached their end?" in result.stderr
