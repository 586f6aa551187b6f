"""Whether two systems differ on the same queries: tests that draw nothing at random, and Holm's adjustment.

The paired bootstrap stands in bootstrap.py. scipy.stats is imported where it is used: it takes half a second.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.statistics.proportions import is_binary

_EXACT = 200  # differing queries up to which all choices of signs are counted: some ms
_PLACES = 12  # differences are rounded to so many decimals, or rounding errors would break ties


def wilcoxon(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p of Wilcoxon's signed-rank test: are the differences a − b symmetric about 0?

    Queries on which both are equal are left out, as Wilcoxon did: they speak for neither, and McNemar's test leaves
    them out too. Equal amounts share their mean rank; differences that are equal to 12 decimals are equal. For up to
    200 differing queries p is exact, ties or not: all choices of signs of these very ranks are counted, so that for
    values of 0 and 1 it is McNemar's p. Beyond, it is the normal approximation with the variance corrected for ties,
    without continuity correction. No difference at all gives 1.
    Raises SkilltrainError for lists of unequal length, no values and values that are not finite.
    """
    _check_pairs(a, b)
    differences = np.round(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64), _PLACES)
    differing = differences[differences != 0]
    if differing.size <= _EXACT:
        return _signed_rank_p(differing)
    from scipy import stats

    found: Any = stats.wilcoxon(differing, correction=False, alternative="two-sided", method="asymptotic")
    return float(found.pvalue)


def mcnemar(baseline: Sequence[float], system: Sequence[float]) -> float:
    """The exact two-sided p of McNemar's test: could the queries that `system` fixed and those it broke be as many?

    If neither were better, each query on which they differ would be fixed or broken by the toss of a coin: p is the
    two-sided binomial test of that (McNemar, 1947, in its exact form). No such query gives 1.
    Raises SkilltrainError for values other than 0 and 1, and as `wilcoxon` does.
    """
    _check_pairs(baseline, system)
    before, after = np.asarray(baseline, dtype=np.float64), np.asarray(system, dtype=np.float64)
    for name, values in (("baseline", before), ("system", after)):
        if not is_binary(values):
            place = int(np.argmax((values != 0) & (values != 1)))
            raise SkilltrainError(
                f"McNemar's test needs values of 0 and 1, found {values[place]:g}", where=f"{name}, value {place}"
            )
    num_fixed = int(np.count_nonzero(after > before))
    num_broken = int(np.count_nonzero(after < before))
    if not (num := num_fixed + num_broken):
        return 1.0
    from scipy import stats

    return float(stats.binomtest(num_fixed, num, 0.5, alternative="two-sided").pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for being a family, in their order: reject those ≤ α, and the chance of any false
    rejection in the family is at most α, however the tests depend on each other (Holm, 1979).

    Step-down: the i-th smallest of m (from 0) is multiplied by m − i, is at least the one before, and at most 1.
    Raises SkilltrainError for a p outside [0, 1] or NaN.
    """
    for place, p in enumerate(p_values):
        if not 0 <= p <= 1:  # refuses NaN too
            raise SkilltrainError(f"a p-value lies between 0 and 1, found {p}", where=f"p-value {place}")
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for step, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, p_values[place] * (len(p_values) - step)))
        adjusted[place] = least
    return adjusted


def _signed_rank_p(differing: Float[np.ndarray, " query"]) -> float:
    """Twice the chance of a sum of positive ranks as far out as the one found, each sign being a toss of a coin.

    The chances of all sums are built a query at a time; ranks are doubled, because ties have halves. scipy counts
    ties exactly for up to 13 queries only.
    """
    if not differing.size:
        return 1.0
    from scipy import stats

    ranks = np.rint(2 * stats.rankdata(np.abs(differing))).astype(np.int64)
    chances = np.zeros(ranks.sum() + 1)
    chances[0] = 1.0
    for rank in ranks:
        with_rank = np.zeros_like(chances)
        with_rank[rank:] = chances[:-rank]
        chances = (chances + with_rank) / 2
    found = ranks[differing > 0].sum()
    return min(1.0, 2 * float(min(chances[: found + 1].sum(), chances[found:].sum())))


def _check_pairs(a: Sequence[float], b: Sequence[float]) -> None:
    if len(a) != len(b):
        raise SkilltrainError(f"paired values need the same queries, found {len(a)} and {len(b)}")
    if not len(a):
        raise SkilltrainError("no values: nothing to compare")
    for values in (a, b):
        finite = np.isfinite(np.asarray(values, dtype=np.float64))
        if not finite.all():
            raise SkilltrainError("a value is not a finite number", where=f"value {np.argmin(finite)}")
