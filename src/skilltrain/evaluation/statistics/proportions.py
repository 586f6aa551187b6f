"""Shares of queries: the normal approximation of their interval, and the size of a difference between two."""

import math
from collections.abc import Sequence

import numpy as np

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.statistics.bootstrap import Interval

Z = 1.96  # standard errors on either side of the mean: 95 percent


def is_binary(values: Sequence[float] | np.ndarray) -> bool:
    """Whether every value is exactly 0 or 1, so that the mean is a share of the queries."""
    array = np.asarray(values)
    return bool(((array == 0) | (array == 1)).all())


def normal_interval(values: Sequence[float]) -> Interval:
    """The mean and mean ± 1.96 standard errors: the 95% interval that papers print without resampling.

    For values of 0 and 1 with mean p the standard error is √(p(1 − p) / n), as in SkillRouter, appendix E; for other
    values it is s / √n, with s the sample's standard deviation (n − 1 in its denominator). The ends are clipped to
    [0, 1] where all values lie in it. A share of 0 or 1, equal values and a single value have no width, as with the
    bootstrap. All values count as independent: the paper's n of 150 is 75 queries counted once for each of two pools
    (easy and hard), so that its intervals are narrower than 75 queries can support.
    Raises SkilltrainError for no values and for one that is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        raise SkilltrainError("no values: the mean of nothing is not defined")
    if not np.isfinite(array).all():
        raise SkilltrainError("a value is not a finite number", where=f"value {np.argmin(np.isfinite(array))}")
    mean, num = float(array.mean()), len(array)
    if is_binary(array):
        error = math.sqrt(mean * (1 - mean) / num)
    else:
        error = float(array.std(ddof=1)) / math.sqrt(num) if array.min() < array.max() else 0.0
    low, high = mean - Z * error, mean + Z * error
    if array.min() >= 0 and array.max() <= 1:
        low, high = max(low, 0.0), min(high, 1.0)
    return Interval(mean, low, high, num)


def cohens_h(share_a: float, share_b: float) -> float:
    """How far two shares lie apart: 2 asin √a − 2 asin √b, from −π to π (Cohen, 1988, chapter 6).

    The same difference counts for more near 0 and 1, where shares vary less. Cohen calls ±.2 small, ±.5 medium and
    ±.8 large. Raises SkilltrainError for a share outside [0, 1].
    """
    for share in (share_a, share_b):
        if not 0 <= share <= 1:  # refuses NaN too
            raise SkilltrainError(f"a share lies between 0 and 1, found {share}")
    return 2 * math.asin(math.sqrt(share_a)) - 2 * math.asin(math.sqrt(share_b))
