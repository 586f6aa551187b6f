"""LiveMCPBench (Mo et al., 2025): tasks with the MCP tools that an annotator used, over the tools of 70 servers.

A task names its tools without their servers, so a name that several servers offer has several candidates. Any of them
is taken to do: the first is gold, the others are its alternatives (Relevance.alternatives). A needed tool that is not
among the tools cannot be gold, and a task with no other is not scored; the benchmark's `notes` count both.
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, GoldStep, Task, make_benchmark, task_of
from skilltrain.evaluation.benchmarks.rows import Label, NamedRow, Text, parse_row, read_rows, unique
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import read_json
from skilltrain.records import Query, Skill

_ORIGIN = "livemcpbench"
ANNOTATIONS = "annotated_data/all_annotations.json"
SERVERS = "tools/LiveMCPTool/tools.json"
_LISTED = re.compile(r"^\s*\d+\s*[.)]\s*(\S.*?)\s*$", re.MULTILINE)  # `1. geocode_address`


def _listed(value: Any) -> Any:
    """The names of an annotator's numbered list, `1. write`, `2. fetch`."""
    if not isinstance(value, str):
        return value
    names = _LISTED.findall(value)
    if not names and value.strip():
        raise ValueError(f"expected a numbered list of tools, found '{value[:60]}'")
    return names


def _in_steps(value: Any) -> Any:
    """The steps of an annotator's numbered list; a text without numbers is one step."""
    return (_LISTED.findall(value) or value.split("\n")[:1]) if isinstance(value, str) and value else value or []


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
    query: Text = Field(validation_alias=AliasChoices("query", "Question"))
    tools: Annotated[list[Text], BeforeValidator(_listed)] = Field(
        validation_alias=AliasChoices("tools", AliasPath("Annotator Metadata", "Tools"))
    )
    tool_skill_ids: list[list[Text]] | None = None  # for each tool those that could be meant; None: all of its name
    category: Label = ""
    steps: Annotated[list[Text], BeforeValidator(_in_steps)] = Field(
        default=[], validation_alias=AliasChoices("steps", AliasPath("Annotator Metadata", "Steps"))
    )


def read_livemcpbench(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a folder with tasks.jsonl and tools.jsonl."""
    tools = unique("skill", read_rows(_ToolRow, folder / "tools.jsonl"))
    return _benchmark(folder, split, tools, unique("task", read_rows(_TaskRow, folder / "tasks.jsonl")))


def read_livemcpbench_clone(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a clone of the published repository."""
    servers, annotations = folder / SERVERS, folder / ANNOTATIONS
    tools = (parse_row(_ToolRow, values, str(servers)) for values in _tools_of(read_json(servers)))
    annotated = enumerate(read_json(annotations), 1)
    tasks = (parse_row(_TaskRow, values, f"{annotations}, entry {number}") for number, values in annotated)
    return _benchmark(folder, split, unique("skill", tools), unique("task", tasks))


def _tools_of(servers: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the published tools, server by server, as rows of tools.jsonl."""
    for server in servers:
        for key, group in server["tools"].items():
            for tool in group["tools"]:
                yield {
                    "skill_id": f"{key}/{tool['name']}",
                    "server": server["name"],
                    "server_description": server.get("description") or "",
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": sorted((tool.get("inputSchema") or {}).get("properties") or {}),
                    "category": server.get("category"),
                }


def _benchmark(
    folder: Path, split: str | None, tools: Mapping[str, _ToolRow], rows: Mapping[str, _TaskRow]
) -> Benchmark:
    offers: dict[str, list[str]] = {}
    for skill_id, tool in tools.items():
        offers.setdefault(tool.name, []).append(skill_id)
    tasks: list[Task] = []
    without: list[str] = []  # the task of each tool that has no candidate
    for task_id, row in rows.items():
        candidates = [offers.get(name, []) for name in row.tools] if row.tool_skill_ids is None else row.tool_skill_ids
        without += [task_id for skill_ids in candidates if not skill_ids]
        relevance = _relevance(row, candidates, tools)
        if relevance.gold:
            query = Query(task_id, row.query, kind="", origin=_ORIGIN, split="test")
            task = task_of(query, relevance, {"category": row.category}, row.where)
            tasks.append(replace(task, steps=tuple(map(GoldStep, row.steps))))
    notes: list[str] = []
    if without:
        missing = f"{len(without)} of {sum(len(row.tools) for row in rows.values())} needed tools"
        notes.append(f"{missing} ({len(set(without))} tasks) have no candidate and are no gold")
    scored = {task.query.query_id for task in tasks}
    if left_out := [task_id for task_id in rows if task_id not in scored]:
        notes.append(f"{len(left_out)} of {len(rows)} tasks have no gold and are not scored: {', '.join(left_out[:3])}")
    return make_benchmark(folder, tasks, split, rows, [tool.skill() for tool in tools.values()], notes=notes)


def _relevance(row: _TaskRow, candidates: Sequence[Sequence[str]], pool: Container[str]) -> Relevance:
    """What a task asks for; nothing, where none of its tools has a candidate."""
    if len(row.tools) != len(candidates):
        what = f"task '{row.row_id}' has {len(row.tools)} tools and {len(candidates)} lists of candidates"
        raise SkilltrainError(what, where=row.where)
    needs: dict[str, str] = {}  # candidate → the first one of its tool
    for group in dict.fromkeys(tuple(skill_ids) for skill_ids in candidates):
        for skill_id in group:
            if skill_id in needs or skill_id not in pool:
                fault = "is a candidate for two tools" if skill_id in needs else "is not among the benchmark's own"
                raise SkilltrainError(f"skill '{skill_id}' of task '{row.row_id}' {fault}", where=row.where)
            needs[skill_id] = group[0]
    gold = {skill_id: 1.0 for skill_id, first in needs.items() if skill_id == first}
    alternatives = {skill_id: first for skill_id, first in needs.items() if skill_id != first}
    return Relevance(frozenset(gold), gold, alternatives)
