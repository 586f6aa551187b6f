"""Where marks stand in a plot, in percent of its width, so that a plot fits any screen undistorted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

NUM_BINS = 40


@dataclass(frozen=True)
class Axis:
    """A stretch of numbers laid over 100 percent, and the round numbers that mark it."""

    ticks: tuple[float, ...]
    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value stands, in percent; values beyond the ends stand at the ends."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            return 100 * math.log(value / self.low) / math.log(self.high / self.low)
        return 100 * (value - self.low) / (self.high - self.low)


def axis_of(ticks: Sequence[float], logarithmic: bool = False) -> Axis:
    """The axis from the first tick to the last."""
    return Axis(tuple(ticks), ticks[0], ticks[-1], logarithmic)


SHARES = axis_of((0, 0.25, 0.5, 0.75, 1))


def axis_around(middle: float, values: Sequence[float]) -> Axis:
    """The axis with `middle` in its middle, as wide as the values ask for, up to 1 on either side."""
    largest = max(abs(value - middle) for value in values)
    limit = next(limit for limit in (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0) if largest <= limit + 1e-9 or limit == 1)
    return axis_of((round(middle - limit, 2), middle, round(middle + limit, 2)))


def axis_over(values: Sequence[float], logarithmic: bool = False) -> Axis:
    """The axis with round ends that holds all values; above 0, if it is logarithmic."""
    return axis_of(round_numbers(min(values), max(values), logarithmic), logarithmic)


def round_numbers(low: float, high: float, logarithmic: bool = False) -> list[float]:
    """About six round numbers, from the last one up to `low` to the first one from `high` on."""
    if logarithmic:
        steps = (1, 2, 5) if high / low < 50 else (1,)
        every = [
            s * 10.0**p for p in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2) for s in steps
        ]
        first = max(n for n, tick in enumerate(every) if tick <= low)
        last = next(n for n, tick in enumerate(every) if tick >= high and n > first)
        return every[first : last + 1]
    power = 10.0 ** math.floor(math.log10(max((high - low) / 6, 0.01)))
    step = next(size * power for size in (1, 2, 5, 10) if size * power * 6 >= high - low)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [round(n * step, 9) for n in range(first, last + 1)]


def histograms(groups: Mapping[str, Int64[np.ndarray, " value"]]) -> dict[str, Any] | None:
    """Histograms of whole numbers by name, over one axis, logarithmic where some lie far above the usual; None of none.

    A bar is (place and width in percent, height as a share of the highest, first and last number, how many).
    """
    values = np.concatenate(list(groups.values()))
    if not len(values):
        return None
    low, high = int(values.min()), int(values.max())
    logarithmic = high > 5_000 or high > 8 * max(1.0, float(np.median(values)))
    if logarithmic:
        low = max(1, low)
        edges = np.unique(np.geomspace(low, high + 1, NUM_BINS + 1).round()) - 0.5
    else:
        step = math.ceil((high - low + 1) / NUM_BINS)
        edges = np.arange(low, high + step + 1, step) - 0.5
    ends = (float(edges[0]), float(edges[-1]))
    ticks = round_numbers(low, max(high, low + 1), logarithmic)
    axis = Axis(tuple(t for t in ticks if ends[0] <= t <= ends[1] and t == int(t)), *ends, logarithmic)
    rows: list[dict[str, Any]] = []
    for name, group in groups.items():
        each = np.maximum(group, low)
        counts, _ = np.histogram(each, edges)
        bars = []
        for left, right, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True):
            if count:
                place = axis.place(left)
                width, height = axis.place(right) - place, count / counts.max()
                bars.append((place, width, height, int(left + 0.5), int(right - 0.5), count))
        percentiles = [round(value) for value in np.percentile(each, [5, 50, 95])] if len(each) else []
        rows.append({"name": name, "bars": bars, "total": len(each), "percentiles": percentiles})
    return {"axis": axis, "rows": rows}
