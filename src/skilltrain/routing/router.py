"""A router: a pool and a list of rankers, opened once, that answers tasks in plain words with skills, or with none."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from skilltrain.data.pool.read import skill_file
from skilltrain.data.screening import Flag, screen
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Ranking, Rankings, Skill
from skilltrain.retrieval.admit import Admit
from skilltrain.retrieval.api import ApiConfig
from skilltrain.retrieval.cascade import SystemConfig, check_systems, keeps_of
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.expand import ExpandConfig
from skilltrain.retrieval.late import Late
from skilltrain.retrieval.lexical import BM25Index, Lexical, LexicalConfig
from skilltrain.retrieval.nearest import ChunkVectors, Encoders, VectorRanker
from skilltrain.retrieval.rankers import Fuse, FuseConfig, Ranker, RankerConfig, key_of, leg_name, open_ranker, parts_of
from skilltrain.retrieval.rerank import Rerank
from skilltrain.retrieval.saved import Saved
from skilltrain.retrieval.select import Select
from skilltrain.routing.confidence import Evidence
from skilltrain.routing.index import Index, generation, write_index
from skilltrain.texts import clean_text

MAX_CHARS = 10_000
"""Characters of a task that are read."""
_DEPTH = 20  # skills that are ranked at least, so that a probability does not depend on how many are asked for
_SCREENED, _ASKED = 4096, 64  # skills and tasks that are remembered: flags of the one, vectors of the other
_MAX_TERMS = 8


@dataclass(frozen=True)
class Placed:
    """Where a ranker put a skill, by which score of its own. Ranks count from 1."""

    ranker: str
    rank: int
    score: float


@dataclass(frozen=True)
class Why:
    """Why a skill was answered: where each ranker put it, the task's words that it holds, best first, and its window
    nearest to the task (start and end in characters of its body) where an encoder sees several.
    """

    placed: tuple[Placed, ...]
    terms: tuple[str, ...]
    window: tuple[int, int] | None


@dataclass(frozen=True)
class RoutedSkill:
    """One skill of an answer. `path` is its SKILL.md, if that can be found; `probability` that the skill serves the
    task, if the router is calibrated; `flags` are what the safety screening finds. All of its texts are untrusted.
    """

    rank: int
    skill_id: str
    name: str
    description: str
    path: Path | None
    score: float
    probability: float | None
    why: Why
    flags: tuple[Flag, ...]


@dataclass(frozen=True)
class Answer:
    """The best skills for a task, best first.

    `fits` is False where no skill serves the task, as far as the calibration can tell. `num_likely` is how many of the
    first skills hold one that serves it, at the calibration's level (conformal prediction); None without one. There may
    be more of them than in `skills`.
    """

    skills: tuple[RoutedSkill, ...]
    fits: bool
    num_likely: int | None


@dataclass(frozen=True)
class Traced:
    """What each ranker made of a task (a leg of `fuse` by its name), and the last ranking."""

    legs: Mapping[str, Ranking]
    ranking: Ranking

    def evidence(self) -> Evidence:
        """What a calibration looks at."""
        tops = {name: max((score for _, score in ranking), default=0.0) for name, ranking in self.legs.items()}
        return Evidence([score for _, score in self.ranking], tops)


@dataclass(frozen=True)
class _Opened:
    """A pool and the rankers over it, which change together. `models` are what stays open when the pool changes."""

    system: SystemConfig
    skills: Mapping[str, Skill]
    pool: Path | None
    index: Index | None
    models: dict[str, Any]
    parts: dict[str, Ranker] = field(default_factory=dict)

    @cached_property
    def rankers(self) -> list[Ranker]:
        """One for each ranker of the system."""
        return [open_ranker(ranker, (), self.parts) for ranker in self.system.rankers]

    @cached_property
    def names(self) -> dict[str, str]:
        """Key of a ranker → its name, with a number from the second of one name."""
        names, counts = dict[str, str](), Counter[str]()
        for part in parts_of(self.system.rankers):
            if not isinstance(part, FuseConfig) and key_of(part) not in names:
                counts[leg_name(part)] += 1
                again = counts[leg_name(part)]
                names[key_of(part)] = f"{leg_name(part)} {again}" if again > 1 else leg_name(part)
        return names


class Router:
    """Answers tasks over one pool; its models stay open. Any number of threads may ask it."""

    def __init__(self, skills: Sequence[Skill], system: SystemConfig, pool: Path | None = None) -> None:
        """Open the rankers of `system` for a pool in memory; its files are looked for in the folder `pool`.

        Raises SkilltrainError for an empty pool and for a model that is missing.
        """
        if not skills:
            raise SkilltrainError("the pool is empty")
        self._now = _opened(_Opened(system, {skill.skill_id: skill for skill in skills}, pool, None, {}))

    @classmethod
    def load(cls, folder: Path | str) -> "Router":
        """The router that `skilltrain fit` or `skilltrain index` wrote into `folder`.

        Raises SkilltrainError where there is none, where it is not whole, and where one of its models has changed.
        """
        router = cls.__new__(cls)
        index = Index.open(Path(folder))
        index.check_models()
        router._now = _open_index(index, {})
        return router

    @property
    def skills(self) -> Mapping[str, Skill]:
        """skill_id → skill, in the order of the pool."""
        return self._now.skills

    @property
    def system(self) -> SystemConfig:
        """What ranks."""
        return self._now.system

    @property
    def parts(self) -> Mapping[str, Ranker]:
        """The rankers by `key_of`, for whoever asks an encoder or a reranker alone."""
        return self._now.parts

    def route(self, task: str, k: int = 5) -> Answer:
        """The `k` best skills for `task`, of which the first 10,000 characters are read.

        Raises SkilltrainError for a task without a visible character.
        """
        now = self._now
        query = _query(task)
        traced = _trace(now, query, k, ())
        calibration = now.index.record.calibration if now.index else None
        evidence = traced.evidence()
        found = [*calibration.calibrator.probabilities(evidence).tolist()] if calibration else None
        ranks = range(1, min(k, len(traced.ranking)) + 1)
        skills = tuple(_routed(now, query, traced, rank, found[rank - 1] if found else None) for rank in ranks)
        if calibration is None:
            return Answer(skills, bool(skills), None)
        return Answer(skills, calibration.calibrator.fits(evidence), calibration.calibrator.num_likely(evidence))

    def trace(self, task: str, without: Collection[str] = ()) -> Traced:
        """What each ranker makes of a task, as if the skills `without` were not in the pool."""
        return _trace(self._now, _query(task), _DEPTH, without)

    def update(self, skills: Sequence[Skill]) -> dict[str, int]:
        """Answer with these skills from now on, here and in whoever opens the folder again; counts of what changed.

        Only new texts are encoded. Tasks are answered meanwhile, with the skills before. Raises SkilltrainError for a
        router that is in no folder, and where another process writes it.
        """
        index = self._now.index
        if index is None:
            raise SkilltrainError("this router is in no folder", fix="make one with skilltrain index")
        found = write_index(index.folder.parent, index.system, skills, self._now.models, index.pool)
        self.refresh()
        return found

    def refresh(self) -> bool:
        """Take up what another process has written into the router's folder since; whether there was anything."""
        index = self._now.index
        if index is None or generation(index.folder.parent) == index.folder:
            return False
        newer, models = Index.open(index.folder.parent), self._now.models
        if newer.record.models != index.record.models or newer.record.rankers != index.record.rankers:
            newer.check_models()
            models = {}
        self._now = _open_index(newer, models)
        return True


