"""Percentile bootstrap intervals for means over queries (Efron, 1979), at a level of 95%.

Queries are drawn with replacement. An interval therefore tells how the mean would change with other
queries, not with another training run. If a task is ranked over several pools, its queries are not
independent: they form a cluster and are drawn together. Random draws depend only on the number of
queries, so intervals of the same queries share them, and every run gives the same intervals.

Notes:
    - A resample is stored as the number of times that each cluster was drawn. The means of all
      columns are then one matrix product.
    - Two verdicts on one request are not independent, so `agreement` draws whole requests.
    - If only few queries differ, the p-value of the bootstrap is too small, and
      `comparison.compare` uses an exact test.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError

RESAMPLES = 10_000
SEED = 0
LEVEL = 0.95
QUANTILES = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)  # ends of an interval
_KAPPA_RESAMPLES = 2_000  # fewer, because each resample is a table
_MAX_CELLS = 2_000_000  # drawn queries in memory: 16 MB of indices and 16 MB of counts
_TOLERANCE = 1e-12  # a mean difference closer to 0 is a rounding error


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over `n` queries, with the 95% interval from `low` to `high`."""

    mean: float
    low: float
    high: float
    n: int

    def bounds(self) -> str:
        """Return only the interval, such as `[.45, .69]`."""
        return f"[{compact(self.low, 2)}, {compact(self.high, 2)}]"

    def __str__(self) -> str:
        return f"{compact(self.mean, 3)} {self.bounds()}"


def compact(value: float, decimals: int) -> str:
    """Format a number without a leading zero, as papers do: .573, -.05, and never `-.00`."""
    text = f"{value:z.{decimals}f}"
    return text.replace("0.", ".", 1) if text.removeprefix("-").startswith("0.") else text


def share(values: Sequence[bool] | Float[np.ndarray, " query"]) -> Interval:
    """Return the share of values that are 1, with the interval of Wilson (1927).

    Unlike a bootstrap interval, Wilson's interval has a width even if all values are equal.

    Args:
        values: True or 1 for each query that counts, and False or 0 for the others.

    Raises:
        SkilltrainError: There are no values.
    """
    from scipy.stats import binomtest

    if not len(values):
        raise SkilltrainError("nothing-to-score", "there is no query to take a share of")
    test = binomtest(int(sum(values)), len(values))
    low, high = test.proportion_ci(LEVEL, "wilson")
    return Interval(float(test.statistic), float(low), float(high), len(values))


def separation(above: Sequence[float], below: Sequence[float], seed: int = SEED) -> Interval:
    """Return the AUROC: the probability that a value of `above` exceeds a value of `below`.

    Equal values count half. `n` is the number of values in both lists.

    Args:
        above: Values that should be higher, such as the scores of gold skills.
        below: Values that should be lower.
        seed: Seed of the random draws for the interval.
    """
    # 1 where the value of `above` is higher, 0.5 where both are equal: [value, value].
    wins = np.greater.outer(above, below) + 0.5 * np.equal.outer(above, below)
    rng = np.random.default_rng(seed)
    above_counts = _draw_counts(rng, len(above), RESAMPLES)  # [resample, value]
    below_counts = _draw_counts(rng, len(below), RESAMPLES)
    # Add the wins of all pairs in each resample. The weight of a pair is (number of draws of its
    # first value) x (number of draws of its second value).
    sums = np.einsum("da,ab,db->d", above_counts, wins, below_counts, optimize=True)  # [resample]
    low, high = np.quantile(sums / wins.size, QUANTILES).tolist()
    return Interval(float(wins.mean()), low, high, len(above) + len(below))


def _draw_counts(rng: np.random.Generator, size: int, num_resamples: int) -> np.ndarray:
    """Return how often each of `size` values is drawn in each resample: [resample, value].

    A resample has `size` draws with replacement.
    """
    return rng.multinomial(size, np.full(size, 1 / size), num_resamples)


