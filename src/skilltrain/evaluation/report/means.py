"""The results of each section: means, an interval plot a measure, recall curves, and all queries at once."""

import math
from collections.abc import Sequence

from skilltrain.evaluation.metrics import Measure
from skilltrain.evaluation.report.contents import Report, ReportTexts
from skilltrain.evaluation.report.marks import (
    NUM_COLORS,
    SHARES,
    Row,
    axes,
    interval_plot,
    share,
    stretched,
    swatch,
    table,
    text,
)
from skilltrain.evaluation.report.numbers import counted
from skilltrain.evaluation.results import SystemResult
from skilltrain.evaluation.statistics.bootstrap import LEVEL, compact

CURVE = (*range(1, 11), 12, 15, 20, 25, 30, 40, 50)  # cutoffs of the recall curve
# Rank of the first gold skill up to which a query belongs to a class of the strips, with its name.
RANKS = ((1, "rank 1"), (3, "2–3"), (10, "4–10"), (math.inf, "later"), (None, "not found"))
_TITLES = {"all": "All queries", "single": "Queries with one gold skill", "multi": "Queries with several gold skills"}


def results(report: Report, texts: ReportTexts | None, section: str) -> str:
    """What the switch shows for a section; without texts no curve and no strips, for they need the gold skills."""
    partial = report.partial(section)
    plots = ""
    for measure in report.measures:
        rows = [
            Row(system, found[section][measure], position)
            for position, (system, found) in enumerate(report.summaries.items())
            if measure in found[section]
        ]
        plots += interval_plot(measure, rows, f"n = {partial[measure]}" if measure in partial else "") if rows else ""
    more = _recall_curve(report, texts, section) + _strips(report, texts, section) if texts else ""
    return (
        f'<section class="view {section}">\n<h2>{_TITLES[section]}</h2>\n{_means(report, section)}\n'
        f'<div class="plots">{plots}</div>\n{more}</section>'
    )


def _means(report: Report, section: str) -> str:
    count, partial = report.sections()[section], report.partial(section)
    head = ["System"] + [
        measure + (f" <small>n = {partial[measure]:,}</small>" if measure in partial else "")
        for measure in report.measures
    ]
    rows = []
    for position, system in enumerate(report.summaries):
        cells = "".join(_cell(report, section, system, measure) for measure in report.measures)
        rows.append(f'<tr><th scope="row">{swatch(position)}{text(system)}</th>{cells}</tr>\n')
    caption = f"Mean over {counted(count, 'query')}, {LEVEL:.0%} interval below; the best mean is marked"
    return table(f"Results, {section} queries", "means", caption, head, rows)


def _cell(report: Report, section: str, system: str, measure: str) -> str:
    row = report.summaries[system][section]
    if measure not in row:
        return "<td>–</td>"
    best = ' class="best"' if report.is_best(section, system, measure) else ""
    return f"<td{best}><b>{compact(row[measure].mean, 3)}</b><small>{row[measure].bounds()}</small></td>"


def _recall_curve(report: Report, texts: ReportTexts, section: str) -> str:
    """Mean recall against the number of candidates kept, on a logarithmic axis up to the longest ranking."""
    lengths = (len(ranking) for result in report.results for ranking in result.rankings.values())
    longest = max(lengths, default=0)
    cutoffs = [k for k in CURVE if k <= longest]
    if len(cutoffs) < 2:
        return ""
    last = cutoffs[-1]
    lines, legend = "", ""
    for position, result in enumerate(report.results):
        recall = _mean_recall(result, texts, report.query_ids(section), cutoffs)
        points = " ".join(
            f"{_log_x(k, last):.2f},{100 * (1 - value):.2f}" for k, value in zip(cutoffs, recall, strict=True)
        )
        lines += f'<polyline class="c{position % NUM_COLORS}" points="{points}"/>'
        legend += (
            f"<li>{_stroke(position)}<span>{text(result.name)} <b>{compact(recall[-1], 3)}</b> at {last}</span></li>"
        )
    across = [(_log_x(k, last), str(k)) for k in sorted({k for k in (1, 2, 5, 10, 20, 50) if k < last} | {last})]
    up = [(100 * y, share(y)) for y in SHARES.ticks]
    return (
        '<figure class="curve"><figcaption>Recall@k <small>by the number k of candidates kept</small></figcaption>'
        f'<ul class="legend">{legend}</ul>'
        '<svg class="axes" role="img" aria-label="Recall by number of candidates kept; the legend has the last value">'
        f"{axes(across, up)}{stretched(lines)}</svg></figure>"
    )


def _stroke(position: int) -> str:
    """A piece of a system's line, dashed as in the plot: colours alone do not tell lines apart."""
    return (
        f'<svg class="stroke" aria-hidden="true"><polyline class="c{position % NUM_COLORS}" points="0,5 26,5"/></svg>'
    )


def _log_x(k: int, last: int) -> float:
    return 100 * math.log(k) / math.log(last)


def _mean_recall(
    result: SystemResult, texts: ReportTexts, query_ids: Sequence[str], cutoffs: Sequence[int]
) -> list[float]:
    rankings = [(result.rankings.get(query_id, ()), query_id) for query_id in query_ids]
    found = [(ranking, texts.found(query_id, ranking)) for ranking, query_id in rankings]
    measures = [Measure("Recall", k) for k in cutoffs]
    return [math.fsum(measure(*pair) for pair in found) / len(query_ids) for measure in measures]


def _strips(report: Report, texts: ReportTexts, section: str) -> str:
    """One strip a system, one place a query, in one order for all: easy queries left, those that all miss right."""
    query_ids = report.query_ids(section)
    ranks = {r.name: {q: texts.first_rank(r, q) for q in query_ids} for r in report.results}
    ease = {q: sum(1 / rank for row in ranks.values() if (rank := row[q])) for q in query_ids}
    ordered = sorted(query_ids, key=lambda q: (-ease[q], q))
    rows = ""
    for position, (name, row) in enumerate(ranks.items()):
        classes = [_rank_class(row[query_id]) for query_id in ordered]
        counts = ", ".join(f"{classes.count(n)} {label}" for n, (_, label) in enumerate(RANKS))
        rows += (
            f"<li><span>{swatch(position)}{text(name)}</span>"
            f'<svg role="img" aria-label="{text(name)}: {counts}">{_runs(classes)}</svg></li>'
        )
    keys = "".join(f'<li><i class="key r{n}"></i>{label}</li>' for n, (_, label) in enumerate(RANKS))
    return (
        '<figure class="strips"><figcaption>Every query <small>by the rank of its first gold skill; one column is one '
        f'query, easy ones left</small></figcaption><ul class="legend">{keys}</ul><ul class="rows">{rows}</ul></figure>'
    )


def _rank_class(rank: int | None) -> int:
    if rank is None:
        return len(RANKS) - 1
    return next(n for n, (most, _) in enumerate(RANKS) if most is not None and rank <= most)


def _runs(classes: Sequence[int]) -> str:
    """Neighbours of one class as one rectangle: a page of 500 queries stays small."""
    rects, start = "", 0
    for place in range(1, len(classes) + 1):
        if place == len(classes) or classes[place] != classes[start]:
            x, width = 100 * start / len(classes), 100 * (place - start) / len(classes)
            rects += f'<rect class="r{classes[start]}" x="{x:.3f}%" width="{width:.3f}%" height="100%"/>'
            start = place
    return rects
