"""R3-Skill (Wang et al., 2026) as it is published, and groups of judgements made in its way."""

from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import (
    Benchmark,
    Task,
    make_task,
    name_of,
    tasks_of_split,
    with_pool,
)
from skilltrain.evaluation.benchmarks.rows import Row, Text, parse_row, unique_rows
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import read_jsonl
from skilltrain.records import Skill

SPLIT = "test"
_SEPARATOR = " | "


class _SkillRow(Row):
    id: Text
    text: str


class _QueryRow(Row):
    query: Text
    skill_ids: list[Text]


class _Rejected(Row):
    skill_id: Text


class _Group(Row):
    group_id: Text
    query: Text
    required: list[Text]
    rejected: list[_Rejected]
    irrelevant: list[Text]


def read_r3_skill(folder: Path, split: str | None) -> Benchmark:
    """The published test set, test.jsonl and skills_test.jsonl (see load_benchmark)."""
    skills = {
        skill_id: _skill_from_text(skill_id, row.text)
        for skill_id, row in unique_rows(_SkillRow, folder / "skills_test.jsonl", "skill", lambda row: row.id)
    }
    tasks: list[Task] = []
    for line, values in read_jsonl(folder / "test.jsonl"):
        where = f"{folder / 'test.jsonl'}, line {line}"
        row = parse_row(_QueryRow, values, where)
        if unknown := sorted(set(row.skill_ids) - skills.keys()):
            raise SkilltrainError(f"skill '{unknown[0]}' is not in skills_test.jsonl", where=where)
        tasks.append(_task(f"{SPLIT}-{line}", row.query, row.skill_ids, where))
    query_ids = [task.query.query_id for task in tasks]
    return with_pool(folder, tasks_of_split(tasks, split, folder), skills.values(), query_ids)


def read_r3_groups(folder: Path, split: str | None) -> Benchmark:
    """Groups of one query and the verdicts on its candidates, judgements.jsonl (see load_benchmark)."""
    file = folder / "judgements.jsonl"
    tasks: dict[str, Task] = {}
    for line, values in read_jsonl(file):
        where = f"{file}, line {line}"
        group = parse_row(_Group, values, where)
        if group.group_id in tasks:
            raise SkilltrainError(f"group '{group.group_id}' stands twice", where=where)
        judged = [*group.required, *(one.skill_id for one in group.rejected), *group.irrelevant]
        if twice := [skill_id for at, skill_id in enumerate(judged) if skill_id in judged[:at]]:
            raise SkilltrainError(f"skill '{twice[0]}' of group '{group.group_id}' is judged twice", where=where)
        tasks[group.group_id] = _task(group.group_id, group.query, group.required, where)
    return Benchmark(name_of(folder), tuple(tasks_of_split(list(tasks.values()), split, folder)), ())


def _task(query_id: str, text: str, gold: list[str], where: str) -> Task:
    if not gold:
        raise SkilltrainError(f"query '{query_id}' has no required skill, so none is gold", where=where)
    relevance = Relevance(frozenset(gold), dict.fromkeys(gold, 1.0))
    return make_task(query_id, text, relevance, origin="r3", split=SPLIT)


def _skill_from_text(skill_id: str, text: str) -> Skill:
    """A skill from `name | description | body`, which our templates render back; the body may hold the separator."""
    name, _, rest = text.partition(_SEPARATOR)
    description, _, body = rest.partition(_SEPARATOR)
    return Skill(skill_id, name=name, description=description, body=body, source="r3")