def intervals(
    values: Float[np.ndarray, "query column"],
    clusters: Sequence[str] | None = None,
    seed: int = SEED,
) -> tuple[Interval, ...]:
    """Return the mean of each column with its interval, all from the same draws.

    If all values of a column are equal, low and high equal the mean.

    Args:
        values: One row per query.
        clusters: Cluster of each query. Queries of a cluster are drawn together.
    """
    return _intervals(values, resampled_means(values, clusters, seed))


def paired_differences(
    differences: Float[np.ndarray, "query column"],
    clusters: Sequence[str] | None = None,
    seed: int = SEED,
) -> list[tuple[Interval, float]]:
    """Return the mean of each column of paired differences, with its interval and its p-value.

    The two-sided p-value is twice the share of resampled means that are 0 or have the other sign.
    One extra resample on each side keeps the p-value above 0. Equal systems have p = 1.

    Args:
        differences: Value of one system minus value of another, one row per query.
        clusters: Cluster of each query. Queries of a cluster are drawn together.
        seed: Seed of the random draws.
    """
    means = resampled_means(differences, clusters, seed)
    # A mean that is 0 but for rounding errors counts on both sides.
    num_low = np.count_nonzero(means <= _TOLERANCE, axis=0)
    num_high = np.count_nonzero(means >= -_TOLERANCE, axis=0)
    p_values = 2 * (1 + np.minimum(num_low, num_high)) / (RESAMPLES + 1)
    p_values = np.minimum(p_values, 1.0).tolist()
    return list(zip(_intervals(differences, means), p_values, strict=True))


