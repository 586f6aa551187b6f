"""A benchmark: queries, what each asks for, and the skills it was published with."""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Skill

Slice = Literal["single", "multi"]
Labels = Mapping[str, str | tuple[str, ...]]
"""What is known of one query: label → value, or values where it has several."""


def slice_of(relevance: Relevance) -> Slice:
    return "single" if len(relevance.gold) == 1 else "multi"


@dataclass(frozen=True, slots=True)
class Task:
    """One query of a benchmark with its relevance and labels.

    `cluster` names the query that it repeats over another pool ("" for none): both are drawn together by the bootstrap.
    """

    query: Query
    relevance: Relevance
    labels: Labels = field(default_factory=dict)
    cluster: str = ""

    @property
    def slice(self) -> Slice:
        """`single` where exactly one skill is gold, else `multi` (SkillRouter, appendix A)."""
        return slice_of(self.relevance)


def make_task(
    query_id: str, text: str, relevance: Relevance, *, origin: str, split: str, **labels: str | tuple[str, ...] | None
) -> Task:
    """A task whose query is of the kind that its relevance says; its labels are kind, origin, split and `labels`."""
    query = Query(query_id, text, kind=slice_of(relevance), origin=origin, split=split)
    return Task(query, relevance, query_labels(query, relevance, **labels))


def query_labels(query: Query, relevance: Relevance, **more: str | tuple[str, ...] | None) -> Labels:
    """The labels that every query has, and `more`; empty ones are left out."""
    labels = {"kind": slice_of(relevance), "origin": query.origin, "split": query.split, **more}
    return {name: value for name, value in labels.items() if value}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Tasks in the order of their file, and the skills that came with them.

    `gold_skills` are to be added to a pool (none where the pool holds them). `pool` is the pool that the benchmark was
    published with, empty where it has none: without another pool its figures are over this one. Both may hold the same
    skill. `notes` say what of the published files is not scored, one sentence each; `unscored` are the ids of such
    queries: those of other splits, and those that no gold skill is known for.
    """

    name: str
    tasks: tuple[Task, ...]
    gold_skills: tuple[Skill, ...]
    pool: tuple[Skill, ...] = ()
    notes: tuple[str, ...] = ()
    unscored: frozenset[str] = frozenset()

    @property
    def clusters(self) -> dict[str, str]:
        """query_id → what the bootstrap draws it together with, for the queries that have such a cluster."""
        return {task.query.query_id: task.cluster for task in self.tasks if task.cluster}


def name_of(folder: Path) -> str:
    """The folder's name; its parent's where it is called `data`, as in a clone of a published repository."""
    resolved = folder.resolve()
    return resolved.parent.name if resolved.name == "data" and resolved.parent.name else resolved.name


def with_pool(folder: Path, tasks: Iterable[Task], pool: Iterable[Skill], query_ids: Iterable[str]) -> Benchmark:
    """A benchmark with the pool it was published with; `gold_skills` are those of it that can be gold.

    `query_ids` are all queries of its files, scored or not.
    """
    tasks, pool = tuple(tasks), tuple(pool)
    wanted = {skill_id for task in tasks for skill_id in (*task.relevance.gold, *task.relevance.alternatives)}
    gold_skills = tuple(skill for skill in pool if skill.skill_id in wanted)
    return Benchmark(name_of(folder), tasks, gold_skills, pool, unscored=unscored_of(query_ids, tasks))


def unscored_of(query_ids: Iterable[str], tasks: Iterable[Task]) -> frozenset[str]:
    """The ids that no task has."""
    return frozenset(query_ids) - {task.query.query_id for task in tasks}


def wanted_skills(relevance: Relevance, skill_ids: Container[str]) -> list[str]:
    """The gold skills that the pool `skill_ids` holds, and what stands in for those that it lacks, by id."""
    gold = {skill_id for skill_id in relevance.gold if skill_id in skill_ids}
    alternatives = relevance.alternatives.items()
    return sorted(gold | {other for other, need in alternatives if need not in gold and other in skill_ids})


def check_pool(benchmark: Benchmark, skill_ids: Collection[str]) -> Benchmark:
    """`benchmark` as it can be scored over the pool `skill_ids` (gold skills added).

    Raises SkilltrainError where a gold skill is missing and no alternative is there: no ranking could find it, and
    every figure would be too low without a word. A gain of a skill that is not gold and not in the pool (SkillRouter's
    easy pool lacks the degraded copies) is left out, so that a perfect ranking has nDCG 1, as in the released
    evaluation.
    """
    pool = frozenset(skill_ids)
    missing = [(task.query.query_id, lost) for task in benchmark.tasks for lost in _missing(task.relevance, pool)]
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


def _missing(relevance: Relevance, pool: frozenset[str]) -> list[str]:
    met = {need for skill_id, need in relevance.alternatives.items() if skill_id in pool}
    return sorted(relevance.gold - pool - met)


def _within(task: Task, pool: frozenset[str]) -> Task:
    gold, gains = task.relevance.gold, task.relevance.gains
    kept = {skill_id: gain for skill_id, gain in gains.items() if skill_id in pool or skill_id in gold}
    return replace(task, relevance=replace(task.relevance, gains=kept))


def of_split(queries: Sequence[Query], split: str | None, path: Path) -> list[Query]:
    """The queries of a split, or all. Raises SkilltrainError where there is none."""
    chosen = [query for query in queries if split in (None, query.split)]
    if not queries:
        raise SkilltrainError("holds no query to score", where=path)
    if not chosen:
        counts = Counter(query.split for query in queries)
        splits = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
        raise SkilltrainError(f"holds no query of split '{split}'", where=path, fix=f"its splits are {splits}")
    return chosen


def tasks_of_split(tasks: Sequence[Task], split: str | None, path: Path) -> list[Task]:
    """The tasks of a split, or all. Raises SkilltrainError where there is none."""
    wanted = {query.query_id for query in of_split([task.query for task in tasks], split, path)}
    return [task for task in tasks if task.query.query_id in wanted]


def split_files(folder: Path, suffix: str, split: str | None) -> dict[str, Path]:
    """split → its file in `folder`, of one split or of all. Raises SkilltrainError where there is none."""
    files = {file.name.removesuffix(suffix): file for file in sorted(folder.glob(f"*{suffix}"))}
    if not files:
        raise SkilltrainError(f"holds no {suffix} file, one a split", where=folder)
    if split is None:
        return files
    if split not in files:
        raise SkilltrainError(f"holds no split '{split}'", where=folder, fix=f"its splits are {', '.join(files)}")
    return {split: files[split]}
