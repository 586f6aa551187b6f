"""A system: a first stage (BM25, an encoder, an embeddings API), and what orders its candidates, if anything does."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.latency import StageLatency
from skilltrain.llm import open_llm
from skilltrain.models.loading import resolve_model, stored_settings
from skilltrain.models.reranker import Reranker
from skilltrain.records import Skill
from skilltrain.retrieval.api_encoder import ApiEncoderSource
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.retrieval.judge import JudgeSource, judge
from skilltrain.retrieval.nearest import Found
from skilltrain.retrieval.rerank import RerankerSource, open_reranker, rerank
from skilltrain.routing.first_stages import FirstStage, LexicalSource, check_first_stage, open_first_stage
from skilltrain.routing.latency import Step, time_steps
from skilltrain.routing.skills_by_id import SkillsById
from skilltrain.tables import RANKINGS, table_from_rows
from skilltrain.terminal import say

Ranking = list[tuple[str, float]]
"""(skill_id, score), best first."""
Scores = Mapping[str, Mapping[str, float]]
"""query_id → skill_id → score."""


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
    """System name → the `depth` best skills of each query.

    What systems share is done once: a first stage ranks, and a reranker scores, for all systems that have it.
    `num_timed` queries are asked once more, alone, to time each stage. Equal scores stand in the order of the stage
    before, those of a first stage in the order of the pool. Raises SkilltrainError, before any work, for two systems
    of one name, a model that is not there and a server whose settings do not do.
    """
    if not skills:
        raise SkilltrainError("the pool is empty")
    if not queries:
        raise SkilltrainError("there is no query to rank for")
    check_systems(systems)
    work = _Work(queries, skills, SkillsById(skills), depth, tuple(queries)[:num_timed])
    deepest = max(work.depth_of(system) for system in systems)
    answers: dict[str, Ranked] = {}
    for group in _alike(systems, lambda system: system.first_stage):  # only one encoder's vectors are held at a time
        say(f"{', '.join(system.name for system in group)}: {len(queries)} queries over {len(skills)} skills")
        stage = open_first_stage(group[0].first_stage, skills)
        found = _found(group[0], stage, work, deepest)
        for same in _alike(group, lambda system: system.reranker):
            scorer = _Scorer.of(same[0])
            count = max(system.num_candidates for system in same)
            scores = scorer.scores(_top(found, count), work) if scorer else {}
            answers |= {system.name: _answer(system, stage, found, (scorer, scores), work) for system in same}
    return {system.name: answers[system.name] for system in systems}


def check_systems(systems: Sequence[SystemConfig]) -> None:
    """Raise SkilltrainError for what can be known of systems without loading a model or asking a server.

    Of a model that is named by its Hub id, small files are fetched.
    """
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise SkilltrainError("two systems have the same name", where="systems")
    for system in systems:
        check_first_stage(system.first_stage)
        if system.reranker is not None:
            stored_settings(resolve_model(system.reranker.source, weights=False), "reranker")
        if system.judge is not None:
            open_llm(system.judge.llm)


def _alike(systems: Sequence[SystemConfig], part: Callable[[SystemConfig], Config | None]) -> list[list[SystemConfig]]:
    """The systems in groups that have this part of their settings in common."""
    groups: dict[str, list[SystemConfig]] = {}
    for system in systems:
        groups.setdefault(repr(part(system)), []).append(system)
    return list(groups.values())


@dataclass(frozen=True)
class _Work:
    """What every system is asked; `skills` may lie on disk."""

    queries: Mapping[str, str]
    skills: Sequence[Skill]
    by_id: SkillsById
    depth: int
    timed_ids: tuple[str, ...]

    def depth_of(self, system: SystemConfig) -> int:
        """How many skills the system's first stage must find."""
        return max(self.depth, system.num_candidates if system.reranker or system.judge else 0)

    def ranking(self, positions: Sequence[int], scores: Sequence[float]) -> Ranking:
        """Positions in the pool, as ids."""
        return [(self.by_id.skill_ids[place], score) for place, score in zip(positions, scores, strict=True)]


def _found(system: SystemConfig, stage: FirstStage, work: _Work, depth: int) -> dict[str, Ranking]:
    positions, scores = stage.rank(list(work.queries.values()), depth)
    if not np.isfinite(scores).all() or (positions < 0).any():  # faiss answers -1 to what it cannot compare
        raise SkilltrainError("the first stage gave scores that are no numbers", where=f"system {system.name}")
    return {
        query_id: work.ranking(row, row_scores)
        for query_id, row, row_scores in zip(work.queries, positions.tolist(), scores.tolist(), strict=True)
    }


