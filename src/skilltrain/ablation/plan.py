"""What an ablation has to run: every step's settings resolved; equal steps of several cells are one run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from hashlib import sha256
from pathlib import Path
from typing import Any

from skilltrain.ablation.grid import SEED, AblationConfig, Recipe, fill, load_grid, places_in, recipes_of
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import parse_measures
from skilltrain.runs import input_fingerprint, paths_read, run_state, what_matters
from skilltrain.stages import parse_recipe


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
    """A variant with a seed: the name of each of its evaluations → the folder of its run."""

    variant: str
    seed: int
    evaluations: Mapping[str, Path]

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """All cells in the order in which they run, and the runs that they need, by folder."""

    grid: AblationConfig
    cells: tuple[Cell, ...]
    runs: Mapping[Path, StepRun]

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

    A variant that does not use the seed has one cell. Raises SkilltrainError for any fault that can be known before
    work begins.
    """
    grid, own_steps = load_grid(file, overrides)
    try:
        chains = {variant: _chain(grid, variant) for variant in grid.variants}
        _check_use(grid, own_steps, chains)
        resolver = _Resolver(grid)
        cells: dict[tuple[str, str], Cell] = {}
        for seed in grid.seeds:  # the outer loop, so that an ablation that is stopped early has whole seeds
            for variant, chain in chains.items():
                cell = resolver.cell(chain, variant, seed)
                cells.setdefault((variant, repr(cell.evaluations)), cell)
        plan = Plan(grid, tuple(cells.values()), resolver.runs)
        _check_variants(plan)
        _check_evaluations(plan)
    except SkilltrainError as error:
        where = f"{file}: {error.where}" if error.where is not None else file
        raise SkilltrainError(error.what, where=where, fix=error.fix) from error
    return plan


@dataclass(frozen=True)
class _Step:
    """A step of a variant: its recipe, and the names in it that other steps or the seed stand for."""

    name: str
    recipe: Recipe
    needs: set[str]


def _chain(grid: AblationConfig, variant: str) -> list[_Step]:
    """The variant's steps, each after those it needs, without those that lead to no evaluation."""
    steps: dict[str, _Step] = {}
    recipes = recipes_of(grid, variant)
    for name, recipe in recipes.items():
        needs = places_in(recipe, {*grid.steps, SEED}, _place(grid, variant, name))
        if left_out := sorted(needs - {*recipes, SEED}):
            what = f"needs the step '{left_out[0]}', which the variant leaves out"
            raise SkilltrainError(what, where=_place(grid, variant, name))
        steps[name] = _Step(name, recipe, needs)
    try:
        order = list(
            TopologicalSorter({name: sorted(step.needs - {SEED}) for name, step in steps.items()}).static_order()
        )
    except CycleError as error:
        raise SkilltrainError(f"steps go in a circle: {' → '.join(error.args[1])}") from error
    used: set[str] = set()
    for name in reversed(order):
        if name in used or _evaluates(recipes[name]):
            used |= {name, *steps[name].needs}
    if not used:
        raise SkilltrainError("has no step of stage evaluate", where=f"variant '{variant}'")
    return [steps[name] for name in order if name in used]


def _evaluates(recipe: Recipe) -> bool:
    return recipe.get("stage") == "evaluate"


def _place(grid: AblationConfig, variant: str, step: str) -> str:
    """Where a step's settings stand in the file; the variant is named if it changes them."""
    changed = any(key.partition(".")[0] == step for key in grid.variants[variant])
    return f"step '{step}' of variant '{variant}'" if changed else f"step '{step}'"


@dataclass(frozen=True)
class _Resolver:
    """Turns recipes into runs; equal ones into one."""

    grid: AblationConfig
    runs: dict[Path, StepRun] = field(default_factory=dict)
    fingerprints: dict[Path, str] = field(default_factory=dict)

    def cell(self, chain: Sequence[_Step], variant: str, seed: int) -> Cell:
        """The cell of a variant and a seed; its runs are kept in `runs`."""
        folders: dict[str, Path] = {}
        for step in chain:
            values = fill(step.recipe, {SEED: seed} | {name: str(folder) for name, folder in folders.items()})
            needs = tuple(folders[name] for name in sorted(step.needs - {SEED}))
            run = self._run(step.name, values, needs, _place(self.grid, variant, step.name))
            folders[step.name] = run.folder
            self.runs[run.folder] = run
        return Cell(variant, seed, {step.name: folders[step.name] for step in chain if _evaluates(step.recipe)})

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


def _check_use(grid: AblationConfig, own_steps: set[str], chains: Mapping[str, Sequence[_Step]]) -> None:
    steps = [step for chain in chains.values() for step in chain]
    if idle := sorted(own_steps - {step.name for step in steps}):
        raise SkilltrainError("leads to no evaluation in any variant", where=f"step '{idle[0]}'")
    if "seeds" in grid.model_fields_set and not any(SEED in step.needs for step in steps):
        what = "no step uses {seed}, so all seeds would be the same"
        raise SkilltrainError(what, where="seeds", fix="write e.g. training: {seed: '{seed}'}, or leave seeds out")


def _check_variants(plan: Plan) -> None:
    first: dict[tuple[Path, ...], str] = {}
    for cell in plan.cells:
        key = tuple(cell.evaluations.values())
        if (other := first.setdefault(key, cell.variant)) != cell.variant:
            what = f"the variants '{other}' and '{cell.variant}' have equal settings"
            raise SkilltrainError(what, fix="let each differ from `steps` in its own way")


def _check_evaluations(plan: Plan) -> None:
    """Each evaluation asks the same of every variant, and ranks with one system."""
    first: dict[str, tuple[str, tuple[Any, ...]]] = {}
    baseline = {name for cell in plan.cells if cell.variant == plan.grid.baseline for name in cell.evaluations}
    for cell in plan.cells:
        for name, folder in cell.evaluations.items():
            config, where = plan.runs[folder].config, _place(plan.grid, cell.variant, name)
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
