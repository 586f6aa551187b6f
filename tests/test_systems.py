import pytest
from pydantic import ValidationError

from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.retrieval.rerank import RerankerSource, open_reranker
from skilltrain.routing import systems as module
from skilltrain.routing.first_stages import open_first_stage
from skilltrain.routing.systems import LexicalSource, SystemConfig, rank_with_systems, rankings_table
from tiny_models import WORDS

SKILLS = [Skill(f"s{i}", f"name {i}", f"{word} task", f"find the {word} in {WORDS[-i - 1]} files") for i, word in
          enumerate(WORDS[2:14])]  # fmt: skip
QUERIES = {"q1": "deploy pods and review the chart", "q2": "table of pdf text"}
BM25 = SystemConfig(name="bm25", lexical=LexicalSource())


@pytest.fixture
def encoder(model_folders):
    return EncoderSource(source=str(model_folders["bert"]), precision="float32")


@pytest.fixture
def reranker(model_folders):
    return RerankerSource(source=str(model_folders["bert_reranker"]), precision="float32")


def ids(ranking):
    return [skill_id for skill_id, _ in ranking]


def test_bm25_finds_a_word_of_the_body_only_if_it_sees_the_body():
    skills = [
        Skill("name", "pods", "", "find the task"),
        Skill("description", "one", "deploy pods", "find the task"),
        Skill("body", "two", "", "find the pods of the task"),
        Skill("none", "three", "", "find the task"),
    ]
    nd = SystemConfig(name="nd", lexical=LexicalSource(fields="nd"))
    found = rank_with_systems([BM25, nd], {"q": "pods"}, skills, 4)
    assert {skill_id for skill_id, score in found["bm25"]["q"] if score > 0} == {"name", "description", "body"}
    assert {skill_id for skill_id, score in found["nd"]["q"] if score > 0} == {"name", "description"}


def test_equal_scores_stand_in_the_order_of_the_pool(encoder, reranker):
    twins = [Skill(f"t{i}", "same", "same text", "the same body of data") for i in (3, 1, 2)]
    systems = [
        BM25,
        SystemConfig(name="dense", encoder=encoder),
        SystemConfig(name="both", encoder=encoder, reranker=reranker),
    ]
    for ranking in rank_with_systems(systems, {"q": "same data"}, twins, 3).values():
        assert ids(ranking["q"]) == ["t3", "t1", "t2"]


@pytest.mark.parametrize("first", ["lexical", "encoder"])
def test_the_top_is_reranked_and_the_rest_follows_as_it_was(encoder, reranker, first):
    stage = {"lexical": LexicalSource()} if first == "lexical" else {"encoder": encoder}
    plain = SystemConfig(name="first", **stage)
    both = SystemConfig(name="both", reranker=reranker, num_candidates=5, **stage)
    found = rank_with_systems([plain, both], QUERIES, SKILLS, 10)
    for query_id in QUERIES:
        before, after = found["first"][query_id], found["both"][query_id]
        assert len(before) == len(after) == 10
        assert sorted(ids(after)[:5]) == sorted(ids(before)[:5])
        assert ids(after)[5:] == ids(before)[5:]
        scores = [score for _, score in after]
        assert scores == sorted(scores, reverse=True) and scores[5] == pytest.approx(scores[4] - 1)
    assert any(ids(found["both"][query_id]) != ids(found["first"][query_id]) for query_id in QUERIES)


def test_the_reranker_sees_its_candidates_though_less_is_asked_for(encoder, reranker):
    """The first stage that both share must go as deep as the one that needs most."""
    plain = SystemConfig(name="first", encoder=encoder)
    both = SystemConfig(name="both", encoder=encoder, reranker=reranker, num_candidates=12)
    deep = rank_with_systems([plain, both], QUERIES, SKILLS, 12)["both"]
    for systems in ([plain, both], [both, plain]):
        shallow = rank_with_systems(systems, QUERIES, SKILLS, 3)
        assert all(shallow["both"][query_id] == deep[query_id][:3] for query_id in QUERIES)
        assert all(len(shallow["first"][query_id]) == 3 for query_id in QUERIES)


def test_a_shared_first_stage_runs_once(encoder, reranker, monkeypatch):
    opened = []

    def counting(source, skills):
        opened.append(source)
        return open_first_stage(source, skills)

    monkeypatch.setattr(module, "open_first_stage", counting)
    systems = [
        SystemConfig(name="a", encoder=encoder),
        SystemConfig(name="b", encoder=encoder, reranker=reranker),
        SystemConfig(name="c", encoder=encoder.model_copy(update={"max_tokens": 8})),
    ]
    rank_with_systems(systems, QUERIES, SKILLS, 3)
    assert len(opened) == 2


