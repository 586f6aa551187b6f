"""Fused and saved rankings: figures worked by hand, and what is refused."""

import math

import pytest
from pydantic import ValidationError

from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill
from skilltrain.retrieval.rankers import FuseConfig, Weighted, open_ranker
from skilltrain.retrieval.rankings import SavedConfig, fuse
from skilltrain.tables import RANKINGS, write_table

ONE = [("a", 4.0), ("b", 2.0), ("c", 0.0)]
TWO = [("c", 0.9), ("a", 0.5)]  # finds no b, which gets .5 as well
QUERIES = [Query(f"q{i}", "text", "single", "test", "test") for i in (1, 2)]
POOL = [Skill(name, name, "", name) for name in "abcd"]

# One: 4, 2, 0 with mean 2 and deviation sqrt(8/3). Two, as a, b, c: .5, .5, .9, mean 19/30, deviation sqrt(8)/15.
Z = math.sqrt(1.5)
Z_TWO = (0.5 - 19 / 30) / (math.sqrt(8) / 15), (0.9 - 19 / 30) / (math.sqrt(8) / 15)


@pytest.mark.parametrize(
    ("method", "weights", "expected"),
    [
        ("z", (1, 1), {"a": Z + Z_TWO[0], "b": Z_TWO[0], "c": -Z + Z_TWO[1]}),
        ("z", (1, 2), {"c": -Z + 2 * Z_TWO[1], "a": Z + 2 * Z_TWO[0], "b": 2 * Z_TWO[0]}),
        ("rrf", (1, 1), {"a": 1 / 61 + 1 / 62, "c": 1 / 63 + 1 / 61, "b": 1 / 62}),
        ("rrf", (0, 1), {"c": 1 / 61, "a": 1 / 62, "b": 0}),
    ],
)
def test_fused_by_hand(method, weights, expected):
    fused = fuse([ONE, TWO], weights, method, 60)
    assert dict(fused) == pytest.approx(expected)
    assert [skill_id for skill_id, _ in fused] == sorted(expected, key=lambda skill_id: -expected[skill_id])


def test_a_leg_that_tells_nothing_apart_changes_nothing():
    flat = [("c", 0.1), ("b", 0.1), ("a", 0.1)]
    assert [skill_id for skill_id, _ in fuse([ONE, flat], (0.1, 10), "z", 60)] == ["a", "b", "c"]
    assert fuse([flat, flat], (1, 1), "z", 60) == [("c", 0.0), ("b", 0.0), ("a", 0.0)], "ties stand as found"
    assert fuse([ONE, []], (1, 1), "z", 60) == fuse([ONE], (1,), "z", 60)
    assert fuse([[], []], (1, 1), "z", 60) == []


def test_the_sum_with_the_ranker_before_leaves_the_rest_behind():
    class Fixed:
        def rank(self, queries, candidates, keep):
            return {"q": [("b", 3.0), ("a", 1.0), ("c", 0.0)]}

    found = Weighted(Fixed(), 10).rank([], {"q": [("a", 0.5), ("b", 0.25), ("c", 0.1)]}, 2)
    assert found == {"q": [("a", 6.0), ("b", 5.5), ("c", 4.5)]}


@pytest.fixture
def saved(tmp_path):
    """Rankings of q1 by two stages and of q2 by one."""
    rows = [("q1", "one", ONE), ("q1", "two", TWO), ("q2", "one", TWO)]
    table = [
        {"query_id": query_id, "skill_id": skill_id, "rank": rank, "score": score, "stage": stage}
        for query_id, stage, ranking in rows
        for rank, (skill_id, score) in enumerate(ranking, 1)
    ]
    return write_table(reversed(table), RANKINGS, tmp_path).parent


def test_saved_rankings_rank_and_order_candidates(saved, capsys):
    one = SavedConfig(rankings=saved, stage="one").open(POOL)
    assert one.rank(QUERIES, None, 2) == {"q1": ONE[:2], "q2": TWO}
    given = {"q1": [("d", 9.0), ("c", 8.0), ("b", 7.0)], "q2": []}
    assert one.rank(QUERIES, given, 5) == {"q1": [("b", 2.0), ("c", 0.0)], "q2": []}
    assert SavedConfig(rankings=saved, stage="two").open(POOL).rank(QUERIES, None, 9) == {"q1": TWO, "q2": []}
    assert "no ranking for 1 of 2 queries, first 'q2'; they score 0" in capsys.readouterr().err


def test_fused_rankers_find_the_union_and_order_candidates(saved):
    legs = [{"kind": "saved", "rankings": str(saved), "stage": stage} for stage in ("one", "two")]
    config = validate(FuseConfig, {"kind": "fuse", "of": legs, "method": "rrf", "weights": [1, 1]}, "test")
    ranker = open_ranker(config, POOL, {})
    expected = fuse([ONE, TWO], (1, 1), "rrf", 60)
    assert ranker.rank(QUERIES[:1], None, 2) == {"q1": expected[:2]}
    given = {"q1": [("b", 1.0), ("a", 1.0)]}
    assert ranker.rank(QUERIES[:1], given, 9) == {"q1": fuse([ONE[:2], TWO[1:]], (1, 1), "rrf", 60)}


@pytest.mark.parametrize(
    ("settings", "pool", "message"),
    [
        ({}, POOL, r"holds rankings of 2 stages \(give stage=… as one of one, two\)"),
        ({"stage": "three"}, POOL, "holds no rankings of stage 'three'"),
        ({"stage": "one"}, POOL[:2], "1 of its . ranked skills are not in the pool, first 'c'"),
    ],
)
def test_saved_rankings_that_do_not_fit_are_refused(saved, settings, pool, message):
    with pytest.raises(SkilltrainError, match=message):
        SavedConfig(rankings=saved, **settings).open(pool).rank(QUERIES, None, 9)


def test_what_cannot_be_fused_is_refused(saved, tmp_path):
    leg = {"kind": "lexical"}
    with pytest.raises(ValidationError, match="2 rankers are fused, and there are 3 weights"):
        FuseConfig.model_validate({"of": [leg, leg], "weights": [1, 2, 3]})
    with pytest.raises(ValidationError, match="at least 2 items"):
        FuseConfig.model_validate({"of": [leg]})
    with pytest.raises(SkilltrainError, match="no rankings table here"):
        SavedConfig(rankings=tmp_path / "nowhere").check()
