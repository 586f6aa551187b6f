"""The outcome of an evaluation: systems side by side, with intervals, as JSON, Markdown, a terminal table and HTML."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.analysis import Analysis
from skilltrain.evaluation.benchmarks.benchmark import Slice
from skilltrain.evaluation.metrics import Measure
from skilltrain.evaluation.report.contents import SECTIONS, Report, ReportTexts
from skilltrain.evaluation.report.markdown import markdown_table
from skilltrain.evaluation.report.page import page
from skilltrain.evaluation.report.terminal_table import terminal_table
from skilltrain.evaluation.results import SystemResult, values_of
from skilltrain.evaluation.statistics.bootstrap import Interval, intervals
from skilltrain.evaluation.statistics.comparison import compare
from skilltrain.files import write_json, write_text

__all__ = ["Report", "ReportTexts", "build_report", "terminal_table", "write_per_query", "write_report"]
NOTHING = Analysis()
COMPARED = ("Hit@1", "MRR@10")  # the measures by which systems are compared in pairs


def build_report(
    benchmark_name: str,
    systems: Sequence[SystemResult],
    slices: Mapping[str, Slice],
    measures: Sequence[Measure],
    seed: int,
    analysis: Analysis = NOTHING,
    notes: Sequence[str] = (),
) -> Report:
    """The systems' means with 95% intervals, for all queries and each slice, and the differences between systems.

    `slices` maps every query of the benchmark to single or multi. Each system is compared with the first and with
    the one before it, by Hit@1 and MRR@10 (by the first measure, where neither was asked for). A measure may be
    undefined for a query: then it is so in every system, and means and differences run over the other queries.
    `notes` are sentences that a reader of the figures must know.
    Raises SkilltrainError where a system does not hold exactly these queries, or a measure where another does.
    """
    names = tuple(str(measure) for measure in measures)
    held = _held(systems, slices, names)
    summaries = {system.name: {} for system in systems}
    for section in SECTIONS:
        query_ids = [query_id for query_id, part in slices.items() if section in ("all", part)]
        if query_ids:
            for system, row in zip(systems, _means(systems, query_ids, held, seed), strict=True):
                summaries[system.name][section] = row
    pairs = [(systems[0], system) for system in systems[1:]]
    pairs = list(dict.fromkeys((b.name, s.name) for b, s in [*pairs, *pairwise(systems)]))
    compared = [name for name in names if name in COMPARED] or [names[0]]
    together = [query_id for query_id in slices if all(query_id in held[name] for name in compared)]
    return Report(
        benchmark=benchmark_name,
        seed=seed,
        measures=names,
        slices=dict(slices),
        results=tuple(systems),
        summaries=summaries,
        comparisons=compare(systems, pairs, compared, together, seed=seed) if together else (),
        analysis=_checked(analysis, systems, slices),
        notes=tuple(notes),
    )


def _means(
    systems: Sequence[SystemResult], query_ids: Sequence[str], held: Mapping[str, frozenset[str]], seed: int
) -> list[dict[str, Interval]]:
    """Measure → interval for each system. Measures of the same queries share draws; one of no query is left out."""
    together: dict[tuple[str, ...], list[str]] = {}
    for name, known in held.items():
        if having := tuple(query_id for query_id in query_ids if query_id in known):
            together.setdefault(having, []).append(name)
    found: list[dict[str, Interval]] = [{} for _ in systems]
    for having, names in together.items():
        columns = intervals(np.concatenate([values_of(s, having, names) for s in systems], axis=1), seed=seed)
        for place, value in enumerate(columns):
            found[place // len(names)][names[place % len(names)]] = value
    return [{name: row[name] for name in held if name in row} for row in found]


def _held(
    systems: Sequence[SystemResult], slices: Mapping[str, Slice], names: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Measure → the queries that have a value of it, the same in every system."""
    if not systems or not slices or not names:
        raise SkilltrainError("a report needs at least one system, one query and one measure")
    if len(set(names)) < len(names):
        raise SkilltrainError(f"a measure is named twice: {', '.join(names)}")
    if repeated := [s.name for i, s in enumerate(systems) if s.name in {other.name for other in systems[:i]}]:
        raise SkilltrainError(f"two systems are named '{repeated[0]}'", fix="give each system a name of its own")
    held = {
        name: frozenset(query_id for query_id, values in systems[0].per_query.items() if name in values)
        for name in names
    }
    for system in systems:
        if odd := sorted(system.per_query.keys() ^ slices.keys()):
            raise SkilltrainError(
                f"its queries are not the benchmark's: {len(odd)} stand on one side only, first '{odd[0]}'",
                where=f"system {system.name}",
            )
        for query_id, values in system.per_query.items():
            for name in names:
                if (name in values) != (query_id in held[name]):
                    one, other = (system, systems[0]) if name not in values else (systems[0], system)
                    raise SkilltrainError(
                        f"query {query_id} has no value of {name}, but has one in {other.name}",
                        where=f"system {one.name}",
                    )
    return held


def _checked(analysis: Analysis, systems: Sequence[SystemResult], slices: Mapping[str, Slice]) -> Analysis:
    """The analysis, if the outcomes that it lists by query are of these systems and queries."""
    names = {system.name for system in systems}
    for outcome in analysis.outcomes:
        if unknown := sorted({outcome.baseline, outcome.system} - names):
            raise SkilltrainError(f"the analysis is of a system '{unknown[0]}' that the report does not hold")
        listed = {*outcome.both, *outcome.fixed, *outcome.broken, *outcome.neither}
        if unknown := sorted(listed - slices.keys()):
            raise SkilltrainError(f"the analysis is of a query '{unknown[0]}' that the report does not hold")
    return analysis


def write_report(report: Report, folder: Path, texts: ReportTexts | None) -> None:
    """Write metrics.json, report.md, report.html and per_query.jsonl (one row a system and query) into `folder`.

    Without `texts` the page shows query and skill ids in place of texts and names, and nothing that needs gold skills.
    """
    write_json(folder / "metrics.json", report.to_json())
    write_text(folder / "report.md", markdown_table(report))
    write_text(folder / "report.html", page(report, texts))
    write_per_query(report, folder / "per_query.jsonl")


def write_per_query(report: Report, file: Path) -> None:
    """Write one row a system and query: the query's slice, and its value of each measure that it has one of."""
    rows = (
        {"system": system.name, "query_id": query_id, "slice": part}
        | {name: value for name, value in system.per_query[query_id].items() if name in report.measures}
        for system in report.results
        for query_id, part in report.slices.items()
    )
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
