"""`skilltrain evaluate --benchmark DIR --predictions FILE [--json OUT]`, as others use our evaluation."""

import json
import math
from pathlib import Path

import pytest

from benchmark_folders import skillrouter, write, write_pool
from skilltrain.records import Skill
from small_library import Outcome, skilltrain, succeeds

TASKS = {"t1": "find apples", "t2": "build bridges from candles", "t3": "drums"}
RELEVANCE = {
    "t1": {"gt_skill_ids": ["gt/a"], "relevance": {"gt/a": 3, "copy/a": 1}, "task_type": "clean"},
    "t2": {
        "gt_skill_ids": ["gt/b", "gt/c"],
        "relevance": {"gt/b": 3, "gt/c": 3},
        "task_type": "clean",
    },
    "t3": {"gt_skill_ids": ["gt/d"], "relevance": {"gt/d": 3}, "task_type": "generic_only"},
}


@pytest.fixture
def benchmark(tmp_path: Path) -> Path:
    """t1 wants a (a degraded copy gains a third), t2 wants b and c, t3 is not scored."""
    return write(tmp_path / "bench", skillrouter(TASKS.items(), RELEVANCE))


def evaluate(benchmark: Path, values: object, *more: object) -> Outcome:
    file = benchmark.parent / "mine.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return skilltrain("evaluate", "--benchmark", benchmark, "--predictions", file, *more)


def test_means_by_section_and_the_per_query_table_beside(benchmark, tmp_path):
    """The released code of SkillRouter writes a ranking for every task, its generic ones, which are not scored, too."""
    out = tmp_path / "new" / "scores.json"
    given = {"t1": ["copy/a", "gt/a"], "t2": ["gt/b", "x", "gt/c"], "t3": ["gt/d"]}
    scores = json.loads(evaluate(benchmark, given, "--json", out).out)
    assert list(scores) == ["all", "single", "multi"]
    second = 1 / math.log2(3)  # the discount of the second place
    assert {name: value["mean"] for name, value in scores["single"].items()} == {
        "Hit@1": 0,
        "MRR@10": 0.5,
        "nDCG@10": pytest.approx((1 + 3 * second) / (3 + second)),
        "Recall@10": 1,
        "Recall@20": 1,
        "Recall@50": 1,
        "FC@10": 1,
        "COMP@10": 1,
    }
    assert scores["multi"]["Hit@1"] == {"mean": 1, "low": 1, "high": 1, "n": 1}
    assert scores["multi"]["Set-Compat"]["mean"] == 0  # b and x fill the first two places
    assert scores["all"]["MRR@10"]["mean"] == 0.75 and scores["all"]["Set-Compat"]["n"] == 1
    assert json.loads(out.read_text()) == scores
    rows = [
        json.loads(line)
        for line in (out.parent / "scores.per_query.jsonl").read_text().splitlines()
    ]
    found = [(row["query_id"], row["slice"], row["MRR@10"], row.get("Set-Compat")) for row in rows]
    assert found == [("t1", "single", 0.5, None), ("t2", "multi", 1, 0)]


def test_chosen_measures_missing_tasks_and_a_dry_run_write_no_file(benchmark, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    shown = evaluate(benchmark, {"t1": ["gt/a"]}, "measures=[Precision@2]")
    assert json.loads(shown.out)["all"] == {
        "Precision@2": {"mean": 0.25, "low": 0, "high": 0.5, "n": 2}
    }
    assert "no prediction for 1 of 2 queries, first 't2'; they score 0" in shown.err
    planned = evaluate(benchmark, {"t1": ["gt/a"]}, "--dry-run", "--json", tmp_path / "scores.json")
    assert json.loads(planned.out)["dry_run"]["num_queries"] == 2
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "mine.json"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"t1": ["gt/a"], "t9": ["gt/b"]},
            "1 of 2 predicted queries are not in the benchmark, first 't9'",
        ),
        ({"t3": ["gt/d"]}, "all its predictions are for queries that are not scored here"),
        ({"t1": ["gt/a", "x", "gt/a"]}, "query t1: skill 'gt/a' appears twice"),
        ({"t1": "gt/a"}, "query t1: a prediction is a list of skill ids"),
        ({}, "predictions are an object {query_id: [skill_id, …]}, with a query at least"),
        ([["t1", ["gt/a"]]], "predictions are an object"),
        ('{"t1": ["gt/a"', "is not JSON"),
    ],
)
def test_bad_predictions_are_one_line(benchmark, values, message):
    line = evaluate(benchmark, values).error_line
    assert message in line and "mine.json" in line


