"""Measures of a ranking: by hand, and equal to those of ir_measures and of R3."""

import math
from collections.abc import Sequence
from typing import Any

import ir_measures
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ir_measures import AP, RR, P, R, Success, nDCG

from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.measures import (
    DEFAULT_MEASURES,
    Measure,
    Relevance,
    evaluate_query,
    parse_measure,
    parse_measures,
    per_query,
    with_copies,
)
from skilltrain.plugins import BUILT_IN

BINARY = Relevance(gold=frozenset("abc"), gains=dict.fromkeys("abc", 1.0))


def value(measure: str, ranking: Sequence[str], relevance: Relevance = BINARY) -> float:
    """Return one measure of a ranking of one-letter skills; a, b and c are gold by default."""
    return evaluate_query(ranking, relevance, [parse_measure(measure)])[measure]


def test_measures_are_parsed_without_repeats():
    assert parse_measures(["Hit@1", "FC@10", "Hit@1"]) == (Measure("Hit", 1), Measure("FC", 10))
    assert parse_measure("Hit@1 (copies)") == Measure("Hit", 1, accepts="copies")


def test_measure_prints_as_it_was_written():
    assert [str(measure) for measure in parse_measures(DEFAULT_MEASURES)] == list(DEFAULT_MEASURES)


def test_copies_are_not_added_twice():
    assert len(with_copies(parse_measures(["Hit@1", "Hit@1 (copies)"]))) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ndcg@10", "unknown measure 'ndcg@10', did you mean 'nDCG@10'?"),
        ("MRR", "unknown measure 'MRR', did you mean 'MRR@10'?"),
        ("Hit@0", "did you mean 'Hit@10'?"),
        ("Hit@" + "9" * 5000, "did you mean 'Hit@10'?"),
        ("Set-Compat@3", "did you mean 'Set-Compat'?"),
        ("ndcg", "did you mean 'nDCG@10'?"),
        ("R@20", "did you mean 'Recall@20'?"),  # ir_measures' name
        ("", "unknown measure ''"),
    ],
)
def test_unknown_measure_names_nearest(text: str, message: str):
    with pytest.raises(SkilltrainError) as error:
        parse_measure(text)
    assert message in str(error.value)
    assert "measures are Hit@k, MRR@k, nDCG@k" in str(error.value)


CUT = [name for name in BUILT_IN["measure"] if name != "Set-Compat"]  # the measures with a cutoff


@pytest.mark.parametrize(
    ("measure", "ranking", "expected"),
    [
        ("FC@3", "cabx", 1.0),
        ("FC@3", "abxc", 0.0),
        ("FC@2", "ab", 0.0),  # two places cannot hold three gold skills
        ("COMP@2", "ab", 1.0),  # but they can be filled with gold
        ("COMP@10", "wxyza", 1 / 3),
        ("Recall@2", "ab", 2 / 3),
        ("Precision@10", "abc", 3 / 10),
        ("MRR@2", "xya", 0.0),
        ("MRR@3", "xya", 1 / 3),
        ("MAP", "xabyc", (1 / 2 + 2 / 3 + 3 / 5) / 3),
        ("MAP@3", "xabyc", (1 / 2 + 2 / 3) / 3),
        ("Hit@1", "xa", 0.0),
        ("Hit@2", "xa", 1.0),
        ("Set-Compat", "cabx", 1.0),
        ("Set-Compat", "abxc", 0.0),  # a stranger among the first three
        ("Set-Compat", "ab", 0.0),
    ],
)
def test_values_worked_by_hand(measure: str, ranking: str, expected: float):
    assert value(measure, ranking) == pytest.approx(expected)


# Gold skills of gain 3 and 2, and a degraded copy.
GRADED = Relevance(frozenset("ab"), {"a": 3.0, "b": 2.0, "c": 1.0})


@pytest.mark.parametrize(
    ("measure", "gains"),
    [
        ("nDCG@3", (3, 2, 1)),
        ("nDCG-exp@3", (7, 3, 1)),
        ("nDCG-bin@3", (1, 1, 0)),
    ],
)
def test_ndcg_by_hand(measure: str, gains: tuple[float, float, float]):
    first, second, third = gains
    discounts = (1, 1 / math.log2(3), 1 / math.log2(4))
    dcg = third * discounts[0] + second * discounts[1] + first * discounts[2]
    ideal_dcg = first * discounts[0] + second * discounts[1] + third * discounts[2]

    assert value(measure, "cba", GRADED) == pytest.approx(dcg / ideal_dcg)


def test_degraded_copy_gains_without_being_gold():
    assert value("nDCG@1", "cba", GRADED) == pytest.approx(1 / 3)
    assert value("Hit@1", "cba", GRADED) == 0.0
    assert value("Recall@1", "cba", GRADED) == 0.0


