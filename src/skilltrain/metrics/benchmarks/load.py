"""Read a benchmark from its folder, which holds our own tables or a published form."""

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pyarrow as pa

from skilltrain.errors import SkilltrainError
from skilltrain.files import check_regular
from skilltrain.metrics.benchmarks.benchmark import (
    Benchmark,
    BenchmarkReader,
    GoldStep,
    Task,
    as_tier,
    join_tiers,
    make_benchmark,
    task_of,
)
from skilltrain.metrics.benchmarks.rows import Row, Text, read_rows
from skilltrain.metrics.measures import Relevance
from skilltrain.plugins import load_plugin, plugin_paths
from skilltrain.records import Query, Verdict
from skilltrain.tables import (
    JUDGEMENTS,
    PLANS,
    QUERIES,
    read_queries,
    read_table,
    table_path,
    verdicts_by_query,
)

# Not a setting, so that nDCG means the same in every report.
VERDICT_GAINS = {Verdict.REQUIRED: 1.0, Verdict.USEFUL: 0.5}
UNSERVED = "unserved "  # start of the ids of queries that no skill serves


class _UnservedRow(Row):
    query: Text


def read_unserved(file: Path) -> list[Query]:
    """Read queries that no skill serves from a JSON Lines file with the key `query`.

    Raises:
        SkilltrainError: The file has no query.
    """
    queries = []
    for _, row in read_rows(_UnservedRow, file):
        # The queries have no ids, so they are numbered.
        query_id = f"{UNSERVED}{len(queries) + 1}"
        queries.append(Query(query_id, row.query, kind="single", origin="", split=""))
    if not queries:
        raise SkilltrainError("empty-benchmark", "holds no query", where=file)
    return queries


def read_tables(folder: Path, split: str | None) -> Benchmark:
    """Read a benchmark from our tables.

    A required skill is gold. If several required skills do the same, one is gold, and the others
    are its alternatives. Steps of compound tasks are in plans.parquet, if it exists.

    Args:
        folder: Folder of the tables.
        split: Split to score; None for all.
    """
    for spec in (QUERIES, JUDGEMENTS):
        check_regular(table_path(folder, spec))
    queries = read_queries(folder)
    judgements = read_table(folder, JUDGEMENTS)

    # For each query, the verdict by skill id, and rows with the reason and group of each skill.
    verdicts = verdicts_by_query(judgements)
    reasons_by_query = _by_query(judgements.select(["query_id", "skill_id", "reason", "group"]))
    steps_by_query = _read_steps(folder)

    unknown = {*verdicts, *steps_by_query} - {query.query_id for query in queries}
    if unknown:
        problem = f"{len(unknown)} judged or planned queries are not in queries.parquet"
        problem += f", first '{min(unknown)}'"
        raise SkilltrainError("unknown-query", problem, where=folder)

    tasks: list[Task] = []
    file = table_path(folder, JUDGEMENTS)
    for query in queries:
        reason_rows = reasons_by_query.get(query.query_id, [])
        relevance = _relevance_of(verdicts.get(query.query_id, {}), reason_rows)
        reasons = [row["reason"] for row in reason_rows if row["reason"]]
        labels = {"reason": tuple(dict.fromkeys(reasons))}  # each reason once
        step_rows = steps_by_query.get(query.query_id, [])
        steps = [GoldStep(row["text"], row["skill_id"] or "") for row in step_rows]
        tasks.append(task_of(query, relevance, labels, file, steps))
    return make_benchmark(folder, tasks, split)


