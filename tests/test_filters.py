"""The stage filter: which candidates each layer drops as false negatives, and why."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_folders import write_ours, write_pool
from skilltrain.config import validate
from skilltrain.data import filter_layers as module
from skilltrain.data.filter import Filter
from skilltrain.data.filter_layers import PAIR, JaccardLayer
from skilltrain.data.near_duplicates import jaccard, word_trigrams
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.tables import (
    CLUSTERS,
    DROPPED,
    RANKINGS,
    read_table,
    rows_by_query,
    table_from_rows,
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
POSITION = {skill.skill_id: position for position, skill in enumerate(SKILLS_HERE)}
CLUSTER_OF = {"gold": 3, "name": 0, "body": 3, "vector": 1, "far": 2}


def rankings(*skill_ids, query_id="q1", stage="semantic"):
    """Return rankings of one query and stage, the best skill first."""
    columns = {"query_id": query_id, "score": 0.5, "stage": stage}
    rows = [{"skill_id": s, "rank": rank, **columns} for rank, s in enumerate(skill_ids, 1)]
    return table_from_rows(rows, RANKINGS)


class FilterRun:
    """The stage on tables in a folder, with vectors in place of a model."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / "out"
        self.write(
            rankings("gold", "name", "body", "far"), rankings("vector", "far", stage="random")
        )
        rows = [
            {"skill_id": skill_id, "cluster": cluster} for skill_id, cluster in CLUSTER_OF.items()
        ]
        write_table(rows, CLUSTERS, folder / "clusters")

    def write(self, *tables, verdicts=None, skills=SKILLS_HERE):
        """Write rankings, skills and verdicts, which are {query_id: {skill_id: verdict}}."""
        write_table(pa.concat_tables(tables), RANKINGS, self.folder / "rankings")
        write_pool(self.folder / "pool", skills)
        verdicts = {"q1": {"gold": "required"}} if verdicts is None else verdicts
        queries = [("q1", "print this pdf", "train"), ("q2", "print this pdf", "train")]
        write_ours(self.folder / "queries", queries, verdicts)

    def run(self, **changes):
        """Run the stage; return its summary and its dropped rows."""
        names = ("pool", "queries", "rankings", "clusters", "out")
        values = {
            "stage": "filter",
            **{name: self.folder / name for name in names},
            "encoder": {"source": "x"},
            "workers": {"num": 1},
        }
        summary = validate(Filter, values | changes, "recipe").run(self.out)
        return summary, read_table(self.out, DROPPED).to_pylist()

    def dropped(self, *layers):
        """Return the layer, the value and the gold skill by dropped skill."""
        _, rows = self.run(layers=list(layers), judged_positives="keep")
        return {row["skill_id"]: (row["filter"], row["value"], row["other_id"]) for row in rows}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    def encode_chunks(skills):
        return ChunkVectors.one_each(VECTORS[[POSITION[skill.skill_id] for skill in skills]])

    def encode_queries(texts):
        return np.tile(QUERY_VECTOR, (len(texts), 1))

    encoder = SimpleNamespace(encode_chunks=encode_chunks, encode_queries=encode_queries)
    monkeypatch.setattr(module, "open_encoder", lambda source: encoder)
    return FilterRun(tmp_path)


def required(*skill_ids):
    return {"q1": dict.fromkeys(skill_ids, "required")}


def ceiling(**settings):
    return {"name": "ceiling", **settings}


def window(**ranks):
    return {"name": "rank_window", "ranks": ranks}


JUDGED = required("gold")
NAME = {"name": "name"}
JACCARD = {"name": "jaccard"}
COSINE = {"name": "cosine"}
CLUSTER = {"name": "cluster"}
BY_NAME = {"name": ("name", 1.0, "gold")}
# cosines to the query: gold .8; name .6, vector .936, far .96
OVER = {
    "vector": ("ceiling", pytest.approx(0.936), "gold"),
    "far": ("ceiling", pytest.approx(0.96), "gold"),
}
ALL_OVER = OVER | {"name": ("ceiling", pytest.approx(0.6), "gold")}


