"""Scores of systems, and paired comparisons of two systems on the same queries.

Notes:
    - Holm's correction is over all comparisons of a call, so request only those that you draw
      conclusions from. A bootstrap p-value is at least .0002. With more than 250 comparisons, its
      corrected value is therefore never below .05.
    - The one-sided p-value of `sign_test` is the probability of at least as many differences with
      the sign of the mean. The result is twice this value, and at most 1. It is 1 if the mean is
      positive but most differences are negative, or the reverse.
    - If a part of the planned comparisons is made, a corrected p-value is at least that of the
      whole, whatever the others give: a p-value of 1 for them makes every factor largest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError
from skilltrain.metrics.bootstrap import (
    LEVEL,
    SEED,
    Interval,
    cluster_sums,
    paired_differences,
)

ALPHA = 1 - LEVEL
MAX_EXACT = 25  # queries; if more differ, the bootstrap is accurate enough without an exact test
_DECIMALS = 12  # differences are rounded, so that rounding errors do not count as differences


@dataclass(frozen=True)
class SystemResult:
    """Scores and rankings of one system.

    Attributes:
        name: Name of the system.
        per_query: Value of each measure by query id and measure name.
        rankings: Ranked skill ids by query id.
        clusters: Cluster by query id, for queries that the bootstrap draws together.
        seed: Seed of the bootstrap.
    """

    name: str
    per_query: Mapping[str, Mapping[str, float]]
    rankings: Mapping[str, Sequence[str]]
    clusters: Mapping[str, str] = field(default_factory=dict)
    seed: int = SEED

    def clusters_of(self, query_ids: Sequence[str]) -> list[str]:
        """Return the cluster of each query, or its id if it is in no cluster."""
        return [self.clusters.get(query_id, query_id) for query_id in query_ids]


def shared_query_ids(results: Sequence[SystemResult]) -> tuple[str, ...]:
    """Check that all systems have the same queries, and return the query ids.

    The ids are in the first system's order.

    Args:
        results: Scores of each system. There is at least one system.

    Raises:
        SkilltrainError: Two systems have the same name, or different queries.
    """
    first = results[0]
    names = set()
    for system in results:
        if system.name in names:
            problem = "another system has the same name"
            fix = "give each system a name of its own"
            raise SkilltrainError("repeated-name", problem, where=f"system {system.name}", fix=fix)
        names.add(system.name)
        # Ids that only one of the two systems has.
        different_ids = system.per_query.keys() ^ first.per_query.keys()
        if different_ids:
            problem = (
                f"holds other queries ({len(system.per_query)}) than system {first.name} "
                f"({len(first.per_query)}), first '{min(different_ids)}'"
            )
            fix = "score all systems on the same queries"
            raise SkilltrainError("not-comparable", problem, where=f"system {system.name}", fix=fix)
    return tuple(first.per_query)


def values_of(
    system: SystemResult, query_ids: Sequence[str], measures: Sequence[str]
) -> Float[np.ndarray, "query measure"]:
    """Return the values of a system as a table.

    Args:
        system: The system.
        query_ids: Queries of the rows.
        measures: Names of the measures of the columns.

    Raises:
        SkilltrainError: A value is missing or not finite.
    """
    # NaN marks a missing value.
    values = np.full((len(query_ids), len(measures)), math.nan)
    for row, query_id in enumerate(query_ids):
        scores = system.per_query[query_id]
        values[row] = [scores.get(name, math.nan) for name in measures]
    bad_positions = np.argwhere(~np.isfinite(values))  # row and column of each bad value
    if len(bad_positions):
        row, column = bad_positions[0]
        first = f"{measures[column]} of query '{query_ids[row]}'"
        problem = f"{len(bad_positions)} values are missing or not finite, first {first}"
        raise SkilltrainError("not-a-number", problem, where=f"system {system.name}")
    return values


def defined_queries(
    results: Sequence[SystemResult], query_ids: Sequence[str], measure: str
) -> tuple[str, ...]:
    """Return the queries for which the measure has a value, in at least one system.

    Some measures have no value for some queries. Whether a value exists depends on the query and
    not on the system. If only some systems have a value, `values_of` raises an error later.

    Args:
        results: Scores of each system.
        query_ids: Ids of the queries to look at.
        measure: Name of the measure.
    """
    defined_ids = []
    for query_id in query_ids:
        if any(measure in system.per_query[query_id] for system in results):
            defined_ids.append(query_id)
    return tuple(defined_ids)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Paired difference `system` − `baseline` in the mean of a measure.

    Queries of one cluster (one task over several pools) are not independent, and count as one query
    in `num_better`, `num_worse` and the p-values.

    Attributes:
        system: Name of one system.
        baseline: Name of the system that it is compared with.
        measure: Name of the measure.
        difference: The mean difference with its bootstrap interval.
        num_better: Number of queries on which `system` scores higher.
        num_worse: Number of queries on which it scores lower.
        p: Two-sided p-value, of the sign test if at most `MAX_EXACT` queries differ, else of the
            bootstrap.
        p_holm: `p` after Holm's correction over all comparisons made together.
        reading: The verdict by `p_holm`: above, below or not told apart.
    """

    system: str
    baseline: str
    measure: str
    difference: Interval
    num_better: int
    num_worse: int
    p: float
    p_holm: float = 1.0
    reading: str = "not told apart"


