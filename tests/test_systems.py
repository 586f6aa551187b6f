"""Systems: lists of rankers that share what they have in common, fused and saved rankings, latency, what is refused."""

import math
import time

import pytest

from benchmark_folders import write_rankings
from faults import raises
from skilltrain.config import validate
from skilltrain.records import Query, Skill
from skilltrain.retrieval import rerank
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


def kept(ranker, keep, **changed):
    return ranker.model_copy(update={"keep": keep, **changed})


def rank(systems, queries=QUERIES, skills=SKILLS, depth=10):
    """System → the rankings of its last ranker."""
    return {
        name: stages[-1].rankings
        for name, stages in run_systems(systems, queries, skills, depth).items()
    }


def ids(ranking):
    return [skill_id for skill_id, _ in ranking]


def test_equal_scores_stand_in_the_order_of_the_pool(encoder, reranker):
    twins = [Skill(f"t{i}", "same", "same text", "the same body of data") for i in (3, 1, 2)]
    systems = [
        BM25,
        system("dense", encoder),
        system("both", FuseConfig(of=(LEXICAL, encoder)), reranker),
    ]
    for ranking in rank(systems, [Query("q", "same data", "", "", "")], twins, 3).values():
        assert ids(ranking["q"]) == ["t3", "t1", "t2"]


@pytest.fixture
def scored_pairs(monkeypatch):
    """The pairs that rerankers really score, in order."""
    pairs, run_micro_batches = [], rerank.run_micro_batches

    def counting(model, some, groups):
        pairs.extend(some)
        return run_micro_batches(model, some, groups)

    monkeypatch.setattr(rerank, "run_micro_batches", counting)
    return pairs


def test_equal_skills_are_scored_once(reranker, scored_pairs):
    twins = [Skill(f"t{i}", "same", "same text", "the same body of data") for i in range(4)]
    systems = [system(f"of {keep}", LEXICAL, kept(reranker, keep)) for keep in (2, 4)]

    found = rank(systems, [Query("q", "same data", "", "", "")], twins, 4)

    assert len(scored_pairs) == 1
    assert len({score for _, score in found["of 4"]["q"]}) == 1


def test_the_top_is_reranked_and_the_rest_follows_as_it_was(encoder, reranker):
    first = FuseConfig(of=(LEXICAL, encoder))
    found = rank([system("first", first), system("both", first, kept(reranker, 5))])
    for query_id in ("q1", "q2"):
        before, after = found["first"][query_id], found["both"][query_id]
        assert len(before) == len(after) == 10
        assert sorted(ids(after)[:5]) == sorted(ids(before)[:5])
        assert ids(after)[5:] == ids(before)[5:]
        scores = [score for _, score in after]
        assert scores == sorted(scores, reverse=True) and scores[5] == pytest.approx(scores[4] - 1)
    assert any(
        ids(found["both"][query_id]) != ids(found["first"][query_id]) for query_id in found["both"]
    )


def test_every_ranker_can_order_the_candidates_of_another(encoder):
    """The second ranker's order is that of the same ranker over the whole pool, left to the candidates."""
    whole = rank([system("lexical", LEXICAL), system("dense", encoder)], depth=len(SKILLS))
    for first, second in ((LEXICAL, encoder), (encoder, LEXICAL)):
        found = rank([system("two", kept(first, 5), second)])["two"]
        for query_id, ranking in found.items():
            top = ids(whole[first.kind][query_id])[:5]
            assert set(ids(ranking)) == set(top)
            scores = dict(whole[second.kind][query_id])
            assert [score for _, score in ranking] == pytest.approx(
                sorted((scores[i] for i in top), reverse=True)
            )


def test_the_reranker_sees_its_candidates_though_less_is_asked_for(encoder, reranker):
    plain, both = system("first", encoder), system("both", encoder, kept(reranker, 12))
    deep = rank([both], depth=12)["both"]
    for systems in ([plain, both], [both, plain]):
        shallow = rank(systems, depth=3)
        assert all(shallow["both"][query_id] == deep[query_id][:3] for query_id in deep)
        assert all(len(shallow["first"][query_id]) == 3 for query_id in deep)


