"""Measures of a ranking. Each gives one number per query; `bootstrap.py` aggregates them.

A measure is a plug-in of the kind `measure`: a function of a ranking, a relevance and a cutoff k.
Its docstring is the explanation in reports. nDCG and nDCG-exp read the graded gains; all other
measures read `gold`. A measure without a cutoff may return None where it is not defined.

Sources:

- SkillRouter, section 2 and appendix A. nDCG has linear gains, as in its released evaluation.
- R3-Skill for COMP and Set-Compat, as in its released evaluation. Its nDCG is our nDCG-bin.
- SkillRet's Comp.@k is our FC@k.

Rules for all callers:

- Only the order of a ranking counts. Whoever makes it breaks ties by the order of the pool
  (retrieval) or by the order before (reranking).
- A query without a ranking scores 0. SkillRouter's released evaluation ignores such queries.
- A benchmark whose gold is not in the pool raises an error (`check_pool`). The released evaluation
  ignores such gold. Gold outside the ranking counts as missed. Unjudged skills gain nothing.
- `M (copies)` also accepts a copy of a gold skill (`Relevance.copies`). Only the first of a gold
  skill and its copies counts. Later ones gain nothing but still take a place.
- `M (judged)` accepts skills that readers found to serve the query (`Relevance.judged`) likewise.
- If a measure is not defined for a query (Set-Compat, one gold skill), `per_query` has no key for
  it. The mean and its n are over the queries that have the key.
"""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from typing import Annotated

from pydantic import AfterValidator

from skilltrain.errors import SkilltrainError
from skilltrain.plugins import load_plugin, plugin_paths

