"""Systems run rankers in order, share models, fuse rankings and measure latency."""

import math
from types import SimpleNamespace

import pytest

from benchmark_folders import write_rankings
from faults import raises
from skilltrain.config import validate
from skilltrain.records import Query, Skill
from skilltrain.retrieval import executor, rerank
from skilltrain.retrieval.cascade import Cascade, SystemConfig, check_systems, run_systems
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.executor import OpenRankers, run_rankers
from skilltrain.retrieval.fusion import FuseConfig, fuse
from skilltrain.retrieval.lexical import LexicalConfig
from skilltrain.retrieval.rankers import RankerConfig
from skilltrain.retrieval.rankings import SavedConfig, rankings_table
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.terminal import console
from tiny_models import WORDS

SKILLS = [
    Skill(f"s{i}", f"name {i}", f"{word} task", f"find the {word} in {WORDS[-i - 1]} files")
    for i, word in enumerate(WORDS[2:14])
]
QUERIES = [
    Query("q1", "deploy pods and review the chart", "single", "test", "test"),
    Query("q2", "table of pdf text", "single", "test", "test"),
]
LEXICAL = LexicalConfig()


def system(name, *rankers):
    return SystemConfig(name=name, rankers=rankers)


BM25 = system("bm25", LEXICAL)


@pytest.fixture
def encoder(model_folders):
    return DenseConfig(source=str(model_folders["bert"]), precision="float32")


@pytest.fixture
def reranker(model_folders):
    return RerankConfig(source=str(model_folders["bert_reranker"]), precision="float32")


def with_keep(ranker, keep, **changed):
    """Copy the settings of a ranker with another `keep`."""
    return ranker.model_copy(update={"keep": keep, **changed})


def rank(systems, queries=QUERIES, skills=SKILLS, depth=10):
    """Return the rankings of each system's last ranker."""
    stages_by_system = run_systems(systems, queries, skills, depth)
    return {name: stages[-1].rankings for name, stages in stages_by_system.items()}


def ids(ranking):
    return [skill_id for skill_id, _ in ranking]


def test_ties_keep_the_order_of_the_pool(encoder, reranker):
    twins = [Skill(f"t{i}", "same", "same text", "the same body of data") for i in (3, 1, 2)]
    systems = [
        BM25,
        system("dense", encoder),
        system("both", FuseConfig(of=(LEXICAL, encoder)), reranker),
    ]

    rankings = rank(systems, [Query("q", "same data", "", "", "")], twins, 3)

    for by_query in rankings.values():
        assert ids(by_query["q"]) == ["t3", "t1", "t2"]


@pytest.fixture
def scored_pairs(monkeypatch):
    """The pairs that rerankers score, in order."""
    scored = []
    run_micro_batches = rerank.run_micro_batches

    def record_pairs(model, pairs, groups):
        scored.extend(pairs)
        return run_micro_batches(model, pairs, groups)

    monkeypatch.setattr(rerank, "run_micro_batches", record_pairs)
    return scored


def test_equal_skills_are_scored_once(reranker, scored_pairs):
    twins = [Skill(f"t{i}", "same", "same text", "the same body of data") for i in range(4)]
    systems = [system(f"of {keep}", LEXICAL, with_keep(reranker, keep)) for keep in (2, 4)]

    rankings = rank(systems, [Query("q", "same data", "", "", "")], twins, 4)

    assert len(scored_pairs) == 1
    assert len({score for _, score in rankings["of 4"]["q"]}) == 1


def test_reranker_reorders_only_the_top(encoder, reranker):
    first = FuseConfig(of=(LEXICAL, encoder))
    systems = [system("first", first), system("both", first, with_keep(reranker, 5))]

    rankings = rank(systems)

    is_changed = []
    for query_id, ranking in rankings["both"].items():
        first_ids = ids(rankings["first"][query_id])
        skill_ids = ids(ranking)
        assert len(skill_ids) == 10
        assert sorted(skill_ids[:5]) == sorted(first_ids[:5])
        assert skill_ids[5:] == first_ids[5:]
        scores = [score for _, score in ranking]
        assert scores == sorted(scores, reverse=True)
        assert scores[5] == pytest.approx(scores[4] - 1), "the rest is one below the top"
        is_changed.append(skill_ids != first_ids)
    assert any(is_changed)


