"""Train, die at a random moment, resume, again and again: the end is that of the run that nobody killed."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.commit import PARTIAL
from accel_fsdp_tools.manifest import read_manifest
from tests.harness import collect, run_ranks, start_ranks
from tests.training import Setup, build, digest_model, digest_optimizer, read_root, train_batch

SETUP = Setup(num_items=45, accumulation=1, num_layers=1, save_every=2, keep_last=2, async_save=True)
UPDATES_PER_EPOCH = 8
MOST_UPDATES = 6  # of one cycle
WORLD = 2


@dataclass(frozen=True)
class Death:
    """Of the ranks `victims`, `delay_s` after their `num_updates`-th update; before the first: after their start."""

    victims: tuple[int, ...]
    num_updates: int
    delay_s: float


def plan_deaths(num_cycles: int, seed: int) -> list[Death]:
    """Return one death per cycle: of one rank or of all, while training, writing, committing, pruning or resuming."""
    generator = random.Random(seed)
    deaths = []
    for _ in range(num_cycles):
        victims = generator.choice([(0,), (1,), (0, 1)])
        num_updates = generator.randint(0, MOST_UPDATES)
        deaths.append(Death(victims, num_updates, generator.uniform(0, 0.2 if num_updates else 2.0)))
    return deaths


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train(
    root: str, log: str, num_epochs: int, death: Death | None = None, save_every: int = SETUP.save_every
) -> tuple[str, str]:
    """Train to the end, or to death. Every update is a line in this rank's log, kept by the operating system."""
    from accel_fsdp_tools import Checkpointer

    rank = int(os.environ["RANK"])
    doomed = death if death is not None and rank in death.victims else None
    timer = threading.Timer(doomed.delay_s if doomed else 0, _die)
    if doomed and not doomed.num_updates:
        timer.start()
    objects = build(SETUP, seed=1)
    with (
        Path(f"{log}.{rank}").open("w", buffering=1) as lines,
        Checkpointer(
            objects.accelerator, root, save_every=save_every, keep_last=SETUP.keep_last, async_save=True
        ) as checkpointer,
    ):
        position = checkpointer.resume()
        assert position.fresh or position.report.exact, str(position.report)
        lines.write(f"resumed {position.step} {len(position.skipped)}\n")
        for _ in range(position.epoch, num_epochs):
            for batch in objects.loader:
                loss = train_batch(objects, batch)
                checkpointer.step(loss=loss)
                lines.write(f"{checkpointer.num_steps} {loss.item().hex()} {batch['id'].tolist()}\n")
                if doomed and checkpointer.num_steps - position.step == doomed.num_updates:
                    timer.start()
    if doomed:
        timer.join()
    return digest_model(objects.model), digest_optimizer(objects.optimizer)


def _read_log(path: Path) -> tuple[int | None, dict[int, str]]:
    """Return the step that was resumed (None: death came before) and the line of each update."""
    if not path.exists() or not (text := path.read_text()).endswith("\n"):
        return None, {}
    first, *lines = text.splitlines()
    word, step, num_skipped = first.split()
    assert (word, num_skipped) == ("resumed", "0"), f"{path}: a checkpoint was passed over"
    return int(step), {int(line.split()[0]): line for line in lines}


def _measure(root: Path) -> tuple[int, int]:
    """Return the number of directories that are, were or will be checkpoints, and the bytes of everything."""
    folders = [*root.glob("step_*"), *(path for path in (root / PARTIAL).glob("*/*") if path.is_dir())]
    return len(folders), sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def _soak(folder: Path, deaths: list[Death]) -> dict[str, Any]:
    num_epochs = -(-(len(deaths) * MOST_UPDATES + SETUP.save_every) // UPDATES_PER_EPOCH)
    num_updates = num_epochs * UPDATES_PER_EPOCH
    arguments = (str(folder / "whole"), str(folder / "whole.log"), num_epochs)
    whole = run_ranks(_train, *arguments, save_every=num_updates, folder=folder / "r", timeout_s=280)
    expected = [_read_log(folder / f"whole.log.{rank}")[1] for rank in range(WORLD)]
    assert len(expected[0]) == num_updates
    one_bytes = _measure(folder / "whole")[1]
    root, newest, worst = folder / "root", 0, (0, 0)
    for cycle, death in enumerate([*deaths, None]):
        log, ranks = folder / f"{cycle}.log", folder / f"r{cycle}"
        processes = start_ranks(_train, str(root), str(log), num_epochs, death, folder=ranks)
        outcomes = collect(processes, folder=ranks, timeout_s=280, grace_s=0.3)
        if death is not None:
            assert any(outcomes[rank].exit_code == -signal.SIGKILL for rank in death.victims), (cycle, death)
        for rank in range(WORLD):
            resumed, lines = _read_log(Path(f"{log}.{rank}"))
            assert resumed in (None, newest), f"cycle {cycle}: resumed {resumed}, {newest} was there"
            assert lines.items() <= expected[rank].items(), f"cycle {cycle}, rank {rank}: other losses or samples"
        steps = [read_manifest(root / name).step for name in read_root(root)] if root.exists() else []
        assert max(steps, default=0) >= newest, f"cycle {cycle}: {newest} was lost"
        newest = max(steps, default=0)
        num_folders, num_bytes = _measure(root) if root.exists() else (0, 0)
        worst = max(worst[0], num_folders), max(worst[1], num_bytes)
        # Those that are kept, a new one, one that is being written, and an old one on its way out.
        assert num_folders <= SETUP.keep_last + 3, f"cycle {cycle}: {sorted(root.rglob('*'))}"
        assert num_bytes <= (SETUP.keep_last + 3) * one_bytes * 1.1, f"cycle {cycle}"
        assert not (root / ".quarantine").exists(), f"cycle {cycle}"
    assert [outcome.value for outcome in outcomes] == whole, "the end is another"
    assert len(read_root(root)) == SETUP.keep_last
    assert not [path for path in (root / PARTIAL).glob("*/*") if path.is_dir()], "a partial checkpoint"
    return {"updates": num_updates, "folders": worst[0], "bytes": worst[1], "one": one_bytes}


@pytest.mark.matrix
def test_a_run_that_is_killed_again_and_again(tmp_path: Path) -> None:
    _soak(tmp_path, plan_deaths(2, seed=3))


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_fifty_deaths(tmp_path: Path) -> None:
    deaths = plan_deaths(50, seed=0)
    assert {death.victims for death in deaths} == {(0,), (1,), (0, 1)}
    print(_soak(tmp_path, deaths))
