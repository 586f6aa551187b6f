"""Values of systems, shares, tests and Holm's adjustment; the bootstrap has test_bootstrap.py."""

import math
from itertools import combinations, product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import Interval, interval, normal_interval
from skilltrain.evaluation.comparison import cohens_h, holm, mcnemar, wilcoxon
from skilltrain.evaluation.results import SystemResult, same_queries, values_of

BITS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40)
STEPS = st.lists(st.integers(-4, 4), min_size=1, max_size=9)


def system(name: str, per_query: dict[str, dict[str, float]]) -> SystemResult:
    return SystemResult(name=name, per_query=per_query, rankings={})


# ---- the paper


@pytest.mark.parametrize(
    ("hits", "low", "high"),
    [(84, 0.481, 0.639), (93, 0.542, 0.698), (96, 0.563, 0.717), (98, 0.578, 0.730), (102, 0.605, 0.755),
     (111, 0.670, 0.810), (112, 0.677, 0.817), (114, 0.692, 0.828)],
)  # fmt: skip
def test_table_13_of_skillrouter(hits: int, low: float, high: float):
    """Appendix E rounds the share before it computes (98/150 → .654): the last digit may differ by one."""
    found = normal_interval([1.0] * hits + [0.0] * (150 - hits))
    assert [found.low, found.high] == pytest.approx([low, high], abs=0.0013)
    assert (found.mean, found.n) == (hits / 150, 150)


def test_table_9_of_skillrouter():
    """92 both, 19 fixed, 6 broken, 33 neither: tails of 25 tosses up to 6, by their binomial coefficients."""
    tail = sum(math.comb(25, k) for k in range(7)) / 2**25
    differences = np.array([1] * 19 + [-1] * 6 + [0] * 125)
    assert mcnemar(differences) == pytest.approx(2 * tail, rel=1e-9) == pytest.approx(0.0146, abs=5e-5)
    assert normal_interval([1] * 111 + [0] * 39).bounds() == "[.67, .81]"


# ---- the normal approximation


def test_values_between_0_and_1_use_the_sample_deviation():
    """0, .5, 1: deviation .5, error .5 / √3; clipped, as the half width of .566 leaves [0, 1]."""
    assert normal_interval([0, 0.5, 1]) == Interval(0.5, 0.0, 1.0, 3)
    found = normal_interval([0, 0.5, 1] * 12)
    error = math.sqrt(12 * 2 * 0.25 / 35) / 6
    assert [found.low, found.high] == pytest.approx([0.5 - 1.96 * error, 0.5 + 1.96 * error])


@pytest.mark.parametrize("values", [[1.0], [0.3], [0.1] * 7, [0.0] * 4, [1, 1]])
def test_constant_values_have_no_width_in_either_interval(values: list[float]):
    found = normal_interval(values)
    assert found.low == pytest.approx(values[0], abs=1e-15) == found.high
    assert found.n == interval(values, seed=0).n


def test_it_agrees_with_the_bootstrap_where_queries_are_many():
    values = np.random.default_rng(3).beta(2, 3, size=2_000).tolist()
    ours, resampled = normal_interval(values), interval(values, seed=0)
    error = (ours.high - ours.low) / (2 * 1.96)
    assert [ours.low, ours.high] == pytest.approx([resampled.low, resampled.high], abs=error * 0.12)


# ---- effect sizes


def test_cohens_h_worked_by_hand():
    """asin √1 is π/2, asin √.5 is π/4, asin √.75 is π/3, asin √.25 is π/6."""
    assert cohens_h(1, 0) == pytest.approx(math.pi)
    assert cohens_h(0.5, 0.75) == pytest.approx(-math.pi / 6)
    assert cohens_h(0.75, 0.25) == pytest.approx(math.pi / 3)


@given(st.floats(0, 1), st.floats(0, 1))
def test_cohens_h_is_antisymmetric_and_has_the_sign_of_the_difference(a: float, b: float):
    assert cohens_h(a, b) == -cohens_h(b, a)
    assert abs(cohens_h(a, b)) <= math.pi
    assert cohens_h(a, b) * (a - b) >= 0


