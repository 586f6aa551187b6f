import math
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.config import Config, validate
from skilltrain.data import filters
from skilltrain.data.filters import (
    CosineLayer,
    FilterConfig,
    FilterPool,
    JaccardLayer,
    NameLayer,
    find_false_negatives,
    rows_by_query,
    run_filter,
)
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill, Verdict, name_key
from skilltrain.tables import DROPPED, JUDGEMENTS, RANKINGS, SKILLS, read_table, rows_of, table_from_rows, write_table

GOLD_BODY = "read the pages of a pdf file and print them"  # 10 words, 8 trigrams
SKILLS_HERE = [
    Skill("gold", "pdf-reader", "", GOLD_BODY),
    Skill("name", "PDF_Reader", "", "something else altogether here"),
    Skill("body", "paper", "", GOLD_BODY + " twice"),  # 8 shared of 9 trigrams
    Skill("vector", "papers", "", "wholly other words stand in this one"),
    Skill("far", "git", "", "commit and push to a remote"),
]
VECTORS = np.array([[1, 0], [0, 1], [0, 1], [0.96, 0.28], [0.6, 0.8]], dtype=np.float32)
POSITION = {skill.skill_id: place for place, skill in enumerate(SKILLS_HERE)}


def fake_pool():
    pool = FilterPool(SKILLS_HERE, None)
    pool.__dict__["vectors"] = VECTORS
    return pool


def rankings(*rows, query_id="q1", stage="semantic"):
    return table_from_rows(
        [
            {"query_id": query_id, "skill_id": skill_id, "rank": rank, "score": 0.5, "stage": stage}
            for rank, skill_id in enumerate(rows, 1)
        ],
        RANKINGS,
    )


def found(table, verdicts, layers):
    findings = find_false_negatives(table, verdicts, fake_pool(), layers)
    skill_ids = table.column("skill_id").to_pylist()
    return {skill_ids[finding.row]: finding for finding in findings}


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("pdf-reader", "PDF Reader", True),
        ("pdf_reader", "pdf.reader", True),
        ("ＰＤＦ", "pdf", True),
        ("c++", "c#", False),
        ("pdf-reader", "pdf-reader-2", False),
        ("数据-分析", "数据分析", True),
    ],
)
def test_name_key_ignores_case_and_separators(left, right, same):
    assert (name_key(left) == name_key(right)) is same


def test_each_layer_drops_what_it_is_for_and_names_the_gold():
    verdicts = {"q1": {"gold": Verdict.REQUIRED}}
    table = rankings("name", "body", "vector", "far")
    dropped = found(table, verdicts, [NameLayer(), JaccardLayer(), CosineLayer()])
    assert {skill_id: finding.filter for skill_id, finding in dropped.items()} == {
        "name": "name",
        "body": "jaccard",
        "vector": "cosine",
    }
    assert dropped["body"].value == pytest.approx(8 / 9)
    assert dropped["vector"].value == pytest.approx(0.96)
    assert dropped["name"].reason == "same name as gold skill gold"
    assert dropped["body"].reason == "body overlap 0.889 > 0.6 with gold skill gold"
    assert dropped["vector"].reason == "cosine 0.960 > 0.92 to gold skill gold"


def test_thresholds_are_exclusive():
    table, verdicts = rankings("body", "vector"), {"q1": {"gold": Verdict.REQUIRED}}
    assert not found(table, verdicts, [JaccardLayer(above=8 / 9), CosineLayer(above=float(VECTORS[3, 0]))])


def test_a_layer_left_out_does_not_run():
    table, verdicts = rankings("name", "body", "vector"), {"q1": {"gold": Verdict.REQUIRED}}
    assert set(found(table, verdicts, [NameLayer()])) == {"name"}
    assert not found(table, verdicts, [])


def test_useful_skills_are_golds_too_and_positives_themselves_go():
    table, verdicts = rankings("name", "gold", "far"), {"q1": {"gold": Verdict.USEFUL}}
    dropped = found(table, verdicts, [NameLayer()])
    assert {k: v.filter for k, v in dropped.items()} == {"gold": "judged", "name": "name"}
    assert dropped["gold"].reason == "judged useful for this query"


@pytest.mark.parametrize("verdict", [Verdict.REJECTED, Verdict.IRRELEVANT])
def test_a_judgement_outranks_a_likeness(verdict):
    verdicts = {"q1": {"gold": Verdict.REQUIRED, "name": verdict, "body": verdict}}
    assert not found(rankings("name", "body"), verdicts, [NameLayer(), JaccardLayer()])


def test_a_gold_of_one_query_is_none_of_another():
    table = pa.concat_tables([rankings("name"), rankings("name", query_id="q2")])
    verdicts = {"q1": {"gold": Verdict.REQUIRED}, "q2": {"far": Verdict.REQUIRED}}
    findings = find_false_negatives(table, verdicts, fake_pool(), [NameLayer()])
    assert [finding.row for finding in findings] == [0]


