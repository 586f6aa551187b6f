"""benchmarks/skillweaver_llm.py: prompts are written without gold, and answers are played back."""

import importlib.util
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from skilltrain.config import validate
from skilltrain.llm import LLM, LLMConfig
from skilltrain.llm.answers import Request
from skilltrain.records import Judgement, Query, Verdict
from skilltrain.tables import JUDGEMENTS, PLANS, QUERIES, write_table

FILE = Path(__file__).parents[1] / "benchmarks" / "skillweaver_llm.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("skillweaver_llm", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(script, folder: Path, text: str) -> tuple[str, set[str]]:
    """Ask the playback a question. Return the answer and the ids of prompts without one."""
    playback = script.Playback(folder)
    with script.chat_server(playback) as address:
        values = {"kind": "openai", "model": "x", "base_url": address, "cache": None}
        answer = LLM(validate(LLMConfig, values, "test")).complete(Request("Cut.", text, 0))
    return answer.text, playback.unanswered


def test_answer_is_played_back(script, tmp_path):
    first, unanswered = ask(script, tmp_path, "Sort and send")
    (row,) = script.read_rows(tmp_path / "prompts.jsonl")
    answer = {"id": row["id"], "answer": '["sort", "send"]'}
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer) + "\n")

    second = ask(script, tmp_path, "Sort and send")

    assert row == {"id": row["id"], "system": "Cut.", "user": "Sort and send"}
    assert (first, unanswered) == ("no answer yet", {row["id"]})
    assert second == ('["sort", "send"]', set())
    assert len(script.read_rows(tmp_path / "prompts.jsonl")) == 1


def test_sampled_tasks_are_distinct(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "TASKS_PER_STYLE", 2)
    ids = [f"t{number}" for number in range(9)]
    for style in script.STYLES:
        queries = [Query(query_id, style, "multi", style, "test") for query_id in ids]
        judgements = [Judgement(query_id, "s", Verdict.REQUIRED, "x") for query_id in ids]
        write_table(queries, QUERIES, tmp_path / style)
        write_table(judgements, JUDGEMENTS, tmp_path / style)
        write_table([], PLANS, tmp_path / style)

    script.sample_tasks(tmp_path, tmp_path / "tasks")

    rows = pq.read_table(tmp_path / "tasks" / "queries.parquet").to_pylist()
    assert [row["text"] for row in rows] == [style for style in script.STYLES for _ in range(2)]
    assert len({row["query_id"] for row in rows}) == 6
    judged = pq.read_table(tmp_path / "tasks" / "judgements.parquet")["query_id"].to_pylist()
    assert set(judged) == {row["query_id"] for row in rows}
