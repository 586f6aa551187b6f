"""kill -9 in the middle of a real run, and another run after it: by the server's own log, nothing is paid twice."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llm_server import KEY, LLMServer, Reply, llm_server
from skilltrain.llm.answers import DATABASE, Answers
from skilltrain.records import Skill
from skilltrain.tables import DROPPED, QUERIES, SKILLS, read_table, rows_of, write_table

NUM_SKILLS = 30


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    skills = [Skill(f"s{i}", f"sorter-{i}", "Sorts.", "Sorts invoices by month.", lang="en") for i in range(NUM_SKILLS)]
    return write_table(rows_of(skills), SKILLS, tmp_path / "pool.parquet")


def command(pool: Path, server: LLMServer, *settings: str) -> list[str]:
    folder = pool.parent
    return [
        sys.executable, "-m", "skilltrain", "synthesize", f"pool={pool}", f"out={folder}/out", "llm.kind=openai",
        "llm.model=scripted", f"llm.base_url={server.base_url}", f"llm.cache={folder}/cache", "llm.concurrency=4",
        *settings, "--json",
    ]  # fmt: skip


def hear_ctrl_c() -> None:
    """Undo what a shell does to programs that it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(pool: Path, server: LLMServer, *settings: str) -> subprocess.Popen[str]:
    environment, called = os.environ | {"OPENAI_API_KEY": KEY}, command(pool, server, *settings)
    return subprocess.Popen(called, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c)


def finish(pool: Path, server: LLMServer, *settings: str) -> dict[str, Any]:
    """The summary of a run that comes to its end; the key is in nothing that it says or leaves."""
    environment = os.environ | {"OPENAI_API_KEY": KEY, "OPENAI_LOG": "debug"}
    done = subprocess.run(
        command(pool, server, *settings), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert KEY not in done.stdout + done.stderr
    for file in pool.parent.rglob("*"):
        assert file.is_dir() or KEY.encode() not in file.read_bytes(), file
    queries, dropped = read_table(pool.parent / "out", QUERIES), read_table(pool.parent / "out", DROPPED)
    assert queries.num_rows + dropped.num_rows == NUM_SKILLS
    return json.loads(done.stdout)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def stop(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """What it said, as soon as it is gone."""
    process.send_signal(number)
    said = process.communicate(timeout=20)[1]
    assert process.returncode != 0
    return said


def num_kept(cache: Path) -> int:
    if not (cache / DATABASE).exists():
        return 0
    with closing(sqlite3.connect(cache / DATABASE)) as database:
        tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'answers'").fetchone()[0]
        return database.execute("SELECT count(*) FROM answers").fetchone()[0] if tables else 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stop_and_restart_never_asks_again_for_what_was_answered(
    pool: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with llm_server() as server:

        def reply(request: dict[str, Any]) -> Reply:
            # After a dozen answers the server falls silent, so that the kill finds four requests without an answer.
            num_before = len(server.requests)
            return Reply(f"Sort pile {request['seed']} by month.", delay=0 if num_before <= 12 else 60)

        server.otherwise = reply
        process = start(pool, server)
        wait_for(lambda: num_kept(tmp_path / "cache") == 12 and len(server.requests) == 16)
        said = stop(process, number)
        if number == signal.SIGINT:
            assert said.splitlines()[-1] == "error: interrupted; what was finished is kept"
            assert "Traceback" not in said and "Task was destroyed" not in said
        first = [*server.answered]
        assert len(first) == 12
        assert not (tmp_path / "out").exists()

        server.otherwise = lambda request: Reply(f"Sort pile {request['seed']} by month.")
        assert finish(pool, server)["num_queries"] == NUM_SKILLS
        answered = Counter(request["seed"] for request in server.answered)
        assert len(answered) == NUM_SKILLS and set(answered.values()) == {1}
        # Only what was never answered was sent a second time.
        sent = Counter(request["seed"] for request in server.requests)
        assert sum(count > 1 for count in sent.values()) == 4
        assert all(sent[request["seed"]] == 1 for request in first)


def test_kill_9_while_a_batch_is_under_way_and_restart_waits_for_that_batch(pool: Path, tmp_path: Path) -> None:
    batch = ("llm.mode=batch", "llm.batch.poll_seconds=0.05")
    with llm_server() as server:
        server.otherwise = lambda request: Reply(f"Sort pile {request['seed']} by month.")
        server.batch_steps = ["in_progress"]
        process = start(pool, server, *batch)
        wait_for(lambda: server.calls.count("GET /batches/id") > 2)
        stop(process, signal.SIGKILL)
        answers = Answers(tmp_path / "cache", {})
        assert [note.batch_id for note in answers.batches(server.base_url)] == ["batch-0"]

        server.batch_steps = ["in_progress", "completed"]
        assert finish(pool, server, *batch)["num_queries"] == NUM_SKILLS
        assert len(server.batches) == 1
        assert server.calls.count("POST /batches") == server.calls.count("POST /files") == 1
        assert Counter(request["seed"] for request in server.batched).most_common(1)[0][1] == 1
        assert answers.batches(server.base_url) == []
