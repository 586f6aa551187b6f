"""What the cells scored: means over seeds and queries with intervals, and which differences to the baseline count.

A query's value is its mean over the seeds; queries are then drawn with replacement, so an interval speaks of other
queries and not of other trainings. How far the seeds lie apart stands beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from skilltrain.ablation.grid import AblationConfig
from skilltrain.ablation.plan import Cell, Plan
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import RESAMPLES, Interval, compact, interval
from skilltrain.evaluation.comparison import Comparison, SystemResult, compare, holm, same_queries
from skilltrain.evaluation.metrics import parse_measures
from skilltrain.files import read_jsonl
from skilltrain.report.numbers import reading, signed_interval
from skilltrain.report.page import markdown as markdown_of
from skilltrain.runs import RECIPE_FILE
from skilltrain.version import __version__

PER_QUERY_FILE = "per_query.jsonl"
Values = dict[str, dict[str, float]]
"""query_id → measure → value."""


@dataclass(frozen=True)
class VariantScores:
    """A variant's measures: the interval over queries, and the mean of each seed.

    One that does not use the seed (`is_seeded` false) has one cell, which stands for all seeds.
    """

    variant: str
    is_seeded: bool
    means: Mapping[str, Interval]
    seed_means: Mapping[int, Mapping[str, float]]

    def seed_spread(self, measure: str) -> float | None:
        """The standard deviation of the seeds' means (n − 1); None for one seed."""
        means = [found[measure] for found in self.seed_means.values() if measure in found]
        return stdev(means) if len(means) > 1 else None

    def of_seed(self, seed: int, measure: str) -> float | None:
        """The mean over queries of one seed; None if its cell failed."""
        means = self.seed_means.get(seed) if self.is_seeded else next(iter(self.seed_means.values()))
        return None if means is None else means[measure]

    def in_words(self, measure: str) -> str:
        """The mean with its interval, and ± the deviation of the seeds."""
        if measure not in self.means:
            return "–"
        spread = self.seed_spread(measure)
        return f"{self.means[measure]}{'' if spread is None else f' ± {compact(spread, 3)}'}"


