"""Write the report of an evaluation: JSON, Markdown, an HTML page with plots, a terminal table."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from skilltrain.evaluation.page import (
    SHARES,
    Axis,
    axis_around,
    axis_over,
    ends_of,
    html_page,
    markdown,
)
from skilltrain.evaluation.report import ANALYSES, Report, main_measures
from skilltrain.evaluation.skill_page import skill_page
from skilltrain.files import write_json, write_jsonl, write_text
from skilltrain.metrics.bootstrap import LEVEL, RESAMPLES, Interval, compact
from skilltrain.metrics.comparison import ALPHA, MAX_EXACT
from skilltrain.metrics.measures import Measure, meaning_of, parse_measure, per_query
from skilltrain.metrics.refusal import MAX_REFUSED
from skilltrain.metrics.slices import ALL, KIND, QUERY_LENGTH, Row, SliceMeans, distinct_slices
from skilltrain.templates import FIELDS_SEEN
from skilltrain.texts import printable

_CURVE_CUTOFFS = (*range(1, 11), 12, 15, 20, 25, 30, 40, 50)
_CURVE_TICKS = (1, 2, 5, 10, 20, 50)
_MAX_CASES = 100  # fixed queries, and broken ones, that the page lists for a pair of systems
_MAX_QUERIES = 500  # queries that the page lists; a larger page is slow to search
_MIN_QUERIES = 10  # of a slice in a plot or in the terminal; fewer say little
_NAME_WIDTH = 11  # of the first column in the terminal
_CELL_WIDTH = 21  # of a mean with its interval

Point = tuple[float, float]
"""Percent from the left and percent from the bottom of a plot."""
Column = tuple[SliceMeans, str]
"""A slice and a system: one column in the terminal."""


def write_report(report: Report, folder: Path) -> None:
    """Write metrics.json, report.md, two pages and per_query.jsonl into `folder`."""
    write_json(folder / "metrics.json", report.to_json())
    write_text(folder / "report.md", report_markdown(report))
    write_text(folder / "report.html", report_page(report))
    write_text(folder / "skills.html", skill_page(report))
    write_per_query(report, folder / "per_query.jsonl")


def write_per_query(report: Report, file: Path) -> None:
    """Write one row per system and query: the query's kind, and its value of each measure.

    Measures without a value for the query are left out.

    Args:
        report: The report.
        file: JSON Lines file to write.
    """
    rows = []
    for result in report.results:
        for query_id, task in report.tasks.items():
            row = {"system": result.name, "query_id": query_id, "slice": task.labels["kind"]}
            for measure, value in result.per_query[query_id].items():
                if measure in report.measures:
                    row[measure] = value
            rows.append(row)
    write_jsonl(file, rows)


def report_markdown(report: Report) -> str:
    """Return the report as Markdown: the numbers of the page, in tables."""
    return markdown("evaluation", **_common_values(report))


def report_page(report: Report) -> str:
    """Return the report as one HTML page."""
    # Queries for which no system has a gold skill on rank 1.
    failed_ids = [query_id for query_id in report.tasks if 1 not in _first_ranks(report, query_id)]
    return html_page(
        "evaluation",
        **_common_values(report),
        num_failures=len(failed_ids),
        hardest_first=_hardest_first(report),
        curve=_recall_curve(report),
        latency_plot=_latency_plot(report),
        axes=_axes(report),
        layer_plot=_layer_plot,  # a function, which the template calls for each model
        fields=FIELDS_SEEN["full"],  # name, description and body of a skill
        max_cases=_MAX_CASES,
        max_queries=_MAX_QUERIES,
        max_refused=MAX_REFUSED,
    )


def _common_values(report: Report) -> dict[str, Any]:
    """Return the variables that the templates of the page and of the Markdown file share."""
    # The templates expect rows of every known analysis, also of those that did not run.
    analysis = {**dict.fromkeys(ANALYSES, ()), **report.analysis}
    # Known analyses have parts of their own in the templates. Plug-ins add other analyses.
    other_analyses = {kind: rows for kind, rows in report.analysis.items() if kind not in ANALYSES}
    # Names without cutoff and suffix: `Hit@1 (copies)` becomes `Hit`.
    bare_names = [parse_measure(measure).name for measure in report.measures]
    return {
        "report": report,
        "analysis": analysis,
        "other_analyses": other_analyses,
        "meanings": {name: meaning_of(name) for name in bare_names},
        "main_measures": main_measures(report.measures),
        "level": f"{LEVEL:.0%}",
        "resamples": RESAMPLES,
        "seed": report.seed,
        "alpha": ALPHA,
        "max_exact": MAX_EXACT,
        "min_queries": _MIN_QUERIES,
    }


def _first_ranks(report: Report, query_id: str) -> list[int | None]:
    """Return the rank of the query's first gold skill in each system's ranking; None if missing."""
    return [ranks[query_id] for ranks in report.first_ranks.values()]


def _hardest_first(report: Report) -> list[str]:
    """Return the query ids, the hardest query first.

    Queries for which no system ranks a gold skill first precede all others. Within both groups, a
    query is harder if the reciprocal ranks of its first gold skill have a lower sum over systems.
    """

    def sort_key(query_id: str) -> tuple[bool, float, str]:
        ranks = _first_ranks(report, query_id)
        is_solved = 1 in ranks
        reciprocal_ranks = [1 / rank for rank in ranks if rank is not None]
        # False sorts before True. The query id decides between equally hard queries.
        return is_solved, sum(reciprocal_ranks), query_id

    return sorted(report.tasks, key=sort_key)


class RecallCurve(NamedTuple):
    """Mean recall by the number of candidates, which is on a logarithmic axis.

    Attributes:
        axis: Axis of the number of candidates.
        points_by_system: Points of each system's curve.
        last_by_system: Recall of each system at the largest number of candidates.
    """

    axis: Axis
    points_by_system: dict[str, list[Point]]
    last_by_system: dict[str, float]


def _recall_curve(report: Report) -> RecallCurve | None:
    """Compute each system's recall up to the length of the longest ranking.

    Returns:
        The curves; None if all rankings are too short for a curve.
    """
    rankings = chain.from_iterable(result.rankings.values() for result in report.results)
    max_length = max(map(len, rankings), default=0)
    # A cutoff is the number of best candidates that count. The curve has a point for each cutoff.
    cutoffs = [k for k in _CURVE_CUTOFFS if k <= max_length]
    if len(cutoffs) < 2:  # a line needs two points
        return None

    last_cutoff = cutoffs[-1]
    ticks = [k for k in _CURVE_TICKS if k < last_cutoff]
    axis = Axis((*ticks, last_cutoff), logarithmic=True)
    measures = [Measure("Recall", k) for k in cutoffs]
    curve = RecallCurve(axis, {}, {})
    for result in report.results:
        values = per_query(result.rankings, report.benchmark.relevances, measures).values()
        points = []
        for measure in measures:
            # Average the recall over all queries.
            recall = fmean(row[str(measure)] for row in values)
            points.append((axis.position(measure.cutoff), 100 * recall))
            # The last assignment of the loop remains: the recall at the largest cutoff.
            curve.last_by_system[result.name] = recall
        curve.points_by_system[result.name] = points
    return curve


class LatencyPlot(NamedTuple):
    """Latency (x, milliseconds) and mean of the chief measure (y) of each system."""

    x_axis: Axis
    y_axis: Axis
    points_by_system: dict[str, tuple[Row, Interval]]


def _latency_plot(report: Report) -> LatencyPlot | None:
    """Plot the systems that have both a total latency and a mean of the chief measure.

    Returns:
        The plot; None if there is no such system.
    """
    latencies = {}
    for row in report.analysis.get("latencies", ()):
        # The row `total` is the latency of all rankers of a system together. `p50` is its median.
        if row["stage"] == "total" and row["p50"] > 0:
            latencies[row["system"]] = row

    points = {}
    for system, means in report.overall.means.items():
        if system in latencies and report.chief_measure in means:
            points[system] = (latencies[system], means[report.chief_measure])
    if not points:
        return None

    milliseconds = [1000 * row["p50"] for row, _ in points.values()]
    x_axis = axis_over(milliseconds, logarithmic=True)
    y_axis = axis_over(ends_of(mean for _, mean in points.values()))
    return LatencyPlot(x_axis, y_axis, points)


def _axes(report: Report) -> dict[str, Axis]:
    """Return the axes of the plots by the name of the plot. A plot without data has no axis."""
    axes = {"shares": SHARES}
    if report.comparisons:
        ends = ends_of(comparison.difference for comparison in report.comparisons)
        axes["differences"] = axis_around(0, ends)

    pass_rates = report.analysis.get("pass_rates")
    if pass_rates:
        # Shares of tasks that agents solve: without skills, with gold skills, and estimates for the
        # skills that each system finds.
        values = []
        for row in pass_rates:
            values += [row["without_skills"], row["with_gold"]]
            values += [estimate.mean for estimate in row["estimates"].values()]
        axes["agents"] = axis_over(values)

    structure = report.analysis.get("structure")
    if structure:
        # An effect of 0.5 means that gold skills and other skills do not differ.
        axes["structure"] = axis_around(0.5, [feature["effect"] for feature in structure])
    return axes


class LayerPlot(NamedTuple):
    """Attention to each field by layer.

    Attributes:
        points_by_field: Points of the curve of name, description and body.
        ticks: Position (percent from the left) and number of at most five layers.
    """

    points_by_field: dict[str, list[Point]]
    ticks: list[tuple[float, int]]


def _layer_plot(model: Row) -> LayerPlot:
    """Plot the attention of a model by layer. A single layer fills the whole width.

    Args:
        model: Row of the analysis `attention`: `layers` has the share of attention by field.
    """
    layers = model["layers"]
    last_layer = len(layers) - 1
    if last_layer == 0:
        layers = layers * 2  # a line needs two points
    step = 100 / (len(layers) - 1)  # percent of the width between two layers
    points = {}
    for field in ("name", "description", "body"):
        points[field] = [(step * n, 100 * layer[field]) for n, layer in enumerate(layers)]

    # Number the first layer, the last layer, and three layers between them. If there are fewer than
    # five layers, some of these are the same.
    numbered_layers = sorted({quarter * last_layer // 4 for quarter in range(5)})
    ticks = [(step * n, n + 1) for n in numbered_layers]
    return LayerPlot(points, ticks)


# Terminal ------------------------------------------------------------------------------------


def terminal_table(report: Report, width: int, print_groups: bool = True) -> Group:
    """Return the means as tables for a terminal. Measures are rows; systems are columns.

    Args:
        report: The report.
        width: Characters in a line. Further columns follow in more tables.
        print_groups: Whether to show large groups of queries too.
    """
    max_columns = max(1, (width - _NAME_WIDTH) // _CELL_WIDTH)
    tables = []
    for columns in _column_groups(report, print_groups):
        for start in range(0, len(columns), max_columns):
            tables.append(_table(columns[start : start + max_columns], report.measures))

    title = Text(f"{printable(report.title())}, 95% bootstrap intervals", style="italic")
    notes = Text("\n".join(map(printable, (report.headline(), *report.notes))))
    return Group(title, *tables, notes)


def _column_groups(report: Report, print_groups: bool) -> list[list[Column]]:
    """Return the columns side by side: the slices of a single system, or the systems by slice."""
    labels = (KIND, QUERY_LENGTH) if print_groups else ()
    slices = []
    for item in distinct_slices(report.slices):
        is_large = len(item.query_ids) >= _MIN_QUERIES
        if item.label == ALL or (is_large and item.label in labels):
            slices.append(item)
    if len(report.systems) == 1:
        return [[(query_slice, report.systems[0]) for query_slice in slices]]
    groups = []
    for query_slice in slices:
        groups.append([(query_slice, system) for system in report.systems])
    return groups


def _table(columns: Sequence[Column], measures: Sequence[str]) -> Table:
    """Return a table with a row for each measure and a column for each slice and system.

    Args:
        columns: Pairs of a slice and a system's name. A slice holds the means over the queries that
            have the same value of a label.
        measures: Names of the measures, such as `nDCG@10`.
    """
    table = Table(pad_edge=False)
    table.add_column(no_wrap=True)  # the measures' names

    # Of a cell's width, a space on both sides and the line between two columns take 3 characters.
    text_width = _CELL_WIDTH - 3
    for query_slice, system in columns:
        # Two lines: the system's name, then the slice's value and its number of queries.
        head = f"{printable(system)}\n{query_slice.value}, n = {len(query_slice.query_ids)}"
        table.add_column(head, justify="right", overflow="fold", max_width=text_width)
    for measure in measures:
        cells = [_cell(query_slice, system, measure) for query_slice, system in columns]
        # Put the words of a long name on lines of their own, to save width.
        table.add_row(measure.replace(" ", "\n"), *cells)
    return table


def _cell(query_slice: SliceMeans, system: str, measure: str) -> Text:
    """Format a mean, its interval, and the number of queries if some have no value.

    Args:
        query_slice: Queries, and their means by system and measure.
        system: Name of the system.
        measure: Name of the measure.
    """
    value = query_slice.means[system].get(measure)
    # No query of the slice has a value of this measure.
    if value is None:
        return Text("–", style="dim")
    is_best = system in query_slice.best(measure)
    # `value.n` is the number of queries that have a value.
    is_partly_defined = value.n < len(query_slice.query_ids)
    count = f"\nn = {value.n}" if is_partly_defined else ""
    mean = Text(compact(value.mean, 3), style="bold" if is_best else "")
    return mean.append(f" {value.bounds()}{count}", style="not bold dim")
