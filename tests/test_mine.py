"""Candidates from four sources: which skills, in which order, the same for a query alone and among others."""

from pathlib import Path

import numpy as np
import pytest

from benchmark_folders import write_ours, write_pool
from skilltrain.config import validate
from skilltrain.data import mine as mine_module
from skilltrain.data.mine import Mine
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import BUILT_IN
from skilltrain.records import Skill
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.tables import DROPPED, QUERIES, RANKINGS, read_table, select_queries, write_table


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
VECTORS = np.array(
    [[1, 0], [0.8, 0.6], [0.6, 0.8], [0, 1], [-0.6, 0.8], [0.28, 0.96]], dtype=np.float32
)

QUERY = ("q1", "read a pdf", "train")


class Workshop:
    """Tables in a folder, vectors in place of a model, and the stage that is run on them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.out = folder, folder / "out"
        self.vectors: dict[str, np.ndarray] = {}
        self.query_vectors: dict[str, np.ndarray] = {}
        monkeypatch.setattr(mine_module, "open_encoder", lambda source: self)

    def encode_queries(self, texts):
        return np.stack([self.query_vectors[text] for text in texts])

    def encode_chunks(self, skills):
        return ChunkVectors.one_each(np.stack([self.vectors[skill.skill_id] for skill in skills]))

    def write_pool(self, skills, vectors=VECTORS):
        write_pool(self.folder / "pool", skills)
        self.vectors = {s.skill_id: vector for s, vector in zip(skills, vectors, strict=False)}

    def write_queries(self, queries, verdicts, vectors=None):
        """`queries`: (id, text, split); `verdicts`: query → skill → verdict. Without `vectors` each is (1, 0)."""
        write_ours(self.folder / "queries", queries, verdicts)
        vectors = np.array([[1, 0]] * len(queries), np.float32) if vectors is None else vectors
        self.query_vectors = {
            text: vector for (_, text, _), vector in zip(queries, vectors, strict=True)
        }

    def run(self, **changes):
        paths = {"pool": self.folder / "pool", "queries": self.folder / "queries", "out": self.out}
        values = {"stage": "mine", "encoder": {"source": "x"}, **paths, **changes}
        return Mine.model_validate(values).run(self.out)

    def rows(self):
        return read_table(self.out, RANKINGS).to_pylist()

    def mined(self, *positives, skills=POOL, **changes):
        """source → {skill_id: score, best first} of one query with these positives."""
        self.write_pool(skills)
        self.write_queries([QUERY], {"q1": dict.fromkeys(positives, "required")})
        self.run(**changes)
        found = {}
        for row in self.rows():
            found.setdefault(row["stage"], {})[row["skill_id"]] = row["score"]
        return found


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    return Workshop(tmp_path, monkeypatch)


def test_what_each_source_finds_for_one_positive(workshop):
    """s1 has the positive's name, s5 no category, s4 shares a term with the query and is the last by cosine."""
    found = workshop.mined("s0", depth=3, num_taxonomy=9, num_random=9)
    assert list(found["semantic"]) == ["s1", "s2", "s5"], (
        "the nearest but the positive, which costs no depth"
    )
    assert [*found["semantic"].values()] == pytest.approx([0.8, 0.6, 0.28])
    assert found["lexical"].keys() == {"s1", "s4"} and all(
        score > 0 for score in found["lexical"].values()
    )
    assert found["taxonomy"] == {"s2": pytest.approx(0.6)}, "its category under another name"
    assert list(found["random"]) == ["s5", "s3", "s4"], "other categories, the nearest first"


def test_positives_are_no_candidates_of_any_source_and_their_categories_count_together(workshop):
    found = workshop.mined("s0", "s2", depth=3, num_taxonomy=9, num_random=9)
    assert not {"s0", "s2"} & {skill_id for ranked in found.values() for skill_id in ranked}
    assert list(found["semantic"]) == ["s1", "s5", "s3"]
    found = workshop.mined("s0", "s3", num_taxonomy=9, num_random=9)
    assert found["taxonomy"].keys() == {"s2", "s4"} and found["random"].keys() == {"s5"}, (
        "of two categories"
    )


def test_lexical_candidates_may_be_the_semantic_ones_in_the_order_of_bm25(workshop):
    found = workshop.mined("s0", depth=3, lexical_among="semantic")
    assert list(found["semantic"]) == ["s1", "s2", "s5"] and list(found["lexical"]) == ["s1"]
    wider, alone = (
        workshop.mined("s0", depth=9, lexical_among=among)["lexical"]
        for among in ("semantic", "pool")
    )
    assert wider == alone and list(wider) == list(alone), (
        "with the whole pool among them it is what BM25 finds alone"
    )


@pytest.mark.parametrize("category", [None, "", "  "])
def test_a_positive_without_category_has_no_taxonomy_and_all_others_are_elsewhere(
    workshop, category, capsys
):
    found = workshop.mined("s5", skills=[*POOL[:5], skill("s5", "loose", category)], num_random=9)
    assert "taxonomy" not in found and found["random"].keys() == {"s0", "s1", "s2", "s3", "s4"}
    warnings = [line for line in capsys.readouterr().err.splitlines() if "taxonomy" in line]
    assert warnings[0].startswith(
        "warning: no query has a taxonomy candidate; give the pool categories"
    )