@pytest.mark.parametrize(
    ("candidates", "verdicts", "layers", "dropped"),
    [
        (
            "name body vector far",
            JUDGED,
            [NAME, JACCARD, COSINE],  # the gold is named
            {
                **BY_NAME,
                "body": ("jaccard", pytest.approx(8 / 9), "gold"),
                "vector": ("cosine", pytest.approx(0.96), "gold"),
            },
        ),
        ("body", JUDGED, [JACCARD | {"above": 8 / 9}], {}),  # exclusive
        ("vector", JUDGED, [COSINE | {"above": float(VECTORS[3, 0])}], {}),
        ("name body vector", JUDGED, [NAME], BY_NAME),  # a layer left out does not run
        ("name gold far", {"q1": {"gold": "useful"}}, [NAME], BY_NAME),
        (
            "name body",
            {"q1": {"gold": "required", "name": "rejected", "body": "irrelevant"}},
            [NAME, JACCARD],
            {},
        ),
        (
            "name far",
            required("vector", "gold", "body"),
            [COSINE | {"above": 0.5}],  # of several golds the first by id
            {
                "name": ("cosine", pytest.approx(1.0), "body"),
                "far": ("cosine", pytest.approx(0.8), "body"),
            },
        ),
        (
            "name body vector",
            required("gone"),
            [NAME, JACCARD, COSINE, CLUSTER, ceiling()],
            {},
        ),  # outside the pool
        ("name body", JUDGED, [CLUSTER], {"body": ("cluster", 1.0, "gold")}),
        ("name vector far", JUDGED, [ceiling(relative_margin=0.24)], OVER),  # ceiling .608
        ("name vector far", JUDGED, [ceiling(relative_margin=0.26)], ALL_OVER),  # ceiling .592
        (
            "name vector far",
            JUDGED,
            [NAME, ceiling(relative_margin=0.26)],
            BY_NAME | OVER,
        ),  # the first ground counts
        ("name vector far", JUDGED, [ceiling(relative_margin=None, absolute_margin=0.19)], OVER),
        (
            "name vector far",
            JUDGED,
            [ceiling(relative_margin=None, absolute_margin=0.21)],
            ALL_OVER,
        ),
        (
            "name far",
            required("gold", "body"),
            [ceiling(relative_margin=0)],  # .8 and .6: the weakest counts
            {"far": ("ceiling", pytest.approx(0.96), "body")},
        ),
        (
            "name body vector far",
            {},
            [window(semantic=[2, 3])],
            {"name": ("rank_window", 1.0, None), "far": ("rank_window", 4.0, None)},
        ),
        (
            "name body vector far",
            {},
            [window(semantic=[2, None])],
            {"name": ("rank_window", 1.0, None)},
        ),
    ],
)
def test_what_layers_drop(stage, candidates, verdicts, layers, dropped):
    stage.write(rankings(*candidates.split()), rankings("gold", stage="random"), verdicts=verdicts)

    assert stage.dropped(*layers) == dropped


@pytest.mark.parametrize(
    ("layer", "dropped"),
    [(JACCARD, {"a2"}), (JACCARD | {"max_names": None}, {"a2", "b", "c"})],
)
def test_siblings_of_template_are_no_copies(stage, layer, dropped):
    template = "automate {} tasks via the hub after you have searched all its tools for the current"
    bodies = {name: f"{template.format(name)} schemas" for name in "abcdef"}
    siblings = [Skill(name, f"{name}-automation", "", body) for name, body in bodies.items()]
    copy = Skill("a2", "a-automation", "", f"{bodies['a']} first")
    stage.write(rankings("a2", "b", "c"), verdicts=required("a"), skills=[*siblings, copy])

    assert stage.dropped(layer).keys() == dropped


def test_bodies_of_every_kind_are_compared(stage):
    odd = [
        "",
        "word",
        "word",
        "\U00012000\U00012001\U00012002",
        "read it " * 300_000,
        "read it " * 300_001,
    ]
    skills = [Skill(str(n), "--", "", body) for n, body in enumerate(odd)]
    verdicts = {"q1": {"1": "required"}, "q2": {"4": "required"}}

    stage.write(
        rankings("2", "0"), rankings("5", "3", query_id="q2"), verdicts=verdicts, skills=skills
    )

    assert stage.dropped(JACCARD).keys() == {"2", "5"}
    assert stage.dropped(NAME) == {}, "no name is no common name"


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=20), st.floats(0, 1))
def test_size_bound_changes_no_value(tokens, above):
    bodies = "a b c d e a b c", " ".join(tokens)
    pool: Any = SimpleNamespace(
        skills=[Skill(str(n), "", "", body) for n, body in enumerate(bodies)], workers=ONE
    )
    (value,) = JaccardLayer(above=above).check(pool, np.array([(0, 0, 1, 0, 1)], dtype=PAIR))

    exact = jaccard(*map(word_trigrams, bodies))

    assert (value == exact) if exact > above else np.isnan(value)


