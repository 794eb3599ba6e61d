"""The table of the documentation: every point of a save, and what is left of a fault there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.fault_matrix import (
    ASYNC,
    BREAK_S,
    DEFAULT_GROUP_S,
    FULL,
    KILL,
    KINDS,
    PLACES,
    STALL,
    SYNC,
    TIMEOUT_S,
    WORLD,
    Verdict,
)

_HEAD = f"""# What is left of a save that fails

Written by `pytest -m matrix tests/test_fault_matrix.py`; the default test run takes a sample of it. A root holds a
good checkpoint. The next save, on {WORLD} ranks under FSDP2, meets one fault at one point on one rank: an error is
raised (EIO, EDQUOT, MemoryError, RuntimeError in turns), the process is killed (SIGKILL), it sleeps until all others
have given up on it, or the disk is full from there on (the kernel lets no file grow, no directory can be made or
synced). Then fresh ranks resume from what is there. In every cell:

- What they load is bit for bit the old state or the new one; every committed checkpoint passes `verify_checkpoint`; the
  files of the old one are unchanged (pruned ones apart); nothing is quarantined; what was partial is gone.
- Every rank that lives has raised the same error, which names the rank of the fault. One that had slept learns that it
  came too late. Nobody hangs.
- Unless a rank is dead or the training's own process group is broken, the same ranks go on with the next cell.

`old` and `new` say what is left: foreground / background where they differ. "no error": nothing was left to write on
that rank, so the save succeeded. "-": only rank 0 comes there. `save.writing` exists in the background alone.
"""

_FOOT = """
Rank 0 goes on with a commit that it has begun: where it sleeps between the manifest and the rename, the others have
given up on it, and the checkpoint is whole all the same when it wakes.
"""


def write_table(verdicts: Sequence[Verdict]) -> str:
    """Return the page."""
    columns = [(kind, victim) for kind in KINDS for victim in (0, 1)]
    titles = [f"{kind}, {'rank 0' if victim == 0 else 'another'}" for kind, victim in columns]
    lines = [_HEAD, "| point | " + " | ".join(titles) + " |", "| --- |" + " --- |" * len(columns)]
    for place in PLACES:
        cells = [
            _join([each for each in verdicts if _get_key(each) == (place, kind, victim)]) for kind, victim in columns
        ]
        lines.append(f"| {place} | {' | '.join(cells)} |")
    return "\n".join([*lines, _FOOT, *_list_waits(verdicts)]) + "\n"


def _get_key(verdict: Verdict) -> tuple[str, str, int]:
    return verdict.cell.place, verdict.cell.kind, verdict.cell.victim


def _join(verdicts: list[Verdict]) -> str:
    """Return one word where both modes agree."""
    words = {each.cell.mode: each.left + ("" if each.has_raised else ", no error") for each in verdicts}
    said = [words[mode] for mode in (SYNC, ASYNC) if mode in words]
    return "-" if not said else said[0] if len(set(said)) == 1 else " / ".join(said)


def _list_waits(verdicts: Sequence[Verdict]) -> Iterable[str]:
    yield (
        f"The longest that a rank that lives waited for its error in this run, on a busy machine, with\n"
        f"ACCEL_FSDP_TOOLS_TIMEOUT_S at {TIMEOUT_S:g} and {BREAK_S:g} s for the others to notice:\n"
    )
    yield "| | foreground | background |"
    yield "| --- | --- | --- |"
    for kind in KINDS:
        waits = [
            max((each.waited_s for each in verdicts if (each.cell.kind, each.cell.mode) == (kind, mode)), default=0.0)
            for mode in (SYNC, ASYNC)
        ]
        yield f"| {kind} | {waits[0]:.1f} s | {waits[1]:.1f} s |"
    notes = {
        STALL: "in the background up to twice the timeout: the training of the rank that sleeps comes late too. In the "
        f"foreground inside torch's own collectives the timeout of the training's process group, here "
        f"{DEFAULT_GROUP_S:g} s, comes on top",
        KILL: "a rank that is inside a stage notices at once; one that first meets the others waits for the timeout",
        FULL: "no wait at all",
    }
    yield ""
    yield from (f"- {kind}: {note}." for kind, note in notes.items())