def test_systems_of_one_reranker_share_its_scores_and_rank_as_each_does_alone(encoder, reranker, monkeypatch):
    opened = []

    def counting(source):
        opened.append(source)
        return open_reranker(source)

    monkeypatch.setattr(module, "open_reranker", counting)
    parts = {"encoder": encoder, "reranker": reranker}
    systems = [
        SystemConfig(name="of 3", num_candidates=3, **parts),
        SystemConfig(name="of 8", num_candidates=8, **parts),
        SystemConfig(name="sum of 8", num_candidates=8, first_stage_weight=5, **parts),
        SystemConfig(name="nd of 3", num_candidates=3, encoder=encoder, reranker=reranker.model_copy(
            update={"fields": "nd"})),
    ]  # fmt: skip
    together = rank_with_systems(systems, QUERIES, SKILLS, 10)
    assert len(opened) == 2, "the second one sees no bodies"
    for system in systems:
        alone = rank_with_systems([system], QUERIES, SKILLS, 10)[system.name]
        for query_id in QUERIES:
            assert ids(together[system.name][query_id]) == ids(alone[query_id])
            scores = [[score for _, score in found[query_id]] for found in (together[system.name], alone)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_the_sum_is_of_both_stages(encoder, reranker):
    plain, only = (SystemConfig(name=name, encoder=encoder, reranker=given, num_candidates=12)
                   for name, given in (("first", None), ("reranked", reranker)))  # fmt: skip
    both = only.model_copy(update={"name": "sum", "first_stage_weight": 2.5})
    found = rank_with_systems([plain, only, both], QUERIES, SKILLS, 12)
    for query_id in QUERIES:
        first, second = (dict(found[name][query_id]) for name in ("first", "reranked"))
        assert dict(found["sum"][query_id]) == pytest.approx({key: second[key] + 2.5 * first[key] for key in first})


def test_a_ranking_is_no_longer_than_the_pool(encoder, reranker):
    both = SystemConfig(name="both", encoder=encoder, reranker=reranker)
    for ranking in rank_with_systems([BM25, both], QUERIES, SKILLS[:3], 50).values():
        assert all(sorted(ids(ranking[query_id])) == ["s0", "s1", "s2"] for query_id in QUERIES)


def test_nothing_to_rank_is_refused():
    with pytest.raises(SkilltrainError, match="the pool is empty"):
        rank_with_systems([BM25], QUERIES, [], 3)
    with pytest.raises(SkilltrainError, match="there is no query to rank for"):
        rank_with_systems([BM25], {}, SKILLS, 3)
    with pytest.raises(SkilltrainError, match="systems: two systems have the same name"):
        rank_with_systems([BM25, BM25], QUERIES, SKILLS, 3)


def test_scores_that_are_no_numbers_are_refused(tmp_path, encoder, model_folders):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(model_folders["bert_reranker"])
    torch.nn.init.constant_(model.classifier.bias, float("nan"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folders["bert_reranker"]).save_pretrained(tmp_path)
    source = RerankerSource(source=str(tmp_path), precision="float32")
    with pytest.raises(SkilltrainError, match="system bad: the reranker gave scores that are no numbers"):
        rank_with_systems([SystemConfig(name="bad", encoder=encoder, reranker=source)], QUERIES, SKILLS, 3)


def test_an_encoder_whose_vectors_are_no_numbers_is_refused(tmp_path, model_folders):
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(model_folders["bert"])
    torch.nn.init.constant_(model.encoder.layer[-1].output.LayerNorm.bias, float("nan"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folders["bert"]).save_pretrained(tmp_path)
    source = EncoderSource(source=str(tmp_path), precision="float32")
    with pytest.raises(SkilltrainError, match="the encoder gave vectors that are no numbers"):
        rank_with_systems([SystemConfig(name="bad", encoder=source)], QUERIES, SKILLS, 3)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"encoder": EncoderSource(source="./nothing")}, "./nothing: no such model"),
        (
            {"lexical": LexicalSource(), "reranker": RerankerSource(source="package:nobody")},
            "package:nobody: no instal",
        ),
    ],
)
def test_a_model_that_is_not_there_is_told_before_another_ranks(part, message, monkeypatch):
    monkeypatch.setattr(module, "open_first_stage", lambda *_: pytest.fail("work had begun"))
    with pytest.raises(SkilltrainError, match=message):
        rank_with_systems([BM25, SystemConfig(name="gone", **part)], QUERIES, SKILLS, 3)


def test_an_encoder_is_no_reranker(model_folders):
    wrong = SystemConfig(name="x", encoder=EncoderSource(source=str(model_folders["bert_reranker"])))
    with pytest.raises(SkilltrainError, match="its model is of kind reranker"):
        rank_with_systems([BM25, wrong], QUERIES, SKILLS, 3)


def test_a_system_has_one_first_stage(encoder):
    with pytest.raises(ValidationError, match="exactly one first stage"):
        SystemConfig(name="none")
    with pytest.raises(ValidationError, match="exactly one first stage"):
        SystemConfig(name="two", lexical=LexicalSource(), encoder=encoder)


def test_rankings_as_a_table():
    table = rankings_table({"q1": [("b", 2.5), ("a", 1.0)], "q2": []}, "mine").to_pylist()
    assert table == [
        {"query_id": "q1", "skill_id": "b", "rank": 1, "score": 2.5, "stage": "mine"},
        {"query_id": "q1", "skill_id": "a", "rank": 2, "score": 1.0, "stage": "mine"},
    ]