def _open_index(index: Index, models: dict[str, Any]) -> _Opened:
    """The rankers over an index; those of `models` are not opened again."""
    return _opened(_Opened(index.system, index.skills, index.pool, index, models))


def _opened(now: _Opened) -> _Opened:
    """`now` with its rankers opened."""
    check_systems([now.system])
    for config in parts_of(now.system.rankers):
        if not isinstance(config, FuseConfig | ExpandConfig) and key_of(config) not in now.parts:
            now.parts[key_of(config)] = _open_part(config, now)
    return now


def _open_part(config: RankerConfig, now: _Opened) -> Ranker:
    """A ranker over the pool, from the index where there is one."""
    assert not isinstance(config, FuseConfig | ExpandConfig), "these are made of others"
    key = key_of(config)
    stored = now.index.parts.get(key) if now.index else None
    if isinstance(config, LexicalConfig):
        return Lexical([*now.skills], stored) if isinstance(stored, BM25Index) else config.open([*now.skills.values()])
    if key not in now.models:
        now.models[key] = config.encoders() if isinstance(config, DenseConfig | ApiConfig) else config.open(())
    model: Encoders | Late | Rerank | Select | Admit | Saved = now.models[key]
    if isinstance(model, Encoders):
        encoders = replace(model, queries=_remembered(model))
        found = stored if isinstance(stored, ChunkVectors) else encoders.skills([*now.skills.values()])
        return VectorRanker([*now.skills], found, encoders.queries)
    if isinstance(model, Saved):
        raise SkilltrainError("rankings that were made before answer no new task", where="rankers, kind saved")
    return model.over(now.skills)


