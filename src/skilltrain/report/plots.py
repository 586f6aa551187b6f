"""Where marks stand in a plot: axes and bins as percent of the width, so that a plot fits any screen undistorted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from skilltrain.report.numbers import percent


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


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram: place and width in percent, height as a share of the highest, and what it stands for."""

    x: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Histogram:
    """The bars of one group of values, their median (in percent of the width), and both in words."""

    name: str
    bars: tuple[Bar, ...] = ()
    median: float = 0.0
    words: str = "none"


@dataclass(frozen=True)
class Bins:
    """Neighbouring intervals [edge, next edge) of whole numbers."""

    edges: tuple[int, ...]
    logarithmic: bool

    @property
    def axis(self) -> Axis:
        """What the edges lie on."""
        return Axis((self.edges[0], self.edges[-1]), self.logarithmic)

    def middle(self, value: float) -> float:
        """The middle of a value's own bar, if it has a bar of its own; else where it stands."""
        alone = not self.logarithmic and self.edges[1] - self.edges[0] == 1
        return self.axis.place(value + 0.5 if alone else value)

    def ticks(self) -> list[int]:
        """Up to six round numbers."""
        low, high = self.edges[0], self.edges[-1]
        if self.logarithmic:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            steps = (1, 3) if math.log10(high / low) < 3 else (1,)
            return [n for power in powers for step in steps if low <= (n := step * 10**power) <= high]
        step = _nice((high - low) / 5)
        return [*range(math.ceil(low / step) * step, high, step)]

    def count(self, values: Int64[np.ndarray, " value"]) -> list[int]:
        """How many values fall into each bin; all do, 0 into the first of a logarithmic axis."""
        return np.histogram(np.maximum(values, self.edges[0]), bins=np.array(self.edges, dtype=np.float64))[0].tolist()

    def histogram(self, name: str, values: Int64[np.ndarray, " value"]) -> Histogram:
        """The histogram of `values`, with their median and middle 90 percent."""
        if not len(values):
            return Histogram(name)
        counts = self.count(values)
        bars: list[Bar] = []
        for left, right, count in zip(self.edges[:-1], self.edges[1:], counts, strict=True):
            x = self.axis.place(left)
            span = f"{left:,}" if right - left == 1 else f"{left:,} to {right - 1:,}"
            title = f"{span}: {count:,} ({percent(count, len(values))})"
            if count:
                bars.append(Bar(x, max(0.2, self.axis.place(right) - x - 0.3), count / max(counts), title))
        low, middle, high = (int(value) for value in np.percentile(values, [5, 50, 95]))
        words = f"median {middle:,}, 90% in {low:,} to {high:,}"
        return Histogram(name, tuple(bars), self.middle(middle), words)


@dataclass(frozen=True)
class HistogramFigure:
    """Histograms one below the other over one axis; `ticks` are (percent, number)."""

    rows: tuple[Histogram, ...]
    ticks: tuple[tuple[float, str], ...]
    logarithmic: bool


def histogram_figure(groups: Mapping[str, Int64[np.ndarray, " value"]]) -> HistogramFigure:
    """The figure of some groups of whole numbers, by name."""
    bins = bins_for(np.concatenate(list(groups.values())))
    ticks = tuple((bins.middle(n), f"{n // 1000}k" if n and n % 1000 == 0 else f"{n:,}") for n in bins.ticks())
    return HistogramFigure(tuple(bins.histogram(*group) for group in groups.items()), ticks, bins.logarithmic)


def bins_for(values: Int64[np.ndarray, " value"]) -> Bins:
    """About 40 bins over the values; logarithmic where some are far above the usual."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 1)
    if len(values) and (high > 5_000 or high > 8 * max(1.0, float(np.median(values)))):
        low = max(1, low)
        edges = np.unique(np.round(np.geomspace(low, max(high, low + 1) + 1, 41)).astype(int))
        return Bins(tuple(edges.tolist()), logarithmic=True)
    step = _nice((high - low + 1) / 40)
    start = low if 0 < low < step else low // step * step
    return Bins(tuple(range(start, high + step + 1, step)), logarithmic=False)


def _nice(width: float) -> int:
    """The least of 1, 2, 5, 10, 20, … that is not below `width`."""
    power = 10 ** max(0, math.floor(math.log10(max(width, 1))))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width)
