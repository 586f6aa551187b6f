"""Where lists came from: the runs before them, found by the records that runs leave in their folders."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.tables import LISTS, RANKINGS, SKILLS, TableSpec, read_table, table_path

_RUN_FILE = "run.json"


@dataclass(frozen=True)
class Step:
    """A run on the way to the lists: its stage, its folder and its settings."""

    stage: str
    folder: Path
    recipe: Mapping[str, Any]

    @property
    def filters(self) -> bool:
        """Whether it took candidates out of a ranking."""
        return "rankings" in self.recipe and table_path(self.folder, RANKINGS).is_file()

    @property
    def mines(self) -> bool:
        """Whether it made the candidates that others filtered."""
        return "rankings" not in self.recipe and table_path(self.folder, RANKINGS).is_file()


@dataclass
class Trail:
    """The runs from the lists back to pool and queries, nearest first, and what of it could not be found."""

    lists: Path
    steps: list[Step] = field(default_factory=list)
    pool: Path | None = None
    queries: Path | None = None
    clusters: Path | None = None
    missing: list[str] = field(default_factory=list)

    def read(self, path: Path, spec: TableSpec) -> pa.Table | None:
        """A table, or None and a line in `missing`."""
        try:
            return read_table(path, spec)
        except SkilltrainError as error:
            self.missing.append(str(error))
            return None


def follow(lists: Path, pool: Path | None) -> Trail:
    """The trail of the folder `lists`; `pool` stands in for the pool that its recipe names.

    A path of a recipe is looked for as written, from every folder above `lists`, and by its name beside `lists`, for
    runs move. Raises SkilltrainError where `lists` holds no lists or `pool` no skills; all else may be missing.
    """
    if not table_path(lists, LISTS).is_file():
        raise SkilltrainError(
            "holds no lists" if lists.is_dir() else "no such folder",
            where=lists,
            fix="give the folder that `skilltrain lists` wrote",
        )
    if pool is not None and not table_path(pool, SKILLS).is_file():
        raise SkilltrainError("holds no pool", where=pool, fix="give the folder that `skilltrain pool` wrote")
    trail = Trail(lists.resolve() if lists.is_dir() else lists.resolve().parent)
    trail.steps += _runs(trail)
    trail.pool = pool or _named(trail, "pool")
    trail.queries = _named(trail, "queries", nearest=False)
    trail.clusters = _named(trail, "clusters")
    if trail.pool is None:
        trail.missing.append("pool: no run names one that is still there; texts of skills are missing (give --pool)")
    return trail


def runs_beside(trail: Trail) -> Iterator[Step]:
    """The runs that made pool and queries, where they left a record."""
    if trail.pool is not None and (step := _step(trail.pool)) is not None:
        yield step
    path, found = trail.queries, list[Step]()
    while path is not None and (step := _step(path)) is not None and step not in found:
        found.append(step)
        written = step.recipe.get("queries")
        path = _locate(written, trail.lists) if isinstance(written, str) else None
    yield from reversed(found)


def _runs(trail: Trail) -> Iterator[Step]:
    waiting, seen = [trail.lists], set[Path]()
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        if (step := _step(path)) is None:
            trail.missing.append(f"{path}: no record of its run ({_RUN_FILE}); what came before it is unknown")
            continue
        yield step
        for key in ("lists", "rankings", "queries"):
            written = step.recipe.get(key)
            found = _locate(written, trail.lists) if isinstance(written, str) else None
            if found is not None and (key != "queries" or table_path(found, LISTS).is_file()):
                waiting.append(found)
            elif isinstance(written, str) and found is None:
                trail.missing.append(f"{key} of stage {step.stage}: {written} is not there any more")


def _step(path: Path) -> Step | None:
    folder = path if path.is_dir() else path.parent
    try:
        record = read_json(folder / _RUN_FILE)
        recipe = record["recipe"]
        return Step(str(recipe["stage"]), folder, recipe)
    except (SkilltrainError, KeyError, TypeError):
        return None


def _named(trail: Trail, key: str, nearest: bool = True) -> Path | None:
    """The nearest (or the first) run's input of this name that is still there."""
    written = (step.recipe.get(key) for step in (trail.steps if nearest else reversed(trail.steps)))
    found = (_locate(path, trail.lists) for path in written if isinstance(path, str))
    return next((path for path in found if path is not None), None)


def _locate(written: str, lists: Path) -> Path | None:
    path = Path(written).expanduser()
    places = [path, *(parent / path for parent in lists.parents), lists.parent / path.name]
    return next((place for place in places if place.exists()), None)
