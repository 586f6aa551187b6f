"""The command `skilltrain ablate`: run variants with several seeds, and compare the variants.

A query's value is its mean over the seeds. An interval therefore covers the choice of queries, and
the standard deviation beside it the randomness of training.
"""

import copy
import gc
import itertools
import json
import re
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import to_jsonable_python

from skilltrain.config import Config, Seed, load_recipe, set_value, validate
from skilltrain.errors import SkilltrainError, StoppedError
from skilltrain.evaluation.page import SHARES, axis_around, ends_of, html_page, markdown
from skilltrain.files import read_jsonl, write_json, write_text
from skilltrain.metrics.comparison import (
    MAX_EXACT,
    SystemResult,
    compare,
    shared_query_ids,
    with_holm,
)
from skilltrain.metrics.slices import Row, means_of
from skilltrain.provenance import plugin_fingerprints
from skilltrain.runs import (
    CHECKPOINTS,
    RECIPE_FILE,
    check_inputs,
    run_stage,
    run_state,
    what_matters,
)
from skilltrain.stage import parse_recipe
from skilltrain.terminal import launched_ranks, progress, say
from skilltrain.version import __version__

EVALUATIONS = ("evaluate", "plans")  # stages that score queries, each with a per_query.jsonl
_SEED = "seed"
_StepName = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_-]*$")]
_REFERENCE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")  # {{ or }}, a plain brace, or {NAME}
Recipe = dict[str, Any]
Scores = dict[str, dict[str, float]]
"""query_id → measure → value."""


class AblationConfig(Config):
    """A grid: every variant of a chain of stages with every seed, scored on the same queries."""

    ablation: str = Field(min_length=1, description="title of the tables")
    claim: str = Field(min_length=1, description="what is tested, in one sentence")
    baseline: str = Field(description="the variant that the others are compared with")
    steps: dict[_StepName, Recipe] = Field(
        min_length=1,
        description="name: recipe of a stage, without out; '{NAME}' in a text is the folder of "
        "another step, '{seed}' the seed, {{ }} plain braces. An evaluation ranks with one system",
    )
    variants: dict[str, dict[str, Any] | None] = Field(
        min_length=2,
        description="name: what differs from `steps`, 'step.key.key': value; list items by number",
    )
    seeds: tuple[Seed, ...] = Field(
        default=(1, 2, 3), min_length=1, description="one cell for each variant and seed"
    )
    compare: tuple[str, ...] = Field(
        default=("Hit@1", "MRR@10"), min_length=1, description="measures to compare variants by"
    )
    runs: Path | None = Field(
        default=None, description="folder of the runs, which grids may share; null: OUT/steps"
    )
    out: Path = Field(description="folder to write: ablation.json, ablation.md, ablation.html")

    @model_validator(mode="after")
    def _consistent(self) -> "AblationConfig":
        if self.baseline not in self.variants:
            names = ", ".join(self.variants)
            raise ValueError(f"baseline: no variant '{self.baseline}'; variants: {names}")
        return self


@dataclass(frozen=True)
class Cell:
    """A variant with a seed.

    Attributes:
        runs: Settings of each step by its name, in the order in which they run.
    """

    variant: str
    seed: int
    runs: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def evaluations(self) -> dict[str, Path]:
        """Folders of the evaluations by step."""
        return {step: run.out for step, run in self.runs.items() if run.stage in EVALUATIONS}


def read_grid(file: Path, overrides: Sequence[str]) -> tuple[AblationConfig, list[Cell]]:
    """Read a grid and resolve the settings of all its cells, without writing anything.

    A variant that does not use the seed has one cell. Seeds are the outer loop, so that an ablation
    that is stopped early has whole seeds.

    Raises:
        SkilltrainError: For any fault that can be known before work begins.
    """
    grid = validate(AblationConfig, load_recipe(file, overrides), file)
    cells: list[Cell] = []
    for seed, variant in itertools.product(grid.seeds, grid.variants):
        cell = Cell(variant, seed, _resolve_runs(grid, variant, seed))
        # Without the seed, the evaluations are those of an earlier cell.
        if all(
            (other.variant, other.evaluations) != (variant, cell.evaluations) for other in cells
        ):
            cells.append(cell)
    _check_evaluations(grid, cells)
    return grid, cells


