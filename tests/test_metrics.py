import math
from collections.abc import Sequence

import ir_measures
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ir_measures import RR, P, R, Success, nDCG

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
    return evaluate_query(ranking, relevance, [parse_measure(measure)])[measure]


def test_a_measure_is_read_and_printed_back():
    assert [str(measure) for measure in parse_measures(DEFAULT_MEASURES)] == list(DEFAULT_MEASURES)
    assert parse_measures(["Hit@1", "FC@10", "Hit@1"]) == (Measure("Hit", 1), Measure("FC", 10))
    assert parse_measure("Hit@1 (copies)") == Measure("Hit", 1, copies=True)
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
def test_what_names_no_measure_is_told_the_nearest_and_all_allowed(text: str, message: str):
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
        ("Hit@1", "xa", 0.0),
        ("Hit@2", "xa", 1.0),
        ("Set-Compat", "cabx", 1.0),
        ("Set-Compat", "abxc", 0.0),  # a stranger among the first three
        ("Set-Compat", "ab", 0.0),
    ],
)
def test_values_worked_by_hand(measure: str, ranking: str, expected: float):
    assert value(measure, ranking) == pytest.approx(expected)


def test_ndcg_names_its_gain():
    """Gains 3 (gold), 2 (gold) and 1 (a degraded copy), ranked worst first."""
    relevance = Relevance(frozenset("ab"), {"a": 3.0, "b": 2.0, "c": 1.0})
    second, third = 1 / math.log2(3), 1 / math.log2(4)

    assert value("nDCG@3", "cba", relevance) == pytest.approx(
        (1 + 2 * second + 3 * third) / (3 + 2 * second + third)
    )
    assert value("nDCG@1", "cba", relevance) == pytest.approx(1 / 3)
    assert value("nDCG-exp@3", "cba", relevance) == pytest.approx(
        (1 + 3 * second + 7 * third) / (7 + 3 * second + third)
    )
    assert value("nDCG-bin@3", "cba", relevance) == pytest.approx((second + third) / (1 + second))
    assert (
        value("Hit@1", "cba", relevance) == value("Recall@1", "cba", relevance) == 0.0
    )  # a degraded copy is not gold


def test_rounding_does_not_lift_ndcg_above_1():
    """Three gains that differ in their last bit, not in the best order: the rounded sums are in the wrong order."""
    gains = {"a": 1.6577750352015144, "b": 1.6577750352015141, "c": 1.6577750352015144}
    assert value("nDCG@3", "abc", Relevance(frozenset("abc"), gains)) == 1.0


IDS = [f"s{i}" for i in range(12)]
THEIRS = {
    "Hit": Success(rel=3),
    "MRR": RR(rel=3),
    "nDCG": nDCG,
    "Recall": R(rel=3),
    "Precision": P(rel=3),
}


def assert_parity(ranking: list[str], gains: dict[str, int], cutoff: int):
    """Gain 3 is gold. Each nDCG against pytrec_eval's linear one, over gains as they are, 2^gain - 1, or 0 and 1; what
    ir_measures lacks against its definition, that of R3's released evaluation, written down here once more."""
    gold, top = (
        frozenset(skill_id for skill_id, gain in gains.items() if gain == 3),
        set(ranking[:cutoff]),
    )
    run = {"q": {skill_id: -float(rank) for rank, skill_id in enumerate(ranking)}}
    qrels = {
        "nDCG": gains,
        "nDCG-exp": {skill_id: 2**gain - 1 for skill_id, gain in gains.items()},
        "nDCG-bin": {skill_id: int(skill_id in gold) for skill_id in gains},
    }
    wanted = {f"{name}@{cutoff}": (measure @ cutoff, gains) for name, measure in THEIRS.items()}
    wanted |= {f"{name}@{cutoff}": (nDCG @ cutoff, judged) for name, judged in qrels.items()}
    expected = {
        name: ir_measures.calc_aggregate([one], {"q": of}, run)[one]
        for name, (one, of) in wanted.items()
    }
    expected |= {
        f"COMP@{cutoff}": len(gold & top) / min(len(gold), cutoff),
        f"FC@{cutoff}": float(gold <= top),
    }
    if len(gold) > 1:
        expected["Set-Compat"] = float(gold <= set(ranking[: len(gold)]))
    measures = [*(Measure(name, cutoff) for name in CUT), Measure("Set-Compat", 0)]
    ours = evaluate_query(ranking, Relevance(gold, dict(gains)), measures)
    assert ours == pytest.approx(expected, abs=1e-9)
    assert all(type(number) is float and 0 <= number <= 1 for number in ours.values())


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
def test_agrees_with_ir_measures_and_r3_on_random_and_degenerate_rankings(ranking, gains, cutoff):
    assert_parity(ranking, gains | {"s0": 3}, cutoff)