def test_sources_can_be_switched_off_and_give_alone_what_they_give_among_all(workshop):
    among_all = workshop.mined("s0")
    for source in BUILT_IN["source"]:
        assert workshop.mined("s0", sources=[source]) == {source: among_all[source]}
    assert workshop.mined("s0", depth=0, num_random=0).keys() == {"taxonomy"}
    assert workshop.mined("s0", skills=POOL[:1]) == {}, "a pool of one skill has no candidate"


# The stage --------------------------------------------------------------------


@pytest.fixture
def shop(workshop):
    """Two train queries (one without a gold in the pool), a dev query and one without any judgement."""
    workshop.write_pool(POOL[::-1], VECTORS[::-1])
    queries = [
        ("q2", "weather", "train"),
        QUERY,
        ("q3", "read a pdf", "dev"),
        ("q4", "read a pdf", "train"),
    ]
    required = {"q2": {"gone": "required"}, "q3": {"s0": "required"}}
    workshop.write_queries(queries, {"q1": {"s0": "required", "s3": "rejected"}, **required})
    return workshop


def test_the_stage_writes_rankings_by_source_and_names_lost_queries_whatever_the_pools_order(shop):
    summary = shop.run(depth=6)
    assert {row["query_id"] for row in shop.rows()} == {"q1"}
    semantic = [(row["skill_id"], row["rank"]) for row in shop.rows() if row["stage"] == "semantic"]
    # s3 was turned down: it may be a negative.
    assert semantic == [("s1", 1), ("s2", 2), ("s5", 3), ("s3", 4), ("s4", 5)]
    assert summary["num_candidates"] == {"semantic": 5, "lexical": 2, "taxonomy": 1, "random": 3}
    assert summary["num_queries_dropped"] == 2
    dropped = {row["query_id"]: row for row in read_table(shop.out, DROPPED).to_pylist()}
    assert dropped["q2"]["skill_id"] == "gone" and "not" not in dropped["q2"]["reason"]
    assert dropped["q4"]["skill_id"] == "" and "no positive skill" in dropped["q4"]["reason"]
    assert sorted(path.name for path in shop.out.iterdir()) == [
        "dropped.parquet",
        "rankings.parquet",
    ]
    first = (shop.out / "rankings.parquet").read_bytes()
    shop.write_pool(POOL)
    shop.run(depth=6)
    assert (shop.out / "rankings.parquet").read_bytes() == first


@pytest.mark.parametrize(
    ("pool", "settings", "message"),
    [
        ([skill("other", "other")], {}, "has a positive in the pool"),
        ([], {}, "holds no skill"),
        (POOL, {"split": "test"}, r"no query of split 'test' \(splits here: dev, train\)"),
        (
            POOL,
            {"lexical_among": "semantic", "sources": ["lexical"]},
            "needs both semantic and lexical",
        ),
    ],
)
def test_what_cannot_be_mined_is_refused(shop, pool, settings, message):
    shop.write_pool(pool)
    with pytest.raises((SkilltrainError, ValueError), match=message):
        shop.run(**settings)
    assert [q.query_id for q in select_queries(shop.folder / "queries", None)] == [
        "q1",
        "q2",
        "q3",
        "q4",
    ]


def test_an_approximate_index_is_no_setting_any_more():
    with pytest.raises(SkilltrainError, match=r"'index' \(removed: search is always exact\)"):
        validate(Mine, {"stage": "mine", "index": "HNSW32"}, "test")


def large(workshop):
    """300 skills in 7 categories, some of them copies, and 90 queries with one to three positives."""
    generator = np.random.default_rng(0)
    words = [f"word{number}" for number in range(40)]
    text = lambda count: " ".join(generator.choice(words, count))  # noqa: E731
    skills = [
        skill(f"s{i:03}", f"name {i % 250}", f"c{i % 7}" if i % 11 else None, text(30))
        for i in range(300)
    ]
    vectors = generator.normal(size=(390, 12)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[50:90] = vectors[40]
    queries = [(f"q{i:03}", f"{i} {text(12)}", "train") for i in range(90)]
    golds = {
        f"q{i:03}": [f"s{(i * 17 + n * 5) % 300:03}" for n in range(1 + i % 3)] for i in range(90)
    }
    workshop.write_pool(skills, vectors[:300])
    verdicts = {query_id: dict.fromkeys(several, "required") for query_id, several in golds.items()}
    workshop.write_queries(queries, verdicts, vectors[300:])


def test_a_query_alone_gets_what_it_gets_among_others(workshop):
    large(workshop)
    summary = workshop.run(depth=20)
    assert summary["num_candidates"]["semantic"] == 90 * 20
    among_others = [row for row in workshop.rows() if row["query_id"] == "q041"]
    queries = workshop.folder / "queries"
    rows = read_table(queries, QUERIES).to_pylist()
    write_table(
        [row | {"split": "train" if row["query_id"] == "q041" else "dev"} for row in rows],
        QUERIES,
        queries,
    )
    workshop.run(depth=20)
    assert workshop.rows() == among_others
