"""Run functions on real ranks, in processes that have done nothing before.

The ranks are forked from a server that has imported torch, accelerate and transformers and done nothing else, so a
fresh process costs a fraction of a second instead of the several that those imports take. A rank's result or
error goes to a file of its own; of several errors the earliest is the culprit (the others usually show only a lost
connection), and results count, not exit codes: a process may abort at exit after all is done.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])


class RankError(AssertionError):
    """One or more ranks failed. `.errors` maps rank to the exception (rebuilt where it could be pickled)."""

    def __init__(self, message: str, errors: Mapping[int, BaseException | None]) -> None:
        super().__init__(message)
        self.errors = dict(errors)


@dataclass(frozen=True)
class RankOutcome:
    rank: int
    exit_code: int | None
    value: Any = None
    error: BaseException | None = None
    error_text: str | None = None
    error_time: float = 0.0
    finished: bool = False


def _count_ports() -> Iterator[int]:
    """Ports below those that the system gives to whoever asks for any, which may take one before its ranks do."""
    ports = range(15_000, 32_000)
    start = random.SystemRandom().randrange(len(ports))
    for number in itertools.count(start):
        yield ports[number % len(ports)]


_PORTS = _count_ports()


def find_free_port() -> int:
    """Return a port that nobody listens at, and that no other call returns for long."""
    for port in _PORTS:
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("", port))
            return port
    raise AssertionError("unreachable")


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: int,
    world_size: int,
    port: int,
    environment: dict[str, str],
    folder: str,
) -> None:
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
    )
    import torch

    torch.set_num_threads(1)
    log = open(Path(folder) / f"log_{rank}.txt", "w", buffering=1)  # noqa: SIM115, PTH123
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        text = traceback.format_exc()
        try:
            payload = pickle.dumps((time.time(), text, error))
            pickle.loads(payload)
        except Exception:
            payload = pickle.dumps((time.time(), text, None))
        (Path(folder) / f"error_{rank}.pkl").write_bytes(payload)
        print(text, file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    temporary = Path(folder) / f"result_{rank}.tmp"
    temporary.write_bytes(pickle.dumps(value))
    temporary.rename(Path(folder) / f"result_{rank}.pkl")
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    os._exit(0)  # interpreter teardown with gloo threads aborts now and then; the result is on disk


def start_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    folder: Path,
    environment: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Start the ranks and return their processes; `collect` gathers what became of them."""
    folder.mkdir(parents=True, exist_ok=True)
    port = find_free_port()
    processes = []
    for rank in range(world_size):
        process = _CONTEXT.Process(
            target=_rank_main,
            args=(function, args, kwargs, rank, world_size, port, environment or {}, str(folder)),
        )
        process.start()
        processes.append(process)
    return processes


def collect(
    processes: list[Any], *, folder: Path, timeout_s: float = 120.0, grace_s: float = 20.0
) -> list[RankOutcome]:
    """Wait for the ranks; once one has ended without a result the others get `grace_s` more, then are killed."""
    deadline = time.monotonic() + timeout_s
    shortened = False
    while any(process.is_alive() for process in processes):
        time.sleep(0.02)
        if not shortened:
            for rank, process in enumerate(processes):
                if not process.is_alive() and not (folder / f"result_{rank}.pkl").exists():
                    deadline = min(deadline, time.monotonic() + grace_s)
                    shortened = True
        if time.monotonic() > deadline:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
            break
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(10)
        result, failure = folder / f"result_{rank}.pkl", folder / f"error_{rank}.pkl"
        if result.exists():
            value = pickle.loads(result.read_bytes())
            outcomes.append(RankOutcome(rank, process.exitcode, value=value, finished=True))
        elif failure.exists():
            when, text, error = pickle.loads(failure.read_bytes())
            outcomes.append(RankOutcome(rank, process.exitcode, error=error, error_text=text, error_time=when))
        else:
            outcomes.append(RankOutcome(rank, process.exitcode))
    return outcomes


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    folder: Path,
    timeout_s: float = 120.0,
    environment: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on fresh ranks and return their results in rank order.

    `folder` must be new for each call. Raises `RankError`, the earliest failure first, if any rank failed.
    """
    outcomes = collect(
        start_ranks(function, *args, world_size=world_size, folder=folder, environment=environment, **kwargs),
        folder=folder,
        timeout_s=timeout_s,
    )
    if all(outcome.finished for outcome in outcomes):
        return [outcome.value for outcome in outcomes]
    failed = sorted(
        (outcome for outcome in outcomes if not outcome.finished),
        key=lambda outcome: outcome.error_time or float("inf"),
    )
    parts = []
    for outcome in failed:
        log = folder / f"log_{outcome.rank}.txt"
        tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        parts.append(
            f"rank {outcome.rank} (exit code {outcome.exit_code}):\n{outcome.error_text or tail or 'no output'}"
        )
    raise RankError("\n".join(parts), {outcome.rank: outcome.error for outcome in failed})


def run_ranks_expecting(
    expected: type[BaseException],
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    folder: Path,
    timeout_s: float = 60.0,
    **kwargs: Any,
) -> list[BaseException]:
    """Run and require that *every* rank raises `expected` by itself (none hangs, none is killed); return them."""
    processes = start_ranks(function, *args, world_size=world_size, folder=folder, **kwargs)
    outcomes = collect(processes, folder=folder, timeout_s=timeout_s)
    for outcome in outcomes:
        assert not outcome.finished, f"rank {outcome.rank} raised nothing"
        assert outcome.error_text is not None, f"rank {outcome.rank} hung or died: exit {outcome.exit_code}"
        assert isinstance(outcome.error, expected), f"rank {outcome.rank}:\n{outcome.error_text}"
    return [outcome.error for outcome in outcomes if outcome.error is not None]
