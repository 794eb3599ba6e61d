"""Prove that a run which was killed and resumed equals one that never stopped, and draw both.

    python examples/compare_runs.py runs/uninterrupted runs/interrupted --plot runs/comparison.png

Compares what `finetune_lm.py` left in two output folders, bit for bit: every loss and learning rate that either run
ever computed (also the steps that were lost in the kill and computed again), and SHA-256 digests of every rank's shards
of the parameters, its optimizer state and its random generators. Exit code 0: identical; 1: different; 2: unusable.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any


@dataclass
class Attempt:
    """What one process start contributed: where it began and the steps it made."""

    first_step: int
    records: list[dict[str, Any]]

    @property
    def last_step(self) -> int:
        return self.records[-1]["step"] if self.records else self.first_step


@dataclass
class Run:
    attempts: list[Attempt]
    digests: dict[str, str]

    def get_values(self, key: str) -> dict[tuple[int, int], float]:
        """`(step, attempt) -> value`, a step that was computed twice counting twice."""
        return {
            (record["step"], number): record[key]
            for number, attempt in enumerate(self.attempts)
            for record in attempt.records
        }


@dataclass
class Row:
    """One line of the table. `first` names the first thing that differs."""

    what: str
    compared: int
    different: int
    first: str = ""


def read_run(folder: Path) -> Run:
    attempts: list[Attempt] = []
    for line in (folder / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.get("event") == "start":
            attempts.append(Attempt(record["step"], []))
        else:
            attempts[-1].records.append(record)
    return Run(attempts, json.loads((folder / "digests.json").read_text()))


def compare_series(what: str, key: str, reference: Run, other: Run) -> Row:
    """Each value of `other` must be the reference's at that step, and no step may be missing on either side."""
    expected = {step: value for (step, _), value in reference.get_values(key).items()}
    values = other.get_values(key)
    differences = []
    for (step, attempt), value in sorted(values.items()):
        if step not in expected:
            differences.append(f"step {step} is not in the reference")
        elif value != expected[step]:
            differences.append(f"step {step}, start {attempt + 1}: {value.hex()}, not {expected[step].hex()}")
    missing = sorted(set(expected) - {step for step, _ in values})
    differences += [f"step {step} is missing" for step in missing]
    return Row(what, len(values) + len(missing), len(differences), differences[0] if differences else "")


def compare_digests(kind: str, reference: Run, other: Run) -> Row:
    def select(run: Run) -> dict[str, str]:
        return {name: digest for name, digest in run.digests.items() if name.split("/")[1] == kind}

    expected, actual = select(reference), select(other)
    names = sorted(expected.keys() | actual.keys())
    different = [name for name in names if expected.get(name) != actual.get(name)]
    return Row(kind, len(names), len(different), different[0] if different else "")


def print_table(rows: list[Row]) -> None:
    print(f"{'':<22}{'compared':>10}{'different':>11}")
    for row in rows:
        print(f"{row.what:<22}{row.compared:>10}{row.different:>11}   {row.first}".rstrip())


def describe(run: Run) -> str:
    parts = []
    for before, after in pairwise(run.attempts):
        again = before.last_step - after.first_step
        parts.append(
            f"killed at step {before.last_step}, resumed from the checkpoint of step {after.first_step} "
            f"({again} step{'s' * (again != 1)} computed again)"
        )
    return "; ".join(parts) or "never interrupted"


def draw(reference: Run, other: Run, path: Path, identical: bool) -> None:
    """Both runs in one picture: the reference as a broad band, the other run's attempts as dots on it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    band = {"color": "#c9ced6", "lw": 8, "solid_capstyle": "round"}
    colors = ["#1f6fb4", "#e8731a", "#2a9d55", "#8a4fbf"]
    styles = [
        {"color": colors[number % 4], "lw": 1.5, "marker": "o", "mew": 1.5}
        | ({"ms": 9, "mfc": "white"} if number % 2 == 0 else {"ms": 5})  # so that both of two equal dots show
        for number in range(len(other.attempts))
    ]
    breaks = [(before.last_step, after.first_step) for before, after in pairwise(other.attempts)]
    red, grey = "#c0262d", "#555b66"

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5.6), sharex=True, layout="constrained", height_ratios=[3, 1]
    )
    for axes, key in ((top, "loss"), (bottom, "lr")):
        values = {step: value for (step, _), value in reference.get_values(key).items()}
        axes.plot(values.keys(), values.values(), **band, zorder=1)
        for number, attempt in enumerate(other.attempts):
            steps = [record["step"] for record in attempt.records]
            axes.plot(steps, [record[key] for record in attempt.records], **styles[number], zorder=2 + number)
        for killed_at, resumed_from in breaks:
            axes.axvline(killed_at, color=red, lw=1.2, ls="--", zorder=0)
            axes.axvline(resumed_from, color=grey, lw=1.2, ls=":", zorder=0)
        for record in reference.attempts[0].records:
            if record["epoch"] % 2:
                axes.axvspan(record["step"] - 0.5, record["step"] + 0.5, color="#f3f4f7", lw=0, zorder=-1)

        axes.margins(x=0.03, y=0.12)

    handles = [plt.Line2D([], [], **band, label="never interrupted")]
    for attempt, style, (killed_at, _) in zip_longest(other.attempts, styles, breaks, fillvalue=(None, None)):
        start = "started" if attempt.first_step == 0 else f"resumed from step {attempt.first_step}"
        label = start if killed_at is None else f"{start}, killed at step {killed_at}"
        handles.append(plt.Line2D([], [], **style, label=label))
    top.legend(handles=handles, loc="upper right", facecolor="white", edgecolor="none", framealpha=1)
    for killed_at, resumed_from in breaks:
        where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "bottom"}
        top.annotate("SIGKILL", (killed_at, 0.02), xytext=(5, 0), color=red, weight="bold", **where)
        top.annotate("checkpoint", (resumed_from, 0.02), xytext=(-5, 0), color=grey, ha="right", **where)
    top.set_ylabel("loss")
    bottom.set_ylabel("learning rate")
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    bottom.set_xlabel("optimizer step (every second epoch is shaded)")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    verdict = "identical, bit for bit" if identical else "DIFFERENT"
    title = f"Killed and resumed, against never interrupted: {verdict}"
    top.set_title(title, loc="left", weight="bold", color="black" if identical else red)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two runs of finetune_lm.py bit for bit.")
    parser.add_argument("reference", type=Path, help="output folder of the uninterrupted run")
    parser.add_argument("other", type=Path, help="output folder of the run that was killed and resumed")
    parser.add_argument("--plot", type=Path, help="write a PNG of both loss curves here")
    args = parser.parse_args()
    try:
        reference, other = read_run(args.reference), read_run(args.other)
    except (OSError, ValueError, LookupError) as error:
        print(f"cannot read the runs (have both reached their end?): {error!r}", file=sys.stderr)
        return 2

    rows = [
        compare_series("losses", "loss", reference, other),
        compare_series("learning rates", "lr", reference, other),
        *(compare_digests(kind, reference, other) for kind in ("parameters", "optimizer", "generators")),
    ]
    identical = all(row.compared and not row.different for row in rows)
    print(f"{args.reference}: {describe(reference)}")
    print(f"{args.other}: {describe(other)}\n")
    print_table(rows)
    print("\nidentical, bit for bit" if identical else "\nDIFFERENT")
    if args.plot:
        draw(reference, other, args.plot, identical)
        print(f"plot: {args.plot}")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
