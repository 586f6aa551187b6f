"""A teacher scores every member of the training lists and changes nothing else."""

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
    """Make lists whose first member is the gold skill."""
    lists = []
    for query_id, skill_ids in members.items():
        num_negatives = len(skill_ids) - 1
        row = {
            "query_id": query_id,
            "skill_ids": skill_ids,
            "verdicts": ["required"] + ["irrelevant"] * num_negatives,
            "sources": ["gold"] + ["semantic"] * num_negatives,
            "ranks": list(range(len(skill_ids))),
            "teacher_scores": None,
        }
        lists.append(row)
    return lists


@pytest.fixture
def folder(tmp_path):
    """A folder with a pool and lists."""
    write_pool(tmp_path / "pool", SKILLS)
    queries = [(query_id, text, "train") for query_id, text in TEXTS.items()]
    verdicts = {query_id: {ids[0]: "required"} for query_id, ids in MEMBERS.items()}
    write_ours(tmp_path / "lists", queries, verdicts)
    write_table(rows(), LISTS, tmp_path / "lists")
    (tmp_path / "out").mkdir()
    return tmp_path


def run(folder, *rankers):
    """Run the stage. Returns its summary."""
    values = {
        "stage": "teacher",
        "pool": folder / "pool",
        "lists": folder / "lists",
        "rankers": list(rankers),
        "out": folder / "out",
    }
    return validate(Teacher, values, "recipe").run(folder / "out")


def scores_in(folder):
    """Return the teacher scores by query id."""
    lists = read_table(folder / "out", LISTS).to_pylist()
    return {row["query_id"]: row["teacher_scores"] for row in lists}


def test_every_member_gets_its_score(folder):
    summary = run(folder, LEXICAL)

    index = LexicalConfig().index(SKILLS)
    scores_by_query = scores_in(folder)
    for query_id, scores in scores_by_query.items():
        positions = [int(skill_id[1:]) for skill_id in MEMBERS[query_id]]
        expected = index.scores(TEXTS[query_id])[positions]
        assert scores == pytest.approx(expected.tolist())
    assert (summary["num_lists"], summary["num_pairs"]) == (2, 6)
    scores = scores_by_query["q1"] + scores_by_query["q2"]
    expected = {"min": min(scores), "mean": sum(scores) / 6, "max": max(scores)}
    assert summary["score"] == pytest.approx(expected, abs=1e-4)


def test_teacher_changes_only_scores(folder):
    run(folder, LEXICAL)

    for spec, columns in ((LISTS, ["teacher_scores"]), (QUERIES, []), (JUDGEMENTS, [])):
        old_table = read_table(folder / "lists", spec).drop(columns)
        new_table = read_table(folder / "out", spec).drop(columns)
        assert new_table.equals(old_table)


def test_training_reads_teacher_scores(folder):
    run(folder, LEXICAL)

    data = load_training_set(ListsSource(pool=folder / "pool", lists=folder / "out"))

    check_teacher_scores(data, KL())
    assert data.lists[1].teacher_scores == tuple(scores_in(folder)["q2"])


@pytest.fixture
def reranker_config(model_folders):
    """A reranker with keep 1. As a teacher it scores every member."""
    source = str(model_folders["bert_reranker"])
    return {"kind": "rerank", "source": source, "precision": "float32", "keep": 1}


@pytest.fixture
def reranker_scores(open_reranker_of):
    """The scores of all members by query id."""
    reranker = open_reranker_of("bert_reranker")
    skills = {skill.skill_id: skill for skill in SKILLS}
    scores = {}
    for query_id, skill_ids in MEMBERS.items():
        members = [skills[skill_id] for skill_id in skill_ids]
        scores[query_id] = reranker(reranker.tokenize(TEXTS[query_id], members)).tolist()
    return scores


@pytest.mark.parametrize("first_rankers", [[], [LEXICAL]], ids=["alone", "after BM25"])
def test_reranker_scores_every_member(folder, reranker_config, reranker_scores, first_rankers):
    run(folder, *first_rankers, reranker_config)

    for query_id, scores in scores_in(folder).items():
        assert scores == pytest.approx(reranker_scores[query_id], abs=1e-4)


def test_fused_teacher_normalises_scores(folder, reranker_config, reranker_scores):
    run(folder, {"kind": "fuse", "of": [LEXICAL, reranker_config], "weights": [0, 1]})

    for query_id, scores in reranker_scores.items():
        normalised = [(score - fmean(scores)) / pstdev(scores) for score in scores]
        assert scores_in(folder)[query_id] == pytest.approx(normalised, abs=1e-3)


def test_member_outside_saved_rankings_is_refused(folder):
    rankings = {"q1": [("s3", 0.5), ("s0", 0.5), ("s11", 0.5)], "q2": [("s4", 0.5), ("s2", 0.5)]}
    write_rankings(folder / "saved", {"x": rankings})

    with raises("not-a-number"):
        run(folder, {"kind": "saved", "rankings": str(folder / "saved")})

    assert not any((folder / "out").iterdir())


@pytest.mark.parametrize("bad_score", [math.nan, math.inf, -math.inf])
def test_score_that_is_no_number_is_refused(monkeypatch, bad_score):
    class BrokenRanker:
        def rank(self, queries, candidates, keep):
            return {"q1": [("s3", bad_score)]}

    monkeypatch.setattr(LexicalConfig, "ranker", lambda *_: BrokenRanker())
    queries = [Query("q1", TEXTS["q1"], "single", "test", "train")]

    with raises("not-a-number") as error:
        candidates.member_scores([LexicalConfig()], queries, {"q1": ["s3"]}, SKILLS)

    message = f"q1: gave skill 's3' {bad_score}, and a teacher must give a number"
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({}, "no-list"),
        ({"q3": ["s0", "s1"]}, "unknown-query"),
        ({"q1": ["s0", "gone"]}, "unknown-skill"),
    ],
)
def test_unscorable_lists_are_refused(folder, members, code):
    write_table(rows(members), LISTS, folder / "lists")

    with raises(code):
        run(folder, LEXICAL)


def test_ranker_without_scores_is_refused(folder):
    with pytest.raises(SkilltrainError) as error:
        run(folder, {"kind": "select", "llm": {"kind": "openai"}})

    assert "recipe: rankers: select chooses skills and gives no scores" in str(error.value)
