"""SkillRouter's files, tasks.jsonl and relevance.json, and its tiers easy and hard: two pools of the same tasks.

relevance.json alone says what is scored: `core_gt_ids` are gold (`gt_skill_ids` where an entry has none), `relevance`
holds the gains, 3 for gold and 1 for a degraded copy. Entries of task_type `generic_only` are skipped, and `excluded:
true` in tasks.jsonl (a note on a task's environment) skips none, both as in the released evaluation. The tiers are the
folders easy and hard beside these files; without a pool, nDCG's best order holds the copies that only hard has.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_benchmark, make_task
from skilltrain.evaluation.benchmarks.rows import Label, NamedRow, Row, Text, parse_row, read_rows, read_skills, unique
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import read_json

ORIGIN = "skillsbench"


class _TaskRow(NamedRow):
    row_id: Text = Field(alias="task_id")
    instruction_text: Text
    difficulty: Label = ""
    domain: Label = ""


class _RelevanceRow(Row):
    gt_skill_ids: list[Text]
    relevance: dict[Text, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    core_gt_ids: list[Text] | None = None
    task_type: str


def read_skillrouter(folder: Path, split: str | None) -> Benchmark:
    """The scored tasks of tasks.jsonl and relevance.json, and gold_skills.jsonl if it is there."""
    file = folder / "relevance.json"
    entries = read_json(file)
    if not isinstance(entries, dict):
        raise SkilltrainError("expected a map of task_id to relevance", where=file)
    places = {task_id: f"{file}, task {task_id}" for task_id in entries}
    judged = {task_id: parse_row(_RelevanceRow, entry, places[task_id]) for task_id, entry in entries.items()}
    tasks_file = folder / "tasks.jsonl"
    found = list(read_rows(_TaskRow, tasks_file))
    rows = unique("task", found)
    for where, row in found:
        if row.row_id not in judged:
            raise SkilltrainError(f"task '{row.row_id}' has no entry in relevance.json", where=where)
    if without := sorted(judged.keys() - rows.keys()):
        what = f"relevance.json has {len(without)} tasks that are not here: {without[0]}"
        raise SkilltrainError(what, where=tasks_file)
    tasks: list[Task] = []
    for task_id, row in rows.items():
        entry, text = judged[task_id], row.instruction_text
        if entry.task_type != "generic_only":
            relevance = _relevance(entry, places[task_id])
            labels = {"difficulty": row.difficulty, "domain": row.domain, "task type": entry.task_type}
            tasks.append(make_task(task_id, text, relevance, origin=ORIGIN, split="test", labels=labels))
    return make_benchmark(folder, tasks, split, rows, gold_skills=read_skills([folder / "gold_skills.jsonl"]))


def read_skillrouter_tier(folder: Path, split: str | None) -> Benchmark:
    """The tasks of the folder above, with the skills of this folder's JSON Lines files as their pool."""
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
    if not files:
        raise SkilltrainError("holds no .jsonl or .jsonl.gz file with the skills of this tier", where=folder)
    above = read_skillrouter(folder.resolve().parent, split)
    return replace(above, name=folder.resolve().name, pool=read_skills(files))


def _relevance(row: _RelevanceRow, where: str) -> Relevance:
    gold = frozenset(row.gt_skill_ids if row.core_gt_ids is None else row.core_gt_ids)
    if not gold:
        raise SkilltrainError("no skill is gold", where=where)
    if without := sorted(skill_id for skill_id in gold if not row.relevance.get(skill_id)):
        raise SkilltrainError(f"gold skill '{without[0]}' has no positive relevance", where=where)
    return Relevance(gold=gold, gains=row.relevance)
