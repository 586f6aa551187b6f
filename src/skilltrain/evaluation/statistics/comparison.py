"""Two systems on the same queries: how far apart, how certainly, and how certainly among all that was compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from skilltrain.evaluation.results import SystemResult, same_queries, values_of
from skilltrain.evaluation.statistics.bootstrap import Interval, cluster_sums, is_binary, paired_differences
from skilltrain.evaluation.statistics.significance import cohens_h, holm, mcnemar, wilcoxon


@dataclass(frozen=True, slots=True)
class Comparison:
    """How much `system` is above `baseline` in the mean of `measure`, and four answers to whether that is chance.

    `p` is the paired bootstrap's, two-sided; `p_holm` is `p` adjusted over all comparisons of one call of `compare`;
    `wilcoxon_p` and `mcnemar_p` (exact) are not adjusted. `mcnemar_p` and `cohens_h` (of the two shares, positive
    where the system is above) are None unless every value of both systems is 0 or 1.
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


def compare(
    results: Sequence[SystemResult],
    pairs: Sequence[tuple[str, str]],
    measures: Sequence[str],
    query_ids: Sequence[str],
    *,
    seed: int,
    clusters: Mapping[str, str] | None = None,
) -> tuple[Comparison, ...]:
    """One comparison for each pair of names (baseline, system) and each measure, in this order, over `query_ids`.

    The family of Holm's adjustment is all of them, every pair and measure of this call: ask for what you will
    conclude from, and no more. A bootstrap p is never below .0002 (10,000 resamples), so that in a family of more
    than 250 none can fall below .05, and of few queries it is too small (`paired_differences`). Confirm with
    Wilcoxon's or McNemar's p, which have neither fault. All intervals come from the same draws of queries; `clusters`
    maps a query to the one that it is drawn together with (`Benchmark.clusters`), and a cluster counts once in tests.
    Raises SkilltrainError for systems that do not hold the same queries, and values that are missing or not finite.
    """
    same_queries(results)
    values = {system.name: values_of(system, query_ids, measures) for system in results}
    cases = [(baseline, system, column) for baseline, system in pairs for column in range(len(measures))]
    if not cases:
        return ()
    names = [(clusters or {}).get(query_id, query_id) for query_id in query_ids]
    differences = np.stack([values[system][:, at] - values[baseline][:, at] for baseline, system, at in cases], axis=1)
    found = paired_differences(differences, seed=seed, clusters=names)
    adjusted = holm([p for _, p in found])
    sums, sizes = cluster_sums(differences, names)
    comparisons: list[Comparison] = []
    for place, (baseline, system, at) in enumerate(cases):
        before, after = values[baseline][:, at], values[system][:, at]
        is_share = is_binary(before) and is_binary(after)
        difference, p = found[place]
        comparisons.append(
            Comparison(
                system=system,
                baseline=baseline,
                measure=measures[at],
                difference=difference,
                p=p,
                p_holm=adjusted[place],
                wilcoxon_p=wilcoxon(sums[:, place] / sizes),
                mcnemar_p=mcnemar(sums[:, place]) if is_share else None,
                cohens_h=cohens_h(float(after.mean()), float(before.mean())) if is_share else None,
            )
        )
    return tuple(comparisons)
