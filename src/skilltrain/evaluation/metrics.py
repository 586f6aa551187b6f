"""Measures as values: one number per query first, an aggregate only afterwards (bootstrap.py).

MEANINGS says what each measure is. `gold` decides all of them but nDCG, which reads the graded gains. Sources:
SkillRouter, section 2 and appendix A, nDCG as in its released evaluation (linear gains); R3 for COMP.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from skilltrain.errors import SkilltrainError

DEFAULT_MEASURES = ("Hit@1", "MRR@10", "nDCG@10", "Recall@10", "Recall@20", "Recall@50", "FC@10")
MEANINGS = {
    "Hit": "1 if a gold skill stands in the top k",
    "MRR": "1 / rank of the first gold skill, 0 if it stands below place k",
    "nDCG": "sum of gain / log2(rank + 1) over the top k, divided by the same sum for the best possible order",
    "Recall": "share of the gold skills that stand in the top k",
    "Precision": "gold skills in the top k, divided by k (also where the ranking is shorter)",
    "FC": "full coverage: 1 if all gold skills stand in the top k, so 0 where a query has more than k of them",
    "COMP": "gold skills in the top k, divided by the smaller of their number and k",
}


@dataclass(frozen=True, slots=True)
class Relevance:
    """What a query asks for: the `gold` skills, and the `gains` (skill_id → gain ≥ 0) that nDCG weighs.

    A gain without gold is half a success: a useful skill, or a degraded copy of a gold one.
    """

    gold: frozenset[str]
    gains: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure and the number of places it looks at; `str` gives its name, like nDCG@10."""

    name: str
    cutoff: int

    def __str__(self) -> str:
        return f"{self.name}@{self.cutoff}"

    def __call__(self, ranking: Sequence[str], relevance: Relevance) -> float:
        """The value for one query, in [0, 1]; inputs are trusted (see `evaluate_query`)."""
        return _FORMULAS[self.name](ranking[: self.cutoff], relevance, self.cutoff)


def parse_measure(text: str) -> Measure:
    """The measure a text like `nDCG@10` names. Raises SkilltrainError with the nearest name and all allowed ones."""
    name, _, cutoff = text.partition("@")
    allowed = f"measures are {', '.join(f'{known}@k' for known in _FORMULAS)}"
    if name not in _FORMULAS:
        lower = {known.lower(): known for known in _FORMULAS}
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.4)
        hint = f", did you mean '{lower[near[0]]}@{cutoff or 10}'?" if near else ""
        raise SkilltrainError(f"unknown measure '{text}'{hint}", fix=allowed)
    if not re.fullmatch("[1-9][0-9]{0,8}", cutoff):
        raise SkilltrainError(f"measure '{text}' needs a whole cutoff from 1, like {name}@10", fix=allowed)
    return Measure(name, int(cutoff))


def parse_measures(texts: Sequence[str]) -> tuple[Measure, ...]:
    """The named measures, in order and each once."""
    return tuple(dict.fromkeys(parse_measure(text) for text in texts))


def evaluate_query(ranking: Sequence[str], relevance: Relevance, measures: Sequence[Measure]) -> dict[str, float]:
    """Measure name → value for one query's ranking (skill ids, best first; empty scores 0 everywhere).

    Raises SkilltrainError for a skill that stands twice in the ranking, and for a relevance by which no ranking
    could succeed: no gold, a gold skill without a positive gain, a gain that is negative or not finite.
    """
    _check_relevance(relevance)
    _check_ranking(ranking)
    return {str(measure): measure(ranking, relevance) for measure in measures}


def per_query(
    rankings: Mapping[str, Sequence[str]], relevances: Mapping[str, Relevance], measures: Sequence[Measure]
) -> dict[str, dict[str, float]]:
    """query_id → measure name → value, for every query of `relevances` and in their order.

    A query that the rankings leave out scores 0 everywhere: a system that fails to answer is not excused.
    Raises SkilltrainError for a ranked query that the benchmark does not hold, and as `evaluate_query` does.
    """
    if unknown := [query_id for query_id in rankings if query_id not in relevances]:
        raise SkilltrainError(
            f"{len(unknown)} of {len(rankings)} ranked queries are not in the benchmark", where=f"query {unknown[0]}"
        )
    values: dict[str, dict[str, float]] = {}
    for query_id, relevance in relevances.items():
        try:
            ranking = rankings.get(query_id, ())
            values[query_id] = evaluate_query(ranking, relevance, measures)
        except SkilltrainError as error:
            raise SkilltrainError(error.what, where=f"query {query_id}", fix=error.fix) from error
    return values


def _check_ranking(ranking: Sequence[str]) -> None:
    if isinstance(ranking, str):
        raise SkilltrainError(f"a ranking is a sequence of skill ids, found the text '{ranking[:60]}'")
    if len(seen := set(ranking)) == len(ranking):
        return
    for rank, skill_id in enumerate(ranking, 1):
        if skill_id not in seen:
            raise SkilltrainError(f"skill '{skill_id}' stands twice in the ranking, again at rank {rank}")
        seen.remove(skill_id)


def _check_relevance(relevance: Relevance) -> None:
    for skill_id, gain in relevance.gains.items():
        if not (math.isfinite(gain) and gain >= 0):
            raise SkilltrainError(f"the gain of skill '{skill_id}' is {gain}, not a finite number from 0")
    if not any(relevance.gains.values()):
        raise SkilltrainError("no skill has a positive gain, so no ranking can score")
    if not relevance.gold:
        raise SkilltrainError("no skill is gold, so no ranking can score")
    for skill_id in sorted(relevance.gold):
        if skill_id not in relevance.gains or not relevance.gains[skill_id]:
            raise SkilltrainError(f"gold skill '{skill_id}' has no positive gain")


def _num_gold(top: Sequence[str], relevance: Relevance) -> int:
    return sum(skill_id in relevance.gold for skill_id in top)


def _hit(top: Sequence[str], relevance: Relevance, cutoff: int) -> float:
    return float(_num_gold(top, relevance) > 0)


def _reciprocal_rank(top: Sequence[str], relevance: Relevance, cutoff: int) -> float:
    return next((1 / rank for rank, skill_id in enumerate(top, 1) if skill_id in relevance.gold), 0.0)


def _ndcg(top: Sequence[str], relevance: Relevance, cutoff: int) -> float:
    found = [relevance.gains.get(skill_id, 0.0) for skill_id in top]
    best = sorted(relevance.gains.values(), reverse=True)[:cutoff]
    return _discounted(found) / _discounted(best)


def _discounted(gains: Sequence[float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def _recall(top: Sequence[str], relevance: Relevance, cutoff: int) -> float:
    return _num_gold(top, relevance) / len(relevance.gold)


def _precision(top: Sequence[str], relevance: Relevance, cutoff: int) -> float:
    return _num_gold(top, relevance) / cutoff


def _full_coverage(top: Sequence[str], relevance: Relevance, cutoff: int) -> float:
    return float(_num_gold(top, relevance) == len(relevance.gold))


def _comp(top: Sequence[str], relevance: Relevance, cutoff: int) -> float:
    return _num_gold(top, relevance) / min(len(relevance.gold), cutoff)


_FORMULAS: dict[str, Callable[[Sequence[str], Relevance, int], float]] = {
    "Hit": _hit,
    "MRR": _reciprocal_rank,
    "nDCG": _ndcg,
    "Recall": _recall,
    "Precision": _precision,
    "FC": _full_coverage,
    "COMP": _comp,
}