@pytest.mark.parametrize("first_kind", ["lexical", "dense"])
def test_second_ranker_orders_candidates_of_first(encoder, first_kind):
    """It orders them as in its ranking of the whole pool."""
    first, second = (LEXICAL, encoder) if first_kind == "lexical" else (encoder, LEXICAL)
    whole_pool = rank([system("first", first), system("second", second)], depth=len(SKILLS))

    rankings = rank([system("two", with_keep(first, 5), second)])["two"]

    for query_id, ranking in rankings.items():
        candidate_ids = ids(whole_pool["first"][query_id])[:5]
        assert set(ids(ranking)) == set(candidate_ids)
        scores = dict(whole_pool["second"][query_id])
        # A candidate without a common term is not in the lexical ranking of the pool.
        candidate_scores = [scores.get(skill_id, 0.0) for skill_id in candidate_ids]
        expected = sorted(candidate_scores, reverse=True)
        assert [score for _, score in ranking] == pytest.approx(expected)


def test_depth_does_not_limit_candidates(encoder, reranker):
    plain = system("first", encoder)
    both = system("both", encoder, with_keep(reranker, 12))
    deep = rank([both], depth=12)["both"]

    for systems in ([plain, both], [both, plain]):
        shallow = rank(systems, depth=3)

        for query_id, ranking in deep.items():
            assert shallow["both"][query_id] == ranking[:3]
            assert len(shallow["first"][query_id]) == 3


def record_calls(monkeypatch, owner, name, calls):
    """Append the name of a function to `calls` at each call."""
    function = getattr(owner, name)

    def record(*arguments):
        calls.append(name)
        return function(*arguments)

    monkeypatch.setattr(owner, name, record)


def test_systems_share_models(encoder, reranker, scored_pairs, monkeypatch):
    opened = []
    record_calls(monkeypatch, DenseConfig, "open", opened)
    record_calls(monkeypatch, rerank, "load_reranker", opened)
    systems = [
        system("of 3", encoder, with_keep(reranker, 3)),
        system("of 8", encoder, with_keep(reranker, 8)),
        system("sum of 8", encoder, with_keep(reranker, 8, first_weight=5)),
        system("fused", FuseConfig(of=(LEXICAL, encoder))),
        system("nd of 3", encoder, with_keep(reranker, 3, fields="nd")),
        system("short", with_keep(encoder, None, max_tokens=8)),
    ]

    rankings = rank(systems)

    # Other settings ("short" texts, "nd" without bodies) need another model.
    assert sorted(opened) == ["load_reranker", "load_reranker", "open", "open"]
    assert len(scored_pairs) == (8 + 3) * len(QUERIES)
    for config in systems:
        expected = rank([config])[config.name]
        for query_id, ranking in rankings[config.name].items():
            assert ids(ranking) == ids(expected[query_id])
            assert dict(ranking) == pytest.approx(dict(expected[query_id]), abs=1e-5)


def test_every_stage_keeps_its_rankings(encoder, reranker):
    rankers = with_keep(encoder, 6), with_keep(LEXICAL, 4), with_keep(reranker, 2)

    stages = run_systems([system("all", *rankers)], QUERIES, SKILLS, 3)["all"]

    assert [stage.name for stage in stages] == ["all/1 dense", "all/2 lexical", "all"]
    assert [len(stage.rankings["q1"]) for stage in stages] == [6, 4, 3]
    assert all(stage.seconds > 0 and stage.latencies == () for stage in stages)

    # The table has one row for each ranked skill.
    rows = iter(rankings_table({stage.name: stage.rankings for stage in stages}).to_pylist())
    for stage in stages:
        for query_id, ranking in stage.rankings.items():
            for rank, (skill_id, score) in enumerate(ranking, 1):
                assert tuple(next(rows).values()) == (query_id, skill_id, rank, score, stage.name)


