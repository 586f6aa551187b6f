"""SkillRouter's files, tasks.jsonl and relevance.json, and its tiers easy and hard: two pools of the same tasks.

relevance.json alone says what is scored: `core_gt_ids` are gold (`gt_skill_ids` where an entry has none), `relevance`
holds the gains, 3 for gold and 1 for a degraded copy. Entries of task_type `generic_only` are skipped, and `excluded:
true` in tasks.jsonl (a note on a task's environment) skips none, both as in the released evaluation. The tiers are the
folders easy and hard beside these files; without a pool, nDCG's best order holds the copies that only hard has.
"""

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.metrics.benchmarks.benchmark import (
    Benchmark,
    BenchmarkReader,
    Task,
    make_benchmark,
    task_of,
)
from skilltrain.metrics.benchmarks.rows import (
    Label,
    NamedRow,
    Row,
    Text,
    parse_row,
    read_rows,
    unique,
)
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill

ORIGIN = "skillsbench"


class _TaskRow(NamedRow):
    row_id: Text = Field(alias="task_id")
    instruction_text: Text
    difficulty: Label = ""
    domain: Label = ""


class _RelevanceRow(Row):
    gt_skill_ids: list[Text]
    relevance: dict[Text, float]
    core_gt_ids: list[Text] | None = None
    task_type: str


class _PoolRow(NamedRow):
    row_id: Text = Field(alias="skill_id")
    name: str
    description: str
    body: str
    category: str | None = None
    lang: str | None = None
    source: str = ""
    license: str | None = None


def read_skillrouter(folder: Path, split: str | None) -> Benchmark:
    """The scored tasks of tasks.jsonl and relevance.json, and gold_skills.jsonl if it is there."""
    file = folder / "relevance.json"
    entries = read_json(file)
    if not isinstance(entries, dict):
        raise SkilltrainError("invalid-row", "expected a map of task_id to relevance", where=file)
    rows = unique("task", read_rows(_TaskRow, folder / "tasks.jsonl"))
    if without := sorted(entries.keys() ^ rows.keys()):
        lacking = "relevance.json" if without[0] in rows else "tasks.jsonl"
        raise SkilltrainError(
            "unknown-query",
            f"{lacking} lacks task '{without[0]}' ({len(without)} on one side only)",
            where=folder,
        )
    tasks: list[Task] = []
    for task_id, row in rows.items():
        entry = parse_row(_RelevanceRow, entries[task_id], f"{file}, task {task_id}")
        if entry.task_type != "generic_only":
            gold = entry.gt_skill_ids if entry.core_gt_ids is None else entry.core_gt_ids
            labels = {
                "difficulty": row.difficulty,
                "domain": row.domain,
                "task type": entry.task_type,
            }
            query = Query(task_id, row.instruction_text, kind="", origin=ORIGIN, split="test")
            tasks.append(task_of(query, Relevance(frozenset(gold), entry.relevance), labels, file))
    gold_file = folder / "gold_skills.jsonl"
    gold_skills = _read_skills(gold_file) if gold_file.exists() else ()
    num_left_out = len(rows) - len(tasks)
    left_out = f"{num_left_out} of {len(rows)} tasks want generic skills alone and are not scored"
    return make_benchmark(
        folder,
        tasks,
        split,
        rows,
        gold_skills=gold_skills,
        notes=[left_out] if num_left_out else (),
    )


def read_skillrouter_tier(folder: Path, split: str | None) -> Benchmark:
    """The tasks of the folder above, with the skills of this folder's JSON Lines files as their pool."""
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
    if not files:
        raise SkilltrainError(
            "no-skill-file",
            "holds no .jsonl or .jsonl.gz file with the skills of this tier",
            where=folder,
        )
    above = read_skillrouter(folder.resolve().parent, split)
    return replace(above, name=folder.resolve().name, pool=_read_skills(*files))


def _read_skills(*files: Path) -> tuple[Skill, ...]:
    """The skills of JSON Lines files; an id stands in one of them once."""
    found = unique("skill", read_rows(_PoolRow, *files))
    return tuple(
        Skill(skill_id, **row.model_dump(exclude={"row_id"})) for skill_id, row in found.items()
    )


SKILLROUTER = BenchmarkReader(
    "tasks.jsonl", "tasks.jsonl and relevance.json (SkillRouter)", read_skillrouter
)
TIER = BenchmarkReader(
    "../relevance.json",
    "the pool of a tier beside relevance.json (SkillRouter)",
    read_skillrouter_tier,
)
