"""Whether training data hold what a benchmark asks, on which grounds; the stage `decontaminate` takes it out.

`query_overlap` speaks of queries (the same words, or many n-grams of words in common), the other grounds of a query's
positives against the benchmark's gold skills: `name` (the same skill, or one that bears its name), `jaccard` (bodies
with most word trigrams in common), `cluster` (a chain of near-duplicates) and `cosine` (vectors all but the same).
A query that says the same in other words is found by none of them, unless it asks for a gold skill.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from skilltrain.config import Config, InputPath, InputPaths
from skilltrain.data.near_duplicates import read_clusters, word_trigrams
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Task
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.records import Dropped, Skill, positives_of
from skilltrain.retrieval.dense import EncoderSource, open_encoder
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
from skilltrain.texts import name_key, words_of

GROUNDS: tuple[str, ...] = ("query_overlap", "name", "jaccard", "cluster", "cosine")
TRAIN = "train"
_NGRAM = 8  # words; a CJK character is a word
_FEWEST_WORDS = (
    4  # shorter queries stand within many others by chance; they are compared as a whole
)


class ContaminationLimits(Config):
    """What counts as contaminated, as far as texts alone tell."""

    query_overlap: float | None = Field(
        default=0.5,
        gt=0,
        le=1,
        description="share of a benchmark query's 8-grams that makes a training query its copy",
    )
    name: bool = Field(default=True, description="a positive with a gold skill's name contaminates")
    jaccard: float | None = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Jaccard index of body trigrams that makes a positive a gold skill's copy",
    )


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold skill of a benchmark with the tasks that ask for it."""

    skill: Skill
    benchmark: str
    task_ids: tuple[str, ...]

    def against(self, skill: Skill, ground: str, value: float, reason: str) -> Dropped:
        """The row that says on which ground `skill` is taken for this one."""
        return Dropped(
            "", skill.skill_id, ground, reason, value, self.benchmark, self.skill.skill_id
        )

    def __str__(self) -> str:
        first, *others = self.task_ids
        more = f" and {len(others)} more" if others else ""
        return (
            f"gold skill {self.skill.skill_id} of benchmark {self.benchmark} (task {first}{more})"
        )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A benchmark that training data are compared with; `golds` is empty where skills are not compared."""

    name: str
    tasks: tuple[Task, ...]
    golds: tuple[Gold, ...]


def open_benchmarks(paths: Sequence[Path], pool: Path | None, need_golds: bool) -> list[HeldOut]:
    """The benchmarks in folders; a gold skill's text comes from the benchmark, else from the SKILLS table `pool`.

    Queries of split `train` are no benchmark's: one folder may hold what is trained on and what is held out.
    Raises SkilltrainError for a folder that is no benchmark, one with queries of split `train` only, and, where
    `need_golds`, one with a gold skill that has no text.
    """
    names = [path.resolve().name for path in paths]
    names = [
        str(path) if names.count(name) > 1 else name
        for path, name in zip(paths, names, strict=True)
    ]
    return [_open(path, name, pool, need_golds) for path, name in zip(paths, names, strict=True)]


def _open(path: Path, name: str, pool: Path | None, need_golds: bool) -> HeldOut:
    benchmark = load_benchmark(path)
    tasks = tuple(task for task in benchmark.tasks if task.query.split != TRAIN)
    if not tasks:
        what = f"all {len(benchmark.tasks)} queries are of split '{TRAIN}': this is training data, not a benchmark"
        raise SkilltrainError(what, where=path, fix="give a folder with queries of another split")
    asked: dict[str, list[str]] = {}
    for task in tasks if need_golds else ():
        for skill_id in sorted({*task.relevance.gold, *task.relevance.alternatives}):
            asked.setdefault(skill_id, []).append(task.query.query_id)
    skills = {skill.skill_id: skill for skill in benchmark.gold_skills}
    if pool is not None and asked.keys() - skills.keys():
        skills = {skill.skill_id: skill for skill in read_skills(pool)} | skills
    if missing := [skill_id for skill_id in asked if skill_id not in skills]:
        what = f"gold skill '{missing[0]}' of task {asked[missing[0]][0]} has no text in the benchmark or the pool"
        raise SkilltrainError(what, where=path, fix="give a pool that holds the benchmark's skills")
    return HeldOut(
        name,
        tasks,
        tuple(Gold(skills[skill_id], name, tuple(ids)) for skill_id, ids in asked.items()),
    )


def ngrams(words: Sequence[str], n: int) -> set[tuple[str, ...]]:
    """The distinct runs of `n` words; of a text with fewer, all its words as the only one; none of a text without."""
    width = min(n, len(words))
    return set(zip(*(words[offset:] for offset in range(width)), strict=False))


def _trigrams(skill: Skill) -> set[int]:
    return set(word_trigrams(skill.body).tolist())


class NgramIndex:
    """The n-grams of a few texts, to be looked for in many; `sizes` says how many each has."""

    def __init__(self, texts: Iterable[set[Any]]) -> None:
        self.sizes: list[int] = []
        self._owners: dict[Any, list[int]] = {}
        for at, found in enumerate(texts):
            self.sizes.append(len(found))
            for ngram in found:
                self._owners.setdefault(ngram, []).append(at)

    def shared(self, found: set[Any]) -> list[tuple[int, int]]:
        """(text, how many n-grams of `found` it has), of the texts that have any, in order."""
        both = self._owners.keys() & found
        return sorted(Counter(at for ngram in both for at in self._owners[ngram]).items())


class BenchmarkIndex:
    """The queries and gold skills of benchmarks, to be looked for in training data; `clusters` are those of skills."""

    def __init__(
        self,
        benchmarks: Sequence[HeldOut],
        limits: ContaminationLimits,
        clusters: Mapping[str, int] | None = None,
    ) -> None:
        self.golds = [gold for one in benchmarks for gold in one.golds]
        self._limits, self._clusters = limits, clusters or {}
        self._names = [name_key(gold.skill.name) for gold in self.golds]
        self._bodies = NgramIndex(_trigrams(gold.skill) for gold in self.golds)
        self._tasks = [(one.name, task.query.query_id) for one in benchmarks for task in one.tasks]
        self._words = [words_of(task.query.text) for one in benchmarks for task in one.tasks]
        self._widths = {_NGRAM} | {
            len(one) for one in self._words if _FEWEST_WORDS <= len(one) < _NGRAM
        }
        self._queries = NgramIndex(ngrams(words, _NGRAM) for words in self._words)

    def query_matches(self, text: str) -> list[Dropped]:
        """The tasks that a training query holds or is part of: rows without query_id.

        The value is the share of the task's n-grams that stand in `text`; where `text` is the shorter of two long
        ones (16 words and more), of its own, so that an excerpt is found as well. A task's query of fewer than eight
        words is one n-gram, one of fewer than four is compared whole.
        """
        words, limit = words_of(text), self._limits.query_overlap
        if limit is None:
            return []
        runs = {width: ngrams(words, width) for width in self._widths}
        found: list[Dropped] = []
        for at, shared in self._queries.shared({tuple(words)}.union(*runs.values())):
            width, size = min(_NGRAM, len(self._words[at])), self._queries.sizes[at]
            value = shared / (min(size, len(runs[_NGRAM])) if len(words) >= 2 * _NGRAM else size)
            if value >= limit:
                (benchmark, task_id), is_same = self._tasks[at], words == self._words[at]
                share = (
                    "the same words as"
                    if is_same
                    else f"{value:.0%} of the {width}-grams in common with"
                )
                reason = f"{share} task {task_id} of benchmark {benchmark}"
                found.append(Dropped("", "", "query_overlap", reason, value, benchmark))
        return found

    def skill_matches(self, skill: Skill) -> list[Dropped]:
        """The gold skills that `skill` is, is named like, whose body it repeats or whose cluster it shares.

        They are rows without query_id.
        """
        own, name, found = skill.skill_id, name_key(skill.name), list[Dropped]()
        if self._limits.name:
            alike = [
                gold
                for gold, other in zip(self.golds, self._names, strict=True)
                if name and name == other
            ]
            same = [(gold, f"is {gold}") for gold in self.golds if gold.skill.skill_id == own]
            same += [(gold, f"same name as {gold}") for gold in alike if gold.skill.skill_id != own]
            found = [gold.against(skill, "name", 1.0, reason) for gold, reason in same]
        if (limit := self._limits.jaccard) is not None:
            trigrams = _trigrams(skill)
            for at, shared in self._bodies.shared(trigrams):
                gold, value = (
                    self.golds[at],
                    shared / (self._bodies.sizes[at] + len(trigrams) - shared),
                )
                if value >= limit:
                    found.append(
                        gold.against(
                            skill, "jaccard", value, f"body overlap {value:.3f} with {gold}"
                        )
                    )
        for gold in self.golds if own in self._clusters else ():
            if (
                gold.skill.skill_id != own
                and self._clusters.get(gold.skill.skill_id) == self._clusters[own]
            ):
                found.append(gold.against(skill, "cluster", 1.0, f"in one cluster with {gold}"))
        return found

    def contaminations(
        self, query_id: str, text: str, skill_matches: Iterable[Dropped]
    ) -> list[Dropped]:
        """What stands against a training query: of each benchmark and ground the strongest, in the order of GROUNDS.

        `skill_matches` are those of its positives. In a row `filter` is the ground, `skill_id` the positive that it
        holds for (empty for the query), `source` the benchmark, `other_id` its gold skill.
        """
        strongest: dict[tuple[int, str], Dropped] = {}
        for match in sorted(
            [*self.query_matches(text), *skill_matches], key=lambda match: -(match.value or 0)
        ):
            key = GROUNDS.index(match.filter), match.source or ""
            strongest.setdefault(key, replace(match, query_id=query_id))
        return [strongest[key] for key in sorted(strongest)]


class DecontaminateConfig(Config):
    """Drop training queries (and their lists) that a benchmark asks, or whose positives are its gold skills."""

    stage: Literal["decontaminate"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(
        description="folder with QUERIES and JUDGEMENTS, and LISTS to be cleaned with them"
    )
    benchmarks: InputPaths = Field(
        min_length=1, description="folders of benchmarks; queries of split train aside"
    )
    split: str | None = Field(
        default=TRAIN, description="clean the queries of this split alone; null: all"
    )
    limits: ContaminationLimits = Field(
        default=ContaminationLimits(), description="what counts as contaminated"
    )
    clusters: InputPath | None = Field(
        default=None,
        description="CLUSTERS of the pool: a positive in a gold skill's cluster contaminates",
    )
    encoder: EncoderSource | None = Field(
        default=None, description="compares positives with gold skills by cosine too"
    )
    cosine: float = Field(
        default=0.92, gt=0, le=1, description="cosine from which a positive contaminates"
    )
    out: Path = Field(description="folder to write: QUERIES, JUDGEMENTS (LISTS), DROPPED")


def run_decontaminate(config: DecontaminateConfig, out: Path) -> dict[str, Any]:
    """Counts by ground and benchmark; writes the clean tables and DROPPED.

    A query goes with a row for each benchmark and ground that holds for it, so grounds can be weighed against one
    another; the counts by ground therefore add up to more than the queries dropped. Copies of gold skills stay in the
    pool: `evaluate` counts them as gold where it is given the pool's clusters.
    """
    training = [
        (query, positives_of(judged))
        for query, judged in select_judged(config.queries, config.split)
    ]
    skills = _known(config.pool, {skill_id for _, positives in training for skill_id in positives})
    by_more_than_name = config.limits.jaccard, config.clusters, config.encoder
    needs_golds = config.limits.name or any(ground is not None for ground in by_more_than_name)
    clusters = (
        read_clusters(config.clusters, (skill.skill_id for skill in skills))
        if config.clusters
        else None
    )
    benchmarks = open_benchmarks(config.benchmarks, config.pool, needs_golds)
    index = BenchmarkIndex(benchmarks, config.limits, clusters)
    matches = {
        skill.skill_id: index.skill_matches(skill)
        for skill in track(skills, "comparing skills", len(skills))
    }
    if config.encoder is not None:
        encoder = open_encoder(config.encoder)
        gold_vectors = encoder.encode_skills([gold.skill for gold in index.golds])
        cosines = encoder.encode_skills(skills) @ gold_vectors.T
        for at, gold_at in np.argwhere(cosines >= config.cosine).tolist():
            skill, gold, value = skills[at], index.golds[gold_at], float(cosines[at, gold_at])
            matches[skill.skill_id].append(
                gold.against(skill, "cosine", value, f"cosine {value:.3f} to {gold}")
            )
    found: list[Dropped] = []
    for query, positives in track(training, "comparing queries", len(training)):
        of_skills = [match for skill_id in positives for match in matches.get(skill_id, ())]
        found += index.contaminations(query.query_id, query.text, of_skills)
    dropped = {one.query_id for one in found}
    if len(dropped) == len(training):
        what = f"no query is left of {len(training)}; the first: {found[0].reason}"
        raise SkilltrainError(
            what, where=config.queries, fix="hold out other benchmarks, or set limits"
        )
    counts = _write_kept(config.queries, dropped, out)
    write_table(found, DROPPED, out)
    return {
        "num_queries": len(training),
        "num_kept": len(training) - len(dropped),
        "num_dropped": len(dropped),
        **counts,
        "dropped_by_ground": {
            key: len({one.query_id for one in found if one.filter == key}) for key in GROUNDS
        },
        "dropped_by_benchmark": {
            held_out.name: len({one.query_id for one in found if one.source == held_out.name})
            for held_out in benchmarks
        },
    }


def _known(pool: Path, positives: Collection[str]) -> list[Skill]:
    """Those of `positives` that are in the pool. Raises SkilltrainError where none is."""
    known = [skill for skill in read_skills(pool) if skill.skill_id in positives]
    if positives and not known:
        fix = "give the pool that the queries were made for"
        raise SkilltrainError("holds no positive of the queries", where=pool, fix=fix)
    if len(known) < len(positives):
        say(
            f"warning: {len(positives) - len(known):,} of {len(positives):,} positives are not in {pool}, "
            "so they were compared with no gold skill"
        )
    return known


def _write_kept(source: Path, dropped: Collection[str], out: Path) -> dict[str, int]:
    """Write the tables of `source` without what belongs to the queries `dropped`; counts of its lists, if any."""
    counts: dict[str, int] = {}
    for spec in (QUERIES, JUDGEMENTS, LISTS):
        if spec is LISTS and not table_path(source, LISTS).is_file():
            continue
        table = read_table(source, spec)
        kept = table.filter(~pc.field("query_id").isin(pa.array(dropped, pa.string())))
        write_table(kept, spec, out)
        if spec is LISTS:
            counts = {
                "num_lists_kept": kept.num_rows,
                "num_lists_dropped": table.num_rows - kept.num_rows,
            }
    return counts