def compare(
    results: Sequence[SystemResult],
    pairs: Sequence[tuple[str, str]],
    measures: Sequence[str],
    num_pairs: int = 0,
) -> tuple[Comparison, ...]:
    """Compare pairs of systems by each measure, over the queries that have a value of it.

    Args:
        results: Scores of each system, on the same queries.
        pairs: Names of baseline and system.
        measures: Names of the measures.
        num_pairs: Number of planned pairs, if more than these. Holm's correction is over all
            planned pairs.

    Returns:
        The comparisons, pair by pair.
    """
    all_queries = shared_query_ids(results)
    if not pairs:
        return ()

    comparisons = []
    for measure in measures:
        query_ids = defined_queries(results, all_queries, measure)
        if query_ids:
            comparisons += _compare_by(measure, results, pairs, query_ids)
    # Put the measures of one pair together. The sort keeps the order of the measures.
    comparisons.sort(key=lambda comparison: pairs.index((comparison.baseline, comparison.system)))
    # Measures without any value made no comparison.
    num_measures = len(comparisons) // len(pairs)
    return with_holm(comparisons, num_planned=num_pairs * num_measures)


def _compare_by(
    measure: str,
    results: Sequence[SystemResult],
    pairs: Sequence[tuple[str, str]],
    query_ids: Sequence[str],
) -> list[Comparison]:
    """Compare pairs of systems by one measure, without Holm's correction.

    Args:
        measure: Name of the measure.
        results: Scores of each system.
        pairs: Names of baseline and system.
        query_ids: Queries for which the measure has a value.
    """
    # The values of each system: [query].
    values = {result.name: values_of(result, query_ids, [measure])[:, 0] for result in results}
    pair_differences = [values[system] - values[baseline] for baseline, system in pairs]
    differences = np.stack(pair_differences, axis=1)  # [query, pair]
    clusters = results[0].clusters_of(query_ids)
    # Queries of one cluster are drawn together. For each pair: the interval and the p-value.
    bootstrapped = paired_differences(differences, clusters, results[0].seed)
    sums, _ = cluster_sums(differences, clusters)  # [cluster, pair]

    comparisons = []
    for number, (baseline, system) in enumerate(pairs):
        interval, p = bootstrapped[number]
        # `_with_counts` sets the two counts.
        comparison = Comparison(system, baseline, measure, interval, num_better=0, num_worse=0, p=p)
        comparisons.append(_with_counts(comparison, sums[:, number]))
    return comparisons


def _with_counts(comparison: Comparison, differences: Float[np.ndarray, " cluster"]) -> Comparison:
    """Set the counts of a comparison and, if few clusters differ, the p-value of the sign test.

    If few clusters differ, the p-value of the bootstrap is too small, and the sign test is exact.

    Args:
        comparison: The comparison, with the p-value of the bootstrap.
        differences: Sum of the differences of each cluster, system minus baseline.
    """
    # A rounding error must not count as a difference.
    rounded = np.round(differences, _DECIMALS)
    num_better = int((rounded > 0).sum())
    num_worse = int((rounded < 0).sum())
    p = sign_test(rounded) if num_better + num_worse <= MAX_EXACT else comparison.p
    return replace(comparison, num_better=num_better, num_worse=num_worse, p=p)


def with_holm(comparisons: Sequence[Comparison], num_planned: int = 0) -> tuple[Comparison, ...]:
    """Set `p_holm` and `reading` of each comparison by Holm's correction over all of them.

    The reading is `above` or `below` if the corrected p-value shows a difference.

    Args:
        comparisons: Comparisons with their p-values before the correction.
        num_planned: Number of comparisons that the correction is over, if more than these.
    """
    adjusted = holm([comparison.p for comparison in comparisons], num_planned)
    results = []
    for comparison, p in zip(comparisons, adjusted, strict=True):
        verdict = "not told apart"
        if p < ALPHA:
            verdict = "above" if comparison.difference.mean > 0 else "below"
        results.append(replace(comparison, p_holm=p, reading=verdict))
    return tuple(results)


def sign_test(differences: Float[np.ndarray, " query"]) -> float:
    """Return the two-sided p-value of the exact sign test.

    The test asks how likely so many differences of one sign are if both signs are equally likely.
    For values of 0 and 1 this is McNemar's exact test.

    Args:
        differences: Value of one system minus value of the other.
    """
    from scipy.stats import binomtest

    direction = np.sign(np.round(differences.sum(), _DECIMALS))  # 1, 0 or -1
    signs = np.sign(differences)  # [query], 1, 0 or -1
    num_differing = np.count_nonzero(signs)
    if direction == 0 or num_differing == 0:
        return 1.0
    num_agreeing = np.count_nonzero(signs == direction)
    test = binomtest(num_agreeing, num_differing, alternative="greater")
    return min(1.0, 2 * float(test.pvalue))


def holm(p_values: Sequence[float], num_planned: int = 0) -> list[float]:
    """Correct p-values for multiple comparisons (Holm, 1979) and return them in the same order.

    The i-th smallest of m values, counted from 0, is multiplied by m − i. The result is at least
    the previous one and at most 1.

    For example, .01, .04 and .03 become .03, .06 and .06.

    Args:
        p_values: The p-values, in any order.
        num_planned: Number of comparisons m, if some were not made. Their p-values count as 1.
    """
    order = np.argsort(p_values, kind="stable")
    # m, m - 1, m - 2 and so on, for the p-values from the smallest to the largest.
    factors = max(num_planned, len(order)) - np.arange(len(order))
    adjusted = np.empty(len(order))
    # `accumulate` makes each value at least the previous one. The index `order` restores the order.
    adjusted[order] = np.maximum.accumulate(factors * np.asarray(p_values)[order])
    return np.minimum(adjusted, 1.0).tolist()
