"""Qrels: rows that say how relevant a skill is for a query, made into tasks."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Task, make_task
from skilltrain.evaluation.metrics import Relevance


@dataclass(frozen=True, slots=True)
class Qrel:
    """One row: a query, a skill and its score; `where` is file and line."""

    query_id: str
    skill_id: str
    score: float
    where: str


def relevances(
    qrels: Iterable[Qrel], query_ids: Collection[str], skill_ids: Collection[str] | None
) -> dict[str, Relevance]:
    """query_id → relevance, in order of first mention: gold is what scores above 0, and its gain is the score.

    A score of 0 or less says not relevant (as trec_eval reads it) and gains nothing. `skill_ids` is the pool that the
    qrels were published with, None where there is none. Raises SkilltrainError, naming file, line and id, for a query
    or a skill that is unknown, a pair that stands twice, a score that is not finite, and a query without gold.
    """
    gains: dict[str, dict[str, float]] = {}
    first_row: dict[str, str] = {}
    for row in qrels:
        if row.query_id not in query_ids:
            raise SkilltrainError(f"query '{row.query_id}' is not among the queries", where=row.where)
        if skill_ids is not None and row.skill_id not in skill_ids:
            what = f"skill '{row.skill_id}' of query '{row.query_id}' is not among the benchmark's own skills"
            raise SkilltrainError(what, where=row.where)
        if not math.isfinite(row.score):
            raise SkilltrainError(f"the score of query '{row.query_id}' is {row.score}, no number", where=row.where)
        own = gains.setdefault(row.query_id, {})
        if row.skill_id in own:
            what = f"query '{row.query_id}' and skill '{row.skill_id}' stand together twice"
            raise SkilltrainError(what, where=row.where)
        own[row.skill_id] = row.score
        first_row.setdefault(row.query_id, row.where)
    return {query_id: _relevance(query_id, own, first_row[query_id]) for query_id, own in gains.items()}


def _relevance(query_id: str, scores: Mapping[str, float], where: str) -> Relevance:
    gains = {skill_id: score for skill_id, score in scores.items() if score > 0}
    if not gains:
        raise SkilltrainError(f"query '{query_id}' has no skill with a score above 0, so none is gold", where=where)
    return Relevance(frozenset(gains), gains)


def judged_tasks(texts: Mapping[str, str], judged: Mapping[str, Relevance], *, origin: str, split: str) -> list[Task]:
    """The tasks of a split: the judged ones of the queries `texts` (query_id → text), in their order."""
    return [
        make_task(query_id, text, judged[query_id], origin=origin, split=split)
        for query_id, text in texts.items()
        if query_id in judged
    ]