def _resolve_runs(grid: AblationConfig, variant: str, seed: int) -> dict[str, Any]:
    """Resolve the settings of a cell's runs by step, each run after those that it reads.

    Only steps that lead to an evaluation run. The name of a run's folder holds a hash of its
    settings, so that cells with equal settings share the run.
    """
    recipes = _variant_recipes(grid, variant)
    runs_folder = grid.runs or grid.out / "steps"
    runs: dict[str, Any] = {}
    resolved: dict[str, Any] = {} if _SEED in recipes else {_SEED: seed}

    def resolve(name: str) -> Any:
        """Return the seed or a step's folder. A step that is not in `runs` is added."""
        where = f"step '{name}' of variant '{variant}'"
        if name not in recipes and name not in resolved:
            fix = f"steps: {', '.join(recipes)}; plain braces are written {{{{ }}}}"
            raise SkilltrainError(
                "invalid-ablation",
                f"'{{{name}}}' is no step",
                where=f"variant '{variant}'",
                fix=fix,
            )
        if name not in resolved:
            resolved[name] = None  # until the steps that it reads are resolved
            recipe = _fill(recipes[name], resolve)
            config = parse_recipe(recipe | {"out": str(runs_folder / name)}, where)
            # The folders of earlier steps need not exist yet.
            check_inputs(config, pending=[run.out for run in runs.values()])
            identity = what_matters({"recipe": config.model_dump(mode="json")})
            identity["plugins"] = plugin_fingerprints(config)
            digest = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
            resolved[name] = runs_folder / f"{name}-{digest[:12]}"
            runs[name] = config.model_copy(update={"out": resolved[name]})
        elif resolved[name] is None:
            raise SkilltrainError(
                "invalid-ablation", "needs a step that needs this one", where=where
            )
        return resolved[name]

    for name, recipe in recipes.items():
        if recipe["stage"] in EVALUATIONS:
            resolve(name)
    if not runs:
        problem = f"has no step of stage {' or '.join(EVALUATIONS)}"
        raise SkilltrainError("invalid-ablation", problem, where=f"variant '{variant}'")
    return runs


def _variant_recipes(grid: AblationConfig, variant: str) -> dict[str, Recipe]:
    """Return the grid's steps with the changes of a variant."""
    recipes = copy.deepcopy(grid.steps)
    for key, value in (grid.variants[variant] or {}).items():
        set_value(recipes, key, copy.deepcopy(value), f"variant '{variant}', {key}")
    for name, recipe in recipes.items():
        if not isinstance(recipe, dict) or "stage" not in recipe or "out" in recipe:
            problem = "must be a recipe with the key stage and without the key out"
            where = f"step '{name}' of variant '{variant}'"
            raise SkilltrainError(
                "invalid-recipe", problem, where=where, fix=f"steps: {', '.join(grid.steps)}"
            )
    return recipes


def _fill(value: Any, resolve: Callable[[str], Any]) -> Any:
    """Return `value` with `resolve(NAME)` in the place of every `{NAME}` in its texts."""
    if isinstance(value, dict):
        return {key: _fill(item, resolve) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, resolve) for item in value]
    if not isinstance(value, str):
        return value

    def replace_match(match: re.Match[str]) -> str:
        is_brace = match[1] is None
        return match[0][0] if is_brace else str(resolve(match[1]))

    return _REFERENCE.sub(replace_match, value)


