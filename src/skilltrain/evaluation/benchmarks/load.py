"""Reading a benchmark from its folder: from our own tables, or in whichever published form it has."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import (
    Benchmark,
    GoldStep,
    Task,
    as_tier,
    joined,
    make_benchmark,
    task_of,
)
from skilltrain.evaluation.benchmarks.livemcpbench import ANNOTATIONS, read_livemcpbench
from skilltrain.evaluation.benchmarks.qrels import read_beir, read_skillret
from skilltrain.evaluation.benchmarks.r3 import read_r3_groups, read_r3_skill
from skilltrain.evaluation.benchmarks.skillrouter import read_skillrouter, read_skillrouter_tier
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import check_regular, read_jsonl
from skilltrain.records import Query, Verdict
from skilltrain.tables import JUDGEMENTS, PLANS, QUERIES, read_queries, read_table, table_path, verdicts_by_query

# A fact of the benchmark, not a preference of a training recipe: both must mean the same to every reader of a report.
VERDICT_GAINS = {Verdict.REQUIRED: 1.0, Verdict.USEFUL: 0.5}
UNSERVED = "unserved "  # what the ids of queries begin with that no skill serves


def read_unserved(file: Path) -> list[Query]:
    """The queries of a JSON Lines file (key `query`) that no skill serves. Raises SkilltrainError for one without."""
    queries: list[Query] = []
    for number, row in read_jsonl(file):
        if not isinstance(text := row.get("query"), str):
            raise SkilltrainError("has no text under the key 'query'", where=f"{file}, line {number}")
        queries.append(Query(f"{UNSERVED}{number}", text, "single", "", ""))
    if not queries:
        raise SkilltrainError("holds no query", where=file)
    return queries


def read_tables(folder: Path, split: str | None) -> Benchmark:
    """The tasks of our queries.parquet and judgements.parquet: what is required is gold, gains are VERDICT_GAINS.

    A required skill whose `group` is another required skill is an alternative to that one (stage `equivalents`).

    Where plans.parquet lies beside them, its rows are the steps of the tasks.
    """
    for spec in (QUERIES, JUDGEMENTS):
        check_regular(table_path(folder, spec))
    queries, judgements = read_queries(folder), read_table(folder, JUDGEMENTS)
    file, query_ids = table_path(folder, JUDGEMENTS), {query.query_id for query in queries}
    verdicts = verdicts_by_query(judgements)
    if unknown := sorted(verdicts.keys() - query_ids):
        what = f"{len(unknown)} judged queries are not in queries.parquet, first '{unknown[0]}'"
        raise SkilltrainError(what, where=file)
    reasons: dict[str, dict[str, None]] = {}
    instead_of: dict[str, dict[str, str]] = {}
    for row in judgements.select(["query_id", "skill_id", "reason", "group"]).to_pylist():
        if row["reason"]:
            reasons.setdefault(row["query_id"], {})[row["reason"]] = None
        judged = verdicts[row["query_id"]]
        is_other = row["group"] != row["skill_id"] and judged[row["skill_id"]] is Verdict.REQUIRED
        if is_other and judged.get(row["group"]) is Verdict.REQUIRED:
            instead_of.setdefault(row["query_id"], {})[row["skill_id"]] = row["group"]
    steps = _steps(folder, query_ids) if table_path(folder, PLANS).exists() else {}
    tasks: list[Task] = []
    for query in queries:
        judged, others = verdicts.get(query.query_id, {}), instead_of.get(query.query_id, {})
        gains = {
            s: VERDICT_GAINS[verdict] for s, verdict in judged.items() if verdict in VERDICT_GAINS and s not in others
        }
        gold = frozenset(s for s, verdict in judged.items() if verdict is Verdict.REQUIRED and s not in others)
        labels = {"reason": tuple(reasons.get(query.query_id, ()))}
        tasks.append(task_of(query, Relevance(gold, gains, others), labels, file, steps.get(query.query_id, ())))
    return make_benchmark(folder, tasks, split)


def _steps(folder: Path, query_ids: Collection[str]) -> dict[str, list[GoldStep]]:
    """query_id → its steps, in the order of the PLANS table."""
    steps: dict[str, list[GoldStep]] = {}
    for row in read_table(folder, PLANS).to_pylist():
        if row["query_id"] not in query_ids:
            what = f"a step is of query '{row['query_id']}', which is not in queries.parquet"
            raise SkilltrainError(what, where=table_path(folder, PLANS))
        steps.setdefault(row["query_id"], []).append(GoldStep(row["text"], row["skill_id"] or ""))
    return steps


# The file that tells a form, what reads it, and the form in words; the first that is there decides.
_FORMS: tuple[tuple[str, Callable[[Path, str | None], Benchmark], str], ...] = (
    ("tools.jsonl", read_livemcpbench, "tasks.jsonl and tools.jsonl (LiveMCPBench)"),
    (ANNOTATIONS, read_livemcpbench, "a clone (LiveMCPBench)"),
    ("tasks.jsonl", read_skillrouter, "tasks.jsonl and relevance.json (SkillRouter)"),
    ("judgements.jsonl", read_r3_groups, "judgements.jsonl (groups)"),
    ("skills_test.jsonl", read_r3_skill, "test.jsonl and skills_test.jsonl (R3-Skill's data)"),
    ("queries.jsonl", read_beir, "queries.jsonl and qrels/*.tsv (BEIR)"),
    ("queries.parquet", read_tables, "queries.parquet and judgements.parquet (ours)"),
    ("queries", read_skillret, "queries/, skills/ and qrels/*.jsonl (SkillRet's data)"),
    ("../relevance.json", read_skillrouter_tier, "the pool of a tier beside relevance.json (SkillRouter)"),
)


def load_benchmark(path: Path | Sequence[Path], split: str | None = None) -> Benchmark:
    """The benchmark in a folder, all of it or one split, in whichever form (each module says what it reads).

    Several folders are tiers that are scored together, as SkillRouter averages easy and hard: `tiers` of what comes
    back holds one benchmark each, to be ranked over its own pool. Their queries are called `task@tier`, have a label
    `tier`, and those of one task are one cluster of the bootstrap: 75 tasks over two pools have n = 150.
    Raises SkilltrainError, naming file, line and id, for malformed files, an id that appears twice, a query without
    gold, relevance without a query, and relevance of a skill that the benchmark's own pool does not hold.
    """
    paths = [path] if isinstance(path, Path) else path
    found = [_load(one, split) for one in paths]
    return found[0] if len(found) == 1 else joined([as_tier(one) for one in found])


def _load(path: Path, split: str | None) -> Benchmark:
    if not path.is_dir():
        raise SkilltrainError("no such folder; a benchmark is a folder", where=path)
    for marker, reader, _ in _FORMS:
        if (path / marker).exists():
            return reader(path, split)
    raise SkilltrainError(
        "is not a benchmark", where=path, fix=f"one holds {', or '.join(form for *_, form in _FORMS)}"
    )
