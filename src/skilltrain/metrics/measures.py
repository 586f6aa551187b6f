"""Measures as values: one number per query first, an aggregate only afterwards (bootstrap.py).

A measure is a plug-in of the kind `measure`: a function of a ranking, a relevance and a cutoff k. Its docstring says what
it is. A measure without a cutoff may return None for a query for which it is not defined. `gold` decides all measures
but nDCG and nDCG-exp, which read the graded gains.

Sources: SkillRouter, section 2 and appendix A, nDCG as in its released evaluation (linear gains); R3-Skill for COMP
and Set-Compat, as in its released evaluation (whose nDCG is nDCG-bin). What SkillRet calls Comp.@k is FC@k here.

What is decided once, for all callers:
- A ranking is a list, so its order decides. Where scores tie, whoever made it has put first the skill that stands first
  in the pool (retrieval) or stood first before (reranking).
- A query that the rankings leave out scores 0; SkillRouter's released evaluation leaves it out of the mean.
- Gold outside the pool is refused (benchmarks/benchmark.py, check_pool), where the released evaluation shrinks the
  gold. Gold outside the ranking counts as missed. A ranked skill that nobody judged gains nothing.
- A measure called `… (copies)` also takes `Relevance.copies` for gold, the first of each gold skill in the ranking; a
  second one gains nothing and keeps its place.
- A measure that is not defined for a query (Set-Compat, where one skill is gold) gives it no value: the key is absent
  from `per_query`, and the mean and its n run over the queries that have the key.
"""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated

from pydantic import AfterValidator

from skilltrain.errors import SkilltrainError
from skilltrain.plugins import load_plugin, plugin_paths

DEFAULT_MEASURES = ("Hit@1", "MRR@10", "nDCG@10", "Recall@10", "Recall@20", "Recall@50", "FC@10")
COPIES = (
    " (copies)"  # what the name of a measure ends with that takes copies of gold skills for gold
)
_HIGHEST_GAIN = 1000.0  # so that no sum of 2^gain leaves the range of a float


@dataclass(frozen=True, slots=True)
class Relevance:
    """What a query asks for: the `gold` skills, and the `gains` (skill_id → gain ≥ 0) that nDCG weighs.

    A gain without gold is half a success: a useful skill, or a degraded copy of a gold one. `alternatives` (skill_id →
    gold skill) do what a gold skill does: the one that a ranking puts first stands for it, the others gain nothing.
    `copies` (skill_id → gold skill) do so too, for the measures that ask for copies.
    """

    gold: frozenset[str]
    gains: Mapping[str, float]
    alternatives: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure and how many places it looks at (0: as many as there is gold); with `copies` these count as gold."""

    name: str
    cutoff: int
    copies: bool = False

    def __str__(self) -> str:
        return (f"{self.name}@{self.cutoff}" if self.cutoff else self.name) + COPIES * self.copies

    def __call__(self, ranking: Sequence[str], relevance: Relevance) -> float | None:
        """Return the value for one query, None if the measure is not defined for it.

        Inputs are trusted and alternatives resolved (see `evaluate_query`).
        """
        formula = _formula(self.name)
        return (
            formula(ranking, relevance, self.cutoff) if self.cutoff else formula(ranking, relevance)
        )


@cache
def _formula(name: str) -> Callable[..., float | None]:
    return load_plugin("measure", name)


@cache
def has_cutoff(name: str) -> bool:
    """Return whether a measure takes a cutoff beside a ranking and a relevance."""
    return len(inspect.signature(_formula(name)).parameters) == 3


def meaning_of(name: str) -> str:
    """Return what a measure is: the first paragraph of its function's docstring."""
    paragraph = (inspect.getdoc(_formula(name)) or name).partition("\n\n")[0]
    return paragraph.replace("\n", " ").rstrip(".")