def _check_evaluations(grid: AblationConfig, cells: Sequence[Cell]) -> None:
    """Check that each evaluation ranks with one system, and scores all variants alike."""
    tasks: dict[str, Any] = {}
    for cell in cells:
        for step in cell.evaluations:
            config = cell.runs[step]
            where = f"step '{step}' of variant '{cell.variant}'"
            measures = [str(measure) for measure in config.scored]
            if config.num_systems != 1:
                problem = f"an evaluation of an ablation has one system, found {config.num_systems}"
                raise SkilltrainError(
                    "invalid-ablation",
                    problem,
                    where=where,
                    fix="make a step, or a variant, of each",
                )
            missing = [measure for measure in grid.compare if measure not in measures]
            if missing:
                problem = f"measures: {missing[0]}, which `compare` names, is missing"
                raise SkilltrainError("invalid-ablation", problem, where=where)
            task = (config.benchmark, config.split, measures)
            if task != tasks.setdefault(step, task):
                problem = f"scores other queries or measures than variant '{cells[0].variant}'"
                fix = "make a step of its own for each set of queries"
                raise SkilltrainError("invalid-ablation", problem, where=where, fix=fix)


def dry_run_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """List what `run_ablation` would run, for `--dry-run`. Nothing is written."""
    _, cells = read_grid(file, overrides)
    missing: set[Path] = set()
    for cell in cells:
        states = {run.out: run_state(run.out) for run in cell.runs.values()}
        say(f"{cell}: {' → '.join(f'{path.name} ({state})' for path, state in states.items())}")
        missing.update(path for path, state in states.items() if state != "done")
    return {"num_cells": len(cells), "num_runs_missing": len(missing)}


