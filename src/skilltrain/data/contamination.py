"""Contamination of training data by benchmarks; the stage `decontaminate` removes it.

A training query is dropped on one of three grounds (column `filter` of DROPPED):

- `query_overlap`: it has the words of a benchmark query, or most of its word trigrams.
- `name`: one of its positives is a gold skill of the benchmark, or has the name of one.
- `jaccard`: the body of a positive has most word trigrams in common with that of a gold skill.

A query that asks the same in other words is found only through its gold skill.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from skilltrain.config import Config, InputPath, InputPaths, PoolPath
from skilltrain.data.near_duplicates import word_trigrams
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.records import Dropped, Skill, positives_of
from skilltrain.stage import Stage, Summary
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    LISTS,
    QUERIES,
    read_skills,
    read_table,
    select_judged,
    table_path,
    write_table,
)
from skilltrain.terminal import say, track
from skilltrain.texts import name_key

GROUNDS: tuple[str, ...] = ("query_overlap", "name", "jaccard")
TRAIN = "train"

Match = Dropped
"""A match of a training query or skill with a benchmark, as a row of DROPPED."""


class ContaminationLimits(Config):
    """Limits from which training data count as contaminated."""

    query_overlap: float | None = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Jaccard index of word trigrams from which two queries are the same; null: off",
    )
    name: bool = Field(default=True, description="a positive with a gold skill's name contaminates")
    jaccard: float | None = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Jaccard index of body trigrams from which two skills are the same; null: off",
    )


@dataclass(frozen=True, slots=True)
class HeldOutBenchmark:
    """A benchmark to compare training data with.

    Attributes:
        golds: Gold skills of the tasks; empty if only queries are compared.
    """

    name: str
    tasks: tuple[Task, ...]
    golds: tuple[Skill, ...]


def open_benchmarks(
    paths: Sequence[Path], pool: Path | None, need_golds: bool
) -> list[HeldOutBenchmark]:
    """Read benchmarks without their queries of split `train`.

    One folder may hold both training queries and held-out ones.

    Args:
        paths: Folders of the benchmarks.
        pool: SKILLS table with the texts of gold skills that a benchmark does not hold.
        need_golds: Whether to read the gold skills.

    Raises:
        SkilltrainError: A folder is no benchmark or has only queries of split `train`; or
            `need_golds` is set and a gold skill has no text.
    """
    # A benchmark has the name of its folder. If two folders have one name, their paths are used.
    names = [path.resolve().name for path in paths]
    benchmarks: list[HeldOutBenchmark] = []
    for path, name in zip(paths, names, strict=True):
        unique_name = name if names.count(name) == 1 else str(path)
        benchmarks.append(_open_benchmark(path, unique_name, pool, need_golds))
    return benchmarks


def _open_benchmark(path: Path, name: str, pool: Path | None, need_golds: bool) -> HeldOutBenchmark:
    """Read the tasks of one benchmark, and its gold skills if they are needed.

    Args:
        path: Folder of the benchmark.
        name: Name under which results are reported.
        pool: Pool that may hold the texts of the gold skills, if the benchmark lacks them.
        need_golds: Whether the texts of the gold skills (the skills that a task needs) are compared
            with training data. If not, they are not read.

    Raises:
        SkilltrainError: All queries are training data, or a gold skill has no text.
    """
    benchmark = load_benchmark(path)
    # Queries of the split `train` are training data, so they are not held out.
    tasks = tuple(task for task in benchmark.tasks if task.query.split != TRAIN)
    if not tasks:
        problem = (
            f"all {len(benchmark.tasks)} queries are of split '{TRAIN}': "
            "this is training data, not a benchmark"
        )
        fix = "give a folder with queries of another split"
        raise SkilltrainError("empty-split", problem, where=path, fix=fix)
    if not need_golds:
        return HeldOutBenchmark(name, tasks, ())

    # List the gold skills of all tasks, each with the first task that needs it, for the error. An
    # alternative can replace a gold skill, so it is held out too.
    first_task_of: dict[str, str] = {}  # task id by skill id
    for task in tasks:
        for skill_id in sorted({*task.relevance.gold, *task.relevance.alternatives}):
            first_task_of.setdefault(skill_id, task.query.query_id)

    # Read the pool only if the benchmark lacks a text. If both have a skill, the benchmark's text
    # counts: in `a | b`, the values of `b` replace those of `a`.
    skills = {skill.skill_id: skill for skill in benchmark.gold_skills}
    if pool is not None and first_task_of.keys() - skills.keys():
        skills = {skill.skill_id: skill for skill in read_skills(pool)} | skills
    missing = [skill_id for skill_id in first_task_of if skill_id not in skills]
    if missing:
        problem = (
            f"gold skill '{missing[0]}' of task {first_task_of[missing[0]]} "
            "has no text in the benchmark or the pool"
        )
        fix = "give a pool that holds the benchmark's skills"
        raise SkilltrainError("missing-gold-skill", problem, where=path, fix=fix)
    return HeldOutBenchmark(name, tasks, tuple(skills[skill_id] for skill_id in first_task_of))


class _TrigramIndex:
    """An index of the word trigrams of texts, to find texts similar to a given one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._sizes: list[int] = []  # number of trigrams of each text
        self._positions: defaultdict[int, list[int]] = defaultdict(list)  # of texts, by trigram
        for position, text in enumerate(texts):
            trigrams = word_trigrams(text).tolist()
            self._sizes.append(len(trigrams))
            for trigram in trigrams:
                self._positions[trigram].append(position)

    def similar(self, text: str, threshold: float | None) -> list[tuple[int, float]]:
        """Return the texts whose Jaccard index with `text` is at least `threshold`.

        Returns:
            (position of the text, Jaccard index), in order of position; none without a threshold.
        """
        if threshold is None:
            return []
        # Count the trigrams that each text of the index shares with `text`.
        trigrams = word_trigrams(text).tolist()
        num_shared = Counter[int]()  # by position of the text
        for trigram in trigrams:
            num_shared.update(self._positions.get(trigram, ()))

        # Jaccard index: number of shared trigrams, divided by the number in either text.
        matches: list[tuple[int, float]] = []
        for position, shared in sorted(num_shared.items()):
            value = shared / (self._sizes[position] + len(trigrams) - shared)
            if value >= threshold:
                matches.append((position, value))
        return matches


