"""What systems score, and two of them on the same queries: how far apart, and how certainly among all compared.

The tests take the differences of two systems, one per query; where several queries are one cluster (one task over
several pools), one per cluster, because tests count independent evidence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import (
    LEVEL,
    Interval,
    cluster_sums,
    is_binary,
    paired_differences,
)

ALPHA = 1 - LEVEL
_EXACT = 200  # differing queries up to which all choices of signs are counted: some ms
_PLACES = 12  # differences are rounded to so many decimals, or rounding errors would break ties


@dataclass(frozen=True)
class SystemResult:
    """What one system scored: query_id → measure name → value (metrics.per_query), and its rankings of skill ids.

    `clusters` maps a query to what it is drawn together with in a bootstrap (`Benchmark.clusters`), if anything.
    """

    name: str
    per_query: Mapping[str, Mapping[str, float]]
    rankings: Mapping[str, Sequence[str]]
    clusters: Mapping[str, str] = field(default_factory=dict)

    def clusters_of(self, query_ids: Sequence[str]) -> list[str]:
        """The cluster of each query; its own id where it has none."""
        return [self.clusters.get(query_id, query_id) for query_id in query_ids]


def same_queries(results: Sequence[SystemResult]) -> tuple[str, ...]:
    """The ids of all systems' queries, in the first one's order. SkilltrainError: a name twice, other queries."""
    first, names = results[0], [system.name for system in results]
    for at, system in enumerate(results):
        if system.name in names[:at]:
            raise SkilltrainError(
                f"two systems are named '{system.name}'", fix="give each system a name of its own"
            )
        if odd := sorted(system.per_query.keys() ^ first.per_query.keys()):
            held = f"(system {first.name} holds {len(first.per_query)}, this one {len(system.per_query)})"
            what = f"runs over different query sets compared: {len(odd)} queries stand on one side only {held}"
            fix = "score all systems on the same queries"
            raise SkilltrainError(
                f"{what}, first '{odd[0]}'", where=f"system {system.name}", fix=fix
            )
    return tuple(first.per_query)


def values_of(
    system: SystemResult, query_ids: Sequence[str], measures: Sequence[str]
) -> Float[np.ndarray, "query measure"]:
    """The system's values in the orders asked for. Raises SkilltrainError for one that is missing or not finite."""
    rows = [system.per_query[query_id] for query_id in query_ids]
    values = np.array([row.get(name, math.nan) for row in rows for name in measures]).reshape(
        len(rows), len(measures)
    )
    if len(bad := np.argwhere(~np.isfinite(values))):
        row, column = bad[0]
        what = f"{len(bad)} values are missing or not finite, first {measures[column]} of query '{query_ids[row]}'"
        raise SkilltrainError(what, where=f"system {system.name}")
    return values


@dataclass(frozen=True, slots=True)
class Comparison:
    """How much `system` is above `baseline` in the mean of `measure`, and four answers to whether that is chance.

    `p` is the paired bootstrap's, `p_holm` the same adjusted over all comparisons of one call of `compare`; the others
    are not adjusted. `mcnemar_p` and `cohens_h` are None unless every value of both systems is 0 or 1.
    """

    system: str
    baseline: str
    measure: str
    difference: Interval
    p: float
    p_holm: float
    wilcoxon_p: float
    mcnemar_p: float | None
    cohens_h: float | None

    @property
    def reading(self) -> str:
        """What it allows to say, by its p after Holm's correction: above, below or not told apart."""
        if self.p_holm >= ALPHA or not self.difference.mean:
            return "not told apart"
        return "above" if self.difference.mean > 0 else "below"


