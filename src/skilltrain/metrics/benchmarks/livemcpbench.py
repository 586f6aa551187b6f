"""LiveMCPBench (Mo et al., 2025): tasks with the MCP tools that an annotator used, over the tools of 70 servers.

A task names its tools without their servers, so a name that several servers offer has several candidates. Any of them
is taken to do: the first is gold, the others are its alternatives (Relevance.alternatives). A tool that no server
offers cannot be gold, and a task with no other is not scored; the benchmark's `notes` count both.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field

from skilltrain.files import read_json
from skilltrain.metrics.benchmarks.benchmark import (
    Benchmark,
    BenchmarkReader,
    GoldStep,
    Task,
    make_benchmark,
    task_of,
)
from skilltrain.metrics.benchmarks.rows import (
    Label,
    NamedRow,
    Text,
    parse_row,
    read_rows,
    unique,
)
from skilltrain.metrics.measures import Relevance
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
    return (
        (_LISTED.findall(value) or value.split("\n")[:1])
        if isinstance(value, str) and value
        else value or []
    )


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
        server = (
            f"({self.server}: {self.server_description})"
            if self.server_description
            else f"({self.server})"
        )
        body = (
            f"Parameters: {', '.join(self.parameters)}"
            if self.parameters
            else "Takes no parameters."
        )
        about = f"{self.description} {server}".strip()
        return Skill(self.row_id, self.name, about, body, category=self.category, source=_ORIGIN)


class _TaskRow(NamedRow):
    row_id: Text = Field(alias="task_id")
    query: Text = Field(validation_alias=AliasChoices("query", "Question"))
    tools: Annotated[list[Text], BeforeValidator(_listed)] = Field(
        validation_alias=AliasChoices("tools", AliasPath("Annotator Metadata", "Tools"))
    )
    category: Label = ""
    steps: Annotated[list[Text], BeforeValidator(_in_steps)] = Field(
        default=[], validation_alias=AliasChoices("steps", AliasPath("Annotator Metadata", "Steps"))
    )


def read_livemcpbench(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a folder with tasks.jsonl and tools.jsonl, or of a clone of the published repository."""
    if (folder / "tools.jsonl").exists():
        tools, asked = (
            read_rows(_ToolRow, folder / "tools.jsonl"),
            read_rows(_TaskRow, folder / "tasks.jsonl"),
        )
    else:
        servers, file = folder / SERVERS, folder / ANNOTATIONS
        tools = (
            (f"{servers}", parse_row(_ToolRow, values, f"{servers}"))
            for values in _tools_of(read_json(servers))
        )
        entries = {
            f"{file}, entry {number}": values for number, values in enumerate(read_json(file), 1)
        }
        asked = ((where, parse_row(_TaskRow, values, where)) for where, values in entries.items())
    pool, rows = unique("skill", tools), unique("task", asked)
    by_name: dict[str, list[str]] = {}
    for skill_id, tool in pool.items():
        by_name.setdefault(tool.name, []).append(skill_id)
    tasks: list[Task] = []
    for task_id, row in rows.items():
        gold, alternatives = dict[str, float](), dict[str, str]()
        for first, *others in (by_name[name] for name in row.tools if name in by_name):
            gold[first] = 1.0
            alternatives |= dict.fromkeys(others, first)
        if gold:
            query = Query(task_id, row.query, kind="", origin=_ORIGIN, split="test")
            relevance = Relevance(frozenset(gold), gold, alternatives)
            tasks.append(
                task_of(
                    query, relevance, {"category": row.category}, folder, map(GoldStep, row.steps)
                )
            )
    notes: list[str] = []
    needed = [(task_id, name in by_name) for task_id, row in rows.items() for name in row.tools]
    if without := [task_id for task_id, is_known in needed if not is_known]:
        missing = f"{len(without)} of {len(needed)} needed tools ({len({*without})} tasks)"
        notes.append(f"{missing} have no candidate and are no gold")
    scored = {task.query.query_id for task in tasks}
    if left_out := [task_id for task_id in rows if task_id not in scored]:
        notes.append(
            f"{len(left_out)} of {len(rows)} tasks have no gold and are not scored: {', '.join(left_out[:3])}"
        )
    return make_benchmark(
        folder, tasks, split, rows, [tool.skill() for tool in pool.values()], notes=notes
    )


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


LIVEMCPBENCH = BenchmarkReader(
    "tools.jsonl", "tasks.jsonl and tools.jsonl (LiveMCPBench)", read_livemcpbench
)
CLONE = BenchmarkReader(ANNOTATIONS, "a clone (LiveMCPBench)", read_livemcpbench)
