"""All that the page is made of, read once: entries of lists as aligned arrays, the skills they name, drops, flags."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Bool, Float64, Int64

from skilltrain.data.inspection.trail import Step, Trail, follow, runs_beside
from skilltrain.records import POSITIVE
from skilltrain.tables import CLUSTERS, DROPPED, FLAGS, LISTS, QUERIES, RANKINGS, SKILLS, read_table, table_path

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Entries:
    """The entries of all lists in order. `skill`: row in the material's skills; `source`, `verdict`: codes."""

    list: Int64[np.ndarray, " entry"]
    skill: Int64[np.ndarray, " entry"]
    source: Int64[np.ndarray, " entry"]
    verdict: Int64[np.ndarray, " entry"]
    rank: Int64[np.ndarray, " entry"]
    teacher_score: Float64[np.ndarray, " entry"]  # NaN where no teacher scored
    positive: Bool[np.ndarray, " entry"]


@dataclass(frozen=True)
class Drop:
    """A candidate that a filter took out; `gold_id` is empty where no gold skill spoke against it."""

    query_id: str
    skill_id: str
    layer: str
    value: float | None
    source: str
    gold_id: str
    reason: str


@dataclass(frozen=True)
class OtherDrops:
    """Rows of a DROPPED table that are no candidates: queries, lists, skills."""

    stage: str
    filter: str
    count: int
    example: str


@dataclass(frozen=True)
class Material:
    """Lists with their skills. `skills` holds those in use; one that the pool lacks has empty texts and is not `known`.

    `mined` and `kept` count candidates by source before and after the filters, None where their run was not found.
    """

    trail: Trail
    query_ids: list[str]
    texts: list[str]
    entries: Entries
    sources: list[str]
    verdicts: list[str]
    skills: pa.Table
    known: Bool[np.ndarray, " skill"]
    num_pool: int | None
    mined: Counter[str] | None
    kept: Counter[str] | None
    drops: Sequence[Drop]
    other_drops: Sequence[OtherDrops]
    query_texts: dict[str, str]
    flags: pa.Table | None
    clusters: Int64[np.ndarray, " skill"] | None

    @cached_property
    def position(self) -> dict[str, int]:
        """skill_id → row in `skills`."""
        return {skill_id: row for row, skill_id in enumerate(self.ids())}

    def texts_of(self, column: str) -> list[str | None]:
        """A column of `skills`."""
        return self.skills.column(column).to_pylist()

    @cached_property
    def positives(self) -> dict[str, int]:
        """query_id of a list → its first positive's row in `skills`."""
        entries, found = self.entries, dict[str, int]()
        for entry in np.flatnonzero(entries.positive).tolist():
            found.setdefault(self.query_ids[entries.list[entry]], int(entries.skill[entry]))
        return found

    def ids(self) -> list[str]:
        """The ids of `skills`."""
        return self.skills.column("skill_id").to_pylist()

    def codes_of(self, column: str) -> Int64[np.ndarray, " skill"]:
        """Equal numbers for equal texts of a column of `skills`; -1 where there is none."""
        return codes(self.texts_of(column))


def read_material(lists: Path, pool: Path | None) -> Material:
    """The material of the folder `lists`. Raises SkilltrainError where its lists or the given pool cannot be read."""
    trail = follow(lists, pool)
    table = read_table(lists, LISTS)
    drops = _drops(trail)
    query_texts = _query_texts(trail)
    flat = {name: _flat(table, name).dictionary_encode() for name in ("skill_ids", "sources", "verdicts")}
    named = {skill_id for drop in drops for skill_id in (drop.skill_id, drop.gold_id) if skill_id}
    skills, known, num_pool = _skills(trail, {*flat["skill_ids"].dictionary.to_pylist(), *named})
    entries, sources, verdicts = _entries(table, flat, skills)
    mined, kept = _ranked(trail)
    query_ids = table.column("query_id").to_pylist()
    return Material(
        trail=trail, query_ids=query_ids, texts=[query_texts.get(query_id, "") for query_id in query_ids],
        entries=entries, sources=sources, verdicts=verdicts, skills=skills, known=known, num_pool=num_pool,
        mined=mined, kept=kept, drops=drops, other_drops=_other_drops(trail), query_texts=query_texts,
        flags=_flags(trail), clusters=_clusters(trail, skills),
    )  # fmt: skip


