"""The outcome of an evaluation: systems side by side, with intervals, as JSON, Markdown, a terminal table and HTML."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Slice
from skilltrain.evaluation.metrics import Measure
from skilltrain.evaluation.report.page import page
from skilltrain.evaluation.results import SystemResult
from skilltrain.evaluation.statistics.bootstrap import RESAMPLES, Interval, compact, intervals, paired_differences
from skilltrain.files import write_json, write_text

SECTIONS = ("all", "single", "multi")
COMPARED = ("Hit@1", "MRR@10")  # the measures by which systems are compared in pairs


@dataclass(frozen=True)
class Comparison:
    """How much `system` is above `baseline` in the mean over the same queries, with interval and two-sided p."""

    system: str
    baseline: str
    measure: str
    difference: Interval
    p: float


@dataclass(frozen=True)
class ReportTexts:
    """What the HTML page may show beyond numbers; all of it untrusted.

    query_id → text, skill_id → name, query_id → gold skill ids.
    """

    queries: Mapping[str, str]
    skill_names: Mapping[str, str]
    gold: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Report:
    """Everything a reader needs to trust a table: means, intervals, paired differences, and the values behind them.

    `summaries` maps system → section (all, single, multi; an empty section is left out) → measure → interval.
    """

    benchmark: str
    seed: int
    measures: tuple[str, ...]
    slices: Mapping[str, Slice]
    results: tuple[SystemResult, ...]
    summaries: Mapping[str, Mapping[str, Mapping[str, Interval]]]
    comparisons: tuple[Comparison, ...]

    def sections(self) -> dict[str, int]:
        """The sections that hold a query, and how many."""
        return {section: len(ids) for section in SECTIONS if (ids := _query_ids(self.slices, section))}

    def is_best(self, section: str, system: str, measure: str) -> bool:
        """Whether the system has the section's highest mean, alone or tied; nobody has where all are equal."""
        means = {name: rows[section][measure].mean for name, rows in self.summaries.items()}
        return means[system] == max(means.values()) > min(means.values())

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values, without the values of single queries."""
        systems = [
            {"name": name}
            | {
                "metrics" if section == "all" else section: {measure: asdict(value) for measure, value in row.items()}
                for section, row in rows.items()
            }
            for name, rows in self.summaries.items()
        ]
        differences = [
            {"system": c.system, "baseline": c.baseline, "measure": c.measure, **asdict(c.difference), "p": c.p}
            for c in self.comparisons
        ]
        settings = {"seed": self.seed, "resamples": RESAMPLES}
        return {"benchmark": self.benchmark, **settings, "systems": systems, "differences": differences}


def build_report(
    benchmark_name: str,
    systems: Sequence[SystemResult],
    slices: Mapping[str, Slice],
    measures: Sequence[Measure],
    seed: int,
) -> Report:
    """The systems' means with 95% intervals, for all queries and each slice, and the differences between systems.

    `slices` maps every query of the benchmark to single or multi. Each system is compared with the first and with
    the one before it. Raises SkilltrainError where a system does not hold exactly these queries and measures.
    """
    names = tuple(str(measure) for measure in measures)
    _check_systems(systems, slices, names)
    summaries: dict[str, dict[str, dict[str, Interval]]] = {system.name: {} for system in systems}
    for section in SECTIONS:
        if query_ids := _query_ids(slices, section):
            values = [_values(system, query_ids, names) for system in systems]
            row = iter(intervals(np.concatenate(values, axis=1), seed=seed))
            for system in systems:
                summaries[system.name][section] = {name: next(row) for name in names}
    return Report(
        benchmark=benchmark_name,
        seed=seed,
        measures=names,
        slices=dict(slices),
        results=tuple(systems),
        summaries=summaries,
        comparisons=_comparisons(systems, list(slices), [name for name in names if name in COMPARED], seed),
    )


def _comparisons(
    systems: Sequence[SystemResult], query_ids: Sequence[str], names: Sequence[str], seed: int
) -> tuple[Comparison, ...]:
    with_first = [(systems[0], system) for system in systems[1:]]
    pairs = list({(b.name, s.name): (b, s) for b, s in [*with_first, *pairwise(systems)]}.values())
    if not pairs or not names:
        return ()
    values = {system.name: _values(system, query_ids, names) for system in systems}
    columns = np.concatenate([values[system.name] - values[baseline.name] for baseline, system in pairs], axis=1)
    found = iter(paired_differences(columns, seed=seed))
    return tuple(
        Comparison(system.name, baseline.name, name, difference.interval, difference.p)
        for baseline, system in pairs
        for name, difference in ((name, next(found)) for name in names)
    )


def _query_ids(slices: Mapping[str, Slice], section: str) -> list[str]:
    return [query_id for query_id, part in slices.items() if section in ("all", part)]


def _values(system: SystemResult, query_ids: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """float64 [query, measure]."""
    return np.array([[system.per_query[query_id][name] for name in names] for query_id in query_ids])


def _check_systems(systems: Sequence[SystemResult], slices: Mapping[str, Slice], names: Sequence[str]) -> None:
    if not systems or not slices or not names:
        raise SkilltrainError("a report needs at least one system, one query and one measure")
    if len(set(names)) < len(names):
        raise SkilltrainError(f"a measure is named twice: {', '.join(names)}")
    if repeated := [s.name for i, s in enumerate(systems) if s.name in {other.name for other in systems[:i]}]:
        raise SkilltrainError(f"two systems are named '{repeated[0]}'", fix="give each system a name of its own")
    for system in systems:
        if odd := sorted(system.per_query.keys() ^ slices.keys()):
            raise SkilltrainError(
                f"its queries are not the benchmark's: {len(odd)} stand on one side only, first '{odd[0]}'",
                where=f"system {system.name}",
            )
        for query_id, values in system.per_query.items():
            if without := [name for name in names if name not in values]:
                raise SkilltrainError(f"query {query_id} has no value of {without[0]}", where=f"system {system.name}")


def terminal_table(report: Report) -> Table:
    """Systems as rows, measures as columns, one block a section; the best mean of a column stands out.

    The interval stands below its mean, so that seven measures fit 120 columns.
    """
    table = Table(title=Text(f"{report.benchmark}, 95% bootstrap intervals"), title_justify="left", pad_edge=False)
    table.add_column("system", overflow="fold", max_width=28)
    for name in report.measures:
        table.add_column(name.replace("Recall@", "R@").replace("Precision@", "P@"), justify="right", no_wrap=True)
    for section, count in report.sections().items():
        table.add_section()
        table.add_row(Text(f"{section}, n = {count}", style="italic dim"))
        for system in report.summaries:
            row = report.summaries[system][section]
            table.add_row(Text(system), *(_cell(row[name], report.is_best(section, system, name)) for name in row))
    return table


def _cell(value: Interval, best: bool) -> Text:
    mean = Text(compact(value.mean, 3), style="bold" if best else "")
    return mean.append(f"\n{value.bounds()}", style="not bold dim")


def markdown_table(report: Report) -> str:
    """The report as Markdown: one table a section, then the paired differences; names are escaped."""
    lines = [f"# {_plain(report.benchmark)}", "", "Means with 95% bootstrap intervals; the best mean is bold."]
    for section, count in report.sections().items():
        rows = [
            [_plain(system), *(_marked(report, section, system, name) for name in report.measures)]
            for system in report.summaries
        ]
        lines += ["", f"## {section.capitalize()} (n = {count})", "", *_grid(["system", *report.measures], rows)]
    if report.comparisons:
        rows = [
            [_plain(c.system), _plain(c.baseline), c.measure, compact(c.difference.mean, 3), c.difference.bounds(),
             compact(c.p, 4)]
            for c in report.comparisons
        ]  # fmt: skip
        head = ["system", "minus", "measure", "difference", "95% interval", "p"]
        lines += ["", "## Differences on the same queries", "", *_grid(head, rows)]
    return "\n".join(lines) + "\n"


def _marked(report: Report, section: str, system: str, measure: str) -> str:
    value = report.summaries[system][section][measure]
    mean = compact(value.mean, 3)
    return f"**{mean}** {value.bounds()}" if report.is_best(section, system, measure) else str(value)


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def _plain(text: str) -> str:
    """`text` as one line of Markdown without markup."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)


def write_report(report: Report, folder: Path, texts: ReportTexts | None) -> None:
    """Write metrics.json, report.md, report.html and per_query.jsonl (one row a system and query) into `folder`.

    Without `texts` the page shows query and skill ids in place of texts and names, and no recall curve.
    """
    write_json(folder / "metrics.json", report.to_json())
    write_text(folder / "report.md", markdown_table(report))
    write_text(folder / "report.html", page(report, texts))
    rows = (
        {"system": system.name, "query_id": query_id, "slice": part}
        | {name: system.per_query[query_id][name] for name in report.measures}
        for system in report.results
        for query_id, part in report.slices.items()
    )
    write_text(folder / "per_query.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
