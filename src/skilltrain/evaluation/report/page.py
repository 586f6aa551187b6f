"""The report as one HTML page that needs nothing else: no request leaves it, and every text in it is escaped.

Skill names and queries are untrusted. Besides escaping, the page's own policy admits only its one script and its one
style sheet, each named by its hash. Without the script it loses its search box and nothing else.
"""

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files

from skilltrain.evaluation.metrics import MEANINGS
from skilltrain.evaluation.report.breakdowns import pass_rates, quartiles
from skilltrain.evaluation.report.comparisons import comparisons
from skilltrain.evaluation.report.contents import Report, ReportTexts
from skilltrain.evaluation.report.flows import flows
from skilltrain.evaluation.report.inside import attention, structure
from skilltrain.evaluation.report.marks import text
from skilltrain.evaluation.report.means import results
from skilltrain.evaluation.report.numbers import counted
from skilltrain.evaluation.report.queries import queries
from skilltrain.evaluation.report.speed import speed
from skilltrain.evaluation.statistics.bootstrap import LEVEL, RESAMPLES

_POLICY = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
_LINKS = {
    "differences": "Differences", "flows": "Fixed and broken", "speed": "Latency", "lengths": "Lengths",
    "agents": "Agents", "attention": "Attention", "structure": "Structure", "queries": "Queries",
}  # fmt: skip


def page(report: Report, texts: ReportTexts | None) -> str:
    """The whole page. Without `texts` it shows ids in place of texts and names, and nothing that needs gold skills."""
    style, script = (
        files("skilltrain.evaluation.report").joinpath(f"report.{kind}").read_text("utf-8") for kind in ("css", "js")
    )
    policy = f"{_POLICY}; style-src {_hash(style)}; script-src {_hash(script)}"
    parts = {
        "differences": comparisons(report),
        "flows": flows(report, texts),
        "speed": speed(report),
        "lengths": quartiles(report),
        "agents": pass_rates(report),
        "attention": attention(report),
        "structure": structure(report),
        "queries": queries(report, texts),
    }
    shown = {key: part for key, part in parts.items() if part}
    views = "\n".join(results(report, texts, section) for section in report.sections())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{text(report.benchmark)}: evaluation</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n{_header(report)}\n{_switch(report.sections(), shown)}\n"
        + "\n".join([views, *shown.values()])
        + f"\n{_notes(report)}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _header(report: Report) -> str:
    counts = [f"{count:,} {section}" for section, count in report.sections().items() if section != "all"]
    parts = ", ".join(counts) or f"all {next(iter(report.slices.values()))}"
    return (
        f'<header>\n<p class="kicker">Skill routing evaluation</p>\n<h1>{text(report.benchmark)}</h1>\n'
        f'<p class="headline">{text(report.headline())}</p>\n'
        f"<p>{counted(len(report.slices), 'query')} ({parts}), {counted(len(report.summaries), 'system')}. "
        f"Intervals are {LEVEL:.0%} percentile bootstrap over queries.</p>\n</header>"
    )


def _switch(sections: Mapping[str, int], parts: Mapping[str, str]) -> str:
    """Radio buttons before everything they switch: report.css does the rest, without a script. Links to the parts."""
    buttons = "".join(
        f'<input type="radio" name="section" id="show-{section}"{" checked" if section == "all" else ""}>'
        for section in sections
    )
    labels = "".join(
        f'<label for="show-{section}">{section.capitalize()} <span>{count:,}</span></label>'
        for section, count in sections.items()
    )
    switch = f'<div class="switch">{labels}</div>' if len(sections) > 1 else ""
    links = "".join(f'<a href="#{key}">{_LINKS[key]}</a>' for key in parts)
    return (
        f'{buttons}\n<nav aria-label="Queries shown, and parts of the page">{switch}'
        f'<div class="links">{links}</div></nav>'
    )


def _notes(report: Report) -> str:
    used: dict[str, list[str]] = {}
    for measure in report.measures:
        used.setdefault(measure.partition("@")[0], []).append(measure)
    partial, every = report.partial("all"), len(report.slices)
    meanings = ""
    for name, measures in used.items():
        held = partial.get(measures[0], every)
        over = f" Over the {held:,} of {counted(every, 'query')} that have a value." if held < every else ""
        meanings += f"<dt>{name}{'@k' if '@' in measures[0] else ''}</dt>"
        meanings += f"<dd>{text(MEANINGS[name])}.{over}</dd>"
    notes = "".join(f"<p>{text(note)}</p>\n" for note in report.notes)
    return (
        "<footer><h2>How to read this</h2>\n"
        f"<dl>{meanings}</dl>\n{notes}<p>Each value is computed per query, then averaged. An interval comes from "
        f"{RESAMPLES:,} draws of the queries with replacement (seed {report.seed}): it covers the choice of queries, "
        "not the randomness of training. Two intervals may overlap where the paired difference is clear: compare "
        "systems by their difference.</p></footer>"
    )
