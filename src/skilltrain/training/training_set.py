"""LISTS as a trainer sees them: tokens, gains, and which skills may serve as negatives for which query."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.contamination.grounds import BenchmarkPaths, ContaminationLimits
from skilltrain.data.near_duplicates import near_duplicate_clusters
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill, Verdict
from skilltrain.tables import (
    CLUSTERS,
    JUDGEMENTS,
    LISTS,
    QUERIES,
    SKILLS,
    read_table,
    skills_from_table,
    verdicts_by_query,
)


class ListsSource(Config):
    """What to train on, and what a verdict is worth."""

    pool: InputPath = Field(description="folder with skills.parquet")
    lists: InputPath = Field(description="folder of the stage lists: lists, queries and judgements")
    gains: dict[Verdict, float] = Field(
        default={Verdict.REQUIRED: 1.0, Verdict.USEFUL: 0.5, Verdict.IRRELEVANT: 0.0, Verdict.REJECTED: 0.0},
        description="gain of each verdict",
    )
    max_lists: int | None = Field(default=None, ge=1, description="train on the first so many lists only")
    clusters: InputPath | None = Field(
        default=None,
        description="CLUSTERS of the pool (stage clusters) for the in-batch mask of an encoder; null: they are found "
        "at the start, by near_duplicates",
    )
    held_out: BenchmarkPaths = Field(
        default=(), description="folders of benchmarks that no list may be contaminated by: queries and gold skills"
    )
    contamination: Literal["refuse", "allow"] = Field(
        default="refuse", description="what to do with lists that held_out, or the queries of dev, contaminate"
    )
    contamination_limits: ContaminationLimits = Field(
        default=ContaminationLimits(), description="what counts as contaminated"
    )


@dataclass(frozen=True)
class TrainingList:
    """One query with its candidates; `positives` are all skills known to answer it, in the list or not."""

    query_id: str
    query: str
    skill_ids: tuple[str, ...]
    gains: tuple[float, ...]
    positives: frozenset[str]
    teacher_scores: tuple[float, ...] | None = None


@dataclass(frozen=True)
class TrainingSet:
    """All lists, the skills they name, and the number of the near-duplicate cluster of those that are in one."""

    lists: tuple[TrainingList, ...]
    skills: Mapping[str, Skill]
    clusters: Mapping[str, int] = field(default_factory=dict)


def load_training_set(source: ListsSource, near_duplicates: float | None = None) -> TrainingSet:
    """Read and check the tables; skills whose bodies' Jaccard reaches `near_duplicates` share a cluster,
    unless the source names a table of clusters; without `near_duplicates` there are none.

    Raises SkilltrainError for a list that cannot be trained on, naming its query.
    """
    skills = {skill.skill_id: skill for skill in skills_from_table(read_table(source.pool, SKILLS))}
    queries = read_table(source.lists, QUERIES)
    texts = dict(zip(queries.column("query_id").to_pylist(), queries.column("text").to_pylist(), strict=True))
    verdicts = verdicts_by_query(read_table(source.lists, JUDGEMENTS))
    _check_gains(source.gains)
    rows = read_table(source.lists, LISTS).to_pylist()[: source.max_lists]
    if not rows:
        raise SkilltrainError("holds no list to train on", where=source.lists)
    lists = tuple(_training_list(row, texts, verdicts, source) for row in rows)
    used = {skill_id for one in lists for skill_id in one.skill_ids}
    if missing := sorted(used - skills.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SkilltrainError(f"skill {missing[0]!r}{more} of {source.lists} is not in the pool", where=source.pool)
    kept = {skill_id: skills[skill_id] for skill_id in sorted(used)}
    return TrainingSet(lists, kept, _clusters(source, list(kept.values()), near_duplicates))


def _clusters(source: ListsSource, skills: list[Skill], near_duplicates: float | None) -> dict[str, int]:
    """skill_id → cluster of the skills that have near-duplicates among `skills`; empty where nobody asks for them."""
    if near_duplicates is None:
        return {}
    if source.clusters is None:
        clusters = near_duplicate_clusters(skills, near_duplicates)
    else:
        table = read_table(source.clusters, CLUSTERS)
        of = dict(zip(table.column("skill_id").to_pylist(), table.column("cluster").to_pylist(), strict=True))
        if missing := [skill.skill_id for skill in skills if skill.skill_id not in of]:
            what = f"{len(missing)} skill(s) of the lists are in no cluster, {missing[0]!r} among them"
            raise SkilltrainError(what, where=source.clusters, fix="make the clusters of this pool")
        clusters = {skill.skill_id: of[skill.skill_id] for skill in skills}
    sizes = Counter(clusters.values())
    return {skill_id: cluster for skill_id, cluster in clusters.items() if sizes[cluster] > 1}


def _check_gains(gains: Mapping[Verdict, float]) -> None:
    if missing := sorted(set(Verdict) - gains.keys()):
        raise SkilltrainError(f"gains name no value for '{missing[0]}'", where="data.gains")
    if not all(0 <= gain < math.inf for gain in gains.values()) or max(gains.values()) == 0:
        raise SkilltrainError("gains must be >= 0, and one of them > 0", where="data.gains")


def _training_list(
    row: dict, texts: Mapping[str, str], verdicts: Mapping[str, Mapping[str, Verdict]], source: ListsSource
) -> TrainingList:
    query_id = row["query_id"]
    if query_id not in texts:
        raise SkilltrainError(f"the list of query {query_id!r} has no query text", where=source.lists)
    _check_candidates(row, source)
    gains = tuple(source.gains[Verdict(verdict)] for verdict in row["verdicts"])
    if not max(gains, default=0.0) > 0:
        raise SkilltrainError(f"the list of query {query_id!r} holds no positive", where=source.lists)
    if not min(gains) < max(gains):
        raise SkilltrainError(f"the list of query {query_id!r} holds no negative", where=source.lists)
    known = verdicts.get(query_id, {})
    positives = {skill_id for skill_id, verdict in known.items() if source.gains[verdict] > 0}
    positives |= {s for s, gain in zip(row["skill_ids"], gains, strict=True) if gain > 0}
    teacher_scores = _teacher_scores(row, source)
    return TrainingList(query_id, texts[query_id], tuple(row["skill_ids"]), gains, frozenset(positives), teacher_scores)


def _teacher_scores(row: dict, source: ListsSource) -> tuple[float, ...] | None:
    scores = row["teacher_scores"]
    if scores is None:
        return None
    if len(scores) != len(row["skill_ids"]):
        what = f"the list of query {row['query_id']!r} holds {len(row['skill_ids'])} skills, but {len(scores)}"
        raise SkilltrainError(f"{what} teacher scores", where=source.lists)
    if any(map(math.isinf, scores)):  # NaN stands for a candidate that the teacher has not scored
        what = f"a teacher score in the list of query {row['query_id']!r} is infinite"
        raise SkilltrainError(what, where=source.lists)
    return tuple(scores)


def _check_candidates(row: dict, source: ListsSource) -> None:
    query_id, skill_ids, verdicts = row["query_id"], row["skill_ids"], row["verdicts"]
    if len(skill_ids) != len(verdicts):
        what = f"the list of query {query_id!r} holds {len(skill_ids)} skills, but {len(verdicts)} verdicts"
        raise SkilltrainError(what, where=source.lists)
    if len(set(skill_ids)) < len(skill_ids):
        twice = next(s for position, s in enumerate(skill_ids) if s in skill_ids[:position])
        raise SkilltrainError(f"the list of query {query_id!r} holds skill {twice!r} twice", where=source.lists)
    if unknown := sorted(set(verdicts) - set(Verdict)):
        what = f"'{unknown[0]}' in the list of query {query_id!r} is no verdict; choose from {', '.join(Verdict)}"
        raise SkilltrainError(what, where=source.lists)