class BenchmarkIndex:
    """An index of the queries and gold skills of benchmarks, to find them in training data.

    The query id of a match is empty until `contaminations` sets it.
    """

    def __init__(self, benchmarks: Sequence[HeldOutBenchmark], limits: ContaminationLimits) -> None:
        # The lists are parallel: `_names` and the texts of `_bodies` have the order of `_golds`,
        # and the texts of `_queries` have the order of `_tasks`.
        self._limits = limits
        self._tasks: list[tuple[str, Task]] = []  # (benchmark, task)
        self._golds: list[tuple[str, Skill]] = []  # (benchmark, gold skill)
        for benchmark in benchmarks:
            self._tasks += [(benchmark.name, task) for task in benchmark.tasks]
            self._golds += [(benchmark.name, gold) for gold in benchmark.golds]
        self._names = [name_key(gold.name) for _, gold in self._golds]
        self._bodies = _TrigramIndex(gold.body for _, gold in self._golds)
        self._queries = _TrigramIndex(task.query.text for _, task in self._tasks)

    def query_matches(self, text: str) -> list[Match]:
        """Return a match for each benchmark query that has (nearly) the words of `text`."""
        matches: list[Match] = []
        # `value` is the Jaccard index of the word trigrams of both queries.
        for position, value in self._queries.similar(text, self._limits.query_overlap):
            benchmark, task = self._tasks[position]
            overlap = "the same words as" if value == 1 else f"word overlap {value:.3f} with"
            reason = f"{overlap} task {task.query.query_id} of benchmark {benchmark}"
            # The method `contaminations` sets the query id. No skill takes part in this match.
            matches.append(
                Match(
                    query_id="",
                    skill_id="",
                    filter="query_overlap",
                    reason=reason,
                    value=value,
                    source=benchmark,
                )
            )
        return matches

    def skill_matches(self, skill: Skill) -> list[Match]:
        """Compare a training skill with all gold skills, and return the matches.

        A gold skill matches if it has the same id, the same name or a similar body. The setting
        `limits` may turn off the comparison of names or of bodies.
        """
        matches: list[Match] = []
        if self._limits.name:
            matches += self._name_matches(skill)
        for position, similarity in self._bodies.similar(skill.body, self._limits.jaccard):
            relation = f"body overlap {similarity:.3f} with"
            matches.append(self._gold_match(skill, position, relation, "jaccard", similarity))
        return matches

    def _name_matches(self, skill: Skill) -> list[Match]:
        """Return a match for each gold skill that has the id or the name of a training skill."""
        matches: list[Match] = []
        name = name_key(skill.name)  # without separators; an empty name is not compared
        for position, (_, gold) in enumerate(self._golds):
            if gold.skill_id == skill.skill_id:
                matches.append(self._gold_match(skill, position, "is"))
            elif name and name == self._names[position]:
                matches.append(self._gold_match(skill, position, "same name as"))
        return matches

    def _gold_match(
        self,
        skill: Skill,
        position: int,
        relation: str,
        ground: str = "name",
        similarity: float = 1.0,
    ) -> Match:
        """Return the match of a training skill with a gold skill.

        Args:
            skill: Skill of the training data.
            position: Position of the gold skill in the index.
            relation: Words for the reason, such as "same name as".
            ground: One of GROUNDS.
            similarity: Similarity of the two skills; 1 for the same id or name.
        """
        benchmark, gold = self._golds[position]
        reason = f"{relation} gold skill {gold.skill_id} of benchmark {benchmark}"
        return Match(
            query_id="",  # set by the method `contaminations`
            skill_id=skill.skill_id,
            filter=ground,
            reason=reason,
            value=similarity,
            source=benchmark,
            other_id=gold.skill_id,
        )

    def contaminations(
        self, query_id: str, text: str, skill_matches: Iterable[Match]
    ) -> list[Match]:
        """Return the matches that contaminate a training query.

        A match says what the query, or one of its positives, has in common with a benchmark. The
        ground of a match is one of GROUNDS, such as "name". If a ground has several matches with
        one benchmark, only the strongest is returned.

        Args:
            query_id: Id of the training query.
            text: Text of the training query.
            skill_matches: Matches of the query's positives, from the method `skill_matches`.

        Returns:
            The matches in the order of GROUNDS. A match is a row of DROPPED with these columns:

            - `filter`: the ground.
            - `skill_id`: the positive. Empty if the query itself matches.
            - `value`: the similarity. It is 1 if the words, the names or the ids are the same.
            - `source`: the benchmark.
            - `other_id`: the gold skill of the benchmark.
        """
        # Sort by similarity, so that the strongest match comes first.
        matches = [*self.query_matches(text), *skill_matches]
        matches.sort(key=lambda match: match.value or 0, reverse=True)

        # Keep the first match of each ground and benchmark.
        strongest: dict[tuple[int, str], Match] = {}  # by index of the ground, and benchmark
        for match in matches:
            ground_index = GROUNDS.index(match.filter)
            benchmark = match.source or ""
            strongest.setdefault((ground_index, benchmark), replace(match, query_id=query_id))
        return [strongest[key] for key in sorted(strongest)]


