"""What the page on lists is made of, read once: entries of lists as aligned arrays, their skills, drops and flags."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float64, Int64

from skilltrain.records import POSITIVE, Dropped, Skill
from skilltrain.report.trail import Step, Trail, follow
from skilltrain.tables import (
    CLUSTERS,
    DROPPED,
    FLAGS,
    LISTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    read_table,
    skills_from_table,
    table_path,
)

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Entries:
    """The entries of all lists in order. `skill`: place in the material's skills; `source`, `verdict`: codes."""

    list: Int64[np.ndarray, " entry"]
    skill: Int64[np.ndarray, " entry"]
    source: Int64[np.ndarray, " entry"]
    verdict: Int64[np.ndarray, " entry"]
    rank: Int64[np.ndarray, " entry"]
    teacher_score: Float64[np.ndarray, " entry"]  # NaN where no teacher scored
    positive: Bool[np.ndarray, " entry"]


@dataclass(frozen=True)
class Material:
    """Lists with the skills in use. One that the pool lacks has empty texts and is not `known`.

    `num_pool` is None without a pool, `mined` and `kept` (candidates by source) where their run was not found, `flags`
    where the pool was not screened, `clusters` (of each skill, -1 for none) where there are none.
    """

    trail: Trail
    query_ids: list[str]
    query_texts: dict[str, str]
    entries: Entries
    sources: list[str]
    verdicts: list[str]
    skills: list[Skill]
    known: Bool[np.ndarray, " skill"]
    num_pool: int | None
    mined: Counter[str] | None
    kept: Counter[str] | None
    drops: list[Dropped]
    flags: list[dict[str, Any]] | None
    clusters: Int64[np.ndarray, " skill"] | None

    @cached_property
    def texts(self) -> list[str]:
        """The query of each list; empty where it was not found."""
        return [self.query_texts.get(query_id, "") for query_id in self.query_ids]

    @cached_property
    def position(self) -> dict[str, int]:
        """skill_id → place in `skills`."""
        return {skill.skill_id: place for place, skill in enumerate(self.skills)}

    @cached_property
    def positives(self) -> dict[str, int]:
        """query_id of a list → the place of its first positive."""
        entries, found = self.entries, dict[str, int]()
        for entry in np.flatnonzero(entries.positive).tolist():
            found.setdefault(self.query_ids[entries.list[entry]], int(entries.skill[entry]))
        return found

    @cached_property
    def body_chars(self) -> Int64[np.ndarray, " skill"]:
        """Characters of the body of each skill."""
        return np.array([len(skill.body) for skill in self.skills], dtype=np.int64)

    def num_lists(self, positive: bool) -> Int64[np.ndarray, " skill"]:
        """How often each skill is a positive, or a negative, of a list."""
        mine = self.entries.positive == positive
        return np.bincount(self.entries.skill[mine], minlength=len(self.skills))

    def like_a_positive(self, numbers: Int64[np.ndarray, " skill"]) -> Bool[np.ndarray, " entry"]:
        """Which entries are negatives whose skill has the number of a positive of their list; -1 equals nothing."""
        entries, own = self.entries, numbers[self.entries.skill]
        key = entries.list * (int(numbers.max(initial=0)) + 1) + own
        return ~entries.positive & (own >= 0) & np.isin(key, key[entries.positive & (own >= 0)])


