"""LiveMCPBench (Mo et al., 2025): tasks, and tools of 70 MCP servers.

A task names the tools that an annotator used, without their servers. If several servers have a tool
of that name, the first is gold, and the others are its alternatives. A tool that no server has
cannot be gold. A task without gold is not scored. The notes of the benchmark count both.
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
    rows_by_id,
)
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill

_ORIGIN = "livemcpbench"
ANNOTATIONS = "annotated_data/all_annotations.json"
SERVERS = "tools/LiveMCPTool/tools.json"
_LIST_ITEM = re.compile(r"^\s*\d+\s*[.)]\s*(\S.*?)\s*$", re.MULTILINE)  # `1. geocode_address`


def _split_tools(value: Any) -> Any:
    """Return the names in an annotator's numbered list: `1. write`, `2. fetch`.

    pydantic calls this function before it checks a field.

    Args:
        value: The list as text, or a list of names from our own file, which stays as it is.

    Raises:
        ValueError: The text is not empty, but has no numbered list.
    """
    if not isinstance(value, str):
        return value  # pydantic checks it
    names = _LIST_ITEM.findall(value)
    if not names and value.strip():
        raise ValueError(f"expected a numbered list of tools, found '{value[:60]}'")
    return names


def _split_steps(value: Any) -> Any:
    """Return the steps in an annotator's numbered list, or the first line of a text without one.

    For example, "1. find the file" and "2. send it" on two lines become two steps.
    """
    if not value:
        return []
    if not isinstance(value, str):
        return value  # a list from our own file, which pydantic checks
    return _LIST_ITEM.findall(value) or value.split("\n")[:1]


class _ToolRow(NamedRow):
    row_id: Text = Field(alias="skill_id")
    server: str
    server_description: str
    name: Text
    description: str
    parameters: list[str]
    category: str | None = None

    def skill(self) -> Skill:
        """Return the tool as a skill.

        The server is in the description, and the parameters are in the body.
        """
        server = self.server
        if self.server_description:
            server += f": {self.server_description}"
        description = f"{self.description} ({server})".strip()
        body = "Takes no parameters."
        if self.parameters:
            body = f"Parameters: {', '.join(self.parameters)}"
        return Skill(
            self.row_id, self.name, description, body, category=self.category, source=_ORIGIN
        )


class _TaskRow(NamedRow):
    row_id: Text = Field(alias="task_id")
    query: Text = Field(validation_alias=AliasChoices("query", "Question"))
    tools: Annotated[list[Text], BeforeValidator(_split_tools)] = Field(
        validation_alias=AliasChoices("tools", AliasPath("Annotator Metadata", "Tools"))
    )
    category: Label = ""
    steps: Annotated[list[Text], BeforeValidator(_split_steps)] = Field(
        default=[], validation_alias=AliasChoices("steps", AliasPath("Annotator Metadata", "Steps"))
    )


def read_livemcpbench(folder: Path, split: str | None) -> Benchmark:
    """Read a folder with tasks.jsonl and tools.jsonl, or a clone of the published repository.

    Args:
        folder: The folder.
        split: Split to score; None for all.
    """
    if (folder / "tools.jsonl").exists():
        tools = read_rows(_ToolRow, folder / "tools.jsonl")
        task_rows = read_rows(_TaskRow, folder / "tasks.jsonl")
    else:
        tools = _published_tools(folder / SERVERS)
        task_rows = _published_tasks(folder / ANNOTATIONS)
    # `rows_by_id` raises an error if an id appears twice.
    tools_by_id = rows_by_id("skill", tools)
    task_rows_by_id = rows_by_id("task", task_rows)

    # A task names its tools without their servers, and tools of several servers may share a name.
    skill_ids_by_name: dict[str, list[str]] = {}
    for skill_id, tool in tools_by_id.items():
        skill_ids_by_name.setdefault(tool.name, []).append(skill_id)

    tasks: list[Task] = []  # tasks with at least one gold skill
    for task_id, row in task_rows_by_id.items():
        relevance = _relevance_of(row.tools, skill_ids_by_name)
        if relevance.gold:
            query = Query(task_id, row.query, kind="", origin=_ORIGIN, split="test")
            steps = map(GoldStep, row.steps)
            tasks.append(task_of(query, relevance, {"category": row.category}, folder, steps))

    notes = _notes(task_rows_by_id, skill_ids_by_name)
    skills = [tool.skill() for tool in tools_by_id.values()]
    all_task_ids = task_rows_by_id.keys()  # also those of tasks without gold
    return make_benchmark(folder, tasks, split, query_ids=all_task_ids, pool=skills, notes=notes)


def _relevance_of(
    tool_names: Sequence[str], skill_ids_by_name: Mapping[str, Sequence[str]]
) -> Relevance:
    """Make the relevance of a task that needs some tools.

    Tools of several servers may have the same name. The first tool with a needed name is gold, and
    the others are its alternatives.

    Args:
        tool_names: Names of the needed tools.
        skill_ids_by_name: Ids of the tools with each name.
    """
    gains: dict[str, float] = {}  # by the id of a gold skill
    alternatives: dict[str, str] = {}  # gold skill by the id of its alternative
    for name in tool_names:  # a tool that no server has cannot be gold
        if name in skill_ids_by_name:
            gold_id, *alternative_ids = skill_ids_by_name[name]
            gains[gold_id] = 1.0
            for alternative_id in alternative_ids:
                alternatives[alternative_id] = gold_id
    return Relevance(gold=frozenset(gains), gains=gains, alternatives=alternatives)


def _notes(
    rows: Mapping[str, _TaskRow], skill_ids_by_name: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return sentences about tools and tasks that are not scored.

    Args:
        rows: Row of each task by its id.
        skill_ids_by_name: Ids of the tools with each name.
    """
    num_tools = 0
    num_missing = 0  # needed tools that no server offers
    num_incomplete = 0  # tasks that need such a tool
    unscored: list[str] = []  # ids of tasks without gold
    for task_id, row in rows.items():
        missing = [name for name in row.tools if name not in skill_ids_by_name]
        num_tools += len(row.tools)
        num_missing += len(missing)
        num_incomplete += bool(missing)
        has_gold = len(missing) < len(row.tools)  # at least one needed tool is offered
        if not has_gold:
            unscored.append(task_id)

    notes = []
    if num_missing:
        tools = f"{num_missing} of {num_tools} needed tools ({num_incomplete} tasks)"
        notes.append(f"{tools} are offered by no server, so they cannot be gold")
    if unscored:
        count = f"{len(unscored)} of {len(rows)} tasks"
        first = ", ".join(unscored[:3])
        notes.append(f"{count} have no gold and are not scored: {first}")
    return notes


