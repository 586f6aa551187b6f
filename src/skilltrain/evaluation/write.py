"""The forms of an evaluation's report: JSON, Markdown, one HTML page with its figures, a table for the terminal."""

import itertools
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from skilltrain.evaluation.page import (
    SHARES,
    Axis,
    axis_around,
    axis_of,
    axis_over,
    ends_of,
    html_page,
    markdown,
)
from skilltrain.evaluation.report import ANALYSES, Report
from skilltrain.files import write_json, write_jsonl, write_text
from skilltrain.metrics.bootstrap import LEVEL, RESAMPLES, SEED, compact
from skilltrain.metrics.comparison import ALPHA, MAX_EXACT
from skilltrain.metrics.measures import COPIES, MEANINGS, Measure, per_query
from skilltrain.metrics.slices import ALL, KIND, LENGTH, Row, SliceMeans, distinct_slices
from skilltrain.templates import FIELDS_SEEN
from skilltrain.texts import printable

CURVE = (*range(1, 11), 12, 15, 20, 25, 30, 40, 50)  # cutoffs of the recall curve
MARKED = (1, 2, 5, 10, 20, 50)  # of them, those with a number
NUM_CASES = 100  # fixed (and broken) queries listed of a pair of systems
NUM_QUERIES = 500  # queries listed; a larger page is slow to search
_NAME, _CELL = 11, 21  # widths of the terminal's first column and of a mean with its interval


def write_report(report: Report, folder: Path) -> None:
    """Write metrics.json, report.md, report.html and per_query.jsonl into `folder`."""
    write_json(folder / "metrics.json", report.to_json())
    write_text(folder / "report.md", report_markdown(report))
    write_text(folder / "report.html", report_page(report))
    write_per_query(report, folder / "per_query.jsonl")


def write_per_query(report: Report, file: Path) -> None:
    """Write one row per system and query: the query's kind, and its value of each measure that it has one of."""
    rows = (
        {"system": result.name, "query_id": query_id, "slice": task.labels["kind"]}
        | {
            name: value
            for name, value in result.per_query[query_id].items()
            if name in report.measures
        }
        for result in report.results
        for query_id, task in report.tasks.items()
    )
    write_jsonl(file, rows)


def report_markdown(report: Report) -> str:
    """The report as Markdown: the same numbers as the page, in tables."""
    return markdown("evaluation", **_values(report))


def report_page(report: Report) -> str:
    """The report as one HTML page; queries that no system begins with a gold skill stand first."""
    ranks = {
        query_id: [found[query_id] for found in report.first_ranks.values()]
        for query_id in report.tasks
    }
    found = {query_id: sum(1 / rank for rank in row if rank) for query_id, row in ranks.items()}
    return html_page(
        "evaluation",
        **_values(report),
        num_failures=sum(1 not in row for row in ranks.values()),
        hardest_first=sorted(
            ranks, key=lambda query_id: (1 in ranks[query_id], found[query_id], query_id)
        ),
        curve=_recall_curve(report),
        trade=_trade(report),
        axes=_axes(report),
        layers=_layers,
        fields=FIELDS_SEEN["full"],
        limits={"cases": NUM_CASES, "queries": NUM_QUERIES},
    )


def _values(report: Report) -> dict[str, Any]:
    """What both templates ask for."""
    used = dict.fromkeys(name.removesuffix(COPIES).partition("@")[0] for name in report.measures)
    return {
        "report": report,
        "analysis": dict.fromkeys(ANALYSES, ()) | dict(report.analysis),
        "meanings": {name: MEANINGS[name] for name in used},
        "level": f"{LEVEL:.0%}",
        "resamples": RESAMPLES,
        "seed": SEED,
        "alpha": ALPHA,
        "max_exact": MAX_EXACT,
    }


def _recall_curve(report: Report) -> dict[str, Any] | None:
    """Mean recall by the number of candidates kept, on a logarithmic axis up to the longest ranking.

    `lines` maps system → places (percent from the left, percent from the bottom), `last` system → its last value.
    """
    rankings = [ranking for result in report.results for ranking in result.rankings.values()]
    longest = max(map(len, rankings), default=0)
    cutoffs = [k for k in CURVE if k <= longest]
    if len(cutoffs) < 2:
        return None
    axis = axis_of([*(k for k in MARKED if k < cutoffs[-1]), cutoffs[-1]], logarithmic=True)
    measures = [Measure("Recall", k) for k in cutoffs]
    lines: dict[str, list[tuple[float, float]]] = {}
    last: dict[str, float] = {}
    for result in report.results:
        rows = list(per_query(result.rankings, report.benchmark.relevances, measures).values())
        means = [fmean(row[str(measure)] for row in rows) for measure in measures]
        lines[result.name] = [(axis.place(k), 100 * y) for k, y in zip(cutoffs, means, strict=True)]
        last[result.name] = means[-1]
    return {"axis": axis, "lines": lines, "last": last}


