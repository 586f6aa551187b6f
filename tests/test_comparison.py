"""Intervals by the bootstrap, and two systems compared: tests, Holm's adjustment, and the comparison itself."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from skilltrain.errors import SkilltrainError
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
    adjust,
    compare,
    holm,
    sign_test,
)


def interval(values: list[float]) -> Interval:
    return intervals(np.array(values)[:, None])[0]


def paired_difference(a: list[float], b: list[float]) -> tuple[Interval, float]:
    return paired_differences(np.subtract(a, b)[:, None])[0]


def test_agrees_with_the_binomial():
    """Of 100 queries 60 hit: resampled means are Binomial(100, .6) / 100."""
    found = interval([1.0] * 60 + [0.0] * 40)
    exact = scipy.stats.binom.ppf([0.025, 0.975], 100, 0.6) / 100
    assert [found.low, found.high] == pytest.approx(exact, abs=0.0101)


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_interval_lies_within_the_values_and_is_repeatable(values: list[float]):
    found = interval(values)
    assert min(values) <= found.low <= found.high <= max(values)
    assert found == interval(values)


def test_a_paired_difference_has_its_own_sign_width_and_p():
    """b always lies .1 above a: paired, this is certain, however far the queries spread. Of four queries, one lost and
    three won, draws at or below 0 are Binomial(4, 3/4) <= 2, which is 67/256."""
    a = np.random.default_rng(0).random(60)
    found, p = paired_difference(a.tolist(), (a + 0.1).tolist())
    assert found.mean == pytest.approx(-0.1) and found.high - found.low < 1e-9
    assert p == pytest.approx(2 / 10_001)
    found, p = paired_difference([1, 1, 1, 0], [0, 0, 0, 1])
    assert found.mean == 0.5 and p == pytest.approx(2 * 67 / 256, abs=0.02)
    assert paired_difference([1, 0], [0, 1])[1] == 1.0


def test_clusters_are_drawn_whole():
    """Clusters of equal size: their means, drawn; of sizes 1 and 3 a draw is (1, 1), (1, 3), (3, 1) or (3, 3)."""
    values = np.random.default_rng(3).random((20, 2))
    names = [str(place % 10) for place in range(20)]
    together = intervals(values, clusters=names)
    of_means = intervals((values[:10] + values[10:]) / 2)
    for found, expected in zip(together, of_means, strict=True):
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
        assert (found.mean, found.n) == (pytest.approx(expected.mean), 20)
    means = resampled_means(np.array([[1.0], [0.0], [0.0], [0.0]]), clusters=["a", "b", "b", "b"])
    assert set(means[:, 0]) == {1.0, 0.25, 0.0}
    assert np.mean(means == 0.25) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "no values"),
        ([0.1, float("nan")], "value 1: .*not a finite number"),
        ([float("inf")], "value 0"),
    ],
)
def test_bad_values_are_refused(values: list[float], message: str):
    with pytest.raises(SkilltrainError, match=message):
        interval(values)
    with pytest.raises(SkilltrainError, match=message):
        paired_difference(values, [0.0] * len(values))


@pytest.mark.parametrize(
    ("value", "places", "text"),
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
def test_compact_prints_shares_as_papers_do(value: float, places: int, text: str):
    assert compact(value, places) == text
    assert str(Interval(0.573, 0.45, 0.694, 75)) == ".573 [.45, .69]"


def test_separation_is_the_share_of_pairs_in_the_right_order():
    found = separation([3.0, 2.0], [2.0, 1.0, -np.inf])
    assert (found.mean, found.n) == (pytest.approx(5.5 / 6), 5)
    assert separation([2.0] * 3, [1.0] * 2) == Interval(1, 1, 1, 5)
    assert separation([1.0] * 3, [1.0] * 2) == Interval(0.5, 0.5, 0.5, 5)
    source = np.random.default_rng(1)
    above, below = source.normal(1, 1, 60).tolist(), source.normal(0, 1, 50).tolist()
    found = separation(above, below)
    assert found.mean == pytest.approx(scipy.stats.mannwhitneyu(above, below).statistic / 3000)
    assert 0.05 < found.mean - found.low < 0.15 and 0.03 < found.high - found.mean < 0.15


# Two systems -------------------------------------------------------------------------------------------------------

SIGNS = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=60)


@given(SIGNS)
def test_the_sign_test_is_mcnemars(signs: list[float]):
    num_better, num_worse = signs.count(1.0), signs.count(-1.0)

    p = sign_test(np.array(signs))

    num_differing = num_better + num_worse
    expected = scipy.stats.binomtest(num_better, num_differing).pvalue if num_differing else 1.0
    assert p == pytest.approx(expected)


def test_the_sign_test_follows_the_mean():
    """Four of five queries are a little better, and the fifth is so much worse that the mean falls."""
    differences = np.array([0.1, 0.1, 0.1, 0.1, -0.9])

    assert sign_test(differences) == 1.0
    assert sign_test(np.abs(differences)) == pytest.approx(2 / 2**5)


def test_a_rounding_error_is_no_direction():
    differences = np.array([0.1, 0.2, -0.3])  # their sum is 2.8e-17

    assert sign_test(differences) == 1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_holm_is_the_closed_test_of_bonferroni(p_values: list[float]):
    """Its adjusted p is the largest Bonferroni p of all families within the family that hold the test."""
    everyone = range(len(p_values))
    families = [
        set(f) for size in range(1, len(p_values) + 1) for f in combinations(everyone, size)
    ]
    expected = [
        max(
            min(1.0, len(family) * min(p_values[j] for j in family))
            for family in families
            if i in family
        )
        for i in everyone
    ]
    assert holm(p_values) == pytest.approx(expected) and holm([]) == []


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
    return SystemResult(
        name=name, per_query={f"q{i}": {"m": value} for i, value in enumerate(values)}, rankings={}
    )


def column(system: SystemResult, measure: str) -> list[float]:
    return [system.per_query[query_id][measure] for query_id in IDS]


BM25, BASE, TRAINED = scored("bm25", 0, 0.3), scored("base", 1, 0.5), scored("trained", 2, 0.8)
SYSTEMS = (BM25, BASE, TRAINED)
PAIRS = (("bm25", "trained"), ("base", "trained"))


def test_each_pair_is_compared_by_each_measure():
    found = compare(SYSTEMS, PAIRS, MEASURES)

    names = [(c.baseline, c.system, c.measure) for c in found]
    assert names == [(*pair, measure) for pair in PAIRS for measure in MEASURES]


def test_a_difference_is_the_bootstraps():
    (found,) = compare(SYSTEMS, [("bm25", "trained")], ["MRR@10"])

    differences = np.subtract(column(TRAINED, "MRR@10"), column(BM25, "MRR@10"))
    ((interval, p),) = paired_differences(differences[:, None])
    assert found.difference == interval
    assert found.num_better + found.num_worse > MAX_EXACT
    assert (found.p, found.p_holm) == (p, p)


def test_holm_corrects_over_all_comparisons():
    found = compare(SYSTEMS, PAIRS, MEASURES)

    assert [c.p_holm for c in found] == holm([c.p for c in found])
    assert adjust(found[:1])[0].p_holm == found[0].p


@pytest.mark.parametrize(
    ("num_fixed", "num_same", "verdict"),
    [(4, 236, "not told apart"), (5, 995, "not told apart"), (6, 0, "above"), (6, 994, "above")],
)
def test_few_differing_queries_are_tested_exactly(num_fixed: int, num_same: int, verdict: str):
    """The bootstrap's p of four fixed and none broken is about 2 / e^4 = .037, whatever n is."""
    before = one_measure("a", [0.0] * (num_fixed + num_same))
    after = one_measure("b", [1.0] * num_fixed + [0.0] * num_same)

    (found,) = compare([before, after], [("a", "b")], ["m"])

    assert found.p == pytest.approx(2 / 2**num_fixed)
    assert (found.num_better, found.num_worse, found.reading) == (num_fixed, 0, verdict)


