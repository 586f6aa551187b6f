"""Plots as SVG that fits any width undistorted, for x runs in percent; every bar says its number."""

import html
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_HEIGHT = 64
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def text(value: object) -> str:
    """Escaped text for HTML; characters that nobody sees, bidirectional orders among them, become `[U+202E]`."""
    shown = _UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", str(value))
    return html.escape(shown.encode("utf-8", "replace").decode())


def percent(part: float, whole: float) -> str:
    """A share in words: `1.7%`, `<0.1%`, `0%`."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.1:
        return "<0.1%"
    return f"{share:.1f}%" if share < 10 and share != round(share) else f"{share:.0f}%"


def bar(part: float, whole: float, kind: str) -> str:
    """A bar of the share; the number stands beside it in the table, so it is hidden from screen readers."""
    width = 100 * part / whole if whole else 0.0
    return (
        f'<svg class="bar" aria-hidden="true"><rect class="{kind}" width="{width:.2f}%" height="100%" rx="1.5"/></svg>'
    )


def stacked(parts: Sequence[tuple[float, str]], whole: float) -> str:
    """Bars one after the other, each (length, class)."""
    rects, start = "", 0.0
    for part, kind in parts:
        width = 100 * part / whole if whole else 0.0
        rects += f'<rect class="{kind}" x="{start:.2f}%" width="{width:.2f}%" height="100%"/>'
        start += width
    return f'<svg class="bar" aria-hidden="true">{rects}</svg>'


@dataclass(frozen=True)
class Bins:
    """Neighbouring intervals [edge, next edge) of whole numbers, and the marks of their axis."""

    edges: Sequence[int]
    logarithmic: bool

    def place(self, value: float) -> float:
        """Where a value stands, in percent of the width."""
        low, high = self.edges[0], self.edges[-1]
        if self.logarithmic:
            return 100 * math.log(max(value, low) / low) / math.log(high / low)
        return 100 * (value - low) / (high - low)

    def middle(self, value: float) -> float:
        """Where a value's own bar has its middle, if it has a bar of its own; else where it stands."""
        alone = not self.logarithmic and self.edges[1] - self.edges[0] == 1
        return self.place(value + 0.5) if alone else self.place(value)

    def count(self, values: np.ndarray) -> list[int]:
        """How many values fall into each bin; all do, 0 into the first of a logarithmic axis."""
        return np.histogram(np.maximum(values, self.edges[0]), bins=np.array(self.edges, dtype=np.float64))[0].tolist()

    def ticks(self) -> list[int]:
        """Up to six round numbers."""
        low, high = self.edges[0], self.edges[-1]
        if self.logarithmic:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            steps = (1, 3) if math.log10(high / low) < 3 else (1,)
            return [n for power in powers for step in steps if low <= (n := step * 10**power) <= high]
        step = _nice((high - low) / 5)
        return [*range(math.ceil(low / step) * step, high, step)]


def bins_for(values: np.ndarray) -> Bins:
    """About 40 bins over the values; logarithmic where some are far above the usual."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 1)
    if len(values) and (high > 5_000 or high > 8 * max(1.0, float(np.median(values)))):
        low = max(1, low)
        edges = np.unique(np.round(np.geomspace(low, max(high, low + 1) + 1, 41)).astype(int)).tolist()
        return Bins(edges, logarithmic=True)
    step = _nice((high - low + 1) / 40)
    start = low if 0 < low < step else low // step * step
    return Bins(list(range(start, high + step + 1, step)), logarithmic=False)


def _nice(width: float) -> int:
    """The least of 1, 2, 5, 10, 20, … that is not below `width`."""
    power = 10 ** max(0, math.floor(math.log10(max(width, 1))))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width)


def histogram(name: str, values: np.ndarray, bins: Bins, kind: str) -> str:
    """One row of a figure: name, median and middle 90%, and the bars of `values`."""
    if not len(values):
        return f'<p class="row"><span>{text(name)}</span> none</p>'
    low, middle, high = (int(value) for value in np.percentile(values, [5, 50, 95]))
    said = f"median {middle:,}, 90% in {low:,} to {high:,}"
    bars = _bars(bins, bins.count(values), kind)
    at = bins.middle(middle)
    return (
        f'<p class="row"><span>{text(name)}</span> {said}</p>'
        f'<svg class="plot" role="img" aria-label="{text(name)}: {said}" width="100%" height="{_HEIGHT}">{bars}'
        f'<line class="median" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="{_HEIGHT}"/></svg>'
    )


def _bars(bins: Bins, counts: Sequence[int], kind: str) -> str:
    highest, total, bars = (
        max(counts),
        sum(counts),
        f'<line class="base" x1="0" x2="100%" y1="{_HEIGHT}" y2="{_HEIGHT}"/>',
    )
    for place, count in enumerate(counts):
        if not count:
            continue
        left, right = bins.place(bins.edges[place]), bins.place(bins.edges[place + 1])
        height, width = max(1.5, _HEIGHT * count / highest), max(0.2, right - left - 0.3)
        last = bins.edges[place + 1] - 1
        span = f"{bins.edges[place]:,}" + (f" to {last:,}" if last > bins.edges[place] else "")
        bars += (
            f'<rect class="{kind}" x="{left:.2f}%" width="{width:.2f}%" y="{_HEIGHT - height:.1f}" '
            f'height="{height:.1f}"><title>{span}: {count:,} ({percent(count, total)})</title></rect>'
        )
    return bars


def axis(bins: Bins, unit: str) -> str:
    """The numbers below a figure's last row."""
    marks = "".join(
        f'<text x="{bins.middle(n):.2f}%" y="12"{_anchor(bins.middle(n))}>{_short(n)}</text>' for n in bins.ticks()
    )
    return (
        f'<svg class="axis" aria-hidden="true" width="100%" height="16">{marks}</svg><p class="unit">{text(unit)}</p>'
    )


def _anchor(place: float) -> str:
    return ' class="first"' if place < 3 else ' class="last"' if place > 97 else ""


def _short(number: int) -> str:
    return f"{number // 1000}k" if number >= 1000 and number % 1000 == 0 else f"{number:,}"


def counted(counter: Counter[int]) -> np.ndarray:
    """The values of a counter, each as often as it was counted, in order."""
    values = sorted(counter)
    return np.repeat(np.array(values, dtype=np.int64), [counter[value] for value in values])


def figure(title: str, rows: str, foot: str) -> str:
    """A titled box around rows and their axis."""
    return f"<figure><figcaption>{title}</figcaption>{rows}{foot}</figure>"
