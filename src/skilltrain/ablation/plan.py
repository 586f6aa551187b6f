"""What an ablation has to run: every step's settings resolved, those that cells have in common only once."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from skilltrain.ablation.grid import (
    SEED,
    AblationConfig,
    Recipe,
    fill,
    in_order,
    load_grid,
    needed_by,
    places_in,
    recipes_of,
)
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import parse_measures
from skilltrain.files import read_json
from skilltrain.runs import RUN_FILE, input_fingerprint, paths_read, what_matters
from skilltrain.stages import STAGES, parse_recipe

EVALUATE = "evaluate"
State = Literal["done", "begun", "to run"]


@dataclass(frozen=True)
class StepRun:
    """One run of a step: its whole settings, `out` among them, and the folders of the runs that it reads."""

    step: str
    config: Any
    needs: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        """Where it stands, or will."""
        return self.config.out

    @property
    def trains(self) -> bool:
        """Whether it is a training, which has checkpoints."""
        return STAGES[self.config.stage].trains

    def state(self) -> State:
        """How far it is; `begun` only for a training, for other runs appear whole or not at all."""
        record = self.folder / RUN_FILE
        if not record.is_file():
            return "to run"
        return "done" if read_json(record)["finished"] else "begun"


@dataclass(frozen=True)
class Cell:
    """A variant with a seed: the name of each of its evaluations → the folder of its run."""

    variant: str
    seed: int
    evaluations: Mapping[str, Path]

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """All cells, in the order in which they run, and all runs that they need, by folder.

    A variant that does nothing with the seed has one cell.
    """

    grid: AblationConfig
    runs: Mapping[Path, StepRun]
    cells: tuple[Cell, ...]

    def chain(self, cell: Cell, only_missing: bool = False) -> list[StepRun]:
        """The runs of a cell, each after those it reads.

        Of the missing ones, none that only a finished run has read: a model may be deleted once it is evaluated.
        """
        found: dict[Path, StepRun] = {}

        def visit(folder: Path) -> None:
            run = self.runs[folder]
            if folder not in found and not (only_missing and run.state() == "done"):
                for need in run.needs:
                    visit(need)
                found[folder] = run

        for folder in cell.evaluations.values():
            visit(folder)
        return list(found.values())


def make_plan(file: Path, overrides: Sequence[str]) -> Plan:
    """The plan of the grid in `file`; reads what the steps read from elsewhere, and writes nothing.

    Raises SkilltrainError for any fault that can be known before work begins.
    """
    grid, own_steps = load_grid(file, overrides)
    resolver = _Resolver(grid)
    try:
        chains = {variant: _Chain.of(grid, variant) for variant in grid.variants}
        _check_use(grid, own_steps, chains)
        cells: dict[tuple[str, str], Cell] = {}
        for seed in grid.seeds:  # outside, so that an ablation that is stopped early has whole seeds
            for variant, chain in chains.items():
                cell = resolver.cell(chain, variant, seed)
                cells.setdefault((variant, repr(sorted(cell.evaluations.items()))), cell)
    except SkilltrainError as error:
        where = f"{file}: {error.where}" if error.where is not None else file
        raise SkilltrainError(error.what, where=where, fix=error.fix) from error
    plan = Plan(grid, resolver.runs, tuple(cells.values()))
    _check_variants(plan, file)
    _check_evaluations(plan, file)
    return plan


@dataclass(frozen=True)
class _Chain:
    """A variant's recipes, in an order in which they can run; no step that leads to no evaluation."""

    recipes: Mapping[str, Recipe]
    needs: Mapping[str, set[str]]
    uses_seed: bool

    @classmethod
    def of(cls, grid: AblationConfig, variant: str) -> "_Chain":
        recipes, needs = recipes_of(grid, variant), dict[str, set[str]]()
        for name, recipe in recipes.items():
            needs[name] = places_in(recipe, {*grid.steps, SEED}, _place(grid, variant, name))
            if left_out := sorted(needs[name] - {*recipes, SEED}):
                what = f"needs the step '{left_out[0]}', which the variant leaves out"
                raise SkilltrainError(what, where=_place(grid, variant, name))
        steps = {name: found - {SEED} for name, found in needs.items()}
        order = in_order(steps)
        goals = [name for name in order if recipes[name].get("stage") == EVALUATE]
        if not goals:
            raise SkilltrainError("has no step of stage evaluate", where=f"variant '{variant}'")
        used = needed_by(goals, steps)
        return cls(
            {name: recipes[name] for name in order if name in used}, steps, any(SEED in needs[name] for name in used)
        )


def _place(grid: AblationConfig, variant: str, step: str) -> str:
    """Where a step's settings stand in the file; the variant is named if it changes them."""
    changed = any(key.partition(".")[0] == step for key in grid.variants[variant])
    return f"step '{step}' of variant '{variant}'" if changed else f"step '{step}'"


