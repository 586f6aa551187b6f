"""Bootstrap intervals, and comparisons of systems: the tests and Holm's correction."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from faults import raises
from skilltrain.metrics.bootstrap import (
    Interval,
    compact,
    intervals,
    paired_differences,
    resampled_means,
    separation,
)
from skilltrain.metrics.comparison import (
    MAX_EXACT,
    Comparison,
    SystemResult,
    compare,
    holm,
    sign_test,
    with_holm,
)


def interval(values: list[float]) -> Interval:
    return intervals(np.array(values)[:, None])[0]


def paired_difference(a: list[float], b: list[float]) -> tuple[Interval, float]:
    return paired_differences(np.subtract(a, b)[:, None])[0]


def test_interval_agrees_with_binomial():
    """Of 100 queries 60 hit: resampled means are Binomial(100, .6) / 100."""
    expected = scipy.stats.binom.ppf([0.025, 0.975], 100, 0.6) / 100

    result = interval([1.0] * 60 + [0.0] * 40)

    assert [result.low, result.high] == pytest.approx(expected, abs=0.0101)


VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=30)


@settings(max_examples=25)
@given(VALUES)
def test_interval_lies_within_values(values: list[float]):
    result = interval(values)

    assert min(values) <= result.low <= result.high <= max(values)


@settings(max_examples=25)
@given(VALUES)
def test_the_interval_is_repeatable(values: list[float]):
    assert interval(values) == interval(values)


def test_a_constant_difference_is_certain():
    """The difference is always -.1, however much the queries differ."""
    values = np.random.default_rng(0).random(60)

    result, p = paired_difference(values.tolist(), (values + 0.1).tolist())

    assert result.mean == pytest.approx(-0.1)
    assert result.high - result.low < 1e-9
    assert p == pytest.approx(2 / 10_001)


def test_p_counts_resamples_at_or_below_zero():
    """One query lost, three won: P(Binomial(4, 3/4) <= 2) = 67/256."""
    result, p = paired_difference([1, 1, 1, 0], [0, 0, 0, 1])

    assert result.mean == 0.5
    assert p == pytest.approx(2 * 67 / 256, abs=0.02)


def test_seed_draws_other_samples():
    values = np.random.default_rng(3).random((20, 1))

    first = resampled_means(values)
    other = resampled_means(values, seed=42)

    assert not np.array_equal(first, other)
    assert np.array_equal(first, resampled_means(values, seed=0))


def test_p_is_at_most_one():
    _, p = paired_difference([1, 0], [0, 1])

    assert p == 1.0


def test_clusters_of_equal_size_are_drawn_whole():
    values = np.random.default_rng(3).random((20, 2))
    clusters = [str(position % 10) for position in range(20)]

    clustered = intervals(values, clusters)

    cluster_means = intervals((values[:10] + values[10:]) / 2)

    for result, expected in zip(clustered, cluster_means, strict=True):
        assert (result.low, result.high) == pytest.approx((expected.low, expected.high))
        assert (result.mean, result.n) == (pytest.approx(expected.mean), 20)


def test_clusters_of_unequal_size_are_drawn_whole():
    """Of clusters of 1 and 3 queries, a draw is (1, 1), (1, 3), (3, 1) or (3, 3)."""
    values = np.array([[1.0], [0.0], [0.0], [0.0]])

    means = resampled_means(values, clusters=["a", "b", "b", "b"])

    assert set(means[:, 0]) == {1.0, 0.25, 0.0}
    assert np.mean(means == 0.25) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([], "nothing-to-score"),
        ([0.1, float("nan")], "not-a-number"),
        ([float("inf")], "not-a-number"),
    ],
)
def test_bad_values_are_refused(values: list[float], code: str):
    with raises(code):
        interval(values)
    with raises(code):
        paired_difference(values, [0.0] * len(values))


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (0.573, 3, ".573"),
        (1, 2, "1.00"),
        (-0.054, 2, "-.05"),
        (-0.001, 2, ".00"),
        (0, 3, ".000"),
        (-1, 2, "-1.00"),
        (10.5, 2, "10.50"),
        (0.9999, 3, "1.000"),
    ],
)
def test_compact_prints_shares_as_papers_do(value: float, decimals: int, text: str):
    assert compact(value, decimals) == text


def test_an_interval_is_printed_compactly():
    assert str(Interval(0.573, 0.45, 0.694, 75)) == ".573 [.45, .69]"


def test_separation_is_share_of_ordered_pairs():
    result = separation([3.0, 2.0], [2.0, 1.0, -np.inf])  # one pair of six is equal

    assert (result.mean, result.n) == (pytest.approx(5.5 / 6), 5)


@pytest.mark.parametrize(("above", "expected"), [(2.0, 1), (1.0, 0.5)])
def test_separation_of_constant_values_is_certain(above: float, expected: float):
    result = separation([above] * 3, [1.0] * 2)

    assert result == Interval(expected, expected, expected, 5)


def test_separation_is_mann_whitneys_statistic():
    rng = np.random.default_rng(1)
    above = rng.normal(1, 1, 60).tolist()
    below = rng.normal(0, 1, 50).tolist()

    result = separation(above, below)

    statistic = scipy.stats.mannwhitneyu(above, below).statistic

    assert result.mean == pytest.approx(statistic / 3000)
    assert 0.05 < result.mean - result.low < 0.15
    assert 0.03 < result.high - result.mean < 0.15


# Two systems --------------------------------------------------------------------------------------

SIGNS = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=60)


@given(SIGNS)
def test_the_sign_test_is_mcnemars(signs: list[float]):
    num_better = signs.count(1.0)
    num_worse = signs.count(-1.0)

    p = sign_test(np.array(signs))

    num_differing = num_better + num_worse
    expected = scipy.stats.binomtest(num_better, num_differing).pvalue if num_differing else 1.0

    assert p == pytest.approx(expected)


def test_sign_test_follows_mean():
    """Four of five queries are a little better, and the fifth so much worse that the mean falls."""
    differences = np.array([0.1, 0.1, 0.1, 0.1, -0.9])

    assert sign_test(differences) == 1.0
    assert sign_test(np.abs(differences)) == pytest.approx(2 / 2**5)


def test_rounding_error_is_no_direction():
    differences = np.array([0.1, 0.2, -0.3])  # their sum is 2.8e-17

    assert sign_test(differences) == 1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_holm_is_closed_test_of_bonferroni(p_values: list[float]):
    """Its adjusted p is the largest Bonferroni p of all families that contain the test."""
    positions = range(len(p_values))
    expected = [0.0 for _ in positions]
    for size in range(1, len(p_values) + 1):
        for family in combinations(positions, size):
            bonferroni_p = min(1.0, size * min(p_values[position] for position in family))
            for position in family:
                expected[position] = max(expected[position], bonferroni_p)

    assert holm(p_values) == pytest.approx(expected)


@settings(max_examples=50)
@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=6))
def test_holm_of_part_bounds_whole(p_values: list[float]):
    num_made = len(p_values) // 2

    part = holm(p_values[:num_made], num_planned=len(p_values))

    whole = holm(p_values)[:num_made]
    assert all(bound >= p - 1e-12 for bound, p in zip(part, whole, strict=True))
    assert part[0] >= min(1.0, len(p_values) * min(p_values[:num_made]))


def test_holm_of_no_test_is_empty():
    assert holm([]) == []


MEASURES = ("Hit@1", "MRR@10")
IDS = tuple(f"q{i}" for i in range(30))


def scored(name: str, seed: int, share: float) -> SystemResult:
    generator = np.random.default_rng(seed)
    rows = {
        query_id: {
            "Hit@1": float(generator.random() < share),
            "MRR@10": float(generator.random() ** (1 / share - 1)),
        }
        for query_id in IDS
    }
    return SystemResult(name=name, per_query=rows, rankings={})


def one_measure(name: str, values: list[float]) -> SystemResult:
    per_query = {f"q{number}": {"m": value} for number, value in enumerate(values)}
    return SystemResult(name=name, per_query=per_query, rankings={})


def column(system: SystemResult, measure: str) -> list[float]:
    return [system.per_query[query_id][measure] for query_id in IDS]


BM25 = scored("bm25", 0, 0.3)
BASE = scored("base", 1, 0.5)
TRAINED = scored("trained", 2, 0.8)
SYSTEMS = (BM25, BASE, TRAINED)
PAIRS = (("bm25", "trained"), ("base", "trained"))


def test_each_pair_is_compared_by_each_measure():
    comparisons = compare(SYSTEMS, PAIRS, MEASURES)

    names = [(c.baseline, c.system, c.measure) for c in comparisons]

    assert names == [(*pair, measure) for pair in PAIRS for measure in MEASURES]


def test_a_difference_is_the_bootstraps():
    (comparison,) = compare(SYSTEMS, [("bm25", "trained")], ["MRR@10"])

    differences = np.subtract(column(TRAINED, "MRR@10"), column(BM25, "MRR@10"))
    ((interval, p),) = paired_differences(differences[:, None])

    assert comparison.difference == interval
    assert comparison.num_better + comparison.num_worse > MAX_EXACT
    assert (comparison.p, comparison.p_holm) == (p, p)


def test_holm_corrects_over_all_comparisons():
    comparisons = compare(SYSTEMS, PAIRS, MEASURES)

    assert [c.p_holm for c in comparisons] == holm([c.p for c in comparisons])


def test_adjust_corrects_only_given_comparisons():
    comparisons = compare(SYSTEMS, PAIRS, MEASURES)

    assert with_holm(comparisons[:1])[0].p_holm == comparisons[0].p


@pytest.mark.parametrize(
    ("num_fixed", "num_same", "verdict"),
    [(4, 236, "not told apart"), (5, 995, "not told apart"), (6, 0, "above"), (6, 994, "above")],
)
def test_few_differing_queries_are_tested_exactly(num_fixed: int, num_same: int, verdict: str):
    """The bootstrap's p of four fixed and none broken is about 2 / e^4 = .037, whatever n is."""
    baseline = one_measure("a", [0.0] * (num_fixed + num_same))
    system = one_measure("b", [1.0] * num_fixed + [0.0] * num_same)

    (comparison,) = compare([baseline, system], [("a", "b")], ["m"])

    assert comparison.p == pytest.approx(2 / 2**num_fixed)
    assert (comparison.num_better, comparison.num_worse, comparison.reading) == (
        num_fixed,
        0,
        verdict,
    )