# ---- Wilcoxon


@pytest.mark.parametrize(
    ("differences", "p"),
    [([1, 2, 3], 2 / 8), ([1, 1, 1], 2 / 8), ([1, 1, -1], 1.0), ([1, 2, 3, 4, 5], 2 / 32), ([-1, 2, 3], 4 / 8),
     ([0, 0, 0], 1.0), ([0], 1.0), ([2], 1.0)],
)  # fmt: skip
def test_signed_ranks_worked_by_hand(differences: list[float], p: float):
    """1, 2, 3: only one of 8 choices of signs reaches the sum 6; −1, 2, 3: two reach 5 or more."""
    assert wilcoxon(np.array(differences)) == pytest.approx(p)


@settings(deadline=None, max_examples=40)
@given(STEPS)
def test_signed_ranks_agree_with_all_choices_of_signs(differences: list[int]):
    """Ties and zeros of few queries: every choice of signs counted."""
    amounts = scipy.stats.rankdata([abs(value) for value in differences if value])
    sums = [np.dot(signs, amounts) for signs in product([0, 1], repeat=len(amounts))]
    found = sum(rank for rank, value in zip(amounts, filter(None, differences), strict=True) if value > 0)
    above = np.mean([total >= found for total in sums])
    below = np.mean([total <= found for total in sums])
    expected = min(1.0, 2 * min(above, below))
    assert wilcoxon(np.array(differences)) == pytest.approx(expected)


@settings(deadline=None, max_examples=20)
@given(STEPS, st.integers(0, 30), st.randoms())
def test_order_sign_and_equal_queries_do_not_matter(differences: list[int], num_equal: int, random):
    p = wilcoxon(np.array(differences))
    shuffled = [*differences, *[0] * num_equal]
    random.shuffle(shuffled)
    assert wilcoxon(np.array(shuffled)) == pytest.approx(p)
    assert wilcoxon(-np.array(differences)) == pytest.approx(p)
    assert 0 < p <= 1


def test_rounding_makes_no_difference():
    assert wilcoxon(np.array([0.1 + 0.2 - 0.3, 0.0])) == 1.0
    tied = wilcoxon(np.array([0.3 - 0.2, 0.8 - 0.7, 0.5 - 0.6]))  # .1, .1, −.1, each with its own rounding
    assert tied == wilcoxon(np.array([1, 1, -1])) == 1.0


def test_distinct_amounts_agree_with_scipys_exact_distribution():
    a, b = np.random.default_rng(0).random((2, 40))
    assert wilcoxon(a - b) == pytest.approx(scipy.stats.wilcoxon(a, b, method="exact")[1])


