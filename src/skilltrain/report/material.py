"""What the page on lists is made of, read once: the lists' entries as aligned arrays, and the runs that made them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Bool, Float64, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.records import POSITIVE, Dropped, Skill
from skilltrain.runs import RUN_FILE
from skilltrain.tables import (
    CLUSTERS,
    DROPPED,
    FLAGS,
    LISTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    TableSpec,
    read_table,
    table_path,
)

_INPUTS = ("lists", "rankings", "queries", "pool", "clusters")  # the settings by which a stage names runs before it


class Run(NamedTuple):
    """A run on the way to the lists: its stage, its folder and its settings."""

    stage: str
    folder: Path
    recipe: Mapping[str, Any]

    @property
    def mines(self) -> bool:
        """Whether it found candidates."""
        return table_path(self.folder, RANKINGS).is_file() and "rankings" not in self.recipe

    @property
    def filters(self) -> bool:
        """Whether it filtered the candidates that its recipe names."""
        return table_path(self.folder, RANKINGS).is_file() and "rankings" in self.recipe


@dataclass(frozen=True)
class Trail:
    """The runs from the lists back, nearest first, what they read (setting → paths), and what is missing of it."""

    folder: Path
    runs: list[Run] = field(default_factory=list)
    inputs: dict[str, list[Path]] = field(default_factory=lambda: {name: [] for name in _INPUTS})
    missing: list[str] = field(default_factory=list)

    def follow(self, folder: Path) -> None:
        """Add the run of `folder` and those before it; a pool or queries that no stage wrote have no record."""
        if any(run.folder == folder for run in self.runs):
            return
        if not (folder / RUN_FILE).is_file():
            if folder not in (*self.inputs["queries"], *self.inputs["pool"]):
                self.missing.append(f"{folder}: no record of its run ({RUN_FILE})")
            return
        recipe = read_json(folder / RUN_FILE)["recipe"]
        self.runs.append(Run(recipe["stage"], folder, recipe))
        for name in (name for name in _INPUTS if isinstance(recipe.get(name), str)):
            # as written, from every folder above the lists, or by its name beside them: runs move
            written = Path(recipe[name]).expanduser()
            places = [written, *(parent / written for parent in self.folder.parents), self.folder.parent / written.name]
            if found := next((place.resolve() for place in places if place.exists()), None):
                self.inputs[name].append(found)
                self.follow(found if found.is_dir() else found.parent)
            elif name in ("lists", "rankings"):
                self.missing.append(f"{name} of stage {recipe['stage']}: {recipe[name]}")

    def first(self, name: str) -> Path | None:
        """What the nearest run read as `name`."""
        return next(iter(self.inputs[name]), None)


def rows_of(path: Path | None, spec: TableSpec) -> list[dict[str, Any]] | None:
    """The rows of a table; None where it is not there."""
    if path is None or not table_path(path, spec).is_file():
        return None
    return read_table(path, spec).to_pylist()


@dataclass(frozen=True)
class Material:
    """Lists, entry by entry, with the skills in use; one that the pool lacks has empty texts and is not `known`.

    `skill`, `source` and `verdict` of an entry are places in `skills`, `sources` and `verdicts`. `num_pool` is None
    without a pool, `mined` and `kept` (candidates by source) where their run was not found, `flags` where the pool was
    not screened, `clusters` (of each skill, -1 for none) where there are none.
    """

    trail: Trail
    query_ids: list[str]
    query_texts: dict[str, str]
    sources: list[str]
    verdicts: list[str]
    skills: list[Skill]
    known: Bool[np.ndarray, " skill"]
    in_list: Int64[np.ndarray, " entry"]
    skill: Int64[np.ndarray, " entry"]
    source: Int64[np.ndarray, " entry"]
    verdict: Int64[np.ndarray, " entry"]
    rank: Int64[np.ndarray, " entry"]
    score: Float64[np.ndarray, " entry"]  # of a teacher; NaN where none scored
    positive: Bool[np.ndarray, " entry"]
    num_pool: int | None
    mined: Counter[str] | None
    kept: Counter[str] | None
    drops: Sequence[Dropped]
    flags: Sequence[Mapping[str, Any]] | None
    clusters: Int64[np.ndarray, " skill"] | None

    @cached_property
    def position(self) -> dict[str, int]:
        """skill_id → place in `skills`."""
        return {skill.skill_id: place for place, skill in enumerate(self.skills)}

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The query of each list; empty where it was not found."""
        return tuple(self.query_texts.get(query_id, "") for query_id in self.query_ids)

    @cached_property
    def body_chars(self) -> Int64[np.ndarray, " skill"]:
        """Characters of the body of each skill."""
        return np.array([len(skill.body) for skill in self.skills], dtype=np.int64)

    def num_lists(self, positive: bool) -> Int64[np.ndarray, " skill"]:
        """How often each skill is a positive, or a negative, of a list."""
        return np.bincount(self.skill[self.positive == positive], minlength=len(self.skills))

    def like_a_positive(self, numbers: Int64[np.ndarray, " skill"]) -> Bool[np.ndarray, " entry"]:
        """Which entries are negatives whose skill has the number of a positive of their list; -1 equals nothing."""
        own = numbers[self.skill]
        key = self.in_list * (int(numbers.max(initial=0)) + 1) + own
        return ~self.positive & (own >= 0) & np.isin(key, key[self.positive & (own >= 0)])