def _published_tasks(file: Path) -> Iterator[tuple[str, _TaskRow]]:
    """Yield (file and entry, task) for the published tasks."""
    for number, values in enumerate(read_json(file), 1):
        where = f"{file}, entry {number}"
        yield where, parse_row(_TaskRow, values, where)


def _published_tools(file: Path) -> Iterator[tuple[str, _ToolRow]]:
    """Yield (file, tool) for the published tools, server by server.

    A server of the file is `{"name": …, "tools": {toolset name: {"tools": [tool, …]}}}`. The skill
    id of a tool is `TOOLSET/TOOL`.

    Args:
        file: The published file with all servers.
    """
    for server in read_json(file):
        for toolset_name, toolset in server["tools"].items():
            for tool in toolset["tools"]:
                # A JSON schema lists the parameters of a tool as its properties.
                schema = tool.get("inputSchema") or {}
                values = {
                    "skill_id": f"{toolset_name}/{tool['name']}",
                    "server": server["name"],
                    "server_description": server.get("description") or "",
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": sorted(schema.get("properties") or {}),
                    "category": server.get("category"),
                }
                yield str(file), parse_row(_ToolRow, values, str(file))


LIVEMCPBENCH = BenchmarkReader(
    "tools.jsonl", "tasks.jsonl and tools.jsonl (LiveMCPBench)", read_livemcpbench
)
CLONE = BenchmarkReader(ANNOTATIONS, "a clone (LiveMCPBench)", read_livemcpbench)
