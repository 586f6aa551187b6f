"""An ablation's file: a chain of steps, the variants of it, and the seeds."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from skilltrain.config import Config, apply_overrides, load_recipe, validate
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import MeasureNames

SEED = "seed"
_STEP_NAME = re.compile("[A-Za-z][A-Za-z0-9_-]*")
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
Recipe = dict[str, Any]


class AblationConfig(Config):
    """A grid: every variant of a chain of stages, with every seed, evaluated on the same queries."""

    ablation: str = Field(min_length=1, description="title of the tables")
    claim: str = Field(min_length=1, description="what is tested, in one sentence")
    baseline: str = Field(description="the variant that the others are compared with")
    chain: Path | None = Field(
        default=None,
        description="YAML file of steps, relative to the grid's own folder; `steps` is laid over it, key by key",
    )
    steps: dict[str, Recipe] = Field(
        min_length=1,
        description="name: recipe of a stage, without out; '{NAME}' in a text is another step's folder, '{seed}' the "
        "seed, and {{ }} are plain braces. Every evaluation ranks with one system and gives one table",
    )
    variants: dict[str, dict[str, Any]] = Field(
        min_length=2,
        description="name: what differs from `steps`: 'step.key.key': value, 'step': a whole recipe in its place, or "
        "'step': null to leave it out; an item of a list is named by its number from 0",
    )
    seeds: tuple[int, ...] = Field(default=(1, 2, 3), min_length=1, description="one cell for each variant and seed")
    compare: MeasureNames = Field(
        default=("Hit@1", "MRR@10"), min_length=1, description="the measures by which variants are compared"
    )
    bootstrap_seed: int = Field(default=0, description="seed of the intervals")
    runs: Path | None = Field(
        default=None,
        description="folder of the steps' runs; grids that name the same one share runs; null: steps in `out`",
    )
    out: Path = Field(description="folder to write: ablation.json, ablation.md")

    @field_validator("variants", mode="before")
    @classmethod
    def _empty_variants(cls, value: Any) -> Any:
        """A variant without a line differs in nothing."""
        if not isinstance(value, dict):
            return value
        return {name: {} if changes is None else changes for name, changes in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> "AblationConfig":
        if self.baseline not in self.variants:
            raise ValueError(f"baseline: no variant is called '{self.baseline}'; variants: {', '.join(self.variants)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: a seed stands twice")
        for name in self.steps:
            if name == SEED or not _STEP_NAME.fullmatch(name):
                raise ValueError(f"steps: '{name}' cannot name a step: letters, digits, _ and -, and not '{SEED}'")
        for variant, changes in self.variants.items():
            for key in changes:
                if key.partition(".")[0] not in self.steps:
                    raise ValueError(f"variant '{variant}': '{key}' changes no step; steps: {', '.join(self.steps)}")
        return self

    @property
    def runs_folder(self) -> Path:
        """Where the steps' runs stand."""
        return self.out / "steps" if self.runs is None else self.runs


def load_grid(file: Path, overrides: Sequence[str]) -> tuple[AblationConfig, set[str]]:
    """The grid in `file`, its chain under its steps, and the names of the steps that the grid itself gives.

    Raises SkilltrainError for a fault in either file.
    """
    values = load_recipe(file, overrides)
    own, chain = values.get("steps", {}), values.get("chain")
    if isinstance(chain, str) and isinstance(own, dict):
        steps = _laid_over(load_recipe(file.parent / chain), load_recipe(file).get("steps", {}))
        values = apply_overrides(values | {"steps": steps}, overrides)
        return validate(AblationConfig, values, file), set(own)
    grid = validate(AblationConfig, values, file)
    return grid, set(grid.steps)


def _laid_over(under: Any, over: Any) -> Any:
    """`over`, and what only `under` says; where not both are maps, `over`."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return under | {key: _laid_over(under.get(key), value) for key, value in over.items()}


def recipes_of(grid: AblationConfig, variant: str) -> dict[str, Recipe]:
    """Step name → recipe, as the variant changes it. Raises SkilltrainError for a change that cannot be made."""
    recipes = copy.deepcopy(grid.steps)
    for key, value in grid.variants[variant].items():
        where = f"variant '{variant}', {key}"
        step, *path = key.split(".")
        if step not in recipes:
            raise SkilltrainError(f"the variant leaves the step '{step}' out", where=where)
        if path:
            _set(recipes[step], path, copy.deepcopy(value), where)
        elif value is None:
            del recipes[step]
        elif isinstance(value, dict) and "stage" in value:
            recipes[step] = copy.deepcopy(value)
        else:
            fix = f"to change one setting write '{step}.key: value'"
            raise SkilltrainError("is no recipe of a stage", where=where, fix=fix)
    return recipes


def _set(node: Any, path: list[str], value: Any, where: str) -> None:
    """Set the value at `path` below `node`; missing sections are made."""
    *parents, last = path
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else node[_position(node, part, where)]
        if not isinstance(node, dict | list):
            raise SkilltrainError(f"'{part}' is a value, not a section", where=where)
    if isinstance(node, dict):
        node[last] = value
    else:
        node[_position(node, last, where)] = value


def _position(items: list[Any], part: str, where: str) -> int:
    if not (part.isdecimal() and int(part) < len(items)):
        raise SkilltrainError(f"'{part}' is no item of a list of {len(items)}, counted from 0", where=where)
    return int(part)


def places_in(value: Any, names: Iterable[str], where: str) -> set[str]:
    """The names that `{…}` in the texts of a recipe stand for. Raises SkilltrainError for one that is not there."""
    known, found = set(names), set[str]()
    for text in _texts(value, known, where):
        for match in _PLACE.finditer(text):
            if (name := match[1]) is not None and name not in known:
                what = f"'{{{name}}}' is no step; steps: {', '.join(sorted(known - {SEED}))}"
                raise SkilltrainError(what, where=where, fix="plain braces are written {{ }}")
            found |= {name} if name is not None else set()
    return found


def _texts(value: Any, known: set[str], where: str) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        if len(value) == 1 and (name := next(iter(value))) in known and value[name] is None:
            raise SkilltrainError(f"{{{name}}} without quotes is a map in YAML", where=where, fix=f'write "{{{name}}}"')
        for item in value.values():
            yield from _texts(item, known, where)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, known, where)


def fill(value: Any, places: Mapping[str, Any]) -> Any:
    """`value` with every `{name}` in its texts replaced; a text that is nothing else becomes the value itself."""
    if isinstance(value, dict):
        return {key: fill(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, places) for item in value]
    if not isinstance(value, str):
        return value
    whole = _PLACE.fullmatch(value)
    if whole and whole[1] is not None:
        return places[whole[1]]
    return _PLACE.sub(lambda match: match[0][0] if match[1] is None else str(places[match[1]]), value)
