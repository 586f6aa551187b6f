"""What an ablation's file has to run: a chain of steps for each variant and seed; equal steps are one run."""

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from skilltrain.config import (
    Config,
    Seed,
    apply_overrides,
    laid_over,
    load_recipe,
    set_value,
    validate,
)
from skilltrain.errors import SkilltrainError
from skilltrain.runs import input_fingerprint, input_paths, run_state, what_matters
from skilltrain.stages import parse_recipe

EVALUATIONS = ("evaluate", "plans")
"""The stages that score queries, each with a per_query.jsonl."""
_SEED = "seed"
_STEP_NAME = re.compile("[A-Za-z][A-Za-z0-9_-]*")
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
Recipe = dict[str, Any]


class AblationConfig(Config):
    """A grid: every variant of a chain of stages, with every seed, evaluated on the same queries."""

    ablation: str = Field(min_length=1, description="title of the tables")
    claim: str = Field(min_length=1, description="what is tested, in one sentence")
    baseline: str = Field(description="the variant that the others are compared with")
    chain: Path | None = Field(
        default=None, description="YAML file of steps beside the grid; `steps` is laid over it"
    )
    steps: dict[str, Recipe] = Field(
        min_length=1,
        description="name: recipe of a stage, without out; '{NAME}' in a text is another step's folder, '{seed}' the "
        "seed, and {{ }} are plain braces. Every evaluation ranks with one system and gives one table",
    )
    variants: dict[str, dict[str, Any] | None] = Field(
        min_length=2,
        description="name: what differs from `steps`, 'step.key.key': value; items of lists by number",
    )
    seeds: tuple[Seed, ...] = Field(
        default=(1, 2, 3), min_length=1, description="one cell for each variant and seed"
    )
    compare: tuple[str, ...] = Field(
        default=("Hit@1", "MRR@10"),
        min_length=1,
        description="the measures by which variants are compared",
    )
    runs: Path | None = Field(
        default=None, description="folder of the runs, shared by grids; null: steps in `out`"
    )
    out: Path = Field(description="folder to write: ablation.json, ablation.md, ablation.html")

    @model_validator(mode="after")
    def _consistent(self) -> "AblationConfig":
        if self.baseline not in self.variants:
            raise ValueError(
                f"baseline: no variant is called '{self.baseline}'; variants: {', '.join(self.variants)}"
            )
        for name in self.steps:
            if name == _SEED or not _STEP_NAME.fullmatch(name):
                raise ValueError(
                    f"steps: '{name}' cannot name a step: letters, digits, _ and -, and not '{_SEED}'"
                )
        return self

    @property
    def runs_folder(self) -> Path:
        return self.out / "steps" if self.runs is None else self.runs


@dataclass(frozen=True)
class StepRun:
    """One run of a step: its settings, `out` among them, and the folders of the runs that it reads."""

    step: str
    config: Any
    needs: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        return self.config.out


@dataclass(frozen=True)
class Cell:
    """A variant with a seed, and its runs, each after those that it reads."""

    variant: str
    seed: int
    runs: tuple[StepRun, ...]

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def evaluations(self) -> dict[str, Path]:
        """The name of each evaluation → the folder of its run."""
        return {run.step: run.folder for run in self.runs if run.config.stage in EVALUATIONS}

    def missing(self) -> list[StepRun]:
        """The runs to be done; none that only a finished run has read: a model may be deleted once it is evaluated."""
        needed, found = set(self.evaluations.values()), list[StepRun]()
        for run in reversed(self.runs):
            if run.folder in needed and run_state(run.folder) != "done":
                needed.update(run.needs)
                found.insert(0, run)
        return found


@dataclass(frozen=True)
class Plan:
    """All cells in the order in which they run."""

    grid: AblationConfig
    cells: tuple[Cell, ...]

    @property
    def runs(self) -> dict[Path, StepRun]:
        return {run.folder: run for cell in self.cells for run in cell.runs}


def make_plan(file: Path, overrides: Sequence[str]) -> Plan:
    """The plan of the grid in `file`; reads what the steps read from elsewhere, and writes nothing.

    A variant that does not use the seed has one cell. Raises SkilltrainError for any fault that can be known before
    work begins.
    """
    values = load_recipe(file)
    own = values.get("steps", {})
    if isinstance(chain := apply_overrides(values, overrides).get("chain"), str):
        values["steps"] = laid_over(load_recipe(file.parent / chain), own)
    grid = validate(AblationConfig, apply_overrides(values, overrides), file)
    with _in_place(file):
        chains = {variant: _chain(grid, variant) for variant in grid.variants}
        fingerprint_of = cache(input_fingerprint)
        cells: dict[tuple[str, str], Cell] = {}
        for seed in (
            grid.seeds
        ):  # the outer loop, so that an ablation that is stopped early has whole seeds
            for variant, steps in chains.items():
                cell = Cell(variant, seed, _runs(grid, variant, steps, seed, fingerprint_of))
                cells.setdefault((variant, str(cell.evaluations)), cell)
        if idle := sorted({*own}.difference(*chains.values())):
            raise SkilltrainError(
                "leads to no evaluation in any variant", where=f"step '{idle[0]}'"
            )
        plan = Plan(grid, tuple(cells.values()))
        _check_evaluations(plan)
    return plan