def resampled_means(
    values: Float[np.ndarray, "query column"],
    clusters: Sequence[str] | None = None,
    seed: int = SEED,
) -> Float[np.ndarray, "resample column"]:
    """Return the column means of `RESAMPLES` resamples of the queries, or of their clusters.

    A resample draws as many clusters as there are, and may draw one several times.

    Args:
        values: One row per query.
        clusters: Cluster of each query. None: each query is a cluster of its own.
        seed: Seed of the random draws.

    Raises:
        SkilltrainError: There are no values, or a value is not finite.
    """
    _check_values(values)
    sums, sizes = cluster_sums(values, clusters)  # [cluster, column], [cluster]
    rng = np.random.default_rng(seed)
    means = np.empty((RESAMPLES, values.shape[1]))
    # Draw only so many resamples at once that the draws fit into memory.
    step = max(1, _MAX_CELLS // len(sums))
    for start in range(0, RESAMPLES, step):
        num_resamples = min(step, RESAMPLES - start)
        counts = _draw_clusters(rng, len(sums), num_resamples)  # [resample, cluster]
        # The sum of all drawn values, divided by the number of drawn queries.
        means[start : start + num_resamples] = counts @ sums / (counts @ sizes)[:, None]
    return means


def _check_values(values: Float[np.ndarray, "query column"]) -> None:
    """Check that there are values, and that all are finite."""
    if not len(values):
        raise SkilltrainError("nothing-to-score", "no values: the mean of nothing is not defined")
    bad_positions = np.argwhere(~np.isfinite(values))
    if len(bad_positions):
        where = f"value {bad_positions[0][0]}"
        raise SkilltrainError("not-a-number", "a value is not a finite number", where=where)


def _draw_clusters(rng: np.random.Generator, num_clusters: int, num_resamples: int) -> np.ndarray:
    """Return how often each resample draws each cluster: [resample, cluster]."""
    draws = rng.integers(num_clusters, size=(num_resamples, num_clusters))  # [resample, draw]
    # Give each resample numbers of its own, so that one `bincount` counts all resamples. Cluster 2
    # of resample 1 has the number num_clusters + 2.
    draws += np.arange(num_resamples)[:, None] * num_clusters
    counts = np.bincount(draws.ravel(), minlength=draws.size)
    return counts.reshape(draws.shape)


def cluster_sums(
    values: Float[np.ndarray, "query column"], clusters: Sequence[str] | None
) -> tuple[Float[np.ndarray, "cluster column"], Float[np.ndarray, " cluster"]]:
    """Return the sum of the values of each cluster, and the number of its queries.

    Clusters are in the order of their first queries.

    Args:
        values: One row per query.
        clusters: Cluster of each query. None: each query is a cluster.
    """
    # Without common clusters, the sums are the values themselves.
    if clusters is None or len(set(clusters)) == len(values):
        return values, np.ones(len(values))
    number_by_cluster = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    numbers = np.array([number_by_cluster[name] for name in clusters])
    sums = np.zeros((len(number_by_cluster), values.shape[1]))
    np.add.at(sums, numbers, values)  # `sums[numbers] += values` would skip repeated numbers
    return sums, np.bincount(numbers).astype(np.float64)


def _intervals(
    values: Float[np.ndarray, "query column"], means: Float[np.ndarray, "resample column"]
) -> tuple[Interval, ...]:
    """Return the interval of each column from its resampled means.

    Args:
        values: One row per query.
        means: Means of the columns of `values`, one row per resample.
    """
    ends = np.quantile(means, QUANTILES, axis=0)  # [low and high, column]
    rows = np.vstack([values.mean(axis=0), ends])  # mean, low and high of each column
    # Rounding must not push the mean or an end out of the range of the values.
    rows = np.clip(rows, values.min(axis=0), values.max(axis=0))
    return tuple(Interval(mean, low, high, len(values)) for mean, low, high in rows.T.tolist())


def agreement(groups: Sequence[Sequence[tuple[str, str]]]) -> Interval:
    """Return Cohen's kappa of two judges, with an interval from resampled groups.

    Kappa is 1 for full agreement and 0 for agreement by chance. The verdicts of one group are not
    independent, so whole groups are drawn.

    Args:
        groups: Verdicts of both judges on each skill, one list of pairs per request.

    Returns:
        The kappa over all pairs. `n` is the number of pairs.
    """
    pairs = [*chain.from_iterable(groups)]
    if not pairs:
        raise SkilltrainError("nothing-to-score", "no skill was judged twice")
    # For each group, how often the first judge gave one label and the second another.
    labels = sorted(set(chain.from_iterable(pairs)))
    tables = np.zeros((len(groups), len(labels), len(labels)))  # [group, label, label]
    for number, group in enumerate(groups):
        for first, second in group:
            tables[number, labels.index(first), labels.index(second)] += 1

    rng = np.random.default_rng(SEED)
    num_draws = _draw_counts(rng, len(groups), _KAPPA_RESAMPLES)  # [resample, group]
    # The table of a resample is the sum of the tables of its groups.
    resampled_tables = np.tensordot(num_draws, tables, 1)  # [resample, label, label]
    low, high = np.quantile(cohens_kappa(resampled_tables), QUANTILES)
    total_table = tables.sum(axis=0, keepdims=True)  # [1, label, label]
    kappa = cohens_kappa(total_table)[0]
    return Interval(float(kappa), float(low), float(high), len(pairs))


def cohens_kappa(tables: Float[np.ndarray, "table label label"]) -> Float[np.ndarray, " table"]:
    """Return Cohen's kappa (1960) of each table of counts: (p - e) / (1 - e).

    p is the share of equal verdicts, and e the share that independent judges would reach with the
    same frequencies of labels. If both judges use only one label, kappa is not defined, and 1 here.
    """
    # Divide each table by its sum. An empty table would divide by 0.
    shares = tables / np.maximum(tables.sum((1, 2), keepdims=True), 1)  # [table, label, label]
    observed = np.trace(shares, axis1=1, axis2=2)  # p: [table]
    expected = (shares.sum(1) * shares.sum(2)).sum(1)  # e: [table]
    # e is 1 if both judges use only one label. Then 1 - e cannot be the divisor.
    is_defined = expected < 1
    kappas = (observed - expected) / np.where(is_defined, 1 - expected, 1)
    return np.where(is_defined, kappas, 1.0)
