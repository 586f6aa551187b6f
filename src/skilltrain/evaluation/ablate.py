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
    Comparison,
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
    comparable_identity,
    run_stage,
    run_state,
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
        description="name: changes of `steps`, 'step.key.key': value; list items by number",
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
    def _check_baseline(self) -> "AblationConfig":
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

    A cell is a variant with a seed. A variant that does not use the seed has one cell.

    Args:
        file: File of the grid.
        overrides: Settings `key=value` that replace those of the file.

    Returns:
        The grid; its cells in the order in which they run.

    Raises:
        SkilltrainError: For any fault that can be known before work begins.
    """
    grid = validate(AblationConfig, load_recipe(file, overrides), file)
    cells = []
    # Seeds are the outer loop. An ablation that is stopped early then has all variants of a seed.
    for seed, variant in itertools.product(grid.seeds, grid.variants):
        cell = Cell(variant, seed, _resolve_runs(grid, variant, seed))
        # The name of a folder is a hash of the settings. If a variant does not use the seed, its
        # evaluations have the same folders for all seeds, and the first cell is enough.
        earlier_folders = [earlier.evaluations for earlier in cells if earlier.variant == variant]
        if cell.evaluations not in earlier_folders:
            cells.append(cell)
    _check_evaluations(grid, cells)
    return grid, cells


def _resolve_runs(grid: AblationConfig, variant: str, seed: int) -> dict[str, Any]:
    """Resolve the settings of the runs of one variant with one seed.

    The name of a run's folder holds a hash of its settings, so that cells with equal settings share
    the run.

    Args:
        grid: Settings.
        variant: Name of the variant.
        seed: Value of `{seed}` in the recipes.

    Returns:
        Settings of each run by the name of its step, a run after those that it reads. Steps that
        lead to no evaluation are left out.
    """
    resolver = _RunResolver(grid, variant, seed)
    for name, recipe in resolver.recipes.items():
        if recipe["stage"] in EVALUATIONS:
            # This resolves the run of the evaluation, and of all steps that it reads.
            resolver.value_of(name)
    if not resolver.runs:
        problem = f"has no step of stage {' or '.join(EVALUATIONS)}"
        raise SkilltrainError("invalid-ablation", problem, where=resolver.where)
    return resolver.runs


class _RunResolver:
    """Resolver of the runs of one variant with one seed.

    Attributes:
        where: The variant, for errors.
        recipes: Recipe of each step by its name. Its texts may hold references `{NAME}`.
        runs: Settings of each run resolved so far by the name of its step.
    """

    def __init__(self, grid: AblationConfig, variant: str, seed: int) -> None:
        self.where = f"variant '{variant}'"
        self.recipes = _variant_recipes(grid, variant)
        self.runs: dict[str, Any] = {}
        self._runs_folder = grid.out / "steps" if grid.runs is None else grid.runs
        self._begun_steps: set[str] = set()
        self._values: dict[str, Any] = {}  # of the references that are resolved, by name
        if _SEED not in self.recipes:  # a step may have the name `seed`
            self._values[_SEED] = seed

    def value_of(self, name: str) -> Any:
        """Return the value of a reference `{NAME}`: the seed, or the folder of a step.

        `{seed}` is the seed, and `{train}` is the folder of the step `train`. If the run of the
        step is not resolved yet, it is resolved and added to `runs`.

        Args:
            name: Name in the braces: `seed`, or a step.
        """
        # `_values` holds the seed, and the folders of the steps that are resolved.
        if name in self._values:
            return self._values[name]
        if name not in self.recipes:
            problem = f"'{{{name}}}' is no step"
            fix = f"steps: {', '.join(self.recipes)}; plain braces are written {{{{ }}}}"
            raise SkilltrainError("invalid-ablation", problem, where=self.where, fix=fix)
        where = f"step '{name}' of {self.where}"

        # If the step is begun and has no folder yet, this call comes from a step that it reads.
        if name in self._begun_steps:
            problem = "depends on itself: a step that it reads needs its folder"
            raise SkilltrainError("invalid-ablation", problem, where=where)
        self._begun_steps.add(name)

        # Fill in the references of this step, by calls of `value_of` for the steps that it reads.
        # The folder is provisional: its final name needs the complete settings.
        recipe = _fill(self.recipes[name], self.value_of)
        config = parse_recipe(recipe | {"out": str(self._runs_folder / name)}, where)

        # Inputs may be missing if they are folders of earlier runs, which are not made yet.
        earlier_folders = [run.out for run in self.runs.values()]
        check_inputs(config, pending=earlier_folders)

        # Name the folder by a digest of the settings and plug-ins that decide the results. So cells
        # with equal settings share the folder and its run.
        identity = comparable_identity({"recipe": config.model_dump(mode="json")})
        identity["plugins"] = plugin_fingerprints(config)
        digest = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        folder = self._runs_folder / f"{name}-{digest[:12]}"
        self.runs[name] = config.model_copy(update={"out": folder})
        self._values[name] = folder
        return folder


def _variant_recipes(grid: AblationConfig, variant: str) -> dict[str, Recipe]:
    """Return the grid's steps with the changes of a variant.

    Args:
        grid: Settings.
        variant: Name of the variant.

    Returns:
        Recipe of each step by its name.
    """
    # Copy the recipes, because each variant changes them in another way.
    recipes = copy.deepcopy(grid.steps)
    for key, value in (grid.variants[variant] or {}).items():
        # A change is a path and its value, such as `train.loss.name: kl`.
        set_value(recipes, key, copy.deepcopy(value), f"variant '{variant}', {key}")
    for name, recipe in recipes.items():
        # A change can break a recipe. The grid itself sets `out`.
        if not isinstance(recipe, dict) or "stage" not in recipe or "out" in recipe:
            problem = "must be a recipe with the key stage and without the key out"
            where = f"step '{name}' of variant '{variant}'"
            raise SkilltrainError(
                "invalid-recipe", problem, where=where, fix=f"steps: {', '.join(grid.steps)}"
            )
    return recipes


def _fill(value: Any, resolve: Callable[[str], Any]) -> Any:
    """Replace every `{NAME}` in the texts of a recipe by `resolve(NAME)`, and `{{` by `{`.

    For example, `{train}/model` becomes `runs/train-1a2b/model`.

    Args:
        value: A recipe, or a part of it.
        resolve: Returns the value of a name in braces.
    """
    if isinstance(value, dict):
        return {key: _fill(item, resolve) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, resolve) for item in value]
    if not isinstance(value, str):
        return value

    def replace_match(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:  # {{ or }}
            return match[0][0]
        return str(resolve(name))

    return _REFERENCE.sub(replace_match, value)


def _check_evaluations(grid: AblationConfig, cells: Sequence[Cell]) -> None:
    """Check that all variants can be compared.

    Args:
        grid: Settings.
        cells: Variants with a seed.

    Raises:
        SkilltrainError: An evaluation has several systems, or lacks a measure of `grid.compare`.
            A step has different queries or measures in two variants.
    """
    # (benchmark, split, measures) of each step, as the first variant has them
    data_by_step: dict[str, Any] = {}
    for cell in cells:
        for step in cell.evaluations:
            config = cell.runs[step]
            where = f"step '{step}' of variant '{cell.variant}'"
            measures = [str(measure) for measure in config.scored]
            _check_evaluation(config.num_systems, measures, grid.compare, where)

            data = (config.benchmark, config.split, measures)
            # `setdefault` returns the data of the first variant that has this step.
            if data_by_step.setdefault(step, data) != data:
                problem = f"scores other queries or measures than variant '{cells[0].variant}'"
                fix = "make a step of its own for each set of queries"
                raise SkilltrainError("invalid-ablation", problem, where=where, fix=fix)


def _check_evaluation(
    num_systems: int, measures: Sequence[str], compared: Sequence[str], where: str
) -> None:
    """Check that an evaluation has one system, and all measures that are compared.

    Args:
        num_systems: Number of systems that the evaluation ranks with.
        measures: Measures of the evaluation.
        compared: Measures by which variants are compared.
        where: The step and its variant, for an error.
    """
    if num_systems != 1:
        problem = f"an evaluation of an ablation has one system, found {num_systems}"
        fix = "give each system a step or a variant of its own"
        raise SkilltrainError("invalid-ablation", problem, where=where, fix=fix)
    for measure in compared:
        if measure not in measures:
            problem = f"measures: {measure}, which `compare` names, is missing"
            raise SkilltrainError("invalid-ablation", problem, where=where)


def dry_run_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """List what `run_ablation` would run, for `--dry-run`. Nothing is written.

    Args:
        file: File of the grid.
        overrides: Settings `key=value` that replace those of the file.

    Returns:
        Numbers of cells, and of runs that are not done yet.
    """
    _, cells = read_grid(file, overrides)
    missing = set()
    for cell in cells:
        # The state of a run says whether it is done. Cells can share a run, so `missing` is a set.
        states = {run.out: run_state(run.out) for run in cell.runs.values()}
        steps = [f"{folder.name} ({state})" for folder, state in states.items()]
        say(f"{cell}: {' → '.join(steps)}")
        missing.update(folder for folder, state in states.items() if state != "done")
    return {"num_cells": len(cells), "num_runs_missing": len(missing)}


def run_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run all cells of a grid, and write ablation.json, ablation.md and ablation.html.

    A cell is a variant with a seed. Finished runs are kept. A training run that was stopped
    continues from its newest checkpoint. A cell that fails does not stop the others.

    Args:
        file: File of the grid.
        overrides: Settings `key=value` that replace those of the file.

    Returns:
        Summary: the output folder, and the number of cells.

    Raises:
        SkilltrainError: Before any work for a fault in the file. After the tables are written if a
            cell failed.
    """
    # `accelerate launch` would run the whole ablation in each of its processes.
    if launched_ranks() > 1:
        fix = "leave accelerate launch out"
        raise SkilltrainError("one-process", "an ablation runs in one process", where=file, fix=fix)
    grid, cells = read_grid(file, overrides)
    errors = _run_cells(cells)  # error by name of the cell

    # Write the tables even if cells failed. A failed cell has its error in them.
    results = make_results(grid, cells, errors)
    document = markdown("ablation", **results)
    write_json(grid.out / "ablation.json", to_jsonable_python(results))
    write_text(grid.out / "ablation.md", document)
    write_text(grid.out / "ablation.html", results_page(results))
    say(document)

    # Report the first error as an example.
    if errors:
        cell, error = next(iter(errors.items()))
        problem = f"{len(errors)} of {len(cells)} cells failed, first {cell}: {error}"
        fix = "the same command tries them again"
        raise SkilltrainError("failed-cells", problem, where=file, fix=fix)
    return {"out": str(grid.out), "num_cells": len(cells)}