class Decontaminate(Stage):
    """Drop training queries that a benchmark also asks."""

    example = (
        "pool=runs/pool queries=runs/encoder_lists benchmarks='[benchmark]' out=runs/clean_lists"
    )
    result = "{num_kept} of {num_queries} queries kept; dropped: {dropped_by_ground}"
    next_command = "train RECIPE data.pool={pool} data.lists={out}"

    stage: Literal["decontaminate"]
    pool: PoolPath
    queries: InputPath = Field(
        description="folder with QUERIES and JUDGEMENTS, and LISTS to be cleaned with them"
    )
    benchmarks: InputPaths = Field(
        min_length=1, description="folders of benchmarks, without their queries of split train"
    )
    split: str | None = Field(
        default=TRAIN, description="clean the queries of this split only; null: all"
    )
    limits: ContaminationLimits = Field(
        default=ContaminationLimits(), description="what counts as contaminated"
    )
    out: Path = Field(description="folder to write: QUERIES, JUDGEMENTS (LISTS), DROPPED")

    def run(self, out: Path) -> Summary:
        """Write the tables without contaminated queries, and return counts.

        A ground is a reason to drop a query: one of GROUNDS, in the column `filter` of DROPPED.
        DROPPED has one row for each ground and benchmark of a dropped query. So the counts by
        ground can add up to more than the number of dropped queries. Copies of gold skills stay in
        the pool: `evaluate` counts them as gold if it has the pool's clusters.
        """
        positives = {
            query: positives_of(verdicts)
            for query, verdicts in select_judged(self.queries, self.split)
        }
        skills = _read_positives(self.pool, set().union(*positives.values()))

        # The limits `name` and `jaccard` compare skills, so they need the gold skills.
        need_golds = self.limits.name or self.limits.jaccard is not None
        benchmarks = open_benchmarks(self.benchmarks, self.pool, need_golds)
        index = BenchmarkIndex(benchmarks, self.limits)

        # Find the contaminated queries. A skill is compared once for all queries that it answers.
        matches_by_skill = {
            skill.skill_id: index.skill_matches(skill)
            for skill in track(skills, "comparing skills", len(skills))
        }
        rows: list[Match] = []
        for query in track(positives, "comparing queries", len(positives)):
            matches: list[Match] = []
            for skill_id in positives[query]:
                matches += matches_by_skill.get(skill_id, ())  # none if it is not in the pool
            rows += index.contaminations(query.query_id, query.text, matches)

        dropped_ids = {row.query_id for row in rows}
        if len(dropped_ids) == len(positives):
            problem = f"no query is left of {len(positives)}; the first: {rows[0].reason}"
            fix = "hold out other benchmarks, or loosen the limits"
            raise SkilltrainError("nothing-left", problem, where=self.queries, fix=fix)
        counts = _write_clean(self.queries, dropped_ids, out)
        write_table(rows, DROPPED, out)

        # A query counts once for each of its grounds, and once for each of its benchmarks.
        query_grounds = {(row.query_id, row.filter) for row in rows}
        query_benchmarks = {(row.query_id, row.source) for row in rows}
        by_ground = Counter(ground for _, ground in query_grounds)
        by_benchmark = Counter(benchmark for _, benchmark in query_benchmarks)
        return {
            "num_queries": len(positives),
            "num_kept": len(positives) - len(dropped_ids),
            "num_dropped": len(dropped_ids),
            **counts,
            "dropped_by_ground": {ground: by_ground[ground] for ground in GROUNDS},
            "dropped_by_benchmark": {item.name: by_benchmark[item.name] for item in benchmarks},
        }