def codes(values: Iterable[str | None]) -> Int64[np.ndarray, " value"]:
    """Equal numbers for equal values; -1 for None and for the empty text."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) if value else -1 for value in values], dtype=np.int64)


def read_material(lists: Path, pool: Path | None) -> Material:
    """The material of the folder `lists`. Raises SkilltrainError where its lists or the given pool cannot be read."""
    trail = follow(lists, pool)
    rows = read_table(lists, LISTS).to_pylist()
    drops = _drops(trail)
    used = {skill_id for row in rows for skill_id in row["skill_ids"]}
    used |= {skill_id for drop in drops for skill_id in (drop.skill_id, drop.other_id) if skill_id}
    skills, num_known, num_pool = _skills(trail, used)
    entries, sources, verdicts = _entries(rows, {skill.skill_id: place for place, skill in enumerate(skills)})
    mined = next((step for step in trail.steps if step.mines), None)
    kept = next((step for step in trail.steps if step.filters), mined)
    flags = trail.read(trail.pool.parent if trail.pool and trail.pool.is_file() else trail.pool, FLAGS)
    return Material(
        trail=trail,
        query_ids=[row["query_id"] for row in rows],
        query_texts=_query_texts(trail),
        entries=entries,
        sources=sources,
        verdicts=verdicts,
        skills=skills,
        known=np.arange(len(skills)) < num_known,
        num_pool=num_pool,
        mined=_by_stage(trail, mined),
        kept=_by_stage(trail, kept),
        drops=drops,
        flags=None if flags is None else flags.to_pylist(),
        clusters=_clusters(trail, skills),
    )


def _entries(rows: Sequence[dict[str, Any]], places: dict[str, int]) -> tuple[Entries, list[str], list[str]]:
    """(the entries, the sources and the verdicts that their codes stand for)."""
    sources = list(dict.fromkeys(source for row in rows for source in row["sources"]))
    verdicts = list(dict.fromkeys(verdict for row in rows for verdict in row["verdicts"]))
    scores = [row["teacher_scores"] or [np.nan] * len(row["skill_ids"]) for row in rows]
    verdict = np.array([verdicts.index(value) for row in rows for value in row["verdicts"]], dtype=np.int64)
    is_positive = np.array([value in POSITIVE for value in verdicts], dtype=bool)
    entries = Entries(
        list=np.repeat(np.arange(len(rows)), [len(row["skill_ids"]) for row in rows]),
        skill=np.array([places[skill_id] for row in rows for skill_id in row["skill_ids"]], dtype=np.int64),
        source=np.array([sources.index(value) for row in rows for value in row["sources"]], dtype=np.int64),
        verdict=verdict,
        rank=np.array([rank for row in rows for rank in row["ranks"]], dtype=np.int64),
        teacher_score=np.array([score for row in scores for score in row], dtype=np.float64),
        positive=is_positive[verdict] if verdicts else np.zeros(0, dtype=bool),
    )
    return entries, sources, verdicts


def _skills(trail: Trail, used: set[str]) -> tuple[list[Skill], int, int | None]:
    """(the skills in use, those of the pool first; how many it holds of them; how many it holds in all)."""
    table = trail.read(trail.pool, SKILLS)
    pool = [] if table is None else skills_from_table(table)
    found = [skill for skill in pool if skill.skill_id in used]
    strangers = sorted(used - {skill.skill_id for skill in found})
    unknown = [Skill(skill_id, skill_id, "", "") for skill_id in strangers]
    return [*found, *unknown], len(found), None if table is None else len(pool)


def _query_texts(trail: Trail) -> dict[str, str]:
    """query_id → text, from the lists' own queries and from those they were made of (drops name the latter)."""
    texts: dict[str, str] = {}
    for path in (trail.queries, trail.lists):
        if (table := trail.read(path, QUERIES)) is not None:
            texts |= dict(zip(table.column("query_id").to_pylist(), table.column("text").to_pylist(), strict=True))
    if not texts:
        trail.missing.append("queries: no table of them was found; lists are shown without their query's text")
    return texts


def _by_stage(trail: Trail, step: Step | None) -> Counter[str] | None:
    """Candidates by source; of millions of rows only this column is read."""
    if step is None:
        return None
    file = table_path(step.folder, RANKINGS)
    try:
        column = pq.read_table(file, columns=["stage"]).column("stage")
    except (pa.ArrowException, OSError) as error:
        trail.missing.append(f"{file}: cannot be read: {error}")
        return None
    return Counter({row["values"]: row["counts"] for row in column.value_counts().to_pylist()})


def _drops(trail: Trail) -> list[Dropped]:
    """The candidates that filters took out, in the order of filtering."""
    filters = [step for step in reversed(trail.steps) if step.filters]
    tables = [table for step in filters if (table := trail.read(step.folder, DROPPED)) is not None]
    return [Dropped(**row) for table in tables for row in table.to_pylist()]


def _clusters(trail: Trail, skills: Sequence[Skill]) -> Int64[np.ndarray, " skill"] | None:
    if (table := trail.read(trail.clusters, CLUSTERS)) is None:
        return None
    clusters = dict(zip(*(table.column(name).to_pylist() for name in ("skill_id", "cluster")), strict=True))
    return np.array([clusters.get(skill.skill_id, -1) for skill in skills], dtype=np.int64)
