"""An ablation's file: a chain of steps, the variants of it, and the seeds."""

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from skilltrain.config import Config, Seed, apply_overrides, laid_over, load_recipe, set_value, validate
from skilltrain.errors import SkilltrainError

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
    variants: dict[str, dict[str, Any] | None] = Field(
        min_length=2,
        description="name: what differs from `steps`, 'step.key.key': value; an item of a list is named by its number "
        "from 0",
    )
    seeds: tuple[Seed, ...] = Field(default=(1, 2, 3), min_length=1, description="one cell for each variant and seed")
    compare: tuple[str, ...] = Field(
        default=("Hit@1", "MRR@10"), min_length=1, description="the measures by which variants are compared"
    )
    runs: Path | None = Field(
        default=None,
        description="folder of the steps' runs; grids that name the same one share runs; null: steps in `out`",
    )
    out: Path = Field(description="folder to write: ablation.json, ablation.md, ablation.html")

    @model_validator(mode="after")
    def _consistent(self) -> "AblationConfig":
        if self.baseline not in self.variants:
            raise ValueError(f"baseline: no variant is called '{self.baseline}'; variants: {', '.join(self.variants)}")
        for name in self.steps:
            if name == SEED or not _STEP_NAME.fullmatch(name):
                raise ValueError(f"steps: '{name}' cannot name a step: letters, digits, _ and -, and not '{SEED}'")
        return self

    @property
    def runs_folder(self) -> Path:
        """Where the steps' runs stand."""
        return self.out / "steps" if self.runs is None else self.runs


def load_grid(file: Path, overrides: Sequence[str]) -> tuple[AblationConfig, set[str]]:
    """The grid in `file`, its chain under its steps, and the names of the steps that the grid itself gives."""
    values = load_recipe(file)
    own: set[str] = {*values.get("steps", {})}
    if isinstance(chain := apply_overrides(values, overrides).get("chain"), str):
        values["steps"] = laid_over(load_recipe(file.parent / chain), values.get("steps", {}))
    return validate(AblationConfig, apply_overrides(values, overrides), file), own


def recipes_of(grid: AblationConfig, variant: str) -> dict[str, Recipe]:
    """Step name → recipe, as the variant changes it. Raises SkilltrainError for a change that cannot be made."""
    recipes = copy.deepcopy(grid.steps)
    for key, value in (grid.variants[variant] or {}).items():
        where, (step, dot, _) = f"variant '{variant}', {key}", key.partition(".")
        if not dot or step not in recipes:
            raise SkilltrainError(f"is no 'step.key'; steps: {', '.join(recipes)}", where=where)
        set_value(recipes, key, copy.deepcopy(value), where)
    return recipes


def fill(value: Any, place: Callable[[str], Any]) -> Any:
    """`value` with `place(name)` for every `{name}` in its texts; a text that is nothing else becomes that itself."""
    if isinstance(value, dict):
        return {key: fill(item, place) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, place) for item in value]
    if not isinstance(value, str):
        return value
    if (whole := _PLACE.fullmatch(value)) and whole[1] is not None:
        return place(whole[1])
    return _PLACE.sub(lambda match: match[0][0] if match[1] is None else str(place(match[1])), value)


def places_in(value: Any, known: set[str]) -> set[str]:
    """The names that stand in braces in the texts of `value`. Raises SkilltrainError for one that is not `known`."""
    found: set[str] = set()
    fill(value, found.add)
    if unknown := sorted(found - known):
        what = f"'{{{unknown[0]}}}' is no step; steps: {', '.join(sorted(known - {SEED}))}"
        raise SkilltrainError(what, fix="plain braces are written {{ }}")
    return found
