"""LiveMCPBench (Mo et al., 2025): tasks with the MCP tools that an annotator used, over the tools of 70 servers.

A task names its tools without their servers, so a name that several servers offer has several candidates. Any of them
is taken to do: the first is gold, the others are its alternatives.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_task, tasks_of_split, with_pool
from skilltrain.evaluation.benchmarks.rows import Row, Text, parse_row, unique_rows
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import read_json, read_jsonl
from skilltrain.records import Skill

ANNOTATIONS = "annotated_data/all_annotations.json"
SERVERS = "tools/LiveMCPTool/tools.json"
_LISTED = re.compile(r"^\s*\d+\s*[.)]\s*(\S.*?)\s*$", re.MULTILINE)  # `1. geocode_address`


class _ToolRow(Row):
    skill_id: Text
    server: str
    server_description: str
    name: Text
    description: str
    parameters: list[str]
    category: str | None = None


class _TaskRow(Row):
    task_id: Text
    query: Text
    tools: list[Text]
    tool_skill_ids: list[list[Text]]


class _Metadata(Row):
    tools: str = Field(alias="Tools")


class _Annotation(Row):
    task_id: Text
    question: Text = Field(alias="Question")
    metadata: _Metadata = Field(alias="Annotator Metadata")


class _Tool(Row):
    name: Text
    description: str | None = None
    input_schema: dict[str, Any] = Field(default={}, alias="inputSchema")


class _Tools(Row):
    tools: list[_Tool]


class _Server(Row):
    name: str
    description: str | None = None
    category: str | None = None
    tools: dict[Text, _Tools]


@dataclass(frozen=True, slots=True)
class _Need:
    """A task as read: its needed tools by name, and for each the skills that could be meant."""

    task_id: str
    text: str
    candidates: Sequence[tuple[str, Sequence[str]]]
    where: str


def read_livemcpbench(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a folder with tasks.jsonl and tools.jsonl (see load_benchmark)."""
    pool: dict[str, Skill] = {}
    for skill_id, row in unique_rows(_ToolRow, folder / "tools.jsonl", "skill", lambda row: row.skill_id):
        server = (row.server, row.server_description, row.category)
        pool[skill_id] = _skill(skill_id, row.name, row.description, server, row.parameters)
    return _benchmark(folder, split, list(_needs_of_rows(folder / "tasks.jsonl")), pool)


def read_livemcpbench_clone(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a clone of the published repository (see load_benchmark)."""
    pool = _skills_of_servers(folder / SERVERS)
    by_name: dict[str, list[str]] = {}
    for skill in pool.values():
        by_name.setdefault(skill.name, []).append(skill.skill_id)
    needs: list[_Need] = []
    for number, values in enumerate(_list_in(folder / ANNOTATIONS), 1):
        where = f"{folder / ANNOTATIONS}, entry {number}"
        row = parse_row(_Annotation, values, where)
        names = _LISTED.findall(row.metadata.tools)
        if not names and row.metadata.tools.strip():
            what = f"task '{row.task_id}': expected a numbered list of tools, found '{row.metadata.tools[:60]}'"
            raise SkilltrainError(what, where=where)
        needs.append(_Need(row.task_id, row.question, [(name, by_name.get(name, [])) for name in names], where))
    return _benchmark(folder, split, needs, pool)


def _needs_of_rows(file: Path) -> Iterator[_Need]:
    for line, values in read_jsonl(file):
        where = f"{file}, line {line}"
        row = parse_row(_TaskRow, values, where)
        if len(row.tools) != len(row.tool_skill_ids):
            what = f"task '{row.task_id}' has {len(row.tools)} tools and {len(row.tool_skill_ids)} lists of candidates"
            raise SkilltrainError(what, where=where)
        yield _Need(row.task_id, row.query, list(zip(row.tools, row.tool_skill_ids, strict=True)), where)


def _skills_of_servers(file: Path) -> dict[str, Skill]:
    pool: dict[str, Skill] = {}
    for number, values in enumerate(_list_in(file), 1):
        where = f"{file}, entry {number}"
        server = parse_row(_Server, values, where)
        for key, group in server.tools.items():
            for tool in group.tools:
                skill_id = f"{key}/{tool.name}"
                if skill_id in pool:
                    raise SkilltrainError(f"skill '{skill_id}' stands twice", where=where)
                told = (server.name, server.description or "", server.category)
                names = sorted(tool.input_schema.get("properties") or {})
                pool[skill_id] = _skill(skill_id, tool.name, tool.description or "", told, names)
    return pool


def _list_in(file: Path) -> list[Any]:
    entries = read_json(file)
    if not isinstance(entries, list):
        raise SkilltrainError("expected a list", where=file)
    return entries


def _skill(
    skill_id: str, name: str, description: str, server: tuple[str, str, str | None], parameters: Sequence[str]
) -> Skill:
    """A tool as a skill: what it does and what its server is for, and the names of its parameters as the body."""
    title, purpose, category = server
    about = f"({title}: {purpose})" if purpose else f"({title})"
    body = f"Parameters: {', '.join(parameters)}" if parameters else "Takes no parameters."
    return Skill(skill_id, name, f"{description} {about}".strip(), body, category=category, source="livemcpbench")


def _benchmark(folder: Path, split: str | None, needs: Sequence[_Need], pool: Mapping[str, Skill]) -> Benchmark:
    tasks: dict[str, Task] = {}
    seen: set[str] = set()
    for need in needs:
        if need.task_id in seen:
            raise SkilltrainError(f"task '{need.task_id}' stands twice", where=need.where)
        seen.add(need.task_id)
        if relevance := _relevance(need, pool):
            tasks[need.task_id] = make_task(need.task_id, need.text, relevance, origin="livemcpbench", split="test")
    scored = tasks_of_split(list(tasks.values()), split, folder)
    return replace(with_pool(folder, scored, pool.values(), seen), notes=tuple(_notes(needs, tasks)))


def _relevance(need: _Need, pool: Mapping[str, Skill]) -> Relevance | None:
    """What a task asks for; None where none of its tools has a candidate."""
    gold: dict[str, float] = {}
    alternatives: dict[str, str] = {}
    for group in dict.fromkeys(tuple(skill_ids) for _, skill_ids in need.candidates if skill_ids):
        for skill_id in group:
            if skill_id not in pool:
                what = f"skill '{skill_id}' of task '{need.task_id}' is not among the benchmark's own skills"
                raise SkilltrainError(what, where=need.where)
            if skill_id in gold or skill_id in alternatives:
                what = f"skill '{skill_id}' of task '{need.task_id}' is a candidate for two tools"
                raise SkilltrainError(what, where=need.where)
            if skill_id == group[0]:
                gold[skill_id] = 1.0
            else:
                alternatives[skill_id] = group[0]
    return Relevance(frozenset(gold), gold, alternatives) if gold else None


def _notes(needs: Sequence[_Need], tasks: Mapping[str, Task]) -> list[str]:
    """What is not scored, in words."""
    without = [need for need in needs for _, skill_ids in need.candidates if not skill_ids]
    notes: list[str] = []
    if without:
        num_tools = sum(len(need.candidates) for need in needs)
        num_tasks = len({need.task_id for need in without})
        notes.append(
            f"{len(without)} of {num_tools} needed tools ({num_tasks} tasks) have no candidate and are no gold"
        )
    if left_out := [need.task_id for need in needs if need.task_id not in tasks]:
        notes.append(
            f"{len(left_out)} of {len(needs)} tasks have no gold and are not scored: {', '.join(left_out[:3])}"
        )
    return notes