def hit(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """1 if a gold skill stands in the top k."""
    return float(_num_gold(ranking, relevance, k) > 0)


def mrr(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """1 / rank of the first gold skill, 0 if it stands below place k."""
    ranks = [rank for rank, skill_id in enumerate(ranking[:k], 1) if skill_id in relevance.gold]
    return 1 / ranks[0] if ranks else 0.0


def ndcg(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """sum of gain / log2(rank + 1) over the top k, divided by the same sum for the best possible
    order.
    """
    return _discounted_ratio(ranking, relevance.gains, k)


def ndcg_exp(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """nDCG with 2^gain - 1 in place of the gain, so that a high grade weighs far more than a low
    one.
    """
    # expm1 keeps gains near 0 above 0.
    gains = {skill_id: math.expm1(g * math.log(2)) for skill_id, g in relevance.gains.items()}
    return _discounted_ratio(ranking, gains, k)


def ndcg_bin(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """nDCG with gain 1 for gold skills and 0 for all others."""
    return _discounted_ratio(ranking, dict.fromkeys(relevance.gold, 1.0), k)


def recall(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """share of the gold skills that stand in the top k."""
    return _num_gold(ranking, relevance, k) / len(relevance.gold)


def precision(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """gold skills in the top k, divided by k (also where the ranking is shorter)."""
    return _num_gold(ranking, relevance, k) / k


def full_coverage(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """full coverage: 1 if all gold skills stand in the top k, so 0 where a query has more than k of
    them.
    """
    return float(_num_gold(ranking, relevance, k) == len(relevance.gold))


def comp(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """gold skills in the top k, divided by the smaller of their number and k."""
    return _num_gold(ranking, relevance, k) / min(len(relevance.gold), k)


def set_compat(ranking: Sequence[str], relevance: Relevance) -> float | None:
    """over queries with two or more gold skills: 1 if these, and no others, fill the first places."""
    num_gold = len(relevance.gold)
    return full_coverage(ranking, relevance, num_gold) if num_gold > 1 else None


def _num_gold(ranking: Sequence[str], relevance: Relevance, k: int) -> int:
    return sum(skill_id in relevance.gold for skill_id in ranking[:k])


def _discounted_ratio(ranking: Sequence[str], gains: Mapping[str, float], k: int) -> float:
    best = sorted(gains.values(), reverse=True)[:k]
    ratio = _discounted([gains.get(skill_id, 0.0) for skill_id in ranking[:k]]) / _discounted(best)
    return min(1.0, ratio)  # gains that all but tie can round to above 1


def _discounted(gains: Sequence[float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def parse_measure(text: str) -> Measure:
    """Return the measure that a text like `nDCG@10` or `Hit@1 (copies)` names.

    Raises:
        SkilltrainError: There is no such measure. The error names the nearest, and all.
    """
    parts = re.fullmatch(r"(.*?)(?:@([1-9][0-9]{0,8}))?( \(copies\))?", text, re.DOTALL)
    name, cutoff, copies = parts.groups() if parts else (text, None, None)
    names = plugin_paths("measure")
    if (name in names or ":" in name) and has_cutoff(name) == bool(cutoff):
        return Measure(name, int(cutoff or 0), bool(copies))
    forms = {name: f"{name}@k" if has_cutoff(name) else name for name in names}
    known = {"r": "Recall", "p": "Precision"} | {name.lower(): name for name in names}
    near = difflib.get_close_matches(name.partition("@")[0].lower(), known, n=1, cutoff=0.4)
    hint = "".join(
        f", did you mean '{forms[known[word]].replace('@k', f'@{cutoff or 10}')}'?" for word in near
    )
    fix = f"measures are {', '.join(forms.values())}, with a whole k from 1"
    raise SkilltrainError("unknown-measure", f"unknown measure '{text}'{hint}", fix=fix)


def parse_measures(texts: Sequence[str]) -> tuple[Measure, ...]:
    """The named measures, in order and each once."""
    return tuple(dict.fromkeys(map(parse_measure, texts)))


def with_copies(measures: Sequence[Measure]) -> tuple[Measure, ...]:
    """Each measure, and beside it the one that takes copies of gold skills for gold; each once."""
    return tuple(
        dict.fromkeys(
            replace(measure, copies=copies) for measure in measures for copies in (False, True)
        )
    )


def _known_names(texts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(map(str, parse_measures(texts)))
    except SkilltrainError as error:
        raise ValueError(error.what) from error


MeasureNames = Annotated[tuple[str, ...], AfterValidator(_known_names)]
"""Names of measures as a setting: unknown ones are refused, each stands once."""


def per_query(
    rankings: Mapping[str, Sequence[str]],
    relevances: Mapping[str, Relevance],
    measures: Sequence[Measure],
) -> dict[str, dict[str, float]]:
    """query_id → measure name → value, for every query of `relevances`, ranked or not, and in their order."""
    if unknown := [query_id for query_id in rankings if query_id not in relevances]:
        what = f"{len(unknown)} of {len(rankings)} ranked queries are not in the benchmark"
        raise SkilltrainError("unknown-query", what, where=f"query {unknown[0]}")
    values: dict[str, dict[str, float]] = {}
    for query_id, relevance in relevances.items():
        try:
            values[query_id] = evaluate_query(rankings.get(query_id, ()), relevance, measures)
        except SkilltrainError as error:
            raise SkilltrainError(
                error.code, error.what, where=f"query {query_id}", fix=error.fix
            ) from error
    return values


def evaluate_query(
    ranking: Sequence[str], relevance: Relevance, measures: Sequence[Measure]
) -> dict[str, float]:
    """Measure → value of one ranking (skill ids, best first), where defined. SkilltrainError: a skill stands twice."""
    check_relevance(relevance)
    if len(set(ranking)) < len(ranking):
        at = next(at for at, skill_id in enumerate(ranking) if skill_id in ranking[:at])
        raise SkilltrainError(
            "repeated-id",
            f"skill '{ranking[at]}' appears twice in the ranking, again at rank {at + 1}",
        )
    found = {
        copies: as_found(ranking, relevance, copies)
        for copies in {measure.copies for measure in measures}
    }
    values = {str(measure): measure(ranking, found[measure.copies]) for measure in measures}
    return {name: value for name, value in values.items() if value is not None}


def check_relevance(relevance: Relevance) -> None:
    """Raise SkilltrainError for a relevance by which no ranking could succeed: no gold, a gold skill without a positive
    gain, a gain that is no number from 0 to 1,000.
    """
    gold, gains = relevance.gold, relevance.gains
    if bad := [
        skill_id for skill_id, gain in gains.items() if not 0 <= gain <= _HIGHEST_GAIN
    ]:  # NaN too
        what = f"the gain of skill '{bad[0]}' is {gains[bad[0]]}, not a number from 0 to {_HIGHEST_GAIN:,.0f}"
        raise SkilltrainError("invalid-relevance", what)
    if not gold:
        raise SkilltrainError("no-gold-skill", "no skill is gold, so no ranking can score")
    if without := sorted(skill_id for skill_id in gold if not gains.get(skill_id)):
        raise SkilltrainError(
            "invalid-relevance", f"gold skill '{without[0]}' has no positive gain"
        )
    for skill_id, need in (*relevance.alternatives.items(), *relevance.copies.items()):
        if need not in gold:
            raise SkilltrainError(
                "invalid-relevance", f"skill '{skill_id}' stands for '{need}', which is not gold"
            )
        if skill_id in gains:
            raise SkilltrainError(
                "invalid-relevance",
                f"skill '{skill_id}' stands for '{need}' and has a gain of its own",
            )


def as_found(ranking: Sequence[str], relevance: Relevance, copies: bool = False) -> Relevance:
    """`relevance` without alternatives: gold is what meets each need first in `ranking`; with `copies`, copies too."""
    needs = {**relevance.copies, **relevance.alternatives} if copies else relevance.alternatives
    if not needs:
        return relevance
    met: dict[str, str] = {}
    for skill_id in ranking:
        need = needs.get(skill_id, skill_id)
        if need in relevance.gold:
            met.setdefault(need, skill_id)
    gold = frozenset(met.get(need, need) for need in relevance.gold)
    return Relevance(
        gold, {met.get(skill_id, skill_id): gain for skill_id, gain in relevance.gains.items()}
    )
