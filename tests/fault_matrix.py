"""Every named point of a save, times what can go wrong there, on which rank, in the foreground and in the background.

A cell is one such fault. `run_cells` plants each in a save into a root that holds a good checkpoint, then lets fresh
ranks judge what is left there. Ranks live on from cell to cell where the fault leaves them alive, so that every cell
also shows that a save works after the fault before it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from accel_fsdp_tools import meetings, phases
from accel_fsdp_tools.commit import PARTIAL
from accel_fsdp_tools.errors import AccelFsdpError
from tests.harness import collect, run_ranks, start_ranks
from tests.training import Objects, Setup, build, digest_model, digest_optimizer, train_batch

WORLD = 3
TIMEOUT_S, BREAK_S = 4.0, 1.0  # of the package, in the cells: how long a rank waits, and for the others to notice
DEFAULT_GROUP_S = 8.0  # the training's own timeout, which counts inside Accelerate's and torch's calls
CAP_S = 90.0  # a stall that lasts so long means that somebody hangs
SETUP = Setup(num_items=900, accumulation=1, num_layers=1)

RAISE, KILL, STALL, FULL = KINDS = ("raise", "kill", "stall", "full disk")
SYNC, ASYNC = MODES = ("sync", "async")
OLD, NEW = "old", "new"


@dataclass(frozen=True)
class Place:
    """One point of a save: what is left when it ends there, and where the point exists."""

    left: str
    everywhere: bool = True  # else on rank 0 alone
    modes: tuple[str, ...] = MODES
    replaces: bool = False  # the save takes the name of the good checkpoint
    prunes: bool = False  # the good checkpoint may go, once the new one is committed
    of_torch: bool = False  # inside a collective of torch or Accelerate
    point: str = ""  # the name of `phases`, where the place has another


PLACES: dict[str, Place] = {
    "save.begin": Place(OLD),
    "save.staged": Place(OLD),
    "save.writing": Place(OLD, modes=(ASYNC,)),
    "model's file": Place(OLD, of_torch=True),
    "optimizer's file": Place(OLD, of_torch=True),
    "save.delegated": Place(OLD),
    "save.rng": Place(OLD),
    "save.progress": Place(OLD),
    "fsync of a file": Place(OLD),
    "save.fingerprints": Place(OLD),
    "save.synced": Place(OLD),
    "save.checksums": Place(OLD),
    "save.manifest": Place(OLD, everywhere=False),
    "save.set_aside": Place(OLD, everywhere=False),
    "save.renamed": Place(NEW, everywhere=False),
    "save.set_aside, replacing": Place(OLD, everywhere=False, replaces=True, point="save.set_aside"),
    "save.renamed, replacing": Place(NEW, everywhere=False, replaces=True, point="save.renamed"),
    "save.committed": Place(NEW),
    "prune.begin": Place(NEW, prunes=True),
    "prune.set_aside": Place(NEW, everywhere=False, prunes=True),
    "prune.removed": Place(NEW, everywhere=False, prunes=True),
}
_ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: OSError(errno.EIO, "Input/output error"),
    lambda: OSError(errno.EDQUOT, "Disk quota exceeded"),
    lambda: RuntimeError("planted"),
    lambda: MemoryError("planted"),
)


@dataclass(frozen=True)
class Cell:
    place: str
    kind: str
    victim: int
    mode: str

    @property
    def name(self) -> str:
        return f"{self.place}, {self.kind}, rank {self.victim}, {self.mode}"

    @property
    def is_last(self) -> bool:
        """Whether these ranks can do nothing afterwards: one is dead, or the group of the training is broken."""
        return self.kind == KILL or (self.kind == STALL and self.mode == SYNC and PLACES[self.place].of_torch)

    @property
    def expected(self) -> tuple[str, ...]:
        """What may be left. Rank 0 finishes a commit that it has begun, whatever has become of the others."""
        left = PLACES[self.place].left
        if self.kind == FULL:  # it fails where something is written next, which is later than the point
            return (OLD, NEW) if left == OLD else (NEW,)
        if self.kind == STALL and not PLACES[self.place].everywhere:
            return (NEW,)
        return (left,)


def generate_cells() -> list[Cell]:
    """Return the whole product."""
    return [
        Cell(name, kind, victim, mode)
        for name, place in PLACES.items()
        for kind in KINDS
        for victim in ((0, 1) if place.everywhere else (0,))
        for mode in place.modes
    ]


def choose_sample() -> list[Cell]:
    """Return one cell per place; each kind, rank and mode occurs, those once that wait or need ranks of their own."""
    slow = {
        "save.delegated": Cell("save.delegated", KILL, 1, ASYNC),
        "save.checksums": Cell("save.checksums", STALL, 1, SYNC),
    }
    return [
        slow.get(name)
        or Cell(
            name,
            RAISE if number % 3 else FULL,
            (number // 2) % 2 if place.everywhere else 0,
            place.modes[number % len(place.modes)],
        )
        for number, (name, place) in enumerate(PLACES.items())
    ]


@dataclass(frozen=True)
class Verdict:
    """What a cell came to. `problems` is empty if all is as promised."""

    cell: Cell
    left: str
    has_raised: bool
    waited_s: float
    problems: tuple[str, ...]


# -- the ranks that fail --------------------------------------------------------------------------------------------


class _Fault:
    """Strikes once, at one point, on one rank, whichever thread comes there."""

    def __init__(self, cell: Cell, folder: Path, number: int) -> None:
        self.cell, self.folder, self.number = cell, folder, number
        self.rank = int(os.environ["RANK"])
        self.has_struck = False
        self._writes = 0
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Plant it for the duration of the context, in which the save is made and waited for."""
        from torch.distributed.checkpoint import FileSystemWriter

        from accel_fsdp_tools import files

        write_data, fsync_file = FileSystemWriter.write_data, files.fsync_file

        def write(writer: Any, *args: Any, **kwargs: Any) -> Any:
            self._writes += 1
            self.reach("model's file" if self._writes == 1 else "optimizer's file")
            return write_data(writer, *args, **kwargs)

        def sync(path: Path) -> None:
            self.reach("fsync of a file")
            fsync_file(path)

        with self._undo:
            self._set(FileSystemWriter, "write_data", write)
            self._set(files, "fsync_file", sync)
            self._undo.callback(phases.set_observer, phases.set_observer(self.reach))
            yield

    def _set(self, target: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)

    def reach(self, point: str) -> None:
        wanted = PLACES[self.cell.place].point or self.cell.place
        if point != wanted or self.rank != self.cell.victim or self.has_struck:
            return
        self.has_struck = True
        if self.cell.kind == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.cell.kind == RAISE:
            raise _ERRORS[self.number % len(_ERRORS)]()
        elif self.cell.kind == STALL:
            self._sleep()
        else:
            self._fill_the_disk()

    def _sleep(self) -> None:
        """Come back when all others have raised."""
        _wait_for(self.folder / f"told_{rank}.json" for rank in range(WORLD) if rank != self.rank)

    def _fill_the_disk(self) -> None:
        """From here on no file of this process grows (the kernel's doing), and no directory can be made or synced."""

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._undo.callback(resource.setrlimit, resource.RLIMIT_FSIZE, old)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))
        self._set(os, "mkdir", refuse)
        self._set(os, "fsync", refuse)


