"""A chat model's equivalents of gold skills become judgements, and evaluation takes any of them for the gold skill."""

import json
from pathlib import Path

from llm_server import LLMServer, Reply
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.metrics import evaluate_query, parse_measure
from skilltrain.records import Query, Skill
from skilltrain.tables import DROPPED, JUDGEMENTS, QUERIES, RANKINGS, SKILLS, read_table, rows_of, write_table
from small_library import succeeds


def test_equivalents_are_judged_and_evaluated(server: LLMServer, tmp_path: Path):
    write_table(rows_of(Skill(s, f"name-{s}", "d", f"body of {s}") for s in "abcdef"), SKILLS, tmp_path / "pool")
    queries = [Query(f"q{n}", f"text {n}", "single", "human", "test") for n in (1, 2, 3)]
    write_table(rows_of(queries), QUERIES, tmp_path / "queries")
    judged = [("q1", "a", "required"), ("q1", "d", "rejected"), ("q2", "b", "required"), ("q3", "c", "required")]
    keys = ("query_id", "skill_id", "verdict")
    rows = [dict(zip(keys, row, strict=True)) | {"judge": "human"} for row in judged]
    write_table(rows, JUDGEMENTS, tmp_path / "queries")
    ranked = [
        {"query_id": query_id, "skill_id": s, "rank": rank, "score": -rank, "stage": "x"}
        for query_id in ("q1", "q2")
        for rank, s in enumerate("fdeabc", 1)
    ]
    write_table([row | {"score": float(row["score"])} for row in ranked], RANKINGS, tmp_path / "rankings")
    server.otherwise = lambda asked: Reply("[2]" if "text 1" in asked["messages"][1]["content"] else "none of them")
    command = [
        "equivalents", f"queries={tmp_path}/queries", f"pool={tmp_path}/pool", f"rankings={tmp_path}/rankings",
        "llm.kind=openai", f"llm.base_url={server.base_url}", f"llm.cache={tmp_path}/cache", "llm.max_retries=0",
        "depth=2", f"out={tmp_path}/out",
    ]  # fmt: skip
    plan = json.loads(succeeds(*command, "--dry-run").out)["plan"]
    assert plan["num_requests"] == 2 and server.requests == [], "q3 has no candidate"
    summary = json.loads(succeeds(*command, "--json").out)
    assert (summary["num_golds"], summary["num_equivalents"], summary["dropped"]) == (2, 1, {"malformed": 1})
    (shown,) = {text for r in server.requests if "text 1" in (text := r["messages"][1]["content"])}
    assert [f"name-{s}" in shown for s in "abcdef"] == [True, False, False, False, True, True], "gold, then unjudged"
    assert read_table(tmp_path / "out", DROPPED).column("skill_id").to_pylist() == ["b"]
    found = [row for row in read_table(tmp_path / "out", JUDGEMENTS).to_pylist() if row["group"]]
    assert [(r["query_id"], r["skill_id"], r["verdict"], r["group"]) for r in found] == [("q1", "f", "required", "a")]
    relevance = load_benchmark(tmp_path / "out", None).tasks[0].relevance
    assert (relevance.gold, relevance.alternatives, relevance.gains) == ({"a"}, {"f": "a"}, {"a": 1.0})
    measures = [parse_measure("Hit@1"), parse_measure("Recall@2")]
    assert evaluate_query(["f", "a"], relevance, measures) == {"Hit@1": 1.0, "Recall@2": 1.0}
    server.otherwise = lambda asked: Reply("[2]")
    command[1], command[-1], command[-2] = f"queries={tmp_path}/out", f"out={tmp_path}/again", "depth=4"
    again = json.loads(succeeds(*command, "--json").out)
    assert (again["num_golds"], again["num_equivalents"]) == (2, 2), "what was found before is no gold skill"
    relevance = load_benchmark(tmp_path / "again", None).tasks[0].relevance
    assert (relevance.gold, relevance.alternatives) == ({"a"}, {"f": "a", "e": "a"})