DEFAULT_MEASURES = ("Hit@1", "MRR@10", "nDCG@10", "Recall@10", "Recall@20", "Recall@50", "FC@10")
# Endings of the names of measures that accept other skills in the place of gold skills.
COPIES = " (copies)"
JUDGED = " (judged)"
_HIGHEST_GAIN = 1000.0  # so that no sum of 2^gain leaves the range of a float
_MEASURE = re.compile(r"(.*?)(?:@([1-9][0-9]{0,8}))?(?: \((copies|judged)\))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Relevance:
    """The skills that a query asks for.

    Attributes:
        gold: Ids of the gold skills.
        gains: Gain ≥ 0 by skill id, for nDCG. A skill with a gain that is not gold is useful, or a
            degraded copy of a gold skill.
        alternatives: Gold skill by the id of a skill that does the same. Only the first of them in
            a ranking counts.
        copies: Gold skill by the id of a near-duplicate. Only measures with copies accept them.
        judged: Gold skill by the id of a skill that readers found to serve the query. Only measures
            with judged skills accept them.
    """

    gold: frozenset[str]
    gains: Mapping[str, float]
    alternatives: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    judged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure with its settings.

    Attributes:
        name: Name of the plug-in.
        cutoff: Number of places that it reads; 0 for a measure without a cutoff.
        accepts: Skills that also count as gold: `copies` (near-duplicates of a gold skill),
            `judged` (skills that readers found to serve the query) or none.
    """

    name: str
    cutoff: int
    accepts: str = ""

    def __str__(self) -> str:
        cutoff = f"@{self.cutoff}" if self.cutoff else ""
        return self.name + cutoff + (f" ({self.accepts})" if self.accepts else "")

    def __call__(self, ranking: Sequence[str], relevance: Relevance) -> float | None:
        """Return the value for one query, None if the measure is not defined for it.

        Call `evaluate_query` instead, which checks the ranking and resolves alternatives.
        """
        formula = _formula(self.name)
        if not self.cutoff:
            return formula(ranking, relevance)
        return formula(ranking, relevance, self.cutoff)


@cache
def _formula(name: str) -> Callable[..., float | None]:
    return load_plugin("measure", name)


@cache
def has_cutoff(name: str) -> bool:
    """Return whether a measure takes a cutoff, in addition to a ranking and a relevance."""
    return len(inspect.signature(_formula(name)).parameters) == 3


@cache
def needs_cutoff(name: str) -> bool:
    """Return whether a measure takes a cutoff that has no default."""
    parameters = [*inspect.signature(_formula(name)).parameters.values()]
    return has_cutoff(name) and parameters[2].default is inspect.Parameter.empty


def meaning_of(name: str) -> str:
    """Return the explanation of a measure: the first paragraph of its function's docstring."""
    paragraph = (inspect.getdoc(_formula(name)) or name).partition("\n\n")[0]
    return paragraph.replace("\n", " ").rstrip(".")


# The docstrings of the measures continue the line "NAME: " of a report.


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


def average_precision(ranking: Sequence[str], relevance: Relevance, k: int | None = None) -> float:
    """mean over the gold skills of the precision at the rank of each, 0 for a skill below place k
    or outside the ranking.

    The precision at a rank is the share of gold skills among the skills down to this rank. For
    example, two gold skills at the ranks 1 and 4 give (1/1 + 2/4) / 2.
    """
    num_gold = 0  # gold skills found so far
    total = 0.0
    for rank, skill_id in enumerate(ranking[:k], 1):
        if skill_id in relevance.gold:
            num_gold += 1
            total += num_gold / rank  # the precision at this rank
    return total / len(relevance.gold)


def full_coverage(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """full coverage: 1 if all gold skills stand in the top k. It is 0 for a query with more than k
    gold skills.
    """
    return float(_num_gold(ranking, relevance, k) == len(relevance.gold))


def comp(ranking: Sequence[str], relevance: Relevance, k: int) -> float:
    """gold skills in the top k, divided by min(number of gold skills, k)."""
    return _num_gold(ranking, relevance, k) / min(len(relevance.gold), k)


def set_compat(ranking: Sequence[str], relevance: Relevance) -> float | None:
    """1 if the first n places hold the n gold skills. Only for queries with two or more gold
    skills.
    """
    num_gold = len(relevance.gold)
    return full_coverage(ranking, relevance, num_gold) if num_gold > 1 else None


def _num_gold(ranking: Sequence[str], relevance: Relevance, k: int) -> int:
    """Return the number of gold skills in the top k."""
    return sum(skill_id in relevance.gold for skill_id in ranking[:k])


def _discounted_ratio(ranking: Sequence[str], gains: Mapping[str, float], k: int) -> float:
    """Return nDCG: the discounted gains of the top k, divided by those of the best order.

    Args:
        ranking: Skill ids, best first.
        gains: Gain by skill id. Other skills have the gain 0.
        k: Number of places that count.
    """
    best_gains = sorted(gains.values(), reverse=True)[:k]
    ranked_gains = [gains.get(skill_id, 0.0) for skill_id in ranking[:k]]
    ratio = _discounted_sum(ranked_gains) / _discounted_sum(best_gains)
    return min(1.0, ratio)  # rounding of nearly equal gains can give more than 1


def _discounted_sum(gains: Sequence[float]) -> float:
    """Return the sum of gain / log2(rank + 1), for gains in the order of a ranking."""
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def parse_measure(text: str) -> Measure:
    """Parse the name of a measure, such as `nDCG@10` or `Hit@1 (copies)`.

    Raises:
        SkilltrainError: There is no such measure. The error suggests the nearest and lists all.
    """
    # The pattern splits `nDCG@10 (copies)` into nDCG, 10 and copies.
    match = _MEASURE.fullmatch(text)
    assert match is not None, "the pattern matches every text"
    name, cutoff, accepts = match.groups()
    measure_names = plugin_paths("measure")
    is_import_path = ":" in name  # a measure of the user, as `module:function`
    is_known = is_import_path or name in measure_names
    # A name with a cutoff, such as `nDCG@10`, is valid if the measure has a cutoff. A name without
    # a cutoff is valid if the measure does not require a cutoff. Only `MAP` allows both forms.
    if is_known and (has_cutoff(name) if cutoff else not needs_cutoff(name)):
        return Measure(name, int(cutoff or 0), accepts or "")

    # List all measures as one writes them, such as `nDCG@k`.
    form_by_name: dict[str, str] = {}
    for option in measure_names:
        form_by_name[option] = f"{option}@k" if has_cutoff(option) else option
    fix = f"measures are {', '.join(form_by_name.values())}, with a whole k from 1"

    problem = f"unknown measure '{text}'"
    nearest_name = _nearest_measure(name)
    if nearest_name is not None:
        suggestion = form_by_name[nearest_name].replace("@k", f"@{cutoff or 10}")
        problem += f", did you mean '{suggestion}'?"
    raise SkilltrainError("unknown-measure", problem, fix=fix)


def _nearest_measure(name: str) -> str | None:
    """Return the measure with the most similar name in lower case; None if none is similar.

    For example, `ndgc` is similar to `nDCG`.
    """
    # Names by their form in lower case, and by the usual abbreviations as in R@10 and P@10.
    name_by_lower_case = {"r": "Recall", "p": "Precision"}
    for option in plugin_paths("measure"):
        name_by_lower_case[option.lower()] = option

    # A wrong cutoff, as in `ndcg@0`, is still part of the name.
    lower_case = name.partition("@")[0].lower()
    matches = difflib.get_close_matches(lower_case, name_by_lower_case, n=1, cutoff=0.4)
    return name_by_lower_case[matches[0]] if matches else None


def parse_measures(texts: Sequence[str]) -> tuple[Measure, ...]:
    """Parse the names of measures, and remove duplicates."""
    return tuple(dict.fromkeys(map(parse_measure, texts)))


def with_copies(measures: Sequence[Measure]) -> tuple[Measure, ...]:
    """Return each measure, followed by its variant that accepts copies, without duplicates."""
    pairs = product(measures, ("", "copies"))
    variants = [replace(measure, accepts=accepts) for measure, accepts in pairs]
    return tuple(dict.fromkeys(variants))


def _check_names(texts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(map(str, parse_measures(texts)))
    except SkilltrainError as error:
        raise ValueError(error.problem) from error


MeasureNames = Annotated[tuple[str, ...], AfterValidator(_check_names)]
"""Names of measures as a setting. Duplicates are removed, and unknown names are an error."""


def per_query(
    rankings: Mapping[str, Sequence[str]],
    relevances: Mapping[str, Relevance],
    measures: Sequence[Measure],
) -> dict[str, dict[str, float]]:
    """Return the values by query id and name of the measure, for every query of `relevances`.

    Args:
        rankings: Ranked skill ids by query id. A query without a ranking scores 0.
        relevances: The skills that each query asks for, by query id.
        measures: The measures to compute.

    Raises:
        SkilltrainError: A ranked query is not in `relevances`, or `evaluate_query` fails.
    """
    unknown = [query_id for query_id in rankings if query_id not in relevances]
    if unknown:
        problem = f"{len(unknown)} of {len(rankings)} ranked queries are not in the benchmark"
        raise SkilltrainError("unknown-query", problem, where=f"query {unknown[0]}")

    values = {}
    for query_id, relevance in relevances.items():
        # `evaluate_query` does not know the query, so add its id to an error.
        try:
            values[query_id] = evaluate_query(rankings.get(query_id, ()), relevance, measures)
        except SkilltrainError as error:
            raise SkilltrainError(
                error.code, error.problem, where=f"query {query_id}", fix=error.fix
            ) from error
    return values


def evaluate_query(
    ranking: Sequence[str], relevance: Relevance, measures: Sequence[Measure]
) -> dict[str, float]:
    """Return the value of each measure that is defined for a query.

    Args:
        ranking: Skill ids, best first.
        relevance: The skills that the query asks for.
        measures: The measures.

    Raises:
        SkilltrainError: The ranking repeats a skill, or `check_relevance` fails.
    """
    check_relevance(relevance)
    ranked_ids: set[str] = set()
    for rank, skill_id in enumerate(ranking, 1):
        if skill_id in ranked_ids:
            problem = f"skill '{skill_id}' appears twice in the ranking, again at rank {rank}"
            raise SkilltrainError("repeated-id", problem)
        ranked_ids.add(skill_id)

    values = {}
    for measure in measures:
        # Some skills count in the place of a gold skill: its alternatives, and the skills that the
        # measure accepts (`copies` or `judged`). Make them gold before the measure is computed.
        value = measure(ranking, resolve_alternatives(ranking, relevance, measure.accepts))
        if value is not None:  # None: the measure is not defined for this query
            values[str(measure)] = value
    return values


def check_relevance(relevance: Relevance) -> None:
    """Check that a ranking can score above 0, and that the values make sense.

    Raises:
        SkilltrainError: A check fails. A gain is a number from 0 to 1,000, at least one skill is
            gold, and all gold skills have a positive gain. Alternatives and copies belong to a gold
            skill, and have no gain themselves.
    """
    gold = relevance.gold
    gains = relevance.gains
    for skill_id, gain in gains.items():
        if not 0 <= gain <= _HIGHEST_GAIN:  # also true for NaN
            limits = f"0 to {_HIGHEST_GAIN:,.0f}"
            problem = f"the gain of skill '{skill_id}' is {gain}, not a number from {limits}"
            raise SkilltrainError("invalid-relevance", problem)
    if not gold:
        raise SkilltrainError("no-gold-skill", "no skill is gold, so no ranking can score")
    for skill_id in sorted(gold):
        if not gains.get(skill_id):
            problem = f"gold skill '{skill_id}' has no positive gain"
            raise SkilltrainError("invalid-relevance", problem)

    # Check the alternatives, and then the copies.
    for skill_id, gold_id in chain(relevance.alternatives.items(), relevance.copies.items()):
        problem = f"skill '{skill_id}' stands for '{gold_id}'"
        if gold_id not in gold:
            raise SkilltrainError("invalid-relevance", f"{problem}, which is not gold")
        if skill_id in gains:
            raise SkilltrainError("invalid-relevance", f"{problem} and has a gain of its own")


def resolve_alternatives(
    ranking: Sequence[str], relevance: Relevance, accepts: str = ""
) -> Relevance:
    """Replace each gold skill by the first skill in `ranking` that can take its place.

    The gold skill itself and its alternatives can take its place, and the skills that `accepts`
    names. If the ranking has none of these skills, the gold skill stays. For example, if a copy of
    the gold skill `a` is ranked above `a`, the copy becomes gold and `a` does not stay gold.

    Args:
        ranking: Ranked skill ids.
        relevance: The skills that the query asks for.
        accepts: Field of `relevance` whose skills can take the place of a gold skill too: `copies`
            (near-duplicates) or `judged` (skills that readers found to serve the query). Empty:
            neither.

    Returns:
        A relevance with the new gold skills and their gains. Its fields `alternatives`, `copies`
        and `judged` are empty. If no skill can take the place of another, `relevance` itself.
    """
    # The gold skill by each skill that can take its place. A skill may be in both fields. Then its
    # entry in `alternatives` counts, because the later dict wins.
    gold_by_replacement = relevance.alternatives
    if accepts:
        gold_by_replacement = {**getattr(relevance, accepts), **relevance.alternatives}
    if not gold_by_replacement:
        return relevance

    # The first replacement of each gold skill, by the id of the gold skill.
    first_replacements: dict[str, str] = {}
    for skill_id in ranking:
        # A gold skill can take its own place.
        gold_id = gold_by_replacement.get(skill_id, skill_id)
        if gold_id in relevance.gold:
            first_replacements.setdefault(gold_id, skill_id)

    gold = frozenset(first_replacements.get(gold_id, gold_id) for gold_id in relevance.gold)
    # The replacement gets the gain of its gold skill, even if it has a gain of its own. Other
    # skills keep their gains.
    gains = {key: gain for key, gain in relevance.gains.items() if key not in relevance.gold}
    for gold_id in relevance.gold:
        gains[first_replacements.get(gold_id, gold_id)] = relevance.gains[gold_id]
    return Relevance(gold, gains)
