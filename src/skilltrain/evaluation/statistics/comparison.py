"""Two systems on the same queries: how far apart, how certainly, and how certainly among all that was compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.results import SystemResult
from skilltrain.evaluation.statistics.bootstrap import Difference, Interval, paired_differences
from skilltrain.evaluation.statistics.proportions import cohens_h, is_binary
from skilltrain.evaluation.statistics.significance import holm, mcnemar, wilcoxon
from skilltrain.evaluation.statistics.values import same_queries, values_of


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
) -> tuple[Comparison, ...]:
    """One comparison for each pair of names (baseline, system) and each measure, in this order, over `query_ids`.

    The family of Holm's adjustment is all of them, every pair and measure of this call: ask for what you will
    conclude from, and no more. A bootstrap p is never below .0002 (10,000 resamples), so that in a family of more
    than 250 none can fall below .05, and of few queries it is too small (`paired_differences`). Confirm with
    Wilcoxon's or McNemar's p, which have neither fault. All intervals come from the same draws of queries.
    Raises SkilltrainError for systems that do not hold the same queries, names and measures that are not there, and
    values that are not finite.
    """
    held = same_queries(results)
    if not query_ids:
        raise SkilltrainError(f"no queries to compare over; the systems hold {len(held)}")
    systems = {system.name: system for system in results}
    for name in (name for pair in pairs for name in pair):
        if name not in systems:
            raise SkilltrainError(f"unknown system '{name}'", fix=f"systems are {', '.join(systems) or 'none'}")
    if not pairs:
        return ()
    values = {name: values_of(systems[name], query_ids, measures) for pair in pairs for name in pair}
    columns = [values[system] - values[baseline] for baseline, system in pairs]
    found = paired_differences(np.concatenate(columns, axis=1), seed=seed)
    cases = [(pair, column) for pair in pairs for column in range(len(measures))]
    adjusted = holm([difference.p for difference in found])
    return tuple(
        _comparison(values, pair, (measures[column], column), difference, p_holm)
        for (pair, column), difference, p_holm in zip(cases, found, adjusted, strict=True)
    )


def _comparison(
    values: Mapping[str, Float[np.ndarray, "query measure"]],
    pair: tuple[str, str],
    measure: tuple[str, int],
    difference: Difference,
    p_holm: float,
) -> Comparison:
    baseline, system = pair
    name, column = measure
    before, after = values[baseline][:, column], values[system][:, column]
    binary = is_binary(before) and is_binary(after)
    return Comparison(
        system=system,
        baseline=baseline,
        measure=name,
        difference=difference.interval,
        p=difference.p,
        p_holm=p_holm,
        wilcoxon_p=wilcoxon(after.tolist(), before.tolist()),
        mcnemar_p=mcnemar(before.tolist(), after.tolist()) if binary else None,
        cohens_h=cohens_h(float(after.mean()), float(before.mean())) if binary else None,
    )
