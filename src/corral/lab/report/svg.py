"""Charts as SVG text: lines, steps and histograms, with axes that a phone can show. No script, no library.

Colours are CSS variables of the page, so that one file serves light and dark. A point's value is in its `<title>`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 16, 60
LEGEND = 20  # height of its line, left out where there is one curve


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int = 1
    dashed: bool = False
    dots: bool = True
    labels: tuple[str, ...] = ()


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover a span."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _number(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    if value >= 1000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}"


@dataclass(frozen=True)
class _Axis:
    marks: tuple[float, ...]
    begin: int
    end: int
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)


def _log_marks(low: float, high: float) -> tuple[float, ...]:
    first, last = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
    stride = max(1, -(-(last - first) // 7))
    marks = [2.0**i for i in range(first, last + 1, stride)]
    if marks[-1] < high:
        marks.append(2.0 ** (math.log2(marks[-1]) + stride))
    return tuple(marks) if len(marks) > 1 else (marks[0], marks[0] * 2)


def _frame(title: str, x_label: str, y_label: str, x: _Axis, y: _Axis, legend: bool = False) -> list[str]:
    height = HEIGHT if legend else HEIGHT - LEGEND
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for mark in y.marks:
        at = y.at(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(mark)}</text>')
    for mark in x.marks:
        at = x.at(mark)
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{_number(mark)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 24}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text class="axis" transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    return parts


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts, at = [], LEFT
    for curve in curves:
        dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
        y = HEIGHT - 8
        parts.append(f'<line class="c{curve.colour}" x1="{at}" x2="{at + 18}" y1="{y - 4}" y2="{y - 4}"{dash}/>')
        parts.append(f'<text class="tick" x="{at + 23}" y="{y}">{escape(curve.name)}</text>')
        at += 36 + int(7.2 * len(curve.name))
    return parts


def chart(
    title: str, x_label: str, y_label: str, curves: Sequence[Curve], log_x: bool = False, zero_x: bool = False
) -> str:
    """Lines over a common x; the y axis begins at 0."""
    curves = [curve for curve in curves if curve.points]
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    if not xs:
        return ""
    x_marks = _log_marks(max(min(xs), 1e-9), max(xs)) if log_x else tuple(ticks(0.0 if zero_x else min(xs), max(xs)))
    x = _Axis(x_marks, LEFT, WIDTH - RIGHT, log_x)
    y = _Axis(tuple(ticks(0.0, max(ys) or 1.0)), HEIGHT - BOTTOM, TOP)
    parts = _frame(title, x_label, y_label, x, y, len(curves) > 1)
    for curve in curves:
        path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in curve.points)
        dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
        parts.append(f'<polyline class="c{curve.colour}" points="{path}"{dash}/>')
        for n, (a, b) in enumerate(curve.points if curve.dots else ()):
            label = curve.labels[n] if n < len(curve.labels) else f"{curve.name}: {_number(a)}, {_number(b)}"
            parts.append(
                f'<circle class="d{curve.colour}" cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="3.5">'
                f"<title>{escape(label)}</title></circle>"
            )
    return "".join([*parts, *(_legend(curves) if len(curves) > 1 else []), "</svg>"])


def histogram(title: str, unit: str, values: Sequence[float], marks: Sequence[tuple[str, float]] = ()) -> str:
    """How values are distributed, up to their P99.5; `marks` are drawn as labelled lines."""
    ordered = sorted(values)
    if not ordered:
        return ""
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.995))]
    high = max(high, *(value for _, value in marks)) if marks else high
    if high <= low:
        low, high = low * 0.99, high * 1.01 or 1.0
    x = _Axis(tuple(ticks(low, high)), LEFT, WIDTH - RIGHT)
    first, last = x.marks[0], x.marks[-1]
    count = max(10, min(48, int(math.sqrt(len(ordered)) * 2)))
    bins = [0] * count
    for value in ordered:
        if value <= last:
            bins[min(count - 1, int((value - first) / (last - first) * count))] += 1
    y = _Axis(tuple(ticks(0.0, float(max(bins)), 4)), HEIGHT - BOTTOM, TOP + 14)
    parts = _frame(title, unit, "count", x, y)
    width = (WIDTH - RIGHT - LEFT) / count
    for n, size in enumerate(bins):
        if size:
            at, top = LEFT + n * width, y.at(size)
            span = (
                f"{first + n * (last - first) / count:.3g} to {first + (n + 1) * (last - first) / count:.3g} {unit}"
            )
            parts.append(
                f'<rect class="b1" x="{at + 0.5:.1f}" y="{top:.1f}" width="{max(1.0, width - 1):.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{size} × {span}</title></rect>'
            )
    taken = -1e9
    for name, value in marks:
        at = x.at(value)
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP + 14}" y2="{HEIGHT - BOTTOM}"/>')
        if at - taken > 30:  # labels that would overlap are left out; the table has them
            parts.append(f'<text class="tick" x="{at:.1f}" y="{TOP + 8}" text-anchor="middle">{escape(name)}</text>')
            taken = at
    return "".join([*parts, "</svg>"])