class TrainedReranker:
    """Scores a skill with the number in its id plus `shift`. Counts its calls."""

    def __init__(self):
        self.shift = 0.0
        self.num_calls = 0

    def rank(self, queries, candidates, keep):
        self.num_calls += 1
        rankings = {}
        for query_id, ranking in candidates.items():
            scored = [
                (skill_id, float(skill_id[1:]) + self.shift) for skill_id, _ in ranking[:keep]
            ]
            rankings[query_id] = sorted(scored, key=lambda pair: -pair[1])
        return rankings


def test_only_trained_model_ranks_again(monkeypatch):
    opened = []
    ranker = RankerConfig.ranker
    monkeypatch.setattr(
        RankerConfig, "ranker", lambda self, *rest: opened.append(self.kind) or ranker(self, *rest)
    )
    trained = TrainedReranker()
    cascade = Cascade(QUERIES, SKILLS, 3)
    cascade.pool.opened["self"] = trained
    both = system("trained", with_keep(LEXICAL, 5), RerankConfig(source="self", keep=5))

    first = cascade.run(both)[-1].rankings["q1"]
    trained.shift = 100.0
    second = cascade.run(both)[-1].rankings["q1"]

    assert len(first) == 3
    assert second == [(skill_id, score + 100) for skill_id, score in first]
    assert trained.num_calls == 2
    assert opened == ["lexical", "rerank", "rerank"]


def test_source_self_needs_a_training_run():
    config = system("trained", with_keep(LEXICAL, 5), RerankConfig(source="self", keep=5))

    check_systems([config], has_model=True)
    with raises("conflicting-settings"):
        check_systems([config])


# Fused and saved rankings, by hand --------------------------------------------

FIRST = [("a", 4.0), ("b", 2.0), ("c", 0.0)]
SECOND = [("c", 0.9), ("a", 0.5)]  # b is missing and gets the lowest score, 0.5
POOL = [Skill(name, name, "", name) for name in "abcd"]
# z-scores of FIRST: mean 2, deviation sqrt(8/3). Of SECOND: mean 19/30, deviation sqrt(8)/15.
FIRST_Z = math.sqrt(1.5)
SECOND_HIGH_Z = (0.9 - 19 / 30) / (math.sqrt(8) / 15)
SECOND_LOW_Z = (0.5 - 19 / 30) / (math.sqrt(8) / 15)


@pytest.mark.parametrize(
    ("method", "weights", "expected"),
    [
        (
            "z",
            (1, 2),
            {
                "c": -FIRST_Z + 2 * SECOND_HIGH_Z,
                "a": FIRST_Z + 2 * SECOND_LOW_Z,
                "b": 2 * SECOND_LOW_Z,
            },
        ),
        ("rrf", (1, 1), {"a": 1 / 61 + 1 / 62, "c": 1 / 63 + 1 / 61, "b": 1 / 62}),
        ("rrf", (0, 1), {"c": 1 / 61, "a": 1 / 62, "b": 0}),
    ],
)
def test_fused_scores_equal_hand_calculation(method, weights, expected):
    fused = fuse([FIRST, SECOND], weights, method)

    assert dict(fused) == pytest.approx(expected)
    assert ids(fused) == sorted(expected, key=lambda skill_id: -expected[skill_id])


def test_equal_scores_change_no_fused_ranking():
    flat = [("c", 0.1), ("b", 0.1), ("a", 0.1)]

    assert ids(fuse([FIRST, flat], (0.1, 10), "z")) == ["a", "b", "c"]
    assert fuse([flat, flat], (1, 1), "z") == [("c", 0.0), ("b", 0.0), ("a", 0.0)]


def test_empty_ranking_changes_no_fused_ranking():
    assert fuse([FIRST, []], (1, 1), "z") == fuse([FIRST], (1,), "z")
    assert fuse([[], []], (1, 1), "z") == []


