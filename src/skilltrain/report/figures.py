"""What the page of an evaluation draws: lines, strips, ribbons and lists of queries, placed but not yet written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skilltrain.evaluation.analysis.analysis import FieldAttention, FieldShares, StageLatency
from skilltrain.evaluation.analysis.outcomes import Outcomes
from skilltrain.evaluation.analysis.structure import FeatureComparison
from skilltrain.evaluation.metrics import Measure
from skilltrain.evaluation.slices import SliceMeans
from skilltrain.evaluation.statistics.bootstrap import Interval
from skilltrain.report.numbers import ALPHA
from skilltrain.report.plots import Axis, axis_of_shares, axis_of_times

if TYPE_CHECKING:
    from skilltrain.report.evaluation import Report

Places = list[tuple[float, float]]
"""Percent from the left, percent from the bottom."""

CURVE = (*range(1, 11), 12, 15, 20, 25, 30, 40, 50)  # cutoffs of the recall curve
MARKED = (1, 2, 5, 10, 20, 50)  # of them, those with a number
# Rank of the first gold skill up to which a query belongs to a class of the strips, with its name.
RANKS = ((1, "rank 1"), (3, "2–3"), (10, "4–10"), (math.inf, "later"), (None, "not found"))
TOTAL = "total"  # the stage that is a system's whole time
FIELDS = ("name", "description", "body")
FLOW_HEIGHT, _GAP, _LINE = 208, 34, 18  # pixels: the flow, between right and wrong, between two labels


@dataclass(frozen=True)
class Curve:
    """Mean recall by cutoff: a line a system, its last value, and the marks of both axes (percent, number)."""

    lines: dict[str, Places]
    last: dict[str, float]
    cutoff: int
    across: list[tuple[float, int]]


def recall_curve(report: "Report", part: SliceMeans) -> Curve | None:
    """Mean recall by the number of candidates kept, on a logarithmic axis up to the longest ranking."""
    longest = max((len(ranking) for result in report.results for ranking in result.rankings.values()), default=0)
    cutoffs = [k for k in CURVE if k <= longest]
    if len(cutoffs) < 2:
        return None
    lines, last = dict[str, Places](), dict[str, float]()
    for result in report.results:
        rankings = [(result.rankings.get(query_id, ()), query_id) for query_id in part.query_ids]
        found = [(ranking, report.found(query_id, ranking)) for ranking, query_id in rankings]
        means = [math.fsum(Measure("Recall", k)(*pair) for pair in found) / len(found) for k in cutoffs]
        lines[result.name] = [(_log(k, cutoffs[-1]), 100 * mean) for k, mean in zip(cutoffs, means, strict=True)]
        last[result.name] = means[-1]
    marked = sorted({k for k in MARKED if k < cutoffs[-1]} | {cutoffs[-1]})
    return Curve(lines, last, cutoffs[-1], [(_log(k, cutoffs[-1]), k) for k in marked])


def _log(k: int, last: int) -> float:
    return 100 * math.log(k) / math.log(last)


def strips(report: "Report", part: SliceMeans) -> dict[str, list[tuple[int, float, float]]]:
    """System → (class of RANKS, start, width) over all queries in one order: easy ones left, those all miss right."""
    ranks = {name: {q: found[q] for q in part.query_ids} for name, found in report.first_ranks.items()}
    ease = {q: sum(1 / rank for found in ranks.values() if (rank := found[q])) for q in part.query_ids}
    ordered = sorted(part.query_ids, key=lambda q: (-ease[q], q))
    return {name: _runs([_rank_class(found[query_id]) for query_id in ordered]) for name, found in ranks.items()}


def _rank_class(rank: int | None) -> int:
    if rank is None:
        return len(RANKS) - 1
    return next(n for n, (most, _) in enumerate(RANKS) if most is not None and rank <= most)


def _runs(classes: Sequence[int]) -> list[tuple[int, float, float]]:
    """Neighbours of one class as one: a page of 500 queries stays small."""
    runs, start = list[tuple[int, float, float]](), 0
    for place in range(1, len(classes) + 1):
        if place == len(classes) or classes[place] != classes[start]:
            runs.append((classes[start], 100 * start / len(classes), 100 * (place - start) / len(classes)))
            start = place
    return runs


def around_zero(report: "Report") -> Axis:
    """The axis of the plot of differences."""
    largest = max(abs(end) for c in report.comparisons for end in (c.difference.low, c.difference.high))
    limit = next(limit for limit in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0) if largest <= limit + 1e-9)
    return Axis((-limit, 0, limit))


@dataclass(frozen=True)
class Ribbon:
    """Queries on their way from one system to the next: as thick as they are many, with where the label stands."""

    kind: str
    label: str
    count: int
    path: str
    label_y: float


@dataclass(frozen=True)
class Flow:
    """Ribbons from right and wrong to right and wrong; `left` and `right` are (right ends, wrong begins) in pixels."""

    ribbons: list[Ribbon]
    left: tuple[float, float]
    right: tuple[float, float]


def flow(outcome: Outcomes) -> Flow:
    """What the second system fixed and broke, in a box of 100 x FLOW_HEIGHT."""
    both, fixed, broken, neither = (len(ids) for ids in (outcome.both, outcome.fixed, outcome.broken, outcome.neither))
    unit = (FLOW_HEIGHT - _GAP) / max(1, both + fixed + broken + neither)
    wrong_left, wrong_right = (both + broken) * unit + _GAP, (both + fixed) * unit + _GAP
    rows = [  # class, label, count, top on the left, top on the right
        ("both", "right in both", both, 0.0, 0.0),
        ("fixed", "fixed", fixed, wrong_left, both * unit),
        ("broken", "broken", broken, both * unit, wrong_right),
        ("neither", "wrong in both", neither, wrong_left + fixed * unit, wrong_right + broken * unit),
    ]
    rows = [row for row in rows if row[2]]
    labels = _spread([top + count * unit / 2 for _, _, count, _, top in rows])
    ribbons = [
        Ribbon(kind, label, count, _band(left, right, count * unit), y)
        for (kind, label, count, left, right), y in zip(rows, labels, strict=True)
    ]
    return Flow(ribbons, (wrong_left - _GAP, wrong_left), (wrong_right - _GAP, wrong_right))


def _band(left: float, right: float, height: float) -> str:
    return (
        f"M0,{left:.2f} C45,{left:.2f} 55,{right:.2f} 100,{right:.2f} v{height:.2f} "
        f"C55,{right + height:.2f} 45,{left + height:.2f} 0,{left + height:.2f} Z"
    )


def _spread(places: Sequence[float]) -> list[float]:
    """The places of labels from top to bottom, moved apart by at least a line, none beyond the plot."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + _LINE) if moved else max(place, 0.0))
    lowest = float(FLOW_HEIGHT)
    for n in reversed(range(len(moved))):
        moved[n] = min(moved[n], lowest)
        lowest = moved[n] - _LINE
    return moved