def _read_positives(pool: Path, positives: Collection[str]) -> list[Skill]:
    """Return the positives that are in the pool, and warn if some are not.

    Args:
        pool: SKILLS table.
        positives: Ids of the skills that are judged to fit a query.

    Raises:
        SkilltrainError: None of the positives is in the pool.
    """
    skills = [skill for skill in read_skills(pool) if skill.skill_id in positives]
    if positives and not skills:
        fix = "give the pool that the queries were made for"
        raise SkilltrainError("wrong-pool", "holds no positive of the queries", where=pool, fix=fix)
    num_missing = len(positives) - len(skills)
    if num_missing:
        say(
            f"warning: {num_missing:,} of {len(positives):,} positives are not in {pool}; "
            "they are not compared with the gold skills of the benchmarks"
        )
    return skills


def _write_clean(source: Path, dropped_ids: Collection[str], out: Path) -> dict[str, int]:
    """Write the tables of a folder without the dropped queries.

    Args:
        source: Folder with QUERIES, JUDGEMENTS and perhaps LISTS.
        dropped_ids: Ids of the queries to leave out.
        out: Folder to write to.

    Returns:
        Numbers of lists kept and dropped; empty without LISTS.
    """
    # A filter for the rows of all other queries. The type is given, as `dropped_ids` may be empty.
    is_clean = ~pc.field("query_id").isin(pa.array(dropped_ids, pa.string()))
    for spec in (QUERIES, JUDGEMENTS):
        write_table(read_table(source, spec).filter(is_clean), spec, out)
    # A folder of queries alone has no training lists.
    if not table_path(source, LISTS).is_file():
        return {}

    lists = read_table(source, LISTS)
    clean = lists.filter(is_clean)
    write_table(clean, LISTS, out)
    num_dropped = lists.num_rows - clean.num_rows
    return {"num_lists_kept": clean.num_rows, "num_lists_dropped": num_dropped}
