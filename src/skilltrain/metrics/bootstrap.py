"""How far a mean over queries can be trusted: percentile bootstrap intervals (Efron, 1979), 95 percent.

Queries are drawn with replacement, so an interval tells what other queries would have given, not another training run.
Where one task is ranked over several pools, its queries are a cluster, drawn together: they are no independent
evidence. Intervals of the same number of queries share their draws, which are the same in every run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError

RESAMPLES, SEED = 10_000, 0
_KAPPAS = 2_000  # draws of `agreement`
LEVEL = 0.95
_ENDS = (1 - LEVEL) / 2, (1 + LEVEL) / 2
_CELLS_AT_ONCE = 2_000_000  # drawn queries held in memory: 16 MB of indices and 16 MB of counts
_ZERO = 1e-12  # a mean of differences nearer to 0 than this is 0 but for rounding


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `n` queries and the interval that holds it in 95 of 100 samples."""

    mean: float
    low: float
    high: float
    n: int

    def bounds(self) -> str:
        """The interval alone, like `[.45, .69]`."""
        return f"[{compact(self.low, 2)}, {compact(self.high, 2)}]"

    def __str__(self) -> str:
        return f"{compact(self.mean, 3)} {self.bounds()}"


def compact(value: float, places: int) -> str:
    """A share without its leading zero (.573, -.05), the way papers print it; never `-.00`."""
    text = f"{value:z.{places}f}"
    return text.replace("0.", ".", 1) if text.removeprefix("-").startswith("0.") else text


def share(values: Sequence[bool] | Float[np.ndarray, " query"]) -> Interval:
    """The share of `values` that are 1, with Wilson's interval (1927), which is no point at 0 and 1.

    Raises SkilltrainError where there is no value.
    """
    from scipy.stats import binomtest

    if not len(values):
        raise SkilltrainError("there is no query to take a share of")
    found = binomtest(int(sum(values)), len(values))
    low, high = found.proportion_ci(LEVEL, "wilson")
    return Interval(float(found.statistic), float(low), float(high), len(values))


def separation(above: Sequence[float], below: Sequence[float]) -> Interval:
    """The chance that a value of `above` is larger than one of `below` (AUROC; equal values count half), n = all."""
    larger = np.greater.outer(above, below) + 0.5 * np.equal.outer(above, below)
    source = np.random.default_rng(SEED)
    rows, columns = (
        source.multinomial(size, np.full(size, 1 / size), RESAMPLES) for size in larger.shape
    )
    drawn = np.einsum("da,ab,db->d", rows, larger, columns, optimize=True) / larger.size
    low, high = np.quantile(drawn, _ENDS).tolist()
    return Interval(float(larger.mean()), low, high, sum(larger.shape))


def intervals(
    values: Float[np.ndarray, "query column"], clusters: Sequence[str] | None = None
) -> tuple[Interval, ...]:
    """One interval for each column, all from the same draws; queries of one name in `clusters` are drawn together.

    One value, or equal values, give low = mean = high.
    """
    return _intervals(values, resampled_means(values, clusters))


def paired_differences(
    differences: Float[np.ndarray, "query column"], clusters: Sequence[str] | None = None
) -> list[tuple[Interval, float]]:
    """For each column of two systems' differences a − b, query by query: the mean with its interval, and a p.

    The two-sided p is twice the share of resampled means on the far side of 0 (or at 0), counted with one extra
    resample on each side so that it is never 0: its least value is .0002. Equal systems have p = 1.
    With few differing queries p is too small (`comparison.compare` asks an exact test there).
    """
    means = resampled_means(differences, clusters)
    smaller = np.minimum(
        np.count_nonzero(means <= _ZERO, axis=0), np.count_nonzero(means >= -_ZERO, axis=0)
    )
    tails = np.minimum(2 * (1 + smaller) / (RESAMPLES + 1), 1.0)
    return list(zip(_intervals(differences, means), tails.tolist(), strict=True))