def test_rows_by_query_keeps_row_order():
    table = pa.concat_tables(
        [rankings("a", query_id="z"), rankings("a", "b"), rankings("b", query_id="z")]
    )

    assert {k: v.tolist() for k, v in rows_by_query(table).items()} == {"q1": [1, 2], "z": [0, 3]}
    assert rows_by_query(table.slice(0, 0)) == {}


def ranked_skills(stage):
    return [
        (row["stage"], row["skill_id"], row["rank"])
        for row in read_table(stage.out, RANKINGS).to_pylist()
    ]


def test_stage_keeps_other_candidates(stage):
    summary, _ = stage.run()

    assert ranked_skills(stage) == [("semantic", "far", 4), ("random", "far", 2)]
    assert {path.name for path in stage.out.iterdir()} == {"dropped.parquet", "rankings.parquet"}
    assert summary == {
        "num_candidates": 6,
        "num_kept": 2,
        "num_dropped": 4,
        "kept_by_source": {"random": 1, "semantic": 1},
        "dropped_by_layer": {"judged": 1, "name": 1, "jaccard": 1, "cosine": 1},
    }


def test_dropped_candidates_have_reasons(stage):
    _, rows = stage.run()

    names = ("skill_id", "source", "other_id", "value", "reason")
    assert [tuple(map(row.get, names)) for row in rows] == [
        ("gold", "semantic", None, None, "judged required for this query"),
        ("name", "semantic", "gold", 1.0, "same name as a gold skill"),
        (
            "body",
            "semantic",
            "gold",
            pytest.approx(8 / 9),
            "body overlap 0.889 > 0.6 with a gold skill",
        ),
        ("vector", "random", "gold", pytest.approx(0.96), "cosine 0.960 > 0.92 to a gold skill"),
    ]


@pytest.mark.parametrize(("positives", "size"), [("keep", "list_size=20"), ("drop", "quotas='{s")])
def test_next_command_fits_candidates(tmp_path, positives, size):
    paths = dict.fromkeys(("pool", "queries", "rankings", "out"), str(tmp_path))
    values = {"stage": "filter", "layers": [{"name": "name"}], "judged_positives": positives}
    config = validate(Filter, values | paths, "recipe")

    *_, line = config.closing_lines({})

    assert line.startswith("next: skilltrain lists ")
    assert f" {size}" in line


def test_judged_positives_stay_for_reranker(stage):
    summary, _ = stage.run(judged_positives="keep")

    assert "gold" in {skill_id for _, skill_id, _ in ranked_skills(stage)}
    assert summary["dropped_by_layer"]["judged"] == 0


def test_reasons_of_cluster_or_ceiling(stage):
    _, rows = stage.run(layers=[CLUSTER, ceiling(relative_margin=0.1)])

    assert [row["reason"] for row in rows][1:3] == [
        "in one near-duplicate cluster with a gold skill",
        "score 0.960 for the query too close to that of a gold skill",
    ]


def test_empty_rankings_are_filtered(stage):
    stage.write(rankings())

    summary, _ = stage.run()

    assert summary["num_kept"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": None}, "layer 'cosine' needs the section 'encoder'"),
        ({"layers": [NAME, NAME]}, "a layer appears twice"),
        ({"layers": [ceiling()], "encoder": None}, "layer 'ceiling' needs the section 'encoder'"),
        ({"layers": [CLUSTER], "clusters": None}, "layer 'cluster' needs 'clusters'"),
        ({"layers": [ceiling(relative_margin=None)]}, "needs relative_margin or absolute_margin"),
        ({"layers": [window(semantic=[9, 2])]}, "1 <= first <= last"),
        (
            {"layers": [window(bm25=[1, 3])]},
            r"no candidate is of source 'bm25' \(sources: random, semantic\)",
        ),
        ({"pool": "other"}, r"other: 4 ranked skill\(s\) are not in this pool, 'body' among them"),
        ({"queries": "other"}, "other: 1 ranked queries are not here, 'q1' among them"),
        (
            {"clusters": "other", "layers": [CLUSTER]},
            r"other.*: 4 skill\(s\) of the pool are in no cluster, 'body'",
        ),
    ],
)
def test_invalid_filter_is_refused(stage, changes, message):
    other = stage.folder / "other"
    write_pool(other, SKILLS_HERE[:1])
    write_ours(other, [], {})
    write_table([{"skill_id": "gold", "cluster": 0}], CLUSTERS, other)

    with pytest.raises(SkilltrainError, match=message):
        stage.run(**{key: other if value == "other" else value for key, value in changes.items()})
