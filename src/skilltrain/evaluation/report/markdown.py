"""The report as Markdown: the same numbers as the page, in tables; every name in it is escaped."""

import re
from collections.abc import Iterator, Sequence

from skilltrain.evaluation.analysis.analysis import Analysis
from skilltrain.evaluation.metrics import MEANINGS
from skilltrain.evaluation.report.breakdowns import quartile_name
from skilltrain.evaluation.report.contents import Report
from skilltrain.evaluation.report.inside import FIELDS, feature_reading, shares
from skilltrain.evaluation.report.marks import visible
from skilltrain.evaluation.report.numbers import duration, number, p_value, reading, signed, signed_interval
from skilltrain.evaluation.statistics.bootstrap import RESAMPLES, compact

Rows = Sequence[Sequence[str]]
_FIGURES = tuple("0123456789.+-<–*")  # what a cell of a column of numbers begins with


def markdown_table(report: Report) -> str:
    """The whole report: one table a section, the comparisons, and a table for each analysis that was made."""
    lines = [f"# {plain(report.benchmark)}", "", _paragraph(report.headline()), ""]
    lines.append("Means with 95% bootstrap intervals; the best mean is bold.")
    for section, count in report.sections().items():
        partial = report.partial(section)
        head = ["system"] + [f"{name} (n = {partial[name]})" if name in partial else name for name in report.measures]
        rows = [
            [plain(system), *(_marked(report, section, system, name) for name in report.measures)]
            for system in report.summaries
        ]
        lines += ["", f"## {section.capitalize()} (n = {count})", "", *table_lines(head, rows)]
    for title, head, rows in (*_comparisons(report), *_analyses(report.analysis)):
        lines += ["", f"## {title}", "", *table_lines(head, rows)]
    lines += ["", "## How to read this", "", *_notes(report)]
    return "\n".join(lines) + "\n"


def _marked(report: Report, section: str, system: str, measure: str) -> str:
    row = report.summaries[system][section]
    if measure not in row:
        return "–"
    mean = compact(row[measure].mean, 3)
    best = report.is_best(section, system, measure)
    return f"**{mean}** {row[measure].bounds()}" if best else str(row[measure])


def _comparisons(report: Report) -> Iterator[tuple[str, Sequence[str], Rows]]:
    if report.comparisons:
        head = ("system", "minus", "measure", "p, Holm", "so it is", "difference", "p, bootstrap", "p, Wilcoxon",
                "p, McNemar", "Cohen’s h")  # fmt: skip
        rows = [
            [
                plain(c.system), plain(c.baseline), c.measure, p_value(c.p_holm), reading(c),
                signed_interval(c.difference), p_value(c.p), p_value(c.wilcoxon_p), p_value(c.mcnemar_p),
                "–" if c.cohens_h is None else signed(c.cohens_h, 2),
            ]
            for c in report.comparisons
        ]  # fmt: skip
        yield "Differences on the same queries", head, rows


def _analyses(analysis: Analysis) -> Iterator[tuple[str, Sequence[str], Rows]]:
    """(title, head, rows) of each analysis that was made."""
    if analysis.outcomes:
        rows = [
            [
                plain(o.baseline), plain(o.system), o.measure,
                *(str(len(ids)) for ids in (o.both, o.fixed, o.broken, o.neither)), p_value(o.p),
            ]
            for o in analysis.outcomes
        ]  # fmt: skip
        head = ("baseline", "system", "measure", "both right", "fixed", "broken", "both wrong", "p, McNemar")
        yield "Fixed and broken", head, rows
    if analysis.latencies:
        rows = [
            [plain(r.system), plain(r.stage), duration(r.p50), duration(r.p95), number(r.qps), str(r.num)]
            for r in analysis.latencies
        ]
        yield "Latency", ("system", "stage", "p50", "p95", "queries/s", "queries timed"), rows
    if analysis.quartiles:
        rows = [
            [quartile_name(quartile, value.n), plain(system), quartile.measure, str(value)]
            for quartile in analysis.quartiles
            for system, value in quartile.means.items()
        ]
        yield "By length of description", ("characters of description", "system", "measure", "mean"), rows
    yield from _pass_rates(analysis)
    yield from _inside(analysis)


def _pass_rates(analysis: Analysis) -> Iterator[tuple[str, Sequence[str], Rows]]:
    if rates := analysis.pass_rates:
        measures = list(dict.fromkeys(measure for rate in rates for measure in rate.estimates))
        rows = [
            [
                plain(rate.system), plain(rate.agent), compact(rate.without_skills, 3), compact(rate.with_gold, 3),
                *(str(rate.estimates[measure]) if measure in rate.estimates else "–" for measure in measures),
            ]
            for rate in rates
        ]  # fmt: skip
        head = ("system", "agent", "without skills", "with gold", *(f"by {measure}" for measure in measures))
        yield "Estimated pass rates of agents", head, rows


def _inside(analysis: Analysis) -> Iterator[tuple[str, Sequence[str], Rows]]:
    for model in analysis.attention:
        layers = [(str(n), layer) for n, layer in enumerate(model.layers, 1)]
        every = [*layers, ("all layers", model.overall), ("share of tokens", model.tokens)]
        rows = [[name, *(compact(value, 3) for value in shares(fields))] for name, fields in every]
        title = f"Attention by field: {plain(model.model)} (n = {model.num_pairs} pairs)"
        yield title, ("layer", *FIELDS), rows
    if features := analysis.structure:
        rows = [
            [plain(f.feature), number(f.gold), number(f.others), compact(f.effect, 2), p_value(f.p),
             feature_reading(f)]
            for f in features
        ]  # fmt: skip
        title = f"Structure of gold skills (n = {features[0].num_gold}) and others (n = {features[0].num_others})"
        yield title, ("feature", "gold", "others", "effect", "p, Holm", "gold skills have"), rows


def _notes(report: Report) -> list[str]:
    used = dict.fromkeys(name.partition("@")[0] for name in report.measures)
    family = len(report.comparisons)
    lines = [f"- {_paragraph(note)}" for note in report.notes]
    lines += [f"- {name}: {plain(MEANINGS[name])}" for name in used]
    lines += [f"- {name} is over the {n} queries that have a value of it." for name, n in report.partial("all").items()]
    if family:
        lines.append(f"- Holm’s correction is over the {family} comparisons above; the word follows it, at .05.")
    return [
        *lines,
        f"- Intervals: {RESAMPLES:,} draws of the queries with replacement (seed {report.seed}). They cover the choice "
        "of queries, not the randomness of training.",
    ]


def table_lines(head: Sequence[str], rows: Rows) -> list[str]:
    """The lines of a table; columns of numbers are set to the right."""
    columns = zip(*rows, strict=True)
    rule = ["---:" if all(cell.startswith(_FIGURES) for cell in column) else "---" for column in columns]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def _paragraph(text: str) -> str:
    """`plain`, of what stands at the beginning of a line: no list, quotation or heading begins with it."""
    shown = plain(text)
    return re.sub(r"^(\d*)([-+>=~.)])", r"\1\\\2", shown)


def plain(text: str) -> str:
    """`text` as one line of Markdown without markup."""
    text = " ".join(visible(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)