def _wait_for(paths: Iterable[Path]) -> None:
    deadline = time.monotonic() + CAP_S
    for path in paths:
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path.name} does not come: somebody hangs")
            time.sleep(0.02)


def _digest(objects: Objects) -> str:
    return digest_model(objects.model) + digest_optimizer(objects.optimizer)


def hash_files(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _run_on_ranks(cells: list[tuple[Cell, str]]) -> None:
    """Plant one fault after another; what is to be known of each is written into its folder."""
    import torch.distributed as dist

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    meetings.BREAK_S = BREAK_S
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEFAULT_GROUP_S if cells[0][0].is_last else 60))
    objects = build(SETUP, seed=1)
    for number, (cell, folder) in enumerate(cells):
        # Where a rank is dead, closing raises once more what was told already.
        with contextlib.suppress(*([AccelFsdpError] if cell.kind == KILL else [])):
            _run_one(objects, cell, Path(folder), number)


def _run_one(objects: Objects, cell: Cell, folder: Path, number: int) -> None:
    from accel_fsdp_tools import Checkpointer
    from accel_fsdp_tools.steps import follow_steps

    place, rank = PLACES[cell.place], objects.accelerator.process_index
    follow_steps(objects.accelerator).count = 0
    with Checkpointer(
        objects.accelerator,
        folder / "root",
        keep_last=1 if place.prunes else None,
        async_save=cell.mode == ASYNC,
    ) as checkpointer:
        checkpointer.resume()
        train_batch(objects, next(iter(objects.loader)))
        checkpointer.step()
        good = checkpointer.save()
        checkpointer.wait()
        assert good is not None
        facts: dict[str, Any] = {"good": good.name, OLD: _digest(objects)}
        if rank == 0:
            facts["files"] = hash_files(good)
        train_batch(objects, next(iter(objects.loader)))
        if not place.replaces:
            checkpointer.step()
        facts[NEW] = _digest(objects)
        (folder / f"facts_{rank}.json").write_text(json.dumps(facts))
        objects.accelerator.wait_for_everyone()
        fault = _Fault(cell, folder, number)
        error, started = None, time.monotonic()
        with fault.planted():
            try:
                checkpointer.save()
                checkpointer.wait()
            except AccelFsdpError as raised:
                error = raised
        told = {
            "waited_s": time.monotonic() - started,
            "error": None if error is None else [type(error).__name__, error.rank, str(error)],
            "struck": fault.has_struck,
        }
        temporary = folder / f"told_{rank}.tmp"
        temporary.write_text(json.dumps(told))
        temporary.rename(folder / f"told_{rank}.json")
        if cell.kind == STALL:  # rank 0 keeps the store, which the one that slept still needs
            _wait_for([folder / f"told_{cell.victim}.json"])
        if not cell.is_last:
            objects.accelerator.wait_for_everyone()


