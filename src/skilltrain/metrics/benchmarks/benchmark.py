"""A benchmark: queries, what each asks for and what is known of it, and the skills it was published with."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from skilltrain.errors import SkilltrainError
from skilltrain.metrics.measures import Relevance, check_relevance
from skilltrain.records import OWN_TEXT, Query, Skill

Labels = Mapping[str, str | tuple[str, ...]]
"""What is known of one query: label → value, or values where it has several."""


@dataclass(frozen=True, slots=True)
class GoldStep:
    """One step of a task in words, and the skill that does it; "" where the benchmark does not say which."""

    text: str
    skill_id: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """One query of a benchmark; `cluster` names the query that it repeats over another pool, "" for none.

    `steps` are those of a compound task, in order, where known; `where` is the place that a fault in it is told to be.
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

    `gold_skills` are to be added to a pool; `pool` is the benchmark's own, empty where it has none. `notes` say what of
    the files is not scored, `unscored` are such queries: those of other splits, and those without known gold. `tiers`
    are the benchmarks that this one joins, each with a pool of its own (`joined`), else ().
    """

    name: str
    tasks: tuple[Task, ...]
    gold_skills: tuple[Skill, ...] = ()
    pool: tuple[Skill, ...] = ()
    notes: tuple[str, ...] = ()
    unscored: frozenset[str] = frozenset()
    tiers: tuple["Benchmark", ...] = ()

    @property
    def parts(self) -> tuple["Benchmark", ...]:
        """What is ranked, each over a pool of its own: the tiers, or the benchmark itself where it has none."""
        return self.tiers or (self,)

    @property
    def clusters(self) -> dict[str, str]:
        """query_id → what the bootstrap draws it together with, for the queries that have such a cluster."""
        return {task.query.query_id: task.cluster for task in self.tasks if task.cluster}

    @property
    def queries(self) -> list[Query]:
        return [task.query for task in self.tasks]

    @property
    def relevances(self) -> dict[str, Relevance]:
        return {task.query.query_id: task.relevance for task in self.tasks}

    def with_gold(self, skills: Iterable[Skill]) -> dict[str, Skill]:
        """`skills` by id, and the gold skills that came with the tasks: these stand last, and replace no skill."""
        pool = {skill.skill_id: skill for skill in skills}
        return pool | {
            skill.skill_id: skill for skill in self.gold_skills if skill.skill_id not in pool
        }


class BenchmarkReader(NamedTuple):
    """A form of benchmarks: a plug-in of the kind `benchmark`.

    Attributes:
        marker: Path of a file or folder in a benchmark's folder that tells the form.
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
    """A task with `labels` (empty values are left out) beside those that every task has: kind, origin and split.

    The kind is `single` where exactly one skill is gold, else `multi` (SkillRouter, appendix A).
    """
    kind = "single" if len(relevance.gold) == 1 else "multi"
    every = {**labels, "kind": kind, "origin": query.origin, "split": query.split}
    known = {name: value for name, value in every.items() if value}
    return Task(
        replace(query, kind=query.kind or kind), relevance, known, steps=tuple(steps), where=where
    )


def make_benchmark(
    folder: Path,
    tasks: Sequence[Task],
    split: str | None,
    query_ids: Iterable[str] = (),
    pool: Sequence[Skill] = (),
    gold_skills: Sequence[Skill] | None = None,
    notes: Sequence[str] = (),
) -> Benchmark:
    """The benchmark in `folder`: the tasks of a split, or all.

    `query_ids` are queries of its files that may be no tasks; `gold_skills` are those of the pool that can be gold,
    unless they are given. Raises SkilltrainError for no task, a query in two splits, and a relevance by which no
    ranking could score.
    """
    splits = Counter(task.query.split for task in tasks)
    if not tasks:
        raise SkilltrainError("empty-benchmark", "holds no query to score", where=folder)
    if split not in (None, *splits):
        fix = f"its splits are {', '.join(f'{name} ({count})' for name, count in sorted(splits.items()))}"
        raise SkilltrainError(
            "empty-split", f"holds no query of split '{split}'", where=folder, fix=fix
        )
    scored: dict[str, Task] = {}
    for task in (task for task in tasks if split in (None, task.query.split)):
        query_id = task.query.query_id
        if scored.setdefault(query_id, task) is not task:
            raise SkilltrainError(
                "choose-split",
                f"query '{query_id}' has two splits",
                where=folder,
                fix="give the split to score",
            )
        try:
            check_relevance(task.relevance)
        except SkilltrainError as error:
            raise SkilltrainError(
                error.code, f"query '{query_id}': {error.what}", where=task.where
            ) from error
    if gold_skills is None:
        wanted = {
            one
            for task in scored.values()
            for one in (*task.relevance.gold, *task.relevance.alternatives)
        }
        gold_skills = [skill for skill in pool if skill.skill_id in wanted]
    if num_own := sum(task.query.origin == OWN_TEXT for task in scored.values()):
        what = f"{num_own} of {len(scored)} queries are passages of the skills' own texts"
        notes = [*notes, f"{what}: they favour BM25, which finds the same words"]
    unscored = frozenset({*query_ids, *(task.query.query_id for task in tasks)} - scored.keys())
    return Benchmark(
        name_of(folder),
        tuple(scored.values()),
        tuple(gold_skills),
        tuple(pool),
        tuple(notes),
        unscored,
    )


