"""Benchmarks and pools, written small."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skilltrain.records import Judgement, Query, Rankings, Skill
from skilltrain.retrieval.rankings import rankings_table
from skilltrain.tables import JUDGEMENTS, QUERIES, RANKINGS, SKILLS, write_table

Files = dict[str, Any]
"""Name → text, rows of JSON Lines, or a JSON value; None leaves a file out."""


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(folder: Path, files: Files) -> Path:
    """`folder` with these files."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list) and name.endswith(".jsonl"):
            file.write_text(jsonl(*content), encoding="utf-8")
        elif content is not None:
            file.write_text(
                content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
            )
    return folder


def write_ours(
    folder: Path, queries: Iterable[tuple[str, str, str]], verdicts: Mapping[str, Mapping[str, str]]
) -> Path:
    """Our tables from (query_id, text, split) and query_id → skill_id → verdict."""
    asked = [Query(query_id, text, "single", "test", split) for query_id, text, split in queries]
    write_table(asked, QUERIES, folder)
    judged = [
        Judgement(query_id, *pair, "test")
        for query_id, row in verdicts.items()
        for pair in row.items()
    ]
    write_table(judged, JUDGEMENTS, folder)
    return folder


def write_rankings(folder: Path, by_stage: Mapping[str, Rankings]) -> Path:
    """A RANKINGS table of stage → query_id → (skill_id, score), best first; its rows stand in no order."""
    write_table(rankings_table(by_stage).to_pylist()[::-1], RANKINGS, folder)
    return folder


def write_pool(folder: Path, skills: Iterable[Skill]) -> Path:
    write_table(skills, SKILLS, folder)
    return folder


def skillrouter(
    tasks: Iterable[tuple[str, str]], relevance: Any, gold: Iterable[Any] | None = None
) -> Files:
    """SkillRouter's files from (task_id, text), the map of relevance.json and, if there are any, gold skills' rows."""
    rows = [
        {"task_id": i, "instruction_text": text, "difficulty": "hard", "excluded": True}
        for i, text in tasks
    ]
    return {"tasks.jsonl": rows, "relevance.json": relevance, "gold_skills.jsonl": gold and [*gold]}