def _run_cells(cells: Sequence[Cell]) -> dict[str, str]:
    """Run all cells, and return the errors of the cells that failed.

    A run that several cells share is run once. If it fails, it is not tried again.

    Args:
        cells: Variants with a seed. Each has a run, with a folder, for each of its steps.

    Returns:
        One-line error by name of the cell, for each cell that failed.
    """
    # Error of each run that was tried, by the run's folder; "" for a run that did not fail. Cells
    # that share a run have the same folder.
    run_errors: dict[Path, str] = {}
    cell_errors = {}
    with progress("cells", len(cells)) as show:
        for number, cell in enumerate(cells, 1):
            for step, config in cell.runs.items():
                if config.out not in run_errors:
                    run_errors[config.out] = _run_step(step, config)
                error = run_errors[config.out]
                # The later steps of the cell read the result of this step, so leave them out.
                if error:
                    cell_errors[str(cell)] = error
                    say(f"cell ({cell}) failed: {error}")
                    break
            show(number, f"cell ({cell})")
    return cell_errors


def _run_step(step: str, config: Any) -> str:
    """Run one stage of an ablation, and return its error instead of raising it.

    So a failed step does not end the other cells. A training run that was stopped continues from
    its newest checkpoint.

    Args:
        step: Name of the step in the grid, for the error.
        config: Settings of the stage, with its output folder `out`.

    Returns:
        Error in one line; "" if the step did not fail.

    Raises:
        StoppedError: A signal stops the step, and with it the whole ablation.
    """
    import torch
    from accelerate.state import AcceleratorState

    try:
        # resume=None continues from a checkpoint if there is any, and else starts anew.
        run_stage(config, resume=None)
    except StoppedError as error:
        fix = "run the same command to go on"
        raise StoppedError(
            error.code, error.problem, where=config.out, fix=fix, number=error.number
        ) from error
    except SkilltrainError as error:
        return f"step {step}: {error}"
    except Exception as error:
        # An unexpected error is probably a bug, so print the whole traceback.
        say(traceback.format_exc())
        first_line, _, _ = str(error).partition("\n")
        return f"step {step}: {type(error).__name__}: {first_line}"
    finally:
        # accelerate keeps its state in this class. Reset the state, so that the next training run
        # of this process can have other settings. Then free the memory of this run.
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # Delete the checkpoints, because a finished run does not need them. A checkpoint also holds the
    # optimiser's state, and is three times as large as the model.
    shutil.rmtree(config.out / CHECKPOINTS, ignore_errors=True)
    return ""


