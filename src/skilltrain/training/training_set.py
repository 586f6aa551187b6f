"""LISTS as a trainer sees them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, FiniteFloat, field_validator

from skilltrain.config import Config, InputPath, InputPaths
from skilltrain.data.near_duplicates import near_duplicate_clusters
from skilltrain.distributed import made_by_first_rank
from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import EncoderSettings
from skilltrain.records import POSITIVE, Skill, Verdict
from skilltrain.retrieval.lexical import BM25Index
from skilltrain.retrieval.nearest import starts_of
from skilltrain.tables import LISTS, QUERIES, read_skills, read_table, read_verdicts
from skilltrain.terminal import track

_NUL = "\0"  # no table holds one, so that what has it is no skill's id


def skill_of(key: str) -> str:
    """The id of the skill that a list names by one of its windows, or by itself."""
    return key.partition(_NUL)[0]


class ListsSource(Config):
    """What to train on, and what a verdict is worth."""

    pool: InputPath = Field(description="folder with skills.parquet")
    lists: InputPath | dict[InputPath, float] = Field(
        description="folder of lists, or {FOLDER: times an epoch}"
    )
    gains: dict[Verdict, FiniteFloat] = Field(
        default={
            Verdict.REQUIRED: 1.0,
            Verdict.USEFUL: 0.5,
            Verdict.IRRELEVANT: 0.0,
            Verdict.REJECTED: 0.0,
        },
        description="gain of each verdict: how far it lies from that of irrelevant counts",
    )
    max_lists: int | None = Field(
        default=None, ge=1, description="use only so many first lists of each folder"
    )
    held_out: InputPaths = Field(
        default=(), description="benchmarks whose queries and gold no list may hold"
    )
    contamination: Literal["refuse", "allow"] = Field(
        default="refuse",
        description="what to do with lists that held_out, or the queries of dev, contaminate",
    )

    @property
    def folders(self) -> Mapping[Path, float]:
        """The folders of lists, and how often an epoch sees each of their lists."""
        return self.lists if isinstance(self.lists, dict) else {self.lists: 1.0}

    @field_validator("lists")
    @classmethod
    def _are_drawn(cls, lists: Path | dict[Path, float]) -> Path | dict[Path, float]:
        if lists == {}:
            raise ValueError("no folder is named")
        for folder, weight in lists.items() if isinstance(lists, dict) else ():
            if weight <= 0:
                raise ValueError(f"the weight of {folder} must be > 0, found {weight:g}")
        return lists

    @field_validator("gains")
    @classmethod
    def _make_sense(cls, gains: dict[Verdict, float]) -> dict[Verdict, float]:
        if missing := sorted(set(Verdict) - gains.keys()):
            raise ValueError(f"no value for '{missing[0]}'")
        if gains[Verdict.REQUIRED] <= max(gains[Verdict.IRRELEVANT], gains[Verdict.REJECTED]):
            raise ValueError("required must be worth more than irrelevant and rejected")
        return gains


@dataclass(frozen=True)
class TrainingList:
    """One query with its candidates; `positives` are all skills known to answer it, in the list or not.

    An irrelevant skill gains 0. An epoch sees the list `weight` times, on average.
    """

    query_id: str
    query: str
    skill_ids: tuple[str, ...]
    gains: tuple[float, ...]
    positives: frozenset[str]
    teacher_scores: tuple[float, ...] | None = None
    weight: float = 1.0
    verdicts: tuple[Verdict, ...] = ()

    @property
    def is_positive(self) -> tuple[bool, ...]:
        """Which candidates are to be found: known answers, whatever others gain."""
        known = (skill_of(key) in self.positives for key in self.skill_ids)
        return tuple(answers and gain > 0 for answers, gain in zip(known, self.gains, strict=True))


@dataclass(frozen=True)
class TrainingSet:
    """All lists, the skills that they name, and the near-duplicate cluster of each skill that has a near-duplicate.

    Windows of skills have keys of their own (`on_best_windows`).
    """

    lists: tuple[TrainingList, ...]
    skills: Mapping[str, Skill]
    clusters: Mapping[str, int] = field(default_factory=dict)


def load_training_set(source: ListsSource, near_duplicates: float | None = None) -> TrainingSet:
    """Read and check the tables. Skills whose bodies' Jaccard reaches `near_duplicates` share a cluster.

    Raises SkilltrainError for a list that cannot be trained on.
    """
    pool = {skill.skill_id: skill for skill in read_skills(source.pool)}
    lists = list[TrainingList]()
    for folder, weight in source.folders.items():
        lists += _lists_in(folder, source, weight, pool)
    _check_rejections(lists)
    used = sorted({skill_id for one in lists for skill_id in one.skill_ids})
    skills = {skill_id: pool[skill_id] for skill_id in used}
    clusters = made_by_first_rank(lambda: _clusters(skills, near_duplicates))
    return TrainingSet(tuple(lists), skills, clusters)


def _check_rejections(lists: Sequence[TrainingList]) -> None:
    """Raise SkilltrainError for a skill that one list rejects and another, of the same text, calls an answer."""
    answers: dict[str, set[str]] = {}
    for one in lists:
        answers.setdefault(one.query, set()).update(one.positives)
    for one in lists:
        for skill_id, verdict in zip(one.skill_ids, one.verdicts, strict=True):
            if verdict is Verdict.REJECTED and skill_id in answers[one.query]:
                what = f"rejects skill {skill_id!r}, which answers the same text in another list"
                raise SkilltrainError(
                    what, where=f"the list of query {one.query_id!r}", fix="judge the text once"
                )


def on_best_windows(data: TrainingSet, settings: EncoderSettings) -> TrainingSet:
    """`data` whose lists name each skill by the window of its body that BM25 likes best for the query.

    Terms weigh as they do among the windows of all skills of the lists.
    """
    if settings.chunks.windows == 1:
        return data
    shown = settings.template.skill
    windows = {
        skill_id: shown.windows(skill, settings.chunks) for skill_id, skill in data.skills.items()
    }
    texts = [shown.render(window) for of_skill in windows.values() for window in of_skill]
    index, starts = (
        BM25Index(texts),
        dict(zip(windows, starts_of([*map(len, windows.values())]), strict=False)),
    )
    skills, lists = dict(data.skills), list[TrainingList]()
    for one in track(data.lists, "choosing windows", len(data.lists)):
        scores, keys = index.scores(one.query), list[str]()
        for skill_id in one.skill_ids:
            start, of_skill = starts[skill_id], windows[skill_id]
            best = int(scores[start : start + len(of_skill)].argmax())
            keys.append(f"{skill_id}{_NUL}{best}" if best else skill_id)
            skills[keys[-1]] = of_skill[best]
        lists.append(replace(one, skill_ids=tuple(keys)))
    return replace(data, lists=tuple(lists), skills=skills)


def _clusters(skills: Mapping[str, Skill], near_duplicates: float | None) -> dict[str, int]:
    """Return the cluster of each skill that has near-duplicates among `skills`, by skill id."""
    if near_duplicates is None:
        return {}
    clusters = near_duplicate_clusters([*skills.values()], near_duplicates)
    sizes = Counter(clusters[skill_id] for skill_id in skills)
    return {skill_id: clusters[skill_id] for skill_id in skills if sizes[clusters[skill_id]] > 1}


def _lists_in(
    folder: Path, source: ListsSource, weight: float, pool: Mapping[str, Skill]
) -> list[TrainingList]:
    texts = {row["query_id"]: row["text"] for row in read_table(folder, QUERIES).to_pylist()}
    known = read_verdicts(folder)
    worth = {
        verdict: gain - source.gains[Verdict.IRRELEVANT] for verdict, gain in source.gains.items()
    }
    found = list[TrainingList]()
    for row in read_table(folder, LISTS).to_pylist()[: source.max_lists]:
        if fault := next(_faults(row, texts, worth), None):
            raise SkilltrainError(f"the list of query {row['query_id']!r} {fault}", where=folder)
        query_id, skill_ids, scores = (
            row["query_id"],
            tuple(row["skill_ids"]),
            row["teacher_scores"],
        )
        verdicts = tuple(map(Verdict, row["verdicts"]))
        judged = [*known.get(query_id, {}).items(), *zip(skill_ids, verdicts, strict=True)]
        positives = frozenset(
            skill_id for skill_id, verdict in judged if verdict in POSITIVE and worth[verdict] > 0
        )
        gains, taught = (
            tuple(worth[verdict] for verdict in verdicts),
            None if scores is None else tuple(scores),
        )
        found.append(
            TrainingList(
                query_id, texts[query_id], skill_ids, gains, positives, taught, weight, verdicts
            )
        )
    if not found:
        raise SkilltrainError("holds no list to train on", where=folder)
    if missing := sorted({skill_id for one in found for skill_id in one.skill_ids} - pool.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SkilltrainError(
            f"skill {missing[0]!r}{more} of {folder} is not in the pool", where=source.pool
        )
    return found


def _faults(row: dict, texts: Mapping[str, str], gains: Mapping[Verdict, float]) -> Iterator[str]:
    """What keeps a list from being trained on; each is looked for only where there is none before it."""
    skill_ids, verdicts, scores = row["skill_ids"], row["verdicts"], row["teacher_scores"]
    if row["query_id"] not in texts:
        yield "has no query text"
    for others, name in ((verdicts, "verdicts"), (scores, "teacher scores")):
        if others is not None and len(others) != len(skill_ids):
            yield f"holds {len(skill_ids)} skills, but {len(others)} {name}"
    if len(set(skill_ids)) < len(skill_ids):
        yield f"holds skill {Counter(skill_ids).most_common(1)[0][0]!r} twice"
    if unknown := sorted(set(verdicts) - set(Verdict)):
        yield f"holds '{unknown[0]}', which is no verdict; choose from {', '.join(Verdict)}"
    if any(
        map(math.isinf, scores or ())
    ):  # NaN stands for a candidate that the teacher has not scored
        yield "holds an infinite teacher score"
    if not any(verdict in POSITIVE and gains[verdict] > 0 for verdict in verdicts):
        yield "holds no positive"
    if len({gains[verdict] for verdict in verdicts}) == 1:
        yield "holds no negative"