@dataclass(frozen=True)
class _Scorer:
    """A reranker at work; `system` is the first that has it."""

    system: str
    reranker: Reranker
    token_budget: int

    @classmethod
    def of(cls, system: SystemConfig) -> "_Scorer | None":
        source = system.reranker
        return cls(system.name, open_reranker(source), source.token_budget) if source else None

    def scores(self, top: Mapping[str, Sequence[str]], work: _Work) -> Scores:
        """query_id → candidate → its score."""
        ranked = rerank(self.reranker, work.queries, top, work.by_id, self.token_budget)
        if not all(math.isfinite(score) for ranking in ranked.values() for _, score in ranking):
            raise SkilltrainError("the reranker gave scores that are no numbers", where=f"system {self.system}")
        return {query_id: dict(ranking) for query_id, ranking in ranked.items()}


def _answer(
    system: SystemConfig,
    stage: FirstStage,
    found: Mapping[str, Ranking],
    scored: tuple[_Scorer | None, Scores],
    work: _Work,
) -> Ranked:
    """The rankings, cut at the depth, and the latencies. `scored` is its reranker, and the scores of its candidates."""
    scorer, scores = scored
    rankings, judged = dict(found), dict[str, Any]()
    if system.reranker is not None:
        rankings = {query_id: _reranked(system, ranking, scores[query_id]) for query_id, ranking in found.items()}
    if system.judge is not None:
        rankings, judged = _judge(system, system.judge, rankings, work)
    latencies = _latencies(system, stage, scorer, work) if work.timed_ids else ()
    return Ranked({query_id: ranking[: work.depth] for query_id, ranking in rankings.items()}, latencies, judged)


def _reranked(system: SystemConfig, ranking: Ranking, scores: Mapping[str, float]) -> Ranking:
    """The top candidates by the reranker's score, the rest behind them in the first stage's order.

    A first-stage weight above 0 adds what the first stage thought: with few lists to learn from, the two models err
    on different queries. The rest score below the lowest reranked candidate, so that scores fall with rank; their
    size means nothing.
    """
    count, weight = system.num_candidates, system.first_stage_weight
    mixed = [(skill_id, scores[skill_id] + weight * score) for skill_id, score in ranking[:count]]
    mixed.sort(key=lambda pair: -pair[1])
    lowest = mixed[-1][1] if mixed else 0.0
    return mixed + [(skill_id, lowest - place) for place, (skill_id, _) in enumerate(ranking[count:], 1)]


def _judge(
    system: SystemConfig, source: JudgeSource, found: Mapping[str, Ranking], work: _Work
) -> tuple[dict[str, Ranking], dict[str, Any]]:
    """(the judge's choice first, the others as they were; its counts). Scores are minus the rank: a choice has none."""
    judged = judge(source, work.queries, _top(found, system.num_candidates), work.by_id)
    result: dict[str, Ranking] = {}
    for query_id, ranking in found.items():
        skill_ids = [*judged.rankings[query_id], *(skill_id for skill_id, _ in ranking[system.num_candidates :])]
        result[query_id] = [(skill_id, -float(rank)) for rank, skill_id in enumerate(skill_ids, 1)]
    return result, judged.counts()


def _top(found: Mapping[str, Ranking], count: int) -> dict[str, list[str]]:
    """The candidates that a reranker or a judge sees."""
    return {query_id: [skill_id for skill_id, _ in ranking[:count]] for query_id, ranking in found.items()}


def _latencies(
    system: SystemConfig, stage: FirstStage, scorer: _Scorer | None, work: _Work
) -> tuple[StageLatency, ...]:
    """How long the system's stages take; nothing where one asks a server: it costs money, or answers from a cache."""
    encode, depth = stage.encode_anew, work.depth_of(system)
    if encode is None or system.judge is not None:
        say(f"{system.name}: not timed, for it asks a server")
        return ()
    steps: list[Step] = [
        ("encode query", lambda query_id, _: encode([work.queries[query_id]])),
        ("search", lambda _, query: stage.search(query, depth)),
    ]
    if system.lexical is not None:  # nothing to encode
        steps = [("search", lambda query_id, _: stage.search([work.queries[query_id]], depth))]
    if scorer is not None:
        steps.append(("rerank", lambda query_id, found: _rerank_one(system, scorer, query_id, found, work)))
    return time_steps(system.name, steps, work.timed_ids, time.perf_counter)


def _rerank_one(system: SystemConfig, scorer: _Scorer, query_id: str, found: Found, work: _Work) -> Ranking:
    positions, scores = found
    ranking = work.ranking(positions[0].tolist(), scores[0].tolist())
    top = _top({query_id: ranking}, system.num_candidates)
    return _reranked(system, ranking, scorer.scores(top, work)[query_id])


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