def test_a_measure_has_no_value_where_it_is_not_defined():
    """Set-Compat asks whether skills go together; its mean runs over the queries that have a value, here one."""
    one = Relevance(frozenset("a"), {"a": 1.0})
    measures = parse_measures(["Set-Compat", "Hit@1"])

    values = per_query(
        {"single": ["a"], "multi": ["a", "b", "c"]}, {"single": one, "multi": BINARY}, measures
    )

    assert values == {"single": {"Hit@1": 1.0}, "multi": {"Set-Compat": 1.0, "Hit@1": 1.0}}
    assert per_query({}, {"multi": BINARY}, measures) == {
        "multi": {"Set-Compat": 0.0, "Hit@1": 0.0}
    }


@settings(max_examples=60)
@given(ranking=st.lists(st.sampled_from("abcdeAaBx"), unique=True), cutoff=st.integers(1, 6))
def test_alternatives_and_copies_change_nothing_but_the_name(ranking: list[str], cutoff: int):
    """Naming the first of each group like the gold skill, and every other one like a stranger, scores the same."""
    gains, alternatives, copies = (
        {"a": 3.0, "b": 1.0, "c": 1.0, "x": 1.0},
        {"A": "a", "B": "b"},
        {"d": "a", "e": "c"},
    )
    relevance, plain = (
        Relevance(frozenset("abc"), gains, alternatives, copies),
        Relevance(frozenset("abc"), gains),
    )
    strict, lenient = [
        [Measure(name, cutoff if name in CUT else 0, how) for name in BUILT_IN["measure"]]
        for how in (False, True)
    ]
    for measures, needs in ((strict, alternatives), (lenient, alternatives | copies)):
        renamed: list[str] = []
        for skill_id in ranking:
            gold = needs.get(skill_id, skill_id)
            renamed.append(f"copy of {gold} {skill_id}" if gold in renamed else gold)

        assert evaluate_query(ranking, relevance, measures) == evaluate_query(
            renamed, plain, measures
        )

    values = evaluate_query(ranking, relevance, strict + lenient)

    assert all(values[f"{measure} (copies)"] >= values[str(measure)] for measure in strict)


def test_a_copy_counts_as_its_gold_skill_once_and_in_measures_of_copies_alone():
    relevance = Relevance(frozenset("ab"), {"a": 1.0, "b": 1.0}, copies={"c": "a", "d": "a"})
    measures = with_copies(parse_measures(["Hit@1", "Recall@3", "FC@3", "nDCG@3"]))

    assert [str(measure) for measure in measures][:3] == ["Hit@1", "Hit@1 (copies)", "Recall@3"]

    ideal = 1 + 1 / math.log2(3)

    assert evaluate_query(tuple("cdaxb"), relevance, measures) == pytest.approx(
        {
            "Hit@1": 0,
            "Recall@3": 1 / 2,
            "FC@3": 0,
            "nDCG@3": (1 / math.log2(4)) / ideal,
            "Hit@1 (copies)": 1,
            "Recall@3 (copies)": 1 / 2,
            "FC@3 (copies)": 0,
            "nDCG@3 (copies)": 1 / ideal,
        }
    )
    assert evaluate_query(tuple("dxb"), relevance, measures[5:6]) == {"FC@3 (copies)": 1.0}


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
def test_a_relevance_no_ranking_can_meet_is_refused_naming_the_query(
    relevance: Relevance, code: str
):
    with raises(code):
        per_query({}, {"q7": relevance}, parse_measures(["Hit@1"]))


def test_rankings_of_other_queries_and_skills_that_stand_twice_are_refused():
    with raises("unknown-query"):
        per_query({"q": [], "q9": []}, {"q": BINARY}, parse_measures(["Hit@1"]))
    with raises("repeated-id"):
        per_query({"q": ["a", "b", "a"]}, {"q": BINARY}, parse_measures(["Hit@1"]))