def test_a_known_pool_checks_the_ids(benchmark, tmp_path):
    skills = [
        Skill(skill_id, skill_id, "what it does", "how")
        for skill_id in ("gt/a", "gt/b", "gt/c", "other")
    ]
    pool = write_pool(tmp_path / "pool", skills)
    scores = json.loads(
        evaluate(benchmark, {"t1": ["other", "gt/a"], "t2": ["gt/b"]}, "--pool", pool).out
    )
    assert scores["single"]["nDCG@10"]["mean"] == pytest.approx(
        1 / math.log2(3)
    )  # no copy in this pool
    line = evaluate(benchmark, {"t1": ["gt/a", "copy/a"]}, "--pool", pool).error_line
    assert "query t1: 1 of 2 predicted skills are not in the pool, first 'copy/a'" in line


def test_several_files_and_analyses_are_for_a_report_and_json_is_not(benchmark, tmp_path):
    other, out = tmp_path / "other.json", f"out={tmp_path / 'run'}"
    other.write_text(json.dumps({"t1": ["gt/a"], "t2": ["gt/b", "gt/c"]}))
    both = ("--predictions", other)
    line = evaluate(benchmark, {"t1": ["gt/a"]}, *both).error_line
    assert "several predictions files are compared in a report (add out=… for its folder)" in line
    assert (
        "analysis: analyses are part of a report"
        in evaluate(benchmark, {"t1": []}, "analysis.num_timed=2").error_line
    )
    line = evaluate(benchmark, {"t1": ["gt/a"]}, "--json", tmp_path / "s.json", out).error_line
    assert "--json is for predictions alone" in line and not (tmp_path / "run").exists()
    assert (
        f"look at {tmp_path}/run/report.html"
        in evaluate(benchmark, {"t1": ["gt/a"]}, *both, out).out
    )
    systems = json.loads((tmp_path / "run" / "metrics.json").read_text())["systems"]
    assert {one["name"]: one["metrics"]["Hit@1"]["mean"] for one in systems} == {
        "mine": 0.5,
        "other": 1.0,
    }
    assert not list((tmp_path / "run").glob("*.parquet"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["bm25"]),
        (
            ["--encoder", "bert", "--encoder", "qwen3", "--reranker", "bert_reranker"],
            ["bm25", "encoder {bert}", "encoder {qwen3}", "encoder {qwen3} + reranker"],
        ),
        (["--reranker", "bert_reranker"], ["bm25", "bm25 + reranker"]),
    ],
)
def test_models_of_the_command_line_are_systems_side_by_side(
    benchmark, tmp_path, model_folders, options, names
):
    """BM25, each encoder, and the reranker on the last of them; a pool alone asks BM25."""
    pool = write_pool(
        tmp_path / "pool", (Skill(name, name, "d", "how") for name in ("gt/a", "gt/b", "gt/c"))
    )
    models = [str(model_folders.get(option, option)) for option in options]
    given = ["--benchmark", benchmark, "--pool", pool, f"out={tmp_path / 'run'}", *models]
    shown = succeeds("evaluate", *given, "--dry-run")
    found = [line.split(": ")[1] for line in shown.err.splitlines() if line.startswith("- name: ")]
    assert found == [name.format(**model_folders) for name in names]
    assert json.loads(shown.out)["dry_run"]["num_systems"] == len(names)