def compare(
    results: Sequence[SystemResult],
    pairs: Sequence[tuple[str, str]],
    measures: Sequence[str],
    query_ids: Sequence[str],
) -> tuple[Comparison, ...]:
    """One comparison for each pair of names (baseline, system) and each measure, in this order, over `query_ids`.

    The family of Holm's adjustment is all of them: ask for what you will conclude from, and no more. A bootstrap p is
    never below .0002, so that in a family of more than 250 none can fall below .05, and of few queries it is too small
    (`paired_differences`); Wilcoxon's and McNemar's p have neither fault. A cluster counts once in the tests.
    """
    same_queries(results)
    values = {system.name: values_of(system, query_ids, measures) for system in results}
    cases = [(baseline, system, at) for baseline, system in pairs for at in range(len(measures))]
    if not cases:
        return ()
    names = results[0].clusters_of(query_ids)
    differences = np.stack(
        [values[system][:, at] - values[baseline][:, at] for baseline, system, at in cases], axis=1
    )
    found = paired_differences(differences, names)
    adjusted = holm([p for _, p in found])
    sums, sizes = cluster_sums(differences, names)
    comparisons: list[Comparison] = []
    for place, (baseline, system, at) in enumerate(cases):
        before, after, p_mcnemar, effect = (
            values[baseline][:, at],
            values[system][:, at],
            None,
            None,
        )
        if is_binary(before) and is_binary(after):
            p_mcnemar, effect = (
                mcnemar(sums[:, place]),
                cohens_h(float(after.mean()), float(before.mean())),
            )
        about, p_wilcoxon = (system, baseline, measures[at]), wilcoxon(sums[:, place] / sizes)
        comparisons.append(
            Comparison(*about, *found[place], adjusted[place], p_wilcoxon, p_mcnemar, effect)
        )
    return tuple(comparisons)


def wilcoxon(differences: Float[np.ndarray, " query"], above: bool = False) -> float:
    """The two-sided p of Wilcoxon's signed-rank test: are the differences symmetric about 0?

    With `above` the one-sided p: could they be as far above 0 by chance? Queries on which both are equal are left out;
    equal amounts share their mean rank. Up to 200 differing queries p is exact, ties or not (scipy counts ties exactly
    for 13); beyond, it is the normal approximation corrected for ties. No difference at all gives 1.
    """
    from scipy import stats

    differing = np.round(differences, _PLACES)
    differing = differing[differing != 0]
    if differing.size <= _EXACT:
        ranks = np.rint(2 * stats.rankdata(np.abs(differing)))  # doubled, because ties have halves
        return _sign_flip_p((ranks * np.sign(differing)).astype(np.int64), above)
    side = "greater" if above else "two-sided"
    return float(stats.wilcoxon(differing, alternative=side, method="asymptotic")[1])  # type: ignore[arg-type]


def mcnemar(differences: Float[np.ndarray, " query"]) -> float:
    """The exact two-sided p of McNemar's test: could the queries that a system fixed (1) and broke (−1) be as many?

    By chance alone a coin decides for each query on which they differ: p is its two-sided binomial test (McNemar,
    1947, in its exact form). The difference of a cluster is the fixed less the broken of its queries. None gives 1.
    """
    return _sign_flip_p(np.rint(differences).astype(np.int64))


def _sign_flip_p(differences: Int[np.ndarray, " query"], above: bool = False) -> float:
    """The chance of a sum of positive differences as far out (or as far `above`), each sign the toss of a coin."""
    amounts = np.abs(differences)
    chances = np.zeros(amounts.sum() + 1)
    chances[0] = 1.0
    for amount in amounts[amounts > 0]:
        with_amount = np.zeros_like(chances)
        with_amount[amount:] = chances[:-amount]
        chances = (chances + with_amount) / 2
    found = differences[differences > 0].sum()
    high = float(chances[found:].sum())
    return min(1.0, high if above else 2 * min(high, float(chances[: found + 1].sum())))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for being a family, in their order (Holm, 1979): the i-th smallest of m (from 0) is
    multiplied by m − i, is at least the one before, and at most 1.
    """
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for step, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, p_values[place] * (len(p_values) - step)))
        adjusted[place] = least
    return adjusted


def cohens_h(share_a: float, share_b: float) -> float:
    """How far two shares lie apart: 2 asin √a − 2 asin √b (Cohen, 1988), who calls ±.2 small, ±.5 medium, ±.8 large."""
    return 2 * math.asin(math.sqrt(share_a)) - 2 * math.asin(math.sqrt(share_b))