def test_what_systems_share_is_opened_once_and_they_rank_as_each_does_alone(
    encoder, reranker, scored_pairs, monkeypatch
):
    opened = []
    open_dense, load_reranker = DenseConfig.open, rerank.load_reranker
    monkeypatch.setattr(
        DenseConfig, "open", lambda self, models: opened.append("dense") or open_dense(self, models)
    )
    monkeypatch.setattr(
        rerank, "load_reranker", lambda *how: opened.append("rerank") or load_reranker(*how)
    )
    systems = [
        system("of 3", encoder, kept(reranker, 3)),
        system("of 8", encoder, kept(reranker, 8)),
        system("sum of 8", encoder, kept(reranker, 8, first_weight=5)),
        system("fused", FuseConfig(of=(LEXICAL, encoder))),
        system("nd of 3", encoder, kept(reranker, 3, fields="nd")),
        system("short", kept(encoder, None, max_tokens=8)),
    ]
    together = rank(systems)
    assert sorted(opened) == ["dense", "dense", "rerank", "rerank"], "short texts; no bodies"
    assert len(scored_pairs) == (8 + 3) * len(QUERIES)
    for one in systems:
        alone = rank([one])[one.name]
        for query_id, ranking in together[one.name].items():
            assert ids(ranking) == ids(alone[query_id])
            assert dict(ranking) == pytest.approx(dict(alone[query_id]), abs=1e-5)


def test_every_ranking_on_the_way_is_kept(encoder, reranker):
    cascade = system("all", kept(encoder, 6), kept(LEXICAL, 4), kept(reranker, 2))
    stages = run_systems([cascade], QUERIES, SKILLS, 3)["all"]
    assert [stage.name for stage in stages] == ["all/1 dense", "all/2 lexical", "all"]
    assert [len(stage.rankings["q1"]) for stage in stages] == [6, 4, 3]
    assert all(stage.seconds > 0 and stage.alone == () for stage in stages)
    rows = iter(rankings_table({stage.name: stage.rankings for stage in stages}).to_pylist())
    for stage in stages:
        for query_id, ranking in stage.rankings.items():
            for rank, (skill_id, score) in enumerate(ranking, 1):
                assert tuple(next(rows).values()) == (query_id, skill_id, rank, score, stage.name)


class Own:
    """Ranks skills by the number in their id, plus `shift`; counts how often it is asked."""

    def __init__(self):
        self.shift, self.num_asked = 0.0, 0

    def rank(self, queries, candidates, keep):
        self.num_asked += 1
        return {
            query_id: sorted(
                ((i, float(i[1:]) + self.shift) for i, _ in ranking[:keep]),
                key=lambda pair: -pair[1],
            )
            for query_id, ranking in candidates.items()
        }


def test_the_model_in_training_is_asked_anew_and_what_stands_before_it_is_not(monkeypatch):
    asked = []
    opened = RankerConfig.ranker
    monkeypatch.setattr(
        RankerConfig, "ranker", lambda self, *rest: asked.append(self.kind) or opened(self, *rest)
    )
    own = Own()
    cascade = Cascade(QUERIES, SKILLS, 3)
    cascade.pool.opened["self"] = own
    both = system("own", kept(LEXICAL, 5), RerankConfig(source="self", keep=5))
    check_systems([both], has_own=True)
    first = cascade.run(both)[-1].rankings["q1"]
    own.shift = 100.0
    second = cascade.run(both)[-1].rankings["q1"]
    assert [(skill_id, score + 100) for skill_id, score in first] == second and len(first) == 3
    assert own.num_asked == 2 and asked == ["lexical", "rerank", "rerank"]
    with raises("conflicting-settings"):
        check_systems([both])


# Fused and saved rankings, by hand --------------------------------------------

ONE = [("a", 4.0), ("b", 2.0), ("c", 0.0)]
TWO = [("c", 0.9), ("a", 0.5)]  # finds no b, which gets .5 as well
POOL = [Skill(name, name, "", name) for name in "abcd"]
# One: 4, 2, 0 with mean 2 and deviation sqrt(8/3). Two, as a, b, c: .5, .5, .9, mean 19/30, deviation sqrt(8)/15.
Z = math.sqrt(1.5)
Z_TWO = (0.5 - 19 / 30) / (math.sqrt(8) / 15), (0.9 - 19 / 30) / (math.sqrt(8) / 15)