@dataclass(frozen=True)
class _Resolver:
    """Turns recipes into runs; equal ones into one."""

    grid: AblationConfig
    runs: dict[Path, StepRun] = field(default_factory=dict)
    known: dict[str, StepRun] = field(default_factory=dict)
    fingerprints: dict[Path, str] = field(default_factory=dict)

    def cell(self, chain: _Chain, variant: str, seed: int) -> Cell:
        """The cell of a variant and a seed, its runs kept in `runs`."""
        found: dict[str, Path] = {}
        for step, recipe in chain.recipes.items():
            values = fill(recipe, {SEED: seed} | {name: str(folder) for name, folder in found.items()})
            key = json.dumps([step, values], sort_keys=True, default=str)
            if key not in self.known:
                needs = tuple(found[name] for name in sorted(chain.needs[step]))
                self.known[key] = self._run(step, values, needs, _place(self.grid, variant, step))
            run = self.known[key]
            found[step], self.runs[run.folder] = run.folder, run
        goals = {step: found[step] for step, recipe in chain.recipes.items() if recipe.get("stage") == EVALUATE}
        return Cell(variant, seed, goals)

    def _run(self, step: str, values: Recipe, needs: tuple[Path, ...], where: str) -> StepRun:
        """The run; its folder's name holds a hash of all that its result depends on."""
        if "out" in values:
            raise SkilltrainError("names its own folder", where=where, fix="leave out out; the ablation gives it")
        config = parse_recipe(values | {"out": str(self.grid.runs_folder / step)}, where)
        try:
            inputs = dict(self._inputs(config, needs))
        except SkilltrainError as error:
            raise SkilltrainError(str(error), where=where) from error
        identity = what_matters({"recipe": config.model_dump(mode="json", exclude={"out"}), "inputs": inputs})
        digest = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        folder = self.grid.runs_folder / f"{step}-{digest[:12]}"
        return StepRun(step, config.model_copy(update={"out": folder}), needs)

    def _inputs(self, config: Any, needs: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
        """Setting → fingerprint of what a step reads from elsewhere; a step's folder has its hash in its name."""
        for key, path in paths_read(config).items():
            if not any(path.is_relative_to(folder) for folder in needs):
                if path not in self.fingerprints:
                    self.fingerprints[path] = input_fingerprint(path)
                yield key, self.fingerprints[path]


def _check_use(grid: AblationConfig, own_steps: set[str], chains: Mapping[str, _Chain]) -> None:
    used = {step for chain in chains.values() for step in chain.recipes}
    if idle := [step for step in grid.steps if step in own_steps - used]:
        raise SkilltrainError("leads to no evaluation in any variant", where=f"step '{idle[0]}'")
    if "seeds" in grid.model_fields_set and not any(chain.uses_seed for chain in chains.values()):
        what = "no step uses {seed}, so all seeds would be the same"
        raise SkilltrainError(what, where="seeds", fix="write e.g. training: {seed: '{seed}'}, or leave seeds out")


def _check_variants(plan: Plan, file: Path) -> None:
    first: dict[tuple[Path, ...], str] = {}
    for cell in plan.cells:
        key = tuple(cell.evaluations.values())
        if (other := first.setdefault(key, cell.variant)) != cell.variant:
            what = f"the variants '{other}' and '{cell.variant}' have equal settings"
            raise SkilltrainError(what, where=file, fix="let each differ from `steps` in its own way")


def _check_evaluations(plan: Plan, file: Path) -> None:
    """Each evaluation asks the same of every variant, and ranks with one system."""
    first: dict[str, tuple[str, tuple[Any, ...]]] = {}
    baseline = {name for cell in plan.cells if cell.variant == plan.grid.baseline for name in cell.evaluations}
    for cell in plan.cells:
        for name, folder in cell.evaluations.items():
            config, where = plan.runs[folder].config, f"{file}: {_place(plan.grid, cell.variant, name)}"
            if name not in baseline:
                raise SkilltrainError("the baseline leaves this evaluation out", where=where)
            if len(config.systems) + len(config.predictions) != 1:
                what = f"an evaluation of an ablation has one system, found {len(config.systems)}"
                raise SkilltrainError(what, where=where, fix="make a step, or a variant, of each")
            measures = tuple(str(measure) for measure in parse_measures(config.measures))
            if missing := [measure for measure in plan.grid.compare if measure not in measures]:
                raise SkilltrainError(f"measures: {missing[0]}, which `compare` names, is missing", where=where)
            asked = (config.benchmark, config.split, measures)
            other, same = first.setdefault(name, (cell.variant, asked))
            if asked != same:
                what = f"other queries or measures than in variant '{other}' cannot be compared"
                raise SkilltrainError(what, where=where, fix="make a step of its own for each set of queries")


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values: how much there is to do, each cell with its runs, and what cells have in common."""
    shared = Counter(run.folder for cell in plan.cells for run in plan.chain(cell))
    missing = {run.folder for cell in plan.cells for run in plan.chain(cell, only_missing=True)}
    cells = [
        {"variant": cell.variant, "seed": cell.seed, "runs": [run.folder.name for run in plan.chain(cell)]}
        for cell in plan.cells
    ]
    runs = [
        {
            "run": folder.name,
            "state": run.state() if folder in missing or run.state() == "done" else "not needed",
            "num_cells": shared[folder],
        }
        for folder, run in plan.runs.items()
    ]
    return {
        "num_cells": len(plan.cells),
        "num_runs": len(runs),
        "num_runs_shared": sum(count > 1 for count in shared.values()),
        "num_runs_missing": len(missing),
        "cells": cells,
        "runs": runs,
    }
