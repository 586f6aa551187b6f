"""The command `skilltrain ablate`: a grid of variants and seeds, run to its end however often it is stopped, compared.

A query's value is its mean over the seeds, so an interval speaks of other queries and not of other trainings. How far
the seeds lie apart stands beside it.
"""

import gc
import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic_core import to_jsonable_python

from skilltrain.ablation.grid import Cell, Plan, StepRun, make_plan
from skilltrain.errors import SkilltrainError, StoppedError
from skilltrain.evaluation.bootstrap import LEVEL, RESAMPLES, SEED
from skilltrain.evaluation.comparison import Comparison, SystemResult, compare, holm, same_queries
from skilltrain.evaluation.slices import Row, means_of
from skilltrain.files import read_jsonl, write_json, write_text
from skilltrain.report.page import SHARES, axis_around, ends_of, html_page
from skilltrain.report.page import markdown as markdown_of
from skilltrain.runs import CHECKPOINTS, RECIPE_FILE, run_state
from skilltrain.stages import run_recipe
from skilltrain.terminal import launched_ranks, progress, say
from skilltrain.version import __version__

Scores = dict[str, float]
"""Measure → value of a query."""
Failed = Mapping[tuple[str, int], str]
"""(variant, seed) → the one-line error of its cell."""


@dataclass(frozen=True)
class Results:
    """The tables of an ablation, one an evaluation (`_table`), and the cells that failed."""

    plan: Plan
    tables: Sequence[Row]
    failed: Failed

    @property
    def num_tests(self) -> int:
        """The family of Holm's correction: all comparisons of all tables."""
        return sum(len(table["differences"]) for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, with a verdict on each difference."""
        cells = [
            {
                "variant": cell.variant,
                "seed": cell.seed,
                "error": self.failed.get((cell.variant, cell.seed)),
                "recipes": {run.step: str(run.folder / RECIPE_FILE) for run in cell.runs},
            }
            for cell in self.plan.cells
        ]
        tables = [
            table
            | {"differences": [asdict(c) | {"verdict": c.reading} for c in table["differences"]]}
            for table in self.tables
        ]
        about = self.plan.grid.model_dump(include={"ablation", "claim", "baseline"})
        statistics = {"resamples": RESAMPLES, "seed": SEED, "num_tests": self.num_tests}
        found = {
            "skilltrain": __version__,
            **about,
            "statistics": statistics,
            "tables": tables,
            "cells": cells,
        }
        return to_jsonable_python(found)

    def markdown(self) -> str:
        """The ablation as Markdown; names are escaped."""
        return markdown_of("ablation", results=self, grid=self.plan.grid, recipe_file=RECIPE_FILE)

    def page(self) -> str:
        differences = [c.difference for table in self.tables for c in table["differences"]]
        values = {
            "results": self,
            "grid": self.plan.grid,
            "recipe_file": RECIPE_FILE,
            "shares": SHARES,
        }
        axis = axis_around(0, ends_of(differences) or [0])
        return html_page("ablation", **values, axis=axis, level=f"{LEVEL:.0%}", version=__version__)


def plan_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What `run_ablation` would do, for `--dry-run`; nothing is written. Raises SkilltrainError as it does."""
    plan = make_plan(file, overrides)
    for cell in plan.cells:
        say(
            f"{cell}: {' → '.join(f'{run.folder.name} ({run_state(run.folder)})' for run in cell.runs)}"
        )
    missing = {run.folder for cell in plan.cells for run in cell.missing()}
    return {
        "num_cells": len(plan.cells),
        "num_runs": len(plan.runs),
        "num_runs_missing": len(missing),
    }


def run_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run all cells of the grid in `file`, and write ablation.json, ablation.md and ablation.html.

    Finished runs are left as they are; a training that was stopped goes on from its newest checkpoint. A cell that
    fails is noted and the others go on; SkilltrainError is raised at the end, when the tables are written. It is
    raised before any work for a fault in the file.
    """
    if launched_ranks() > 1:
        raise SkilltrainError(
            "an ablation runs in one process", where=file, fix="leave accelerate launch out"
        )
    plan = make_plan(file, overrides)
    failed, out = _run_cells(plan), plan.grid.out
    results = collect_results(plan, failed)
    write_json(out / "ablation.json", results.to_json())
    write_text(out / "ablation.md", results.markdown())
    write_text(out / "ablation.html", results.page())
    say(results.markdown())
    if failed:
        (variant, seed), error = next(iter(failed.items()))
        what = f"{len(failed)} of {len(plan.cells)} cells failed, first {variant}, seed {seed}: {error}"
        raise SkilltrainError(what, where=file, fix="the same command tries them again")
    return {"out": str(out), "num_cells": len(plan.cells)}


def _run_cells(plan: Plan) -> Failed:
    """Run what is missing; the cells that failed. A failed run is tried once."""
    errors: dict[Path, str] = {}
    failed: dict[tuple[str, int], str] = {}
    with progress("cells", len(plan.cells)) as show:
        for number, cell in enumerate(plan.cells, 1):
            for run in cell.missing():
                if run.folder not in errors:
                    errors[run.folder] = _run_step(run)
                if errors[run.folder]:
                    failed[cell.variant, cell.seed] = errors[run.folder]
                    say(f"cell ({cell}) failed: {errors[run.folder]}")
                    break
            show(number, f"cell ({cell})")
    return failed


def _run_step(run: StepRun) -> str:
    """Run a step to its end, a training from its newest checkpoint; the one-line error if it fails."""
    import torch
    from accelerate.state import AcceleratorState

    say(f"{run.step}: {run.folder}")
    try:
        if run_state(run.folder) == "to run":
            shutil.rmtree(
                run.folder, ignore_errors=True
            )  # a training that was killed before it had a record
        run_recipe(run.config, resume=None)
    except StoppedError as error:
        fix = "run the same command to go on"
        raise StoppedError(error.what, where=run.folder, fix=fix, number=error.number) from error
    except SkilltrainError as error:
        return f"step {run.step}: {error}"
    except Exception as error:
        say(traceback.format_exc())
        return f"step {run.step}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:  # memory is given back, and the next training of this process sets accelerate up anew
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)  # three times the model's size
    return ""


def collect_results(plan: Plan, failed: Failed) -> Results:
    """The tables of all cells that did not fail; none where all did."""
    done = [cell for cell in plan.cells if (cell.variant, cell.seed) not in failed]
    tables = [_table(plan, name, done) for name in (done[0].evaluations if done else ())]
    adjusted = iter(holm([c.p for table in tables for c in table["differences"]]))
    for table in tables:
        table["differences"] = [replace(c, p_holm=next(adjusted)) for c in table["differences"]]
    return Results(plan, tables, failed)


def _table(plan: Plan, name: str, cells: Sequence[Cell]) -> Row:
    """What the cells' evaluations called `name` say: the scores of each variant, and the differences to the baseline.

    `metrics` are intervals over queries, `seed_means` the means of each seed, `seed_sd` their deviation (n − 1): none
    for a variant that does not use the seed, and so has one training.
    """
    grid, config = plan.grid, plan.runs[cells[0].evaluations[name]].config
    measures = [str(measure) for measure in config.scored]
    folders: dict[str, dict[Path, int]] = {}
    for cell in cells:  # a run that several seeds share is one training
        folders.setdefault(cell.variant, {}).setdefault(cell.evaluations[name], cell.seed)
    values = {
        variant: {seed: _values(folder, measures) for folder, seed in folders[variant].items()}
        for variant in grid.variants
        if variant in folders
    }
    systems: list[SystemResult] = []
    for variant, of_seed in values.items():
        every = [*of_seed.values()]
        mean = {
            q: {m: fmean(rows[q][m] for rows in every) for m in row} for q, row in every[0].items()
        }
        systems.append(SystemResult(variant, mean, {}))
    query_ids = same_queries(systems)
    means = means_of(systems, query_ids, measures)
    variants: list[Row] = []
    for variant, of_seed in values.items():
        metrics = means[variant]
        each = {
            seed: {m: fmean(row[m] for row in rows.values() if m in row) for m in metrics}
            for seed, rows in of_seed.items()
        }
        spread = {
            m: stdev(row[m] for row in each.values()) if len(each) > 1 else None for m in metrics
        }
        variants.append(
            {"variant": variant, "metrics": metrics, "seed_means": each, "seed_sd": spread}
        )
    differences: list[Comparison] = []
    for pair in [
        (grid.baseline, other)
        for other in values
        if other != grid.baseline and grid.baseline in values
    ]:
        for measure in grid.compare:
            if defined := [
                query_id for query_id in query_ids if measure in systems[0].per_query[query_id]
            ]:
                differences += compare(systems, [pair], [measure], defined)
    benchmarks = [config.benchmark] if isinstance(config.benchmark, Path) else config.benchmark
    about: Row = {
        "evaluation": name,
        "benchmark": " + ".join(map(str, benchmarks)),
        "split": config.split,
    }
    about |= {"num_queries": len(query_ids), "measures": measures}
    return about | {"variants": variants, "differences": differences}


def _values(folder: Path, measures: Sequence[str]) -> dict[str, Scores]:
    """query_id → its values in an evaluation."""
    rows = (row for _, row in read_jsonl(folder / "per_query.jsonl"))
    return {
        row["query_id"]: {name: row[name] for name in measures if row.get(name) is not None}
        for row in rows
    }
