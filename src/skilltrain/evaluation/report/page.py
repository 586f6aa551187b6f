"""The report as one HTML page that needs nothing else: no request leaves it, and every text in it is escaped.

Skill names and queries are untrusted. Besides escaping, the page's own policy admits only its one script and its one
style sheet, each named by its hash.
"""

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from skilltrain.evaluation.metrics import MEANINGS, Measure, Relevance
from skilltrain.evaluation.statistics.bootstrap import LEVEL, RESAMPLES, compact

if TYPE_CHECKING:
    from skilltrain.evaluation.report.report import Report, ReportTexts
    from skilltrain.evaluation.results import SystemResult

NUM_COLORS = 8
NUM_TOP = 5  # names shown of each ranking
NUM_QUERIES = 500  # queries listed; a larger page is slow to search
NUM_CHARS = 2_000  # of a query's text
CURVE = (*range(1, 11), 12, 15, 20, 25, 30, 40, 50)  # cutoffs of the recall curve
_ROW = 44  # height of a system's row of an interval plot in pixels, as in report.css


def page(report: "Report", texts: "ReportTexts | None") -> str:
    """The whole page. Without `texts` it shows ids in place of texts and names, and no recall curve."""
    style, script = (
        files("skilltrain.evaluation.report").joinpath(f"report.{kind}").read_text("utf-8") for kind in _KINDS
    )
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    sections = report.sections()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{_text(report.benchmark)}: evaluation</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"{_header(report)}\n{_switch(sections)}\n"
        + "\n".join(_section(report, texts, section, count) for section, count in sections.items())
        + f"\n{_comparisons(report)}\n{_queries(report, texts)}\n{_notes(report)}\n"
        f"</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


_KINDS = ("css", "js")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _text(value: str) -> str:
    return html.escape(value.encode("utf-8", "replace").decode())


def _header(report: "Report") -> str:
    sections = report.sections()
    parts = ", ".join(f"{count} {section}" for section, count in sections.items() if section != "all")
    names = "system" if len(report.summaries) == 1 else "systems"
    return (
        f'<header>\n<p class="kicker">Skill routing evaluation</p>\n<h1>{_text(report.benchmark)}</h1>\n'
        f"<p>{sections['all']:,} queries ({parts}), {len(report.summaries)} {names}. "
        f"Intervals are {LEVEL:.0%} percentile bootstrap over queries.</p>\n</header>"
    )


def _switch(sections: Mapping[str, int]) -> str:
    """Radio buttons before everything they switch: report.css does the rest, without a script."""
    buttons = "".join(
        f'<input type="radio" name="section" id="show-{section}"{" checked" if section == "all" else ""}>'
        for section in sections
    )
    labels = "".join(
        f'<label for="show-{section}">{section.capitalize()} <span>{count:,}</span></label>'
        for section, count in sections.items()
    )
    return f'{buttons}\n<nav aria-label="Queries shown">{labels}</nav>'


def _section(report: "Report", texts: "ReportTexts | None", section: str, count: int) -> str:
    plots = "".join(_interval_plot(report, section, name) for name in report.measures)
    curve = _recall_curve(report, texts, section) if texts else ""
    return (
        f'<section class="view {section}">\n{_table(report, section, count)}\n'
        f'<div class="plots">{plots}</div>\n{curve}</section>'
    )


def _table(report: "Report", section: str, count: int) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in report.measures)
    rows = ""
    for position, (system, summary) in enumerate(report.summaries.items()):
        cells = "".join(
            f"<td{_best_class(report.is_best(section, system, name))}><b>{compact(value.mean, 3)}</b>"
            f"<small>{value.bounds()}</small></td>"
            for name, value in summary[section].items()
        )
        rows += f'<tr><th scope="row">{_swatch(position)}{_text(system)}</th>{cells}</tr>\n'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Results, {section} queries"><table>\n'
        f"<caption>Mean over {count:,} queries, {LEVEL:.0%} interval below</caption>\n"
        f'<thead><tr><th scope="col">System</th>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
    )


def _best_class(best: bool) -> str:
    return ' class="best"' if best else ""


def _swatch(position: int) -> str:
    return f'<i class="swatch c{position % NUM_COLORS}"></i>'