def run_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run all cells of a grid, and write ablation.json, ablation.md and ablation.html.

    Finished runs are kept. A training run that was stopped continues from its newest checkpoint. A
    cell that fails does not stop the others.

    Raises:
        SkilltrainError: Before any work for a fault in the file. After the tables are written if a
            cell failed.
    """
    if launched_ranks() > 1:
        fix = "leave accelerate launch out"
        raise SkilltrainError("one-process", "an ablation runs in one process", where=file, fix=fix)
    grid, cells = read_grid(file, overrides)
    errors = _run_cells(cells)
    results = make_results(grid, cells, errors)
    write_json(grid.out / "ablation.json", to_jsonable_python(results))
    write_text(grid.out / "ablation.md", markdown("ablation", **results))
    write_text(grid.out / "ablation.html", results_page(results))
    say(markdown("ablation", **results))
    if errors:
        cell, error = next(iter(errors.items()))
        problem = f"{len(errors)} of {len(cells)} cells failed, first {cell}: {error}"
        raise SkilltrainError(
            "failed-cells", problem, where=file, fix="the same command tries them again"
        )
    return {"out": str(grid.out), "num_cells": len(cells)}


def _run_cells(cells: Sequence[Cell]) -> dict[str, str]:
    """Run all cells, and return the one-line error of each cell that failed.

    Runs that cells share are run once, and are not tried again for another cell if they fail.
    """
    run_errors: dict[Path, str] = {}
    cell_errors: dict[str, str] = {}
    with progress("cells", len(cells)) as show:
        for number, cell in enumerate(cells, 1):
            for step, config in cell.runs.items():
                if config.out not in run_errors:
                    run_errors[config.out] = _run_step(step, config)
                error = run_errors[config.out]
                if error:
                    cell_errors[str(cell)] = error
                    say(f"cell ({cell}) failed: {error}")
                    break
            show(number, f"cell ({cell})")
    return cell_errors


def _run_step(step: str, config: Any) -> str:
    """Run a step, or finish a training run that was stopped, and return its one-line error."""
    import torch
    from accelerate.state import AcceleratorState

    try:
        run_stage(config, resume=None)
    except StoppedError as error:
        fix = "run the same command to go on"
        raise StoppedError(
            error.code, error.problem, where=config.out, fix=fix, number=error.number
        ) from error
    except SkilltrainError as error:
        return f"step {step}: {error}"
    except Exception as error:
        say(traceback.format_exc())
        first_line, _, _ = str(error).partition("\n")
        return f"step {step}: {type(error).__name__}: {first_line}"
    finally:
        # Free the memory, and let the next training run of this process set accelerate up anew.
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    shutil.rmtree(config.out / CHECKPOINTS, ignore_errors=True)  # three times the model's size
    return ""


def make_results(
    grid: AblationConfig, cells: Sequence[Cell], errors: Mapping[str, str]
) -> dict[str, Any]:
    """Make a table for each evaluation, from the cells that did not fail."""
    finished = [cell for cell in cells if str(cell) not in errors]
    steps = finished[0].evaluations if finished else {}
    tables = [_table(grid, step, finished) for step in steps]

    # Holm's correction is over the differences of all tables together.
    differences = itertools.chain.from_iterable(table["differences"] for table in tables)
    corrected = iter(with_holm([*differences]))
    for table in tables:
        table["differences"] = [*itertools.islice(corrected, len(table["differences"]))]

    rows: list[Row] = []
    for cell in cells:
        recipes = {step: str(run.out / RECIPE_FILE) for step, run in cell.runs.items()}
        row = {"variant": cell.variant, "seed": cell.seed, "error": errors.get(str(cell))}
        rows.append(row | {"recipes": recipes})
    about = grid.model_dump(include={"ablation", "claim", "baseline"})
    return about | {
        "version": __version__,
        "max_exact": MAX_EXACT,
        "tables": tables,
        "cells": rows,
    }


def results_page(results: Mapping[str, Any]) -> str:
    """Return the results as one HTML page."""
    differences = [c.difference for table in results["tables"] for c in table["differences"]]
    axis = axis_around(0, ends_of(differences) or [0])
    return html_page("ablation", **results, axis=axis, shares=SHARES)


def _table(grid: AblationConfig, step: str, cells: Sequence[Cell]) -> Row:
    """Score each variant in the evaluation `step`, and compare it with the baseline.

    `metrics` are means with intervals over queries. `seed_sd` are the standard deviations (n − 1)
    of the means of `num_runs` seeds, if there are several.
    """
    measures = [str(measure) for measure in cells[0].runs[step].scored]
    scores: dict[str, list[Scores]] = {}
    for variant in grid.variants:
        folders = {cell.evaluations[step] for cell in cells if cell.variant == variant}
        if folders:
            scores[variant] = [_read_scores(folder, measures) for folder in sorted(folders)]

    systems = [SystemResult(name, _mean_over_seeds(runs), {}) for name, runs in scores.items()]
    query_ids = shared_query_ids(systems)
    means = means_of(systems, query_ids, measures)
    variants: list[Row] = []
    for variant, runs in scores.items():
        row: Row = {"variant": variant, "num_runs": len(runs), "metrics": means[variant]}
        if len(runs) > 1:
            row["seed_sd"] = {name: _deviation(runs, name) for name in means[variant]}
        variants.append(row)

    others = [variant for variant in scores if variant != grid.baseline]
    pairs = [(grid.baseline, other) for other in others if grid.baseline in scores]
    return {
        "evaluation": step,
        "num_queries": len(query_ids),
        "measures": measures,
        "variants": variants,
        "differences": compare(systems, pairs, grid.compare),
    }


def _read_scores(folder: Path, measures: Sequence[str]) -> Scores:
    scores: Scores = {}
    for _, row in read_jsonl(folder / "per_query.jsonl"):
        scores[row["query_id"]] = {name: row[name] for name in measures if name in row}
    return scores


def _mean_over_seeds(runs: Sequence[Scores]) -> Scores:
    mean: Scores = {}
    for query_id, values in runs[0].items():
        mean[query_id] = {name: fmean(run[query_id][name] for run in runs) for name in values}
    return mean


def _deviation(runs: Sequence[Scores], measure: str) -> float:
    """Return the standard deviation of the runs' means."""
    means: list[float] = []
    for scores in runs:
        means.append(fmean(values[measure] for values in scores.values() if measure in values))
    return stdev(means)
