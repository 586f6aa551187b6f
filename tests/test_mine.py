"""Mining finds negative candidates of each query in four sources."""

from pathlib import Path

import numpy as np
import pytest

from benchmark_folders import write_ours, write_pool
from faults import raises
from skilltrain.config import validate
from skilltrain.data import mine as mine_module
from skilltrain.data.mine import Mine
from skilltrain.plugins import BUILT_IN
from skilltrain.records import Skill
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.tables import DROPPED, QUERIES, RANKINGS, read_table, select_queries, write_table


def skill(skill_id, name, category=None, body="body"):
    """Make a skill without a description."""
    return Skill(skill_id, name, "", body, category=category)


POOL = [
    skill("s0", "pdf-reader", "docs", "read pdf pages"),
    skill("s1", "PDF Reader", "docs", "another pdf reader"),
    skill("s2", "docx-writer", "docs", "write word files"),
    skill("s3", "git-commit", "code", "commit changes"),
    skill("s4", "git-push", "code", "push pdf changes"),
    skill("s5", "loose", None, "weather tomorrow"),
]
# Their cosines to the query (1, 0) are 1, .8, .6, 0, -.6 and .28.
VECTORS = np.array(
    [[1, 0], [0.8, 0.6], [0.6, 0.8], [0, 1], [-0.6, 0.8], [0.28, 0.96]], dtype=np.float32
)

QUERY = ("q1", "read a pdf", "train")


