"""Teacher scores in lists: every member scored, everything else as it was, and what cannot be scored refused."""

import math
from statistics import fmean, pstdev

import pytest

from benchmark_folders import write_ours, write_pool, write_rankings
from faults import raises
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation import candidates
from skilltrain.evaluation.candidates import Teacher
from skilltrain.losses import KL
from skilltrain.records import Query, Skill
from skilltrain.retrieval.lexical import LexicalConfig
from skilltrain.tables import JUDGEMENTS, LISTS, QUERIES, read_table, write_table
from skilltrain.training.scores import check_teacher_scores
from skilltrain.training.training_set import ListsSource, load_training_set
from tiny_models import WORDS

SKILLS = [
    Skill(f"s{i}", word, f"{word} task", f"find the {word}") for i, word in enumerate(WORDS[2:14])
]
TEXTS = {"q1": "deploy pods and review the chart", "q2": "table of pdf text"}
MEMBERS = {"q1": ["s3", "s0", "s11", "s1"], "q2": ["s4", "s2"]}
LEXICAL = {"kind": "lexical", "keep": 1}


def rows(members=MEMBERS):
    return [
        {
            "query_id": query_id,
            "skill_ids": ids,
            "verdicts": ["required", *["irrelevant"] * (len(ids) - 1)],
            "sources": ["gold", *["semantic"] * (len(ids) - 1)],
            "ranks": [*range(len(ids))],
            "teacher_scores": None,
        }
        for query_id, ids in members.items()
    ]


@pytest.fixture
def folder(tmp_path):
    write_pool(tmp_path / "pool", SKILLS)
    write_ours(
        tmp_path / "lists",
        [(query_id, text, "train") for query_id, text in TEXTS.items()],
        {query_id: {ids[0]: "required"} for query_id, ids in MEMBERS.items()},
    )
    write_table(rows(), LISTS, tmp_path / "lists")
    (tmp_path / "out").mkdir()
    return tmp_path


def run(folder, *rankers):
    values = {
        "stage": "teacher",
        "pool": folder / "pool",
        "lists": folder / "lists",
        "rankers": list(rankers),
    }
    return validate(Teacher, values | {"out": folder / "out"}, "recipe").run(folder / "out")


def scores_in(folder):
    return {
        row["query_id"]: row["teacher_scores"]
        for row in read_table(folder / "out", LISTS).to_pylist()
    }


def test_every_member_gets_its_score_and_all_else_stays(folder):
    summary = run(folder, LEXICAL)
    index = LexicalConfig().index(SKILLS)
    for query_id, scores in scores_in(folder).items():
        places = [int(skill_id[1:]) for skill_id in MEMBERS[query_id]]
        assert scores == pytest.approx(index.scores(TEXTS[query_id])[places].tolist())
    before, after = (
        read_table(folder / name, LISTS).drop(["teacher_scores"]) for name in ("lists", "out")
    )
    assert after.equals(before)
    for spec in (QUERIES, JUDGEMENTS):
        assert read_table(folder / "out", spec).equals(read_table(folder / "lists", spec))
    every = [score for scores in scores_in(folder).values() for score in scores]
    assert (summary["num_lists"], summary["num_pairs"]) == (2, 6)
    assert summary["score"] == pytest.approx(
        {"min": min(every), "mean": sum(every) / 6, "max": max(every)}, abs=1e-4
    )
    data = load_training_set(ListsSource(pool=folder / "pool", lists=folder / "out"))
    check_teacher_scores(data, KL())
    assert data.lists[1].teacher_scores == tuple(scores_in(folder)["q2"])


def test_a_reranker_scores_every_member_whatever_its_keep_says(
    folder, model_folders, open_reranker_of
):
    source = {
        "kind": "rerank",
        "source": str(model_folders["bert_reranker"]),
        "precision": "float32",
        "keep": 1,
    }
    run(folder, source)
    alone = scores_in(folder)
    reranker, skills = (
        open_reranker_of("bert_reranker"),
        {skill.skill_id: skill for skill in SKILLS},
    )
    for query_id, ids in MEMBERS.items():
        ours = reranker(reranker.tokenize(TEXTS[query_id], [skills[skill_id] for skill_id in ids]))
        assert alone[query_id] == pytest.approx(ours.tolist(), abs=1e-4)
    run(folder, LEXICAL, source)
    assert scores_in(folder) == {
        query_id: pytest.approx(row, abs=1e-5) for query_id, row in alone.items()
    }
    fused = {"kind": "fuse", "of": [LEXICAL, source], "weights": [0, 1]}
    run(folder, fused)
    for query_id, row in alone.items():
        normalised = [(score - fmean(row)) / pstdev(row) for score in row]
        assert scores_in(folder)[query_id] == pytest.approx(normalised, abs=1e-3)


def test_a_member_that_saved_rankings_lack_is_named(folder):
    ranked = {"q1": [("s3", 0.5), ("s0", 0.5), ("s11", 0.5)], "q2": [("s4", 0.5), ("s2", 0.5)]}
    write_rankings(folder / "saved", {"x": ranked})
    with raises("not-a-number"):
        run(folder, {"kind": "saved", "rankings": str(folder / "saved")})
    assert not any((folder / "out").iterdir())


def test_a_score_that_is_no_number_is_refused(monkeypatch):
    class Broken:
        def rank(self, queries, candidates, keep):
            return {
                query_id: [(skill_id, bad) for skill_id, _ in row]
                for query_id, row in candidates.items()
            }

    monkeypatch.setattr(LexicalConfig, "ranker", lambda *_: Broken())
    queries = [Query(query_id, text, "single", "test", "train") for query_id, text in TEXTS.items()]
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(
            SkilltrainError, match=rf"q1: gave skill 's3' {bad}, and a teacher must give a number"
        ):
            candidates.member_scores([LexicalConfig()], queries, MEMBERS, SKILLS)


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({}, "no-list"),
        ({"q3": ["s0", "s1"]}, "unknown-query"),
        ({"q1": ["s0", "gone"]}, "unknown-skill"),
    ],
)
def test_lists_that_cannot_be_scored_are_refused(folder, members, code):
    with pytest.raises(
        SkilltrainError, match="recipe: rankers: select chooses skills and gives no scores"
    ):
        run(folder, {"kind": "select", "llm": {"kind": "openai"}})
    write_table(rows(members), LISTS, folder / "lists")
    with raises(code):
        run(folder, LEXICAL)
