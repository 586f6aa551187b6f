"""The files of an evaluation's report: JSON, Markdown, one HTML page, and the values of each query."""

import json
from pathlib import Path
from typing import Any

from skilltrain.evaluation.bootstrap import LEVEL, RESAMPLES
from skilltrain.evaluation.metrics import MEANINGS
from skilltrain.files import write_json, write_text
from skilltrain.report import figures
from skilltrain.report.evaluation import NUM_CASES, NUM_QUERIES, Report
from skilltrain.report.numbers import ALPHA
from skilltrain.report.page import html_page, markdown
from skilltrain.report.plots import SHARES


def write_report(report: Report, folder: Path) -> None:
    """Write metrics.json, report.md, report.html and per_query.jsonl (one row a system and query) into `folder`."""
    write_json(folder / "metrics.json", report.to_json())
    write_text(folder / "report.md", report_markdown(report))
    write_text(folder / "report.html", report_page(report))
    write_per_query(report, folder / "per_query.jsonl")


def write_per_query(report: Report, file: Path) -> None:
    """Write one row a system and query: the query's slice, and its value of each measure that it has one of."""
    rows = (
        {"system": result.name, "query_id": query_id, "slice": task.labels["kind"]}
        | {name: value for name, value in result.per_query[query_id].items() if name in report.measures}
        for result in report.results
        for query_id, task in report.tasks.items()
    )
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def report_markdown(report: Report) -> str:
    """The report as Markdown: the same numbers as the page, in tables."""
    return markdown("evaluation.md.j2", **_values(report))


def report_page(report: Report) -> str:
    """The report as one HTML page."""
    return html_page("evaluation.html.j2", ("evaluation.js",), **_values(report))


def _values(report: Report) -> dict[str, Any]:
    """What both templates ask for."""
    used = dict.fromkeys(name.partition("@")[0] for name in report.measures)
    return {
        "report": report,
        "figures": figures,
        "shares_axis": SHARES,
        "meanings": {name: MEANINGS[name] for name in used},
        "level": f"{LEVEL:.0%}",
        "resamples": RESAMPLES,
        "alpha": ALPHA,
        "limits": {"cases": NUM_CASES, "queries": NUM_QUERIES},
    }
