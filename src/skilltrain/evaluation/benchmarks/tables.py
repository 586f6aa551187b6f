"""A benchmark in our own tables."""

from collections.abc import Mapping
from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_benchmark, of_split, task_of
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import check_regular
from skilltrain.records import Query, Verdict
from skilltrain.tables import JUDGEMENTS, QUERIES, queries_from_table, read_table, table_path, verdicts_by_query

# A fact of the benchmark, not a preference of a training recipe: both must mean the same to every reader of a report.
VERDICT_GAINS = {Verdict.REQUIRED: 1.0, Verdict.USEFUL: 0.5}


def read_tables(folder: Path, split: str | None) -> Benchmark:
    """The tasks of queries.parquet and judgements.parquet (see load_benchmark)."""
    for spec in (QUERIES, JUDGEMENTS):
        check_regular(table_path(folder, spec))
    queries = queries_from_table(read_table(folder, QUERIES))
    judgements = read_table(folder, JUDGEMENTS)
    verdicts, reasons = verdicts_by_query(judgements), dict[str, dict[str, None]]()
    for row in judgements.select(["query_id", "reason"]).to_pylist():
        if row["reason"]:
            reasons.setdefault(row["query_id"], {})[row["reason"]] = None
    if unknown := sorted(verdicts.keys() - {query.query_id for query in queries}):
        raise SkilltrainError(
            f"{len(unknown)} judged queries are not in queries.parquet, first '{unknown[0]}'",
            where=folder / "judgements.parquet",
        )
    chosen = of_split(queries, split, lambda query: query.split, folder)
    tasks = [_task(query, verdicts, tuple(reasons.get(query.query_id, ())), folder) for query in chosen]
    return make_benchmark(folder, tasks, split, [query.query_id for query in queries])


def _task(query: Query, verdicts: Mapping[str, Mapping[str, Verdict]], reasons: tuple[str, ...], folder: Path) -> Task:
    where = f"{folder / 'judgements.parquet'}, query {query.query_id}"
    if query.query_id not in verdicts:
        raise SkilltrainError("the query has no judgement", where=where)
    judged = verdicts[query.query_id]
    gold = frozenset(skill_id for skill_id, verdict in judged.items() if verdict is Verdict.REQUIRED)
    if not gold:
        raise SkilltrainError("no skill is judged required, so none is gold", where=where)
    gains = {skill_id: VERDICT_GAINS[verdict] for skill_id, verdict in judged.items() if verdict in VERDICT_GAINS}
    return task_of(query, Relevance(gold, gains), {"reason": reasons})
