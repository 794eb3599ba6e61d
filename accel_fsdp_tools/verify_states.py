"""After a load: are scheduler, grad scaler, random generators and data progress what the checkpoint holds?

Each rank looks again, when everything has been restored, and compares with the files or with its own record. Nothing
is drawn and nothing is changed: what is looked at goes on as if nobody had.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .compare_disk import gather_findings
from .disk_values import iterate_differences, read_values, simplify
from .findings import Finding, Severity, VerifyReport
from .load_notes import LoadNotes
from .manifest import Manifest
from .progress import LoaderOutcome
from .progress import track as track_loaders
from .rank_restore import RankPart
from .ranks import get_rank, run_together
from .rng import RngSnapshot, derive, find_device_modules

if TYPE_CHECKING:
    from accelerate import Accelerator

_SHOWN = 200  # characters of a value in a message


def verify_states(
    accelerator: Accelerator,
    directory: Path,
    manifest: Manifest | None,
    part: RankPart,
    outcomes: Sequence[LoaderOutcome],
    notes: LoadNotes,
) -> VerifyReport:
    """Compare what is no tensor with the checkpoint; the report is the same on every rank.

    Call it last, before any batch is drawn and any random number. Collective.

    Args:
        part: what this rank was to restore.
        outcomes: what became of its dataloaders.
        notes: what is absent by now is not compared; gets a note about each kind of state that was.
    """
    started = time.monotonic()
    mine: list[Finding] = []
    counts: Counter[str] = Counter()

    def compare() -> None:
        mine.extend(_compare_schedulers(accelerator, directory, counts))
        mine.extend(_compare_scaler(accelerator, directory, counts))
        mine.extend(_compare_generators(directory, manifest, part, notes, counts))
        if part.restores_data:
            mine.extend(_compare_progress(accelerator, part, outcomes, counts))

    run_together("comparing scheduler, scaler, RNG and data progress with the checkpoint", compare)
    findings, omitted, everyone = gather_findings(mine, dict(counts))
    total: Counter[str] = Counter()
    for each in everyone:
        total.update({name: count for name, count in each.items() if name in counts})
    if total:
        text = ", ".join(f"{name} ({count} comparisons)" for name, count in total.items())
        notes.notes.append(f"compared with the checkpoint after the restore, on all ranks: {text}")
    return VerifyReport(
        path=str(directory),
        mode="states",
        findings=tuple(findings),
        counts=dict(total),
        seconds=time.monotonic() - started,
        omitted=omitted,
    )


def _fail(state: str, what: str, key: str, expected: Any, actual: Any) -> Finding:
    message = (
        f"rank {get_rank()}: {what}: {key or 'the value'} is {_shorten(expected)} in the checkpoint and "
        f"{_shorten(actual)} after the load"
    )
    facts = {"state": state, "key": key, "expected": expected, "actual": actual}
    return Finding(state, Severity.FAILURE, message, fqn=f"{what}.{key}" if key else what, facts=facts)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _compare_schedulers(accelerator: Accelerator, directory: Path, counts: Counter[str]) -> Iterator[Finding]:
    for index, scheduler in enumerate(accelerator._schedulers):
        name = "scheduler" if index == 0 else f"scheduler_{index}"
        yield from _compare_file("scheduler", name, directory / f"{name}.bin", scheduler.state_dict, counts)


def _compare_scaler(accelerator: Accelerator, directory: Path, counts: Counter[str]) -> Iterator[Finding]:
    if accelerator.scaler is not None:
        yield from _compare_file("scaler", "scaler", directory / "scaler.pt", accelerator.scaler.state_dict, counts)


def _compare_file(
    state: str, name: str, path: Path, read_live: Callable[[], Any], counts: Counter[str]
) -> Iterator[Finding]:
    if not path.exists():
        return  # whether that may be is judged before the load
    counts[state] += 1
    for key, expected, actual in iterate_differences(read_values(path), simplify(read_live())):
        yield _fail(state, name, key, expected, actual)


def _compare_generators(
    directory: Path, manifest: Manifest | None, part: RankPart, notes: LoadNotes, counts: Counter[str]
) -> Iterator[Finding]:
    if manifest is None:
        path = directory / f"random_states_{get_rank()}.pkl"
        if path.exists():
            counts["rng"] += 1
            yield from _compare_with_accelerate(path)
        return
    if "rng" in notes.absent:
        return
    expected = part.state.rng if part.state is not None else None
    if expected is None and part.base_rng is not None and get_rank() >= manifest.topology.world_size:
        expected = derive(part.base_rng, get_rank())
    if expected is None:
        return
    counts["rng"] += 1
    live = RngSnapshot.capture().to_tensors("rng")
    devices = find_device_modules()
    for name, tensor in expected.to_tensors("rng").items():
        _, _, generator = name.partition("/")
        kind, _, device = generator.partition("/")
        if kind == "device" and device not in devices:
            continue  # saved on an accelerator that is not here
        here = live.get(name)
        if here is None or here.shape != tensor.shape or not bool((here == tensor).all()):
            yield _fail("rng", "rng", generator, "the saved state", "another state")


def _compare_with_accelerate(path: Path) -> Iterator[Finding]:
    """Compare with Accelerate's own file: its load restores some generators, or none, and calls that a success."""
    import torch

    live = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    for name, module in find_device_modules().items():
        if hasattr(module, "get_rng_state_all"):
            live[f"torch_{name}_manual_seed"] = module.get_rng_state_all()
    saved = read_values(path)
    for name, state in live.items():
        if name in saved and next(iterate_differences(saved[name], simplify(state)), None) is not None:
            yield _fail("rng", "rng", name, "the saved state", "another state")


def _compare_progress(
    accelerator: Accelerator, part: RankPart, outcomes: Sequence[LoaderOutcome], counts: Counter[str]
) -> Iterator[Finding]:
    counts["data"] += len(outcomes)
    for each in track_loaders(accelerator).find_differences(part.loaders, outcomes):
        yield _fail("data", f"dataloader {each.index}", each.key, each.expected, each.actual)