def _interval_plot(report: "Report", section: str, measure: str) -> str:
    """A figure with one row a system; x is the share in percent of the width, so it fits any screen undistorted."""
    height = _ROW * len(report.summaries)
    marks = "".join(
        f'<line class="grid" x1="{x}%" x2="{x}%" y1="0" y2="{height}"/>'
        f'<text x="{x}%" y="{height + 15}">{compact(x / 100, 2) if 0 < x < 100 else x // 100}</text>'
        for x in (0, 25, 50, 75, 100)
    )
    for position, rows in enumerate(report.summaries.values()):
        value, y = rows[section][measure], _ROW * position + 33
        marks += (
            f'<g class="c{position % NUM_COLORS}"><line x1="{value.low:.2%}" x2="{value.high:.2%}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{value.mean:.2%}" cy="{y}" r="4.5"/></g>'
        )
    names = "".join(
        f"<li><span>{_text(name)}</span> <b>{compact(rows[section][measure].mean, 3)}</b></li>"
        for name, rows in report.summaries.items()
    )
    said = "; ".join(f"{name} {rows[section][measure]}" for name, rows in report.summaries.items())
    return (
        f'<figure><figcaption>{measure}</figcaption><ul aria-hidden="true">{names}</ul>'
        f'<svg role="img" aria-label="{measure}: {_text(said)}" width="100%" height="{height + 20}">{marks}</svg>'
        "</figure>"
    )


def _recall_curve(report: "Report", texts: "ReportTexts", section: str) -> str:
    """Mean recall against the number of candidates kept, on a logarithmic axis up to the longest ranking."""
    lengths = (len(ranking) for result in report.results for ranking in result.rankings.values())
    longest = max(lengths, default=0)
    cutoffs = [k for k in CURVE if k <= longest]
    if len(cutoffs) < 2:
        return ""
    last = cutoffs[-1]
    query_ids = [query_id for query_id, part in report.slices.items() if section in ("all", part)]
    lines, legend = "", ""
    for position, result in enumerate(report.results):
        recall = _mean_recall(result, texts.gold, query_ids, cutoffs)
        points = " ".join(
            f"{_log_x(k, last):.2f},{100 * (1 - value):.2f}" for k, value in zip(cutoffs, recall, strict=True)
        )
        lines += f'<polyline class="c{position % NUM_COLORS}" points="{points}"/>'
        legend += f"<li>{_swatch(position)}{_text(result.name)} <b>{compact(recall[-1], 3)}</b> at {last}</li>"
    return (
        '<figure class="curve"><figcaption>Recall@k, by the number k of candidates kept</figcaption>'
        f'<ul>{legend}</ul><svg role="img" aria-label="Recall by number of candidates kept" class="axes">'
        + _curve_axes(last)
        + f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" width="100%" height="100%">{lines}</svg>'
        "</svg></figure>"
    )


def _curve_axes(last: int) -> str:
    ticks = sorted({k for k in (1, 2, 5, 10, 20, 50) if k < last} | {last})
    across = "".join(
        f'<line class="grid" x1="{_log_x(k, last):.2f}%" x2="{_log_x(k, last):.2f}%" y1="0" y2="100%"/>'
        f'<text x="{_log_x(k, last):.2f}%" y="100%" dy="17">{k}</text>'
        for k in ticks
    )
    up = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{100 - y}%" y2="{100 - y}%"/>'
        f'<text class="y" x="0" dx="-8" y="{100 - y}%" dy="4">{compact(y / 100, 2) if 0 < y < 100 else y // 100}</text>'
        for y in (0, 25, 50, 75, 100)
    )
    return across + up


def _log_x(k: int, last: int) -> float:
    return 100 * math.log(k) / math.log(last)


def _mean_recall(
    result: "SystemResult", gold: Mapping[str, frozenset[str]], query_ids: Sequence[str], cutoffs: Sequence[int]
) -> list[float]:
    measures = [Measure("Recall", k) for k in cutoffs]
    relevances = [(result.rankings.get(query_id, ()), Relevance(gold[query_id], {})) for query_id in query_ids]
    return [math.fsum(measure(*pair) for pair in relevances) / len(query_ids) for measure in measures]


def _comparisons(report: "Report") -> str:
    if not report.comparisons:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{_text(c.system)} <em>minus</em> {_text(c.baseline)}</th><td>{c.measure}</td>'
        f"<td><b>{compact(c.difference.mean, 3)}</b></td><td>{c.difference.bounds()}</td><td>{compact(c.p, 4)}</td>"
        f"<td>{_reading(c.difference.low, c.difference.high)}</td></tr>\n"
        for c in report.comparisons
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Systems", "Measure", "Difference", "Interval", "p", ""))
    return (
        "<section>\n<h2>Differences on the same queries</h2>\n"
        '<div class="scroll" tabindex="0" role="region" aria-label="Paired differences"><table class="differences">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n</section>"
    )


