from pathlib import Path

import numpy as np
import pytest

from skilltrain.data import mine as mine_module
from skilltrain.data.mine import MineConfig, MiningPool, draw, mine, run_mine, select_queries
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill
from skilltrain.tables import DROPPED, JUDGEMENTS, QUERIES, RANKINGS, SKILLS, read_table, rows_of, write_table


def skill(skill_id, name, category=None, body="body"):
    return Skill(skill_id, name, "", body, category=category)


POOL = [
    skill("s0", "pdf-reader", "docs", "read pdf pages"),
    skill("s1", "PDF Reader", "docs", "another pdf reader"),
    skill("s2", "docx-writer", "docs", "write word files"),
    skill("s3", "git-commit", "code", "commit changes"),
    skill("s4", "git-push", "code", "push pdf changes"),
    skill("s5", "loose", None, "weather tomorrow"),
]
# Cosines to the query (1, 0): 1, .8, .6, 0, -.6, .28
VECTORS = np.array([[1, 0], [0.8, 0.6], [0.6, 0.8], [0, 1], [-0.6, 0.8], [0.28, 0.96]], dtype=np.float32)


def query(query_id="q1", text="read a pdf", split="train"):
    return Query(query_id, text, "single", "human", split)


def settings(**changes):
    values = {"stage": "mine", "pool": "p", "queries": "q", "encoder": {"source": "x"}, "out": "o"}
    return MineConfig.model_validate(values | changes)


def mined(positives, config, vectors=VECTORS, pool=POOL):
    built = MiningPool.build(pool)
    places = np.array([built.position[s] for s in positives])
    found = mine(built, [(query(), places)], np.array([[1, 0]], dtype=np.float32), vectors, config)
    return {
        item.source: list(zip([built.skills[i].skill_id for i in item.ranked[0]], item.ranked[1].tolist(), strict=True))
        for item in found
    }


def test_semantic_candidates_are_the_nearest_others_with_their_cosines():
    semantic = mined(["s0"], settings(depth=3))["semantic"]
    assert [skill_id for skill_id, _ in semantic] == ["s1", "s2", "s5"]
    assert [score for _, score in semantic] == pytest.approx([0.8, 0.6, 0.28])


def test_positives_are_no_candidates_of_any_source_and_cost_no_depth():
    found = mined(["s0", "s2"], settings(depth=3, num_taxonomy=9, num_random=9))
    assert not {"s0", "s2"} & {skill_id for ranked in found.values() for skill_id, _ in ranked}
    assert [skill_id for skill_id, _ in found["semantic"]] == ["s1", "s5", "s3"]


def test_lexical_candidates_share_a_term():
    assert {skill_id for skill_id, _ in mined(["s0"], settings())["lexical"]} == {"s1", "s4"}


def test_taxonomy_is_the_same_category_under_another_name():
    taxonomy = mined(["s0"], settings(num_taxonomy=9))["taxonomy"]
    assert [skill_id for skill_id, _ in taxonomy] == ["s2"]
    assert taxonomy[0][1] == pytest.approx(0.6)


def test_a_positive_without_category_has_no_taxonomy_and_all_others_are_elsewhere():
    found = mined(["s5"], settings(num_random=9))
    assert found["taxonomy"] == []
    assert {skill_id for skill_id, _ in found["random"]} == {"s0", "s1", "s2", "s3", "s4"}


def test_random_candidates_are_of_other_categories_nearest_first():
    random = mined(["s0"], settings(num_random=9))["random"]
    assert [skill_id for skill_id, _ in random] == ["s5", "s3", "s4"]


def test_a_source_can_be_switched_off():
    found = mined(["s0"], settings(depth=0, num_random=0))
    assert "semantic" not in found and "lexical" not in found and found["random"] == []


def test_draws_depend_on_the_key_only():
    allowed = np.arange(100)
    first = draw(allowed, 10, "0/q1/random")
    assert first.tolist() == draw(allowed, 10, "0/q1/random").tolist()
    assert first.tolist() != draw(allowed, 10, "1/q1/random").tolist()
    assert len(set(first.tolist())) == 10
    assert sorted(draw(np.arange(3), 10, "k").tolist()) == [0, 1, 2]


