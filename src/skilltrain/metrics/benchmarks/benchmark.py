"""A benchmark: tasks (queries with relevance and labels), and the skills published with them."""

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

    The label `kind` is `single` if exactly one skill is gold, else `multi` (SkillRouter, appendix
    A). A query that has no kind gets the same value.

    Args:
        query: The query.
        relevance: The skills that it asks for.
        labels: Values by label. Empty values are left out.
        where: File or line that errors name.
        steps: Steps of a compound task, if they are known.
    """
    kind_label = "single" if len(relevance.gold) == 1 else "multi"
    all_labels = {**labels, "kind": kind_label, "origin": query.origin, "split": query.split}
    # Leave out labels without a value, such as the split of a query that has none.
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

    A task is a query with its gold skills: the skills that the query needs.

    Args:
        folder: Folder of the benchmark.
        tasks: Tasks of all splits.
        split: Split to score; None for all.
        query_ids: Ids of all queries in the folder. Those without a task are unscored.
        pool: The benchmark's own pool.
        gold_skills: Skills to add to other pools. By default, those of `pool` that are gold or an
            alternative.
        notes: Sentences for the report.

    Raises:
        SkilltrainError: There is no task, a query has two splits, or `check_relevance` fails.
    """
    scored = _tasks_by_query(folder, tasks, split)
    # An alternative does the same as a gold skill, and can take its place.
    if gold_skills is None:
        gold_ids: set[str] = set()
        for task in scored.values():
            gold_ids.update(task.relevance.gold, task.relevance.alternatives)
        gold_skills = [skill for skill in pool if skill.skill_id in gold_ids]

    # Queries may be copied from the skills. A reader of the report must know this.
    num_passages = sum(task.query.origin == OWN_TEXT for task in scored.values())
    if num_passages:
        problem = f"{num_passages} of {len(scored)} queries are passages of the skills' own texts"
        notes = [*notes, f"{problem}: they favour BM25, which finds the same words"]

    # The queries of other splits and the queries without a task are not scored.
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
    """Check the tasks of a split and return them by query id. If `split` is None, use all tasks.

    Query ids are distinct within a split, so a repeated id means that its query has two splits.

    Args:
        folder: Folder of the benchmark, for errors.
        tasks: Tasks of all splits.
        split: The split, such as `test`.

    Raises:
        SkilltrainError: There is no task, a query has two splits, or `check_relevance` fails.
    """
    if not tasks:
        raise SkilltrainError("empty-benchmark", "holds no query to score", where=folder)
    if split is not None:
        splits = Counter(task.query.split for task in tasks)
        tasks = [task for task in tasks if task.query.split == split]
        if not tasks:
            problem = f"holds no query of split '{split}'"
            counts = ", ".join(f"{name} ({count})" for name, count in sorted(splits.items()))
            fix = f"its splits are {counts}"
            raise SkilltrainError("empty-split", problem, where=folder, fix=fix)

    scored = {}
    for task in tasks:
        query_id = task.query.query_id
        if query_id in scored:
            problem = f"query '{query_id}' has two splits"
            fix = "give the split to score"
            raise SkilltrainError("choose-split", problem, where=folder, fix=fix)
        scored[query_id] = task
        # `check_relevance` does not know the query, so add its id to the error.
        try:
            check_relevance(task.relevance)
        except SkilltrainError as error:
            problem = f"query '{query_id}': {error.problem}"
            raise SkilltrainError(error.code, problem, where=task.where) from error
    return scored


def name_of(folder: Path) -> str:
    """Return the name of a folder, or of its parent if it is called `data`."""
    resolved = folder.resolve()
    if resolved.name == "data" and resolved.parent.name:
        return resolved.parent.name
    return resolved.name


def as_tier(benchmark: Benchmark) -> Benchmark:
    """Make a benchmark a tier: one of several benchmarks that `join_tiers` joins into one.

    Its name becomes part of its query ids, and the label `tier`. For example, the query
    `sum-columns` of the tier `easy` becomes `sum-columns@easy`.
    """
    tier = benchmark.name
    tasks: list[Task] = []
    for task in benchmark.tasks:
        query_id = task.query.query_id
        query = replace(task.query, query_id=f"{query_id}@{tier}")
        labels = {**task.labels, "tier": tier}
        # All tiers use the original query id as cluster, so the bootstrap draws a query together
        # with its repetitions in other tiers.
        tasks.append(replace(task, query=query, labels=labels, cluster=query_id))
    unscored = frozenset(f"{query_id}@{tier}" for query_id in benchmark.unscored)
    return replace(benchmark, tasks=tuple(tasks), unscored=unscored)


