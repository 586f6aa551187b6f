"""ToolRet (Shi et al., 2025), as MTEB's task ToolRetrieval scores it.

The folder holds the two published data sets, ToolRet-Queries and ToolRet-Tools. Each category of
tools is a tier: its queries are ranked over its own tools. As in MTEB, a tool is its documentation
alone, and the instructions that come with the queries are not used.
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Json

from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import (
    Benchmark,
    BenchmarkReader,
    Task,
    as_tier,
    join_tiers,
    make_benchmark,
    task_of,
)
from skilltrain.metrics.benchmarks.rows import NamedRow, Row, Text, read_rows, rows_by_id
from skilltrain.metrics.benchmarks.trec import Id
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill

_QUERIES = "ToolRet-Queries"
_TOOLS = "ToolRet-Tools"
_ORIGIN = "toolret"
_OTHER_CATEGORY = "web"
# Query sets of each category, as in MTEB. All others are of the category `web`.
_CATEGORIES = {
    "code": "craft-math-algebra craft-tabmwp craft-vqa gorilla-huggingface gorilla-pytorch "
    "gorilla-tensor toolink",
    "customized": "appbench gpt4tools gta taskbench-huggingface taskbench-multimedia metatool "
    "tool-be-honest toolalpaca toolbench-sam",
}


class _Label(Row):
    id: Id
    relevance: int


class _QueryRow(NamedRow):
    query: Text
    labels: Json[list[_Label]]  # a JSON text in the file


class _ToolRow(NamedRow):
    documentation: str


def read_toolret(folder: Path, split: str | None) -> Benchmark:
    """Read the two data sets, with a tier for each category of tools.

    Args:
        folder: Folder with the folders ToolRet-Queries and ToolRet-Tools. In both, each folder has
            parquet files: of a query set, or of a category of tools.
        split: Split to score; None for all. All queries have the split `test`.
    """
    files_by_category: dict[str, list[Path]] = {}
    for file in sorted((folder / _TOOLS).glob("*/*.parquet")):
        files_by_category.setdefault(file.parent.name, []).append(file)
    if not files_by_category:
        fix = f"download the data set {_TOOLS} beside {_QUERIES}"
        problem = f"holds no {_TOOLS}/CATEGORY/*.parquet"
        raise SkilltrainError("missing-table", problem, where=folder, fix=fix)

    tiers: list[Benchmark] = []
    for category, files in files_by_category.items():
        tools = rows_by_id("tool", read_rows(_ToolRow, *files))
        pool = [
            Skill(tool_id, name="", description="", body=row.documentation, source=_ORIGIN)
            for tool_id, row in tools.items()
        ]
        tasks = [*_tasks(folder / _QUERIES, category)]
        # `make_benchmark` names the benchmark after the last folder of this path.
        tiers.append(as_tier(make_benchmark(folder / category, tasks, split, pool=pool)))
    return join_tiers(tiers)


def _tasks(folder: Path, category: str) -> Iterator[Task]:
    """Yield the tasks of a category of tools.

    Args:
        folder: Folder of the queries, with a folder for each query set.
        category: The category.
    """
    for file in sorted(folder.glob("*/*.parquet")):
        query_set = file.parent.name
        categories = [name for name, sets in _CATEGORIES.items() if query_set in sets.split()]
        if category not in (categories or [_OTHER_CATEGORY]):
            continue
        for where, row in read_rows(_QueryRow, file):
            gains = {label.id: float(label.relevance) for label in row.labels if label.relevance}
            query = Query(row.row_id, row.query, kind="", origin=_ORIGIN, split="test")
            relevance = Relevance(frozenset(gains), gains)
            yield task_of(query, relevance, {"query set": query_set}, where)


TOOLRET = BenchmarkReader(
    _QUERIES, f"{_QUERIES} and {_TOOLS} (ToolRet, MTEB's ToolRetrieval)", read_toolret
)
