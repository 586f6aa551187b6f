"""A benchmark in our own tables."""

from collections.abc import Mapping
from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, name_of, of_split, unscored_of
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Verdict
from skilltrain.tables import JUDGEMENTS, QUERIES, queries_from_table, read_table, verdicts_by_query

# A fact of the benchmark, not a preference of a training recipe: both must mean the same to every reader of a report.
VERDICT_GAINS = {Verdict.REQUIRED: 1.0, Verdict.USEFUL: 0.5}


def read_tables(folder: Path, split: str | None) -> Benchmark:
    """The tasks of queries.parquet and judgements.parquet (see load_benchmark)."""
    queries = queries_from_table(read_table(folder, QUERIES))
    verdicts = verdicts_by_query(read_table(folder, JUDGEMENTS))
    if unknown := sorted(verdicts.keys() - {query.query_id for query in queries}):
        raise SkilltrainError(
            f"{len(unknown)} judged queries are not in queries.parquet, first '{unknown[0]}'",
            where=folder / "judgements.parquet",
        )
    chosen = of_split(queries, split, folder)
    tasks = tuple(Task(query, _judged_relevance(query, verdicts, folder)) for query in chosen)
    return Benchmark(name_of(folder), tasks, (), unscored=unscored_of((query.query_id for query in queries), tasks))


def _judged_relevance(query: Query, verdicts: Mapping[str, Mapping[str, Verdict]], folder: Path) -> Relevance:
    where = f"{folder / 'judgements.parquet'}, query {query.query_id}"
    if query.query_id not in verdicts:
        raise SkilltrainError("the query has no judgement", where=where)
    judged = verdicts[query.query_id]
    gold = frozenset(skill_id for skill_id, verdict in judged.items() if verdict is Verdict.REQUIRED)
    if not gold:
        raise SkilltrainError("no skill is judged required, so none is gold", where=where)
    gains = {skill_id: VERDICT_GAINS[verdict] for skill_id, verdict in judged.items() if verdict in VERDICT_GAINS}
    return Relevance(gold=gold, gains=gains)
