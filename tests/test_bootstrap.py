import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import (
    Interval,
    compact,
    interval,
    intervals,
    paired_differences,
    resampled_means,
    separation,
)


def paired_difference(a: list[float], b: list[float], seed: int) -> tuple[Interval, float]:
    return paired_differences(np.subtract(a, b)[:, None], seed=seed)[0]


def test_agrees_with_the_binomial():
    """Of 100 queries 60 hit: resampled means are Binomial(100, .6) / 100."""
    found = interval([1.0] * 60 + [0.0] * 40, seed=0)
    exact = scipy.stats.binom.ppf([0.025, 0.975], 100, 0.6) / 100
    assert [found.low, found.high] == pytest.approx(exact, abs=0.0101)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 2**32))
def test_the_interval_lies_within_the_values_and_is_repeatable(values: list[float], seed: int):
    found = interval(values, seed=seed)
    assert min(values) <= found.low <= found.high <= max(values)
    assert found == interval(values, seed=seed)


def test_a_paired_difference_has_its_own_sign_and_width():
    """b always lies .1 above a: paired, this is certain, however far the queries spread."""
    a = np.random.default_rng(0).random(60)
    found, p = paired_difference(a.tolist(), (a + 0.1).tolist(), seed=0)
    assert found.mean == pytest.approx(-0.1)
    assert found.high - found.low < 1e-9
    assert p == pytest.approx(2 / 10_001)


def test_equal_systems_have_p_one():
    values = [0.1, 0.7, 0.3]
    assert paired_difference(values, values, seed=0)[1] == 1.0
    assert paired_difference([1, 0], [0, 1], seed=0)[1] == 1.0


def test_p_agrees_with_the_sign_of_few_queries():
    """Four queries, one lost and three won: draws at or below 0 are Binomial(4, 3/4) <= 2, which is 67/256."""
    found, p = paired_difference([1, 1, 1, 0], [0, 0, 0, 1], seed=0)
    assert found.mean == 0.5
    assert p == pytest.approx(2 * 67 / 256, abs=0.02)


def test_clusters_are_drawn_whole():
    """Clusters of equal size: their means, drawn; of sizes 1 and 3 a draw is (1, 1), (1, 3), (3, 1) or (3, 3)."""
    values = np.random.default_rng(3).random((20, 2))
    names = [str(place % 10) for place in range(20)]
    together = intervals(values, seed=1, clusters=names)
    of_means = intervals((values[:10] + values[10:]) / 2, seed=1)
    for found, expected in zip(together, of_means, strict=True):
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
        assert (found.mean, found.n) == (pytest.approx(expected.mean), 20)
    means = resampled_means(np.array([[1.0], [0.0], [0.0], [0.0]]), seed=0, clusters=["a", "b", "b", "b"])
    assert set(means[:, 0]) == {1.0, 0.25, 0.0}
    assert np.mean(means == 0.25) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("values", "message"),
    [([], "no values"), ([0.1, float("nan")], "value 1: .*not a finite number"), ([float("inf")], "value 0")],
)
def test_bad_values_are_refused(values: list[float], message: str):
    with pytest.raises(SkilltrainError, match=message):
        interval(values, seed=0)
    with pytest.raises(SkilltrainError, match=message):
        paired_difference(values, [0.0] * len(values), seed=0)


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [(0.573, 3, ".573"), (1, 2, "1.00"), (-0.054, 2, "-.05"), (-0.001, 2, ".00"), (0, 3, ".000"), (-1, 2, "-1.00"),
     (10.5, 2, "10.50"), (0.9999, 3, "1.000")],
)  # fmt: skip
def test_compact_prints_shares_as_papers_do(value: float, places: int, text: str):
    assert compact(value, places) == text
    assert str(Interval(0.573, 0.45, 0.694, 75)) == ".573 [.45, .69]"


def test_separation_is_the_share_of_pairs_in_the_right_order():
    found = separation([3.0, 2.0], [2.0, 1.0, -np.inf], seed=0)
    assert (found.mean, found.n) == (pytest.approx(5.5 / 6), 5)
    assert separation([2.0] * 3, [1.0] * 2, seed=0) == Interval(1, 1, 1, 5)
    assert separation([1.0] * 3, [1.0] * 2, seed=0) == Interval(0.5, 0.5, 0.5, 5)
    source = np.random.default_rng(1)
    above, below = source.normal(1, 1, 60), source.normal(0, 1, 50)
    found = separation(above, below, seed=0)
    assert found.mean == pytest.approx(scipy.stats.mannwhitneyu(above, below).statistic / 3000)
    assert 0.05 < found.mean - found.low < 0.15 and 0.03 < found.high - found.mean < 0.15
