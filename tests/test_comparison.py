import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import Interval, paired_differences
from skilltrain.evaluation.comparison import Comparison, cohens_h, compare, holm, mcnemar, wilcoxon
from skilltrain.evaluation.results import SystemResult

MEASURES = ("Hit@1", "MRR@10")
IDS = tuple(f"q{i}" for i in range(30))


def scored(name: str, seed: int, share: float) -> SystemResult:
    generator = np.random.default_rng(seed)
    rows = {
        query_id: {"Hit@1": float(generator.random() < share), "MRR@10": float(generator.random() ** (1 / share - 1))}
        for query_id in IDS
    }
    return SystemResult(name=name, per_query=rows, rankings={})


def one_measure(name: str, values: list[float]) -> SystemResult:
    return SystemResult(name=name, per_query={f"q{i}": {"m": value} for i, value in enumerate(values)}, rankings={})


def column(system: SystemResult, measure: str) -> list[float]:
    return [system.per_query[query_id][measure] for query_id in IDS]


BM25, BASE, TRAINED = scored("bm25", 0, 0.3), scored("base", 1, 0.5), scored("trained", 2, 0.8)
SYSTEMS = (BM25, BASE, TRAINED)
PAIRS = (("bm25", "trained"), ("base", "trained"))


def test_a_comparison_is_what_its_parts_say():
    found = compare(SYSTEMS, PAIRS, MEASURES, IDS, seed=5)
    assert [(c.baseline, c.system, c.measure) for c in found] == [
        (*pair, measure) for pair in PAIRS for measure in MEASURES
    ]
    for comparison, baseline in zip(found, (BM25, BM25, BASE, BASE), strict=True):
        after, before = column(TRAINED, comparison.measure), column(baseline, comparison.measure)
        differences = np.subtract(after, before)
        ((alone, p),) = paired_differences(differences[:, None], seed=5)
        assert comparison.difference.mean == pytest.approx(np.mean(after) - np.mean(before))
        assert comparison.difference.bounds() == alone.bounds()
        assert comparison.p == p
        assert comparison.wilcoxon_p == wilcoxon(differences)
        binary = comparison.measure == "Hit@1"
        assert comparison.mcnemar_p == (mcnemar(differences) if binary else None)
        expected = cohens_h(float(np.mean(after)), float(np.mean(before))) if binary else None
        assert comparison.cohens_h == expected


def test_the_family_is_every_pair_and_measure():
    found = compare(SYSTEMS, PAIRS, MEASURES, IDS, seed=5)
    assert [c.p_holm for c in found] == holm([c.p for c in found])
    (alone,) = compare(SYSTEMS, PAIRS[:1], MEASURES[:1], IDS, seed=5)
    assert alone.p_holm == alone.p == found[0].p
    assert alone == replace(found[0], p_holm=alone.p)


def test_equal_systems_differ_in_nothing():
    """Also where all values are equal: no width, no p below 1."""
    for values in ([1.0, 0.0, 1.0], [0.25] * 4, [0.0] * 3):
        (found,) = compare([one_measure("a", values), one_measure("b", values)], [("a", "b")], ["m"],
                           [f"q{i}" for i in range(len(values))], seed=0)  # fmt: skip
        binary = values[0] in (0, 1)
        effect, p = (0.0, 1.0) if binary else (None, None)
        assert found == Comparison("b", "a", "m", Interval(0, 0, 0, len(values)), 1, 1, 1, p, effect)


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.tuples(st.sampled_from([0, 0.25, 1]), st.sampled_from([0, 0.25, 1])), min_size=1, max_size=12),
    st.randoms(),
)
def test_turned_round_and_shuffled(pairs: list[tuple[float, float]], random):
    a, b = (one_measure(name, [pair[side] for pair in pairs]) for side, name in enumerate("ab"))
    ids = [f"q{i}" for i in range(len(pairs))]
    (forth,), (back,) = (compare([a, b], [pair], ["m"], ids, seed=1) for pair in (("a", "b"), ("b", "a")))
    assert (forth.p, forth.mcnemar_p) == (back.p, back.mcnemar_p)
    assert forth.wilcoxon_p == pytest.approx(back.wilcoxon_p)
    assert forth.difference.mean == pytest.approx(-back.difference.mean)
    assert forth.difference.low == pytest.approx(-back.difference.high)
    assert (forth.cohens_h is None) == (back.cohens_h is None) == (not {0.25}.isdisjoint(v for p in pairs for v in p))
    if forth.cohens_h is not None and back.cohens_h is not None:
        assert forth.cohens_h == -back.cohens_h
    random.shuffle(ids)
    (shuffled,) = compare([a, b], [("a", "b")], ["m"], ids, seed=1)
    assert shuffled.difference.mean == pytest.approx(forth.difference.mean)
    assert shuffled.wilcoxon_p == pytest.approx(forth.wilcoxon_p)
    assert shuffled.mcnemar_p == forth.mcnemar_p
    assert shuffled.cohens_h == pytest.approx(forth.cohens_h)


def test_nothing_asked_is_nothing_answered():
    assert compare(SYSTEMS, (), MEASURES, IDS, seed=0) == ()
    assert compare(SYSTEMS, PAIRS, (), IDS, seed=0) == ()


def test_a_cluster_counts_once():
    """Fifteen tasks over two pools where both fare alike: the tests are those of fifteen queries, and n is 30."""
    hits = np.random.default_rng(4).integers(0, 2, (15, 2)).astype(float)
    once = [one_measure(name, hits[:, side].tolist()) for side, name in enumerate("ab")]
    twice = [one_measure(name, np.repeat(hits[:, side], 2).tolist()) for side, name in enumerate("ab")]
    clusters = {f"q{place}": f"task {place // 2}" for place in range(30)}
    (alone,) = compare(once, [("a", "b")], ["m"], IDS[:15], seed=0)
    (found,) = compare(twice, [("a", "b")], ["m"], IDS, seed=0, clusters=clusters)
    assert found == replace(alone, difference=replace(alone.difference, n=30))
    (apart,) = compare(twice, [("a", "b")], ["m"], IDS, seed=0)
    assert apart.difference.high - apart.difference.low < found.difference.high - found.difference.low


def test_runs_over_different_queries_are_refused():
    fewer = replace(TRAINED, per_query={query_id: TRAINED.per_query[query_id] for query_id in IDS[2:]})
    message = (
        r"system trained: runs over different query sets compared: 2 queries .* holds 30, this one 28\), first 'q0'"
    )
    with pytest.raises(SkilltrainError, match=message):
        compare([BM25, BASE, fewer], PAIRS, MEASURES, IDS[5:], seed=0)  # also where the asked ones stand in all


def test_what_is_not_there_is_named():
    with pytest.raises(SkilltrainError, match="30 queries have no value of measure 'Hit@3', first 'q0'"):
        compare(SYSTEMS, PAIRS, ["Hit@3"], IDS, seed=0)
    with pytest.raises(SkilltrainError, match="no values"):
        compare(SYSTEMS, PAIRS, MEASURES, [], seed=0)
    odd = replace(BASE, per_query={**BASE.per_query, "q4": {"Hit@1": math.nan, "MRR@10": 0.0}})
    with pytest.raises(SkilltrainError, match=r"system base: 1 values are not finite .*, first Hit@1 = nan .*'q4'"):
        compare([BM25, odd, TRAINED], PAIRS, MEASURES, IDS, seed=0)