@pytest.mark.parametrize(
    ("method", "weights", "expected"),
    [
        ("z", (1, 2), {"c": -Z + 2 * Z_TWO[1], "a": Z + 2 * Z_TWO[0], "b": 2 * Z_TWO[0]}),
        ("rrf", (1, 1), {"a": 1 / 61 + 1 / 62, "c": 1 / 63 + 1 / 61, "b": 1 / 62}),
        ("rrf", (0, 1), {"c": 1 / 61, "a": 1 / 62, "b": 0}),
    ],
)
def test_fused_by_hand(method, weights, expected):
    fused = fuse([ONE, TWO], weights, method)
    assert dict(fused) == pytest.approx(expected)
    assert ids(fused) == sorted(expected, key=lambda skill_id: -expected[skill_id])


def test_a_leg_that_tells_nothing_apart_changes_nothing():
    flat = [("c", 0.1), ("b", 0.1), ("a", 0.1)]
    assert ids(fuse([ONE, flat], (0.1, 10), "z")) == ["a", "b", "c"]
    assert fuse([flat, flat], (1, 1), "z") == [("c", 0.0), ("b", 0.0), ("a", 0.0)], (
        "ties stand as found"
    )
    assert fuse([ONE, []], (1, 1), "z") == fuse([ONE], (1,), "z")
    assert fuse([[], []], (1, 1), "z") == []


def test_the_sum_with_the_ranker_before_leaves_the_rest_behind():
    before = [("a", 0.5), ("b", 0.25), ("c", 0.1)]
    found = rerank.reorder(before, 2, {"b": 3.0, "a": 1.0, "c": 9.0}, first_weight=10)
    assert found == [("a", 6.0), ("b", 5.5), ("c", 4.5)]


@pytest.fixture
def saved(tmp_path):
    """Rankings of q1 by two stages and of q2 by one."""
    return write_rankings(tmp_path, {"one": {"q1": ONE, "q2": TWO}, "two": {"q1": TWO}})


def test_saved_rankings_rank_order_candidates_and_are_fused(saved, capsys):
    one, two = (
        SavedConfig(rankings=saved, stage=stage).ranker(POOL, {}) for stage in ("one", "two")
    )
    assert one.rank(QUERIES, None, 2) == {"q1": ONE[:2], "q2": TWO}
    given = {"q1": [("d", 9.0), ("c", 8.0), ("b", 7.0)], "q2": []}
    assert one.rank(QUERIES, given, 5) == {"q1": [("b", 2.0), ("c", 0.0)], "q2": []}
    assert two.rank(QUERIES, None, 9) == {"q1": TWO, "q2": []}
    assert "no ranking for 1 of 2 queries, first 'q2'; they score 0" in capsys.readouterr().err
    legs = [{"kind": "saved", "rankings": str(saved), "stage": stage} for stage in ("one", "two")]
    config = validate(
        FuseConfig, {"kind": "fuse", "of": legs, "method": "rrf", "weights": [1, 1]}, "test"
    )
    flat = config.model_copy(update={"rrf_k": 0})
    given = {"q1": [("b", 1.0), ("a", 1.0)]}
    for fused, candidates, top_k, expected in (
        (config, None, 2, fuse([ONE, TWO], (1, 1), "rrf")[:2]),
        (flat, None, 2, fuse([ONE, TWO], (1, 1), "rrf", 0)[:2]),
        (config, given, 9, fuse([ONE[:2], TWO[1:]], (1, 1), "rrf")),
    ):
        pool = OpenRankers(POOL)
        assert run_rankers(
            [fused.model_copy(update={"keep": top_k})], QUERIES[:1], candidates, pool
        ) == {"q1": expected}


# What is refused --------------------------------------------------------------

