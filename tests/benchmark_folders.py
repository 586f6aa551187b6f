"""Write small benchmarks and pools for tests."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain.records import Judgement, Query, Rankings, Skill
from skilltrain.retrieval.rankings import rankings_table
from skilltrain.tables import JUDGEMENTS, QUERIES, RANKINGS, SKILLS, write_table

Files = dict[str, Any]
"""Content by file name: text, rows of JSON Lines or a JSON value; None omits the file."""


def jsonl(*rows: Any) -> str:
    """Return rows as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(folder: Path, files: Files) -> Path:
    """Write files to a folder and return it."""
    for name, content in files.items():
        if content is None:
            continue
        if isinstance(content, list) and name.endswith(".jsonl"):
            content = jsonl(*content)
        elif not isinstance(content, str):
            content = json.dumps(content)
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    return folder


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to a parquet file, as a data set on the Hub has them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def write_ours(
    folder: Path, queries: Iterable[tuple[str, str, str]], verdicts: Mapping[str, Mapping[str, str]]
) -> Path:
    """Write a benchmark in our tables.

    Args:
        folder: Folder of the benchmark, which is returned.
        queries: Id, text and split of each query.
        verdicts: Verdict of each judged skill, by query id.
    """
    rows = [Query(query_id, text, "single", "test", split) for query_id, text, split in queries]
    write_table(rows, QUERIES, folder)
    judgements = []
    for query_id, verdict_by_skill in verdicts.items():
        for skill_id, verdict in verdict_by_skill.items():
            judgements.append(Judgement(query_id, skill_id, verdict, "test"))
    write_table(judgements, JUDGEMENTS, folder)
    return folder


def write_rankings(folder: Path, by_stage: Mapping[str, Rankings]) -> Path:
    """Write the rankings of each stage in one table, with its rows in no order."""
    write_table(rankings_table(by_stage).to_pylist()[::-1], RANKINGS, folder)
    return folder


def write_pool(folder: Path, skills: Iterable[Skill]) -> Path:
    write_table(skills, SKILLS, folder)
    return folder


def skillrouter(
    tasks: Iterable[tuple[str, str]], relevance: Any, gold: Iterable[Any] | None = None
) -> Files:
    """Return a benchmark in SkillRouter's form.

    Args:
        tasks: Id and text of each task.
        relevance: Content of relevance.json.
        gold: Rows of the gold skills; None omits their file.
    """
    rows = [
        {"task_id": task_id, "instruction_text": text, "difficulty": "hard", "excluded": True}
        for task_id, text in tasks
    ]
    return {"tasks.jsonl": rows, "relevance.json": relevance, "gold_skills.jsonl": gold and [*gold]}
