"""Systems: lists of rankers that share what they have in common, their intermediate rankings and their latency."""

import time

import pytest
from pydantic import ValidationError

from llm_server import llm_server
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill
from skilltrain.retrieval import cascade as module
from skilltrain.retrieval import rankers, rerank
from skilltrain.retrieval.api import ApiConfig
from skilltrain.retrieval.cascade import Cascade, SystemConfig, check_systems, rankings_table, run_systems
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.lexical import LexicalConfig
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.terminal import console
from tiny_models import WORDS

SKILLS = [Skill(f"s{i}", f"name {i}", f"{word} task", f"find the {word} in {WORDS[-i - 1]} files") for i, word in
          enumerate(WORDS[2:14])]  # fmt: skip
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
    return {name: stages[-1].rankings for name, stages in run_systems(systems, queries, skills, depth).items()}


def ids(ranking):
    return [skill_id for skill_id, _ in ranking]


def test_equal_scores_stand_in_the_order_of_the_pool(encoder, reranker):
    twins = [Skill(f"t{i}", "same", "same text", "the same body of data") for i in (3, 1, 2)]
    both = rankers.FuseConfig(of=(LEXICAL, encoder))
    systems = [BM25, system("dense", encoder), system("both", encoder, reranker), system("fused", both)]
    for ranking in rank(systems, [Query("q", "same data", "", "", "")], twins, 3).values():
        assert ids(ranking["q"]) == ["t3", "t1", "t2"]


@pytest.mark.parametrize("first", ["lexical", "dense", "fuse"])
def test_the_top_is_reranked_and_the_rest_follows_as_it_was(encoder, reranker, first):
    ranker = {"lexical": LEXICAL, "dense": encoder, "fuse": rankers.FuseConfig(of=(LEXICAL, encoder))}[first]
    found = rank([system("first", ranker), system("both", ranker, kept(reranker, 5))])
    for query_id in ("q1", "q2"):
        before, after = found["first"][query_id], found["both"][query_id]
        assert len(before) == len(after) == 10
        assert sorted(ids(after)[:5]) == sorted(ids(before)[:5])
        assert ids(after)[5:] == ids(before)[5:]
        scores = [score for _, score in after]
        assert scores == sorted(scores, reverse=True) and scores[5] == pytest.approx(scores[4] - 1)
    assert any(ids(found["both"][query_id]) != ids(found["first"][query_id]) for query_id in found["both"])


def test_every_ranker_can_order_the_candidates_of_another(encoder, reranker):
    """The second ranker's order is that of the same ranker over the whole pool, left to the candidates."""
    whole = rank([system("lexical", LEXICAL), system("dense", encoder)], depth=len(SKILLS))
    for first, second in ((LEXICAL, encoder), (encoder, LEXICAL)):
        found = rank([system("two", kept(first, 5), second)])["two"]
        for query_id, ranking in found.items():
            top = ids(whole[first.kind][query_id])[:5]
            assert set(ids(ranking)) == set(top)
            scores = dict(whole[second.kind][query_id])
            assert [score for _, score in ranking] == pytest.approx(sorted((scores[i] for i in top), reverse=True))


def test_the_reranker_sees_its_candidates_though_less_is_asked_for(encoder, reranker):
    plain, both = system("first", encoder), system("both", encoder, kept(reranker, 12))
    deep = rank([both], depth=12)["both"]
    for systems in ([plain, both], [both, plain]):
        shallow = rank(systems, depth=3)
        assert all(shallow["both"][query_id] == deep[query_id][:3] for query_id in deep)
        assert all(len(shallow["first"][query_id]) == 3 for query_id in deep)


