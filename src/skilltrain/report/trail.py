"""Where lists came from: the runs before them, found by the records that runs leave in their folders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.tables import LISTS, RANKINGS, SKILLS, TableSpec, read_table, table_path

_INPUTS = ("lists", "rankings", "queries", "pool")  # the settings by which a stage names the runs before it


@dataclass(frozen=True)
class Step:
    """A run on the way to the lists: its stage, its folder and its settings."""

    stage: str
    folder: Path
    recipe: Mapping[str, Any]

    @property
    def ranks(self) -> bool:
        """Whether it wrote candidates."""
        return table_path(self.folder, RANKINGS).is_file()

    @property
    def filters(self) -> bool:
        """Whether it took candidates out of a ranking."""
        return self.ranks and "rankings" in self.recipe

    @property
    def mines(self) -> bool:
        """Whether it made the candidates that others filtered."""
        return self.ranks and "rankings" not in self.recipe


@dataclass
class Trail:
    """The runs from the lists back, nearest first, the tables that they read, and what of it could not be found."""

    lists: Path
    steps: list[Step] = field(default_factory=list)
    pool: Path | None = None
    queries: Path | None = None
    clusters: Path | None = None
    missing: list[str] = field(default_factory=list)

    def read(self, path: Path | None, spec: TableSpec) -> pa.Table | None:
        """A table; None where it is not there, and a line in `missing` where it cannot be read."""
        if path is None or not table_path(path, spec).is_file():
            return None
        try:
            return read_table(path, spec)
        except SkilltrainError as error:
            self.missing.append(str(error))
            return None

    def made_by(self) -> list[tuple[str, Path]]:
        """(stage, folder) of every run that led here, first to last."""
        known = {step.folder for step in self.steps}
        inputs = [("pool", self.pool), ("queries", self.queries)]
        given = [(name, path) for name, path in inputs if path is not None and path not in known]
        return [*given, *((step.stage, step.folder) for step in reversed(self.steps))]


def follow(lists: Path, pool: Path | None) -> Trail:
    """The trail of the folder `lists`; `pool` stands in for the pool that its recipe names.

    Raises SkilltrainError where `lists` holds no lists or `pool` no skills; all else may be missing.
    """
    if not table_path(lists, LISTS).is_file():
        what = "holds no lists" if lists.is_dir() else "no such folder"
        raise SkilltrainError(what, where=lists, fix="give the folder that `skilltrain lists` wrote")
    if pool is not None and not table_path(pool, SKILLS).is_file():
        raise SkilltrainError("holds no pool", where=pool, fix="give the folder that `skilltrain pool` wrote")
    trail = Trail(lists.resolve() if lists.is_dir() else lists.resolve().parent)
    _find_steps(trail)
    trail.pool = pool or _named(trail, "pool", trail.steps)
    trail.queries = _named(trail, "queries", [*(step for step in trail.steps[::-1] if step.ranks), *trail.steps[:1]])
    trail.clusters = _named(trail, "clusters", trail.steps) or trail.pool
    if trail.pool is None:
        trail.missing.append("pool: no run names one that is still there; texts of skills are missing (give --pool)")
    return trail


def _find_steps(trail: Trail) -> None:
    """Fill in the steps, from the lists back, and what of the way to the candidates is missing."""
    waiting, seen = [(trail.lists, "lists")], set[Path]()
    while waiting:
        path, key = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        if (step := _step(path)) is None:
            if key in ("lists", "rankings"):
                trail.missing.append(f"{path}: no record of its run (run.json); what came before it is unknown")
            continue
        trail.steps.append(step)
        for name in _INPUTS:
            written = step.recipe.get(name)
            found = _locate(written, trail.lists) if isinstance(written, str) else None
            if found is not None:
                waiting.append((found, name))
            elif written is not None and name in ("lists", "rankings"):
                trail.missing.append(f"{name} of stage {step.stage}: {written} is not there any more")


def _step(path: Path) -> Step | None:
    folder = path if path.is_dir() else path.parent
    try:
        recipe = read_json(folder / "run.json")["recipe"]
        return Step(str(recipe["stage"]), folder, recipe)
    except (SkilltrainError, KeyError, TypeError):
        return None


def _named(trail: Trail, key: str, steps: list[Step]) -> Path | None:
    """The first step's input of this name that is still there."""
    written = (step.recipe.get(key) for step in steps)
    found = (_locate(path, trail.lists) for path in written if isinstance(path, str))
    return next((path for path in found if path is not None), None)


def _locate(written: str, lists: Path) -> Path | None:
    """A recipe's path as written, from every folder above the lists, or by its name beside them: runs move."""
    path = Path(written).expanduser()
    places = [path, *(parent / path for parent in lists.parents), lists.parent / path.name]
    return next((place for place in places if place.exists()), None)
