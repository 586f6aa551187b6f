"""Scores of systems, and paired comparisons of two systems on the same queries."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError
from skilltrain.metrics.bootstrap import LEVEL, Interval, cluster_sums, paired_differences

ALPHA = 1 - LEVEL
MAX_EXACT = (
    25  # differing queries up to which the exact test decides; beyond, the bootstrap errs little
)
_DECIMALS = 12  # differences are rounded to this, so that a rounding error is no difference


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
    """Return the ids of all systems' queries, in the first system's order.

    Raises:
        SkilltrainError: If two systems have one name, or a system holds other queries than the first.
    """
    first = results[0]
    names: set[str] = set()
    for system in results:
        where = f"system {system.name}"
        if system.name in names:
            fix = "give each system a name of its own"
            raise SkilltrainError("another system has the same name", where=where, fix=fix)
        names.add(system.name)
        if odd := sorted(system.per_query.keys() ^ first.per_query.keys()):
            what = (
                f"holds other queries ({len(system.per_query)}) than system {first.name} "
                f"({len(first.per_query)}), first '{odd[0]}'"
            )
            raise SkilltrainError(what, where=where, fix="score all systems on the same queries")
    return tuple(first.per_query)


def values_of(
    system: SystemResult, query_ids: Sequence[str], measures: Sequence[str]
) -> Float[np.ndarray, "query measure"]:
    """Return the system's values. Raises SkilltrainError for one that is missing or not finite."""
    values = np.full((len(query_ids), len(measures)), math.nan)
    for row, query_id in enumerate(query_ids):
        scores = system.per_query[query_id]
        values[row] = [scores.get(name, math.nan) for name in measures]
    if len(bad := np.argwhere(~np.isfinite(values))):
        row, column = bad[0]
        what = f"{len(bad)} values are missing or not finite, first {measures[column]} of query '{query_ids[row]}'"
        raise SkilltrainError(what, where=f"system {system.name}")
    return values


def defined_queries(
    results: Sequence[SystemResult], query_ids: Sequence[str], measure: str
) -> tuple[str, ...]:
    """Return those of `query_ids` for which any of the systems has a value of `measure`."""
    return tuple(
        query_id
        for query_id in query_ids
        if any(measure in system.per_query[query_id] for system in results)
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Paired difference `system` − `baseline` in the mean of a measure.

    Queries of one cluster (one task over several pools) are one piece of evidence, and count once in `num_better`,
    `num_worse` and the p-values.

    Attributes:
        difference: The mean difference with its bootstrap interval.
        num_better: Number of queries on which `system` scores higher.
        num_worse: Number of queries on which it scores lower.
        p: Two-sided p-value: of the sign test where at most `MAX_EXACT` queries differ, else of the bootstrap.
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
    results: Sequence[SystemResult], pairs: Sequence[tuple[str, str]], measures: Sequence[str]
) -> tuple[Comparison, ...]:
    """Compare pairs of systems by each measure, over the queries that have a value of it.

    Args:
        results: The systems, all of the same queries.
        pairs: Names (baseline, system).
        measures: Measures to compare by. One that no query has a value of is left out.

    Returns:
        The comparisons, pair by pair. Holm's correction is over all of them, so ask only for those that you will
        conclude from. A bootstrap p is at least .0002: in a family of more than 250 none can fall below .05.

    Raises:
        SkilltrainError: If the systems do not hold the same queries, or only some have a value for a query.
    """
    all_queries = same_queries(results)
    comparisons: list[Comparison] = []
    for measure in measures if pairs else ():
        query_ids = defined_queries(results, all_queries, measure)
        if not query_ids:
            continue
        clusters = results[0].clusters_of(query_ids)
        values = {system.name: values_of(system, query_ids, [measure])[:, 0] for system in results}
        differences = np.stack([values[system] - values[base] for base, system in pairs], axis=1)
        bootstrapped = paired_differences(differences, clusters)
        net, _ = cluster_sums(differences, clusters)
        net = np.round(net, _DECIMALS)
        for column, (baseline, system) in enumerate(pairs):
            interval, p = bootstrapped[column]
            num_better = int((net[:, column] > 0).sum())
            num_worse = int((net[:, column] < 0).sum())
            if num_better + num_worse <= MAX_EXACT:
                p = sign_test(net[:, column])
            names = (system, baseline, measure)
            comparisons.append(Comparison(*names, interval, num_better, num_worse, p))
    comparisons.sort(key=lambda comparison: pairs.index((comparison.baseline, comparison.system)))
    return adjust(comparisons)


def adjust(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons with `p_holm` and `reading`, corrected over all of them."""
    adjusted = holm([comparison.p for comparison in comparisons])
    results: list[Comparison] = []
    for comparison, p in zip(comparisons, adjusted, strict=True):
        verdict = "above" if comparison.difference.mean > 0 else "below"
        reading = verdict if p < ALPHA else "not told apart"
        results.append(replace(comparison, p_holm=p, reading=reading))
    return tuple(results)


def sign_test(differences: Float[np.ndarray, " query"]) -> float:
    """Return the exact two-sided p of the sign test, in the direction of the mean difference.

    By chance alone a coin decides for each differing query which system is better. Of values 0 and 1 this is McNemar's
    exact test. Where most queries differ in one direction and the mean in the other, p is 1.
    """
    from scipy.stats import binomtest

    direction = np.sign(np.round(differences.sum(), _DECIMALS))
    signs = np.sign(differences)
    num_differing = np.count_nonzero(signs)
    if not direction or not num_differing:
        return 1.0
    num_agreeing = np.count_nonzero(signs == direction)
    test = binomtest(num_agreeing, num_differing, alternative="greater")
    return min(1.0, 2 * float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons (Holm, 1979), in their order.

    The i-th smallest of m values (from 0) is multiplied by m − i. It is at least its predecessor and at most 1.
    """
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(factors * np.asarray(p_values)[order])
    return np.minimum(adjusted, 1.0).tolist()
