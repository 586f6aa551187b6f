"""Reads lists of candidates for training, checks them, and assigns gains."""

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, FiniteFloat, field_validator

from skilltrain.config import Config, InputPath, InputPaths
from skilltrain.data.near_duplicates import near_duplicate_clusters
from skilltrain.distributed import made_by_first_rank
from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import EncoderSettings
from skilltrain.records import POSITIVE, Skill, Verdict
from skilltrain.retrieval.lexical import BM25Index
from skilltrain.tables import QUERIES, read_lists, read_skills, read_table, read_verdicts
from skilltrain.terminal import track

# Separates the skill id and the number in the key of a window. No table has this character.
_NUL = "\0"


def skill_of(key: str) -> str:
    """Return the skill id of a candidate's key, which may be the key of a window."""
    return key.partition(_NUL)[0]


class ListsSource(Config):
    """Lists to train on, and the gain of each verdict."""

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
        default=None,
        ge=1,
        description="use only so many lists of each folder, the first by query id",
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
        """Weights by folder: how often an epoch contains each list of the folder, on average."""
        return self.lists if isinstance(self.lists, dict) else {self.lists: 1.0}

    @field_validator("lists")
    @classmethod
    def _check_weights(cls, lists: Path | dict[Path, float]) -> Path | dict[Path, float]:
        """Check that there is a folder, and that all weights are positive."""
        # `lists` is one folder, or the weight of each of several folders.
        if lists == {}:
            raise ValueError("no folder is named")
        weights = lists if isinstance(lists, dict) else {}
        for folder, weight in weights.items():
            if weight <= 0:
                raise ValueError(f"the weight of {folder} must be > 0, found {weight:g}")
        return lists

    @field_validator("gains")
    @classmethod
    def _check_gains(cls, gains: dict[Verdict, float]) -> dict[Verdict, float]:
        """Check that every verdict has a gain, and that a required skill is worth most."""
        missing = sorted(set(Verdict) - gains.keys())
        if missing:
            raise ValueError(f"no value for '{missing[0]}'")
        if gains[Verdict.REQUIRED] <= max(gains[Verdict.IRRELEVANT], gains[Verdict.REJECTED]):
            raise ValueError("required must be worth more than irrelevant and rejected")
        return gains


@dataclass(frozen=True)
class TrainingList:
    """One query with its candidates.

    Attributes:
        query_id: Id of the query.
        query: Text of the query.
        skill_ids: Keys of the candidates: skill ids, or keys of windows (`on_best_windows`).
        gains: Gain of each candidate. An irrelevant skill has 0.
        positives: All skills that are known to answer the query, in the list or not.
        teacher_scores: Score of each candidate by a teacher, NaN if the teacher has not scored it.
        weight: How often an epoch contains this list, on average.
        verdicts: Verdict of each candidate.
        origin: Who wrote the query.
    """

    query_id: str
    query: str
    skill_ids: tuple[str, ...]
    gains: tuple[float, ...]
    positives: frozenset[str]
    teacher_scores: tuple[float, ...] | None = None
    weight: float = 1.0
    verdicts: tuple[Verdict, ...] = ()
    origin: str = ""

    def with_negatives(self, num_negatives: int, rng: np.random.Generator) -> "TrainingList":
        """Return the list with all its positives, and a random sample of its negatives.

        Args:
            num_negatives: Number of negatives. A list with fewer keeps all of them.
            rng: Source of random numbers.
        """
        # First keep the positives only. All other candidates are negatives at this point.
        is_kept = np.array(self.is_positive)  # [candidate]
        negatives = np.flatnonzero(~is_kept)  # positions in the list
        is_kept[rng.permutation(negatives)[:num_negatives]] = True  # a random sample of them

        # These fields have one value per candidate. Teacher scores may be None.
        columns: dict[str, Any] = {}
        for name in ("skill_ids", "gains", "teacher_scores", "verdicts"):
            values = getattr(self, name)
            if values is not None:
                columns[name] = tuple(compress(values, is_kept))
        return replace(self, **columns)

    @property
    def is_positive(self) -> tuple[bool, ...]:
        """Whether each candidate is a known answer with a positive gain."""
        return tuple(
            skill_of(key) in self.positives and gain > 0
            for key, gain in zip(self.skill_ids, self.gains, strict=True)
        )