def test_what_systems_share_is_opened_once_and_they_rank_as_each_does_alone(encoder, reranker, monkeypatch):
    opened, scored = [], []
    open_dense, open_reranker, run_micro_batches = DenseConfig.open, rerank.open_reranker, rerank.run_micro_batches

    def counted_run(model, pairs, groups):
        scored.extend(pairs)
        return run_micro_batches(model, pairs, groups)

    monkeypatch.setattr(DenseConfig, "open", lambda self, skills: opened.append("dense") or open_dense(self, skills))
    monkeypatch.setattr(rerank, "open_reranker", lambda config: opened.append("rerank") or open_reranker(config))
    monkeypatch.setattr(rerank, "run_micro_batches", counted_run)
    systems = [
        system("of 3", encoder, kept(reranker, 3)),
        system("of 8", encoder, kept(reranker, 8)),
        system("sum of 8", encoder, kept(reranker, 8, first_weight=5)),
        system("fused", rankers.FuseConfig(of=(LEXICAL, encoder))),
        system("nd of 3", encoder, kept(reranker, 3, fields="nd")),
        system("short", kept(encoder, None, max_tokens=8)),
    ]
    together = rank(systems)
    assert sorted(opened) == ["dense", "dense", "rerank", "rerank"], "short texts; no bodies"
    assert len(scored) == (8 + 3) * len(QUERIES)
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
    rows = iter(rankings_table(stages).to_pylist())
    for stage in stages:
        for query_id, ranking in stage.rankings.items():
            for rank, (skill_id, score) in enumerate(ranking, 1):
                assert tuple(next(rows).values()) == (query_id, skill_id, rank, score, stage.name)


# The model in training ------------------------------------------------------------------------------------------------


class Own:
    """Ranks skills by the number in their id, plus `shift`; counts how often it is asked."""

    def __init__(self):
        self.shift, self.num_asked = 0.0, 0

    def rank(self, queries, candidates, keep):
        self.num_asked += 1
        return {
            query_id: sorted(((i, float(i[1:]) + self.shift) for i, _ in ranking[:keep]), key=lambda pair: -pair[1])
            for query_id, ranking in candidates.items()
        }


def test_the_model_in_training_is_asked_anew_and_what_stands_before_it_is_not(monkeypatch):
    asked = []
    open_ranker = module.open_ranker
    monkeypatch.setattr(
        module, "open_ranker", lambda config, *rest: asked.append(config.kind) or open_ranker(config, *rest)
    )
    own = Own()
    cascade = Cascade(QUERIES, SKILLS, 3, own)
    both = system("own", kept(LEXICAL, 5), RerankConfig(source="self", keep=5))
    check_systems([both], has_own=True)
    first = cascade.run(both)[-1].rankings["q1"]
    own.shift = 100.0
    second = cascade.run(both)[-1].rankings["q1"]
    assert [(skill_id, score + 100) for skill_id, score in first] == second and len(first) == 3
    assert own.num_asked == 2 and asked == ["lexical", "rerank", "rerank"]
    with pytest.raises(SkilltrainError, match="system own: source self is the model in training, and nothing is train"):
        check_systems([both])


# What is refused ------------------------------------------------------------------------------------------------------


def test_nothing_to_rank_is_refused():
    with pytest.raises(SkilltrainError, match="the pool is empty"):
        rank([BM25], skills=[])
    with pytest.raises(SkilltrainError, match="there is no query to rank for"):
        rank([BM25], [])
    with pytest.raises(SkilltrainError, match="systems: two systems have the same name"):
        rank([BM25, BM25])


def test_scores_that_are_no_numbers_are_refused(monkeypatch):
    class Bad:
        def rank(self, queries, candidates, keep):
            return {"q1": [("s1", float("nan"))], "q2": []}

    monkeypatch.setattr(LexicalConfig, "open", lambda self, skills: Bad())
    with pytest.raises(SkilltrainError, match="system bm25: ranker 1, lexical, gave scores that are no numbers"):
        rank([BM25])