def name_of(folder: Path) -> str:
    """The folder's name; its parent's where it is called `data`, as in a clone of a published repository."""
    resolved = folder.resolve()
    return (
        resolved.parent.name if resolved.name == "data" and resolved.parent.name else resolved.name
    )


def as_tier(benchmark: Benchmark) -> Benchmark:
    """`benchmark` with its name as its queries' label `tier`, and at the end of their ids: `sum-columns@easy`."""
    tier, tasks = benchmark.name, list[Task]()
    for task in benchmark.tasks:
        query_id = task.query.query_id
        query, labels = (
            replace(task.query, query_id=f"{query_id}@{tier}"),
            {**task.labels, "tier": tier},
        )
        tasks.append(replace(task, query=query, labels=labels, cluster=query_id))
    unscored = frozenset(f"{query_id}@{tier}" for query_id in benchmark.unscored)
    return replace(benchmark, tasks=tuple(tasks), unscored=unscored)


def joined(tiers: Sequence[Benchmark]) -> Benchmark:
    """Tiers (`as_tier`) as one benchmark, without a pool of its own: each is ranked over its own, all are scored."""
    if len(tiers) == 1:
        return tiers[0]
    (twice, count), *_ = Counter(tier.name for tier in tiers).most_common()
    if count > 1:
        fix = "give each folder a name of its own"
        raise SkilltrainError(
            "repeated-name", f"two tiers are named '{twice}'", where="benchmark", fix=fix
        )
    return Benchmark(
        name=" + ".join(tier.name for tier in tiers),
        tasks=tuple(task for tier in tiers for task in tier.tasks),
        notes=tuple(f"{tier.name}: {note}" for tier in tiers for note in tier.notes),
        unscored=frozenset().union(*(tier.unscored for tier in tiers)),
        tiers=tuple(tiers),
    )


def wanted_skills(relevance: Relevance, skill_ids: Container[str]) -> list[str]:
    """The gold skills that the pool `skill_ids` holds, and what stands in for those that it lacks, by id."""
    gold = {skill_id for skill_id in relevance.gold if skill_id in skill_ids}
    alternatives = relevance.alternatives.items()
    return sorted(
        gold | {other for other, need in alternatives if need not in gold and other in skill_ids}
    )


def check_pool(benchmark: Benchmark, skill_ids: Collection[str]) -> Benchmark:
    """`benchmark` as it can be scored over the pool `skill_ids` (gold skills added).

    Raises SkilltrainError where a gold skill is missing and no alternative is there: no ranking could find it. A gain
    of a skill that is not gold and not in the pool (SkillRouter's easy pool lacks the degraded copies) is left out, so
    that a perfect ranking has nDCG 1, as in the released evaluation.
    """
    pool, missing, tasks = frozenset(skill_ids), list[str](), list[Task]()
    for task in benchmark.tasks:
        gold, gains, alternatives = (
            task.relevance.gold,
            task.relevance.gains,
            task.relevance.alternatives,
        )
        met = pool.union(need for skill_id, need in alternatives.items() if skill_id in pool)
        missing += [
            f"gold skill '{lost}' of query '{task.query.query_id}'" for lost in sorted(gold - met)
        ]
        gains = {one: gain for one, gain in gains.items() if one in pool or one in gold}
        tasks.append(replace(task, relevance=replace(task.relevance, gains=gains)))
    if missing:
        what = f"{missing[0]} is not among the {len(pool)} skills of the pool; missing in all: {len(missing)}"
        fix = "add the benchmark's gold skills to the pool, or choose the pool it was made for"
        raise SkilltrainError(
            "missing-gold-skill", what, where=f"benchmark {benchmark.name}", fix=fix
        )
    return replace(benchmark, tasks=tuple(tasks))


def knowing_copies(benchmark: Benchmark, copies: Mapping[str, Collection[str]]) -> Benchmark:
    """`benchmark` whose tasks know the copies of what they want; `copies` maps skill_id → its copies.

    A skill that the benchmark wants or gives a gain is no copy: its judgement knows more. A copy of two gold skills is
    that of the first by id. A note says how many queries have copies.
    """
    tasks: list[Task] = []
    for task in benchmark.tasks:
        gold, gains, alternatives = (
            task.relevance.gold,
            task.relevance.gains,
            task.relevance.alternatives,
        )
        needs = sorted({**{one: one for one in gold}, **alternatives}.items(), reverse=True)
        found = {copy: need for skill_id, need in needs for copy in copies.get(skill_id, ())}
        found = {
            copy: need
            for copy, need in found.items()
            if copy not in gains and copy not in alternatives
        }
        tasks.append(replace(task, relevance=replace(task.relevance, copies=found)))
    num = sum(bool(task.relevance.copies) for task in tasks)
    note = f"(copies): near-duplicates of a gold skill count as gold too; {num} of {len(tasks)} queries have any."
    return replace(benchmark, tasks=tuple(tasks), notes=(*benchmark.notes, note))