def test_rounding_keeps_ndcg_at_1():
    """The gains differ in their last bit, but their rounded sums are in the wrong order."""
    gains = {"a": 1.6577750352015144, "b": 1.6577750352015141, "c": 1.6577750352015144}

    assert value("nDCG@3", "abc", Relevance(frozenset("abc"), gains)) == 1.0


IDS = [f"s{i}" for i in range(12)]
IR_MEASURES = {
    "Hit": Success(rel=3),
    "MRR": RR(rel=3),
    "nDCG": nDCG,
    "Recall": R(rel=3),
    "Precision": P(rel=3),
    "MAP": AP(rel=3),
}


def reference(
    measure: Any, cutoff: int, gains: dict[str, int], run: dict[str, dict[str, float]]
) -> float:
    """Compute a measure of ir_measures."""
    at_cutoff = measure @ cutoff
    return ir_measures.calc_aggregate([at_cutoff], {"q": gains}, run)[at_cutoff]


def expected_values(ranking: list[str], gains: dict[str, int], cutoff: int) -> dict[str, float]:
    """Compute all measures with ir_measures, or by their definition where it has none.

    A skill of gain 3 is gold. The nDCG of ir_measures is pytrec_eval's, with linear gains: it gets
    the gains as they are, as 2^gain - 1, or as 0 and 1. The definitions are those of R3's released
    evaluation.
    """
    gold = {skill_id for skill_id, gain in gains.items() if gain == 3}
    top = set(ranking[:cutoff])
    run = {"q": {skill_id: -float(rank) for rank, skill_id in enumerate(ranking)}}
    exponential = {skill_id: 2**gain - 1 for skill_id, gain in gains.items()}
    binary = {skill_id: int(skill_id in gold) for skill_id in gains}
    values = {
        f"{name}@{cutoff}": reference(measure, cutoff, gains, run)
        for name, measure in IR_MEASURES.items()
    }
    all_places = len(ranking) + 1
    values["MAP"] = reference(IR_MEASURES["MAP"], all_places, gains, run)
    values[f"nDCG-exp@{cutoff}"] = reference(nDCG, cutoff, exponential, run)
    values[f"nDCG-bin@{cutoff}"] = reference(nDCG, cutoff, binary, run)
    values[f"COMP@{cutoff}"] = len(gold & top) / min(len(gold), cutoff)
    values[f"FC@{cutoff}"] = float(gold <= top)
    if len(gold) > 1:
        values["Set-Compat"] = float(gold <= set(ranking[: len(gold)]))
    return values


RANKED = st.lists(st.sampled_from(IDS), unique=True)


@settings(deadline=None, max_examples=50)
@given(
    RANKED,
    st.dictionaries(st.sampled_from(IDS), st.sampled_from([0, 1, 3]), min_size=1),
    st.integers(1, 15),
)
@example([], {"s0": 3}, 3)  # no answer
@example(["s0"], {"s0": 3}, 3)  # a pool of one skill
@example(["s1"], {"s0": 3}, 3)  # all gold outside the ranking
@example(["s1", "s0"], {"s0": 3, "s1": 3, "s2": 1}, 10)  # shorter than the cutoff
@example(IDS, dict.fromkeys(IDS, 3), 3)  # more gold than places
@example(["x", "y", "s0", "z"], {"s0": 3, "s1": 1}, 3)  # skills that nobody judged
@example(["s1", "s2", "s0"], {"s0": 3, "s1": 0, "s2": 0}, 1)  # judged as worth nothing
def test_measures_equal_reference(ranking, gains, cutoff):
    gains = gains | {"s0": 3}
    gold = frozenset(skill_id for skill_id, gain in gains.items() if gain == 3)
    measures = [Measure(name, cutoff) for name in CUT]
    measures += [Measure("MAP", 0), Measure("Set-Compat", 0)]

    values = evaluate_query(ranking, Relevance(gold, gains), measures)

    assert values == pytest.approx(expected_values(ranking, gains, cutoff), abs=1e-9)
    assert all(type(number) is float and 0 <= number <= 1 for number in values.values())


def test_undefined_measure_has_no_value():
    """Set-Compat needs two gold skills; its mean is over the queries that have a value."""
    relevances = {"single": Relevance(frozenset("a"), {"a": 1.0}), "multi": BINARY}
    rankings = {"single": ["a"], "multi": ["a", "b", "c"]}

    values = per_query(rankings, relevances, parse_measures(["Set-Compat", "Hit@1"]))

    assert values == {"single": {"Hit@1": 1.0}, "multi": {"Set-Compat": 1.0, "Hit@1": 1.0}}


def test_query_without_ranking_scores_zero():
    values = per_query({}, {"multi": BINARY}, parse_measures(["Set-Compat", "Hit@1"]))

    assert values == {"multi": {"Set-Compat": 0.0, "Hit@1": 0.0}}


GAINS = {"a": 3.0, "b": 1.0, "c": 1.0, "x": 1.0}
ALTERNATIVES = {"A": "a", "B": "b"}
COPIES = {"d": "a", "e": "c"}
WITH_ALTERNATIVES = Relevance(frozenset("abc"), GAINS, ALTERNATIVES, COPIES)
RANDOM_RANKINGS = given(
    ranking=st.lists(st.sampled_from("abcdeAaBx"), unique=True), cutoff=st.integers(1, 6)
)


