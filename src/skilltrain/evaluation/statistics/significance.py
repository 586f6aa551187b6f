"""Whether two systems differ on the same queries: exact tests, Holm's adjustment, and the size of a difference.

The paired bootstrap stands in bootstrap.py. The tests take the differences of two systems, one a query; where several
queries are one cluster (one task over several pools), one a cluster, because tests count independent evidence.
scipy.stats is imported where it is used: it takes half a second.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

_EXACT = 200  # differing queries up to which all choices of signs are counted: some ms
_PLACES = 12  # differences are rounded to so many decimals, or rounding errors would break ties


def wilcoxon(differences: Float[np.ndarray, " query"]) -> float:
    """The two-sided p of Wilcoxon's signed-rank test: are the differences symmetric about 0?

    Queries on which both are equal are left out, as Wilcoxon did: they speak for neither, and McNemar's test leaves
    them out too. Equal amounts share their mean rank; differences that are equal to 12 decimals are equal. For up to
    200 differing queries p is exact, ties or not (scipy counts ties exactly for 13): all choices of signs of these
    very ranks are counted, so that for values of 0 and 1 it is McNemar's p. Beyond, it is the normal approximation
    with the variance corrected for ties, without continuity correction. No difference at all gives 1.
    """
    from scipy import stats

    differing = np.round(differences, _PLACES)
    differing = differing[differing != 0]
    if differing.size <= _EXACT:
        ranks = np.rint(2 * stats.rankdata(np.abs(differing)))  # doubled, because ties have halves
        return _sign_flip_p((ranks * np.sign(differing)).astype(np.int64))
    found = stats.wilcoxon(differing, correction=False, alternative="two-sided", method="asymptotic")
    return float(found[1])  # type: ignore[arg-type]


def mcnemar(differences: Float[np.ndarray, " query"]) -> float:
    """The exact two-sided p of McNemar's test: could the queries that a system fixed (1) and broke (−1) be as many?

    If neither system were better, each query on which they differ would be fixed or broken by the toss of a coin: p
    is the two-sided binomial test of that (McNemar, 1947, in its exact form). The difference of a cluster is the
    fixed less the broken of its queries, and its sign is the coin's. No such query gives 1.
    """
    return _sign_flip_p(np.rint(differences).astype(np.int64))


def _sign_flip_p(differences: Int[np.ndarray, " query"]) -> float:
    """Twice the chance of a sum of positive differences as far out as the one found, each sign the toss of a coin.

    The chances of all sums are built a query at a time.
    """
    amounts = np.abs(differences)
    chances = np.zeros(amounts.sum() + 1)
    chances[0] = 1.0
    for amount in amounts[amounts > 0]:
        with_amount = np.zeros_like(chances)
        with_amount[amount:] = chances[:-amount]
        chances = (chances + with_amount) / 2
    found = differences[differences > 0].sum()
    return min(1.0, 2 * float(min(chances[: found + 1].sum(), chances[found:].sum())))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for being a family, in their order: reject those ≤ α, and the chance of any false
    rejection in the family is at most α, however the tests depend on each other (Holm, 1979).

    Step-down: the i-th smallest of m (from 0) is multiplied by m − i, is at least the one before, and at most 1.
    """
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for step, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, p_values[place] * (len(p_values) - step)))
        adjusted[place] = least
    return adjusted


def cohens_h(share_a: float, share_b: float) -> float:
    """How far two shares lie apart: 2 asin √a − 2 asin √b, from −π to π (Cohen, 1988, chapter 6).

    The same difference counts for more near 0 and 1, where shares vary less. Cohen calls ±.2 small, ±.5 medium and
    ±.8 large.
    """
    return 2 * math.asin(math.sqrt(share_a)) - 2 * math.asin(math.sqrt(share_b))
