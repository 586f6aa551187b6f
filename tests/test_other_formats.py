"""Files of other tools: BEIR, MTEB, TREC and sentence-transformers, read and written."""

from pathlib import Path

import pytest

from benchmark_folders import write, write_parquet
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.tables import (
    read_queries,
    read_skills,
    read_verdicts,
)
from small_library import skilltrain, succeeds

HEADER = "query-id\tcorpus-id\tscore\n"
CORPUS = [
    {"_id": "d1", "title": "PDF merge", "text": "Join PDF files."},
    {"_id": "d2", "title": "", "text": "Draw a chart."},
    {"_id": "d3", "title": "Sort", "text": "Sort rows."},
]


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """A BEIR folder with judgements of two splits."""
    queries = [{"_id": f"q{n}", "text": f"query {n}", "metadata": {}} for n in (1, 2, 3)]
    files = {
        "queries.jsonl": queries,
        "corpus.jsonl": CORPUS,
        "qrels/train.tsv": f"{HEADER}q1\td1\t2\nq1\td3\t0\nq2\td2\t1\n",
        "qrels/test.tsv": f"{HEADER}q3\td3\t1\n",
    }
    return write(tmp_path / "beir", files)


@pytest.fixture
def pool(beir: Path) -> Path:
    """The pool of the BEIR folder."""
    out = beir.parent / "pool"
    succeeds("pool", f"sources={beir}", f"out={out}")
    return out


def test_beir_corpus_becomes_pool(beir: Path, pool: Path):
    skills = read_skills(pool)

    assert [skill.skill_id for skill in skills] == ["d1", "d2", "d3"]
    # A model sees the same texts in training and in an evaluation on the folder.
    for skill, document in zip(skills, load_benchmark(beir).pool, strict=True):
        assert (skill.name, skill.description) == (document.name, document.description)
        assert skill.body == document.body


def test_mteb_corpus_becomes_pool(tmp_path: Path):
    write_parquet(tmp_path / "corpus" / "test-00000-of-00001.parquet", CORPUS)

    succeeds("pool", f"sources={tmp_path / 'corpus'}", f"out={tmp_path / 'pool'}")

    assert [skill.name for skill in read_skills(tmp_path / "pool")] == ["PDF merge", "", "Sort"]


@pytest.mark.parametrize("name", ["", "queries.jsonl"])
def test_beir_queries_have_judgements(beir: Path, pool: Path, name: str):
    out = beir.parent / "queries"

    succeeds("queries", f"files={beir / name}", f"pool={pool}", f"out={out}")

    splits = {query.query_id: query.split for query in read_queries(out)}
    assert splits == {"q1": "train", "q2": "train", "q3": "test"}
    assert read_verdicts(out) == {
        "q1": {"d1": "required", "d3": "irrelevant"},
        "q2": {"d2": "required"},
        "q3": {"d3": "required"},
    }


def test_mteb_validation_becomes_dev(beir: Path, pool: Path):
    (beir / "qrels" / "train.tsv").rename(beir / "qrels" / "validation.tsv")

    succeeds("queries", f"files={beir}", f"pool={pool}", f"out={beir.parent / 'queries'}")

    assert {query.split for query in read_queries(beir.parent / "queries")} == {"dev", "test"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"qrels/test.tsv": "q3\td9\t1\n"}, "query q3: query 'q3' requires skill 'd9'"),
        ({"qrels/test.tsv": "q9\td1\t1\n"}, "test.tsv, line 1: query 'q9' is not among the"),
        (
            {"qrels/test.tsv": "q3 d1\n"},
            "test.tsv, line 1: has 2 columns (write query, skill and score",
        ),
        ({"qrels/other.tsv": "q3\td1\t1\n"}, "neither its rows nor its file name give a split"),
    ],
)
def test_broken_judgements_are_refused(beir: Path, pool: Path, files, message: str):
    write(beir, files)

    error = skilltrain("queries", f"files={beir}", f"pool={pool}", f"out={beir.parent / 'queries'}")

    assert message in error.error_line


def test_beir_queries_without_qrels_name_folder(tmp_path: Path, beir: Path, pool: Path):
    write(tmp_path, {"q.jsonl": [{"_id": "q1", "text": "one"}]})

    error = skilltrain(
        "queries", f"files={tmp_path / 'q.jsonl'}", f"pool={pool}", "out=never"
    ).error_line

    assert "q.jsonl, line 1: is no query" in error
    assert "put the judgements of BEIR in a folder qrels beside it" in error
