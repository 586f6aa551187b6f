import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import write_ours, write_skillrouter
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import check_pool
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Skill

T, T1, T2, T3 = ((task_id, f"do {task_id}") for task_id in ("t", "t1", "t2", "t3"))


def entry(*gold: str, **more: Any) -> dict[str, Any]:
    return {"gt_skill_ids": list(gold), "relevance": dict.fromkeys(gold, 3), "core_gt_ids": list(gold),
            "auxiliary_gt_ids": [], "task_type": "clean", **more}  # fmt: skip


def test_skillrouter_folder_scores_what_relevance_json_says(tmp_path: Path):
    """Excluded tasks are scored, a generic_only one is not; gold are core_gt_ids, a degraded copy only gains."""
    relevance = {
        "t2": entry("g/b", "g/a", core_gt_ids=None),  # then gt_skill_ids stand in
        "t1": entry("g/a", "g/aux", core_gt_ids=["g/a"], relevance={"g/a": 3, "g/aux": 1, "copy": 1}),
        "t3": entry("g/generic", core_gt_ids=[], task_type="generic_only"),
    }
    skill = {"skill_id": "g/a", "name": "A", "description": "does a", "body": "# A", "stars": 3}
    folder = write_skillrouter(tmp_path / "bench", [T1, T2, T3], relevance, [skill])
    benchmark = load_benchmark(folder)
    assert benchmark.name == "bench"
    assert benchmark.notes == ("1 of 3 tasks want generic skills alone and are not scored",)  # 12 of the published 87
    assert benchmark.gold_skills == (Skill("g/a", "A", "does a", "# A"),)
    first, second = benchmark.tasks
    assert first.query == Query("t1", "do t1", "single", "skillsbench", "test")
    assert first.relevance == Relevance(frozenset({"g/a"}), {"g/a": 3.0, "g/aux": 1.0, "copy": 1.0})
    assert (first.labels["kind"], second.labels["kind"], second.query.kind) == ("single", "multi", "multi")
    assert (second.query.query_id, second.relevance.gold) == ("t2", {"g/a", "g/b"})
    assert load_benchmark(folder, split="test") == benchmark
    with pytest.raises(SkilltrainError, match=r"gold skill 'g/b' of query 't2' is not among the 2 .* in all: 1"):
        check_pool(benchmark, ["g/a", "x"])


@pytest.mark.parametrize(
    ("tasks", "relevance", "message"),
    [
        ([T], {}, "relevance.json lacks task 't'"),
        ([T], {"t": entry("g"), "u": entry("g")}, "tasks.jsonl lacks task 'u'"),
        ([T, T], {"t": entry("g")}, "tasks.jsonl, line 2: task 't' appears twice"),
        ([T], [], "relevance.json: expected a map"),
        ([T], {"t": entry()}, "relevance.json: query 't': no skill is gold"),
        ([T], {"t": entry("g", relevance={"g": 0})}, "query 't': gold skill 'g' has no positive gain"),
        ([T], {"t": entry("g", relevance={"g": float("nan")})}, "query 't': the gain of skill 'g' is nan"),
        ([T], {"t": entry("g", gt_skill_ids="g")}, "relevance.json, task t: gt_skill_ids: "),
        ([T], {"t": entry("g", task_type="generic_only")}, "holds no query to score"),
    ],
)
def test_malformed_skillrouter_folders_name_file_and_task(tmp_path: Path, tasks: Any, relevance: Any, message: str):
    with pytest.raises(SkilltrainError, match=message):
        load_benchmark(write_skillrouter(tmp_path, tasks, relevance))


def test_what_is_no_benchmark_is_told(tmp_path: Path):
    with pytest.raises(SkilltrainError, match="nowhere: no such folder"):
        load_benchmark(tmp_path / "nowhere")
    with pytest.raises(SkilltrainError, match=r"is not a benchmark \(a benchmark holds queries.parquet"):
        load_benchmark(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"t": %s, "t": %s}', r"relevance\.json: 't' appears twice"),
        ('{"t": {"gt_skill_ids": ["g"], "relevance": {"g": 3, "g": 1}, "task_type": "clean"}}', "'g' appears twice"),
        ("[" * 100_000, r"relevance\.json: is not JSON: maximum recursion depth"),
    ],
)
def test_a_key_that_stands_twice_and_endless_nesting_are_refused(tmp_path: Path, text: str, message: str):
    write_skillrouter(tmp_path, [T], {})
    (tmp_path / "relevance.json").write_text(text.replace("%s", json.dumps(entry("g"))))
    with pytest.raises(SkilltrainError, match=message):
        load_benchmark(tmp_path)


def test_our_tables_required_is_gold_useful_gains_half(tmp_path: Path):
    queries = [("q1", "do q1", "test"), ("q2", "do q2", "dev"), ("q3", "do q3", "train")]
    judged = {
        "q1": {"a": "required", "b": "useful", "c": "irrelevant", "d": "rejected"},
        "q2": {"a": "required", "b": "required"},
    }
    folder = write_ours(tmp_path / "ours", queries, judged)
    (only,) = load_benchmark(folder, split="test").tasks  # q3 awaits its judgements, but is not asked for
    assert only.relevance == Relevance(frozenset("a"), {"a": 1.0, "b": 0.5})
    assert only.query.text == "do q1"
    (dev,) = load_benchmark(folder, split="dev").tasks
    assert dev.labels["kind"] == "multi"


@pytest.mark.parametrize(
    ("judged", "split", "message"),
    [
        ({"q1": {"a": "required"}}, None, r"judgements\.parquet: query 'q2': no skill is gold"),
        ({"q1": {"a": "useful"}}, "test", "query 'q1': no skill is gold"),
        ({"q9": {"a": "required"}}, "test", r"1 judged queries are not in queries\.parquet, first 'q9'"),
        ({"q1": {"a": "perhaps"}}, "test", "'perhaps' is no verdict"),
        ({"q1": {"a": "required"}}, "tset", r"no query of split 'tset' \(its splits are dev \(1\), test \(1\)\)"),
    ],
)
def test_faults_in_our_tables_are_named(tmp_path: Path, judged: Any, split: str | None, message: str):
    folder = write_ours(tmp_path / "ours", [("q1", "do q1", "test"), ("q2", "do q2", "dev")], judged)
    with pytest.raises(SkilltrainError, match=message):
        load_benchmark(folder, split)