@pytest.mark.parametrize("values", [[1.0, 0.0, 1.0], [0.25] * 4, [0.0] * 3])
def test_equal_systems_differ_in_nothing(values: list[float]):
    (found,) = compare([one_measure("a", values), one_measure("b", values)], [("a", "b")], ["m"])

    assert found == Comparison("b", "a", "m", Interval(0, 0, 0, len(values)), 0, 0, 1.0)


def test_a_cluster_counts_once():
    """Fifteen tasks over two pools where both fare alike are tested as fifteen queries, and n is 30."""
    hits = np.random.default_rng(4).integers(0, 2, (15, 2)).astype(float)
    once = [one_measure(name, hits[:, side].tolist()) for side, name in enumerate("ab")]
    repeated = np.repeat(hits, 2, axis=0)
    twice = [one_measure(name, repeated[:, side].tolist()) for side, name in enumerate("ab")]
    clusters = {f"q{position}": f"task {position // 2}" for position in range(30)}

    (alone,) = compare(once, [("a", "b")], ["m"])
    (clustered,) = compare([replace(one, clusters=clusters) for one in twice], [("a", "b")], ["m"])
    (separate,) = compare(twice, [("a", "b")], ["m"])

    assert clustered == replace(alone, difference=replace(alone.difference, n=30))
    assert separate.num_better == 2 * clustered.num_better


def test_queries_without_a_value_are_left_out():
    before = SystemResult("a", {"q0": {"m": 0.0}, "q1": {}, "q2": {"m": 0.5}}, {})
    after = SystemResult("b", {"q0": {"m": 1.0}, "q1": {}, "q2": {"m": 0.5}}, {})

    found = compare([before, after], [("a", "b")], ["m", "nowhere"])

    assert [(c.measure, c.difference.mean, c.difference.n) for c in found] == [("m", 0.5, 2)]


def test_other_queries_are_refused():
    rows = {query_id: TRAINED.per_query[query_id] for query_id in IDS[2:]}
    fewer = replace(TRAINED, per_query=rows)
    message = r"system trained: holds other queries \(28\) than system bm25 \(30\), first 'q0'"

    with pytest.raises(SkilltrainError, match=message):
        compare([BM25, BASE, fewer], PAIRS, MEASURES)


@pytest.mark.parametrize("row", [{"Hit@1": math.nan, "MRR@10": 0.0}, {"MRR@10": 0.0}])
def test_a_missing_value_is_refused(row: dict[str, float]):
    odd = replace(BASE, per_query={**BASE.per_query, "q4": row})

    with pytest.raises(
        SkilltrainError, match=r"system base: 1 values are missing or .*, first Hit@1 of query 'q4'"
    ):
        compare([BM25, odd, TRAINED], PAIRS, MEASURES)