def codes(values: Iterable[str | None]) -> Int64[np.ndarray, " value"]:
    """Equal numbers for equal values; -1 for None and for the empty text."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) if value else -1 for value in values], dtype=np.int64)


def _flat(table: pa.Table, column: str) -> pa.Array:
    """The values of a list column, one after the other."""
    values = pc.call_function("list_flatten", [table.column(column)])
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _entries(table: pa.Table, flat: dict[str, Any], skills: pa.Table) -> tuple[Entries, list[str], list[str]]:
    lengths = pc.call_function("list_value_length", [table.column("skill_ids")]).to_numpy().astype(np.int64)
    sources, verdicts = (flat[name].dictionary.to_pylist() for name in ("sources", "verdicts"))
    skill, source, verdict = (flat[name].indices.to_numpy().astype(np.int64) for name in flat)
    rows = {skill_id: row for row, skill_id in enumerate(skills.column("skill_id").to_pylist())}
    row_of = np.array([rows[skill_id] for skill_id in flat["skill_ids"].dictionary.to_pylist()], dtype=np.int64)
    is_positive = np.array([value in POSITIVE for value in verdicts], dtype=bool)
    entries = Entries(
        list=np.repeat(np.arange(table.num_rows), lengths),
        skill=row_of[skill],
        source=source,
        verdict=verdict,
        rank=_flat(table, "ranks").to_numpy().astype(np.int64),
        teacher_score=_teacher_scores(table, lengths),
        positive=is_positive[verdict],
    )
    return entries, sources, verdicts


def _teacher_scores(table: pa.Table, lengths: Int64[np.ndarray, " list"]) -> Float64[np.ndarray, " entry"]:
    scores = table.column("teacher_scores").to_pylist()
    rows = (row if row else [np.nan] * length for row, length in zip(scores, lengths.tolist(), strict=True))
    return np.array([score for row in rows for score in row], dtype=np.float64)


def _skills(trail: Trail, used: set[str]) -> tuple[pa.Table, Bool[np.ndarray, " skill"], int | None]:
    """(rows of the skills in use, which of them the pool holds, how many it holds in all)."""
    pool = trail.read(trail.pool, SKILLS) if trail.pool is not None else None
    rows = SKILLS.schema.empty_table() if pool is None else pool
    ids = rows.column("skill_id").to_pylist()
    found = rows.filter(pa.array([skill_id in used for skill_id in ids], pa.bool_()))
    strangers = pa.array(sorted(used.difference(ids)), pa.string())
    empty = pa.array([""] * len(strangers), pa.string())
    nothing = pa.nulls(len(strangers), pa.string())
    columns = {"skill_id": strangers, "name": strangers, "category": nothing, "lang": nothing, "license": nothing}
    unknown = pa.Table.from_arrays([columns.get(name, empty) for name in SKILLS.schema.names], schema=SKILLS.schema)
    known = np.arange(found.num_rows + len(strangers)) < found.num_rows
    return pa.concat_tables([found, unknown]), known, None if pool is None else pool.num_rows


def _query_texts(trail: Trail) -> dict[str, str]:
    """query_id → text, from the lists' own queries and from those they were made of (drops name the latter)."""
    texts: dict[str, str] = {}
    for path in (trail.queries, trail.lists):
        if (
            path is not None
            and table_path(path, QUERIES).is_file()
            and (table := trail.read(path, QUERIES)) is not None
        ):
            texts |= dict(zip(table.column("query_id").to_pylist(), table.column("text").to_pylist(), strict=True))
    if not texts:
        trail.missing.append("queries: no table of them was found; lists are shown without their query's text")
    return texts


def _ranked(trail: Trail) -> tuple[Counter[str] | None, Counter[str] | None]:
    """Candidates by source: as mined, and as the last filter left them."""
    mined = next((step for step in trail.steps if step.mines), None)
    kept = next((step for step in trail.steps if step.filters), mined)
    return _count_stages(trail, mined), _count_stages(trail, kept)


def _count_stages(trail: Trail, step: Step | None) -> Counter[str] | None:
    """Rows by stage; of millions of rows only this column is read."""
    if step is None:
        return None
    file = table_path(step.folder, RANKINGS)
    try:
        column = pq.read_table(file, columns=["stage"]).column("stage")
    except (pa.ArrowException, OSError) as error:
        trail.missing.append(f"{file}: cannot be read: {error}")
        return None
    return Counter({row["values"]: row["counts"] for row in pc.call_function("value_counts", [column]).to_pylist()})


def _drops(trail: Trail) -> list[Drop]:
    """The candidates that filters took out, in the order of filtering."""
    drops: list[Drop] = []
    for step in reversed([step for step in trail.steps if step.filters]):
        table = trail.read(step.folder, DROPPED)
        for row in table.to_pylist() if table is not None else ():
            drops.append(Drop(
                row["query_id"], row["skill_id"], row["filter"], row["value"], row["source"] or UNKNOWN,
                row["other_id"] or "", row["reason"],
            ))  # fmt: skip
    return drops


def _other_drops(trail: Trail) -> list[OtherDrops]:
    """What other stages dropped, by stage and filter."""
    found: list[OtherDrops] = []
    for step in (*runs_beside(trail), *reversed(trail.steps)):
        if step.filters or not table_path(step.folder, DROPPED).is_file():
            continue
        table = trail.read(step.folder, DROPPED)
        rows = table.to_pylist() if table is not None else []
        for name, count in sorted(Counter(row["filter"] for row in rows).items()):
            example = next(row for row in rows if row["filter"] == name)
            what = " ".join(filter(None, (example["query_id"], example["skill_id"])))
            found.append(OtherDrops(step.stage, name, count, f"{what}: {example['reason']}"))
    return found


def _flags(trail: Trail) -> pa.Table | None:
    """The FLAGS beside the pool, None where it was not screened."""
    if trail.pool is None:
        return None
    file = table_path(trail.pool, SKILLS).with_name(f"{FLAGS.name}.parquet")
    return trail.read(file, FLAGS) if file.is_file() else None


def _clusters(trail: Trail, skills: pa.Table) -> Int64[np.ndarray, " skill"] | None:
    """The near-duplicate cluster of each skill in use, -1 where it has none; None without clusters."""
    place = trail.clusters or (trail.pool if trail.pool is not None and trail.pool.is_dir() else None)
    if place is None or not table_path(place, CLUSTERS).is_file():
        return None
    if (table := trail.read(place, CLUSTERS)) is None:
        return None
    clusters = dict(zip(*(table.column(name).to_pylist() for name in ("skill_id", "cluster")), strict=True))
    return np.array([clusters.get(skill_id, -1) for skill_id in skills.column("skill_id").to_pylist()], dtype=np.int64)
