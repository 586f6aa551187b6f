"""SkillRouter's benchmark files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_task, name_of, tasks_of_split, unscored_of
from skilltrain.evaluation.benchmarks.rows import Row, Text, parse_row, read_skills, read_unique_json
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import read_jsonl


class _TaskRow(Row):
    task_id: Text
    instruction_text: Text


class _RelevanceRow(Row):
    gt_skill_ids: list[Text]
    relevance: dict[Text, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    core_gt_ids: list[Text] | None = None
    task_type: str


def read_skillrouter(folder: Path, split: str | None) -> Benchmark:
    """The scored tasks of tasks.jsonl and relevance.json, and gold_skills.jsonl if it is there (see load_benchmark)."""
    rows = _relevance_rows(folder / "relevance.json")
    texts = _task_texts(folder / "tasks.jsonl", rows.keys())
    tasks: list[Task] = []
    for task_id, text in texts.items():
        row, where = rows[task_id], f"{folder / 'relevance.json'}, task {task_id}"
        if row.task_type != "generic_only":
            relevance = _skillrouter_relevance(row, where)
            tasks.append(make_task(task_id, text, relevance, origin="skillsbench", split="test"))
    scored = tuple(tasks_of_split(tasks, split, folder))
    gold_skills = read_skills(folder / "gold_skills.jsonl")
    return Benchmark(name_of(folder), scored, gold_skills, unscored=unscored_of(texts, scored))


def _relevance_rows(file: Path) -> dict[str, _RelevanceRow]:
    entries = read_unique_json(file)
    if not isinstance(entries, dict):
        raise SkilltrainError("expected a map of task_id to relevance", where=file)
    return {task_id: parse_row(_RelevanceRow, entry, f"{file}, task {task_id}") for task_id, entry in entries.items()}


def _task_texts(file: Path, judged: Iterable[str]) -> dict[str, str]:
    """task_id → instruction, for exactly the `judged` tasks."""
    judged, texts = set(judged), dict[str, str]()
    for line, values in read_jsonl(file):
        where = f"{file}, line {line}"
        task = parse_row(_TaskRow, values, where)
        if task.task_id in texts:
            raise SkilltrainError(f"task '{task.task_id}' stands twice", where=where)
        if task.task_id not in judged:
            raise SkilltrainError(f"task '{task.task_id}' has no entry in relevance.json", where=where)
        texts[task.task_id] = task.instruction_text
    if without := sorted(judged - texts.keys()):
        raise SkilltrainError(f"relevance.json has {len(without)} tasks that are not here: {without[0]}", where=file)
    return texts


def _skillrouter_relevance(row: _RelevanceRow, where: str) -> Relevance:
    gold = frozenset(row.gt_skill_ids if row.core_gt_ids is None else row.core_gt_ids)
    if not gold:
        raise SkilltrainError("no skill is gold", where=where)
    if without := sorted(skill_id for skill_id in gold if not row.relevance.get(skill_id)):
        raise SkilltrainError(f"gold skill '{without[0]}' has no positive relevance", where=where)
    return Relevance(gold=gold, gains=row.relevance)
