"""Stage `teacher`: what a system makes of every skill of every list, for a smaller model to learn from."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, field_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Ranker, Rankings, Skill
from skilltrain.retrieval.rankers import FuseConfig, RankerConfig, open_ranker, parts_of
from skilltrain.retrieval.select import AdmitConfig, SelectConfig
from skilltrain.tables import JUDGEMENTS, LISTS, QUERIES, queries_from_table, read_table, write_table


class TeacherConfig(Config):
    """Write the scores of a reranker, or of any other system, into lists, for the losses `kl` and `margin_mse`."""

    stage: Literal["teacher"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    lists: InputPath = Field(description="folder of the stage lists: lists, queries and judgements")
    rankers: tuple[RankerConfig, ...] = Field(
        min_length=1,
        description="as in a system, but each orders the skills of a list, all of them whatever its keep says; "
        "the last one's scores are written: [{kind: rerank, source: runs/reranker}]",
    )
    out: Path = Field(description="folder to write: the same LISTS with teacher_scores, their QUERIES and JUDGEMENTS")

    @field_validator("rankers")
    @classmethod
    def _give_scores(cls, rankers: tuple[RankerConfig, ...]) -> tuple[RankerConfig, ...]:
        if kinds := [ranker.kind for ranker in rankers if isinstance(ranker, SelectConfig | AdmitConfig)]:
            raise ValueError(f"{kinds[0]} chooses skills and gives no scores to learn from")
        return rankers


def run_teacher(config: TeacherConfig, out: Path) -> dict[str, Any]:
    """Write the lists with the scores; their spread tells which teacher_temperature they need.

    Raises SkilltrainError for a list without its query or skills, and a skill that gets no number.
    """
    for part in parts_of(config.rankers):
        part.check()
    lists, skills = read_table(config.lists, LISTS), read_pool(config.pool)
    members: dict[str, list[str]] = dict(
        zip(*(lists.column(name).to_pylist() for name in ("query_id", "skill_ids")), strict=True)
    )
    queries = {query.query_id: query for query in queries_from_table(read_table(config.lists, QUERIES))}
    _check_members(members, queries, {skill.skill_id for skill in skills}, config)
    scores = member_scores(config.rankers, [queries[query_id] for query_id in members], members, skills)
    place = LISTS.schema.get_field_index("teacher_scores")
    field = LISTS.schema.field(place)
    write_table(lists.set_column(place, field, pa.array([*scores.values()], field.type)), LISTS, out)
    for spec in (QUERIES, JUDGEMENTS):
        write_table(read_table(config.lists, spec), spec, out)
    every = [score for row in scores.values() for score in row]
    spread = {"min": min(every), "mean": sum(every) / len(every), "max": max(every)}
    return {
        "num_lists": len(scores),
        "num_pairs": len(every),
        "score": {name: round(value, 4) for name, value in spread.items()},
    }


def member_scores(
    rankers: Sequence[RankerConfig],
    queries: Sequence[Query],
    members: Mapping[str, Sequence[str]],
    skills: Sequence[Skill],
) -> dict[str, list[float]]:
    """query_id → what the last of `rankers` makes of each of its `members`, in their order.

    Raises SkilltrainError where it gives one no score, or one that is no number.
    """
    most = max(map(len, members.values()))
    opened: dict[str, Ranker] = {}
    found: Rankings = {query_id: [(skill_id, 0.0) for skill_id in row] for query_id, row in members.items()}
    for ranker in rankers:
        if isinstance(ranker, FuseConfig):
            legs = tuple(leg.model_copy(update={"keep": most}) for leg in ranker.of)
            ranker = ranker.model_copy(update={"of": legs})
        found = open_ranker(ranker, skills, opened).rank(queries, found, most)
    scores: dict[str, list[float]] = {}
    for query_id, row in members.items():
        given = dict(found[query_id])
        scores[query_id] = [given.get(skill_id, math.nan) for skill_id in row]
        if bad := [skill_id for skill_id, score in zip(row, scores[query_id], strict=True) if not math.isfinite(score)]:
            what = f"gave skill {bad[0]!r} {given.get(bad[0], 'no score')}, and a teacher must give a number"
            raise SkilltrainError(what, where=f"ranker {len(rankers)}, {rankers[-1].kind}, query {query_id}")
    return scores


def _check_members(
    members: Mapping[str, Sequence[str]], queries: Mapping[str, Query], pool: set[str], config: TeacherConfig
) -> None:
    if not members:
        raise SkilltrainError("holds no list to score", where=config.lists)
    if missing := [query_id for query_id in members if query_id not in queries]:
        raise SkilltrainError(f"the list of query {missing[0]!r} has no query text", where=config.lists)
    if lost := sorted({skill_id for row in members.values() for skill_id in row} - pool):
        what = f"{len(lost)} skill(s) of the lists are not in this pool, {lost[0]!r} among them"
        raise SkilltrainError(what, where=config.pool, fix="give the pool that the lists were made from")
