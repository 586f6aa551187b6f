"""LiveMCPBench (Mo et al., 2025): tasks with the MCP tools that an annotator used, over the tools of 70 servers.

A task names its tools without their servers, so a name that several servers offer has several candidates. Any of them
is taken to do: the first is gold, the others are its alternatives (Relevance.alternatives). A needed tool that is not
among the tools cannot be gold, and a task with no other is not scored; the benchmark's `notes` count both.
"""

from collections.abc import Container
from pathlib import Path

from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_benchmark, task_of
from skilltrain.evaluation.benchmarks.rows import Label, NamedRow, Text, read_rows, unique
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Skill

_ORIGIN = "livemcpbench"


class _ToolRow(NamedRow):
    row_id: Text = Field(alias="skill_id")
    server: str
    server_description: str
    name: Text
    description: str
    parameters: list[str]
    category: str | None = None

    def skill(self) -> Skill:
        """What the tool does and what its server is for, and the names of its parameters as the body."""
        server = f"({self.server}: {self.server_description})" if self.server_description else f"({self.server})"
        body = f"Parameters: {', '.join(self.parameters)}" if self.parameters else "Takes no parameters."
        about = f"{self.description} {server}".strip()
        return Skill(self.row_id, self.name, about, body, category=self.category, source=_ORIGIN)


class _TaskRow(NamedRow):
    row_id: Text = Field(alias="task_id")
    query: Text
    tools: list[Text]
    tool_skill_ids: list[list[Text]]  # for each tool those that could be meant
    category: Label = ""


def read_livemcpbench(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a folder with tasks.jsonl and tools.jsonl."""
    tools = unique("skill", read_rows(_ToolRow, folder / "tools.jsonl"))
    rows = unique("task", read_rows(_TaskRow, folder / "tasks.jsonl"))
    tasks: list[Task] = []
    without: list[str] = []  # the task of each tool that has no candidate
    for task_id, row in rows.items():
        without += [task_id for skill_ids in row.tool_skill_ids if not skill_ids]
        relevance = _relevance(row, tools)
        if relevance.gold:
            query = Query(task_id, row.query, kind="", origin=_ORIGIN, split="test")
            tasks.append(task_of(query, relevance, {"category": row.category}, row.where))
    notes: list[str] = []
    if without:
        missing = f"{len(without)} of {sum(len(row.tools) for row in rows.values())} needed tools"
        notes.append(f"{missing} ({len(set(without))} tasks) have no candidate and are no gold")
    scored = {task.query.query_id for task in tasks}
    if left_out := [task_id for task_id in rows if task_id not in scored]:
        notes.append(f"{len(left_out)} of {len(rows)} tasks have no gold and are not scored: {', '.join(left_out[:3])}")
    return make_benchmark(folder, tasks, split, rows, [tool.skill() for tool in tools.values()], notes=notes)


def _relevance(row: _TaskRow, pool: Container[str]) -> Relevance:
    """What a task asks for; nothing, where none of its tools has a candidate."""
    if len(row.tools) != len(row.tool_skill_ids):
        what = f"task '{row.row_id}' has {len(row.tools)} tools and {len(row.tool_skill_ids)} lists of candidates"
        raise SkilltrainError(what, where=row.where)
    needs: dict[str, str] = {}  # candidate → the first one of its tool
    for group in dict.fromkeys(tuple(skill_ids) for skill_ids in row.tool_skill_ids):
        for skill_id in group:
            if skill_id in needs or skill_id not in pool:
                fault = "is a candidate for two tools" if skill_id in needs else "is not among the benchmark's own"
                raise SkilltrainError(f"skill '{skill_id}' of task '{row.row_id}' {fault}", where=row.where)
            needs[skill_id] = group[0]
    gold = {skill_id: 1.0 for skill_id, first in needs.items() if skill_id == first}
    alternatives = {skill_id: first for skill_id, first in needs.items() if skill_id != first}
    return Relevance(frozenset(gold), gold, alternatives)
