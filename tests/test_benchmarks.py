import json
from pathlib import Path
from typing import Any

import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import check_pool
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Skill
from skilltrain.tables import JUDGEMENTS, QUERIES, rows_of, write_table


def task(task_id: str, **more: Any) -> dict[str, Any]:
    return {"task_id": task_id, "instruction_text": f"do {task_id}", "difficulty": "hard", "excluded": False, **more}


def entry(*gold: str, **more: Any) -> dict[str, Any]:
    return {"gt_skill_ids": list(gold), "relevance": dict.fromkeys(gold, 3), "core_gt_ids": list(gold),
            "auxiliary_gt_ids": [], "task_type": "clean", **more}  # fmt: skip


def skillrouter(folder: Path, tasks: list[Any], relevance: Any, skills: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    (folder / "relevance.json").write_text(json.dumps(relevance))
    if skills is not None:
        (folder / "gold_skills.jsonl").write_text("".join(json.dumps(row) + "\n" for row in skills))
    return folder


def ours(folder: Path, queries: list[tuple[str, str]], judgements: list[tuple[str, str, str]]) -> Path:
    folder.mkdir()
    rows = [Query(query_id, f"do {query_id}", "single", "person", split) for query_id, split in queries]
    write_table(rows_of(rows), QUERIES, folder)
    judged = [{"query_id": q, "skill_id": s, "verdict": v, "judge": "person"} for q, s, v in judgements]
    write_table(judged, JUDGEMENTS, folder)
    return folder


def test_skillrouter_folder_scores_what_relevance_json_says(tmp_path: Path):
    """An excluded task is scored, a generic_only one is not; gold are core_gt_ids, a degraded copy only gains."""
    relevance = {
        "t2": entry("g/b", "g/a"),
        "t1": entry("g/a", "g/aux", core_gt_ids=["g/a"], relevance={"g/a": 3, "g/aux": 1, "copy": 1}),
        "t3": entry("g/generic", core_gt_ids=[], task_type="generic_only"),
    }
    skill = {"skill_id": "g/a", "name": "A", "description": "does a", "body": "# A", "stars": 3}
    folder = skillrouter(tmp_path / "bench", [task("t1"), task("t2", excluded=True), task("t3")], relevance, [skill])
    benchmark = load_benchmark(folder)
    assert benchmark.name == "bench"
    assert benchmark.gold_skills == (Skill("g/a", "A", "does a", "# A"),)
    first, second = benchmark.tasks
    assert first.query == Query("t1", "do t1", "single", "skillsbench", "test")
    assert first.relevance == Relevance(frozenset({"g/a"}), {"g/a": 3.0, "g/aux": 1.0, "copy": 1.0})
    assert (first.labels["kind"], second.labels["kind"], second.query.kind) == ("single", "multi", "multi")
    assert second.query.query_id == "t2"
    assert load_benchmark(folder, split="test") == benchmark


def test_gold_skills_are_optional_and_gt_skill_ids_stand_in_for_core(tmp_path: Path):
    row = entry("g/a", "g/b")
    del row["core_gt_ids"]
    benchmark = load_benchmark(skillrouter(tmp_path, [task("t")], {"t": row}))
    assert benchmark.gold_skills == ()
    assert benchmark.tasks[0].relevance.gold == {"g/a", "g/b"}


@pytest.mark.parametrize(
    ("tasks", "relevance", "message"),
    [
        ([task("t")], {}, "relevance.json lacks task 't'"),
        ([task("t")], {"t": entry("g"), "u": entry("g")}, "tasks.jsonl lacks task 'u'"),
        ([task("t"), task("t")], {"t": entry("g")}, "tasks.jsonl, line 2: task 't' stands twice"),
        ([task("t")], [], "relevance.json: expected a map"),
        ([task("t")], {"t": entry()}, "relevance.json: query 't': no skill is gold"),
        ([task("t")], {"t": entry("g", relevance={"g": 0})}, "query 't': gold skill 'g' has no positive gain"),
        ([task("t")], {"t": entry("g", relevance={"g": -3})}, "query 't': the gain of skill 'g' is -3"),
        ([task("t")], {"t": entry("g", relevance={"g": float("nan")})}, "query 't': the gain of skill 'g' is nan"),
        ([task("t")], {"t": entry("g", gt_skill_ids="g")}, "relevance.json, task t: gt_skill_ids: "),
        ([task("t")], {"t": entry("g", task_type="generic_only")}, "holds no query to score"),
    ],
)
def test_malformed_skillrouter_folders_name_file_and_task(tmp_path: Path, tasks: Any, relevance: Any, message: str):
    with pytest.raises(SkilltrainError, match=message):
        load_benchmark(skillrouter(tmp_path, tasks, relevance))


def test_what_is_no_benchmark_is_told(tmp_path: Path):
    with pytest.raises(SkilltrainError, match="nowhere: no such folder"):
        load_benchmark(tmp_path / "nowhere")
    with pytest.raises(SkilltrainError, match=r"is not a benchmark \(a benchmark holds queries.parquet"):
        load_benchmark(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"t": %s, "t": %s}', r"relevance\.json: 't' stands twice"),
        ('{"t": {"gt_skill_ids": ["g"], "relevance": {"g": 3, "g": 1}, "task_type": "clean"}}', "'g' stands twice"),
        ("[" * 100_000, r"relevance\.json: is not JSON: maximum recursion depth"),
    ],
)
def test_a_key_that_stands_twice_and_endless_nesting_are_refused(tmp_path: Path, text: str, message: str):
    skillrouter(tmp_path, [task("t")], {})
    (tmp_path / "relevance.json").write_text(text.replace("%s", json.dumps(entry("g"))))
    with pytest.raises(SkilltrainError, match=message):
        load_benchmark(tmp_path)