def resampled_means(
    values: Float[np.ndarray, "query column"], clusters: Sequence[str] | None = None
) -> Float[np.ndarray, "resample column"]:
    """The column means of 10,000 draws of as many queries (of as many clusters), with replacement.

    A draw is held as how often each query was drawn, so that all columns cost one matrix product.
    Raises SkilltrainError for no values and for one that is not finite.
    """
    if not len(values):
        raise SkilltrainError("no values: the mean of nothing is not defined")
    if len(bad := np.argwhere(~np.isfinite(values))):
        raise SkilltrainError("a value is not a finite number", where=f"value {bad[0][0]}")
    sums, sizes = cluster_sums(values, clusters)
    generator, num = np.random.default_rng(SEED), len(sums)
    means = np.empty((RESAMPLES, values.shape[1]))
    step = max(1, _CELLS_AT_ONCE // num)
    for start in range(0, RESAMPLES, step):
        num_draws = min(step, RESAMPLES - start)
        drawn = generator.integers(num, size=(num_draws, num))
        drawn += np.arange(num_draws)[:, None] * num
        counts = np.bincount(drawn.ravel(), minlength=num_draws * num).reshape(num_draws, num)
        means[start : start + num_draws] = counts @ sums / (counts @ sizes)[:, None]
    return means


def cluster_sums(
    values: Float[np.ndarray, "query column"], clusters: Sequence[str] | None
) -> tuple[Float[np.ndarray, "cluster column"], Float[np.ndarray, " cluster"]]:
    """The sum of each cluster's values and how many they are; without clusters each query is one, in its place."""
    if clusters is None or len(set(clusters)) == len(values):
        return values, np.ones(len(values))
    places: dict[str, int] = {}
    member = np.array([places.setdefault(name, len(places)) for name in clusters])
    sums = np.zeros((len(places), values.shape[1]))
    np.add.at(sums, member, values)
    return sums, np.bincount(member).astype(np.float64)


def _intervals(
    values: Float[np.ndarray, "query column"], means: Float[np.ndarray, "resample column"]
) -> tuple[Interval, ...]:
    rows = np.vstack([values.mean(axis=0), np.quantile(means, _ENDS, axis=0)])
    rows = np.clip(
        rows, values.min(axis=0), values.max(axis=0)
    )  # rounding must not leave the range of the values
    return tuple(
        Interval(float(mean), float(low), float(high), len(values)) for mean, low, high in rows.T
    )


def agreement(groups: Sequence[Sequence[tuple[str, str]]]) -> Interval:
    """Cohen's kappa over all pairs of verdicts, the first judge's and the second's: how far they agree beyond chance.

    Its interval draws whole groups: what one request makes a judge think of its skills is no independent evidence.
    Raises SkilltrainError where nothing was judged twice.
    """
    pairs = [pair for group in groups for pair in group]
    if not pairs:
        raise SkilltrainError("no skill was judged twice")
    labels = sorted({label for pair in pairs for label in pair})
    counts = np.zeros((len(groups), len(labels), len(labels)))
    for number, group in enumerate(groups):
        for first, second in group:
            counts[number, labels.index(first), labels.index(second)] += 1
    drawn = np.random.default_rng(SEED).multinomial(
        len(groups), np.full(len(groups), 1 / len(groups)), _KAPPAS
    )
    low, high = np.quantile(cohens_kappa(np.tensordot(drawn, counts, 1)), _ENDS)
    return Interval(
        float(cohens_kappa(counts.sum(0)[None])[0]), float(low), float(high), len(pairs)
    )


def cohens_kappa(tables: Float[np.ndarray, "table label label"]) -> Float[np.ndarray, " table"]:
    """(p - e) / (1 - e) of each table of counts: p is the share of agreement, e what the margins alone would give.

    Two judges that know one label only agree, and have 1 (Cohen, 1960, leaves it open).
    """
    shares = tables / np.maximum(tables.sum((1, 2), keepdims=True), 1)
    observed = np.trace(shares, axis1=1, axis2=2)
    expected = (shares.sum(1) * shares.sum(2)).sum(1)
    return np.where(
        expected < 1, (observed - expected) / np.where(expected < 1, 1 - expected, 1), 1.0
    )
