#!/usr/bin/env python
"""Compare retrieval in rounds with retrieval before the task (SkillFlow, section 5).

python benchmarks/interleaved.py POOL BENCHMARK OUT

POOL is a pool of skills that holds the gold skills, and BENCHMARK has the tasks. Choose OUT outside
the repository, because it will hold texts of tasks and skills. BM25 answers all searches.

As in skillweaver_llm.py, a server on this machine plays the chat model. It writes each new prompt
to OUT/prompts.jsonl, with the keys `id`, `system` and `user`, and without the gold skills. An LLM
that sees these prompts alone answers them in OUT/answers.jsonl, with the keys `id` and `answer`.
Each round depends on the answers of the round before it. So run the program and answer until no
prompt is left. Then it prints recall with n and 95% interval, at most 5, 10 and 15 skills, and at
an equal number of skills for each task. OUT/report and OUT/equal have the whole reports.
"""

import json
import shutil
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from skillweaver_llm import Playback, chat_server, describe_difference

ROUNDS = 3
PER_ROUND = 5
BEFORE = "before the task"
QUERIES = f"before the task, {ROUNDS} queries"
IN_ROUNDS = f"interleaved, {ROUNDS} rounds"
# Largest first: `evaluate` compares systems by the first measure, here Recall@15.
MEASURES = [f"Recall@{number * PER_ROUND}" for number in range(ROUNDS, 0, -1)]


def systems(address: str) -> list[dict[str, Any]]:
    """Return the systems to compare, with the address of the chat model."""
    llm = {"kind": "openai", "model": "playback", "base_url": address, "cache": None}
    chat = {"llm": llm, "max_retries": 0}
    bm25 = {"kind": "lexical"}
    expand = {"kind": "expand", **chat, "count": ROUNDS, "join": "rrf", "of": {**bm25, "keep": 200}}
    rounds = {"kind": "interleave", **chat, "rounds": ROUNDS, "per_round": PER_ROUND, "of": bm25}
    rankers = {BEFORE: bm25, QUERIES: expand, IN_ROUNDS: rounds}
    return [{"name": name, "rankers": [ranker]} for name, ranker in rankers.items()]


def evaluate(benchmark: Path, out: Path, **settings: Any) -> dict[str, Any]:
    """Run the stage `evaluate` and return its metrics."""
    shutil.rmtree(out, ignore_errors=True)
    values = {"benchmark": benchmark, "out": out, "depth": ROUNDS * PER_ROUND}
    # The command line takes lists and mappings as YAML, and JSON is YAML too.
    values |= {name: json.dumps(value) for name, value in settings.items()}
    arguments = [f"{name}={value}" for name, value in values.items()]
    subprocess.run([sys.executable, "-m", "skilltrain", "evaluate", *arguments], check=True)
    return json.loads((out / "metrics.json").read_text(encoding="utf-8"))


def write_equal_rankings(report: Path, out: Path) -> list[str]:
    """Cut the rankings of each task to the number of skills that the rounds brought.

    Args:
        report: Folder of the report on all systems.
        out: Folder for one file of predictions for each system.

    Returns:
        Paths of the files.
    """
    ids_by_system: dict[str, dict[str, list[str]]] = {}
    rows = pq.read_table(report / "rankings.parquet").to_pylist()
    for row in sorted(rows, key=lambda row: row["rank"]):
        ids_by_task = ids_by_system.setdefault(row["stage"], {})  # `stage` is the system's name
        ids_by_task.setdefault(row["query_id"], []).append(row["skill_id"])

    out.mkdir(exist_ok=True)
    task_ids = {row["query_id"] for row in rows}
    # If the model asks for no skill, the task has no row of this system.
    num_skills = {task_id: len(ids_by_system[IN_ROUNDS].get(task_id, ())) for task_id in task_ids}
    print(f"skills of {IN_ROUNDS}: mean {sum(num_skills.values()) / len(task_ids):.1f}")

    files = []
    for system, ids_by_task in ids_by_system.items():
        cut_ids = {}
        for task_id in sorted(task_ids):
            cut_ids[task_id] = ids_by_task.get(task_id, [])[: num_skills[task_id]]
        file = out / f"{system}.json"
        file.write_text(json.dumps(cut_ids), encoding="utf-8")
        files.append(str(file))
    return files


def print_results(title: str, metrics: dict[str, Any]) -> None:
    """Print the means of each system and the comparisons."""
    print(f"\n{title}\n")
    for system in metrics["systems"]:
        for measure, mean in system["metrics"].items():
            interval = f"[{mean['low']:.3f}, {mean['high']:.3f}]"
            print(f"| {system['name']} | {measure} | {mean['n']} | {mean['mean']:.3f} {interval} |")
    for row in metrics["differences"]:
        print(f"- {describe_difference(row)}")


def main() -> None:
    """Run the program. See the text at the top of the file."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("pool", type=Path)
    parser.add_argument("benchmark", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()

    out = arguments.out
    out.mkdir(exist_ok=True)
    playback = Playback(out)
    with chat_server(playback) as address:
        settings = {"pool": str(arguments.pool), "systems": systems(address)}
        metrics = evaluate(arguments.benchmark, out / "report", **settings, measures=MEASURES)
    if playback.unanswered:
        num_prompts = len(playback.unanswered)
        print(f"{num_prompts} prompts in {playback.file} have no answer in answers.jsonl")
        return
    files = write_equal_rankings(out / "report", out / "rankings")
    # No ranking has more than 15 skills, so Recall@15 is plain recall.
    settings = {"predictions": files, "measures": MEASURES[:1]}
    equal = evaluate(arguments.benchmark, out / "equal", **settings)
    print_results("At most 5, 10 and 15 skills", metrics)
    print_results("As many skills as the rounds brought", equal)


if __name__ == "__main__":
    main()
