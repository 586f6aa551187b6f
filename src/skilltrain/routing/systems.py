"""A system: a first stage (BM25, an encoder, an embeddings API), and what orders its candidates, if anything does."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.latency import StageLatency
from skilltrain.models.reranker import Reranker
from skilltrain.records import Skill
from skilltrain.retrieval.api_encoder import ApiEncoderSource
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.retrieval.judge import JudgeSource, judge
from skilltrain.retrieval.nearest import Found
from skilltrain.retrieval.rerank import RerankerSource, open_reranker, rerank
from skilltrain.routing.first_stages import FirstStage, LexicalSource, open_first_stage
from skilltrain.routing.latency import Step, time_steps
from skilltrain.tables import RANKINGS, table_from_rows
from skilltrain.terminal import say

Ranking = list[tuple[str, float]]
"""(skill_id, score), best first."""


class SystemConfig(Config):
    """One way to rank the pool for a query."""

    name: str = Field(min_length=1, description="what tables call it")
    lexical: LexicalSource | None = Field(default=None, description="first stage: BM25")
    encoder: EncoderSource | None = Field(default=None, description="first stage: an encoder")
    embeddings: ApiEncoderSource | None = Field(default=None, description="first stage: an embeddings API")
    reranker: RerankerSource | None = Field(default=None, description="orders the first stage's top candidates")
    judge: JudgeSource | None = Field(
        default=None, description="a chat model that puts one of the top candidates first (of the reranker's, if any)"
    )
    num_candidates: int = Field(default=20, ge=1, description="how many candidates the reranker or the judge sees")
    first_stage_weight: float = Field(
        default=0.0, ge=0, description="candidates are ordered by reranker + weight x first-stage score; SkillRouter: 0"
    )

    @property
    def first_stage(self) -> LexicalSource | EncoderSource | ApiEncoderSource:
        """The one that is set."""
        return next(source for source in (self.lexical, self.encoder, self.embeddings) if source is not None)

    @model_validator(mode="after")
    def _one_first_stage(self) -> "SystemConfig":
        if sum(source is not None for source in (self.lexical, self.encoder, self.embeddings)) != 1:
            raise ValueError("a system has exactly one first stage: lexical, encoder or embeddings")
        return self


@dataclass(frozen=True)
class Ranked:
    """What one system answered: query_id → its ranking; how long its stages took, if timed; what its judge used."""

    rankings: dict[str, Ranking]
    latencies: tuple[StageLatency, ...]
    judged: dict[str, Any]


def rank_with_systems(
    systems: Sequence[SystemConfig], queries: Mapping[str, str], skills: Sequence[Skill], depth: int
) -> dict[str, dict[str, Ranking]]:
    """System name → query_id → its `depth` best skills (see `ask_systems`)."""
    return {name: asked.rankings for name, asked in ask_systems(systems, queries, skills, depth, num_timed=0).items()}


def ask_systems(
    systems: Sequence[SystemConfig],
    queries: Mapping[str, str],
    skills: Sequence[Skill],
    depth: int,
    num_timed: int,
) -> dict[str, Ranked]:
    """System name → the `depth` best skills of each query. A first stage that several systems share is opened once.

    `num_timed` queries are asked once more, alone, to time each stage. Equal scores stand in the order of the pool.
    """
    if not skills:
        raise SkilltrainError("the pool is empty")
    if not queries:
        raise SkilltrainError("there is no query to rank for")
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise SkilltrainError("two systems have the same name", where="systems")
    skill_ids = [skill.skill_id for skill in skills]
    places = {skill_id: place for place, skill_id in enumerate(skill_ids)}
    work = _Work(queries, skills, skill_ids, places, depth, tuple(queries)[:num_timed])
    deepest = max([depth, *(system.num_candidates for system in systems if system.reranker or system.judge)])
    by_first_stage: dict[str, list[SystemConfig]] = {}
    for system in systems:
        by_first_stage.setdefault(repr(system.first_stage), []).append(system)
    answers: dict[str, Ranked] = {}
    for group in by_first_stage.values():  # so that only one encoder's vectors are held at a time
        say(f"{', '.join(system.name for system in group)}: {len(queries)} queries over {len(skills)} skills")
        stage = open_first_stage(group[0].first_stage, skills)
        found = _found(group[0], stage, work, deepest)
        answers |= {system.name: _answer(system, stage, found, work) for system in group}
    return {name: answers[name] for name in names}


@dataclass(frozen=True)
class _Work:
    """What every system is asked; `skills` may lie on disk, so their ids and `places` in it are kept beside."""

    queries: Mapping[str, str]
    skills: Sequence[Skill]
    skill_ids: Sequence[str]
    places: Mapping[str, int]
    depth: int
    timed_ids: tuple[str, ...]

    def ranking(self, positions: Sequence[int], scores: Sequence[float]) -> Ranking:
        """Positions in the pool, as ids."""
        return [(self.skill_ids[place], score) for place, score in zip(positions, scores, strict=True)]

    def skills_in(self, top: Mapping[str, Sequence[str]]) -> dict[str, Skill]:
        """skill_id → skill, for all candidates of all queries."""
        wanted = dict.fromkeys(skill_id for skill_ids in top.values() for skill_id in skill_ids)
        return {skill_id: self.skills[self.places[skill_id]] for skill_id in wanted}


def _found(system: SystemConfig, stage: FirstStage, work: _Work, depth: int) -> dict[str, Ranking]:
    positions, scores = stage.rank(list(work.queries.values()), depth)
    if not np.isfinite(scores).all() or (positions < 0).any():  # faiss answers -1 to what it cannot compare
        raise SkilltrainError("the first stage gave scores that are no numbers", where=f"system {system.name}")
    return {
        query_id: work.ranking(row, row_scores)
        for query_id, row, row_scores in zip(work.queries, positions.tolist(), scores.tolist(), strict=True)
    }


def _answer(system: SystemConfig, stage: FirstStage, found: Mapping[str, Ranking], work: _Work) -> Ranked:
    """The system's rankings, cut at the depth, and its latencies."""
    reranker = open_reranker(system.reranker) if system.reranker else None
    rankings, judged = dict(found), dict[str, Any]()
    if reranker is not None:
        rankings = _rerank(system, reranker, rankings, work)
    if system.judge is not None:
        rankings, judged = _judge(system, system.judge, rankings, work)
    latencies: tuple[StageLatency, ...] = ()
    if work.timed_ids and stage.encode_anew is not None:
        latencies = time_steps(system.name, _steps(system, stage, reranker, work), work.timed_ids)
    return Ranked({query_id: ranking[: work.depth] for query_id, ranking in rankings.items()}, latencies, judged)