@pytest.mark.parametrize("first_weight", [0, 1])
def test_query_without_candidates_has_no_ranking(encoder, reranker, first_weight):
    nothing = Query("q3", "zebra", "single", "test", "test")
    weighted = with_keep(reranker, 5, first_weight=first_weight)
    systems = [system("rerank", LEXICAL, weighted), system("dense", LEXICAL, encoder)]

    rankings = rank(systems, queries=[*QUERIES, nothing])

    for name in ("rerank", "dense"):
        assert rankings[name]["q1"]
        assert rankings[name]["q3"] == []


def test_first_weight_adds_first_scores():
    first = [("a", 0.5), ("b", 0.25), ("c", 0.1)]

    ranking = rerank.reorder(first, 2, {"b": 3.0, "a": 1.0, "c": 9.0}, previous_weight=10)

    # a: 10 * 0.5 + 1. b: 10 * 0.25 + 3. c is not among the two best and follows one below.
    assert ranking == [("a", 6.0), ("b", 5.5), ("c", 4.5)]


@pytest.fixture
def saved(tmp_path):
    """The folder of rankings: of q1 by two stages, of q2 by the first one."""
    return write_rankings(
        tmp_path, {"first": {"q1": FIRST, "q2": SECOND}, "second": {"q1": SECOND}}
    )


def test_saved_rankings_rank_the_pool(saved):
    ranker = SavedConfig(rankings=saved, stage="first").ranker(POOL, {})

    assert ranker.rank(QUERIES, None, 2) == {"q1": FIRST[:2], "q2": SECOND}


def test_saved_rankings_order_candidates(saved):
    ranker = SavedConfig(rankings=saved, stage="first").ranker(POOL, {})
    candidates = {"q1": [("d", 9.0), ("c", 8.0), ("b", 7.0)], "q2": []}

    rankings = ranker.rank(QUERIES, candidates, 5)

    assert rankings == {"q1": [("b", 2.0), ("c", 0.0)], "q2": []}


def test_query_without_saved_ranking_is_named(saved, capsys):
    ranker = SavedConfig(rankings=saved, stage="second").ranker(POOL, {})

    assert ranker.rank(QUERIES, None, 9) == {"q1": SECOND, "q2": []}
    assert "no ranking for 1 of 2 queries, first 'q2'; they score 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rrf_k", "candidates", "top_k", "expected"),
    [
        (60, None, 2, fuse([FIRST, SECOND], (1, 1), "rrf")[:2]),
        (0, None, 2, fuse([FIRST, SECOND], (1, 1), "rrf", 0)[:2]),
        (
            60,
            {"q1": [("b", 1.0), ("a", 1.0)]},
            9,
            fuse([FIRST[:2], SECOND[1:]], (1, 1), "rrf"),
        ),
    ],
)
def test_saved_rankings_are_fused(saved, rrf_k, candidates, top_k, expected):
    legs = [
        {"kind": "saved", "rankings": str(saved), "stage": stage} for stage in ("first", "second")
    ]
    values = {
        "kind": "fuse",
        "of": legs,
        "method": "rrf",
        "weights": [1, 1],
        "rrf_k": rrf_k,
        "keep": top_k,
    }
    config = validate(FuseConfig, values, "test")

    rankings = run_rankers([config], QUERIES[:1], candidates, OpenRankers(POOL))

    assert rankings == {"q1": expected}


# What is refused --------------------------------------------------------------