def all_measures(cutoff: int, accepts: str) -> list[Measure]:
    return [Measure(name, cutoff if name in CUT else 0, accepts) for name in BUILT_IN["measure"]]


@pytest.mark.parametrize("accepts", ["", "copies"])
@settings(max_examples=60)
@RANDOM_RANKINGS
def test_first_alternative_counts_as_gold_skill(ranking: list[str], cutoff: int, accepts: str):
    """Values stay if the first of a group is renamed to its gold skill, the others to strangers."""
    measures = all_measures(cutoff, accepts)
    gold_by_id = ALTERNATIVES | COPIES if accepts else ALTERNATIVES
    renamed: list[str] = []
    for skill_id in ranking:
        gold = gold_by_id.get(skill_id, skill_id)
        renamed.append(f"copy of {gold} {skill_id}" if gold in renamed else gold)

    values = evaluate_query(ranking, WITH_ALTERNATIVES, measures)

    assert values == evaluate_query(renamed, Relevance(frozenset("abc"), GAINS), measures)


@settings(max_examples=60)
@RANDOM_RANKINGS
def test_copies_never_lower_values(ranking: list[str], cutoff: int):
    strict = evaluate_query(ranking, WITH_ALTERNATIVES, all_measures(cutoff, accepts=""))

    lenient = evaluate_query(ranking, WITH_ALTERNATIVES, all_measures(cutoff, accepts="copies"))

    assert all(lenient[f"{measure} (copies)"] >= value for measure, value in strict.items())


def test_judged_skill_counts_in_its_measure():
    """The useful skill u has a gain of its own, but readers found that it serves the query."""
    relevance = Relevance(frozenset("a"), {"a": 1.0, "u": 0.5}, judged={"u": "a"})
    measures = parse_measures(["Hit@1", "Hit@1 (judged)", "nDCG@2 (judged)"])

    values = evaluate_query(("u", "a"), relevance, measures)

    assert values == {"Hit@1": 0, "Hit@1 (judged)": 1, "nDCG@2 (judged)": 1}


WITH_COPIES = Relevance(frozenset("ab"), {"a": 1.0, "b": 1.0}, copies={"c": "a", "d": "a"})


def test_copies_count_only_in_their_measures():
    measures = with_copies(parse_measures(["Hit@1", "Recall@3", "FC@3", "nDCG@3"]))
    ideal_dcg = 1 + 1 / math.log2(3)

    values = evaluate_query(tuple("cdaxb"), WITH_COPIES, measures)

    assert [str(measure) for measure in measures][:3] == ["Hit@1", "Hit@1 (copies)", "Recall@3"]
    # The first copy, c, counts as a; d and a itself gain nothing then.
    assert values == pytest.approx(
        {
            "Hit@1": 0,
            "Recall@3": 1 / 2,
            "FC@3": 0,
            "nDCG@3": (1 / math.log2(4)) / ideal_dcg,
            "Hit@1 (copies)": 1,
            "Recall@3 (copies)": 1 / 2,
            "FC@3 (copies)": 0,
            "nDCG@3 (copies)": 1 / ideal_dcg,
        }
    )


def test_copy_covers_gold_skill():
    assert value("FC@3 (copies)", tuple("dxb"), WITH_COPIES) == 1.0


@pytest.mark.parametrize(
    ("relevance", "code"),
    [
        (Relevance(frozenset(), {}), "no-gold-skill"),
        (Relevance(frozenset("a"), {"a": 0.0}), "invalid-relevance"),
        (Relevance(frozenset("ab"), {"a": 1.0}), "invalid-relevance"),
        (Relevance(frozenset("a"), {"a": math.nan}), "invalid-relevance"),
        (Relevance(frozenset("a"), {"a": 1.0, "b": -1.0}), "invalid-relevance"),
        (Relevance(frozenset("a"), {"a": 2e3}), "invalid-relevance"),
        (Relevance(frozenset("a"), {"a": 1.0}, {"A": "b"}), "invalid-relevance"),
        (Relevance(frozenset("a"), {"a": 1.0, "A": 1.0}, {"A": "a"}), "invalid-relevance"),
    ],
)
def test_invalid_relevance_is_refused(relevance: Relevance, code: str):
    with raises(code):
        per_query({}, {"q7": relevance}, parse_measures(["Hit@1"]))


def test_ranking_of_unknown_query_is_refused():
    with raises("unknown-query"):
        per_query({"q": [], "q9": []}, {"q": BINARY}, parse_measures(["Hit@1"]))


def test_ranking_with_repeated_skill_is_refused():
    with raises("repeated-id"):
        per_query({"q": ["a", "b", "a"]}, {"q": BINARY}, parse_measures(["Hit@1"]))