def test_draws_are_uniform():
    counts = np.bincount(np.concatenate([draw(np.arange(5), 2, str(n)) for n in range(2000)]), minlength=5)
    # Binomial(2000, .4): mean 800, standard deviation 22.
    assert abs(counts - 800).max() < 110


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Tables of two train queries (one without a gold in the pool) and a dev query; vectors instead of a model."""
    write_table(rows_of(reversed(POOL)), SKILLS, tmp_path / "pool.parquet")
    queries = [query("q2", "weather"), query("q1"), query("q3", split="dev"), query("q4")]
    (tmp_path / "queries").mkdir()
    write_table(rows_of(queries), QUERIES, tmp_path / "queries")
    judged = [("q1", "s0", "required"), ("q1", "s3", "rejected"), ("q2", "gone", "required"), ("q3", "s0", "required")]
    columns = ("query_id", "skill_id", "verdict")
    rows = [dict(zip(columns, row, strict=True)) | {"judge": "human"} for row in judged]
    write_table(rows, JUDGEMENTS, tmp_path / "queries")
    of = {s.skill_id: vector for s, vector in zip(POOL, VECTORS, strict=True)}
    monkeypatch.setattr(mine_module, "open_encoder", lambda source: None)
    monkeypatch.setattr(mine_module, "encode_skills", lambda _, skills: np.stack([of[s.skill_id] for s in skills]))
    monkeypatch.setattr(
        mine_module, "encode_queries", lambda _, texts: np.array([[1, 0]] * len(texts), dtype=np.float32)
    )
    (tmp_path / "out").mkdir()
    return tmp_path


def run(folder: Path, **changes):
    config = settings(pool=folder / "pool.parquet", queries=folder / "queries", out=folder / "out", **changes)
    return run_mine(config, folder / "out")


def test_the_stage_writes_rankings_by_source_and_names_lost_queries(folder):
    summary = run(folder, depth=2)
    rows = read_table(folder / "out", RANKINGS).to_pylist()
    assert {row["query_id"] for row in rows} == {"q1"}
    semantic = [(row["skill_id"], row["rank"]) for row in rows if row["stage"] == "semantic"]
    assert semantic == [("s1", 1), ("s2", 2)]
    assert summary["num_candidates"] == {"semantic": 2, "lexical": 2, "taxonomy": 1, "random": 3}
    assert summary["num_queries_dropped"] == 2
    dropped = {row["query_id"]: row for row in read_table(folder / "out", DROPPED).to_pylist()}
    assert dropped["q2"]["skill_id"] == "gone" and "not" not in dropped["q2"]["reason"]
    assert dropped["q4"]["skill_id"] == "" and "no skill is judged" in dropped["q4"]["reason"]


def test_judged_negatives_may_be_mined(folder):
    run(folder, depth=6)
    rows = read_table(folder / "out", RANKINGS).to_pylist()
    assert any(row["skill_id"] == "s3" for row in rows)


def test_the_order_of_the_pool_does_not_matter(folder):
    run(folder)
    first = read_table(folder / "out", RANKINGS)
    write_table(rows_of(POOL), SKILLS, folder / "pool.parquet")
    run(folder)
    assert read_table(folder / "out", RANKINGS).equals(first)


def test_a_split_without_queries_is_refused_with_the_splits_there_are(folder):
    with pytest.raises(SkilltrainError, match=r"no query of split 'test' \(splits here: dev, train\)"):
        select_queries(folder / "queries", "test")


def test_all_splits_with_null(folder):
    assert [q.query_id for q in select_queries(folder / "queries", None)] == ["q1", "q2", "q3", "q4"]


def test_queries_of_another_pool_are_refused(folder):
    write_table(rows_of([skill("other", "other")]), SKILLS, folder / "pool.parquet")
    with pytest.raises(SkilltrainError, match="has a positive in the pool"):
        run(folder)


def test_an_empty_pool_is_refused(folder):
    write_table([], SKILLS, folder / "pool.parquet")
    with pytest.raises(SkilltrainError, match="holds no skill"):
        run(folder)
