"""What the page of an evaluation draws: lines, points and lists of queries, placed but not yet written."""

import math
from typing import Any

from skilltrain.evaluation.analysis.analysis import FieldAttention
from skilltrain.evaluation.analysis.structure import FeatureComparison
from skilltrain.evaluation.metrics import Measure
from skilltrain.report.evaluation import Report
from skilltrain.report.numbers import ALPHA
from skilltrain.report.plots import Axis, axis_around, axis_over

CURVE = (*range(1, 11), 12, 15, 20, 25, 30, 40, 50)  # cutoffs of the recall curve
MARKED = (1, 2, 5, 10, 20, 50)  # of them, those with a number
TOTAL = "total"  # the stage that is a system's whole time
FIELDS = ("name", "description", "body")


def recall_curve(report: Report) -> dict[str, Any] | None:
    """Mean recall by the number of candidates kept, on a logarithmic axis up to the longest ranking.

    `lines` maps system → places (percent from the left, percent from the bottom), `last` system → its last value.
    """
    longest = max((len(ranking) for result in report.results for ranking in result.rankings.values()), default=0)
    cutoffs = [k for k in CURVE if k <= longest]
    if len(cutoffs) < 2:
        return None
    axis = Axis(tuple(sorted({k for k in MARKED if k < cutoffs[-1]} | {cutoffs[-1]})), 1, cutoffs[-1], logarithmic=True)
    lines, last = dict[str, list[tuple[float, float]]](), dict[str, float]()
    for result in report.results:
        rankings = [(result.rankings.get(query_id, ()), query_id) for query_id in report.tasks]
        found = [(ranking, report.found(query_id, ranking)) for ranking, query_id in rankings]
        means = [math.fsum(Measure("Recall", k)(*pair) for pair in found) / len(found) for k in cutoffs]
        lines[result.name] = [(axis.place(k), 100 * mean) for k, mean in zip(cutoffs, means, strict=True)]
        last[result.name] = means[-1]
    return {"axis": axis, "lines": lines, "last": last}


def trade(report: Report) -> dict[str, Any] | None:
    """Latency against quality: both axes, and system → (its whole time, its mean); None where no system has both."""
    totals = {row.system: row for row in report.analysis.latencies if row.stage == TOTAL and row.p50 > 0}
    means = {name: row.get(report.chief_measure) for name, row in report.every.means.items()}
    points = {name: (totals[name], mean) for name, mean in means.items() if mean is not None and name in totals}
    if not points:
        return None
    across = axis_over([1000 * row.p50 for row, _ in points.values()], logarithmic=True)
    up = axis_over([end for _, mean in points.values() for end in (mean.low, mean.high)])
    return {"across": across, "up": up, "points": points}


def axes(report: Report) -> dict[str, Axis]:
    """The axes of differences, of agents' pass rates and of the effects of structure, of those that there are."""
    analysis, found = report.analysis, dict[str, Axis]()
    if differences := [c.difference for c in report.comparisons]:
        found["differences"] = axis_around(0, [end for value in differences for end in (value.low, value.high)])
    if rates := analysis.pass_rates:
        ends = [end for rate in rates for end in (rate.without_skills, rate.with_gold)]
        found["agents"] = axis_over([*ends, *(value.mean for rate in rates for value in rate.estimates.values())])
    if analysis.structure:
        found["structure"] = axis_around(0.5, [feature.effect for feature in analysis.structure])
    return found


def layers(model: FieldAttention) -> dict[str, list[tuple[float, float]]]:
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


def feature_reading(feature: FeatureComparison) -> str:
    """What the test allows to say of gold skills: more, less or not told apart."""
    if feature.p >= ALPHA or feature.effect == 0.5:
        return "not told apart"
    return "more" if feature.effect > 0.5 else "less"


def missed(report: Report) -> list[str]:
    """The queries for which no ranking begins with a gold skill, those whose gold stands lowest first."""
    ranks = {query_id: [found[query_id] for found in report.first_ranks.values()] for query_id in report.tasks}
    failed = {query_id: [rank for rank in found if rank] for query_id, found in ranks.items() if 1 not in found}
    return sorted(failed, key=lambda query_id: (sum(1 / rank for rank in failed[query_id]), query_id))


def differing(report: Report) -> list[str]:
    """The other queries on which systems differ (of one system: that are not perfect), the largest first."""
    known = set(missed(report))
    spread = {query_id: _spread_of(report, query_id) for query_id in report.tasks if query_id not in known}
    return sorted((query_id for query_id in spread if spread[query_id]), key=lambda q: (-spread[q], q))


def _spread_of(report: Report, query_id: str) -> float:
    """How far the systems lie apart, summed over measures; with one system, how far it is from perfect."""
    held = [result.per_query[query_id] for result in report.results]
    columns = [[values[name] for values in held] for name in report.measures if name in held[0]]
    if len(held) == 1:
        return sum(1 - column[0] for column in columns)
    return sum(max(column) - min(column) for column in columns)