def _trade(report: Report) -> dict[str, Any] | None:
    """Latency against quality: both axes, and system → (its whole time, its mean); None where no system has both."""
    latencies = report.analysis.get("latencies", ())
    totals = {row["system"]: row for row in latencies if row["stage"] == "total" and row["p50"] > 0}
    means = {name: row.get(report.chief_measure) for name, row in report.every.means.items()}
    points = {
        name: (totals[name], mean)
        for name, mean in means.items()
        if mean is not None and name in totals
    }
    if not points:
        return None
    across = axis_over([1000 * row["p50"] for row, _ in points.values()], logarithmic=True)
    return {
        "across": across,
        "up": axis_over(ends_of(mean for _, mean in points.values())),
        "points": points,
    }


def _axes(report: Report) -> dict[str, Axis]:
    """The axes of shares and, where they are drawn, of differences, agents' pass rates and effects of structure."""
    analysis, found = report.analysis, {"shares": SHARES}
    if report.comparisons:
        found["differences"] = axis_around(0, ends_of(c.difference for c in report.comparisons))
    if rates := analysis.get("pass_rates"):
        ends = [rate[key] for rate in rates for key in ("without_skills", "with_gold")]
        found["agents"] = axis_over(
            [*ends, *(value.mean for rate in rates for value in rate["estimates"].values())]
        )
    if structure := analysis.get("structure"):
        found["structure"] = axis_around(0.5, [feature["effect"] for feature in structure])
    return found


def _layers(model: Row) -> dict[str, Any]:
    """Field → its line over the layers, and the places of five of their `numbers`; one layer fills the whole width."""
    layers = model["layers"] * (2 if len(model["layers"]) == 1 else 1)
    step = 100 / (len(layers) - 1)
    lines: dict[str, Any] = {
        name: [(step * n, 100 * one[name]) for n, one in enumerate(layers)]
        for name in FIELDS_SEEN["full"]
    }
    named = sorted({n * (len(model["layers"]) - 1) // 4 for n in range(5)})
    return lines | {"numbers": [(step * n, n + 1) for n in named]}


def terminal_table(report: Report, width: int) -> Group:
    """Return the means for a terminal: measures are rows, systems columns, as many as fit its `width`."""
    parts = [part for part in distinct_slices(report.slices) if part.label in (ALL, KIND, LENGTH)]
    rows = [[(part, name) for name in report.systems] for part in parts]
    if len(report.systems) == 1:
        rows = [list(itertools.chain(*rows))]  # the slices of a single system side by side
    num_columns = max(1, (width - _NAME) // _CELL)
    tables: list[Table] = []
    for row in rows:
        for start in range(0, len(row), num_columns):
            table = Table(pad_edge=False)
            table.add_column(no_wrap=True)
            columns = row[start : start + num_columns]
            for part, name in columns:
                head = f"{printable(name)}\n{part.value}, n = {len(part.query_ids)}"
                table.add_column(head, justify="right", overflow="fold", max_width=_CELL - 3)
            for measure in report.measures:
                cells = [_cell(part, name, measure) for part, name in columns]
                table.add_row(measure.replace(" ", "\n"), *cells)
            tables.append(table)
    title = Text(f"{printable(report.title())}, 95% bootstrap intervals", style="italic")
    notes = Text("\n".join(map(printable, (report.headline(), *report.notes))))
    return Group(title, *tables, notes)


def _cell(part: SliceMeans, system: str, measure: str) -> Text:
    value = part.means[system].get(measure)
    if value is None:
        return Text("–", style="dim")
    count = f"\nn = {value.n}" if value.n < len(part.query_ids) else ""
    mean = Text(compact(value.mean, 3), style="bold" if system in part.best(measure) else "")
    return mean.append(f" {value.bounds()}{count}", style="not bold dim")
