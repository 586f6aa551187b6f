"""Stages `candidates` and `teacher`: the ranked lists of a system, and what it makes of every skill of given lists."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, field_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.llm import estimate_cost
from skilltrain.records import Query, Ranker, Rankings, Skill
from skilltrain.retrieval.api import ApiConfig, plan_encoding
from skilltrain.retrieval.cascade import SystemConfig, check_systems, run_systems
from skilltrain.retrieval.rankers import (
    AskingConfig,
    FuseConfig,
    RankerConfig,
    key_of,
    open_ranker,
    parts_of,
)
from skilltrain.retrieval.rankings import rankings_table
from skilltrain.retrieval.select import AdmitConfig, SelectConfig
from skilltrain.tables import (
    JUDGEMENTS,
    LISTS,
    QUERIES,
    RANKINGS,
    read_queries,
    read_table,
    select_queries,
    write_table,
)


class CandidatesConfig(Config):
    """Rank the pool for every query, usually with the trained encoder."""

    stage: Literal["candidates"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES table")
    split: str | None = Field(
        default="train", description="rank for the queries of this split only; null for all"
    )
    system: SystemConfig = Field(
        description="what ranks: a name, and a list of rankers; its last ranking is written"
    )
    depth: int = Field(default=50, ge=1, description="candidates per query")
    out: Path = Field(description="folder to write: RANKINGS")


def run_candidates(config: CandidatesConfig, out: Path) -> dict[str, Any]:
    """Write RANKINGS; the counts of queries and rows."""
    queries = select_queries(config.queries, config.split)
    stages = run_systems([config.system], queries, read_pool(config.pool), config.depth)[
        config.system.name
    ]
    table = rankings_table({stages[-1].name: stages[-1].rankings})
    write_table(table, RANKINGS, out)
    return {"num_queries": len(queries), "num_candidates": table.num_rows}


def plan_candidates(config: CandidatesConfig) -> dict[str, Any]:
    return plan_ranking(
        [config.system], select_queries(config.queries, config.split), read_pool(config.pool)
    )


def plan_ranking(
    systems: Sequence[SystemConfig], queries: Sequence[Query], skills: Sequence[Skill]
) -> dict[str, Any]:
    """How much would be ranked, and about what chat models and embeddings servers would take, by system (`--dry-run`).

    Asks nobody. `dollars` are those of all together, None where a price is not known. Raises SkilltrainError for
    systems that cannot run, as a run does.
    """
    check_systems(systems)
    counts = {"num_queries": len(queries), "num_skills": len(skills), "num_systems": len(systems)}
    asked: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for system in systems:
        for part in parts_of(system.rankers):
            if isinstance(part, AskingConfig):
                costs = asked.setdefault(system.name, {})
                name = part.kind if part.kind not in costs else f"{part.kind} {len(costs) + 1}"
                costs[name] = estimate_cost(part.asks(queries, skills))
            elif (
                isinstance(part, ApiConfig) and key_of(part) not in seen
            ):  # what two systems share is asked once
                seen.add(key_of(part))
                asked.setdefault(system.name, {})[part.kind] = plan_encoding(part, skills, queries)
    if not asked:
        return counts
    prices = [cost["dollars"] for costs in asked.values() for cost in costs.values()]
    return counts | {"asked": asked, "dollars": None if None in prices else round(sum(prices), 6)}


class TeacherConfig(Config):
    """Write the scores of a reranker, or of any other system, into lists, for the losses `kl` and `margin_mse`."""

    stage: Literal["teacher"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    lists: InputPath = Field(description="folder of the stage lists: lists, queries and judgements")
    rankers: tuple[RankerConfig, ...] = Field(
        min_length=1,
        description="as in a system, but each orders whole lists; the last one's scores are written",
    )
    out: Path = Field(
        description="folder to write: the same LISTS with teacher_scores, their QUERIES and JUDGEMENTS"
    )

    @field_validator("rankers")
    @classmethod
    def _give_scores(cls, rankers: tuple[RankerConfig, ...]) -> tuple[RankerConfig, ...]:
        if kinds := [
            ranker.kind for ranker in rankers if isinstance(ranker, SelectConfig | AdmitConfig)
        ]:
            raise ValueError(f"{kinds[0]} chooses skills and gives no scores to learn from")
        return rankers


def run_teacher(config: TeacherConfig, out: Path) -> dict[str, Any]:
    """Write the lists with the scores; their spread tells which teacher_temperature they need.

    Raises SkilltrainError for a list without its query or skills, and a skill that gets no number.
    """
    for part in parts_of(config.rankers):
        part.check()
    lists, skills = read_table(config.lists, LISTS), read_pool(config.pool)
    members = {
        row["query_id"]: row["skill_ids"]
        for row in lists.select(["query_id", "skill_ids"]).to_pylist()
    }
    queries = {query.query_id: query for query in read_queries(config.lists)}
    if not members:
        raise SkilltrainError("holds no list to score", where=config.lists)
    if missing := [query_id for query_id in members if query_id not in queries]:
        raise SkilltrainError(
            f"the list of query {missing[0]!r} has no query text", where=config.lists
        )
    if lost := sorted(
        {skill_id for row in members.values() for skill_id in row}
        - {one.skill_id for one in skills}
    ):
        what = f"{len(lost)} skill(s) of the lists are not in this pool, {lost[0]!r} among them"
        raise SkilltrainError(
            what, where=config.pool, fix="give the pool that the lists were made from"
        )
    scores = member_scores(
        config.rankers, [queries[query_id] for query_id in members], members, skills
    )
    field = LISTS.schema.field("teacher_scores")
    place = LISTS.schema.get_field_index(field.name)
    write_table(lists.set_column(place, field, pa.array(scores, field.type)), LISTS, out)
    for spec in (QUERIES, JUDGEMENTS):
        write_table(read_table(config.lists, spec), spec, out)
    every = [score for row in scores for score in row]
    spread = {"min": min(every), "mean": fmean(every), "max": max(every)}
    score = {name: round(value, 4) for name, value in spread.items()}
    return {"num_lists": len(scores), "num_pairs": len(every), "score": score}


def member_scores(
    rankers: Sequence[RankerConfig],
    queries: Sequence[Query],
    members: Mapping[str, Sequence[str]],
    skills: Sequence[Skill],
) -> list[list[float]]:
    """What the last of `rankers` makes of each query's `members`, in their order.

    Raises SkilltrainError where it gives one no score, or one that is no number.
    """
    most, opened = max(map(len, members.values())), dict[str, Ranker]()
    found: Rankings = {
        query_id: [(skill_id, 0.0) for skill_id in row] for query_id, row in members.items()
    }
    for ranker in rankers:
        if isinstance(ranker, FuseConfig):
            legs = tuple(leg.model_copy(update={"keep": most}) for leg in ranker.of)
            ranker = ranker.model_copy(update={"of": legs})
        found = open_ranker(ranker, skills, opened).rank(queries, found, most)
    scores: list[list[float]] = []
    for query_id, row in members.items():
        given = dict(found[query_id])
        if bad := [
            skill_id for skill_id in row if not math.isfinite(given.get(skill_id, math.nan))
        ]:
            what = f"gave skill {bad[0]!r} {given.get(bad[0], 'no score')}, and a teacher must give a number"
            raise SkilltrainError(
                what, where=f"ranker {len(rankers)}, {rankers[-1].kind}, query {query_id}"
            )
        scores.append([given[skill_id] for skill_id in row])
    return scores
