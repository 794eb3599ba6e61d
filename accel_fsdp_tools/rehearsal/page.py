"""A rehearsal's report as one HTML file that needs no other: verdict, plots of both runs, what differs where."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from .comparing import Thing
from .plots import Line, Mark, draw_squares, plot_lines
from .report import RehearsalReport, list_points

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; background: #f5f6f8; margin: 0; padding: 24px; }
main { max-width: 920px; margin: 0 auto; }
section { background: #fff; border: 1px solid #dde2e8; border-radius: 8px; padding: 14px 20px; margin: 0 0 16px; }
h1 { font-size: 21px; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 4px 0 8px; }
.good { border-left: 8px solid #2e8b57; }
.bad { border-left: 8px solid #c0392b; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; background: #f0f2f5; padding: 8px 10px; border-radius: 5px; white-space: pre-wrap; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: 2px 18px 2px 0; font-weight: normal; }
th { color: #66727f; }
svg { max-width: 100%; height: auto; display: block; margin: 6px 0; }
.key { color: #66727f; }
.swatch { display: inline-block; width: 26px; height: 0; border-top-style: solid; vertical-align: middle; }
.swatch { margin: 0 4px 0 12px; }
"""

# Also inside each picture, so that one can be taken out and looked at alone.
_PICTURE_STYLE = """
text { font-family: system-ui, sans-serif; font-size: 12px; fill: #4a5663; }
text.title { font-size: 14px; fill: #1c2733; }
text.mark { font-size: 11px; fill: #8a5a00; }
line.grid { stroke: #e4e8ed; }
line.mark { stroke: #d39b2a; stroke-dasharray: 4 3; }
rect.band { fill: #fbe3e0; }
polyline { fill: none; }
polyline.straight { stroke: #9cc3ea; stroke-width: 7; }
circle.straight { fill: #9cc3ea; }
polyline.killed { stroke: #d39b2a; stroke-width: 2; stroke-dasharray: 5 3; }
circle.killed { fill: #d39b2a; }
polyline.resumed { stroke: #16324f; stroke-width: 2; }
circle.resumed { fill: #16324f; }
rect.same { fill: #bfe3cc; }
rect.different { fill: #f0aea6; }
rect.first { fill: #c0392b; }
rect.none { fill: #eef0f3; }
"""


def write_page(report: RehearsalReport, path: Path) -> None:
    """Write the page. Needs no network to be looked at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make_page(report), encoding="utf-8")


def make_page(report: RehearsalReport) -> str:
    """Return the page's text."""
    sections = [_make_verdict(report), *_make_pictures(report), _make_differences(report), _make_runs(report)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>Rehearsal: {escape(report.verdict.value)}</title>\n<style>{_STYLE}</style>\n</head>\n<body><main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main></body>\n</html>\n"
    )


def _make_verdict(report: RehearsalReport) -> str:
    parts = [f"<h1>{escape(report.verdict.value.capitalize())}</h1>", f"<p>{escape(report.headline)}</p>"]
    if report.cause is not None:
        parts.append(f"<p><span class='key'>Likely cause:</span> {escape(report.cause.title)}</p>")
        parts += ["<ul>", *(f"<li>{escape(each)}</li>" for each in report.cause.evidence), "</ul>"]
        parts.append(f"<p><span class='key'>What to do:</span> {escape(report.cause.advice)}</p>")
    parts += [f"<p class='key'>{escape(note)}</p>" for note in report.notes]
    return f'<section class="{"good" if report.ok else "bad"}">{"".join(parts)}</section>'


def _make_pictures(report: RehearsalReport) -> list[str]:
    names = _choose_runs(report)
    if not names:
        return []
    points = {name: {point["step"]: point for point in list_points(report.attempts[name])} for name in names}
    steps = range(1, max(step for each in points.values() for step in each) + 1)
    marks = [Mark(report.plan.save_at, "saved"), Mark(report.plan.kill_at, "killed")]
    differing = {thing: {each.step for each in report.differences if each.thing is thing} for thing in Thing}
    styles = ("straight", "killed", "resumed") if len(names) == 3 else ("straight", "resumed")

    def plot(title: str, thing: Thing, get: Any) -> str:
        lines = [
            Line(name, {step: get(point) for step, point in points[name].items()}, style)
            for name, style in zip(names, styles, strict=True)
        ]
        return _style(plot_lines(title, lines, steps, marks=marks, differing=differing[thing]))

    pictures = [
        plot("loss", Thing.LOSS, lambda point: point["loss"]),
        plot(
            "learning rate (first group)", Thing.LEARNING_RATE, lambda point: point["lrs"][0] if point["lrs"] else None
        ),
        plot("gradient norm (rank 0)", Thing.GRADIENT_NORM, lambda point: point["gradient_norm"]),
    ]
    legend = "".join(_make_swatch(name, style) for name, style in zip(names, styles, strict=True))
    band = '<span class="swatch" style="border-top: 12px solid #fbe3e0"></span>differs' if report.differences else ""
    found = [f"<section><h2>Both runs</h2><div>{legend}{band}</div>{''.join(pictures)}</section>"]
    if not report.log_tail:
        found.append(_make_squares(report, steps))
    return found