@pytest.mark.parametrize("values", [[1.0, 0.0, 1.0], [0.25] * 4, [0.0] * 3])
def test_equal_systems_differ_in_nothing(values: list[float]):
    (comparison,) = compare(
        [one_measure("a", values), one_measure("b", values)], [("a", "b")], ["m"]
    )

    assert comparison == Comparison("b", "a", "m", Interval(0, 0, 0, len(values)), 0, 0, 1.0)


def test_a_cluster_counts_once():
    """Fifteen tasks with equal results in two pools count as fifteen queries, and n is 30."""
    hits = np.random.default_rng(4).integers(0, 2, (15, 2)).astype(float)
    once = [one_measure(name, hits[:, side].tolist()) for side, name in enumerate("ab")]
    repeated = np.repeat(hits, 2, axis=0)
    twice = [one_measure(name, repeated[:, side].tolist()) for side, name in enumerate("ab")]
    clusters = {f"q{position}": f"task {position // 2}" for position in range(30)}

    (unrepeated,) = compare(once, [("a", "b")], ["m"])
    (clustered,) = compare(
        [replace(system, clusters=clusters) for system in twice], [("a", "b")], ["m"]
    )
    (separate,) = compare(twice, [("a", "b")], ["m"])

    assert clustered == replace(unrepeated, difference=replace(unrepeated.difference, n=30))
    assert separate.num_better == 2 * clustered.num_better


def test_queries_without_value_are_left_out():
    baseline = SystemResult("a", {"q0": {"m": 0.0}, "q1": {}, "q2": {"m": 0.5}}, {})
    system = SystemResult("b", {"q0": {"m": 1.0}, "q1": {}, "q2": {"m": 0.5}}, {})

    comparison = compare([baseline, system], [("a", "b")], ["m", "nowhere"])

    assert [(c.measure, c.difference.mean, c.difference.n) for c in comparison] == [("m", 0.5, 2)]


def test_other_queries_are_refused():
    rows = {query_id: TRAINED.per_query[query_id] for query_id in IDS[2:]}
    fewer = replace(TRAINED, per_query=rows)

    with raises("not-comparable"):
        compare([BM25, BASE, fewer], PAIRS, MEASURES)


@pytest.mark.parametrize("row", [{"Hit@1": math.nan, "MRR@10": 0.0}, {"MRR@10": 0.0}])
def test_a_missing_value_is_refused(row: dict[str, float]):
    odd = replace(BASE, per_query={**BASE.per_query, "q4": row})

    with raises("not-a-number"):
        compare([BM25, odd, TRAINED], PAIRS, MEASURES)