@dataclass(frozen=True)
class TrainingSet:
    """All lists, and the skills of their candidates.

    Attributes:
        lists: The lists.
        skills: Skills by key. A window has its own key and skill (`on_best_windows`).
        clusters: Number of the near-duplicate cluster by skill id, for skills that have
            near-duplicates.
    """

    lists: tuple[TrainingList, ...]
    skills: Mapping[str, Skill]
    clusters: Mapping[str, int] = field(default_factory=dict)


def load_training_set(source: ListsSource, min_similarity: float | None = None) -> TrainingSet:
    """Read and check the lists and their skills.

    Args:
        source: Folders of the pool and the lists.
        min_similarity: Skills whose bodies are at least this similar (Jaccard) are near-duplicates
            and share a cluster. None: there are no clusters.

    Raises:
        SkilltrainError: A list cannot be used for training.
    """
    pool = {skill.skill_id: skill for skill in read_skills(source.pool)}
    lists: list[TrainingList] = []
    for folder, weight in source.folders.items():
        lists += _read_lists(folder, source, weight, pool)
    _check_rejected_skills(lists)

    skills = {skill_id: pool[skill_id] for skill_id in sorted(_candidate_ids(lists))}
    # Only the first rank looks for clusters, and sends them to the other ranks.
    clusters = made_by_first_rank(lambda: _clusters(skills, min_similarity))
    return TrainingSet(tuple(lists), skills, clusters)


def _candidate_ids(lists: Sequence[TrainingList]) -> set[str]:
    """Return the skill ids of all candidates."""
    skill_ids: set[str] = set()
    for training_list in lists:
        skill_ids.update(training_list.skill_ids)
    return skill_ids


def _check_rejected_skills(lists: Sequence[TrainingList]) -> None:
    """Check that all lists with the same query text agree on the skills that answer it.

    Raises:
        SkilltrainError: A skill has the verdict "rejected" in one list, and is a positive in
            another list with the same query text.
    """
    # Lists of different queries may have the same text. Collect the answers of each text.
    answers_by_text: dict[str, set[str]] = {}
    for training_list in lists:
        answers = answers_by_text.setdefault(training_list.query, set())
        answers.update(training_list.positives)

    for training_list in lists:
        answers = answers_by_text[training_list.query]
        candidates = zip(training_list.skill_ids, training_list.verdicts, strict=True)
        for skill_id, verdict in candidates:
            if verdict is Verdict.REJECTED and skill_id in answers:
                fault = f"rejects skill {skill_id!r}, which answers the same text in another list"
                where = f"the list of query {training_list.query_id!r}"
                raise SkilltrainError("invalid-list", fault, where=where, fix="judge the text once")


def on_best_windows(data: TrainingSet, settings: EncoderSettings) -> TrainingSet:
    """Replace each candidate by the window of its body that matches the query best.

    An encoder that reads only the start of a long skill would not see the part that the query is
    about. So the body is divided into windows, and the window with the highest BM25 score is
    chosen. The BM25 index contains the windows of all skills.

    Args:
        data: Lists of whole skills.
        settings: The encoder's settings. They hold its template, and the number of windows.

    Returns:
        A training set in which each window has its own key and skill. The first window of a skill
        has the skill's id as its key.
    """
    if settings.chunks.windows == 1:
        return data  # the only window is the start of the skill

    # Index the windows of all skills.
    template = settings.template.skill
    texts: list[str] = []
    windows_by_skill = {}
    start_by_skill: dict[str, int] = {}  # position of the first window in `texts`
    for skill_id, skill in data.skills.items():
        windows = template.windows(skill, settings.chunks)
        windows_by_skill[skill_id] = windows
        start_by_skill[skill_id] = len(texts)
        texts += [template.render(window) for window in windows]
    index = BM25Index(texts)

    # Choose a window for each candidate of each list. Window 0 takes the key of the whole skill,
    # and other windows are added under keys of their own.
    skills = dict(data.skills)
    lists: list[TrainingList] = []
    for training_list in track(data.lists, "choosing windows", len(data.lists)):
        scores = index.scores(training_list.query)  # [window of all skills]
        keys: list[str] = []
        for skill_id in training_list.skill_ids:
            windows = windows_by_skill[skill_id]
            start = start_by_skill[skill_id]
            end = start + len(windows)
            # Compare only the windows of this skill.
            best = int(scores[start:end].argmax())
            # _NUL is a character that no skill id has, so keys of windows are never ids of skills.
            key = f"{skill_id}{_NUL}{best}" if best else skill_id
            keys.append(key)
            skills[key] = windows[best]
        lists.append(replace(training_list, skill_ids=tuple(keys)))
    return replace(data, lists=tuple(lists), skills=skills)


