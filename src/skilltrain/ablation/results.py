"""What the cells scored: means over seeds and queries with intervals, and which differences to the baseline count.

A query's value is its mean over the seeds; queries are then drawn with replacement, so an interval speaks of other
queries and not of other trainings. How far the seeds lie apart stands beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from skilltrain import __version__
from skilltrain.ablation.plan import Cell, Plan
from skilltrain.evaluation.bootstrap import LEVEL, RESAMPLES, Interval, compact, interval
from skilltrain.evaluation.comparison import Comparison, SystemResult, compare, holm, same_queries
from skilltrain.files import read_jsonl
from skilltrain.report.page import html_page
from skilltrain.report.page import markdown as markdown_of
from skilltrain.report.plots import SHARES, axis_around
from skilltrain.runs import RECIPE_FILE

_SEED = 0  # of the bootstrap
Values = dict[str, dict[str, float]]
"""query_id → measure → value."""


@dataclass(frozen=True)
class VariantScores:
    """A variant's measures: the interval over queries, the mean of each seed, and the deviation (n − 1) of these.

    A variant that does not use the seed has one training, which stands for all seeds, and no deviation.
    """

    variant: str
    metrics: Mapping[str, Interval]
    seed_means: Mapping[int, Mapping[str, float]]
    seed_sd: Mapping[str, float | None]

    def in_words(self, measure: str) -> str:
        """The mean with its interval, and ± the deviation of the seeds."""
        if measure not in self.metrics:
            return "–"
        spread = self.seed_sd[measure]
        return f"{self.metrics[measure]}{'' if spread is None else f' ± {compact(spread, 3)}'}"


@dataclass(frozen=True)
class ResultTable:
    """One evaluation: its variants' scores, in the grid's order, and the differences to the baseline."""

    evaluation: str
    benchmark: str
    split: str | None
    num_queries: int
    measures: tuple[str, ...]
    variants: tuple[VariantScores, ...]
    differences: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, with a verdict on each difference."""
        verdicts = [asdict(comparison) | {"verdict": comparison.reading} for comparison in self.differences]
        return asdict(self) | {"differences": verdicts}


@dataclass(frozen=True)
class Results:
    """All tables of an ablation; `failed` maps a cell to its one-line error."""

    plan: Plan
    tables: tuple[ResultTable, ...]
    failed: Mapping[tuple[str, int], str]

    @property
    def num_tests(self) -> int:
        """The family of Holm's correction: all comparisons of all tables."""
        return sum(len(table.differences) for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        grid = self.plan.grid
        cells = [
            {"variant": cell.variant, "seed": cell.seed, "error": self.failed.get((cell.variant, cell.seed))}
            | {"recipes": {run.step: str(run.folder / RECIPE_FILE) for run in cell.runs}}
            for cell in self.plan.cells
        ]
        return {
            "skilltrain": __version__, "ablation": grid.ablation, "claim": grid.claim, "baseline": grid.baseline,
            "statistics": {"resamples": RESAMPLES, "seed": _SEED, "num_tests": self.num_tests},
            "tables": [table.to_json() for table in self.tables], "cells": cells,
        }  # fmt: skip

    def markdown(self) -> str:
        """The ablation as Markdown; names are escaped."""
        return markdown_of("ablation.md.j2", results=self, grid=self.plan.grid, recipe_file=RECIPE_FILE)

    def page(self) -> str:
        """The ablation as one HTML page."""
        differences = [c.difference for table in self.tables for c in table.differences]
        values = {"results": self, "grid": self.plan.grid, "recipe_file": RECIPE_FILE, "shares": SHARES}
        axis = axis_around(0, [end for value in differences for end in (value.low, value.high)] or [0])
        return html_page("ablation.html.j2", (), **values, axis=axis, level=f"{LEVEL:.0%}", version=__version__)


def collect_results(plan: Plan, failed: Mapping[tuple[str, int], str]) -> Results:
    """The tables of all cells that did not fail; none where all did."""
    done = [cell for cell in plan.cells if (cell.variant, cell.seed) not in failed]
    tables = [_table(plan, name, done) for name in (done[0].evaluations if done else ())]
    adjusted = iter(holm([c.p for table in tables for c in table.differences]))
    corrected = [
        replace(table, differences=tuple(replace(c, p_holm=next(adjusted)) for c in table.differences))
        for table in tables
    ]
    return Results(plan, tuple(corrected), failed)


def _table(plan: Plan, name: str, cells: Sequence[Cell]) -> ResultTable:
    grid, config = plan.grid, plan.runs[cells[0].evaluations[name]].config
    measures = tuple(str(measure) for measure in config.scored)
    systems: list[SystemResult] = []
    variants: list[VariantScores] = []
    for variant in grid.variants:
        folders: dict[Path, int] = {}  # a run that several seeds share is one training
        for cell in cells:
            if cell.variant == variant:
                folders.setdefault(cell.evaluations[name], cell.seed)
        if folders:
            of_seed = {seed: _read_values(folder, measures) for folder, seed in folders.items()}
            systems.append(SystemResult(variant, _mean(of_seed.values()), {}))
            variants.append(_scores(systems[-1], of_seed, measures))
    others = [system.name for system in systems if system.name != grid.baseline]
    pairs = [(grid.baseline, other) for other in others] if len(others) < len(systems) else []
    differences = [
        difference
        for measure in grid.compare
        if (defined := [q for q, row in systems[0].per_query.items() if measure in row])
        for difference in compare(systems, pairs, [measure], defined, seed=_SEED)
    ]
    differences.sort(key=lambda difference: others.index(difference.system))
    asked = (name, " + ".join(map(str, config.benchmark)), config.split, len(same_queries(systems)), measures)
    return ResultTable(*asked, tuple(variants), tuple(differences))


def _read_values(folder: Path, measures: Sequence[str]) -> Values:
    """The values of an evaluation's one system; a measure that is not defined for a query is left out."""
    return {
        row["query_id"]: {name: row[name] for name in measures if row.get(name) is not None}
        for _, row in read_jsonl(folder / "per_query.jsonl")
    }


def _mean(of_seed: Iterable[Values]) -> Values:
    """Each query's mean over the seeds."""
    first, *_ = runs = [*of_seed]
    return {q: {name: fmean(values[q][name] for values in runs) for name in row} for q, row in first.items()}


def _scores(system: SystemResult, of_seed: Mapping[int, Values], measures: Sequence[str]) -> VariantScores:
    columns = {name: [row[name] for row in system.per_query.values() if name in row] for name in measures}
    columns = {name: column for name, column in columns.items() if column}
    means = {
        seed: {name: fmean(row[name] for row in values.values() if name in row) for name in columns}
        for seed, values in of_seed.items()
    }
    spread = {name: stdev(row[name] for row in means.values()) if len(means) > 1 else None for name in columns}
    intervals = {name: interval(column, seed=_SEED) for name, column in columns.items()}
    return VariantScores(system.name, intervals, means, spread)
