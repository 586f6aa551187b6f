"""Benchmarks: queries, what each asks for, and the gold skills the pool must hold."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import read_json, read_jsonl
from skilltrain.records import Query, Skill, Verdict
from skilltrain.tables import JUDGEMENTS, QUERIES, queries_from_table, read_table, verdicts_by_query

Slice = Literal["single", "multi"]
# A fact of the benchmark, not a preference of a training recipe: both must mean the same to every reader of a report.
VERDICT_GAINS = {Verdict.REQUIRED: 1.0, Verdict.USEFUL: 0.5}


def _kind(relevance: Relevance) -> Slice:
    return "single" if len(relevance.gold) == 1 else "multi"


@dataclass(frozen=True, slots=True)
class Task:
    """One query of a benchmark with its relevance."""

    query: Query
    relevance: Relevance

    @property
    def slice(self) -> Slice:
        """`single` where exactly one skill is gold, else `multi` (SkillRouter, appendix A)."""
        return _kind(self.relevance)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Tasks in the order of their file, and gold skills to add to the pool (none where the pool holds them)."""

    name: str
    tasks: tuple[Task, ...]
    gold_skills: tuple[Skill, ...]


def load_benchmark(path: Path, split: str | None = None) -> Benchmark:
    """The benchmark in a folder, all of it or one split, in whichever of the two forms the folder holds.

    Our own tables, queries.parquet and judgements.parquet: a required skill is gold with gain 1, a useful one has
    gain 0.5 without being gold; irrelevant and rejected skills gain nothing.

    SkillRouter's files, tasks.jsonl and relevance.json (gold_skills.jsonl may stand beside them): relevance.json
    alone decides what is scored. `core_gt_ids` are gold (`gt_skill_ids` where an entry has none; they differ only by
    auxiliary skills) and `relevance` holds the gains, 3 for gold and 1 for a degraded copy. Entries of task_type
    `generic_only` are skipped, as in the released evaluation. `excluded: true` in tasks.jsonl does not skip a task:
    it is SkillsBench's own note that the task's environment is faulty (the only one here says "timeout issues"),
    which does not touch routing; the released evaluation never reads it, and its 75 scored tasks contain excluded
    ones. The released data is a test set, so all its queries are of split `test`.

    Raises SkilltrainError, naming file and query, for malformed files, a query without gold, a query without
    relevance and relevance without a query.
    """
    if not path.is_dir():
        raise SkilltrainError("no such folder; a benchmark is a folder", where=path)
    if (path / "tasks.jsonl").exists():
        tasks, skills = _skillrouter_tasks(path, split), _gold_skills(path / "gold_skills.jsonl")
    elif (path / "queries.parquet").exists():
        tasks, skills = _table_tasks(path, split), ()
    else:
        fix = "a benchmark holds queries.parquet and judgements.parquet, or tasks.jsonl and relevance.json"
        raise SkilltrainError("is not a benchmark", where=path, fix=fix)
    return Benchmark(name=path.resolve().name, tasks=tuple(tasks), gold_skills=skills)


def check_pool(benchmark: Benchmark, skill_ids: Collection[str]) -> Benchmark:
    """`benchmark` as it can be scored over the pool `skill_ids` (gold skills added).

    Raises SkilltrainError where a gold skill is missing: no ranking could find it, and every figure would be too
    low without a word. A gain of a skill that is not gold and not in the pool (SkillRouter's easy pool lacks the
    degraded copies) is left out, so that a perfect ranking has nDCG 1, as in the released evaluation.
    """
    pool = frozenset(skill_ids)
    missing = [(task.query.query_id, lost) for task in benchmark.tasks for lost in sorted(task.relevance.gold - pool)]
    if missing:
        query_id, skill_id = missing[0]
        num_queries = len({query_id for query_id, _ in missing})
        raise SkilltrainError(
            f"gold skill '{skill_id}' is not among the {len(pool)} skills of the pool; "
            f"missing in all: {len({lost for _, lost in missing})} gold skill(s) of {num_queries} queries",
            where=f"benchmark {benchmark.name}, query {query_id}",
            fix="add the benchmark's gold skills to the pool, or choose the pool it was made for",
        )
    return replace(benchmark, tasks=tuple(_within(task, pool) for task in benchmark.tasks))


def _within(task: Task, pool: frozenset[str]) -> Task:
    gains = {skill_id: gain for skill_id, gain in task.relevance.gains.items() if skill_id in pool}
    return replace(task, relevance=replace(task.relevance, gains=gains))


