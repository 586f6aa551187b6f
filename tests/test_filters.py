from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.config import Config, validate
from skilltrain.data import filter_layers as module
from skilltrain.data.filter import FilterConfig, find_false_negatives, open_candidates, run_filter
from skilltrain.data.filter_layers import (
    CeilingLayer,
    ClusterLayer,
    CosineLayer,
    FilterPool,
    JaccardLayer,
    NameLayer,
    RankWindowLayer,
)
from skilltrain.data.near_duplicates import jaccard, word_trigrams
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill, Verdict
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.tables import (
    CLUSTERS,
    DROPPED,
    JUDGEMENTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    read_table,
    rows_by_query,
    rows_of,
    table_from_rows,
    texts_of,
    write_table,
)
from skilltrain.workers import WorkersConfig

ONE = WorkersConfig(num=1)
GOLD_BODY = "read the pages of a pdf file and print them"  # 10 words, 8 trigrams
SKILLS_HERE = [
    Skill("gold", "pdf-reader", "", GOLD_BODY),
    Skill("name", "PDF_Reader", "", "something else altogether here"),
    Skill("body", "paper", "", GOLD_BODY + " twice"),  # 8 shared of 9 trigrams
    Skill("vector", "papers", "", "wholly other words stand in this one"),
    Skill("far", "git", "", "commit and push to a remote"),
]
VECTORS = np.array([[1, 0], [0, 1], [0, 1], [0.96, 0.28], [0.6, 0.8]], dtype=np.float32)
QUERY_VECTOR = np.array([0.8, 0.6], dtype=np.float32)  # cosines: .8, .6, .6, .936, .96
POSITION = {skill.skill_id: place for place, skill in enumerate(SKILLS_HERE)}
CLUSTER_OF = {"gold": 3, "name": 0, "body": 3, "vector": 1, "far": 2}


FAKE_ENCODER = SimpleNamespace(model=SimpleNamespace(dim=2))


def known_chunks(_, skills):
    return ChunkVectors.one_each(VECTORS[[POSITION[skill.skill_id] for skill in skills]])


@pytest.fixture(autouse=True)
def encoder(monkeypatch):
    monkeypatch.setattr(module, "open_encoder", lambda source: FAKE_ENCODER)
    monkeypatch.setattr(module, "encode_chunks", known_chunks)
    monkeypatch.setattr(module, "encode_queries", lambda _, texts: np.tile(QUERY_VECTOR, (len(texts), 1)))


def rankings(*rows, query_id="q1", stage="semantic", scores=None):
    return table_from_rows(
        [
            {"query_id": query_id, "skill_id": skill_id, "rank": rank, "score": score, "stage": stage}
            for rank, (skill_id, score) in enumerate(zip(rows, scores or [0.5] * len(rows), strict=True), 1)
        ],
        RANKINGS,
    )


@pytest.fixture
def found(tmp_path):
    """rankings, verdicts, layers → skill_id → (layer, value, gold skill or None)."""

    def find(table, verdicts, layers, skills=SKILLS_HERE):
        write_table(
            [{"skill_id": s, "cluster": c} for s, c in CLUSTER_OF.items()], CLUSTERS, tmp_path / "clusters.parquet"
        )
        candidates = dict(open_candidates(table, skills, verdicts, "pool"))
        pool = FilterPool(
            skills, list(candidates.values()), list(candidates), EncoderSource(source="x"),
            tmp_path / "clusters.parquet", ONE,
        )  # fmt: skip
        against = find_false_negatives(pool, candidates, layers)
        return {drop.skill_id: (drop.filter, drop.value, drop.other_id) for drop in against.values()}

    return find


def required(*skill_ids: str) -> dict[str, dict[str, Verdict]]:
    return {"q1": dict.fromkeys(skill_ids, Verdict.REQUIRED)}


JUDGED = required("gold")
THREE = [NameLayer(), JaccardLayer(), CosineLayer()]
OTHERS = [ClusterLayer(), CeilingLayer(), CeilingLayer(scores="ranking")]
# cosines to the query: gold .8; name .6, vector .936, far .96
OVER = {"vector": ("ceiling", pytest.approx(0.936), "gold"), "far": ("ceiling", pytest.approx(0.96), "gold")}


