"""Whether training data hold what a benchmark asks: the grounds on which they do, and the comparison.

Grounds, of which the first speaks of queries and the others of skills, a query's positives against the benchmark's
gold skills: `query_overlap` (the same words, or many n-grams of words in common), `name` (the same skill, or one
that bears its name), `jaccard` (bodies with most word trigrams in common), `cluster` (linked by a chain of
near-duplicates) and `cosine` (vectors all but the same).
A query that says the same in other words is found by none of them, unless it asks for a gold skill.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import Float64
from pydantic import BeforeValidator, Field, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.contamination.ngrams import NgramIndex, ngrams
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Task
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.records import Dropped, Skill
from skilltrain.tables import SKILLS, read_table, skills_from_table
from skilltrain.texts import name_key, words_of

GROUNDS: tuple[str, ...] = ("query_overlap", "name", "jaccard", "cluster", "cosine")
TRAIN = "train"
_FEWEST_WORDS = 4  # shorter queries stand within many others by chance; they are compared as a whole

BenchmarkPaths = Annotated[
    tuple[InputPath, ...],
    BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value]),
]


class ContaminationLimits(Config):
    """What counts as contaminated, as far as texts alone tell."""

    ngram: int = Field(
        default=8, ge=_FEWEST_WORDS, le=50, description="words of a query's n-grams; a CJK character is a word"
    )
    query_overlap: float | None = Field(
        default=0.5,
        gt=0,
        le=1,
        description="share of a benchmark query's n-grams that makes a training query its copy; null: not compared",
    )
    name: bool = Field(default=True, description="a positive with a gold skill's name contaminates")
    jaccard: float | None = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Jaccard index of body trigrams with a gold skill from which a positive contaminates; "
        "null: not compared",
    )

    @model_validator(mode="after")
    def _compares(self) -> "ContaminationLimits":
        if self.query_overlap is None and not self.compares_skills:
            raise ValueError("with query_overlap: null, name: false and jaccard: null nothing is compared")
        return self

    @property
    def compares_skills(self) -> bool:
        """Whether gold skills are looked at, and must have texts."""
        return self.name or self.jaccard is not None


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold skill of a benchmark with the tasks that ask for it."""

    skill: Skill
    benchmark: str
    task_ids: tuple[str, ...]

    def against(self, skill: Skill, ground: str, value: float, reason: str) -> Dropped:
        """The row that says on which ground `skill` is taken for this one."""
        return Dropped("", skill.skill_id, ground, reason, value, self.benchmark, self.skill.skill_id)

    def __str__(self) -> str:
        first, *others = self.task_ids
        more = f" and {len(others)} more" if others else ""
        return f"gold skill {self.skill.skill_id} of benchmark {self.benchmark} (task {first}{more})"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A benchmark that training data are compared with; `golds` is empty where skills are not compared."""

    name: str
    tasks: tuple[Task, ...]
    golds: tuple[Gold, ...]


@dataclass(frozen=True, slots=True)
class TrainingQuery:
    """A query to train on, and the skills that it is trained to find."""

    query_id: str
    text: str
    positives: tuple[str, ...]


def open_benchmarks(paths: Sequence[Path], pool: Path, need_golds: bool) -> list[HeldOut]:
    """The benchmarks in folders; a gold skill's text comes from the benchmark, else from the SKILLS table `pool`.

    Queries of split `train` are no benchmark's: one folder may hold what is trained on and what is held out.
    Raises SkilltrainError for a folder that is no benchmark or stands twice, one with queries of split `train` only,
    and, where `need_golds`, one with a gold skill that has no text.
    """
    resolved = Counter(path.resolve() for path in paths)
    if twice := [path for path in paths if resolved[path.resolve()] > 1]:
        raise SkilltrainError("this benchmark is given twice", where=twice[0])
    names = Counter(path.resolve().name for path in paths)
    return [_open(path, path.resolve().name if names[path.resolve().name] == 1 else str(path), pool, need_golds)
            for path in paths]  # fmt: skip


def _open(path: Path, name: str, pool: Path, need_golds: bool) -> HeldOut:
    benchmark = load_benchmark(path)
    tasks = tuple(task for task in benchmark.tasks if task.query.split != TRAIN)
    if not tasks:
        what = f"all {len(benchmark.tasks)} queries are of split '{TRAIN}': this is training data, not a benchmark"
        raise SkilltrainError(what, where=path, fix="give a folder with queries of another split")
    if not need_golds:
        return HeldOut(name, tasks, ())
    asked: dict[str, list[str]] = {}
    for task in tasks:
        for skill_id in sorted({*task.relevance.gold, *task.relevance.alternatives}):
            asked.setdefault(skill_id, []).append(task.query.query_id)
    own = {skill.skill_id: skill for skill in benchmark.gold_skills}
    skills = _skills_of(pool, asked.keys() - own.keys()) | own
    if missing := [skill_id for skill_id in asked if skill_id not in skills]:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise SkilltrainError(
            f"gold skill '{missing[0]}'{more} of task {asked[missing[0]][0]} has no text in the benchmark or the pool",
            where=path,
            fix="add the benchmark's skills to the pool, or compare queries only (limits name: false, jaccard: null)",
        )
    return HeldOut(name, tasks, tuple(Gold(skills[skill_id], name, tuple(ids)) for skill_id, ids in asked.items()))


def _skills_of(pool: Path, skill_ids: Collection[str]) -> dict[str, Skill]:
    """skill_id → skill, of those that the table holds; it is not read for no skill."""
    if not skill_ids:
        return {}
    return {
        skill.skill_id: skill for skill in skills_from_table(read_table(pool, SKILLS)) if skill.skill_id in skill_ids
    }


class QueryIndex:
    """The queries of benchmarks, to be looked for in training queries."""

    def __init__(self, asked: Sequence[tuple[str, Task]], limits: ContaminationLimits) -> None:
        """`asked` are tasks with the name of their benchmark."""
        assert limits.query_overlap is not None
        self._asked, self._limit, self._ngram = asked, limits.query_overlap, limits.ngram
        self._whole: dict[tuple[str, ...], list[int]] = {}
        by_width: dict[int, list[tuple[int, list[str]]]] = {}
        for at, (_, task) in enumerate(asked):
            words = words_of(task.query.text)
            self._whole.setdefault(tuple(words), []).append(at)
            if len(words) >= _FEWEST_WORDS:
                by_width.setdefault(min(limits.ngram, len(words)), []).append((at, words))
        self._whole.pop((), None)  # a query without words is like no other
        self._indexes = [
            (np.array([at for at, _ in members]), NgramIndex([words for _, words in members], width))
            for width, members in sorted(by_width.items())
        ]

    def matches(self, text: str) -> list[Dropped]:
        """The tasks that a training query holds or is part of: rows without query_id.

        The value is the share of the task's n-grams that stand in `text`; where `text` is the shorter of two long
        ones (twice `ngram` words and more), of its own, so that an excerpt is found as well. A task's query of fewer
        than `ngram` words is one n-gram. The same words have the value 1, however few they are.
        """
        words = words_of(text)
        same = self._whole.get(tuple(words), [])
        found = [self._match(at, 1.0, "the same words as") for at in same]
        for members, index in self._indexes:
            if (shared := index.shared(words)) is None:
                continue
            sizes = index.sizes
            if len(words) >= 2 * self._ngram:
                sizes = np.minimum(sizes, len(ngrams(words, index.n)))
            values: Float64[np.ndarray, " task"] = shared / sizes
            for at in np.flatnonzero(values >= self._limit).tolist():
                if members[at] not in same:
                    share = f"{values[at]:.0%} of the {index.n}-grams in common with"
                    found.append(self._match(int(members[at]), float(values[at]), share))
        return found

    def _match(self, at: int, value: float, how: str) -> Dropped:
        benchmark, task = self._asked[at]
        reason = f"{how} task {task.query.query_id} of benchmark {benchmark}"
        return Dropped("", "", "query_overlap", reason, value, benchmark)


class SkillIndex:
    """The gold skills of benchmarks, to be compared with the skills of a pool."""

    def __init__(self, golds: Sequence[Gold], limits: ContaminationLimits) -> None:
        self._golds, self._jaccard = golds, limits.jaccard
        self._by_id: dict[str, list[Gold]] = {}
        self._by_name: dict[str, list[Gold]] = {}
        for gold in golds if limits.name else ():
            self._by_id.setdefault(gold.skill.skill_id, []).append(gold)
            self._by_name.setdefault(name_key(gold.skill.name), []).append(gold)
        self._by_name.pop("", None)  # a name of separators only equals nothing
        self._bodies = NgramIndex([words_of(gold.skill.body) for gold in golds] if limits.jaccard else [], 3)

    def matches(self, skill: Skill) -> list[Dropped]:
        """The gold skills that `skill` is, is named like, or whose body it repeats: rows without query_id."""
        return self._same_name(skill) + self._same_body(skill)

    def _same_name(self, skill: Skill) -> list[Dropped]:
        same = [(gold, f"is {gold}") for gold in self._by_id.get(skill.skill_id, ())]
        namesakes = self._by_name.get(name_key(skill.name), ())
        same += [(gold, f"same name as {gold}") for gold in namesakes if gold.skill.skill_id != skill.skill_id]
        return [gold.against(skill, "name", 1.0, reason) for gold, reason in same]

    def _same_body(self, skill: Skill) -> list[Dropped]:
        if self._jaccard is None:
            return []
        words = words_of(skill.body)
        shared, sizes = self._bodies.shared(words), self._bodies.sizes
        # What is shared of a gold skill's trigrams bounds the Jaccard index from above.
        if shared is None or not (shared / np.maximum(1, sizes) >= self._jaccard).any():
            return []
        values: Float64[np.ndarray, " gold"] = shared / (sizes + len(ngrams(words, 3)) - shared)
        return [
            gold.against(skill, "jaccard", value, f"body overlap {value:.3f} with {gold}")
            for gold, value in zip(self._golds, values.tolist(), strict=True)
            if value >= self._jaccard
        ]


def query_index(benchmarks: Sequence[HeldOut], limits: ContaminationLimits) -> QueryIndex | None:
    """The tasks of all benchmarks; None where queries are not compared."""
    if limits.query_overlap is None:
        return None
    return QueryIndex([(one.name, task) for one in benchmarks for task in one.tasks], limits)


def contaminations(
    query: TrainingQuery, tasks: QueryIndex | None, by_skill: Mapping[str, Sequence[Dropped]]
) -> list[Dropped]:
    """What stands against a training query: of each benchmark and ground the strongest, in the order of GROUNDS.

    `by_skill` holds the matches of all positives. In a row `filter` is the ground, `skill_id` the positive that it
    holds for (empty for the query), `source` the benchmark, `other_id` its gold skill.
    """
    found = tasks.matches(query.text) if tasks else []
    found += [match for skill_id in query.positives for match in by_skill.get(skill_id, ())]
    strongest: dict[tuple[int, str], Dropped] = {}
    for match in sorted(found, key=lambda match: -(match.value or 0)):
        key = GROUNDS.index(match.filter), match.source or ""
        strongest.setdefault(key, replace(match, query_id=query.query_id))
    return [strongest[key] for key in sorted(strongest)]