def _rerank(system: SystemConfig, reranker: Reranker, found: Mapping[str, Ranking], work: _Work) -> dict[str, Ranking]:
    """The top candidates by the reranker's score, the rest behind them in the first stage's order.

    A first-stage weight above 0 adds what the first stage thought: with few lists to learn from, the two models err
    on different queries. The rest score below the lowest reranked candidate, so that scores fall with rank; their
    size means nothing.
    """
    assert system.reranker is not None
    count, top = system.num_candidates, _top(system, found)
    ranked = rerank(reranker, work.queries, top, work.skills_in(top), system.reranker.token_budget)
    if not all(math.isfinite(score) for ranking in ranked.values() for _, score in ranking):
        raise SkilltrainError("the reranker gave scores that are no numbers", where=f"system {system.name}")
    result: dict[str, Ranking] = {}
    for query_id, ranking in found.items():
        first, weight = dict(ranking), system.first_stage_weight
        mixed = [(skill_id, score + weight * first[skill_id]) for skill_id, score in ranked[query_id]]
        mixed.sort(key=lambda pair: -pair[1])
        lowest = mixed[-1][1] if mixed else 0.0
        rest = [(skill_id, lowest - place) for place, (skill_id, _) in enumerate(ranking[count:], 1)]
        result[query_id] = mixed + rest
    return result


def _judge(
    system: SystemConfig, source: JudgeSource, found: Mapping[str, Ranking], work: _Work
) -> tuple[dict[str, Ranking], dict[str, Any]]:
    """(the judge's choice first, the others as they were; its counts). Scores are minus the rank: a choice has none."""
    top = _top(system, found)
    judged = judge(source, work.queries, top, work.skills_in(top))
    result: dict[str, Ranking] = {}
    for query_id, ranking in found.items():
        skill_ids = [*judged.rankings[query_id], *(skill_id for skill_id, _ in ranking[system.num_candidates :])]
        result[query_id] = [(skill_id, -float(rank)) for rank, skill_id in enumerate(skill_ids, 1)]
    return result, judged.counts()


def _top(system: SystemConfig, found: Mapping[str, Ranking]) -> dict[str, list[str]]:
    """The candidates that the reranker or the judge sees."""
    count = system.num_candidates
    return {query_id: [skill_id for skill_id, _ in ranking[:count]] for query_id, ranking in found.items()}


def _steps(system: SystemConfig, stage: FirstStage, reranker: Reranker | None, work: _Work) -> list[Step]:
    """What one query goes through, without the judge: its answers come from a cache, or cost money."""
    encode, depth = stage.encode_anew, max(system.num_candidates, work.depth)
    assert encode is not None
    steps: list[Step] = [("search", lambda _, query: stage.search(query, depth))]
    if system.lexical is None:
        steps.insert(0, ("encode query", lambda query_id, _: encode([work.queries[query_id]])))
    else:
        steps = [("search", lambda query_id, _: stage.search([work.queries[query_id]], depth))]
    if reranker is not None:
        steps.append(("rerank", lambda query_id, found: _rerank_one(system, reranker, query_id, found, work)))
    return steps


def _rerank_one(system: SystemConfig, reranker: Reranker, query_id: str, found: Found, work: _Work) -> None:
    positions, scores = found
    _rerank(system, reranker, {query_id: work.ranking(positions[0].tolist(), scores[0].tolist())}, work)


def rankings_table(rankings: Mapping[str, Ranking], stage: str) -> pa.Table:
    """The rankings of one system as a RANKINGS table; ranks count from 1."""
    return table_from_rows(
        (
            {"query_id": query_id, "skill_id": skill_id, "rank": rank, "score": score, "stage": stage}
            for query_id, ranking in rankings.items()
            for rank, (skill_id, score) in enumerate(ranking, 1)
        ),
        RANKINGS,
    )