# -- the ranks that judge -------------------------------------------------------------------------------------------


def _judge_on_ranks(folders: list[str]) -> list[dict[str, Any]]:
    from accel_fsdp_tools.steps import follow_steps

    objects = build(SETUP, seed=5)
    seen = []
    for folder in folders:
        follow_steps(objects.accelerator).count = 0
        seen.append(_judge_one(objects, Path(folder)))
        objects.optimizer.optimizer.state.clear()
    return seen


def _judge_one(objects: Objects, folder: Path) -> dict[str, Any]:
    from accel_fsdp_tools import Checkpointer, verify_checkpoint

    root, rank = folder / "root", objects.accelerator.process_index
    facts = json.loads((folder / f"facts_{rank}.json").read_text())
    with Checkpointer(objects.accelerator, root) as checkpointer:
        position = checkpointer.resume()
    digest = _digest(objects)
    problems = []
    left = OLD if digest == facts[OLD] else NEW if digest == facts[NEW] else "neither"
    if position.skipped or not position.report.exact:
        problems.append(f"the resume: {position.skipped}, {position.report}")
    if rank == 0:
        reports = {path.name: verify_checkpoint(path) for path in sorted(root.glob("step_*"))}
        problems += [f"{name} is not whole: {report}" for name, report in reports.items() if not report.ok]
        good = root / facts["good"]
        if good.exists() and hash_files(good) != facts["files"] and not (left == NEW and position.step == 1):
            problems.append("the good checkpoint has changed")
        if (root / PARTIAL).exists():
            problems.append("the partial checkpoint was not swept")
        names = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
        if len(reports) != len(names):
            problems.append(f"something else lies there: {names}")
    return {"left": left, "step": position.step, "problems": problems, "good": facts["good"]}


# -- both -----------------------------------------------------------------------------------------------------------