@pytest.mark.parametrize(
    ("candidates", "verdicts", "layers", "dropped"),
    [
        ("name body vector far", JUDGED, THREE,  # the gold is named
         {"name": ("name", 1.0, "gold"), "body": ("jaccard", pytest.approx(8 / 9), "gold"),
          "vector": ("cosine", pytest.approx(0.96), "gold")}),
        ("body vector", JUDGED, [JaccardLayer(above=8 / 9), CosineLayer(above=float(VECTORS[3, 0]))], {}),  # exclusive
        ("name body vector", JUDGED, [NameLayer()], {"name": ("name", 1.0, "gold")}),  # a layer left out does not run
        ("name body vector", JUDGED, [], {}),
        ("name gold far", {"q1": {"gold": Verdict.USEFUL}}, [NameLayer()], {"name": ("name", 1.0, "gold")}),
        ("name body", {"q1": {**JUDGED["q1"], "name": Verdict.REJECTED, "body": Verdict.IRRELEVANT}},
         [NameLayer(), JaccardLayer()], {}),  # a judgement outranks a likeness
        ("name far", required("vector", "gold", "body"), [CosineLayer(above=0.5)],  # of several golds the first by id
         {"name": ("cosine", pytest.approx(1.0), "body"), "far": ("cosine", pytest.approx(0.8), "body")}),
        ("name body vector", required("gone"), [*THREE, *OTHERS], {}),  # a gold outside the pool
        ("name body", JUDGED, [ClusterLayer()], {"body": ("cluster", 1.0, "gold")}),
        ("name vector far", JUDGED, [CeilingLayer()], OVER),
        ("name vector far", JUDGED, [CeilingLayer(relative_margin=0.24)], OVER),  # ceiling .608
        ("name vector far", JUDGED, [CeilingLayer(relative_margin=0.26)],  # ceiling .592
         OVER | {"name": ("ceiling", pytest.approx(0.6), "gold")}),
        ("name vector far", JUDGED, [CeilingLayer(relative_margin=None, absolute_margin=0.19)], OVER),
        ("name vector far", JUDGED, [CeilingLayer(relative_margin=None, absolute_margin=0.21)],
         OVER | {"name": ("ceiling", pytest.approx(0.6), "gold")}),
        ("name far", required("gold", "body"), [CeilingLayer(relative_margin=0)],  # .8 and .6: the weakest counts
         {"far": ("ceiling", pytest.approx(0.96), "body")}),
    ],
)  # fmt: skip
def test_what_layers_drop(found, candidates, verdicts, layers, dropped):
    assert found(rankings(*candidates.split()), verdicts, layers) == dropped


def test_siblings_of_a_template_stay_unless_plain_trigrams_are_asked_for(found):
    template = "automate {} tasks via the hub after you have searched all its tools for the current schemas"
    siblings = [Skill(name, f"{name}-automation", "", template.format(name)) for name in ("a", "b", "c", "d", "e", "f")]
    copy = Skill("a2", "a-automation", "", template.format("a") + " first")
    table, verdicts, pool = rankings("a2", "b", "c"), required("a"), [*siblings, copy]
    assert set(found(table, verdicts, [JaccardLayer(max_names=None)], pool)) == {"a2", "b", "c"}
    assert set(found(table, verdicts, [JaccardLayer()], pool)) == {"a2"}


def test_a_ceiling_by_ranking_takes_the_sources_own_scores(found):
    both = pa.concat_tables(
        [
            rankings("gold", "name", "body", scores=[10.0, 9.6, 9.4], stage="lexical"),
            rankings("name", "far", scores=[0.9, 0.1]),  # ranked no gold: nothing to hold against
            rankings("gold", "vector", scores=[-2.0, -2.05], stage="teacher"),
        ]
    )
    dropped = found(both, JUDGED, [CeilingLayer(scores="ranking")])
    assert dropped == {"name": ("ceiling", 9.6, "gold"), "vector": ("ceiling", -2.05, "gold")}


def test_a_window_keeps_ranks_of_the_sources_it_names(found):
    table = pa.concat_tables([rankings("name", "body", "vector", "far"), rankings("gold", "far", stage="random")])
    dropped = found(table, {}, [RankWindowLayer(ranks={"semantic": (2, 3)})])
    assert dropped == {"name": ("rank_window", 1.0, None), "far": ("rank_window", 4.0, None)}
    assert set(found(table, {}, [RankWindowLayer(ranks={"semantic": (2, None)})])) == {"name"}
    with pytest.raises(SkilltrainError, match=r"no candidate is of source 'bm25' \(sources: random, semantic\)"):
        found(table, JUDGED, [RankWindowLayer(ranks={"bm25": (1, 3)})])


