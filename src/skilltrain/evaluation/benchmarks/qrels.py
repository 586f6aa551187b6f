"""Qrels: rows that say how relevant a skill is for a query, made into relevances."""

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import Relevance


class Qrel(NamedTuple):
    """One row: a query, a skill and its score; `where` is file and line."""

    query_id: str
    skill_id: str
    score: float
    where: str


def relevances(
    qrels: Iterable[Qrel], query_ids: Collection[str], skill_ids: Collection[str] | None
) -> dict[str, Relevance]:
    """query_id → relevance, for the judged ones of `query_ids`, in their order: gold is what scores above 0, and its
    gain is the score.

    A score of 0 or less says not relevant (as trec_eval reads it) and gains nothing. `skill_ids` is the pool that the
    qrels were published with, None where there is none. Raises SkilltrainError, naming file, line and id, for a query
    or a skill that is unknown, a pair that stands twice, a score that is not finite, and a query without gold.
    """
    judged: dict[str, dict[str, Qrel]] = {}
    for row in qrels:
        if row.query_id not in query_ids:
            raise SkilltrainError(f"query '{row.query_id}' is not among the queries", where=row.where)
        if skill_ids is not None and row.skill_id not in skill_ids:
            what = f"skill '{row.skill_id}' of query '{row.query_id}' is not among the benchmark's own skills"
            raise SkilltrainError(what, where=row.where)
        if not math.isfinite(row.score):
            raise SkilltrainError(f"the score of query '{row.query_id}' is {row.score}, no number", where=row.where)
        if row.skill_id in judged.setdefault(row.query_id, {}):
            what = f"query '{row.query_id}' and skill '{row.skill_id}' stand together twice"
            raise SkilltrainError(what, where=row.where)
        judged[row.query_id][row.skill_id] = row
    return {query_id: _relevance(judged[query_id]) for query_id in query_ids if query_id in judged}


def _relevance(rows: dict[str, Qrel]) -> Relevance:
    gains = {skill_id: row.score for skill_id, row in rows.items() if row.score > 0}
    if not gains:
        first = next(iter(rows.values()))
        what = f"query '{first.query_id}' has no skill with a score above 0, so none is gold"
        raise SkilltrainError(what, where=first.where)
    return Relevance(frozenset(gains), gains)