def test_a_new_layer_is_one_class():
    class InitialLayer(Config):
        name: Literal["initial"] = "initial"

        def prepare(self, pool):
            initials = np.array([ord(skill.name[0]) for skill in pool.skills], dtype=float)
            return lambda gold, candidates: np.where(initials[candidates] == initials[gold], initials[gold], math.nan)

        def explain(self, value):
            return f"begins with {chr(int(value))} as does"

    verdicts = {"q1": {"gold": Verdict.REQUIRED}}
    dropped = found(rankings("name", "vector", "far"), verdicts, [NameLayer(), InitialLayer()])
    assert {skill_id: finding.filter for skill_id, finding in dropped.items()} == {"name": "name", "vector": "initial"}
    assert dropped["vector"].reason == "begins with p as does gold skill gold"


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=20), st.floats(0, 1))
def test_the_size_bound_never_changes_the_answer(tokens, above):
    skills = [Skill("a", "a", "", "a b c d e a b c"), Skill("b", "b", "", " ".join(tokens))]
    pool = FilterPool(skills, None)
    values = JaccardLayer(above=above).prepare(pool)(0, np.array([1]))
    exact = filters.jaccard(pool.trigrams[0], pool.trigrams[1])
    assert (values[0] == exact) if exact > above else np.isnan(values[0])


def test_nameless_skills_do_not_share_a_name():
    pool = FilterPool([Skill("a", "--", "", ""), Skill("b", "_", "", "")], None)
    assert np.isnan(NameLayer().prepare(pool)(0, np.array([1])))[0]


def test_rows_by_query_keeps_row_order():
    table = pa.concat_tables([rankings("a", query_id="z"), rankings("a", "b"), rankings("b", query_id="z")])
    assert {k: v.tolist() for k, v in rows_by_query(table).items()} == {"q1": [1, 2], "z": [0, 3]}
    assert rows_by_query(table.slice(0, 0)) == {}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(filters, "open_encoder", lambda source: None)
    monkeypatch.setattr(filters, "encode_skills", lambda _, skills: VECTORS[[POSITION[s.skill_id] for s in skills]])
    write_table(rows_of(SKILLS_HERE), SKILLS, tmp_path / "pool.parquet")
    (tmp_path / "queries").mkdir()
    judged = {"query_id": "q1", "skill_id": "gold", "verdict": "required", "judge": "human"}
    write_table([judged], JUDGEMENTS, tmp_path / "queries")
    both = pa.concat_tables([rankings("gold", "name", "body", "far"), rankings("vector", "far", stage="random")])
    write_table(both, RANKINGS, tmp_path / "rankings.parquet")
    (tmp_path / "out").mkdir()
    return tmp_path


def settings(folder, **changes):
    values = {
        "stage": "filter", "pool": folder / "pool.parquet", "queries": folder / "queries",
        "rankings": folder / "rankings.parquet", "encoder": {"source": "x"}, "out": folder / "out",
    }  # fmt: skip
    return validate(FilterConfig, values | changes, "recipe")


def test_the_stage_splits_rankings_into_kept_and_dropped(folder):
    summary = run_filter(settings(folder), folder / "out")
    kept = [(row["stage"], row["skill_id"]) for row in read_table(folder / "out", RANKINGS).to_pylist()]
    assert kept == [("semantic", "far"), ("random", "far")]
    dropped = read_table(folder / "out", DROPPED).to_pylist()
    assert [row["skill_id"] for row in dropped] == ["gold", "name", "body", "vector"]
    assert dropped[3]["reason"].endswith("to gold skill gold (random candidate)")
    assert summary["dropped_by_layer"] == {"judged": 1, "name": 1, "jaccard": 1, "cosine": 1}
    assert summary["dropped_by_source"] == {"random": 1, "semantic": 3}
    assert summary["kept_by_source"] == {"random": 1, "semantic": 1}
    assert summary["num_candidates"] == 6 and summary["num_kept"] == 2 and summary["num_dropped"] == 4


def test_ranks_and_scores_are_left_as_they_were(folder):
    run_filter(settings(folder), folder / "out")
    assert read_table(folder / "out", RANKINGS).column("rank").to_pylist() == [4, 2]


def test_judged_positives_can_be_kept_for_the_reranker(folder):
    summary = run_filter(settings(folder, judged_positives="keep"), folder / "out")
    assert "gold" in read_table(folder / "out", RANKINGS).column("skill_id").to_pylist()
    assert summary["dropped_by_layer"]["judged"] == 0


def test_layers_are_chosen_by_name_in_the_recipe(folder):
    config = settings(folder, layers=[{"name": "name"}, {"name": "jaccard", "above": 0.95}], encoder=None)
    assert run_filter(config, folder / "out")["dropped_by_layer"] == {"judged": 1, "name": 1, "jaccard": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": None}, "layer 'cosine' needs the section 'encoder'"),
        ({"layers": [{"name": "name"}, {"name": "name"}]}, "a layer stands twice"),
        ({"layers": [{"name": "nmae"}]}, "layers.0"),
        ({"layers": [{"name": "jaccard", "above": 60}]}, "layers.0.above"),
    ],
)
def test_settings_that_cannot_work_are_refused(folder, changes, message):
    with pytest.raises(SkilltrainError, match=message):
        settings(folder, **changes)


def test_a_candidate_outside_the_pool_is_refused(folder):
    write_table(rankings("stranger"), RANKINGS, folder / "rankings.parquet")
    with pytest.raises(SkilltrainError, match=r"pool.parquet: 1 ranked skill\(s\) are not in this pool, 'stranger'"):
        run_filter(settings(folder), folder / "out")


def test_empty_rankings_stay_empty(folder):
    write_table([], RANKINGS, folder / "rankings.parquet")
    assert run_filter(settings(folder), folder / "out")["num_kept"] == 0
