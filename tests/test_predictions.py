"""`skilltrain evaluate --benchmark DIR --predictions FILE` scores rankings of other programs."""

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
def benchmark(tmp_path) -> Path:
    """Three tasks: t1 needs a (its copy has a third of the gain), t2 b and c, t3 is not scored."""
    return write(tmp_path / "bench", skillrouter(TASKS.items(), RELEVANCE))


def evaluate(benchmark: Path, predictions: object, *arguments: object) -> Outcome:
    """Evaluate predictions, given as text or as a value."""
    text = predictions if isinstance(predictions, str) else json.dumps(predictions)
    file = benchmark.parent / "mine.json"
    file.write_text(text)
    return skilltrain("evaluate", "--benchmark", benchmark, "--predictions", file, *arguments)


# Like the released code of SkillRouter, it ranks for every task, even those that are not scored.
PREDICTIONS = {"t1": ["copy/a", "gt/a"], "t2": ["gt/b", "x", "gt/c"], "t3": ["gt/d"]}


def test_predictions_are_scored_by_section(benchmark):
    scores = json.loads(evaluate(benchmark, PREDICTIONS).out)

    assert list(scores) == ["all", "single", "multi"]
    discount = 1 / math.log2(3)  # of the second rank
    assert {name: value["mean"] for name, value in scores["single"].items()} == {
        "Hit@1": 0,
        "MRR@10": 0.5,
        "nDCG@10": pytest.approx((1 + 3 * discount) / (3 + discount)),
        "Recall@10": 1,
        "Recall@20": 1,
        "Recall@50": 1,
        "FC@10": 1,
        "COMP@10": 1,
    }
    assert scores["multi"]["Hit@1"] == {"mean": 1, "low": 1, "high": 1, "n": 1}
    assert scores["multi"]["Set-Compat"]["mean"] == 0  # x is among the first two skills
    assert scores["all"]["MRR@10"]["mean"] == 0.75
    assert scores["all"]["Set-Compat"]["n"] == 1


def test_trec_run_scores_like_json(benchmark):
    run = benchmark.parent / "run.txt"
    # The scores give the order, not the ranks or the lines.
    run.write_text(
        "t1 Q0 gt/a 1 2.5 mine\nt1\tQ0\tcopy/a\t2\t4.0\tmine\n\n"
        "t2 Q0 gt/c 3 0.5 mine\nt2 Q0 gt/b 9 1 mine\nt2 Q0 x 2 0.9 mine\n"
    )

    outcome = skilltrain("evaluate", "--benchmark", benchmark, "--predictions", run)

    assert json.loads(outcome.out) == json.loads(evaluate(benchmark, PREDICTIONS).out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t1 Q0 gt/a 1 2.5\n", "run.txt, line 1: has 5 columns (its columns are query_id Q0"),
        ("\nt1 Q0 gt/a 1 high x\n", "run.txt, line 2: score: Input should be a valid number"),
        ("t9 Q0 gt/a 1 2.5 x\n", "1 of 1 predicted queries are not in the benchmark"),
        ("t1 Q0 gt/a 1 2 x\nt1 Q0 gt/a 2 1 x\n", "query t1: skill 'gt/a' appears twice"),
        ("", "run.txt: predictions are an object"),
        ('{"t1": ["gt/a"]}', "has 2 columns (its columns are query_id Q0"),
    ],
)
def test_broken_trec_run_is_refused(benchmark, text: str, message: str):
    run = benchmark.parent / "run.txt"
    run.write_text(text)

    outcome = skilltrain("evaluate", "--benchmark", benchmark, "--predictions", run)

    assert message in outcome.error_line


def test_json_file_has_scores_per_query(benchmark, tmp_path):
    out = tmp_path / "new" / "scores.json"

    scores = json.loads(evaluate(benchmark, PREDICTIONS, "--json", out).out)

    assert json.loads(out.read_text()) == scores
    lines = (out.parent / "scores.per_query.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["query_id"], first["slice"], first["MRR@10"]) == ("t1", "single", 0.5)
    assert "Set-Compat" not in first
    assert (second["query_id"], second["slice"], second["MRR@10"]) == ("t2", "multi", 1)
    assert second["Set-Compat"] == 0


def test_missing_prediction_scores_zero(benchmark, tmp_path):
    files = sorted(tmp_path.rglob("*"))

    outcome = evaluate(benchmark, {"t1": ["gt/a"]}, "measures=[Precision@2]")

    precision = {"mean": 0.25, "low": 0, "high": 0.5, "n": 2}
    assert json.loads(outcome.out)["all"] == {"Precision@2": precision}
    assert "no prediction for 1 of 2 queries, first 't2'; they score 0" in outcome.err
    assert sorted(tmp_path.rglob("*")) == sorted([*files, tmp_path / "mine.json"])


def test_dry_run_writes_no_file(benchmark, tmp_path):
    out = tmp_path / "scores.json"

    outcome = evaluate(benchmark, {"t1": ["gt/a"]}, "--dry-run", "--json", out)

    assert json.loads(outcome.out)["dry_run"]["num_queries"] == 2
    assert not out.exists()


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
        ({}, "predictions are an object {query_id: [skill_id, …]}, or a TREC run"),
        ([["t1", ["gt/a"]]], "predictions are an object"),
        ('{"t1": ["gt/a"', "is not JSON"),
    ],
)
def test_wrong_predictions_are_refused(benchmark, values, message):
    line = evaluate(benchmark, values).error_line

    assert message in line
    assert "mine.json" in line