def _read_steps(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the table PLANS by query id; empty if there is no such table.

    Each row is one step of a compound task.
    """
    file = table_path(folder, PLANS)
    if not file.exists():
        return {}
    steps_by_query = _by_query(read_table(folder, PLANS))
    for query_id, step_rows in steps_by_query.items():
        _check_steps(step_rows, f"{file}, query {query_id!r}")
    return steps_by_query


def _check_steps(rows: Iterable[Mapping[str, Any]], where: str) -> None:
    """Check that the steps of one plan can be ordered, each after the steps that it depends on.

    Args:
        rows: Rows of the table PLANS of one query, one for each step.
        where: Location that errors name.

    Raises:
        SkilltrainError: A step depends on a missing step, or on itself.
    """
    # For each step, the ids of the steps that must come before it.
    dependencies = {row["step_id"]: row["depends_on"] for row in rows}
    try:
        # The order also has the steps that others depend on, even if they have no row.
        ordered_ids = [*TopologicalSorter(dependencies).static_order()]
    except CycleError as error:
        step_ids = error.args[1]  # of the cycle, such as [a, b, a]
        problem = f"steps depend on each other: {' on '.join(step_ids)}"
        raise SkilltrainError("invalid-row", problem, where=where) from error
    for step_id in ordered_ids:
        if step_id not in dependencies:
            problem = f"a step depends on '{step_id}', which is no step"
            raise SkilltrainError("invalid-row", problem, where=where)


def _relevance_of(
    verdicts: Mapping[str, Verdict], judgement_rows: Iterable[Mapping[str, Any]]
) -> Relevance:
    """Make the relevance of a query.

    The stage `equivalents` groups required skills that do the same. A group is named by the id of
    one of its skills. This skill is gold, and the others of the group are its alternatives. A
    required skill without a group is gold too.

    Args:
        verdicts: Verdict by skill id.
        judgement_rows: Rows of the query in the table of judgements.
    """
    # A required skill is one that the query cannot do without.
    required = {skill_id for skill_id, verdict in verdicts.items() if verdict is Verdict.REQUIRED}
    group_by_skill = {row["skill_id"]: row["group"] for row in judgement_rows}
    alternatives: dict[str, str] = {}
    for skill_id, group in group_by_skill.items():
        # Both must be required. A skill without a group has None, which is never required.
        are_required = skill_id in required and group in required
        if are_required and skill_id != group:
            alternatives[skill_id] = group

    # Required and useful skills have a gain for nDCG. Alternatives get that of their gold skill.
    gains: dict[str, float] = {}
    for skill_id, verdict in verdicts.items():
        if verdict in VERDICT_GAINS and skill_id not in alternatives:
            gains[skill_id] = VERDICT_GAINS[verdict]
    return Relevance(
        gold=frozenset(required - alternatives.keys()), gains=gains, alternatives=alternatives
    )


def _by_query(table: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a table by their query id."""
    rows = {}
    for row in table.to_pylist():
        rows.setdefault(row["query_id"], []).append(row)
    return rows


TABLES = BenchmarkReader(
    "queries.parquet", "queries.parquet and judgements.parquet (ours)", read_tables
)


def load_benchmark(path: Path | Sequence[Path], split: str | None = None) -> Benchmark:
    """Read a benchmark.

    Several folders are tiers. Each is ranked over its own pool, and they are scored together, as
    SkillRouter averages easy and hard. Query ids become `task@tier`, and the queries of one task
    are one cluster of the bootstrap. Call `check_pool` afterwards.

    Args:
        path: Folder of the benchmark, or folders of its tiers.
        split: Split to score; None for all.

    Raises:
        SkilltrainError: A file is malformed, an id appears twice, a query has no gold, or relevance
            has no query. The error names file, line and id.
    """
    folders = [path] if isinstance(path, Path) else path
    benchmarks = [_load(folder, split) for folder in folders]
    if len(benchmarks) == 1:
        return benchmarks[0]
    return join_tiers([as_tier(benchmark) for benchmark in benchmarks])


def _load(path: Path, split: str | None) -> Benchmark:
    """Read one folder with the first reader that knows its form.

    Args:
        path: Folder of the benchmark.
        split: Split to score; None for all.

    Raises:
        SkilltrainError: There is no such folder, or no reader knows its form.
    """
    if not path.is_dir():
        fix = "a benchmark is a folder; `skilltrain queries` makes one from a file of queries"
        raise SkilltrainError("not-found", "no such folder", where=path, fix=fix)
    readers = [load_plugin("benchmark", name) for name in plugin_paths("benchmark")]
    for reader in readers:
        # The marker is a file or folder that only benchmarks of this form have.
        if (path / reader.marker).exists():
            return reader.read(path, split)
    forms = ", or ".join(reader.form for reader in readers)
    fix = f"a benchmark holds {forms}; `skilltrain queries` makes one from your own files"
    raise SkilltrainError("not-a-benchmark", "is not a benchmark", where=path, fix=fix)