def make_results(
    grid: AblationConfig, cells: Sequence[Cell], errors: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of ablation.json: a table for each evaluation, and all cells.

    Args:
        grid: Settings.
        cells: All cells.
        errors: Error by the name of a cell, for cells that failed. The tables leave out these
            cells.
    """
    finished = [cell for cell in cells if str(cell) not in errors]
    steps = finished[0].evaluations if finished else {}
    # An evaluation is a step that scores queries. Each has a table of its own.
    tables = [_table(grid, step, finished) for step in steps]

    # Holm's correction is over the differences of all tables together. Afterwards each table gets
    # its own differences back, which are still in the order of the tables.
    corrected = with_holm(_all_differences(tables))
    start = 0
    for table in tables:
        end = start + len(table["differences"])
        table["differences"] = list(corrected[start:end])
        start = end

    rows = []
    for cell in cells:
        # Each run wrote its complete settings to a recipe in its folder.
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


def _all_differences(tables: Sequence[Row]) -> list[Comparison]:
    """Return the comparisons of all tables as one list."""
    return list(itertools.chain.from_iterable(table["differences"] for table in tables))


def results_page(results: Mapping[str, Any]) -> str:
    """Return the results as one HTML page."""
    differences = [comparison.difference for comparison in _all_differences(results["tables"])]
    axis = axis_around(0, ends_of(differences) or [0])
    return html_page("ablation", **results, axis=axis, shares=SHARES)


def _table(grid: AblationConfig, step: str, cells: Sequence[Cell]) -> Row:
    """Score each variant in one evaluation, and compare it with the baseline.

    Args:
        grid: Settings.
        step: Name of the evaluation.
        cells: Cells that did not fail.

    Returns:
        The table for ablation.json. In the row of a variant, `metrics` holds the mean of each
        measure over queries, with its interval. If the variant ran with several seeds, `seed_sd`
        holds the standard deviation (n − 1) of the seeds' means.
    """
    evaluation = cells[0].runs[step]  # all cells have the same measures here
    measures = [str(measure) for measure in evaluation.scored]

    # Read the scores of each variant. An evaluation that several cells share is read once.
    runs_by_variant: dict[str, list[Scores]] = {}
    for variant in grid.variants:
        # A variant that does not use the seed has a single cell, and so a single run.
        folders = {cell.evaluations[step] for cell in cells if cell.variant == variant}
        if folders:
            runs_by_variant[variant] = [
                _read_scores(folder, measures) for folder in sorted(folders)
            ]

    # A variant counts as one system, with the mean over its seeds as the score of a query.
    mean_scores = {variant: _mean_over_seeds(runs) for variant, runs in runs_by_variant.items()}
    systems = []
    for variant, scores in mean_scores.items():
        # The comparison needs only the scores of each query, so the rankings are left out.
        systems.append(SystemResult(variant, scores, rankings={}))
    # All systems must have scored the same queries. `means_of` returns means by system and measure.
    query_ids = shared_query_ids(systems)
    means = means_of(systems, query_ids, measures)

    rows = []
    for variant, runs in runs_by_variant.items():
        row: Row = {"variant": variant, "num_runs": len(runs), "metrics": means[variant]}
        if len(runs) > 1:
            # A standard deviation needs two values, so it needs two seeds.
            row["seed_sd"] = {name: _deviation(runs, name) for name in means[variant]}
        rows.append(row)

    # Compare with the baseline, unless all its cells failed.
    pairs = []
    if grid.baseline in runs_by_variant:
        variants = [variant for variant in runs_by_variant if variant != grid.baseline]
        pairs = [(grid.baseline, variant) for variant in variants]
    return {
        "evaluation": step,
        "num_queries": len(query_ids),
        "measures": measures,
        "variants": rows,
        "differences": compare(systems, pairs, grid.compare),
    }


def _read_scores(folder: Path, measures: Sequence[str]) -> Scores:
    """Read the scores of one evaluation. A measure without a value for a query is left out."""
    scores = {}
    for _, row in read_jsonl(folder / "per_query.jsonl"):
        scores[row["query_id"]] = {name: row[name] for name in measures if name in row}
    return scores


def _mean_over_seeds(runs: Sequence[Scores]) -> Scores:
    """Return each query's mean score over the runs, which have the same queries and measures."""
    means = {}
    for query_id, values in runs[0].items():
        means[query_id] = {}
        for measure in values:
            means[query_id][measure] = fmean(scores[query_id][measure] for scores in runs)
    return means


def _deviation(runs: Sequence[Scores], measure: str) -> float:
    """Return the standard deviation of the runs' means of one measure."""
    means = []
    for scores in runs:
        means.append(fmean(values[measure] for values in scores.values() if measure in values))
    return stdev(means)
