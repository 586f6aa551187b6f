"""SkillRouter's benchmark: tasks.jsonl and relevance.json, and the folders `easy` and `hard`.

relevance.json decides what is scored. `core_gt_ids` are gold, or `gt_skill_ids` in an entry without
them. `relevance` holds the gains: 3 for gold and 1 for a degraded copy. As in the released
evaluation, entries of task_type `generic_only` are skipped, and `excluded: true` in tasks.jsonl (a
note on a task's environment) is ignored.

`easy` and `hard` are tiers: two pools of the same tasks. Only `hard` has the degraded copies.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

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
    rows_by_id,
)
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill

ORIGIN = "skillsbench"


class _TaskRow(NamedRow):
    row_id: Text = Field(alias="task_id")
    instruction_text: Text
    difficulty: Label = ""
    domain: Label = ""
    tags: Any = None


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
    """Read a benchmark in the format of SkillRouter.

    tasks.jsonl has the queries, relevance.json their gold skills, and gold_skills.jsonl, which may
    be missing, the texts of the gold skills.

    Args:
        folder: Folder of these files.
        split: Split to score; None for all. All tasks have the split `test`.

    Raises:
        SkilltrainError: A file has wrong content, or a task is in only one of the two files.
    """
    file = folder / "relevance.json"
    entries = read_json(file)
    if not isinstance(entries, dict):
        raise SkilltrainError("invalid-row", "expected a map of task_id to relevance", where=file)
    rows = rows_by_id("task", read_rows(_TaskRow, folder / "tasks.jsonl"))
    # Ids that are in only one of the two files.
    unmatched = entries.keys() ^ rows.keys()
    if unmatched:
        task_id = min(unmatched)
        incomplete = "relevance.json" if task_id in rows else "tasks.jsonl"
        problem = f"{incomplete} lacks task '{task_id}' ({len(unmatched)} on one side only)"
        raise SkilltrainError("unknown-query", problem, where=folder)

    tasks: list[Task] = []
    for task_id, row in rows.items():
        entry = parse_row(_RelevanceRow, entries[task_id], f"{file}, task {task_id}")
        # The released evaluation does not score tasks that need only generic skills.
        if entry.task_type == "generic_only":
            continue

        # As in the released evaluation, `core_gt_ids` are the gold skills if the entry has them.
        # Otherwise they are `gt_skill_ids`. `entry.relevance` holds the gains for nDCG.
        gold = entry.core_gt_ids
        if gold is None:
            gold = entry.gt_skill_ids
        relevance = Relevance(gold=frozenset(gold), gains=entry.relevance)
        labels = {
            "difficulty": row.difficulty,
            "domain": row.domain,
            "tags": _texts_of(row.tags),
            "task type": entry.task_type,
        }
        query = Query(task_id, row.instruction_text, kind="", origin=ORIGIN, split="test")
        tasks.append(task_of(query, relevance, labels, file))

    gold_file = folder / "gold_skills.jsonl"
    gold_skills = _read_skills(gold_file) if gold_file.exists() else ()
    notes = []
    num_skipped = len(rows) - len(tasks)
    if num_skipped:
        count = f"{num_skipped} of {len(rows)} tasks"
        notes.append(f"{count} need generic skills only and are not scored")
    # Tasks that were skipped are in `query_ids`, so that they are known as unscored queries.
    return make_benchmark(
        folder, tasks, split, query_ids=rows.keys(), gold_skills=gold_skills, notes=notes
    )


def read_skillrouter_tier(folder: Path, split: str | None) -> Benchmark:
    """Read one tier: the tasks of the parent folder, ranked over the skills of this folder.

    The folders `easy` and `hard` are tiers: two pools of skills for the same tasks.

    Args:
        folder: Folder of the tier, with JSON Lines files of skills.
        split: Split to score; None for all.
    """
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
    if not files:
        problem = "holds no .jsonl or .jsonl.gz file with the skills of this tier"
        raise SkilltrainError("no-skill-file", problem, where=folder)
    benchmark = read_skillrouter(folder.resolve().parent, split)
    return replace(benchmark, name=folder.resolve().name, pool=_read_skills(*files))


def _texts_of(tags: Any) -> tuple[str, ...]:
    """Return the distinct texts of a list. Anything else has none."""
    if not isinstance(tags, list):
        return ()
    return tuple(dict.fromkeys(tag for tag in tags if isinstance(tag, str) and tag))


def _read_skills(*files: Path) -> tuple[Skill, ...]:
    """Read skills from JSON Lines files. An id may appear once in all of them."""
    rows = rows_by_id("skill", read_rows(_PoolRow, *files)).values()
    return tuple(Skill(row.row_id, **row.model_dump(exclude={"row_id"})) for row in rows)


SKILLROUTER = BenchmarkReader(
    "tasks.jsonl", "tasks.jsonl and relevance.json (SkillRouter)", read_skillrouter
)
TIER = BenchmarkReader(
    "../relevance.json",
    "the pool of a tier beside relevance.json (SkillRouter)",
    read_skillrouter_tier,
)