def _clusters(skills: Mapping[str, Skill], min_similarity: float | None) -> dict[str, int]:
    """Find clusters of near-duplicates.

    Args:
        skills: Skills by id.
        min_similarity: Smallest similarity (Jaccard) of near-duplicates. None: no clusters.

    Returns:
        Number of the cluster by skill id, for skills that have near-duplicates.
    """
    if min_similarity is None:
        return {}
    clusters = near_duplicate_clusters([*skills.values()], min_similarity)
    # Leave out clusters of a single skill.
    sizes = Counter(clusters[skill_id] for skill_id in skills)
    return {skill_id: clusters[skill_id] for skill_id in skills if sizes[clusters[skill_id]] > 1}


def _read_lists(
    folder: Path, source: ListsSource, weight: float, pool: Mapping[str, Skill]
) -> list[TrainingList]:
    """Read the lists of a folder, and check them.

    Args:
        folder: Folder of lists, queries and judgements.
        source: Gain of each verdict, and maximum number of lists.
        weight: Weight of each list.
        pool: Skills by id.

    Raises:
        SkilltrainError: A list cannot be used for training, or a skill is not in the pool.
    """
    queries = {row["query_id"]: row for row in read_table(folder, QUERIES).to_pylist()}
    verdicts_by_query = read_verdicts(folder)
    irrelevant_gain = source.gains[Verdict.IRRELEVANT]  # subtracted, so that it becomes 0
    gains = {verdict: gain - irrelevant_gain for verdict, gain in source.gains.items()}
    lists: list[TrainingList] = []
    for row in read_lists(folder)[: source.max_lists]:
        query_id = row["query_id"]
        fault = _fault_of(row, queries, gains)
        if fault:
            raise SkilltrainError(
                "invalid-list", f"the list of query {query_id!r} {fault}", where=folder
            )

        # Collect all skills that answer the query. Some may be judged, but no candidates.
        skill_ids = tuple(row["skill_ids"])
        verdicts = tuple(map(Verdict, row["verdicts"]))
        judgements = [*verdicts_by_query.get(query_id, {}).items()]
        judgements += zip(skill_ids, verdicts, strict=True)
        positives = set()
        for skill_id, verdict in judgements:
            if verdict in POSITIVE and gains[verdict] > 0:
                positives.add(skill_id)
        scores = row["teacher_scores"]
        lists.append(
            TrainingList(
                query_id,
                query=queries[query_id]["text"],
                skill_ids=skill_ids,
                gains=tuple(gains[verdict] for verdict in verdicts),
                positives=frozenset(positives),
                teacher_scores=None if scores is None else tuple(scores),
                weight=weight,
                verdicts=verdicts,
                origin=queries[query_id]["origin"],
            )
        )

    # Check that there are lists, and that the pool has all their skills.
    if not lists:
        raise SkilltrainError("no-list", "holds no list to train on", where=folder)
    missing = sorted(_candidate_ids(lists) - pool.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        fault = f"skill {missing[0]!r}{more} of {folder} is not in the pool"
        raise SkilltrainError("unknown-skill", fault, where=source.pool)
    return lists


def _fault_of(row: dict, query_ids: Container[str], gains: Mapping[Verdict, float]) -> str:
    """Return why a list cannot be used for training, or an empty string if it can.

    Args:
        row: A row of the table LISTS.
        query_ids: Ids of the queries whose text is known.
        gains: Gain of each verdict.
    """
    skill_ids = row["skill_ids"]
    verdicts = row["verdicts"]
    scores = row["teacher_scores"]
    if row["query_id"] not in query_ids:
        return "has no query text"
    if len(set(skill_ids)) < len(skill_ids):
        most_frequent = Counter(skill_ids).most_common(1)[0][0]
        return f"holds skill {most_frequent!r} twice"
    if scores and any(map(math.isinf, scores)):  # NaN is allowed: the candidate has no score
        return "holds an infinite teacher score"
    # A loss compares the scores of candidates, so it needs at least two.
    if scores and len(scores) - sum(map(math.isnan, scores)) < 2:
        return "holds fewer than two teacher scores"
    if not any(verdict in POSITIVE and gains[verdict] > 0 for verdict in verdicts):
        return "holds no positive"
    # If all gains are equal, no candidate is better than another.
    if len({gains[verdict] for verdict in verdicts}) == 1:
        return "holds no negative"
    return ""