def join_tiers(tiers: Sequence[Benchmark]) -> Benchmark:
    """Join several benchmarks, which are ranked over different pools, into one.

    The joined benchmark has the queries of all tiers. Query ids do not repeat, because `as_tier`
    has added the tier's name: `sum-columns@easy`.

    Args:
        tiers: The benchmarks, made by `as_tier`. Each keeps its own pool.

    Raises:
        SkilltrainError: Two tiers have the same name.
    """
    if len(tiers) == 1:
        return tiers[0]
    # Equal names would give equal query ids. Look at the most frequent name only.
    name, count = Counter(tier.name for tier in tiers).most_common(1)[0]
    if count > 1:
        problem = f"two tiers are named '{name}'"
        fix = "give each folder a name of its own"
        raise SkilltrainError("repeated-name", problem, where="benchmark", fix=fix)

    tasks: list[Task] = []
    notes: list[str] = []
    for tier in tiers:
        tasks += tier.tasks
        # A note must say which tier it is about.
        notes += [f"{tier.name}: {note}" for note in tier.notes]
    return Benchmark(
        name=" + ".join(tier.name for tier in tiers),
        tasks=tuple(tasks),
        notes=tuple(notes),
        unscored=frozenset().union(*(tier.unscored for tier in tiers)),
        tiers=tuple(tiers),
    )


def gold_in_pool(relevance: Relevance, pool: Container[str]) -> list[str]:
    """Return the gold skills in a pool, and alternatives of gold skills that the pool lacks.

    Args:
        relevance: The gold skills of a query, and their alternatives: other skills that do the
            same.
        pool: Ids of the skills in the pool.

    Returns:
        Skill ids in alphabetical order.
    """
    skill_ids = {skill_id for skill_id in relevance.gold if skill_id in pool}
    # An alternative counts only where the pool lacks the gold skill itself.
    for skill_id, gold_id in relevance.alternatives.items():
        if gold_id not in pool and skill_id in pool:
            skill_ids.add(skill_id)
    return sorted(skill_ids)


def check_pool(benchmark: Benchmark, skill_ids: Collection[str]) -> Benchmark:
    """Check that a pool has the gold skills, and remove gains of skills that are not in the pool.

    A gold skill keeps its gain even if the pool lacks it, because the pool then has an alternative
    that takes its place. Other skills that the pool lacks lose their gain, so that a perfect
    ranking has nDCG 1, as in the released evaluation. SkillRouter's easy pool, for example, lacks
    the degraded copies.

    Args:
        benchmark: The benchmark.
        skill_ids: Ids of the skills in the pool.

    Returns:
        The benchmark as it is scored over the pool.

    Raises:
        SkilltrainError: The pool lacks a gold skill and all of its alternatives.
    """
    pool = frozenset(skill_ids)
    missing: list[str] = []
    tasks: list[Task] = []
    for task in benchmark.tasks:
        relevance = task.relevance
        gold = relevance.gold
        replaceable_ids: set[str] = set()  # gold skills with an alternative in the pool
        for alternative_id, gold_id in relevance.alternatives.items():
            if alternative_id in pool:
                replaceable_ids.add(gold_id)
        # A gold skill is missing if the pool has neither the skill nor an alternative.
        for gold_id in sorted(gold - pool - replaceable_ids):
            missing.append(f"gold skill '{gold_id}' of query '{task.query.query_id}'")

        gains: dict[str, float] = {}
        for skill_id, gain in relevance.gains.items():
            if skill_id in pool or skill_id in gold:
                gains[skill_id] = gain
        tasks.append(replace(task, relevance=replace(relevance, gains=gains)))
    if missing:
        problem = f"{missing[0]} is not among the {len(pool)} skills of the pool"
        problem += f"; missing in all: {len(missing)}"
        fix = "add the benchmark's gold skills to the pool, or choose the pool it was made for"
        where = f"benchmark {benchmark.name}"
        raise SkilltrainError("missing-gold-skill", problem, where=where, fix=fix)
    return replace(benchmark, tasks=tuple(tasks))


def add_copies(benchmark: Benchmark, copies_by_skill: Mapping[str, Collection[str]]) -> Benchmark:
    """Add the copies of gold skills to each task, and a note that counts the tasks with copies.

    Copies of a gold skill's alternatives count for the gold skill too. A judged skill is never a
    copy, because the judgement says more. A copy of several skills counts for the one with the
    lowest id.

    Args:
        benchmark: The benchmark.
        copies_by_skill: Ids of the near-duplicates of each skill.
    """
    tasks: list[Task] = []
    for task in benchmark.tasks:
        relevance = task.relevance
        # Gold skills stand for themselves, and alternatives for their gold skill.
        gold_by_skill = {gold_id: gold_id for gold_id in relevance.gold}
        gold_by_skill.update(relevance.alternatives)

        judged_ids = {*relevance.gains, *relevance.alternatives}
        copies: dict[str, str] = {}  # gold skill by the id of its copy
        # The lowest id comes last, so its copies replace those of higher ids.
        for skill_id in sorted(gold_by_skill, reverse=True):
            for copy_id in copies_by_skill.get(skill_id, ()):
                if copy_id not in judged_ids:
                    copies[copy_id] = gold_by_skill[skill_id]
        tasks.append(replace(task, relevance=replace(relevance, copies=copies)))
    num_with_copies = sum(bool(task.relevance.copies) for task in tasks)
    note = (
        "(copies): near-duplicates of a gold skill count as gold too; "
        f"{num_with_copies} of {len(tasks)} queries have any."
    )
    return replace(benchmark, tasks=tuple(tasks), notes=(*benchmark.notes, note))
