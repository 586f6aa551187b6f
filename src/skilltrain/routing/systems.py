"""A system: a first stage (BM25 or an encoder) and, if it has one, a reranker on top."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, encode_queries, encode_skills, open_encoder
from skilltrain.retrieval.lexical import BM25Index, bm25_text
from skilltrain.retrieval.nearest import nearest
from skilltrain.retrieval.rerank import RerankerSource, open_reranker, rerank
from skilltrain.tables import RANKINGS, table_from_rows
from skilltrain.terminal import say

Ranking = list[tuple[str, float]]
"""(skill_id, score), best first."""


class LexicalSource(Config):
    """BM25 over name, description and body (`full`), or without the body (`nd`)."""

    fields: Literal["full", "nd"] = Field(default="full", description="what BM25 sees of a skill")


class SystemConfig(Config):
    """One way to rank the pool for a query."""

    name: str = Field(min_length=1, description="what tables call it")
    lexical: LexicalSource | None = Field(default=None, description="first stage: BM25")
    encoder: EncoderSource | None = Field(default=None, description="first stage: an encoder")
    reranker: RerankerSource | None = Field(default=None, description="orders the first stage's top candidates")
    num_candidates: int = Field(default=20, ge=1, description="how many candidates the reranker orders")
    first_stage_weight: float = Field(
        default=0.0, ge=0, description="candidates are ordered by reranker + weight x first-stage score; SkillRouter: 0"
    )

    @model_validator(mode="after")
    def _one_first_stage(self) -> "SystemConfig":
        if (self.lexical is None) == (self.encoder is None):
            raise ValueError("a system has exactly one first stage: lexical or encoder")
        return self


def rank_with_systems(
    systems: Sequence[SystemConfig], queries: Mapping[str, str], skills: Sequence[Skill], depth: int
) -> dict[str, dict[str, Ranking]]:
    """system name → query_id → its `depth` best skills. A first stage that several systems share runs once."""
    if not skills:
        raise SkilltrainError("the pool is empty")
    if not queries:
        raise SkilltrainError("there is no query to rank for")
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise SkilltrainError("two systems have the same name", where="systems")
    deepest = max([depth, *(system.num_candidates for system in systems if system.reranker)])
    first_stages: dict[str, dict[str, Ranking]] = {}
    result: dict[str, dict[str, Ranking]] = {}
    for system in systems:
        say(f"{system.name}: {len(queries)} queries over {len(skills)} skills")
        key = repr((system.lexical, system.encoder))
        if key not in first_stages:
            first_stages[key] = _first_stage(system, queries, skills, deepest)
        found = first_stages[key]
        if system.reranker is not None:
            found = _rerank(system, system.reranker, found, queries, skills)
        result[system.name] = {query_id: ranking[:depth] for query_id, ranking in found.items()}
    return result


def _first_stage(
    system: SystemConfig, queries: Mapping[str, str], skills: Sequence[Skill], depth: int
) -> dict[str, Ranking]:
    texts = list(queries.values())
    if system.lexical is not None:
        index = BM25Index.build([_lexical_text(skill, system.lexical) for skill in skills])
        positions, scores = index.search(texts, min(depth, len(skills)))
    else:
        assert system.encoder is not None
        encoder = open_encoder(system.encoder)
        positions, scores = nearest(encode_queries(encoder, texts), encode_skills(encoder, skills), depth)
    if not np.isfinite(scores).all() or (positions < 0).any():  # faiss answers -1 to what it cannot compare
        raise SkilltrainError("the first stage gave scores that are no numbers", where=f"system {system.name}")
    return {
        query_id: [(skills[p].skill_id, float(s)) for p, s in zip(row, row_scores, strict=True)]
        for query_id, row, row_scores in zip(queries, positions.tolist(), scores.tolist(), strict=True)
    }


def _lexical_text(skill: Skill, source: LexicalSource) -> str:
    return bm25_text(skill) if source.fields == "full" else f"{skill.name} {skill.description}"


def _rerank(
    system: SystemConfig,
    source: RerankerSource,
    found: Mapping[str, Ranking],
    queries: Mapping[str, str],
    skills: Sequence[Skill],
) -> dict[str, Ranking]:
    """The top candidates by the reranker's score, the rest behind them in the first stage's order.

    A first-stage weight above 0 adds what the first stage thought: with few lists to learn from, the two models err
    on different queries. The rest score below the lowest reranked candidate, so that scores fall with rank; their
    size means nothing.
    """
    by_id = {skill.skill_id: skill for skill in skills}
    count = system.num_candidates
    top = {query_id: [skill_id for skill_id, _ in ranking[:count]] for query_id, ranking in found.items()}
    ranked = rerank(open_reranker(source), queries, top, by_id, source.token_budget)
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


def rankings_table(rankings: Mapping[str, Ranking], stage: str):
    """The rankings of one system as a RANKINGS table; ranks count from 1."""
    return table_from_rows(
        (
            {"query_id": query_id, "skill_id": skill_id, "rank": rank, "score": score, "stage": stage}
            for query_id, ranking in rankings.items()
            for rank, (skill_id, score) in enumerate(ranking, 1)
        ),
        RANKINGS,
    )
