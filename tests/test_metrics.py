import math

import ir_measures
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_measures import RR, P, R, Success, nDCG

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import (
    DEFAULT_MEASURES,
    MEANINGS,
    Measure,
    Relevance,
    evaluate_query,
    parse_measure,
    parse_measures,
    per_query,
)

BINARY = Relevance(gold=frozenset("abc"), gains=dict.fromkeys("abc", 1.0))


def value(measure: str, ranking: str, relevance: Relevance = BINARY) -> float:
    return evaluate_query(tuple(ranking), relevance, [parse_measure(measure)])[measure]


def test_parse_measure_reads_name_and_cutoff_and_prints_them_back():
    assert parse_measure("nDCG@10") == Measure("nDCG", 10)
    assert [str(measure) for measure in parse_measures(DEFAULT_MEASURES)] == list(DEFAULT_MEASURES)
    assert parse_measures(["Hit@1", "FC@10", "Hit@1"]) == (Measure("Hit", 1), Measure("FC", 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ndcg@10", "unknown measure 'ndcg@10', did you mean 'nDCG@10'?"),
        ("Recal@5", "did you mean 'Recall@5'?"),
        ("MRR", "measure 'MRR' needs a whole cutoff from 1, like MRR@10"),
        ("Hit@0", "needs a whole cutoff from 1"),
        ("Hit@1.5", "needs a whole cutoff from 1"),
        ("Hit@-1", "needs a whole cutoff from 1"),
        ("Hit@" + "9" * 5000, "needs a whole cutoff from 1"),
        ("Hit@ 1", "needs a whole cutoff from 1"),
        ("", "unknown measure ''"),
    ],
)
def test_parse_measure_names_the_nearest_and_all_allowed(text: str, message: str):
    with pytest.raises(SkilltrainError) as error:
        parse_measure(text)
    assert message in str(error.value)
    assert "measures are Hit@k, MRR@k, nDCG@k, Recall@k, Precision@k, FC@k, COMP@k" in str(error.value)


def test_every_measure_has_a_meaning_and_a_formula():
    for name in MEANINGS:
        assert value(f"{name}@3", "abc") == 1.0


@pytest.mark.parametrize(
    ("measure", "ranking", "expected"),
    [
        ("FC@3", "abc", 1.0),
        ("FC@3", "cabx", 1.0),
        ("FC@3", "abxc", 0.0),
        ("FC@10", "abxc", 1.0),
        ("FC@2", "ab", 0.0),  # two places cannot hold three gold skills
        ("COMP@2", "ab", 1.0),  # but they can be filled with gold
        ("COMP@2", "ax", 1 / 2),
        ("COMP@3", "axc", 2 / 3),
        ("COMP@10", "wxyza", 1 / 3),
        ("Recall@2", "ab", 2 / 3),
        ("Precision@10", "abc", 3 / 10),
        ("MRR@2", "xya", 0.0),
        ("MRR@3", "xya", 1 / 3),
        ("Hit@1", "xa", 0.0),
        ("Hit@2", "xa", 1.0),
        ("Hit@1", "", 0.0),
        ("nDCG@10", "", 0.0),
    ],
)
def test_values_worked_by_hand(measure: str, ranking: str, expected: float):
    assert value(measure, ranking) == pytest.approx(expected)


def test_ndcg_has_linear_gains_and_counts_degraded_copies():
    """Gold 3 at rank 2, its degraded copy 1 at rank 1; best order 3 then 1."""
    relevance = Relevance(gold=frozenset("g"), gains={"g": 3.0, "d": 1.0})
    expected = (1 + 3 / math.log2(3)) / (3 + 1 / math.log2(3))
    assert value("nDCG@10", "dg", relevance) == pytest.approx(expected)
    assert value("nDCG@1", "dg", relevance) == pytest.approx(1 / 3)
    assert value("Hit@1", "dg", relevance) == 0.0  # a degraded copy is not gold
    assert value("Recall@1", "dg", relevance) == 0.0


IDS = [f"s{i}" for i in range(12)]
THEIRS = {"Hit": Success(rel=3), "MRR": RR(rel=3), "nDCG": nDCG, "Recall": R(rel=3), "Precision": P(rel=3)}


