"""Reading a benchmark from its folder: from our own tables, or in whichever published form it has."""

from collections.abc import Sequence
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
    joined,
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

# A fact of the benchmark, not a preference of a training recipe: both must mean the same to every reader of a report.
VERDICT_GAINS = {Verdict.REQUIRED: 1.0, Verdict.USEFUL: 0.5}
UNSERVED = "unserved "  # what the ids of queries begin with that no skill serves


class _UnservedRow(Row):
    query: Text


def read_unserved(file: Path) -> list[Query]:
    """The queries of a JSON Lines file (key `query`) that no skill serves. Raises SkilltrainError for none."""
    rows = enumerate(read_rows(_UnservedRow, file), 1)
    queries = [
        Query(f"{UNSERVED}{number}", row.query, "single", "", "") for number, (_, row) in rows
    ]
    if not queries:
        raise SkilltrainError("empty-benchmark", "holds no query", where=file)
    return queries


def read_tables(folder: Path, split: str | None) -> Benchmark:
    """The tasks of our queries.parquet and judgements.parquet: what is required is gold, gains are VERDICT_GAINS.

    A required skill whose `group` is another required skill is an alternative to that one (stage `equivalents`).
    The rows of a plans.parquet beside them are the steps of the tasks.
    """
    for spec in (QUERIES, JUDGEMENTS):
        check_regular(table_path(folder, spec))
    queries, judgements, file = (
        read_queries(folder),
        read_table(folder, JUDGEMENTS),
        table_path(folder, JUDGEMENTS),
    )
    verdicts = verdicts_by_query(judgements)
    rows_of = _by_query(judgements.select(["query_id", "skill_id", "reason", "group"]))
    steps_of = _by_query(read_table(folder, PLANS)) if table_path(folder, PLANS).exists() else {}
    if unknown := sorted({*verdicts, *steps_of} - {query.query_id for query in queries}):
        what = f"{len(unknown)} judged or planned queries are not in queries.parquet, first '{unknown[0]}'"
        raise SkilltrainError("unknown-query", what, where=folder)
    tasks: list[Task] = []
    for query in queries:
        judged, rows = verdicts.get(query.query_id, {}), rows_of.get(query.query_id, [])
        required = {skill_id for skill_id, verdict in judged.items() if verdict is Verdict.REQUIRED}
        groups = {row["skill_id"]: row["group"] for row in rows if row["skill_id"] in required}
        others = {
            skill_id: group for skill_id, group in groups.items() if group in required - {skill_id}
        }
        counted = {
            skill_id: verdict for skill_id, verdict in judged.items() if verdict in VERDICT_GAINS
        }
        gains = {
            skill_id: VERDICT_GAINS[verdict]
            for skill_id, verdict in counted.items()
            if skill_id not in others
        }
        labels = {"reason": tuple(dict.fromkeys(row["reason"] for row in rows if row["reason"]))}
        steps = [
            GoldStep(row["text"], row["skill_id"] or "") for row in steps_of.get(query.query_id, [])
        ]
        tasks.append(
            task_of(
                query,
                Relevance(frozenset(required - others.keys()), gains, others),
                labels,
                file,
                steps,
            )
        )
    return make_benchmark(folder, tasks, split)


def _by_query(table: pa.Table) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault(row["query_id"], []).append(row)
    return rows


TABLES = BenchmarkReader(
    "queries.parquet", "queries.parquet and judgements.parquet (ours)", read_tables
)


def load_benchmark(path: Path | Sequence[Path], split: str | None = None) -> Benchmark:
    """The benchmark in a folder, all of it or one split, in whichever form (each module says what it reads).

    Several folders are tiers that are ranked each over its own pool and scored together, as SkillRouter averages easy
    and hard: queries are called `task@tier`, and those of one task are one cluster of the bootstrap.
    Raises SkilltrainError, naming file, line and id, for malformed files, an id that appears twice, a query without
    gold, and relevance without a query. `check_pool` looks for gold skills that a pool lacks.
    """
    paths = [path] if isinstance(path, Path) else path
    found = [_load(one, split) for one in paths]
    return found[0] if len(found) == 1 else joined([as_tier(one) for one in found])


def _load(path: Path, split: str | None) -> Benchmark:
    if not path.is_dir():
        raise SkilltrainError("not-found", "no such folder; a benchmark is a folder", where=path)
    readers = [load_plugin("benchmark", name) for name in plugin_paths("benchmark")]
    for reader in readers:
        if (path / reader.marker).exists():
            return reader.read(path, split)
    forms = ", or ".join(reader.form for reader in readers)
    fix = f"one holds {forms}; `skilltrain queries` makes one of files of your own"
    raise SkilltrainError("not-a-benchmark", "is not a benchmark", where=path, fix=fix)
