"""Intervals by the bootstrap, and two systems compared: tests, Holm's adjustment, and the comparison itself."""

import math
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import (
    Interval,
    compact,
    intervals,
    normal_interval,
    paired_differences,
    resampled_means,
    separation,
)
from skilltrain.evaluation.comparison import (
    Comparison,
    SystemResult,
    cohens_h,
    compare,
    holm,
    mcnemar,
    wilcoxon,
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

BITS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40)
STEPS = st.lists(st.integers(-4, 4), min_size=1, max_size=9)


def test_table_13_of_skillrouter():
    """Appendix E rounds the share before it computes (98/150 → .654): the last digit may differ by one."""
    for hits, low, high in ((84, 0.481, 0.639), (98, 0.578, 0.730), (114, 0.692, 0.828)):
        found = normal_interval([1.0] * hits + [0.0] * (150 - hits))
        assert [found.low, found.high] == pytest.approx([low, high], abs=0.0013)
        assert (found.mean, found.n) == (hits / 150, 150)


def test_values_between_0_and_1_use_the_sample_deviation():
    """0, .5, 1: deviation .5, error .5 / √3; clipped, as the half width of .566 leaves [0, 1]."""
    assert normal_interval([0, 0.5, 1]) == Interval(0.5, 0.0, 1.0, 3)
    found = normal_interval([0, 0.5, 1] * 12)
    error = math.sqrt(12 * 2 * 0.25 / 35) / 6
    assert [found.low, found.high] == pytest.approx([0.5 - 1.96 * error, 0.5 + 1.96 * error])


def test_cohens_h_worked_by_hand():
    """asin √1 is π/2, asin √.5 is π/4, asin √.75 is π/3, asin √.25 is π/6."""
    assert cohens_h(1, 0) == pytest.approx(math.pi)
    assert cohens_h(0.5, 0.75) == pytest.approx(-math.pi / 6)
    assert cohens_h(0.75, 0.25) == pytest.approx(math.pi / 3)


@settings(deadline=None, max_examples=40)
@given(STEPS)
def test_signed_ranks_agree_with_all_choices_of_signs(differences: list[int]):
    """Ties and zeros of few queries: every choice of signs counted."""
    amounts = scipy.stats.rankdata([abs(value) for value in differences if value])
    sums = [np.dot(signs, amounts) for signs in product([0, 1], repeat=len(amounts))]
    found = sum(
        rank for rank, value in zip(amounts, filter(None, differences), strict=True) if value > 0
    )
    above = np.mean([total >= found for total in sums])
    below = np.mean([total <= found for total in sums])
    expected = min(1.0, 2 * min(above, below))
    assert wilcoxon(np.array(differences)) == pytest.approx(expected)
    assert wilcoxon(np.array(differences), above=True) == pytest.approx(above)


def test_rounding_makes_no_difference():
    assert wilcoxon(np.array([0.1 + 0.2 - 0.3, 0.0])) == 1.0
    tied = wilcoxon(
        np.array([0.3 - 0.2, 0.8 - 0.7, 0.5 - 0.6])
    )  # .1, .1, −.1, each with its own rounding
    assert tied == wilcoxon(np.array([1, 1, -1])) == 1.0