def test_many_ties_agree_with_scipys_normal_approximation():
    """Exactly up to 200 differing queries (of 240, about 190 differ), from 201 as scipy has it."""
    generator = np.random.default_rng(2)
    for num, tolerance in ((240, 2e-3), (400, 1e-12)):
        a, b = generator.integers(0, 5, (2, num)) / 4
        b[: num // 12] = 1.0
        kept = a != b
        assert (kept.sum() <= 200) == (num == 240)
        theirs = scipy.stats.wilcoxon(a[kept] - b[kept], method="asymptotic")[1]
        assert wilcoxon(a - b) == pytest.approx(theirs, abs=tolerance)


# ---- McNemar


@settings(deadline=None, max_examples=30)
@given(BITS)
def test_mcnemar_agrees_with_the_binomial_test(pairs: list[tuple[bool, bool]]):
    differences = np.array([int(after) - int(before) for before, after in pairs])
    num, p = np.count_nonzero(differences), mcnemar(differences)
    expected = scipy.stats.binomtest(np.count_nonzero(differences < 0), num).pvalue if num else 1.0
    assert p == mcnemar(-differences) == pytest.approx(expected)
    assert p == pytest.approx(wilcoxon(differences))  # with equal amounts, ranks toss the same coins


@pytest.mark.parametrize("num", [5, 25, 60])
def test_mcnemar_errs_in_at_most_5_of_100_cases(num: int):
    """By the binomial weights of all outcomes of `num` queries that differ by chance alone."""
    ps = [mcnemar(np.array([1] * k + [-1] * (num - k))) for k in range(num + 1)]
    assert sum(math.comb(num, k) for k, p in enumerate(ps) if p <= 0.05) / 2**num <= 0.05


def test_the_net_of_a_cluster_is_one_coin():
    """2, 1, −1: of 8 choices of signs three reach a sum of 3 or more, and 3 is the sum of those that are fixed."""
    assert mcnemar(np.array([2, 1, -1])) == pytest.approx(2 * 3 / 8)
    assert mcnemar(np.array([2, 2, 0])) == mcnemar(np.array([1, 1])) == 1 / 2


# ---- Holm


def test_holm_worked_by_hand():
    """.005 × 4, .01 × 3, .03 × 2, and .04 × 1, which may not fall below the .06 before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_holm_is_the_closed_test_of_bonferroni(p_values: list[float]):
    """Its adjusted p is the largest Bonferroni p of all families within the family that hold the test."""
    everyone = range(len(p_values))
    families = [set(f) for size in range(1, len(p_values) + 1) for f in combinations(everyone, size)]
    expected = [
        max(min(1.0, len(family) * min(p_values[j] for j in family)) for family in families if i in family)
        for i in everyone
    ]
    assert holm(p_values) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), max_size=30))
def test_holm_raises_p_and_keeps_its_order(p_values: list[float]):
    adjusted = holm(p_values)
    assert all(p <= found <= 1 for p, found in zip(p_values, adjusted, strict=True))
    by_raw = [adjusted[i] for i in sorted(range(len(p_values)), key=p_values.__getitem__)]
    assert by_raw == sorted(by_raw)


# ---- values of systems


def test_values_stand_in_the_order_asked_for():
    one = system("one", {"q1": {"Hit@1": 1, "MRR@10": 0.5}, "q2": {"Hit@1": 0, "MRR@10": 0.25}})
    np.testing.assert_array_equal(values_of(one, ["q2", "q1"], ["MRR@10", "Hit@1"]), [[0.25, 0], [0.5, 1]])
    assert values_of(one, ["q1"], []).shape == (1, 0)
    assert values_of(one, [], ["Hit@1"]).shape == (0, 1)


def test_same_queries_in_another_order_are_the_same():
    one, two = system("one", {"q1": {}, "q2": {}}), system("two", {"q2": {}, "q1": {}})
    assert same_queries([one, two]) == ("q1", "q2")
    assert same_queries([]) == ()


def test_other_queries_are_named():
    one = system("one", {"q1": {}, "q2": {}, "q3": {}})
    with pytest.raises(SkilltrainError) as raised:
        same_queries([one, system("two", {"q3": {}, "q4": {}})])
    assert str(raised.value) == (
        "system two: runs over different query sets compared: 3 queries stand on one side only "
        "(system one holds 3, this one 2), first 'q1' (score all systems on the same queries)"
    )
    with pytest.raises(SkilltrainError, match="two systems are named 'one'"):
        same_queries([one, one])


def test_values_that_are_not_there_are_named():
    one = system("one", {"q1": {"Hit@2": 1.0, "nDCG@10": 0.0}, "q2": {"nDCG@10": math.nan}})
    with pytest.raises(SkilltrainError, match=r"1 queries have no value of measure 'Hit@2', first 'q2'"):
        values_of(one, ["q1", "q2"], ["Hit@2"])
    with pytest.raises(SkilltrainError, match=r"one: 1 values are not finite .*, first nDCG@10 = nan of query 'q2'"):
        values_of(one, ["q1", "q2"], ["nDCG@10"])
