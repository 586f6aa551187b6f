"""What the page on lists is made of, read once: the lists' entries as aligned arrays, and the runs that made them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float64, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.records import POSITIVE, Dropped, Skill
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
    skills_from_table,
    table_path,
)

_INPUTS = ("lists", "rankings", "queries", "pool", "clusters")  # the settings by which a stage names runs before it


class Run(NamedTuple):
    """A run on the way to the lists: its stage, its folder and its settings."""

    stage: str
    folder: Path
    recipe: Mapping[str, Any]

    @property
    def ranks(self) -> bool:
        """Whether it wrote candidates: it mined them, or filtered those that its recipe names."""
        return table_path(self.folder, RANKINGS).is_file()


@dataclass(frozen=True)
class Trail:
    """The runs from the lists back, nearest first, what they read (setting → paths), and what is missing of it."""

    folder: Path
    runs: list[Run] = field(default_factory=list)
    inputs: dict[str, list[Path]] = field(default_factory=lambda: {name: [] for name in _INPUTS})
    missing: list[str] = field(default_factory=list)

    def follow(self, folder: Path) -> None:
        """Add the run of `folder` and those before it."""
        if any(run.folder == folder for run in self.runs):
            return
        try:
            recipe = read_json(folder / "run.json")["recipe"]
        except (SkilltrainError, KeyError):
            if folder not in (path.resolve() for name in ("queries", "pool") for path in self.inputs[name]):
                self.missing.append(f"{folder}: no record of its run (run.json)")
            return
        self.runs.append(Run(recipe["stage"], folder, recipe))
        for name in _INPUTS:
            if not isinstance(written := recipe.get(name), str):
                continue
            if found := self._locate(Path(written).expanduser()):
                self.inputs[name].append(found)
                self.follow(found if found.is_dir() else found.parent)
            elif name in ("lists", "rankings"):
                self.missing.append(f"{name} of stage {recipe['stage']}: {written}")

    def _locate(self, path: Path) -> Path | None:
        """A recipe's path as written, from every folder above the lists, or by its name beside them: runs move."""
        places = [path, *(parent / path for parent in self.folder.parents), self.folder.parent / path.name]
        return next((place.resolve() for place in places if place.exists()), None)

    def read(self, path: Path | None, spec: TableSpec) -> pa.Table | None:
        """A table; None where it is not there, and a line in `missing` for a broken one."""
        if path is None or not table_path(path, spec).is_file():
            return None
        try:
            return read_table(path, spec)
        except SkilltrainError as error:
            self.missing.append(str(error))
            return None


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
    drops: tuple[Dropped, ...]
    flags: tuple[Mapping[str, Any], ...] | None
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
    if not table_path(lists, LISTS).is_file():
        what = "holds no lists" if lists.is_dir() else "no such folder"
        raise SkilltrainError(what, where=lists, fix="give the folder that `skilltrain lists` wrote")
    if pool is not None and not table_path(pool, SKILLS).is_file():
        raise SkilltrainError("holds no pool", where=pool, fix="give the folder that `skilltrain pool` wrote")
    table = read_table(lists, LISTS)
    trail = Trail(lists.resolve() if lists.is_dir() else lists.resolve().parent)
    trail.follow(trail.folder)
    pool = pool or next(iter(trail.inputs["pool"]), None)
    mined = next((run for run in trail.runs if run.ranks and "rankings" not in run.recipe), None)
    filters = [run for run in trail.runs if run.ranks and "rankings" in run.recipe]
    dropped = (trail.read(run.folder, DROPPED) for run in reversed(filters))
    drops = tuple(Dropped(**row) for table in dropped if table is not None for row in table.to_pylist())
    ids = set[str]().union(*table.column("skill_ids").to_pylist(), *({d.skill_id, d.other_id or ""} for d in drops))
    skills, num_known, num_pool = _skills(trail, pool, ids - {""})
    flags = trail.read(pool.parent if pool and pool.is_file() else pool, FLAGS)
    return Material(
        trail=trail,
        query_ids=table.column("query_id").to_pylist(),
        query_texts=_query_texts(trail),
        skills=skills,
        known=np.arange(len(skills)) < num_known,
        num_pool=num_pool,
        mined=_by_source(trail, mined),
        kept=_by_source(trail, filters[0] if filters else mined),
        drops=drops,
        flags=None if flags is None else tuple(flags.to_pylist()),
        clusters=_clusters(trail, next(iter(trail.inputs["clusters"]), pool), skills),
        **_entries(table.to_pylist(), {skill.skill_id: place for place, skill in enumerate(skills)}),
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


def _skills(trail: Trail, pool: Path | None, used: set[str]) -> tuple[list[Skill], int, int | None]:
    """(the skills in use, those of the pool first; how many it holds of them; how many it holds in all)."""
    if (table := trail.read(pool, SKILLS)) is None:
        trail.missing.append("pool: texts of skills are missing (give --pool)")
        table = SKILLS.schema.empty_table()
        pool = None
    found = [skill for skill in skills_from_table(table) if skill.skill_id in used]
    strangers = sorted(used - {skill.skill_id for skill in found})
    unknown = [Skill(skill_id, skill_id, "", "") for skill_id in strangers]
    return [*found, *unknown], len(found), table.num_rows if pool else None


def _query_texts(trail: Trail) -> dict[str, str]:
    """query_id → text, from the lists' own queries and from those they were made of (drops name the latter)."""
    texts: dict[str, str] = {}
    for path in (*trail.inputs["queries"], trail.folder):
        if (table := trail.read(path, QUERIES)) is not None:
            texts |= {row["query_id"]: row["text"] for row in table.select(["query_id", "text"]).to_pylist()}
    if not texts:
        trail.missing.append("queries: lists are shown without their query's text")
    return texts


def _by_source(trail: Trail, run: Run | None) -> Counter[str] | None:
    """Candidates by source; of millions of rows only this column is read."""
    if run is None:
        return None
    file = table_path(run.folder, RANKINGS)
    try:
        column = pq.read_table(file, columns=["stage"]).column("stage")
    except (pa.ArrowException, OSError) as error:
        trail.missing.append(f"{file}: cannot be read: {error}")
        return None
    return Counter({row["values"]: row["counts"] for row in column.value_counts().to_pylist()})


def _clusters(trail: Trail, path: Path | None, skills: list[Skill]) -> Int64[np.ndarray, " skill"] | None:
    if (table := trail.read(path, CLUSTERS)) is None:
        return None
    clusters = {row["skill_id"]: row["cluster"] for row in table.to_pylist()}
    return np.array([clusters.get(skill.skill_id, -1) for skill in skills], dtype=np.int64)