@pytest.fixture
def pool(tmp_path):
    """A pool without the copy of a."""
    skill_ids = ("gt/a", "gt/b", "gt/c", "other")
    return write_pool(tmp_path / "pool", [Skill(name, name, "d", "how") for name in skill_ids])


def test_ideal_ranking_holds_only_skills_of_pool(benchmark, pool):
    predictions = {"t1": ["other", "gt/a"], "t2": ["gt/b"]}

    scores = json.loads(evaluate(benchmark, predictions, "--pool", pool).out)

    assert scores["single"]["nDCG@10"]["mean"] == pytest.approx(1 / math.log2(3))


def test_predictions_may_be_a_setting(benchmark, pool):
    predictions = {"t1": ["other", "gt/a"], "t2": ["gt/b"]}
    by_option = evaluate(benchmark, predictions, "--pool", pool)
    settings = [f"predictions={benchmark.parent / 'mine.json'}", f"pool={pool}"]

    by_setting = skilltrain("evaluate", f"benchmark={benchmark}", *settings)

    # BM25 does not rank the pool, and no report is written.
    assert by_setting.out == by_option.out
    assert list(json.loads(by_setting.out)) == ["all", "single", "multi"]


def test_predicted_skill_outside_pool_is_refused(benchmark, pool):
    line = evaluate(benchmark, {"t1": ["gt/a", "copy/a"]}, "--pool", pool).error_line

    assert "query t1: 1 of 2 predicted skills are not in the pool, first 'copy/a'" in line


@pytest.fixture
def other_predictions(tmp_path):
    """The options that name a second file of predictions."""
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"t1": ["gt/a"], "t2": ["gt/b", "gt/c"]}))
    return ("--predictions", file)


def test_several_files_need_a_report(benchmark, other_predictions):
    line = evaluate(benchmark, {"t1": ["gt/a"]}, *other_predictions).error_line

    assert "several predictions files are compared in a report (add out=… for its folder)" in line


def test_analysis_needs_a_report(benchmark):
    line = evaluate(benchmark, {"t1": []}, "analysis.num_timed=2").error_line

    assert "analysis: analyses are part of a report" in line


def test_report_refuses_json_option(benchmark, tmp_path):
    options = ("--json", tmp_path / "s.json", f"out={tmp_path / 'run'}")

    line = evaluate(benchmark, {"t1": ["gt/a"]}, *options).error_line

    assert "--json is for predictions alone" in line
    assert not (tmp_path / "run").exists()


def test_report_compares_several_files(benchmark, other_predictions, tmp_path):
    out = tmp_path / "run"

    text = evaluate(benchmark, {"t1": ["gt/a"]}, *other_predictions, f"out={out}").out

    assert f"look at {out}/report.html" in text
    mine, other = json.loads((out / "metrics.json").read_text())["systems"]
    assert (mine["name"], mine["metrics"]["Hit@1"]["mean"]) == ("mine", 0.5)
    assert (other["name"], other["metrics"]["Hit@1"]["mean"]) == ("other", 1.0)
    assert not list(out.glob("*.parquet"))


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
def test_command_line_models_become_systems(
    benchmark, pool, tmp_path, model_folders, options, names
):
    """The systems are BM25 and each encoder. A reranker follows the last of them."""
    options = [str(model_folders.get(option, option)) for option in options]
    command = ["evaluate", "--benchmark", benchmark, "--pool", pool, f"out={tmp_path / 'run'}"]

    outcome = succeeds(*command, *options, "--dry-run")

    lines = [line for line in outcome.err.splitlines() if line.startswith("- name: ")]
    assert lines == [f"- name: {name.format(**model_folders)}" for name in names]
    assert json.loads(outcome.out)["dry_run"]["num_systems"] == len(names)
