"""What each ranker of a system lets through, and how many skills a model sees whole: figures worked by hand."""

import pytest

from skilltrain.evaluation.benchmarks.benchmark import Benchmark, task_of
from skilltrain.evaluation.metrics import Relevance
from skilltrain.models.encoder import EncoderConfig
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import RankedStage
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.routing.analyse import stage_recalls, truncation
from skilltrain.templates import EncoderTemplate, SkillTemplate


def stage(kind, num_passed=None, **rankings):
    ranked = {query_id: [(letter, 0.0) for letter in letters] for query_id, letters in rankings.items()}
    return RankedStage(kind, kind, ranked, 0.0, (), {}, num_passed)


def test_recall_passes_from_ranker_to_ranker():
    gold = {"q1": "a", "q2": "bc"}
    tasks = [
        task_of(Query(query_id, "text", "", "t", "test"), Relevance(frozenset(ids), dict.fromkeys(ids, 1.0)), {})
        for query_id, ids in gold.items()
    ]
    stages = {
        "two": (stage("dense", 2, q1="xayz", q2="bxyc"), stage("admit", None, q1="ax", q2="")),
        "one": (stage("lexical", None, q1="a", q2="b"),),
        "none": (stage("dense", 50, q1="ab", q2="ab"), stage("admit", None, q1="", q2="")),
    }
    first, second, _, empty = stage_recalls(stages, Benchmark("b", tuple(tasks)), seed=0)
    assert [(row.system, row.stage, row.num_passed) for row in (first, second, empty)] == [
        ("two", "1 dense", 2), ("two", "2 admit", 2), ("none", "2 admit", 1),
    ]  # fmt: skip
    assert {name: mean.mean for name, mean in first.means.items()} == pytest.approx({
        # q1 has a second; q2 has b first and c fourth
        "Recall@1": 0.25, "Recall@2": 0.75, "Precision@1": 0.5, "Precision@2": 0.5, "MRR@4": 0.75, "Hit@2": 1,
    })  # fmt: skip
    assert {name: mean.mean for name, mean in second.means.items()} == pytest.approx({
        "Recall@1": 0.5, "Recall@2": 0.5, "Precision@1": 0.5, "Precision@2": 0.25, "MRR@2": 0.5, "Hit@2": 0.5,
    })  # fmt: skip
    assert {mean.mean for mean in empty.means.values()} == {0.0} and empty.means["Hit@1"].n == 2


def skill(num_words, description="pdf"):
    return Skill(f"s{num_words}", "pdf", description, " ".join(["pdf"] * num_words))


def test_a_skill_is_whole_where_neither_characters_nor_tokens_cut_it(model_folders):
    # name | description | body: 4 tokens and the words of the body; a pair takes 3 of 32, a text 2.
    skills = [skill(25), skill(26), skill(27), skill(1, description="pdf " * 200)]
    pair = truncation(RerankConfig(source=str(model_folders["bert_reranker"]), max_tokens=32), skills)
    assert (pair.max_tokens, pair.whole, pair.num_skills) == (29, 0.25, 4)
    text = truncation(DenseConfig(source=str(model_folders["bert"]), max_tokens=32), skills)
    assert (text.max_tokens, text.whole) == (30, 0.5)
    described = EncoderTemplate(skill=SkillTemplate(fields="description", description_chars=2000))
    short = truncation(EncoderConfig(source=str(model_folders["bert"]), max_tokens=32, template=described), skills)
    assert short.whole == 0.75, "bodies do not count for a model that sees none"