def read_material(lists: Path, pool: Path | None) -> Material:
    """The material of the folder `lists`; `pool` stands in for the pool that the runs name.

    Raises SkilltrainError where `lists` holds no lists or `pool` no skills; all else may be missing.
    """
    if (rows := rows_of(lists, LISTS)) is None:
        what = "holds no lists" if lists.is_dir() else "no such folder"
        raise SkilltrainError(what, where=lists, fix="give the folder that `skilltrain lists` wrote")
    if pool is not None and not table_path(pool, SKILLS).is_file():
        raise SkilltrainError("holds no pool", where=pool, fix="give the folder that `skilltrain pool` wrote")
    trail = Trail(lists.resolve() if lists.is_dir() else lists.resolve().parent)
    trail.follow(trail.folder)
    pool = pool or trail.first("pool")
    mined = next((run for run in trail.runs if run.mines), None)
    filters = [run for run in trail.runs if run.filters]
    drops = [Dropped(**row) for run in reversed(filters) for row in rows_of(run.folder, DROPPED) or ()]
    used = {skill_id for row in rows for skill_id in row["skill_ids"]}
    used |= {skill_id for drop in drops for skill_id in (drop.skill_id, drop.other_id) if skill_id}
    in_pool = rows_of(pool, SKILLS)
    if in_pool is None:
        trail.missing.append("pool: texts of skills are missing (give --pool)")
    known = [Skill(**row) for row in in_pool or () if row["skill_id"] in used]
    unknown = sorted(used - {skill.skill_id for skill in known})
    skills = [*known, *(Skill(skill_id, skill_id, "", "") for skill_id in unknown)]
    found = (rows_of(path, QUERIES) or () for path in (*trail.inputs["queries"], trail.folder))
    texts = {row["query_id"]: row["text"] for rows in found for row in rows}  # drops name queries that have no list
    if not texts:
        trail.missing.append("queries: lists are shown without their query's text")
    clustered = rows_of(trail.first("clusters") or pool, CLUSTERS)
    clusters = {row["skill_id"]: row["cluster"] for row in clustered or ()}
    return Material(
        trail=trail,
        query_ids=[row["query_id"] for row in rows],
        query_texts=texts,
        skills=skills,
        known=np.arange(len(skills)) < len(known),
        num_pool=None if in_pool is None else len(in_pool),
        mined=_by_source(mined),
        kept=_by_source(filters[0] if filters else mined),
        drops=drops,
        flags=rows_of(pool.parent if pool and pool.is_file() else pool, FLAGS),
        clusters=None if clustered is None else np.array([clusters.get(skill.skill_id, -1) for skill in skills]),
        **_entries(rows, {skill.skill_id: place for place, skill in enumerate(skills)}),
    )


def _entries(rows: list[dict[str, Any]], places: Mapping[str, int]) -> dict[str, Any]:
    """The lists' entries as aligned arrays, and what the codes of sources and verdicts stand for."""
    sources, source = codes(value for row in rows for value in row["sources"])
    verdicts, verdict = codes(value for row in rows for value in row["verdicts"])
    scores = [row["teacher_scores"] or [np.nan] * len(row["skill_ids"]) for row in rows]
    return {
        "sources": sources,
        "verdicts": verdicts,
        "in_list": np.repeat(np.arange(len(rows)), [len(row["skill_ids"]) for row in rows]),
        "skill": np.array([places[skill_id] for row in rows for skill_id in row["skill_ids"]], dtype=np.int64),
        "source": source,
        "verdict": verdict,
        "rank": np.array([rank for row in rows for rank in row["ranks"]], dtype=np.int64),
        "score": np.array([score for row in scores for score in row], dtype=np.float64),
        "positive": np.isin(verdict, [place for place, name in enumerate(verdicts) if name in POSITIVE]),
    }


def codes(values: Iterable[str | None]) -> tuple[list[str], Int64[np.ndarray, " value"]]:
    """(the distinct values, the place of each value among them); -1 for None and for the empty text."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(value, len(numbers)) if value else -1 for value in values]
    return list(numbers), np.array(found, dtype=np.int64)


def _by_source(run: Run | None) -> Counter[str] | None:
    """Candidates by source; of millions of rows only this column is read."""
    if run is None:
        return None
    column = pq.read_table(table_path(run.folder, RANKINGS), columns=["stage"]).column("stage")
    return Counter({row["values"]: row["counts"] for row in column.value_counts().to_pylist()})
