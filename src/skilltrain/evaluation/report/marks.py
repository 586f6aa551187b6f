"""What the page is drawn with: escaped text, numbers, axes, and plots whose x runs in percent of the width.

A plot in percent fits any screen undistorted, and its letters keep their size.
"""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from skilltrain.evaluation.statistics.bootstrap import Interval, compact

NUM_COLORS = 8
ROW, LINE = 44, 32  # pixels: height of a row of an interval plot, as in report.css, and where its line runs
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(value: str) -> str:
    """Characters that nobody sees, bidirectional orders among them, written out like `[U+202E]`."""
    return _UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", value).encode("utf-8", "replace").decode()


def text(value: str) -> str:
    """Escaped text for HTML, with everything visible."""
    return html.escape(visible(value))


def lead(words: str, length: int) -> str:
    """The beginning of a text on one line, for HTML."""
    line = " ".join(words[: 2 * length].split())
    return text(line[:length]) + ("…" if len(words) > length else "")


def swatch(position: int) -> str:
    """The dot in a system's colour."""
    return f'<i class="swatch c{position % NUM_COLORS}"></i>'


def share(value: float) -> str:
    """The number at a tick of an axis of shares: 0, .25, 1."""
    return f"{value:.0f}" if value in (0, 1) else compact(value, 2)


@dataclass(frozen=True)
class Axis:
    """A stretch of numbers laid over 100 percent, and the round numbers that mark it."""

    ticks: tuple[float, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value stands, in percent; values beyond the ends stand at the ends."""
        low, high = self.ticks[0], self.ticks[-1]
        value = min(max(value, low), high)
        if self.logarithmic:
            return 100 * math.log(value / low) / math.log(high / low)
        return 100 * (value - low) / (high - low)


SHARES = Axis((0, 0.25, 0.5, 0.75, 1))


def axis_of_shares(values: Sequence[float]) -> Axis:
    """The stretch from 0 to 1, or a part of it with round ends, that holds all values."""
    low, high = min(values), max(values)
    step = next(step for step in (0.05, 0.1, 0.25, 0.5) if (high - low) / step <= 6 or step == 0.5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(tuple(round(n * step, 2) for n in range(first, max(last, first + 1) + 1)))


def axis_of_times(values: Sequence[float]) -> Axis:
    """A logarithmic stretch that holds all values (above 0), marked at 1, 2 and 5 times powers of ten, or at powers."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 50 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    first = max(n for n, tick in enumerate(ticks) if tick <= low)
    last = min((n for n, tick in enumerate(ticks) if tick >= high and n > first), default=len(ticks) - 1)
    return Axis(tuple(ticks[first : last + 1]), logarithmic=True)


def axes(across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]]) -> str:
    """Grid lines and their labels, each (percent from the left or the bottom, label), for a plot of class `axes`."""
    lines = "".join(
        f'<line class="grid" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="100%"/>'
        f'<text x="{x:.2f}%" y="100%" dy="17">{label}</text>'
        for x, label in across
    )
    return lines + "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{100 - y:.2f}%" y2="{100 - y:.2f}%"/>'
        f'<text class="end" x="0" dx="-8" y="{100 - y:.2f}%" dy="4">{label}</text>'
        for y, label in up
    )


def stretched(shapes: str, height: float = 100) -> str:
    """Shapes drawn in a box of 100 x `height` that stretches over the plot around it."""
    return f'<svg viewBox="0 0 100 {height:g}" preserveAspectRatio="none" width="100%" height="100%">{shapes}</svg>'


def ruler(axis: Axis, num_rows: int) -> str:
    """A ruler under the line of each row of an interval plot, and the numbers of the axis below the last."""
    numbers = "".join(
        f'<text x="{axis.place(tick):.2f}%" y="{ROW * num_rows + 15}">{share(tick)}</text>' for tick in axis.ticks
    )
    lines = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        + "".join(
            f'<line class="grid" x1="{axis.place(tick):.2f}%" x2="{axis.place(tick):.2f}%" y1="{y - 4}" y2="{y + 4}"/>'
            for tick in axis.ticks
        )
        for y in (ROW * position + LINE for position in range(num_rows))
    )
    return lines + numbers


@dataclass(frozen=True)
class Row:
    """A row of an interval plot."""

    name: str
    value: Interval
    color: int


def interval_plot(title: str, rows: Sequence[Row], note: str = "") -> str:
    """A figure with one row a mean: the interval as a line, the mean as a dot, from 0 to 1."""
    height = ROW * len(rows)
    marks = ruler(SHARES, len(rows))
    for position, row in enumerate(rows):
        value, y = row.value, ROW * position + LINE
        marks += (
            f'<g class="c{row.color % NUM_COLORS}"><line x1="{value.low:.2%}" x2="{value.high:.2%}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{value.mean:.2%}" cy="{y}" r="4.5"/></g>'
        )
    names = "".join(f"<li><span>{text(row.name)}</span> <b>{compact(row.value.mean, 3)}</b></li>" for row in rows)
    said = "; ".join(f"{text(row.name)} {row.value}" for row in rows)
    small = f" <small>{text(note)}</small>" if note else ""
    return (
        f'<figure><figcaption>{text(title)}{small}</figcaption><ul aria-hidden="true">{names}</ul>'
        f'<svg role="img" aria-label="{text(title)}: {said}" width="100%" height="{height + 20}">{marks}</svg>'
        "</figure>"
    )


def table(label: str, kind: str, caption: str, head: Sequence[str], rows: Sequence[str]) -> str:
    """A table that scrolls by itself where it is wider than the page; `head` and `rows` are HTML."""
    cells = "".join(f'<th scope="col">{name}</th>' for name in head)
    above = f"<caption>{caption}</caption>\n" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}"><table class="{kind}">\n{above}'
        f"<thead><tr>{cells}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table></div>"
    )