def run_cells(cells: Sequence[Cell], folder: Path, *, batch: int = 30) -> list[Verdict]:
    """Run the cells and judge them; returns a verdict for each, in the same order."""
    folders = [folder / f"{number:03d}" for number in range(len(cells))]
    for each in folders:
        each.mkdir(parents=True)
    pairs = [(cell, str(each)) for cell, each in zip(cells, folders, strict=True)]
    alive = [pair for pair in pairs if not pair[0].is_last]
    problems: dict[str, list[str]] = {name: [] for _, name in pairs}
    batches = [alive[start : start + batch] for start in range(0, len(alive), batch)]
    for number, group in enumerate([*batches, *([pair] for pair in pairs if pair[0].is_last)]):
        ranks_folder = folder / f"ranks_{number}"
        processes = start_ranks(
            _run_on_ranks,
            group,
            world_size=WORLD,
            folder=ranks_folder,
            environment={meetings.TIMEOUT_VARIABLE: str(TIMEOUT_S)},
        )
        outcomes = collect(processes, folder=ranks_folder, timeout_s=60 + 30 * len(group), grace_s=40)
        for outcome in outcomes:
            is_killed = group[0][0].kind == KILL and outcome.rank == group[0][0].victim
            if is_killed and outcome.exit_code != -signal.SIGKILL:
                problems[group[-1][1]].append("the kill never came")
            elif not is_killed and not outcome.finished:
                text = outcome.error_text or (ranks_folder / f"log_{outcome.rank}.txt").read_text()[-3000:]
                problems[group[-1][1]].append(f"rank {outcome.rank} hung or died: {text}")
    judged: list[list[dict[str, Any]]] = []
    names = [name for _, name in pairs if (Path(name) / f"facts_{WORLD - 1}.json").exists()]
    for start in range(0, len(names), batch):
        part = names[start : start + batch]
        results = run_ranks(
            _judge_on_ranks, part, world_size=WORLD, folder=folder / f"judges_{start}", timeout_s=60 + 10 * len(part)
        )
        judged += [list(each) for each in zip(*results, strict=True)]
    seen = dict(zip(names, judged, strict=True))
    verdicts = [_conclude(cell, Path(name), seen.get(name), problems[name]) for cell, name in pairs]
    for verdict, (_, name) in zip(verdicts, pairs, strict=True):
        if not verdict.problems:
            shutil.rmtree(name)
    return verdicts


def _conclude(cell: Cell, folder: Path, judged: list[dict[str, Any]] | None, problems: list[str]) -> Verdict:
    if judged is None:
        return Verdict(cell, "?", False, 0.0, (*problems, "the ranks never came there"))
    survivors = [rank for rank in range(WORLD) if cell.kind != KILL or rank != cell.victim]
    told = {}
    for rank in survivors:
        path = folder / f"told_{rank}.json"
        if not path.exists():
            problems.append(f"rank {rank} told nothing")
        else:
            told[rank] = json.loads(path.read_text())
    errors = {rank: each["error"] for rank, each in told.items()}
    if cell.kind != KILL and not told.get(cell.victim, {}).get("struck"):
        problems.append("the fault never struck")
    problems += [f"rank {rank}: {problem}" for rank, each in enumerate(judged) for problem in each["problems"]]
    lefts = {each["left"] for each in judged}
    left = lefts.pop() if len(lefts) == 1 else "mixed"
    if left not in cell.expected:
        problems.append(f"{left} is left, expected {cell.expected}")
    has_raised = any(errors.values())
    if not has_raised:
        if cell.kind != FULL or left != NEW:
            problems.append("nobody raised anything")
    else:
        problems += [f"rank {rank} raised nothing" for rank, error in errors.items() if error is None]
        raised = {rank: error for rank, error in errors.items() if error is not None}
        problems += [f"rank {rank} blames {error}" for rank, error in raised.items() if error[1] != cell.victim]
        # One that stalled learns that it came too late; all others are told the same.
        same = {tuple(error) for rank, error in raised.items() if cell.kind != STALL or rank != cell.victim}
        if len(same) > 1:
            problems.append(f"different errors: {same}")
    waited_s = max((each["waited_s"] for rank, each in told.items() if rank != cell.victim), default=0.0)
    return Verdict(cell, left, has_raised, waited_s, tuple(problems))