def _choose_runs(report: RehearsalReport) -> list[str]:
    """The runs to draw: those that were compared, with the killed one where it is not among them."""
    first, second = report.compared
    names = [first, "killed", second] if second == "resumed" else [first, second]
    return [name for name in names if name in report.attempts and report.attempts[name].last_step > 0]


def _make_swatch(name: str, style: str) -> str:
    looks = {"straight": "7px solid #9cc3ea", "killed": "2px dashed #d39b2a", "resumed": "2px solid #16324f"}
    shown = {"straight": "without a break"}.get(name, name)
    return f'<span class="swatch" style="border-top: {looks[style]}"></span>{escape(shown)}'


def _make_squares(report: RehearsalReport, steps: range) -> str:
    compared = report.attempts.get(report.compared[1])
    if compared is None:
        return ""
    is_elastic = report.plan.elastic is not None
    elastic_things = (
        Thing.PARAMETERS_BEFORE,
        Thing.OPTIMIZER_BEFORE,
        Thing.SAMPLES,
        Thing.LEARNING_RATE,
        Thing.LOSS,
    )
    rows = [thing.value for thing in Thing if (thing in elastic_things if is_elastic else thing is not Thing.SAMPLES)]
    recorded = {step for rank in compared.ranks for step in rank.steps}
    states: dict[tuple[str, int], str] = {}
    once = {Thing.PARAMETERS_BEFORE.value, Thing.OPTIMIZER_BEFORE.value}
    for row in rows:
        for step in recorded:
            if row not in once or step == min(recorded):
                states[row, step] = "same"
    for each in reversed(report.differences):
        states[each.thing.value, each.step] = "first" if each is report.differences[0] else "different"
    rows = [thing.value for thing in Thing if any(row == thing.value for row, _ in states)]
    text = "From cause to effect. Green: the same in every bit; dark red: the first difference; red: differs, too."
    if is_elastic:
        text = "What has to be the same on another number of ranks. Green: it is; dark red: the first difference."
    picture = _style(draw_squares(rows, steps, states))
    return f"<section><h2>What differs where</h2><p class='key'>{text}</p>{picture}</section>"


def _style(picture: str) -> str:
    head, _, body = picture.partition("\n")
    return f"{head}\n<style>{_PICTURE_STYLE}</style>\n{body}"


def _make_differences(report: RehearsalReport) -> str:
    if not report.differences:
        return ""
    first = report.differences[0].step
    shown = "".join(
        f"<li>{escape(each.describe(report.compared))}</li>" for each in report.differences if each.step == first
    )
    return f"<section><h2>What differs at step {first}</h2><ul>{shown}</ul></section>"


def _make_runs(report: RehearsalReport) -> str:
    rows = "".join(
        f"<tr><td>{escape(run.name)}</td><td>{run.world_size}</td><td>{run.first_step + 1} to {run.last_step}</td>"
        f"<td>{run.seconds:.1f}</td><td>{'stopped' if run.exit_code is None else run.exit_code}</td></tr>"
        for run in report.runs
    )
    facts: Mapping[str, object] = {
        "steps": report.plan.steps,
        "saved at": report.plan.save_at,
        "killed at": f"{report.plan.kill_at} ({_name_rank(report)})",
    }
    listed = ", ".join(f"{name} {value}" for name, value in facts.items())
    commands = dict.fromkeys((report.plan.command, report.plan.resume_command))
    shown = "".join(f"<pre>{escape(shlex.join(command))}</pre>" for command in commands)
    tail = f"<h2>End of the log</h2><pre>{escape(report.log_tail)}</pre>" if report.log_tail else ""
    return (
        f"<section><h2>Runs</h2>{shown}<p>{escape(listed)}</p>"
        "<table><tr><th>run</th><th>ranks</th><th>steps</th><th>seconds</th><th>exit code</th></tr>"
        f"{rows}</table>{tail}</section>"
    )


def _name_rank(report: RehearsalReport) -> str:
    return "all ranks" if report.plan.kill_rank is None else f"rank {report.plan.kill_rank}"
