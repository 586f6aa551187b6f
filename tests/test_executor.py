"""The executor: what it passes on, what observers see, and that a router ranks as evaluated."""

import pytest

from skilltrain.config import validate
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.cascade import SystemConfig, run_systems
from skilltrain.retrieval.executor import OpenRankers, RankerRun, run_rankers, with_keeps
from skilltrain.serving.router import Router

TOPICS = ("pdf form", "chart table", "pod deploy", "pdf chart", "form table", "pdf pod")
SKILLS = [
    Skill(f"s{number}", topic, f"work on a {topic}", f"{topic} " * (number + 1))
    for number, topic in enumerate(TOPICS)
]
QUERIES = [Query("q1", "fill the pdf form", "", "", ""), Query("q2", "draw a chart", "", "", "")]
LEXICAL = {"kind": "lexical"}
NAMES = {"kind": "lexical", "fields": "name"}


def system(*rankers: dict) -> SystemConfig:
    return validate(SystemConfig, {"name": "x", "rankers": rankers}, "test")


def ids(rankings: Rankings) -> dict[str, list[str]]:
    """Return the skill ids of each ranking."""
    skill_ids = {}
    for query_id, ranking in rankings.items():
        skill_ids[query_id] = [skill_id for skill_id, _ in ranking]
    return skill_ids


@pytest.mark.parametrize(
    "rankers",
    [
        [LEXICAL],
        [LEXICAL | {"keep": 4}, NAMES],
        [{"kind": "fuse", "of": [LEXICAL, NAMES], "weights": [1, 0.5]}],
        [LEXICAL, {"kind": "fuse", "of": [LEXICAL, NAMES], "method": "rrf", "keep": 3}],
    ],
)
def test_router_ranks_as_was_evaluated(rankers):
    evaluated = run_systems([system(*rankers)], QUERIES, SKILLS, 20)["x"][-1].rankings

    router = Router(SKILLS, system(*rankers))

    for query in QUERIES:
        assert router.trace(query.text).ranking == evaluated[query.query_id]


def test_keeps_follow_later_rankers():
    filled = with_keeps(system(LEXICAL, NAMES | {"keep": 7}, NAMES).rankers, 3)

    assert [ranker.keep for ranker in filled] == [7, 7, 3]


def test_observer_sees_rankers_with_legs():
    rankers = with_keeps(system(LEXICAL, {"kind": "fuse", "of": [LEXICAL, NAMES]}).rankers, 4)
    runs: list[RankerRun] = []

    rankings = run_rankers(rankers, QUERIES, None, OpenRankers(SKILLS), runs.append)

    assert [len(run.by_leg) for run in runs] == [1, 2]
    assert runs[0].candidates is None
    assert runs[1].candidates == runs[0].rankings
    assert runs[1].rankings == rankings


def test_excluded_skill_is_replaced():
    rankers = with_keeps(system(LEXICAL).rankers, 3)
    pool = OpenRankers(SKILLS)
    whole = ids(run_rankers(with_keeps(system(LEXICAL).rankers, 6), QUERIES, None, pool))["q1"]

    shorter = ids(run_rankers(rankers, QUERIES, None, pool, excluded_ids={whole[0]}))["q1"]

    assert shorter == whole[1:4]


def test_skills_without_common_term_are_left_out():
    rankers = with_keeps(system(LEXICAL).rankers, 6)

    rankings = ids(run_rankers(rankers, QUERIES, None, OpenRankers(SKILLS)))

    assert set(rankings["q1"]) == {"s0", "s3", "s4", "s5"}
    assert set(rankings["q2"]) == {"s1", "s3"}


def test_candidates_without_common_term_stay():
    rankers = with_keeps(system(LEXICAL).rankers, 6)
    candidates = {query.query_id: [("s2", 1.0), ("s1", 0.5)] for query in QUERIES}

    rankings = run_rankers(rankers, QUERIES, candidates, OpenRankers(SKILLS))

    assert rankings["q1"] == [("s2", 0.0), ("s1", 0.0)]


def test_fusion_has_matches_of_any_leg(monkeypatch):
    rankers = with_keeps(system({"kind": "fuse", "of": [LEXICAL, NAMES]}).rankers, 6)
    matches = ids(run_rankers(rankers, QUERIES, None, OpenRankers(SKILLS)))
    monkeypatch.setattr("skilltrain.retrieval.lexical.LexicalConfig.matches", lambda _, r: r)

    unlimited = ids(run_rankers(rankers, QUERIES, None, OpenRankers(SKILLS)))

    assert set(matches["q2"]) == {"s1", "s3"}
    assert unlimited["q2"][:2] == matches["q2"]
    assert len(unlimited["q2"]) == len(SKILLS)


def test_later_rankers_accept_empty_rankings():
    nothing = [Query("q3", "zebra", "", "", "")]
    rankers = with_keeps(system(LEXICAL, NAMES).rankers, 6)

    assert run_rankers(rankers, nothing, None, OpenRankers(SKILLS)) == {"q3": []}
