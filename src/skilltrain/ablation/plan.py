"""What an ablation has to run: every step's settings resolved; equal steps of several cells are one run."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from skilltrain.ablation.grid import SEED, AblationConfig, Recipe, fill, load_grid, places_in, recipes_of
from skilltrain.errors import SkilltrainError
from skilltrain.runs import input_fingerprint, paths_read, run_state, what_matters
from skilltrain.stages import parse_recipe

EVALUATIONS = ("evaluate", "plans")
"""The stages that score queries, each with a per_query.jsonl."""


@dataclass(frozen=True)
class StepRun:
    """One run of a step: its settings, `out` among them, and the folders of the runs that it reads."""

    step: str
    config: Any
    needs: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        """Where it stands, or will stand."""
        return self.config.out

    def state(self) -> str:
        """How far it is: done, begun or to run."""
        return run_state(self.folder)


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
        """The runs that are to be done, but none that only a finished run has read: a model may be deleted once it is
        evaluated."""
        needed, found = set(self.evaluations.values()), list[StepRun]()
        for run in reversed(self.runs):
            if run.folder in needed and run.state() != "done":
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
        """The runs of all cells by folder."""
        return {run.folder: run for cell in self.cells for run in cell.runs}


class _Step(NamedTuple):
    """A step of a variant: its recipe, and the names in it that other steps or the seed stand for."""

    name: str
    recipe: Recipe
    needs: set[str]
    where: str


def make_plan(file: Path, overrides: list[str]) -> Plan:
    """The plan of the grid in `file`; reads what the steps read from elsewhere, and writes nothing.

    A variant that does not use the seed has one cell. Raises SkilltrainError for any fault that can be known before
    work begins.
    """
    grid, own_steps = load_grid(file, overrides)
    with _in_place(file):
        chains = {variant: _chain(grid, variant) for variant in grid.variants}
        fingerprint_of = cache(input_fingerprint)
        cells: dict[tuple[str, str], Cell] = {}
        for seed in grid.seeds:  # the outer loop, so that an ablation that is stopped early has whole seeds
            for variant, chain in chains.items():
                cell = Cell(variant, seed, _runs(chain, seed, grid.runs_folder, fingerprint_of))
                cells.setdefault((variant, str(cell.evaluations)), cell)
        if idle := sorted(own_steps - {step.name for chain in chains.values() for step in chain}):
            raise SkilltrainError("leads to no evaluation in any variant", where=f"step '{idle[0]}'")
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


def _chain(grid: AblationConfig, variant: str) -> list[_Step]:
    """The variant's steps, each after those it needs, without those that lead to no evaluation."""
    steps: dict[str, _Step] = {}
    recipes = recipes_of(grid, variant)
    for name, recipe in recipes.items():
        where = f"step '{name}' of variant '{variant}'"
        with _in_place(where):
            steps[name] = _Step(name, recipe, places_in(recipe, {*recipes, SEED}), where)
    graph = {name: sorted(step.needs - {SEED}) for name, step in steps.items()}
    try:
        order = [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        raise SkilltrainError(f"steps go in a circle: {' → '.join(error.args[1])}") from error
    used: set[str] = set()
    for name in reversed(order):
        if name in used or recipes[name].get("stage") in EVALUATIONS:
            used |= {name, *steps[name].needs}
    if not used:
        raise SkilltrainError(f"has no step of stage {' or '.join(EVALUATIONS)}", where=f"variant '{variant}'")
    return [steps[name] for name in order if name in used]


def _runs(
    chain: list[_Step], seed: int, runs_folder: Path, fingerprint_of: Callable[[Path], str]
) -> tuple[StepRun, ...]:
    """The runs of a cell; a folder's name holds a hash of all that its content depends on."""
    places: dict[str, Any] = {SEED: seed}
    runs: list[StepRun] = []
    for step in chain:
        values = fill(step.recipe, places.__getitem__)
        if "out" in values:
            fix = "leave out out; the ablation gives it"
            raise SkilltrainError("names its own folder", where=step.where, fix=fix)
        needs = tuple(Path(places[name]) for name in sorted(step.needs - {SEED}))
        config = parse_recipe(values | {"out": str(runs_folder / step.name)}, step.where)
        with _in_place(step.where):
            elsewhere = {
                key: fingerprint_of(path)
                for key, path in paths_read(config).items()
                if not any(path.is_relative_to(folder) for folder in needs)  # these have their hash in their names
            }
        identity = what_matters({"recipe": config.model_dump(mode="json", exclude={"out"}), "inputs": elsewhere})
        digest = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        folder = runs_folder / f"{step.name}-{digest[:12]}"
        places[step.name] = str(folder)
        runs.append(StepRun(step.name, config.model_copy(update={"out": folder}), needs))
    return tuple(runs)


def _check_evaluations(plan: Plan) -> None:
    """Each evaluation asks the same of every variant, and ranks with one system."""
    first: dict[str, tuple[str, Any]] = {}
    for cell in plan.cells:
        for name, folder in cell.evaluations.items():
            config, where = plan.runs[folder].config, f"step '{name}' of variant '{cell.variant}'"
            if config.num_systems != 1:
                what = f"an evaluation of an ablation has one system, found {config.num_systems}"
                raise SkilltrainError(what, where=where, fix="make a step, or a variant, of each")
            measures = [str(measure) for measure in config.scored]
            if missing := [measure for measure in plan.grid.compare if measure not in measures]:
                raise SkilltrainError(f"measures: {missing[0]}, which `compare` names, is missing", where=where)
            asked = (config.benchmark, config.split, measures)
            other, same = first.setdefault(name, (cell.variant, asked))
            if asked != same:
                what = f"other queries or measures than in variant '{other}' cannot be compared"
                raise SkilltrainError(what, where=where, fix="make a step of its own for each set of queries")