def _remembered(encoders: Encoders) -> Callable[[Sequence[str]], Float32[np.ndarray, "query dim"]]:
    """Vectors of tasks, those of the last ones kept: two rankers of a router may ask for the same."""
    one = lru_cache(_ASKED)(lambda text: encoders.queries([text])[0])
    return lambda texts: np.stack([one(text) for text in texts])


def _query(task: str) -> Query:
    text = clean_text(task[:MAX_CHARS])
    if not any(letter.isprintable() and not letter.isspace() for letter in text):
        raise SkilltrainError("the request is empty")
    return Query("request", text, kind="", origin="", split="")


def _trace(now: _Opened, query: Query, k: int, without: Collection[str]) -> Traced:
    """What the rankers make of a query; of the first, skills `without` are left out before it keeps any."""
    legs: dict[str, Ranking] = {}
    found: Rankings | None = None
    for number, (ranker, keep) in enumerate(zip(now.rankers, keeps_of(now.system, max(k, _DEPTH)), strict=True)):
        if isinstance(ranker, Fuse):
            found_by = [_without(leg[query.query_id], without) for leg in ranker.find([query], found)]
            ranking = ranker.join(found_by)[:keep]
            named = [*zip(map(key_of, ranker.config.of), found_by, strict=True)]
        else:
            more = len(without) if found is None else 0
            ranking = _without(ranker.rank([query], found, keep + more)[query.query_id], without)[:keep]
            named = [(key_of(now.system.rankers[number]), ranking)]
        for key, leg in named:
            legs.setdefault(now.names[key], leg)  # its places in the pool say more than those among a few candidates
        found = {query.query_id: ranking}
    return Traced(legs, found[query.query_id] if found else [])


def _without(ranking: Ranking, left_out: Collection[str]) -> Ranking:
    return [pair for pair in ranking if pair[0] not in left_out] if left_out else ranking


def _routed(now: _Opened, query: Query, traced: Traced, rank: int, probability: float | None) -> RoutedSkill:
    skill_id, score = traced.ranking[rank - 1]
    skill = now.skills[skill_id]
    placed = [
        Placed(name, place, found)
        for name, leg in traced.legs.items()
        for place, (other, found) in enumerate(leg, 1)
        if other == skill_id
    ]
    terms, window = _details(now, query, skill)
    path = skill_file(now.pool, skill_id) if now.pool else None
    why = Why(tuple(placed), tuple(terms[:_MAX_TERMS]), window)
    # Screened here, because the flags beside a stranger's pool may be anything.
    flags = _flags(skill)
    return RoutedSkill(rank, skill_id, skill.name, skill.description, path, score, probability, why, flags)


def _details(now: _Opened, query: Query, skill: Skill) -> tuple[list[str], tuple[int, int] | None]:
    """(the query's words that BM25 finds in a skill, its window nearest to the query)."""
    terms: list[str] = []
    window: tuple[int, int] | None = None
    for key, ranker in now.parts.items():
        if isinstance(ranker, Lexical):
            terms = terms or ranker.index.matched(query.text, ranker.places[skill.skill_id])
        elif isinstance(ranker, VectorRanker) and (number := ranker.best_chunk(query.text, skill.skill_id)) is not None:
            place = now.models[key].window
            window = window or (place(skill, number) if place else None)
    return terms, window


@lru_cache(_SCREENED)
def _flags(skill: Skill) -> tuple[Flag, ...]:
    return tuple(screen(skill))