def _reading(low: float, high: float) -> str:
    if low > 0:
        return "above"
    return "below" if high < 0 else "not told apart"


def _queries(report: "Report", texts: "ReportTexts | None") -> str:
    """The queries on which systems differ, widest first; with one system, those on which it is not perfect."""
    spread = {query_id: _spread(report, query_id) for query_id in report.slices}
    ordered = sorted((query_id for query_id in spread if spread[query_id]), key=lambda q: (-spread[q], q))
    shown = ordered[:NUM_QUERIES]
    title = "Queries where the systems differ" if len(report.results) > 1 else "Queries with something missed"
    count = f"{len(ordered):,} of {len(report.slices):,} queries"
    if len(shown) < len(ordered):
        count += f"; the {len(shown):,} with the largest differences are listed"
    legend = " A number is the rank of the first gold skill, none if the ranking ends before it." if texts else ""
    entries = "\n".join(_query(report, texts, query_id) for query_id in shown)
    return (
        f'<section class="queries">\n<h2>{title}</h2>\n<p>{count}.{legend}</p>\n'
        '<p class="search" hidden><label for="search">Search queries and skills</label>'
        '<input type="search" id="search" autocomplete="off"> <output id="found" for="search"></output></p>\n'
        f"{entries}\n</section>"
    )


def _spread(report: "Report", query_id: str) -> float:
    columns = [[result.per_query[query_id][name] for result in report.results] for name in report.measures]
    if len(report.results) == 1:
        return sum(1 - column[0] for column in columns)
    return sum(max(column) - min(column) for column in columns)


def _query(report: "Report", texts: "ReportTexts | None", query_id: str) -> str:
    text = texts.queries[query_id] if texts else ""
    rest = f" … ({len(text):,} characters in all)" if len(text) > NUM_CHARS else ""
    gold = texts.gold[query_id] if texts else frozenset[str]()
    tops = [tuple(result.rankings.get(query_id, ())) for result in report.results]
    badges = "".join(
        f"<span>{_swatch(position)}{_first_rank(top, gold)}</span>" for position, top in enumerate(tops) if gold
    )
    columns = "".join(
        f"<div><h3>{_swatch(position)}{_text(result.name)}</h3><ol>{_names(top[:NUM_TOP], gold, texts)}</ol></div>"
        for position, (result, top) in enumerate(zip(report.results, tops, strict=True))
    )
    wanted = f"<div><h3>Gold</h3><ul>{_names(sorted(gold), gold, texts)}</ul></div>" if gold else ""
    return (
        f'<details class="query {report.slices[query_id]}"><summary><b>{_text(query_id)}</b>'
        f'<span class="lead">{_text(" ".join(text[:160].split()))}</span><span class="ranks">{badges}</span>'
        "</summary>\n"
        f'<p class="text" dir="auto">{_text(text[:NUM_CHARS] + rest)}</p>'
        f'<div class="tops">{columns}{wanted}</div></details>'
    )


def _first_rank(ranking: Iterable[str], gold: frozenset[str]) -> str:
    return next((str(rank) for rank, skill_id in enumerate(ranking, 1) if skill_id in gold), "none")


def _names(skill_ids: Iterable[str], gold: frozenset[str], texts: "ReportTexts | None") -> str:
    names = texts.skill_names if texts else {}
    return "".join(
        f'<li{" class=gold" if skill_id in gold else ""} title="{_text(skill_id)}">'
        f"<bdi>{_text(names.get(skill_id, skill_id))}</bdi></li>"
        for skill_id in skill_ids
    )


def _notes(report: "Report") -> str:
    used = dict.fromkeys(name.partition("@")[0] for name in report.measures)
    meanings = "".join(f"<dt>{name}@k</dt><dd>{_text(MEANINGS[name])}</dd>" for name in used)
    return (
        "<footer><h2>How to read this</h2>\n"
        f"<dl>{meanings}</dl>\n<p>Each value is computed per query, then averaged. An interval comes from "
        f"{RESAMPLES:,} draws of the queries with replacement (seed {report.seed}): it covers the choice of queries, "
        "not the randomness of training. Two intervals may overlap where the paired difference is clear: compare "
        "systems by their difference.</p></footer>"
    )