GONE, LEG, LAST = (
    {"kind": "dense", "source": "./nothing"},
    {"kind": "lexical"},
    {"kind": "rerank", "source": "x"},
)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"encoder": {"source": "e"}, "num_candidates": 8}, "unknown-setting"),
        ({"rankers": []}, "invalid-setting"),
        ({"rankers": [LAST]}, "invalid-setting"),
        ({"rankers": [{"kind": "fuse", "of": [LEG, LAST]}]}, "invalid-setting"),
        ({"rankers": [{"kind": "fuse", "of": [LEG] * 2, "weights": [1] * 3}]}, "invalid-setting"),
        ({"rankers": [{"kind": "fuse", "of": [LEG]}]}, "invalid-setting"),
        ({"rankers": [GONE]}, "model-not-found"),
        ({"rankers": [LEG, LAST | {"source": "package:nobody"}]}, "missing-package"),
        ({"rankers": [LEG, {"kind": "fuse", "of": [LEG, GONE]}]}, "model-not-found"),
        ({"rankers": [LEG, {"kind": "dense", "source": "bert_reranker"}]}, "wrong-model-kind"),
        ({"rankers": [{"kind": "saved", "rankings": "nowhere"}]}, "missing-table"),
        ({"rankers": [LEG], "name": "bm25"}, "repeated-name"),
    ],
)
def test_systems_that_make_no_sense_are_refused_before_another_ranks(
    model_folders, monkeypatch, values, code
):
    monkeypatch.setattr(RankerConfig, "ranker", lambda *_: pytest.fail("work had begun"))
    monkeypatch.chdir(model_folders["bert_reranker"].parent)
    with raises(code):
        rank([BM25, validate(SystemConfig, {"name": "one"} | values, "test")])


@pytest.mark.parametrize(
    ("settings", "pool", "code"),
    [
        ({}, POOL, "ranking-stage"),
        ({"stage": "three"}, POOL, "ranking-stage"),
        ({"stage": "one"}, POOL[:2], "unknown-skill"),
    ],
)
def test_saved_rankings_that_do_not_fit_are_refused(saved, settings, pool, code):
    with raises(code):
        SavedConfig(rankings=saved, **settings).ranker(pool, {}).rank(QUERIES, None, 9)


def test_nothing_to_rank_and_scores_that_are_no_numbers_are_refused(monkeypatch):
    class Bad:
        def rank(self, queries, candidates, keep):
            return {"q1": [("s1", float("nan"))], "q2": []}

    with raises("empty-pool"):
        rank([BM25], skills=[])
    with raises("nothing-to-score"):
        rank([BM25], [])
    monkeypatch.setattr(LexicalConfig, "over", lambda self, skills: Bad())
    with raises("not-a-number"):
        rank([BM25])


# Latency ----------------------------------------------------------------------


def test_every_ranker_is_timed_alone_with_the_warm_up_left_out(encoder, reranker, tmp_path):
    """Each query is encoded and scored anew, though a cache holds vectors and an earlier system's scores are known."""
    cached = kept(encoder, None, cache=tmp_path / "vectors")
    systems = [system("one", cached, kept(reranker, 2)), system("two", LEXICAL, kept(reranker, 2))]
    plain = rank(systems)
    for num_timed, num in ((1, 1), (99, len(QUERIES))):
        for name, stages in run_systems(systems, QUERIES, SKILLS, 10, num_timed).items():
            assert [len(stage.alone) for stage in stages] == [num, num]
            assert all(seconds > 1e-6 for stage in stages for seconds in stage.alone)
            assert {q: ids(ranking) for q, ranking in stages[-1].rankings.items()} == {
                q: ids(ranking) for q, ranking in plain[name].items()
            }


def test_the_clock_sees_the_ranker_alone_and_no_bar_is_drawn(monkeypatch):
    quiet, asked = [], []

    class Slow:
        def rank(self, queries, candidates, keep):
            quiet.append(console.quiet)
            asked.append([query.query_id for query in queries])
            time.sleep(0.02 if len(asked) == 2 else 0.002)  # the warm-up is slow
            return {query.query_id: [("s1", 1.0)] for query in queries}

    monkeypatch.setattr(LexicalConfig, "over", lambda self, skills: Slow())
    (stage,) = run_systems([BM25], QUERIES, SKILLS, 1, num_timed=2)["bm25"]
    assert quiet == [False, True, True, True] and not console.quiet
    assert len({query_id for query_ids in asked for query_id in query_ids}) == 3 + len(QUERIES), (
        "ids of their own"
    )
    assert all(0.002 <= seconds < 0.02 for seconds in stage.alone) and len(stage.alone) == 2
