"""A benchmark: queries, what each asks for, and the gold skills the pool must hold."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Skill

Slice = Literal["single", "multi"]


def slice_of(relevance: Relevance) -> Slice:
    return "single" if len(relevance.gold) == 1 else "multi"


@dataclass(frozen=True, slots=True)
class Task:
    """One query of a benchmark with its relevance."""

    query: Query
    relevance: Relevance

    @property
    def slice(self) -> Slice:
        """`single` where exactly one skill is gold, else `multi` (SkillRouter, appendix A)."""
        return slice_of(self.relevance)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Tasks in the order of their file, and gold skills to add to the pool (none where the pool holds them)."""

    name: str
    tasks: tuple[Task, ...]
    gold_skills: tuple[Skill, ...]


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


def of_split(queries: Sequence[Query], split: str | None, path: Path) -> list[Query]:
    chosen = [query for query in queries if split in (None, query.split)]
    if not queries:
        raise SkilltrainError("holds no query to score", where=path)
    if not chosen:
        counts = Counter(query.split for query in queries)
        splits = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
        raise SkilltrainError(f"holds no query of split '{split}'", where=path, fix=f"its splits are {splits}")
    return chosen
