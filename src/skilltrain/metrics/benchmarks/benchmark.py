"""A benchmark: tasks (queries with relevance and labels), and the skills published with them.

Notes:
    - The label `kind` follows SkillRouter, appendix A.
    - A gold skill that the pool lacks keeps its gain, because the pool then has an alternative that
      takes its place. Other skills that the pool lacks lose their gain, so that a perfect ranking
      has nDCG 1, as in the released evaluation. SkillRouter's easy pool lacks the degraded copies.
    - All tiers use the original query id as cluster, so the bootstrap draws a query together with
      its repetitions in other tiers.
    - A judged skill is never a copy, because the judgement says more.
    - Query ids are distinct within a split, so a repeated id means that its query has two splits.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from skilltrain.errors import SkilltrainError
from skilltrain.metrics.measures import Relevance, check_relevance
from skilltrain.records import OWN_TEXT, Query, Skill

Labels = Mapping[str, str | tuple[str, ...]]
"""Value of each label of a query, or a tuple of several values."""


@dataclass(frozen=True, slots=True)
class GoldStep:
    """A step of a compound task.

    Attributes:
        text: The step in words.
        skill_id: The skill that does it; empty if the benchmark does not say.
    """

    text: str
    skill_id: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A query of a benchmark and its judgements.

    Attributes:
        query: The query.
        relevance: The skills that it asks for.
        labels: Values by label, for slices.
        cluster: Id of the query that it repeats over another pool; empty for none.
        steps: Steps of a compound task in order, if they are known.
        where: File or line that errors name.
    """

    query: Query
    relevance: Relevance
    labels: Labels = field(default_factory=dict)
    cluster: str = ""
    steps: tuple[GoldStep, ...] = ()
    where: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Tasks in the order of their file, and the skills that came with them.

    Attributes:
        name: Name in reports.
        tasks: The tasks to score.
        gold_skills: Skills to add to a pool.
        pool: The benchmark's own pool; empty if it has none.
        notes: Sentences about parts of the files that are not scored.
        unscored: Ids of queries that are not scored: of other splits, or without known gold.
        tiers: Benchmarks that this one joins, each with its own pool (see `join_tiers`).
    """

    name: str
    tasks: tuple[Task, ...]
    gold_skills: tuple[Skill, ...] = ()
    pool: tuple[Skill, ...] = ()
    notes: tuple[str, ...] = ()
    unscored: frozenset[str] = frozenset()
    tiers: tuple["Benchmark", ...] = ()

    @property
    def tiers_or_self(self) -> tuple["Benchmark", ...]:
        """The benchmarks that are ranked over one pool each: the tiers, or this benchmark."""
        return self.tiers or (self,)

    @property
    def clusters(self) -> dict[str, str]:
        """Cluster of the bootstrap by query id, for queries that are in one."""
        return {task.query.query_id: task.cluster for task in self.tasks if task.cluster}

    @property
    def queries(self) -> list[Query]:
        return [task.query for task in self.tasks]

    @property
    def relevances(self) -> dict[str, Relevance]:
        return {task.query.query_id: task.relevance for task in self.tasks}

    def with_gold(self, skills: Iterable[Skill]) -> dict[str, Skill]:
        """Return `skills` by id, followed by the gold skills that they lack."""
        pool = {skill.skill_id: skill for skill in skills}
        for skill in self.gold_skills:
            pool.setdefault(skill.skill_id, skill)
        return pool


class BenchmarkReader(NamedTuple):
    """A form of benchmarks: a plug-in of the kind `benchmark`.

    Attributes:
        marker: Path in a benchmark's folder of a file or folder that only this form has.
        form: The form in words, for an error.
        read: Reads a folder, all of it or one split (see `make_benchmark`).
    """

    marker: str
    form: str
    read: Callable[[Path, str | None], Benchmark]


def task_of(
    query: Query,
    relevance: Relevance,
    labels: Labels,
    where: object = None,
    steps: Iterable[GoldStep] = (),
) -> Task:
    """Make a task, and add the labels kind, origin and split.

    The kind is `single` if exactly one skill is gold, else `multi`.

    Args:
        labels: Values by label. Empty values are left out.
    """
    kind_label = "single" if len(relevance.gold) == 1 else "multi"
    all_labels = {**labels, "kind": kind_label, "origin": query.origin, "split": query.split}
    filled_labels = {name: value for name, value in all_labels.items() if value}
    if not query.kind:
        query = replace(query, kind=kind_label)
    return Task(query, relevance, filled_labels, steps=tuple(steps), where=where)


def make_benchmark(
    folder: Path,
    tasks: Sequence[Task],
    split: str | None,
    query_ids: Iterable[str] = (),
    pool: Sequence[Skill] = (),
    gold_skills: Sequence[Skill] | None = None,
    notes: Sequence[str] = (),
) -> Benchmark:
    """Make a benchmark from the tasks of one split, or of all splits.

    Args:
        split: Split to score; None for all.
        query_ids: Ids of all queries in the folder.
        gold_skills: Gold skills and alternatives; None: from `pool`.
    """
    scored = _tasks_by_query(folder, tasks, split)
    if gold_skills is None:
        gold_ids = set()
        for task in scored.values():
            gold_ids.update(task.relevance.gold, task.relevance.alternatives)
        gold_skills = [skill for skill in pool if skill.skill_id in gold_ids]

    num_passages = sum(task.query.origin == OWN_TEXT for task in scored.values())
    if num_passages:
        problem = f"{num_passages} of {len(scored)} queries are passages of the skills' own texts"
        notes = [*notes, f"{problem}: they favour BM25, which finds the same words"]

    all_ids = {*query_ids, *(task.query.query_id for task in tasks)}
    return Benchmark(
        name=name_of(folder),
        tasks=tuple(scored.values()),
        gold_skills=tuple(gold_skills),
        pool=tuple(pool),
        notes=tuple(notes),
        unscored=frozenset(all_ids - scored.keys()),
    )


def _tasks_by_query(folder: Path, tasks: Sequence[Task], split: str | None) -> dict[str, Task]:
    """Check the tasks of a split and return them by query id. If `split` is None, use all tasks."""
    if not tasks:
        raise SkilltrainError("empty-benchmark", "holds no query to score", where=folder)
    scored = {}
    for task in _tasks_of_split(folder, tasks, split):
        query_id = task.query.query_id
        if query_id in scored:
            problem = f"query '{query_id}' has two splits"
            fix = "give the split to score"
            raise SkilltrainError("choose-split", problem, where=folder, fix=fix)
        scored[query_id] = task
        try:
            check_relevance(task.relevance)
        except SkilltrainError as error:
            problem = f"query '{query_id}': {error.problem}"
            raise SkilltrainError(error.code, problem, where=task.where) from error
    return scored


def _tasks_of_split(folder: Path, tasks: Sequence[Task], split: str | None) -> Sequence[Task]:
    """Return the tasks of a split, of which there must be at least one; None: all tasks."""
    if split is None:
        return tasks
    split_tasks = [task for task in tasks if task.query.split == split]
    if not split_tasks:
        problem = f"holds no query of split '{split}'"
        splits = Counter(task.query.split for task in tasks)
        counts = ", ".join(f"{name} ({count})" for name, count in sorted(splits.items()))
        fix = f"its splits are {counts}"
        raise SkilltrainError("empty-split", problem, where=folder, fix=fix)
    return split_tasks


def name_of(folder: Path) -> str:
    """Return the name of a folder, or of its parent if it is called `data`."""
    resolved = folder.resolve()
    if resolved.name == "data" and resolved.parent.name:
        return resolved.parent.name
    return resolved.name


def as_tier(benchmark: Benchmark) -> Benchmark:
    """Make a benchmark a tier: one of several benchmarks that `join_tiers` joins into one.

    The query `sum-columns` of the tier `easy` becomes `sum-columns@easy`. In all tiers, its cluster
    is `sum-columns`.
    """
    tier = benchmark.name
    tasks = []
    for task in benchmark.tasks:
        query_id = task.query.query_id
        query = replace(task.query, query_id=f"{query_id}@{tier}")
        labels = {**task.labels, "tier": tier}
        tasks.append(replace(task, query=query, labels=labels, cluster=query_id))
    unscored = frozenset(f"{query_id}@{tier}" for query_id in benchmark.unscored)
    return replace(benchmark, tasks=tuple(tasks), unscored=unscored)


def join_tiers(tiers: Sequence[Benchmark]) -> Benchmark:
    """Join several benchmarks, which are ranked over different pools, into one.

    Args:
        tiers: The benchmarks, made by `as_tier`. Each keeps its own pool.
    """
    if len(tiers) == 1:
        return tiers[0]
    name, count = Counter(tier.name for tier in tiers).most_common(1)[0]
    if count > 1:
        problem = f"two tiers are named '{name}'"
        fix = "give each folder a name of its own"
        raise SkilltrainError("repeated-name", problem, where="benchmark", fix=fix)

    tasks = []
    notes = []
    for tier in tiers:
        tasks += tier.tasks
        notes += [f"{tier.name}: {note}" for note in tier.notes]
    return Benchmark(
        name=" + ".join(tier.name for tier in tiers),
        tasks=tuple(tasks),
        notes=tuple(notes),
        unscored=frozenset().union(*(tier.unscored for tier in tiers)),
        tiers=tuple(tiers),
    )


def gold_in_pool(relevance: Relevance, pool: Container[str]) -> list[str]:
    """Return the gold skills in a pool, and alternatives of gold skills that it lacks.

    Args:
        relevance: The skills that a query asks for.
        pool: Ids of the skills in the pool.

    Returns:
        Skill ids in alphabetical order.
    """
    skill_ids = {skill_id for skill_id in relevance.gold if skill_id in pool}
    for skill_id, gold_id in relevance.alternatives.items():
        if gold_id not in pool and skill_id in pool:
            skill_ids.add(skill_id)
    return sorted(skill_ids)


def check_pool(benchmark: Benchmark, skill_ids: Collection[str]) -> Benchmark:
    """Check that a pool has the gold skills, and remove gains of skills that it lacks.

    Args:
        skill_ids: Ids of the skills in the pool.

    Raises:
        SkilltrainError: The pool lacks a gold skill and its alternatives.
    """
    pool = frozenset(skill_ids)
    missing = []
    tasks = []
    for task in benchmark.tasks:
        relevance = task.relevance
        for gold_id in _missing_gold(relevance, pool):
            missing.append(f"gold skill '{gold_id}' of query '{task.query.query_id}'")
        gains = {}
        for skill_id, gain in relevance.gains.items():
            if skill_id in pool or skill_id in relevance.gold:
                gains[skill_id] = gain
        tasks.append(replace(task, relevance=replace(relevance, gains=gains)))
    if missing:
        problem = f"{missing[0]} is not among the {len(pool)} skills of the pool"
        problem += f"; missing in all: {len(missing)}"
        fix = "add the benchmark's gold skills to the pool, or choose the pool it was made for"
        where = f"benchmark {benchmark.name}"
        raise SkilltrainError("missing-gold-skill", problem, where=where, fix=fix)
    return replace(benchmark, tasks=tuple(tasks))


def _missing_gold(relevance: Relevance, pool: frozenset[str]) -> list[str]:
    """Return the gold skills that a pool lacks, together with all their alternatives."""
    alternatives = relevance.alternatives
    replaceable = {alternatives[skill_id] for skill_id in alternatives if skill_id in pool}
    return sorted(relevance.gold - pool - replaceable)


def add_copies(benchmark: Benchmark, copies_by_skill: Mapping[str, Collection[str]]) -> Benchmark:
    """Add the copies of gold skills to each task, and a note that counts the tasks with copies.

    Args:
        copies_by_skill: Ids of the near-duplicates of each skill.
    """
    tasks = []
    for task in benchmark.tasks:
        copies = _copies_of_gold(task.relevance, copies_by_skill)
        tasks.append(replace(task, relevance=replace(task.relevance, copies=copies)))
    num_with_copies = sum(bool(task.relevance.copies) for task in tasks)
    note = (
        "(copies): near-duplicates of a gold skill count as gold too; "
        f"{num_with_copies} of {len(tasks)} queries have any."
    )
    return replace(benchmark, tasks=tuple(tasks), notes=(*benchmark.notes, note))


def _copies_of_gold(
    relevance: Relevance, copies_by_skill: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """Return the gold skill of each unjudged copy of a gold skill or of its alternatives.

    A copy of several skills belongs to the skill with the lowest id.
    """
    gold_by_skill = {gold_id: gold_id for gold_id in relevance.gold}
    gold_by_skill.update(relevance.alternatives)
    judged_ids = {*relevance.gains, *relevance.alternatives}
    copies = {}
    for skill_id in sorted(gold_by_skill, reverse=True):  # the lowest id wins
        for copy_id in copies_by_skill.get(skill_id, ()):
            if copy_id not in judged_ids:
                copies[copy_id] = gold_by_skill[skill_id]
    return copies