def _of_split(queries: Sequence[Query], split: str | None, path: Path) -> list[Query]:
    chosen = [query for query in queries if split in (None, query.split)]
    if not queries:
        raise SkilltrainError("holds no query to score", where=path)
    if not chosen:
        counts = Counter(query.split for query in queries)
        splits = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
        raise SkilltrainError(f"holds no query of split '{split}'", where=path, fix=f"its splits are {splits}")
    return chosen


# SkillRouter's files -------------------------------------------------------------------------------------------------

_Text = Annotated[str, Field(min_length=1)]


class _Row(BaseModel):
    """What we read of a foreign file; keys we do not need are allowed there."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _TaskRow(_Row):
    task_id: _Text
    instruction_text: _Text


class _RelevanceRow(_Row):
    gt_skill_ids: list[_Text]
    relevance: dict[_Text, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    core_gt_ids: list[_Text] | None = None
    task_type: str


class _SkillRow(_Row):
    skill_id: _Text
    name: str
    description: str
    body: str
    category: str | None = None
    lang: str | None = None
    source: str = ""
    license: str | None = None


_RowT = TypeVar("_RowT", bound=_Row)


def _row(row_class: type[_RowT], values: Any, where: str) -> _RowT:
    try:
        return row_class.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise SkilltrainError(f"{key}: {fault['msg']}" if key else fault["msg"], where=where) from error


def _skillrouter_tasks(folder: Path, split: str | None) -> list[Task]:
    rows = _relevance_rows(folder / "relevance.json")
    texts = _task_texts(folder / "tasks.jsonl", rows.keys())
    relevances = {
        task_id: _skillrouter_relevance(rows[task_id], f"{folder / 'relevance.json'}, task {task_id}")
        for task_id in texts
        if rows[task_id].task_type != "generic_only"
    }
    queries = [
        Query(query_id=task_id, text=texts[task_id], kind=_kind(relevance), origin="skillsbench", split="test")
        for task_id, relevance in relevances.items()
    ]
    return [Task(query, relevances[query.query_id]) for query in _of_split(queries, split, folder)]


def _relevance_rows(file: Path) -> dict[str, _RelevanceRow]:
    entries = read_json(file)
    if not isinstance(entries, dict):
        raise SkilltrainError("expected a map of task_id to relevance", where=file)
    return {task_id: _row(_RelevanceRow, entry, f"{file}, task {task_id}") for task_id, entry in entries.items()}


def _task_texts(file: Path, judged: Iterable[str]) -> dict[str, str]:
    """task_id → instruction, for exactly the `judged` tasks."""
    judged, texts = set(judged), dict[str, str]()
    for line, values in read_jsonl(file):
        where = f"{file}, line {line}"
        task = _row(_TaskRow, values, where)
        if task.task_id in texts:
            raise SkilltrainError(f"task '{task.task_id}' stands twice", where=where)
        if task.task_id not in judged:
            raise SkilltrainError(f"task '{task.task_id}' has no entry in relevance.json", where=where)
        texts[task.task_id] = task.instruction_text
    if without := sorted(judged - texts.keys()):
        raise SkilltrainError(f"relevance.json has {len(without)} tasks that are not here: {without[0]}", where=file)
    return texts


def _skillrouter_relevance(row: _RelevanceRow, where: str) -> Relevance:
    gold = frozenset(row.gt_skill_ids if row.core_gt_ids is None else row.core_gt_ids)
    if not gold:
        raise SkilltrainError("no skill is gold", where=where)
    if without := sorted(skill_id for skill_id in gold if not row.relevance.get(skill_id)):
        raise SkilltrainError(f"gold skill '{without[0]}' has no positive relevance", where=where)
    return Relevance(gold=gold, gains=row.relevance)


def _gold_skills(file: Path) -> tuple[Skill, ...]:
    if not file.exists():
        return ()
    skills: dict[str, Skill] = {}
    for line, values in read_jsonl(file):
        skill = Skill(**_row(_SkillRow, values, f"{file}, line {line}").model_dump())
        if skill.skill_id in skills:
            raise SkilltrainError(f"skill '{skill.skill_id}' stands twice", where=f"{file}, line {line}")
        skills[skill.skill_id] = skill
    return tuple(skills.values())


# Our own tables ------------------------------------------------------------------------------------------------------


def _table_tasks(folder: Path, split: str | None) -> list[Task]:
    queries = queries_from_table(read_table(folder, QUERIES))
    verdicts = verdicts_by_query(read_table(folder, JUDGEMENTS))
    if unknown := sorted(verdicts.keys() - {query.query_id for query in queries}):
        raise SkilltrainError(
            f"{len(unknown)} judged queries are not in queries.parquet, first '{unknown[0]}'",
            where=folder / "judgements.parquet",
        )
    return [Task(query, _judged_relevance(query, verdicts, folder)) for query in _of_split(queries, split, folder)]


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
