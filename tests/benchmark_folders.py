"""Benchmarks and pools, written small."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skilltrain.records import Judgement, Query, Rankings, Skill
from skilltrain.retrieval.rankings import rankings_table
from skilltrain.tables import JUDGEMENTS, QUERIES, RANKINGS, SKILLS, write_table


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_ours(
    folder: Path, queries: Iterable[tuple[str, str, str]], verdicts: Mapping[str, Mapping[str, str]]
) -> Path:
    """Our tables from (query_id, text, split) and query_id → skill_id → verdict."""
    asked = [Query(query_id, text, "single", "test", split) for query_id, text, split in queries]
    write_table(asked, QUERIES, folder)
    judged = [Judgement(query_id, *pair, "test") for query_id, row in verdicts.items() for pair in row.items()]
    write_table(judged, JUDGEMENTS, folder)
    return folder


def write_rankings(folder: Path, by_stage: Mapping[str, Rankings]) -> Path:
    """A RANKINGS table of stage → query_id → (skill_id, score), best first; its rows stand in no order."""
    write_table(rankings_table(by_stage).to_pylist()[::-1], RANKINGS, folder)
    return folder


def write_pool(folder: Path, skills: Iterable[Skill]) -> Path:
    write_table(skills, SKILLS, folder)
    return folder


def write_skillrouter(
    folder: Path, tasks: Iterable[tuple[str, str]], relevance: Any, gold: Iterable[Any] | None = None
) -> Path:
    """SkillRouter's files from (task_id, text), the map of relevance.json and, if there are any, gold skills' rows."""
    folder.mkdir(exist_ok=True)
    rows = [{"task_id": i, "instruction_text": text, "difficulty": "hard", "excluded": True} for i, text in tasks]
    (folder / "tasks.jsonl").write_text(jsonl(*rows))
    (folder / "relevance.json").write_text(json.dumps(relevance))
    if gold is not None:
        (folder / "gold_skills.jsonl").write_text(jsonl(*gold))
    return folder