class InitialLayer(Config):
    """A layer of one's own."""

    name: Literal["initial"] = "initial"

    def check(self, pool, candidates):
        initials = np.array([float(ord(skill.name[0])) for skill in pool.skills])
        here = initials[candidates.left["skill"]]
        for gold in candidates.golds:
            yield gold, np.where(here == initials[gold], here, np.nan)

    def explain(self, value):
        return f"begins with {chr(int(value))} as does"


def test_a_new_layer_is_one_class(found):
    dropped = found(rankings("name", "vector", "far"), JUDGED, [NameLayer(), InitialLayer()])
    assert dropped == {"name": ("name", 1.0, "gold"), "vector": ("initial", float(ord("p")), "gold")}


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=20), st.floats(0, 1))
def test_the_size_bound_never_changes_the_answer(tokens, above):
    bodies = ["a b c d e a b c", " ".join(tokens)]
    sets = [word_trigrams(body) for body in bodies]

    class Sets(list):
        starts = np.cumsum([0, *(len(one) for one in sets)])

    pool: Any = SimpleNamespace(trigrams=lambda max_names: Sets(sets))
    candidates: Any = SimpleNamespace(left={"skill": np.array([1])}, golds=np.array([0]))
    ((_, (value,)),) = JaccardLayer(above=above).check(pool, candidates)
    exact = jaccard(*sets)
    assert (value == exact) if exact > above else np.isnan(value)


def test_bodies_of_every_kind_are_compared(found):
    odd = ["", "word", "word", "\U00012000\U00012001\U00012002", "read it " * 2_000_000, "read it " * 2_000_001]
    skills = [Skill(str(n), f"name {n}", "", body) for n, body in enumerate(odd)]
    table = pa.concat_tables([rankings("2", "0", query_id="q1"), rankings("5", "3", query_id="q4")])
    verdicts = {"q1": {"1": Verdict.REQUIRED}, "q4": {"4": Verdict.REQUIRED}}
    assert set(found(table, verdicts, [JaccardLayer()], skills)) == {"2", "5"}
    nameless = [Skill("a", "--", "", ""), Skill("b", "_", "", "")]
    assert not found(rankings("b"), required("a"), [NameLayer()], nameless), "no name is no common name"


def test_rows_by_query_keeps_row_order():
    table = pa.concat_tables([rankings("a", query_id="z"), rankings("a", "b"), rankings("b", query_id="z")])
    assert {k: v.tolist() for k, v in rows_by_query(table).items()} == {"q1": [1, 2], "z": [0, 3]}
    assert rows_by_query(table.slice(0, 0)) == {}
    assert texts_of(table.column("query_id")) == ["z", "q1", "q1", "z"]


@pytest.fixture
def folder(tmp_path):
    write_table(rows_of(SKILLS_HERE), SKILLS, tmp_path / "pool.parquet")
    (tmp_path / "queries").mkdir()
    judged = {"query_id": "q1", "skill_id": "gold", "verdict": "required", "judge": "human"}
    write_table([judged], JUDGEMENTS, tmp_path / "queries")
    query = {"query_id": "q1", "text": "print this pdf", "kind": "single", "origin": "test", "split": "train"}
    write_table([query], QUERIES, tmp_path / "queries")
    write_table([{"skill_id": s, "cluster": c} for s, c in CLUSTER_OF.items()], CLUSTERS, tmp_path / "clusters.parquet")
    both = pa.concat_tables([rankings("gold", "name", "body", "far"), rankings("vector", "far", stage="random")])
    write_table(both, RANKINGS, tmp_path / "rankings.parquet")
    (tmp_path / "out").mkdir()
    return tmp_path


def settings(folder, **changes):
    values = {
        "stage": "filter", "pool": folder / "pool.parquet", "queries": folder / "queries",
        "rankings": folder / "rankings.parquet", "encoder": {"source": "x"}, "out": folder / "out",
        "workers": {"num": 1},
    }  # fmt: skip
    return validate(FilterConfig, values | changes, "recipe")