@given(
    ranking=st.lists(st.sampled_from(IDS), unique=True),
    gains=st.dictionaries(st.sampled_from(IDS), st.sampled_from([0, 1, 3]), min_size=1),
    cutoff=st.integers(1, 15),
)
def test_agrees_with_ir_measures_on_random_and_degenerate_rankings(
    ranking: list[str], gains: dict[str, int], cutoff: int
):
    gains |= {"s0": 3}
    relevance = Relevance(frozenset(s for s, gain in gains.items() if gain == 3), dict(gains))
    ours = evaluate_query(ranking, relevance, [Measure(name, cutoff) for name in THEIRS])
    run = {"q": {skill_id: -float(rank) for rank, skill_id in enumerate(ranking)}}
    wanted = {f"{name}@{cutoff}": measure @ cutoff for name, measure in THEIRS.items()}
    theirs = ir_measures.calc_aggregate(list(wanted.values()), {"q": gains}, run)
    for name, measure in wanted.items():
        assert ours[name] == pytest.approx(theirs[measure], abs=1e-9), name


@given(ranking=st.permutations(IDS), num_gold=st.integers(1, 12), cutoff=st.integers(1, 15))
def test_bounds_and_order_between_measures(ranking: list[str], num_gold: int, cutoff: int):
    gold = frozenset(IDS[:num_gold])
    relevance = Relevance(gold, dict.fromkeys(gold, 1.0))
    values = evaluate_query(ranking, relevance, [Measure(name, cutoff) for name in MEANINGS])
    assert all(0 <= number <= 1 for number in values.values())
    names = {name: values[f"{name}@{cutoff}"] for name in MEANINGS}
    assert names["FC"] <= names["Recall"] <= names["COMP"] <= names["Hit"]
    assert names["Precision"] <= names["COMP"]
    assert names["MRR"] <= names["Hit"]


def test_per_query_scores_a_missing_query_zero_and_keeps_the_benchmarks_order():
    relevances = {"q2": BINARY, "q1": BINARY}
    values = per_query({"q1": ["a"]}, relevances, parse_measures(["Hit@1", "nDCG@10"]))
    assert list(values) == ["q2", "q1"]
    assert values["q2"] == {"Hit@1": 0.0, "nDCG@10": 0.0}
    assert values["q1"]["Hit@1"] == 1.0


def test_per_query_refuses_queries_the_benchmark_does_not_hold():
    with pytest.raises(SkilltrainError, match=r"query q9: 1 of 2 ranked queries are not in the benchmark"):
        per_query({"q": [], "q9": []}, {"q": BINARY}, parse_measures(["Hit@1"]))


@pytest.mark.parametrize(
    ("relevance", "message"),
    [
        (Relevance(frozenset(), {}), "no skill has a positive gain"),
        (Relevance(frozenset("a"), {"a": 0.0}), "no skill has a positive gain"),
        (Relevance(frozenset(), {"a": 1.0}), "no skill is gold"),
        (Relevance(frozenset("ab"), {"a": 1.0}), "gold skill 'b' has no positive gain"),
        (Relevance(frozenset("a"), {"a": math.nan}), "gain of skill 'a' is nan"),
        (Relevance(frozenset("a"), {"a": 1.0, "b": -1.0}), "gain of skill 'b' is -1.0"),
    ],
)
def test_a_relevance_no_ranking_can_meet_is_refused_naming_the_query(relevance: Relevance, message: str):
    with pytest.raises(SkilltrainError, match=f"query q7: .*{message}"):
        per_query({}, {"q7": relevance}, parse_measures(["Hit@1"]))


def test_a_skill_twice_in_a_ranking_is_refused_naming_query_and_skill():
    with pytest.raises(SkilltrainError, match="query q: skill 'a' stands twice in the ranking, again at rank 3"):
        per_query({"q": ["a", "b", "a"]}, {"q": BINARY}, parse_measures(["Hit@1"]))


def test_a_text_is_not_a_ranking():
    with pytest.raises(SkilltrainError, match="a sequence of skill ids"):
        evaluate_query("abc", BINARY, parse_measures(["Hit@1"]))


def test_recall_is_the_mean_over_queries_not_over_skills():
    relevances = {"one": Relevance(frozenset("a"), {"a": 1.0}), "three": BINARY}
    rankings = {"one": ["a"], "three": ["x", "y"]}
    values = per_query(rankings, relevances, parse_measures(["Recall@10"]))
    assert sum(row["Recall@10"] for row in values.values()) / 2 == 0.5
