"""Line plots and a table of squares as SVG: a page that shows them needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 30, 34
_CELL = 22


@dataclass(frozen=True)
class Line:
    """One run's course: values by step. A value that is None, or not finite, is left out."""

    name: str
    values: Mapping[int, float | None]
    style: str  # CSS class

    def list_points(self) -> list[tuple[int, float]]:
        """Return what can be drawn."""
        return [
            (step, value) for step, value in sorted(self.values.items()) if value is not None and math.isfinite(value)
        ]


@dataclass(frozen=True)
class Mark:
    """A moment: a vertical line between a step and the next."""

    step: int
    text: str


def plot_lines(
    title: str, lines: Sequence[Line], steps: range, *, marks: Sequence[Mark] = (), differing: Collection[int] = ()
) -> str:
    """Return a plot of a few lines over steps; steps where they differ get a band behind them."""
    values = [value for line in lines for _, value in line.list_points()]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = low - pad, high + pad
    inner_width, inner_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    width_of_step = inner_width / len(steps)

    def x(step: float) -> float:
        return _LEFT + (step - steps.start + 0.5) * width_of_step

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * inner_height

    bottom = HEIGHT - _BOTTOM
    parts = [f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>']
    parts += [
        f'<rect class="band" x="{x(step - 0.5):.1f}" y="{_TOP}" width="{width_of_step:.1f}" height="{inner_height}"/>'
        for step in steps
        if step in differing
    ]
    for tick in _choose_ticks(low, high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 8}" y="{y(tick) + 4:.1f}">{tick:.4g}</text>')
    every = max(1, math.ceil(len(steps) / 24))
    parts += [
        f'<text class="tick" text-anchor="middle" x="{x(step):.1f}" y="{bottom + 16}">{step}</text>'
        for step in steps
        if (step - steps.start) % every == 0
    ]
    parts += _draw_marks(marks, x, bottom)
    for line in lines:
        points = line.list_points()
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline class="{line.style}" points="{path}"/>')
        radius = 4.5 if line is lines[0] else 2.5
        parts += [
            f'<circle class="{line.style}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="{radius}">'
            f"<title>{escape(line.name)}, step {step}: {value!r}</title></circle>"
            for step, value in points
        ]
    if not values:
        parts.append(f'<text class="tick" x="{x(steps.start):.1f}" y="{_TOP + inner_height / 2:.1f}">not seen</text>')
    return _wrap(parts, WIDTH, HEIGHT)


def _draw_marks(marks: Sequence[Mark], x: object, bottom: float) -> list[str]:
    parts = []
    for number, mark in enumerate(marks):
        at = x(mark.step + 0.5)  # type: ignore[operator]
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        above = 18 if number % 2 else 28
        parts.append(f'<text class="mark" x="{at + 4:.1f}" y="{above}">{escape(mark.text)}</text>')
    return parts


def draw_squares(rows: Sequence[str], steps: range, states: Mapping[tuple[str, int], str]) -> str:
    """Return a table of squares, a row per thing and a column per step.

    Args:
        states: by row and step "same", "different" or "first"; an empty square where there is nothing.
    """
    left = 270
    width = max(WIDTH, left + _CELL * len(steps) + _RIGHT)
    parts = [
        f'<text class="tick" text-anchor="middle" x="{left + _CELL * (index + 0.5):.1f}" y="14">{step}</text>'
        for index, step in enumerate(steps)
    ]
    for number, row in enumerate(rows):
        top = 22 + number * _CELL
        parts.append(f'<text class="row" text-anchor="end" x="{left - 10}" y="{top + 15}">{escape(row)}</text>')
        for index, step in enumerate(steps):
            state = states.get((row, step), "none")
            parts.append(
                f'<rect class="{state}" x="{left + index * _CELL + 1}" y="{top + 1}" width="{_CELL - 3}" '
                f'height="{_CELL - 3}" rx="3"><title>step {step}: {escape(row)}: {state}</title></rect>'
            )
    return _wrap(parts, width, 26 + len(rows) * _CELL)


def _wrap(parts: Sequence[str], width: float, height: float) -> str:
    inner = "\n".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" xmlns="http://www.w3.org/2000/svg">\n{inner}\n</svg>'


def _choose_ticks(low: float, high: float, count: int = 4) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= count + 0.5)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
