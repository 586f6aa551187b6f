"""LiveMCPBench (Mo et al., 2025): tasks with the MCP tools that an annotator used, over the tools of 70 servers.

A task names its tools without their servers, so a name that several servers offer has several candidates. Any of them
is taken to do: the first is gold, the others are its alternatives (Relevance.alternatives). A needed tool that is not
among the tools cannot be gold, and a task with no other is not scored; the benchmark's `notes` count both.
"""

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import AliasPath, Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_benchmark, make_task
from skilltrain.evaluation.benchmarks.rows import Label, NamedRow, Row, RowT, Text, parse_row, read_rows, unique
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import read_json
from skilltrain.records import Skill

_ORIGIN = "livemcpbench"
ANNOTATIONS = "annotated_data/all_annotations.json"
SERVERS = "tools/LiveMCPTool/tools.json"
_LISTED = re.compile(r"^\s*\d+\s*[.)]\s*(\S.*?)\s*$", re.MULTILINE)  # `1. geocode_address`


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


class _Annotation(Row):
    task_id: Text
    query: Text = Field(alias="Question")
    tools: str = Field(validation_alias=AliasPath("Annotator Metadata", "Tools"))
    category: Label = ""


class _Tool(Row):
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, validation_alias=AliasPath("inputSchema", "properties"))


class _Tools(Row):
    tools: list[_Tool]


class _Server(Row):
    name: str
    description: str | None = None
    category: str | None = None
    tools: dict[Text, _Tools]


def read_livemcpbench(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a folder with tasks.jsonl and tools.jsonl."""
    tools = read_rows(_ToolRow, folder / "tools.jsonl")
    return _benchmark(folder, split, tools, list(read_rows(_TaskRow, folder / "tasks.jsonl")))


def read_livemcpbench_clone(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a clone of the published repository."""
    tools = list(_tools_of_servers(folder / SERVERS))
    offers: dict[str, list[str]] = {}
    for _, tool in tools:
        offers.setdefault(tool.name, []).append(tool.row_id)
    tasks: list[tuple[str, _TaskRow]] = []
    for where, row in _entries(_Annotation, folder / ANNOTATIONS):
        names = _LISTED.findall(row.tools)
        if not names and row.tools.strip():
            what = f"task '{row.task_id}': expected a numbered list of tools, found '{row.tools[:60]}'"
            raise SkilltrainError(what, where=where)
        candidates = [offers.get(name, []) for name in names]
        known = {"task_id": row.task_id, "query": row.query, "category": row.category}
        tasks.append((where, _TaskRow.model_validate({**known, "tools": names, "tool_skill_ids": candidates})))
    return _benchmark(folder, split, tools, tasks)


def _tools_of_servers(file: Path) -> Iterator[tuple[str, _ToolRow]]:
    for where, server in _entries(_Server, file):
        for key, tool in ((key, tool) for key, group in server.tools.items() for tool in group.tools):
            skill_id, parameters = f"{key}/{tool.name}", sorted(tool.parameters or {})
            of_server = {"server": server.name, "server_description": server.description or ""}
            about = {"name": tool.name, "description": tool.description or "", "category": server.category}
            yield where, _ToolRow.model_validate({"skill_id": skill_id, "parameters": parameters, **of_server, **about})


def _entries(row_class: type[RowT], file: Path) -> Iterator[tuple[str, RowT]]:
    """(where, row) of a list in a JSON file."""
    entries = read_json(file)
    if not isinstance(entries, list):
        raise SkilltrainError("expected a list", where=file)
    for number, values in enumerate(entries, 1):
        yield (where := f"{file}, entry {number}"), parse_row(row_class, values, where)


def _benchmark(
    folder: Path, split: str | None, tools: Iterable[tuple[str, _ToolRow]], rows: Sequence[tuple[str, _TaskRow]]
) -> Benchmark:
    pool = {skill_id: row.skill() for skill_id, row in unique("skill", tools).items()}
    task_rows = unique("task", rows)
    tasks: list[Task] = []
    for where, row in rows:
        if relevance := _relevance(row, pool, where):
            labels = {"category": row.category}
            tasks.append(make_task(row.row_id, row.query, relevance, origin=_ORIGIN, split="test", labels=labels))
    notes: list[str] = []
    if without := [row.row_id for _, row in rows for skill_ids in row.tool_skill_ids if not skill_ids]:
        missing = f"{len(without)} of {sum(len(row.tools) for _, row in rows)} needed tools"
        notes.append(f"{missing} ({len(set(without))} tasks) have no candidate and are no gold")
    scored = {task.query.query_id for task in tasks}
    if left_out := [task_id for task_id in task_rows if task_id not in scored]:
        notes.append(f"{len(left_out)} of {len(rows)} tasks have no gold and are not scored: {', '.join(left_out[:3])}")
    return make_benchmark(folder, tasks, split, task_rows, list(pool.values()), notes=notes)


def _relevance(row: _TaskRow, pool: Container[str], where: str) -> Relevance | None:
    """What a task asks for; None where none of its tools has a candidate."""
    if len(row.tools) != len(row.tool_skill_ids):
        what = f"task '{row.row_id}' has {len(row.tools)} tools and {len(row.tool_skill_ids)} lists of candidates"
        raise SkilltrainError(what, where=where)
    needs: dict[str, str] = {}  # candidate → the first one of its tool
    for group in dict.fromkeys(tuple(skill_ids) for skill_ids in row.tool_skill_ids if skill_ids):
        for skill_id in group:
            fault = "is not among the benchmark's own skills" if skill_id not in pool else None
            if fault or skill_id in needs:
                what = f"skill '{skill_id}' of task '{row.row_id}' {fault or 'is a candidate for two tools'}"
                raise SkilltrainError(what, where=where)
            needs[skill_id] = group[0]
    gold = {skill_id: 1.0 for skill_id, first in needs.items() if skill_id == first}
    alternatives = {skill_id: first for skill_id, first in needs.items() if skill_id != first}
    return Relevance(frozenset(gold), gold, alternatives) if gold else None
