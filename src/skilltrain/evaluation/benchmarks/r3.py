"""R3-Skill (Wang et al., 2026) as it is published, and groups of judgements made in its way.

A published query has no id and is called by its line, test-17. Gold skills (of groups: the required ones) have gain 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Labels, Task, make_benchmark, task_of
from skilltrain.evaluation.benchmarks.rows import Label, NamedRow, Row, Text, read_rows, unique
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Reason, Skill


class _SkillRow(NamedRow):
    text: str

    def skill(self) -> Skill:
        """A skill from `name | description | body`, which our templates render back; the body may hold the bar."""
        name, description, body, *_ = [*self.text.split(" | ", 2), "", ""]
        return Skill(self.row_id, name=name, description=description, body=body, source="r3")


class _QueryRow(Row):
    query: Text
    skill_ids: list[Text]
    lang: Label = ""


def _reason(value: object) -> str | None:
    """A reason; anything but a text says nothing. Raises ValueError for a text that is none of the eight."""
    if isinstance(value, str) and value not in set(Reason):
        raise ValueError(f"'{value:.40}' is no reason; choose from {', '.join(Reason)}")
    return value if isinstance(value, str) else None


class _Rejected(Row):
    skill_id: Text
    reason: Annotated[str | None, BeforeValidator(_reason)] = None


class _Group(NamedRow):
    row_id: Text = Field(alias="group_id")
    query: Text
    required: list[Text]
    rejected: list[_Rejected]
    irrelevant: list[Text]


def read_r3_skill(folder: Path, split: str | None) -> Benchmark:
    """The published test set, test.jsonl and skills_test.jsonl."""
    skills = unique("skill", read_rows(_SkillRow, folder / "skills_test.jsonl"))
    tasks: list[Task] = []
    for row in read_rows(_QueryRow, folder / "test.jsonl"):
        line = row.where.rpartition(" ")[2]
        tasks.append(_task(f"test-{line}", row, row.skill_ids, {"direction": row.lang}))
    return make_benchmark(folder, tasks, split, pool=[row.skill() for row in skills.values()])


def read_r3_groups(folder: Path, split: str | None) -> Benchmark:
    """Groups of one query and the verdicts on its candidates, judgements.jsonl."""
    tasks: list[Task] = []
    for group_id, row in unique("group", read_rows(_Group, folder / "judgements.jsonl")).items():
        judged = [*row.required, *(one.skill_id for one in row.rejected), *row.irrelevant]
        if twice := [skill_id for at, skill_id in enumerate(judged) if skill_id in judged[:at]]:
            raise SkilltrainError(f"skill '{twice[0]}' of group '{group_id}' is judged twice", where=row.where)
        reasons = tuple(dict.fromkeys(one.reason for one in row.rejected if one.reason))
        tasks.append(_task(group_id, row, row.required, {"reason": reasons}))
    return make_benchmark(folder, tasks, split)


def _task(query_id: str, row: _QueryRow | _Group, gold: Sequence[str], labels: Labels) -> Task:
    query = Query(query_id, row.query, kind="", origin="r3", split="test")
    return task_of(query, Relevance(frozenset(gold), dict.fromkeys(gold, 1.0)), labels, row.where)
