"""Profiles of a benchmark: variety of its queries, and scores by length of the gold bodies."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from benchmark_folders import skillrouter, write
from skilltrain.metrics.benchmarks.benchmark import task_of
from skilltrain.metrics.comparison import SystemResult
from skilltrain.metrics.measures import Relevance
from skilltrain.papers.skillrouter.profiles import (
    diversity,
    gold_body_lengths,
    length_correlation,
    rank_correlation,
)
from skilltrain.records import Query, Skill
from small_library import succeeds


def task(query_id: str, text: str, gold: str, **labels):
    """Return a task whose gold skills have ids of one letter."""
    relevance = Relevance(frozenset(gold), dict.fromkeys(gold, 1.0))
    return task_of(Query(query_id, text, "", "t", "test"), relevance, labels)


TASKS = (
    task("q1", "draw a chart", "a", difficulty="easy", tags=("python", "csv")),
    task("q2", "merge two pdf files", "ab", difficulty="hard", tags=("pdf",)),
    task("q3", "sort", "abc", difficulty="hard", tags=("python",)),
)


def test_diversity_by_hand():
    rows = {row["dimension"]: (row["distinct"], row["summary"]) for row in diversity(TASKS)}

    assert rows == {
        "difficulty": (2, "hard 2, easy 1"),
        "tags": (3, "python 2, csv 1, pdf 1"),
        "kind": (2, "multi 2, single 1"),
        "gold skills per query": (3, "1 to 3, mean 2.00, median 2"),
        "words per query": (3, "1 to 4, mean 2.67, median 3"),
    }


def test_gold_bodies_are_averaged():
    skills = {name: Skill(name, name, "", "word " * size) for name, size in (("a", 2), ("b", 6))}

    lengths = gold_body_lengths((*TASKS, task("q4", "no skill of the pool", "z")), skills)

    assert lengths == {"q1": 2, "q2": 4, "q3": 4}


def test_correlation_is_scipys_spearman():
    columns = np.random.default_rng(0).normal(size=(40, 2))
    columns[:, 1] += columns[:, 0]

    correlation = rank_correlation(columns, seed=42)

    assert correlation is not None
    assert correlation.mean == pytest.approx(spearmanr(columns).statistic)
    assert correlation.low < correlation.mean < correlation.high
    assert correlation.n == 40


@pytest.mark.parametrize("columns", [[[1, 2], [1, 3]], [[1, 2], [3, 2]]])
def test_equal_values_have_no_correlation(columns):
    assert rank_correlation(np.array(columns, dtype=float), seed=0) is None


def test_resamples_of_equal_values_are_left_out():
    # Most resamples hold only one of the two values of the first column.
    columns = np.array([[1.0, 9], [0, 1], [0, 2], [0, 3]])

    correlation = rank_correlation(columns, seed=0)

    assert correlation is not None
    assert np.isfinite([correlation.low, correlation.high]).all()


def test_task_of_two_tiers_counts_once():
    hits = {"a": 0.0, "b": 0.5, "c": 1.0}
    scores = {f"{name}@{tier}": {"Hit@1": hit} for tier in "eh" for name, hit in hits.items()}
    clusters = {query_id: query_id[0] for query_id in scores}
    result = SystemResult("s", scores, {}, clusters)
    lengths = {query_id: 10.0 * ord(query_id[0]) for query_id in scores}

    correlation = length_correlation(result, "Hit@1", lengths)

    assert correlation is not None
    assert correlation.n == 3
    assert correlation.mean == pytest.approx(1)


def test_report_shows_both_profiles(tmp_path: Path):
    relevance = {
        name: {"gt_skill_ids": [name], "relevance": {name: 3}, "task_type": "clean"}
        for name in ("chart", "merge", "sort")
    }
    files = skillrouter([(name, f"please {name} this") for name in relevance], relevance)
    for number, row in enumerate(files["tasks.jsonl"]):
        row["tags"] = ["files", f"tag {number}"]
    benchmark = write(tmp_path / "benchmark", files)
    # The second skill has the words of another skill's query.
    bodies = {"chart": "chart", "merge": "sort sort this", "sort": "put in order please do so"}
    skills = [
        {"skill_id": name, "name": name[0], "description": "", "body": body}
        for name, body in bodies.items()
    ]
    pool = write(tmp_path / "pool", {"skills.jsonl": skills})
    analysis = "analysis={more: [{kind: diversity}, {kind: body_length}]}"
    systems = "systems=[{name: BM25, rankers: [{kind: lexical}]}]"
    out = tmp_path / "report"

    succeeds(
        "evaluate", f"benchmark=[{benchmark}]", f"pool={pool}", systems, analysis, f"out={out}"
    )

    rows = json.loads((out / "metrics.json").read_text())["analysis"]
    assert {"dimension": "tags", "distinct": 4, "summary": "files 3, tag 0 1, tag 1 1"} in rows[
        "diversity"
    ]
    assert {(row["system"], row["n"]) for row in rows["body_length"]} == {("BM25", 3)}
    assert "Spearman's rho" in (out / "report.md").read_text()