def test_an_encoder_whose_vectors_are_no_numbers_is_refused(tmp_path, model_folders):
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(model_folders["bert"])
    torch.nn.init.constant_(model.encoder.layer[-1].output.LayerNorm.bias, float("nan"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folders["bert"]).save_pretrained(tmp_path)
    with pytest.raises(SkilltrainError, match="the encoder gave vectors that are no numbers"):
        rank([system("bad", DenseConfig(source=str(tmp_path), precision="float32"))])


@pytest.mark.parametrize(
    ("ranker", "message"),
    [
        (DenseConfig(source="./nothing"), "./nothing: no such model"),
        (RerankConfig(source="package:nobody"), "package:nobody: no instal"),
        (rankers.FuseConfig(of=(LEXICAL, DenseConfig(source="./nothing"))), "./nothing: no such model"),
    ],
)
def test_a_model_that_is_not_there_is_told_before_another_ranks(ranker, message, monkeypatch):
    monkeypatch.setattr(module, "open_ranker", lambda *_: pytest.fail("work had begun"))
    with pytest.raises(SkilltrainError, match=message):
        rank([BM25, system("gone", LEXICAL, ranker)])


def test_an_encoder_is_no_reranker(model_folders):
    with pytest.raises(SkilltrainError, match="its model is of kind reranker"):
        rank([BM25, system("x", DenseConfig(source=str(model_folders["bert_reranker"])))])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"encoder": {"source": "e"}, "num_candidates": 8}, r"'encoder' is of the old form; write for example ranke"),
        ({"rankers": []}, "at least 1 item"),
        ({"rankers": [{"kind": "rerank", "source": "x"}]}, "the first ranker finds skills in the pool; rerank only"),
        ({"rankers": [{"kind": "fuse", "of": [{"kind": "lexical"}, {"kind": "rerank", "source": "x"}]}]},
         "the first ranker finds skills in the pool; rerank only"),
    ],
)  # fmt: skip
def test_systems_that_make_no_sense_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        SystemConfig.model_validate({"name": "one"} | values)


# Latency --------------------------------------------------------------------------------------------------------------


def test_every_ranker_is_timed_alone_with_the_warm_up_left_out(encoder, reranker, tmp_path):
    """Each query is encoded and scored anew, though a cache holds vectors and an earlier system's scores are known."""
    cached = kept(encoder, None, cache=tmp_path / "vectors")
    systems = [system("one", cached, kept(reranker, 2)), system("two", LEXICAL, kept(reranker, 2))]
    plain = rank(systems)
    for num_timed, num in ((1, 1), (99, len(QUERIES)), (0, 0)):
        found = run_systems(systems, QUERIES, SKILLS, 10, num_timed)
        for name, stages in found.items():
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
            time.sleep(0.02 if len(asked) == 1 else 0.002)  # the first is slow, as first calls are
            return {query.query_id: [("s1", 1.0)] for query in queries}

    monkeypatch.setattr(LexicalConfig, "open", lambda self, skills: Slow())
    (stage,) = run_systems([BM25], QUERIES, SKILLS, 1, num_timed=2)["bm25"]
    assert quiet == [True, True, True, False] and not console.quiet
    assert len({query_id for query_ids in asked for query_id in query_ids}) == 3 + len(QUERIES), "ids of their own"
    assert all(0.002 <= seconds < 0.02 for seconds in stage.alone) and len(stage.alone) == 2


def test_systems_that_ask_a_server_are_not_timed(capsys):
    with llm_server() as server:
        api = ApiConfig(model="scripted", base_url=server.base_url, cache=None, max_retries=0)
        found = run_systems([system("api", api), BM25], QUERIES, SKILLS, 5, num_timed=2)
        texts = [text for request in server.requests for text in request["input"]]
    assert [len(found[name][0].alone) for name in ("api", "bm25")] == [0, 2]
    assert "api: not timed, for it asks a server" in capsys.readouterr().err
    assert sorted(set(texts)) == sorted(texts), "a text that is timed would be sent, and paid for, again"
