"""What the documented resume of plain Accelerate does with data: `load_state`, then `skip_first_batches`.

The reason for all of `progress/`. A kind that Accelerate restores after all is good news: change the table, and see
what of ours is needed no more. `test_data_kinds.py` has the same kinds with this package, exact.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

from tests.harness import run_ranks
from tests.loader_kinds import KINDS as SAMPLED
from tests.loader_kinds import make_accelerator, seed_everything
from tests.stream_kinds import KINDS as OTHERS

NUM_EPOCHS, SAVE_AT = 3, (1, 2)
NAMES = (
    "shuffle", "seedable", "sequential", "own_generator", "weighted", "hidden_torch", "in_place", "batch_sampler",
    "split_batches", "dispatch", "stream_shuffled_dispatched", "stateful",
)  # fmt: skip
KINDS = SAMPLED | OTHERS


def _run(name: str, root: Path, *, resume: bool) -> list[tuple[int, list[Any]]]:
    """Every batch by epoch: of a whole run that saves in its second epoch, or of what goes on from there."""
    kind = KINDS[name]
    accelerator = make_accelerator(kind.config)
    seed_everything(1 + 100 * accelerator.process_index)  # as a script does, at each of its starts
    loader = accelerator.prepare(kind.make(1))
    epochs: list[tuple[int, Any]] = [(epoch, loader) for epoch in range(NUM_EPOCHS)]
    if resume:
        accelerator.load_state(str(root / name))
        epochs = [(SAVE_AT[0], accelerator.skip_first_batches(loader, SAVE_AT[1])), *epochs[SAVE_AT[0] + 1 :]]
    log = []
    for epoch, batches in epochs:
        if hasattr(batches, "set_epoch"):
            batches.set_epoch(epoch)
        for number, batch in enumerate(batches, start=1):
            log.append((epoch, batch.tolist()))
            if not resume and (epoch, number) == SAVE_AT:
                accelerator.save_state(str(root / name))
    return log


def _run_all(names: list[str], root: Path, *, resume: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {name: _run(name, root, resume=resume) for name in names}


def test_batches_after_the_documented_resume(tmp_path: Path) -> None:
    has_torchdata = importlib.util.find_spec("torchdata") is not None
    names = [name for name in NAMES if has_torchdata or not name.startswith("stateful")]
    wholes = run_ranks(_run_all, names, tmp_path / "saved", resume=False, folder=tmp_path / "r0")
    parts = run_ranks(_run_all, names, tmp_path / "saved", resume=True, folder=tmp_path / "r1")
    found = {name: _judge([whole[name] for whole in wholes], [part[name] for part in parts]) for name in names}
    assert found == {name: "ids" if name in ("seedable", "sequential") else "other samples" for name in names}


def _judge(wholes: list[Any], parts: list[Any]) -> str:
    """How far the resumed run is the end of the whole one, on all ranks: to the bit, in its ids, or not at all."""
    rests = []
    for whole in wholes:
        num_in_epoch = sum(epoch == SAVE_AT[0] for epoch, _ in whole)
        num_later = sum(epoch > SAVE_AT[0] for epoch, _ in whole)
        rests.append(whole[-(num_in_epoch - SAVE_AT[1] + num_later) :])
    if parts == rests:
        return "bit-equal"
    return "ids" if [_list_ids(part) for part in parts] == [_list_ids(rest) for rest in rests] else "other samples"


def _list_ids(log: list[tuple[int, Any]]) -> list[Any]:
    return [(epoch, [int(row[0]) for row in batch]) for epoch, batch in log]