@dataclass(frozen=True)
class ResultTable:
    """One evaluation: its variants' scores, in the grid's order, and the differences to the baseline."""

    evaluation: str
    benchmark: str
    split: str | None
    num_queries: int
    measures: tuple[str, ...]
    scores: tuple[VariantScores, ...]
    comparisons: tuple[Comparison, ...]

    def seed_differences(self, comparison: Comparison) -> dict[int, float]:
        """Seed → how much the variant is above the baseline with it: does a difference hold for every training?"""
        by_name = {scores.variant: scores for scores in self.scores}
        variant, baseline = by_name[comparison.system], by_name[comparison.baseline]
        found: dict[int, float] = {}
        for seed in {**variant.seed_means, **baseline.seed_means}:
            after, before = variant.of_seed(seed, comparison.measure), baseline.of_seed(seed, comparison.measure)
            if after is not None and before is not None:
                found[seed] = after - before
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, whose keys are texts."""
        rows = [
            {
                "variant": scores.variant,
                "seeds": list(scores.seed_means),
                "metrics": {name: asdict(value) for name, value in scores.means.items()},
                "seed_means": {str(seed): means for seed, means in scores.seed_means.items()},
                "seed_sd": {name: scores.seed_spread(name) for name in scores.means},
            }
            for scores in self.scores
        ]
        differences = [
            asdict(c)
            | {"verdict": reading(c)}
            | {"seed_differences": {str(seed): value for seed, value in self.seed_differences(c).items()}}
            for c in self.comparisons
        ]
        asked = {"evaluation": self.evaluation, "benchmark": self.benchmark, "split": self.split}
        return asked | {"num_queries": self.num_queries, "variants": rows, "differences": differences}


@dataclass(frozen=True)
class Results:
    """All tables of an ablation; `failed` maps a cell to its one-line error."""

    plan: Plan
    tables: tuple[ResultTable, ...]
    failed: Mapping[tuple[str, int], str]

    @property
    def num_tests(self) -> int:
        """The family of Holm's correction: all comparisons of all tables."""
        return sum(len(table.comparisons) for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        grid = self.plan.grid
        statistics = {"resamples": RESAMPLES, "seed": grid.bootstrap_seed, "num_tests": self.num_tests}
        told = {"ablation": grid.ablation, "claim": grid.claim, "baseline": grid.baseline, "statistics": statistics}
        tables = [table.to_json() for table in self.tables]
        cells = [self._cell_json(cell) for cell in self.plan.cells]
        return {"skilltrain": __version__} | told | {"tables": tables, "cells": cells}

    def _cell_json(self, cell: Cell) -> dict[str, Any]:
        error = self.failed.get((cell.variant, cell.seed))
        recipes = {run.step: str(run.folder / RECIPE_FILE) for run in self.plan.chain(cell)}
        return {"variant": cell.variant, "seed": cell.seed, "error": error, "recipes": recipes}


def collect_results(plan: Plan, failed: Mapping[tuple[str, int], str]) -> Results:
    """The tables of all cells that did not fail; of an evaluation that no cell finished there is none."""
    done = [cell for cell in plan.cells if (cell.variant, cell.seed) not in failed]
    names = dict.fromkeys(name for cell in done for name in cell.evaluations)
    tables = [_table(plan, name, [cell for cell in done if name in cell.evaluations]) for name in names]
    adjusted = iter(holm([c.p for table in tables for c in table.comparisons]))
    corrected = [
        replace(table, comparisons=tuple(replace(c, p_holm=next(adjusted)) for c in table.comparisons))
        for table in tables
    ]
    return Results(plan, tuple(corrected), dict(failed))


def _table(plan: Plan, name: str, cells: Sequence[Cell]) -> ResultTable:
    grid, config = plan.grid, plan.runs[cells[0].evaluations[name]].config
    measures = tuple(str(measure) for measure in parse_measures(config.measures))
    systems: list[SystemResult] = []
    scores: list[VariantScores] = []
    for variant in grid.variants:
        folders: dict[Path, int] = {}  # a run that several seeds share is one training, whatever the others are
        for cell in cells:
            if cell.variant == variant:
                folders.setdefault(cell.evaluations[name], cell.seed)
        of_seed = {seed: read_values(folder, measures) for folder, seed in folders.items()}
        if of_seed:
            all_runs = {cell.evaluations[name] for cell in plan.cells if cell.variant == variant}
            systems.append(SystemResult(variant, mean_over_seeds(variant, of_seed), {}))
            scores.append(_scores(systems[-1], of_seed, measures, len(all_runs) > 1, grid.bootstrap_seed))
    query_ids = same_queries(systems)
    others = [system.name for system in systems if system.name != grid.baseline]
    pairs = [(grid.baseline, name) for name in others] if len(others) < len(systems) else []
    comparisons = [
        comparison
        for measure in grid.compare
        if (defined := _defined(systems[0], measure))
        for comparison in compare(systems, pairs, [measure], defined, seed=grid.bootstrap_seed)
    ]
    order = list(grid.variants)
    comparisons.sort(key=lambda comparison: order.index(comparison.system))
    asked = (name, " + ".join(map(str, config.benchmark)), config.split, len(query_ids), measures)
    return ResultTable(*asked, tuple(scores), tuple(comparisons))


def read_values(folder: Path, measures: Sequence[str]) -> Values:
    """The values of an evaluation's one system; a measure that is not defined for a query is left out."""
    values: Values = {}
    for number, row in read_jsonl(folder / PER_QUERY_FILE):
        if (query_id := row["query_id"]) in values:
            where = f"{folder / PER_QUERY_FILE}, line {number}"
            raise SkilltrainError(f"query '{query_id}' stands twice", where=where)
        values[query_id] = {name: row[name] for name in measures if row.get(name) is not None}
    return values


def mean_over_seeds(variant: str, of_seed: Mapping[int, Values]) -> Values:
    """Each query's mean over the seeds. Raises SkilltrainError where seeds were scored on other queries."""
    same_queries([SystemResult(f"{variant}, seed {seed}", values, {}) for seed, values in of_seed.items()])
    first = next(iter(of_seed.values()))
    return {
        query_id: {name: fmean(values[query_id][name] for values in of_seed.values()) for name in measures}
        for query_id, measures in first.items()
    }


def _defined(system: SystemResult, measure: str) -> list[str]:
    """The queries for which the measure is defined, which is the same for every system."""
    return [query_id for query_id, values in system.per_query.items() if measure in values]


def _scores(
    system: SystemResult, of_seed: Mapping[int, Values], measures: Sequence[str], is_seeded: bool, bootstrap_seed: int
) -> VariantScores:
    columns = {name: [system.per_query[query_id][name] for query_id in _defined(system, name)] for name in measures}
    columns = {name: column for name, column in columns.items() if column}
    means = {name: interval(column, seed=bootstrap_seed) for name, column in columns.items()}
    seed_means = {
        seed: {name: fmean(row[name] for row in values.values() if name in row) for name in columns}
        for seed, values in of_seed.items()
    }
    return VariantScores(system.name, is_seeded, means, seed_means)


def verdicts(results: Results) -> dict[str, dict[str, dict[str, str]]]:
    """Evaluation → variant → measure → its difference to the baseline, and what may be said of it."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for table in results.tables:
        rows = found.setdefault(table.evaluation, {})
        for c in table.comparisons:
            text = f"{c.difference.mean:+.4f} [{c.difference.low:.4f}, {c.difference.high:.4f}], {reading(c)}"
            rows.setdefault(c.system, {})[c.measure] = text
    return found


def markdown(results: Results) -> str:
    """The ablation as Markdown; names are escaped."""
    return markdown_of("ablation.md.j2", results=results, grid=results.plan.grid, recipe_file=RECIPE_FILE)


def terminal_table(grid: AblationConfig, table: ResultTable) -> Table:
    """One evaluation in the terminal: what is compared, and how it differs from the baseline."""
    title = f"{grid.ablation}, {table.evaluation}, n = {table.num_queries}; differences to {grid.baseline}"
    shown = Table(title=Text(title), title_justify="left", pad_edge=False)
    shown.add_column("variant", overflow="fold", max_width=32)
    shown.add_column("seeds", justify="right")
    for measure in grid.compare:
        shown.add_column(measure, justify="right", no_wrap=True)
        shown.add_column("difference", justify="right")
    compared = {(c.system, c.measure): f"{signed_interval(c.difference)}\n{reading(c)}" for c in table.comparisons}
    for scores in table.scores:
        cells = [Text(scores.variant), Text(str(len(scores.seed_means)))]
        for measure in grid.compare:
            cells += [Text(scores.in_words(measure)), Text(compared.get((scores.variant, measure), ""))]
        shown.add_row(*cells)
    return shown