GONE = {"kind": "dense", "source": "./nothing"}
LEG = {"kind": "lexical"}
LAST = {"kind": "rerank", "source": "x"}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"encoder": {"source": "e"}, "num_candidates": 8}, "unknown-setting"),
        ({"rankers": []}, "invalid-setting"),
        ({"rankers": [LAST]}, "invalid-setting"),
        ({"rankers": [{"kind": "fuse", "of": [LEG, LAST]}]}, "invalid-setting"),
        ({"rankers": [{"kind": "fuse", "of": [LEG] * 2, "weights": [1] * 3}]}, "invalid-setting"),
        ({"rankers": [{"kind": "fuse", "of": [LEG] * 2, "weights": [0, 0]}]}, "invalid-setting"),
        ({"rankers": [{"kind": "fuse", "of": [LEG]}]}, "invalid-setting"),
        ({"rankers": [GONE]}, "model-not-found"),
        ({"rankers": [LEG, LAST | {"source": "package:nobody"}]}, "missing-package"),
        ({"rankers": [LEG, {"kind": "fuse", "of": [LEG, GONE]}]}, "model-not-found"),
        ({"rankers": [LEG, {"kind": "dense", "source": "bert_reranker"}]}, "wrong-model-kind"),
        ({"rankers": [{"kind": "saved", "rankings": "nowhere"}]}, "missing-table"),
        ({"rankers": [LEG], "name": "bm25"}, "repeated-name"),
    ],
)
def test_wrong_system_is_refused_first(model_folders, monkeypatch, values, code):
    """It is refused before another system ranks."""
    monkeypatch.setattr(RankerConfig, "ranker", lambda *_: pytest.fail("a ranker was opened"))
    monkeypatch.chdir(model_folders["bert_reranker"].parent)

    with raises(code):
        rank([BM25, validate(SystemConfig, {"name": "wrong"} | values, "test")])


@pytest.mark.parametrize(
    ("settings", "pool", "code"),
    [
        ({}, POOL, "ranking-stage"),
        ({"stage": "three"}, POOL, "ranking-stage"),
        ({"stage": "first"}, POOL[:2], "unknown-skill"),
    ],
)
def test_unfit_saved_rankings_are_refused(saved, settings, pool, code):
    with raises(code):
        SavedConfig(rankings=saved, **settings).ranker(pool, {}).rank(QUERIES, None, 9)


def test_empty_pool_is_refused():
    with raises("empty-pool"):
        rank([BM25], skills=[])


def test_missing_queries_are_refused():
    with raises("nothing-to-score"):
        rank([BM25], [])


def test_score_that_is_no_number_is_refused(monkeypatch):
    class BrokenRanker:
        def rank(self, queries, candidates, keep):
            return {"q1": [("s1", float("nan"))], "q2": []}

    monkeypatch.setattr(LexicalConfig, "over", lambda self, skills: BrokenRanker())

    with raises("not-a-number"):
        rank([BM25])


# Latency ----------------------------------------------------------------------


@pytest.mark.parametrize(("num_timed", "num_latencies"), [(1, 1), (99, len(QUERIES))])
def test_every_ranker_is_timed(encoder, reranker, tmp_path, num_timed, num_latencies):
    """Timing uses no cached vector and no score of another system."""
    cached = with_keep(encoder, None, cache=tmp_path / "vectors")
    systems = [
        system("dense", cached, with_keep(reranker, 2)),
        system("lexical", LEXICAL, with_keep(reranker, 2)),
    ]
    rankings = rank(systems)

    timed = run_systems(systems, QUERIES, SKILLS, 10, num_timed)

    for name, stages in timed.items():
        for stage in stages:
            assert len(stage.latencies) == num_latencies
            assert all(seconds > 1e-6 for seconds in stage.latencies)
        for query_id, ranking in stages[-1].rankings.items():
            assert ids(ranking) == ids(rankings[name][query_id])


def test_latency_leaves_out_warm_up(monkeypatch):
    was_quiet = []
    all_query_ids = []
    now = 0.0  # of a clock that only the ranker moves

    class SlowAtFirst:
        def rank(self, queries, candidates, keep):
            nonlocal now
            was_quiet.append(console.quiet)
            query_ids = [query.query_id for query in queries]
            all_query_ids.extend(query_ids)
            is_warm_up = len(was_quiet) == 2  # after the run over all queries
            now += 16 if is_warm_up else 2
            return {query_id: [("s1", 1.0)] for query_id in query_ids}

    monkeypatch.setattr(LexicalConfig, "over", lambda self, skills: SlowAtFirst())
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=lambda: now))

    (stage,) = run_systems([BM25], QUERIES, SKILLS, 1, num_timed=2)["bm25"]

    assert stage.latencies == (2, 2)
    assert was_quiet == [False, True, True, True], "no progress bar is timed"
    assert not console.quiet
    assert len(set(all_query_ids)) == 3 + len(QUERIES), "timed queries have new ids"