@dataclass(frozen=True)
class Trade:
    """Latency against quality: both axes, the systems' (time, mean), and the front that no other system beats."""

    across: Axis
    up: Axis
    points: dict[str, tuple[StageLatency, Interval]]
    front: Places


def trade(report: "Report") -> Trade | None:
    """The systems with a time and a value of the chief measure; None where there is none."""
    totals = {row.system: row for row in report.analysis.latencies if row.stage == TOTAL and row.p50 > 0}
    means = {name: row.get(report.chief_measure) for name, row in report.every.means.items()}
    points = {name: (totals[name], mean) for name, mean in means.items() if mean is not None and name in totals}
    if not points:
        return None
    across = axis_of_times([1000 * row.p50 for row, _ in points.values()])
    up = axis_of_shares([end for _, mean in points.values() for end in (mean.low, mean.high)])
    places = [(across.place(1000 * row.p50), up.place(mean.mean)) for row, mean in points.values()]
    front, best = list[tuple[float, float]](), -1.0
    for x, y in sorted(places, key=lambda place: (place[0], -place[1])):
        if y > best:
            front += [(x, best)] * bool(front) + [(x, y)]
            best = y
    return Trade(across, up, points, [*front, (100, best)])


def pass_rate_axis(report: "Report") -> Axis:
    """An axis that holds the rates without skills and with gold skills, and all estimates."""
    rates = report.analysis.pass_rates
    ends = [end for rate in rates for end in (rate.without_skills, rate.with_gold)]
    return axis_of_shares([*ends, *(value.mean for rate in rates for value in rate.estimates.values())])


def layers(model: FieldAttention) -> dict[str, Places]:
    """Field → its share of attention in each layer; a single layer runs over the whole width."""
    every = model.layers if len(model.layers) > 1 else model.layers * 2
    return {
        name: [(100 * n / (len(every) - 1), 100 * getattr(layer, name)) for n, layer in enumerate(every)]
        for name in FIELDS
    }


def numbered_layers(model: FieldAttention) -> list[tuple[float, int]]:
    """The layers named below a plot: the first, the last, and about eight in all."""
    count = len(model.layers)
    step = max(1, -(-count // 8))
    named = [*range(0, count - step // 2 - 1, step), count - 1] if count > 1 else [0]
    return [(100 * n / max(1, count - 1), n + 1) for n in named]


def shares(fields: FieldShares) -> tuple[float, float, float]:
    """The shares in the order of FIELDS."""
    return fields.name, fields.description, fields.body


def effect_axis(report: "Report") -> Axis:
    """The axis of the effects of structure, around .5."""
    largest = max(abs(feature.effect - 0.5) for feature in report.analysis.structure)
    limit = next(step for step in (0.1, 0.2, 0.3, 0.5) if largest <= step)
    return Axis((0.5 - limit, 0.5, 0.5 + limit))


def feature_reading(feature: FeatureComparison) -> str:
    """What the test allows to say of gold skills: more, less or not told apart."""
    if feature.p >= ALPHA or feature.effect == 0.5:
        return "not told apart"
    return "more" if feature.effect > 0.5 else "less"


def missed(report: "Report") -> list[str]:
    """The queries for which no ranking begins with a gold skill, those whose gold stands lowest first."""
    ranks = {query_id: [found[query_id] for found in report.first_ranks.values()] for query_id in report.tasks}
    failed = {query_id: [rank for rank in found if rank] for query_id, found in ranks.items() if 1 not in found}
    return sorted(failed, key=lambda query_id: (sum(1 / rank for rank in failed[query_id]), query_id))


def differing(report: "Report") -> list[str]:
    """The other queries on which systems differ (of one system: that are not perfect), the largest first."""
    known = set(missed(report))
    spread = {query_id: _spread_of(report, query_id) for query_id in report.tasks if query_id not in known}
    return sorted((query_id for query_id in spread if spread[query_id]), key=lambda q: (-spread[q], q))


def _spread_of(report: "Report", query_id: str) -> float:
    """How far the systems lie apart, summed over measures; with one system, how far it is from perfect."""
    held = [result.per_query[query_id] for result in report.results]
    columns = [[values[name] for values in held] for name in report.measures if name in held[0]]
    if len(held) == 1:
        return sum(1 - column[0] for column in columns)
    return sum(max(column) - min(column) for column in columns)
