"""R3-Skill (Wang et al., 2026) as published: test.jsonl and skills_test.jsonl. Gold has gain 1."""

from pathlib import Path

from skilltrain.metrics.benchmarks.benchmark import (
    Benchmark,
    BenchmarkReader,
    Task,
    make_benchmark,
    task_of,
)
from skilltrain.metrics.benchmarks.rows import Label, NamedRow, Row, Text, read_rows, rows_by_id
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill


class _SkillRow(NamedRow):
    text: str

    def skill(self) -> Skill:
        """Split the text `name | description | body`. Only the body may contain the separator."""
        fields = self.text.split(" | ", 2)
        fields += [""] * (3 - len(fields))
        name, description, body = fields
        return Skill(self.row_id, name=name, description=description, body=body, source="r3")


class _QueryRow(Row):
    query: Text
    skill_ids: list[Text]
    lang: Label = ""


def read_r3_skill(folder: Path, split: str | None) -> Benchmark:
    """Read the folder with both files.

    Queries have no ids there, so the one in line 17 gets the id `test-17`.

    Args:
        folder: The folder.
        split: Split to score; None for all.
    """
    skills = rows_by_id("skill", read_rows(_SkillRow, folder / "skills_test.jsonl"))
    tasks: list[Task] = []
    for where, row in read_rows(_QueryRow, folder / "test.jsonl"):
        line_number = where.rpartition(" ")[2]  # of `FILE, line 17`
        query = Query(f"test-{line_number}", row.query, kind="", origin="r3", split="test")
        relevance = Relevance(frozenset(row.skill_ids), dict.fromkeys(row.skill_ids, 1.0))
        tasks.append(task_of(query, relevance, {"direction": row.lang}, where))
    return make_benchmark(folder, tasks, split, pool=[row.skill() for row in skills.values()])


R3_SKILL = BenchmarkReader(
    "skills_test.jsonl", "test.jsonl and skills_test.jsonl (R3-Skill's data)", read_r3_skill
)