def test_the_stage_splits_rankings_into_kept_and_dropped(folder):
    summary = run_filter(settings(folder), folder / "out")
    kept = [(row["stage"], row["skill_id"], row["rank"]) for row in read_table(folder / "out", RANKINGS).to_pylist()]
    assert kept == [("semantic", "far", 4), ("random", "far", 2)]
    dropped = read_table(folder / "out", DROPPED).to_pylist()
    assert [row["skill_id"] for row in dropped] == ["gold", "name", "body", "vector"]
    assert [(row["source"], row["other_id"], row["reason"]) for row in dropped] == [
        ("semantic", None, "judged required for this query"),
        ("semantic", "gold", "same name as a gold skill"),
        ("semantic", "gold", "body overlap 0.889 > 0.6 with a gold skill"),
        ("random", "gold", "cosine 0.960 > 0.92 to a gold skill"),
    ]
    assert dropped[0]["value"] is None and dropped[1]["value"] == 1.0
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["dropped.parquet", "rankings.parquet"]
    assert summary["dropped_by_layer"] == {"judged": 1, "name": 1, "jaccard": 1, "cosine": 1}
    assert summary["kept_by_source"] == {"random": 1, "semantic": 1}
    assert summary["num_candidates"] == 6 and summary["num_kept"] == 2 and summary["num_dropped"] == 4
    summary = run_filter(settings(folder, judged_positives="keep"), folder / "out")  # for the reranker
    assert "gold" in read_table(folder / "out", RANKINGS).column("skill_id").to_pylist()
    assert summary["dropped_by_layer"]["judged"] == 0
    write_table([], RANKINGS, folder / "rankings.parquet")
    assert run_filter(settings(folder), folder / "out")["num_kept"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": None}, "layer 'cosine' needs the section 'encoder'"),
        ({"layers": [{"name": "name"}, {"name": "name"}]}, "a layer appears twice"),
        ({"layers": [{"name": "nmae"}]}, "layers.0"),
        ({"layers": [{"name": "jaccard", "above": 60}]}, "layers.0.above"),
        ({"layers": [{"name": "ceiling"}], "encoder": None}, "layer 'ceiling' needs the section 'encoder'"),
        ({"layers": [{"name": "cluster"}]}, "layer 'cluster' needs 'clusters'"),
        ({"layers": [{"name": "ceiling", "relative_margin": None}]}, "needs relative_margin or absolute_margin"),
        ({"layers": [{"name": "rank_window", "ranks": {"semantic": [9, 2]}}]}, "1 <= first <= last"),
    ],
)
def test_settings_that_cannot_work_are_refused(folder, changes, message):
    with pytest.raises(SkilltrainError, match=message):
        settings(folder, **changes)


def test_all_layers_run_from_a_recipe(folder):
    layers = [
        {"name": "cluster"},
        {"name": "ceiling", "relative_margin": 0.1},
        {"name": "rank_window", "ranks": {"semantic": [1, 2]}},
    ]
    summary = run_filter(settings(folder, layers=layers, clusters=folder / "clusters.parquet"), folder / "out")
    assert summary["dropped_by_layer"] == {"judged": 1, "cluster": 1, "ceiling": 3, "rank_window": 0}
    reasons = [row["reason"] for row in read_table(folder / "out", DROPPED).to_pylist()]
    assert reasons[1] == "in one near-duplicate cluster with a gold skill"
    assert reasons[2] == "score 0.960 for the query too close to that of a gold skill"


@pytest.mark.parametrize(
    ("spec", "path", "rows", "message"),
    [
        (RANKINGS, "rankings.parquet", rankings("stranger"),
         r"pool.parquet: 1 ranked skill\(s\) are not in this pool, 'stranger'"),
        (QUERIES, "queries", [], r"queries: 1 ranked queries are not here, 'q1' among them"),
        (CLUSTERS, "clusters.parquet", [{"skill_id": "gold", "cluster": 0}],
         r"clusters\.parquet: 4 skill\(s\) of the pool are in no cluster, 'body'"),
    ],
)  # fmt: skip
def test_tables_that_do_not_belong_together_are_refused(folder, spec, path, rows, message):
    write_table(rows, spec, folder / path)
    config = settings(folder, layers=[{"name": "cluster"}], clusters=folder / "clusters.parquet")
    with pytest.raises(SkilltrainError, match=message):
        run_filter(config, folder / "out")