class Workshop:
    """Writes the inputs of the stage, runs it with given vectors and reads its output."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.out = folder / "out"
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
        """Write queries (id, text, split) and verdicts by query and skill id.

        Without `vectors`, every query has the vector (1, 0).
        """
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

    def mine_candidates(self, *positives, skills=POOL, **changes):
        """Mine for one query with these positives. Returns scores by source and skill."""
        self.write_pool(skills)
        self.write_queries([QUERY], {"q1": dict.fromkeys(positives, "required")})
        self.run(**changes)
        scores_by_source = {}
        for row in self.rows():
            scores = scores_by_source.setdefault(row["stage"], {})
            scores[row["skill_id"]] = row["score"]
        return scores_by_source


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    return Workshop(tmp_path, monkeypatch)


def test_each_source_finds_its_candidates(workshop):
    """s1 has the name of the positive s0, s4 shares a word with the query, s5 has no category."""
    candidates = workshop.mine_candidates("s0", depth=3, num_taxonomy=9, num_random=9)

    # Semantic: the nearest skills. The positive does not count for the depth.
    assert list(candidates["semantic"]) == ["s1", "s2", "s5"]
    assert [*candidates["semantic"].values()] == pytest.approx([0.8, 0.6, 0.28])
    # Lexical: skills with a word of the query.
    assert candidates["lexical"].keys() == {"s1", "s4"}
    assert all(score > 0 for score in candidates["lexical"].values())
    # Taxonomy: the category of the positive under another name.
    assert candidates["taxonomy"] == {"s2": pytest.approx(0.6)}
    # Random: other categories, the nearest first.
    assert list(candidates["random"]) == ["s5", "s3", "s4"]


def test_positives_are_no_candidates(workshop):
    candidates = workshop.mine_candidates("s0", "s2", depth=3, num_taxonomy=9, num_random=9)

    for scores in candidates.values():
        assert not {"s0", "s2"} & scores.keys()
    assert list(candidates["semantic"]) == ["s1", "s5", "s3"]


def test_taxonomy_joins_categories_of_positives(workshop):
    candidates = workshop.mine_candidates("s0", "s3", num_taxonomy=9, num_random=9)

    assert candidates["taxonomy"].keys() == {"s2", "s4"}
    assert candidates["random"].keys() == {"s5"}


def test_lexical_may_reorder_semantic_candidates(workshop):
    candidates = workshop.mine_candidates("s0", depth=3, lexical_among="semantic")

    assert list(candidates["semantic"]) == ["s1", "s2", "s5"]
    assert list(candidates["lexical"]) == ["s1"]


def test_lexical_among_all_skills_equals_bm25(workshop):
    among_semantic = workshop.mine_candidates("s0", depth=9, lexical_among="semantic")["lexical"]
    among_pool = workshop.mine_candidates("s0", depth=9, lexical_among="pool")["lexical"]

    assert list(among_semantic.items()) == list(among_pool.items())


@pytest.mark.parametrize("category", [None, "", "  "])
def test_positive_without_category_has_no_taxonomy(workshop, category, capsys):
    skills = [*POOL[:5], skill("s5", "loose", category)]

    candidates = workshop.mine_candidates("s5", skills=skills, num_random=9)

    assert "taxonomy" not in candidates
    assert candidates["random"].keys() == {"s0", "s1", "s2", "s3", "s4"}
    messages = capsys.readouterr().err
    assert "warning: no query has a taxonomy candidate; give the pool categories" in messages


def test_single_source_finds_same_candidates(workshop):
    candidates = workshop.mine_candidates("s0")

    for source in BUILT_IN["source"]:
        expected = {source: candidates[source]}
        assert workshop.mine_candidates("s0", sources=[source]) == expected


def test_depth_of_zero_switches_source_off(workshop):
    assert workshop.mine_candidates("s0", depth=0, num_random=0).keys() == {"taxonomy"}


def test_pool_of_one_skill_has_no_candidate(workshop):
    assert workshop.mine_candidates("s0", skills=POOL[:1]) == {}


# The stage --------------------------------------------------------------------


@pytest.fixture
def shop(workshop):
    """A workshop with four queries. The positive of q2 is not in the pool, q4 has no judgement."""
    workshop.write_pool(POOL[::-1], VECTORS[::-1])
    queries = [
        ("q2", "weather", "train"),
        QUERY,
        ("q3", "read a pdf", "dev"),
        ("q4", "read a pdf", "train"),
    ]
    verdicts = {
        "q1": {"s0": "required", "s3": "rejected"},
        "q2": {"gone": "required"},
        "q3": {"s0": "required"},
    }
    workshop.write_queries(queries, verdicts)
    return workshop


def test_stage_ranks_candidates_by_source(shop):
    summary = shop.run(depth=6)

    assert {row["query_id"] for row in shop.rows()} == {"q1"}
    semantic = [(row["skill_id"], row["rank"]) for row in shop.rows() if row["stage"] == "semantic"]
    # s3 is rejected and may be a negative.
    assert semantic == [("s1", 1), ("s2", 2), ("s5", 3), ("s3", 4), ("s4", 5)]
    assert summary["num_candidates"] == {"semantic": 5, "lexical": 2, "taxonomy": 1, "random": 3}
    files = sorted(path.name for path in shop.out.iterdir())
    assert files == ["dropped.parquet", "rankings.parquet"]


def test_stage_drops_queries_without_positive(shop):
    summary = shop.run(depth=6)

    assert summary["num_queries_dropped"] == 2
    dropped = {row["query_id"]: row for row in read_table(shop.out, DROPPED).to_pylist()}
    assert dropped["q2"]["skill_id"] == "gone"
    assert "not" not in dropped["q2"]["reason"]
    assert dropped["q4"]["skill_id"] == ""
    assert "no positive skill" in dropped["q4"]["reason"]


def test_order_of_pool_changes_nothing(shop):
    shop.run(depth=6)
    rankings = (shop.out / "rankings.parquet").read_bytes()

    shop.write_pool(POOL)
    shop.run(depth=6)

    assert (shop.out / "rankings.parquet").read_bytes() == rankings


@pytest.mark.parametrize(
    ("pool", "settings", "code"),
    [
        ([skill("other", "other")], {}, "wrong-pool"),
        ([], {}, "empty-pool"),
        (POOL, {"split": "test"}, "empty-split"),
    ],
)
def test_unminable_inputs_are_refused(shop, pool, settings, code):
    shop.write_pool(pool)

    with raises(code):
        shop.run(**settings)


def test_lexical_among_semantic_needs_both_sources(shop):
    with pytest.raises(ValueError, match="needs both semantic and lexical"):
        shop.run(lexical_among="semantic", sources=["lexical"])


def test_queries_of_all_splits_are_selected(shop):
    queries = select_queries(shop.folder / "queries", None)

    assert [query.query_id for query in queries] == ["q1", "q2", "q3", "q4"]


def test_removed_setting_is_refused():
    with raises("unknown-setting") as error:
        validate(Mine, {"stage": "mine", "index": "HNSW32"}, "test")

    assert "search is always exact" in str(error.value)


def write_many_queries(workshop):
    """Write 300 skills in 7 categories, some of them copies, and 90 queries with 1 to 3 answers."""
    generator = np.random.default_rng(0)
    words = [f"word{number}" for number in range(40)]

    def random_text(num_words):
        return " ".join(generator.choice(words, num_words))

    skills = []
    for i in range(300):
        category = f"c{i % 7}" if i % 11 else None
        skills.append(skill(f"s{i:03}", f"name {i % 250}", category, random_text(30)))
    vectors = generator.normal(size=(390, 12)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[50:90] = vectors[40]
    workshop.write_pool(skills, vectors[:300])

    queries = []
    verdicts = {}
    for i in range(90):
        query_id = f"q{i:03}"
        queries.append((query_id, f"{i} {random_text(12)}", "train"))
        positives = [f"s{(i * 17 + n * 5) % 300:03}" for n in range(1 + i % 3)]
        verdicts[query_id] = dict.fromkeys(positives, "required")
    workshop.write_queries(queries, verdicts, vectors[300:])


def test_other_queries_change_no_candidates(workshop):
    write_many_queries(workshop)
    summary = workshop.run(depth=20)
    assert summary["num_candidates"]["semantic"] == 90 * 20
    expected = [row for row in workshop.rows() if row["query_id"] == "q041"]

    # Leave q041 as the only query of its split.
    folder = workshop.folder / "queries"
    rows = read_table(folder, QUERIES).to_pylist()
    for row in rows:
        row["split"] = "train" if row["query_id"] == "q041" else "dev"
    write_table(rows, QUERIES, folder)
    workshop.run(depth=20)

    assert workshop.rows() == expected
