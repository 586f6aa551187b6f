"""ToolRet (Shi et al., 2025), as MTEB's task ToolRetrieval scores it.

The folder holds the two published data sets, ToolRet-Queries and ToolRet-Tools. Each category of
tools is a tier: its queries are ranked over its own tools. As in MTEB, a tool is its documentation
alone, and the instructions that come with the queries are not used.
"""

from pathlib import Path

from pydantic import Json

from skilltrain.metrics.benchmarks import benchmark as b
from skilltrain.metrics.benchmarks.rows import NamedRow, Row, Text, read_rows, rows_by_id
from skilltrain.metrics.benchmarks.trec import Id
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill

# Query sets of each category, as in MTEB.
_QUERY_SETS = {
    "code": "craft-math-algebra craft-tabmwp craft-vqa gorilla-huggingface gorilla-pytorch "
    "gorilla-tensor toolink",
    "customized": "appbench gpt4tools gta metatool taskbench-huggingface taskbench-multimedia "
    "tool-be-honest toolalpaca toolbench-sam",
    "web": "apibank apigen autotools-food autotools-music autotools-weather mnms "
    "restgpt-spotify restgpt-tmdb reversechain rotbench t-eval-dialog t-eval-step "
    "taskbench-daily toolace toolbench toolemu tooleyes toollens ultratool",
}


class _Label(Row):
    id: Id
    relevance: float


class _QueryRow(NamedRow):
    query: Text
    labels: Json[list[_Label]]  # a JSON text in the file


class _ToolRow(NamedRow):
    documentation: str


def read_toolret(folder: Path, split: str | None) -> b.Benchmark:
    """Read ToolRet-Queries and ToolRet-Tools into one benchmark.

    Each category of tools is a tier: a part of the benchmark with its own queries and tools.

    Args:
        folder: Folder with the folders ToolRet-Queries and ToolRet-Tools. ToolRet-Queries has a
            folder for each query set, and ToolRet-Tools a folder for each category of tools. Each
            of these folders has parquet files.
        split: Split to score; None for all. All queries have the split `test`.
    """
    tiers: list[b.Benchmark] = []
    for category, query_sets in _QUERY_SETS.items():
        files = sorted(folder.glob(f"ToolRet-Tools/{category}/*.parquet"))
        tools = rows_by_id("tool", read_rows(_ToolRow, *files))
        pool = [Skill(tool_id, "", "", row.documentation) for tool_id, row in tools.items()]
        tasks: list[b.Task] = []
        for query_set in query_sets.split():
            files = sorted(folder.glob(f"ToolRet-Queries/{query_set}/*.parquet"))
            for where, row in read_rows(_QueryRow, *files):
                gains = {label.id: label.relevance for label in row.labels if label.relevance > 0}
                query = Query(row.row_id, row.query, kind="", origin=query_set, split="test")
                # `task_of` adds the labels kind, origin and split, and `as_tier` adds the tier.
                tasks.append(
                    b.task_of(
                        query, Relevance(gold=frozenset(gains), gains=gains), labels={}, where=where
                    )
                )
        # `make_benchmark` names the benchmark after the last folder of this path.
        tiers.append(b.as_tier(b.make_benchmark(folder / category, tasks, split, pool=pool)))
    return b.join_tiers(tiers)


TOOLRET = b.BenchmarkReader(
    "ToolRet-Queries", "ToolRet-Queries and ToolRet-Tools (MTEB's ToolRetrieval)", read_toolret
)