@contextmanager
def _in_place(where: object) -> Iterator[None]:
    """Errors from within say that they happened at `where`."""
    try:
        yield
    except SkilltrainError as error:
        place = where if error.where is None else f"{where}: {error.where}"
        raise SkilltrainError(error.what, where=place, fix=error.fix) from error


def _chain(grid: AblationConfig, variant: str) -> dict[str, Recipe]:
    """The variant's steps, each after those it needs, without those that lead to no evaluation."""
    recipes = copy.deepcopy(grid.steps)
    for key, value in (grid.variants[variant] or {}).items():
        where, (step, dot, _) = f"variant '{variant}', {key}", key.partition(".")
        if not dot or step not in recipes:
            raise SkilltrainError(f"is no 'step.key'; steps: {', '.join(recipes)}", where=where)
        set_value(recipes, key, copy.deepcopy(value), where)
    needs: dict[str, set[str]] = {}
    for name, recipe in recipes.items():
        needs[name] = places_in(recipe) - {_SEED}
        if unknown := sorted(needs[name] - recipes.keys()):
            what = f"'{{{unknown[0]}}}' is no step; steps: {', '.join(sorted(recipes))}"
            raise SkilltrainError(
                what, where=_place(name, variant), fix="plain braces are written {{ }}"
            )
    try:
        order = [
            *TopologicalSorter(
                {name: sorted(found) for name, found in needs.items()}
            ).static_order()
        ]
    except CycleError as error:
        raise SkilltrainError(f"steps go in a circle: {' → '.join(error.args[1])}") from error
    used: set[str] = set()
    for name in reversed(order):
        if name in used or recipes[name].get("stage") in EVALUATIONS:
            used |= {name, *needs[name]}
    if not used:
        raise SkilltrainError(
            f"has no step of stage {' or '.join(EVALUATIONS)}", where=f"variant '{variant}'"
        )
    return {name: recipes[name] for name in order if name in used}


def _place(step: str, variant: str) -> str:
    return f"step '{step}' of variant '{variant}'"


def _runs(
    grid: AblationConfig,
    variant: str,
    steps: dict[str, Recipe],
    seed: int,
    fingerprint_of: Callable[[Path], str],
) -> tuple[StepRun, ...]:
    """The runs of a cell; a folder's name holds a hash of all that its content depends on."""
    places: dict[str, Any] = {_SEED: seed}
    runs: list[StepRun] = []
    for step, recipe in steps.items():
        with _in_place(_place(step, variant)):
            if "out" in recipe:
                raise SkilltrainError(
                    "names its own folder", fix="leave out out; the ablation gives it"
                )
            config = parse_recipe(
                fill(recipe, places.__getitem__) | {"out": str(grid.runs_folder / step)}, None
            )
            needs = tuple(Path(places[name]) for name in sorted(places_in(recipe) - {_SEED}))
            elsewhere = {
                key: fingerprint_of(path)
                for key, path in input_paths(config).items()
                if not any(
                    path.is_relative_to(folder) for folder in needs
                )  # these have their hash in their names
            }
        identity = what_matters(
            {"recipe": config.model_dump(mode="json", exclude={"out"}), "inputs": elsewhere}
        )
        digest = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        places[step] = grid.runs_folder / f"{step}-{digest[:12]}"
        runs.append(StepRun(step, config.model_copy(update={"out": places[step]}), needs))
    return tuple(runs)


def fill(value: Any, place: Callable[[str], Any]) -> Any:
    """`value` with `place(name)` for every `{name}` in its texts."""
    if isinstance(value, dict):
        return {key: fill(item, place) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, place) for item in value]
    if not isinstance(value, str):
        return value
    return _PLACE.sub(
        lambda match: match[0][0] if match[1] is None else str(place(match[1])), value
    )


def places_in(value: Any) -> set[str]:
    """The names that stand in braces in the texts of `value`."""
    found: set[str] = set()
    fill(value, found.add)
    return found


def _check_evaluations(plan: Plan) -> None:
    """Each evaluation asks the same of every variant, and ranks with one system."""
    first: dict[str, tuple[str, Any]] = {}
    for cell in plan.cells:
        for name, folder in cell.evaluations.items():
            config, where = plan.runs[folder].config, _place(name, cell.variant)
            if config.num_systems != 1:
                what = f"an evaluation of an ablation has one system, found {config.num_systems}"
                raise SkilltrainError(what, where=where, fix="make a step, or a variant, of each")
            measures = [str(measure) for measure in config.scored]
            if missing := [measure for measure in plan.grid.compare if measure not in measures]:
                raise SkilltrainError(
                    f"measures: {missing[0]}, which `compare` names, is missing", where=where
                )
            asked = (config.benchmark, config.split, measures)
            other, same = first.setdefault(name, (cell.variant, asked))
            if asked != same:
                what = f"other queries or measures than in variant '{other}' cannot be compared"
                raise SkilltrainError(
                    what, where=where, fix="make a step of its own for each set of queries"
                )