def test_many_ties_agree_with_scipys_normal_approximation():
    """Exactly up to 200 differing queries (of 240, about 190 differ), from 201 as scipy has it."""
    generator = np.random.default_rng(2)
    for num, tolerance in ((240, 2e-3), (400, 1e-12)):
        a, b = generator.integers(0, 5, (2, num)) / 4
        b[: num // 12] = 1.0
        kept = a != b
        assert (kept.sum() <= 200) == (num == 240)
        for side in ("two-sided", "greater"):
            theirs = scipy.stats.wilcoxon(a[kept] - b[kept], alternative=side, method="asymptotic")[
                1
            ]
            assert wilcoxon(a - b, above=side == "greater") == pytest.approx(theirs, abs=tolerance)


@settings(deadline=None, max_examples=30)
@given(BITS)
def test_mcnemar_agrees_with_the_binomial_test(pairs: list[tuple[bool, bool]]):
    differences = np.array([int(after) - int(before) for before, after in pairs])
    num, p = np.count_nonzero(differences), mcnemar(differences)
    expected = scipy.stats.binomtest(np.count_nonzero(differences < 0), num).pvalue if num else 1.0
    assert p == mcnemar(-differences) == pytest.approx(expected)
    assert p == pytest.approx(
        wilcoxon(differences)
    )  # with equal amounts, ranks toss the same coins


def test_the_net_of_a_cluster_is_one_coin():
    """2, 1, −1: of 8 choices of signs three reach a sum of 3 or more, and 3 is the sum of those that are fixed."""
    assert mcnemar(np.array([2, 1, -1])) == pytest.approx(2 * 3 / 8)
    assert mcnemar(np.array([2, 2, 0])) == mcnemar(np.array([1, 1])) == 1 / 2


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


def test_a_comparison_is_what_its_parts_say():
    found = compare(SYSTEMS, PAIRS, MEASURES, IDS)
    assert [(c.baseline, c.system, c.measure) for c in found] == [
        (*pair, measure) for pair in PAIRS for measure in MEASURES
    ]
    for comparison, baseline in zip(found, (BM25, BM25, BASE, BASE), strict=True):
        after, before = column(TRAINED, comparison.measure), column(baseline, comparison.measure)
        differences = np.subtract(after, before)
        ((alone, p),) = paired_differences(differences[:, None])
        assert comparison.difference.mean == pytest.approx(np.mean(after) - np.mean(before))
        assert comparison.difference.bounds() == alone.bounds()
        assert comparison.p == p
        assert comparison.wilcoxon_p == wilcoxon(differences)
        binary = comparison.measure == "Hit@1"
        assert comparison.mcnemar_p == (mcnemar(differences) if binary else None)
        expected = cohens_h(float(np.mean(after)), float(np.mean(before))) if binary else None
        assert comparison.cohens_h == expected
    assert [c.p_holm for c in found] == holm(
        [c.p for c in found]
    )  # the family is every pair and measure
    (alone,) = compare(SYSTEMS, PAIRS[:1], MEASURES[:1], IDS)
    assert alone == replace(found[0], p_holm=found[0].p)


def test_equal_systems_differ_in_nothing():
    """Also where all values are equal: no width, no p below 1."""
    for values in ([1.0, 0.0, 1.0], [0.25] * 4, [0.0] * 3):
        (found,) = compare(
            [one_measure("a", values), one_measure("b", values)],
            [("a", "b")],
            ["m"],
            [f"q{i}" for i in range(len(values))],
        )
        binary = values[0] in (0, 1)
        effect, p = (0.0, 1.0) if binary else (None, None)
        assert found == Comparison(
            "b", "a", "m", Interval(0, 0, 0, len(values)), 1, 1, 1, p, effect
        )


def test_a_cluster_counts_once():
    """Fifteen tasks over two pools where both fare alike: the tests are those of fifteen queries, and n is 30."""
    hits = np.random.default_rng(4).integers(0, 2, (15, 2)).astype(float)
    once = [one_measure(name, hits[:, side].tolist()) for side, name in enumerate("ab")]
    twice = [
        one_measure(name, np.repeat(hits[:, side], 2).tolist()) for side, name in enumerate("ab")
    ]
    clusters = {f"q{place}": f"task {place // 2}" for place in range(30)}
    (alone,) = compare(once, [("a", "b")], ["m"], IDS[:15])
    (found,) = compare([replace(one, clusters=clusters) for one in twice], [("a", "b")], ["m"], IDS)
    assert found == replace(alone, difference=replace(alone.difference, n=30))
    (apart,) = compare(twice, [("a", "b")], ["m"], IDS)
    assert (
        apart.difference.high - apart.difference.low < found.difference.high - found.difference.low
    )


def test_runs_over_different_queries_and_what_is_not_there_are_named():
    fewer = replace(
        TRAINED, per_query={query_id: TRAINED.per_query[query_id] for query_id in IDS[2:]}
    )
    odd = replace(BASE, per_query={**BASE.per_query, "q4": {"Hit@1": math.nan, "MRR@10": 0.0}})
    for systems, measures, ids, message in (
        (
            [BM25, BASE, fewer],
            MEASURES,
            IDS[5:],
            r"system trained: runs over different query sets compared: 2 queries "
            r".* holds 30, this one 28\), first 'q0'",
        ),  # also where the asked ones stand in all
        (SYSTEMS, ["Hit@3"], IDS, "30 values are missing or not finite, first Hit@3 of query 'q0'"),
        (SYSTEMS, MEASURES, [], "no values"),
        (
            [BM25, odd, TRAINED],
            MEASURES,
            IDS,
            r"system base: 1 values are missing or .*, first Hit@1 of query 'q4'",
        ),
    ):
        with pytest.raises(SkilltrainError, match=message):
            compare(systems, PAIRS, measures, ids)