def test_our_tables_required_is_gold_useful_gains_half(tmp_path: Path):
    folder = ours(
        tmp_path / "ours",
        [("q1", "test"), ("q2", "dev"), ("q3", "train")],
        [("q1", "a", "required"), ("q1", "b", "useful"), ("q1", "c", "irrelevant"), ("q1", "d", "rejected"),
         ("q2", "a", "required"), ("q2", "b", "required")],
    )  # fmt: skip
    (only,) = load_benchmark(folder, split="test").tasks  # q3 awaits its judgements, but is not asked for
    assert only.relevance == Relevance(frozenset("a"), {"a": 1.0, "b": 0.5})
    assert only.query.text == "do q1"
    (dev,) = load_benchmark(folder, split="dev").tasks
    assert dev.labels["kind"] == "multi"


@pytest.mark.parametrize(
    ("judgements", "split", "message"),
    [
        ([("q1", "a", "required")], None, r"judgements\.parquet: query 'q2': no skill is gold"),
        ([("q1", "a", "useful")], "test", "query 'q1': no skill is gold"),
        ([("q9", "a", "required")], "test", r"1 judged queries are not in queries\.parquet, first 'q9'"),
        ([("q1", "a", "perhaps")], "test", "'perhaps' is no verdict"),
        ([("q1", "a", "required")], "tset", r"no query of split 'tset' \(its splits are dev \(1\), test \(1\)\)"),
    ],
)
def test_faults_in_our_tables_are_named(tmp_path: Path, judgements: Any, split: str | None, message: str):
    folder = ours(tmp_path / "ours", [("q1", "test"), ("q2", "dev")], judgements)
    with pytest.raises(SkilltrainError, match=message):
        load_benchmark(folder, split)


def test_check_pool_names_query_skill_and_count(tmp_path: Path):
    relevance = {"t1": entry("a", "b"), "t2": entry("b", "c")}
    benchmark = load_benchmark(skillrouter(tmp_path / "bench", [task("t1"), task("t2")], relevance))
    message = "benchmark bench: gold skill 'b' of query 't1' is not among the 2 skills of the pool; missing in all: 3"
    with pytest.raises(SkilltrainError, match=message):
        check_pool(benchmark, ["a", "x"])
