import math

import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.analysis import Outcomes, outcomes
from skilltrain.evaluation.results import SystemResult


def scored(name: str, hits: dict[str, float]) -> SystemResult:
    rows = {query_id: {"Hit@1": hit, "MRR@10": 0.5} for query_id, hit in hits.items()}
    return SystemResult(name=name, per_query=rows, rankings={})


ENCODER = scored("encoder", {"q1": 1, "q2": 0, "q3": 1, "q4": 0, "q5": 0})


def test_each_query_stands_in_one_cell():
    """Two fixed and one broken: of three tosses, all splits are as likely or likelier, p = 1."""
    reranked = scored("reranked", {"q5": 1, "q4": 0, "q3": 0, "q2": 1, "q1": 1})
    assert outcomes(ENCODER, reranked, "Hit@1") == Outcomes(
        baseline="encoder", system="reranked", measure="Hit@1",
        both=("q1",), fixed=("q2", "q5"), broken=("q3",), neither=("q4",), p=1.0,
    )  # fmt: skip


def test_table_9_of_skillrouter():
    """Of 150 queries 92 both, 19 fixed, 6 broken, 33 neither: 65.3% becomes 74.0%, exact p = .0146."""
    cells = {"both": (92, 1, 1), "fixed": (19, 0, 1), "broken": (6, 1, 0), "neither": (33, 0, 0)}
    before, after = (
        scored(name, {f"{cell}{i}": row[side] for cell, row in cells.items() for i in range(row[0])})
        for side, name in ((1, "SR-Emb"), (2, "SR-Rank"))
    )
    found = outcomes(before, after, "Hit@1")
    for cell, (num, _, _) in cells.items():
        assert getattr(found, cell) == tuple(f"{cell}{i}" for i in range(num))
    assert found.p == pytest.approx(0.0146, abs=5e-5)
    assert outcomes(after, before, "Hit@1").fixed == found.broken


def test_the_same_hits_have_p_one():
    found = outcomes(ENCODER, scored("copy", {q: row["Hit@1"] for q, row in ENCODER.per_query.items()}), "Hit@1")
    assert (found.both, found.fixed, found.broken, found.p) == (("q1", "q3"), (), (), 1.0)


def test_a_measure_between_0_and_1_is_refused():
    with pytest.raises(
        SkilltrainError, match=r"system encoder: .* need a measure that is 0 or 1, and MRR@10 is neither"
    ):
        outcomes(ENCODER, scored("other", dict.fromkeys(ENCODER.per_query, 1)), "MRR@10")


def test_other_queries_an_unknown_measure_and_nan_are_refused():
    with pytest.raises(SkilltrainError, match="system other: runs over different query sets compared: 4 queries"):
        outcomes(ENCODER, scored("other", {"q1": 1}), "Hit@1")
    other = scored("other", dict.fromkeys(ENCODER.per_query, 1))
    with pytest.raises(SkilltrainError, match="no value of measure 'Hit@7'"):
        outcomes(ENCODER, other, "Hit@7")
    with pytest.raises(SkilltrainError, match="system odd: 5 values are not finite"):
        outcomes(ENCODER, scored("odd", dict.fromkeys(ENCODER.per_query, math.nan)), "Hit@1")
