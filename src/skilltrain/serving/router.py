"""A router: a pool and a list of rankers, opened once, that answers tasks in plain words with skills, or with none."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from skilltrain.data.pool.read import find_skill_file, skill_folders
from skilltrain.data.screening import Flag, screen
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Ranker, Ranking, Skill
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.executor import OpenRankers, RankerRun, run_rankers, with_keeps
from skilltrain.retrieval.lexical import BM25Index
from skilltrain.retrieval.nearest import PoolRanker, VectorIndex
from skilltrain.retrieval.rankers import parts_of
from skilltrain.serving.answer import Answer, Explanation, RoutedSkill, Trace
from skilltrain.serving.index import Contents, Held, Index, check_servers
from skilltrain.serving.indexing import check_rankers, open_model, write_index
from skilltrain.texts import clean_text

_MAX_CHARS = 10_000  # of a task that are read
_DEPTH = 20  # skills that are ranked at least, so that a probability does not depend on how many are asked for
_SCREENED, _ASKED = (
    4096,
    64,
)  # skills and tasks that are remembered: flags of the one, vectors of the other
_MAX_TERMS = 8


@dataclass(frozen=True)
class _Opened:
    """A pool and the rankers over it by `key`, which change together; `models` stay open when the pool changes."""

    held: Held
    names: Mapping[str, str]
    parts: dict[str, Ranker]
    models: dict[str, Any]

    @property
    def index(self) -> Index | None:
        return self.held if isinstance(self.held, Index) else None

    def trace(self, query: Query, k: int, without: Collection[str] = ()) -> Trace:
        """What the rankers make of a query; skills `without` are left out before a ranker keeps any."""
        places: dict[str, Ranking] = {}

        def observe(run: RankerRun) -> None:
            for leg, rankings in zip(run.config.legs, run.by_leg, strict=True):
                # Places in the pool say more than those among a few candidates.
                places.setdefault(self.names[leg.key], rankings[query.query_id])

        rankers = with_keeps(self.held.system.rankers, max(k, _DEPTH))
        pool = OpenRankers((), self.parts)
        rankings = run_rankers(rankers, [query], None, pool, observe, without)
        ranking = rankings[query.query_id][: rankers[-1].keep]
        most: dict[str, float] = {}
        for key, part in self.parts.items():
            if isinstance(part, PoolRanker) and isinstance(part.index, BM25Index):
                most[self.names[key]] = part.index.highest_possible_score(query.text)
        return Trace(places, most, ranking)

    def routed(
        self, query: Query, traced: Trace, rank: int, probability: float | None
    ) -> RoutedSkill:
        """The skill that came out at a rank, and why."""
        skill_id, score = traced.ranking[rank - 1]
        skill = self.held.skills[skill_id]
        terms, window = list[str](), None
        for key, part in self.parts.items():
            if not isinstance(part, PoolRanker):
                continue
            index, position = part.index, part.position_by_id[skill_id]
            if isinstance(index, BM25Index) and not terms:
                terms = index.matching_words(query.text, position)[:_MAX_TERMS]
            elif isinstance(index, VectorIndex) and window is None:
                number = index.best_chunk(query.text, position)
                window = (
                    None
                    if number is None
                    else self.models[key].model.settings.window(skill, number)
                )
        why = Explanation(traced.ranker_scores(skill_id), tuple(terms), window)
        path, flags = self.screened(skill)
        return RoutedSkill(
            rank, skill_id, skill.name, skill.description, path, score, probability, why, flags
        )

    def screened(self, skill: Skill) -> tuple[Path | None, tuple[Flag, ...]]:
        """(a skill's SKILL.md, what is found in it and beside it: flags beside a stranger's pool may be anything)."""
        path = find_skill_file(self.held.folders, skill.skill_id)
        return path, _flags(skill, path and path.parent)


class Router:
    """Answers tasks over one pool; its models stay open, and any number of threads may ask it."""

    _allow_servers: Collection[str] = ()

    def __init__(
        self, skills: Sequence[Skill], system: SystemConfig, pool: Path | None = None
    ) -> None:
        """Open the rankers of `system` over `skills`, whose files are looked for in the folder `pool`.

        Raises SkilltrainError for an empty pool and for a model that is missing.
        """
        if not skills:
            raise SkilltrainError("empty-pool", "the pool is empty")
        folders = skill_folders(pool) if pool else []
        self._now = _open(Held(system, {skill.skill_id: skill for skill in skills}, folders), {})

    @classmethod
    def load(cls, folder: Path | str, allow_servers: Collection[str] = ()) -> "Router":
        """The router that `fit` or `index` wrote into `folder`, which must be whole, its models unchanged.

        Its rankers may send texts to the servers in `allow_servers`. Raises SkilltrainError where there is no router,
        where it is not whole, where one of its models has changed, and where its rankers name another server.
        """
        index = Index.open(Path(folder))
        check_servers(index.system, allow_servers, index.folder.parent)
        router = cls.__new__(cls)
        router._allow_servers = allow_servers
        router._now = _open(index, {})
        return router

    @property
    def skills(self) -> Mapping[str, Skill]:
        """skill_id → skill, in the order of the pool."""
        return self._now.held.skills

    @property
    def index(self) -> Index | None:
        """What lies in the router's folder; None for a router in no folder."""
        return self._now.index

    @property
    def parts(self) -> Mapping[str, Ranker]:
        """The rankers by `key`, for whoever asks an encoder or a reranker alone."""
        return self._now.parts

    def flags(self, skill: Skill) -> tuple[Flag, ...]:
        """What the safety screening finds in one of the skills."""
        return self._now.screened(skill)[1]

    def route(self, task: str, k: int = 5) -> Answer:
        """The `k` best skills for `task`, of which the first 10,000 characters are read.

        Raises SkilltrainError for a task without a visible character.
        """
        now, query = self._now, _query(task)
        traced = now.trace(query, k)
        calibration = now.index and now.index.record.calibration
        calibrator = calibration and calibration.calibrator
        found = (
            calibrator.probabilities(traced).tolist()
            if calibrator
            else [None] * len(traced.ranking)
        )
        skills = tuple(
            now.routed(query, traced, rank, sure) for rank, sure in enumerate(found[:k], 1)
        )
        if calibrator is None:
            return Answer(skills, bool(skills), None)
        return Answer(skills, calibrator.fits(traced), calibrator.num_likely(traced))

    def trace(self, task: str, without: Collection[str] = ()) -> Trace:
        """What each ranker makes of a task, as if the skills `without` were not in the pool."""
        return self._now.trace(_query(task), _DEPTH, without)

    def update(self, skills: Sequence[Skill] | Contents) -> dict[str, int]:
        """Answer with these skills from now on, as will whoever opens the folder; how many are new, changed and gone.

        Only new texts are encoded. Raises SkilltrainError for a router in no folder, where another process writes, and
        for contents of an index that another process has replaced.
        """
        if not isinstance(skills, Contents):
            self.refresh()
        now = self._now
        if now.index is None:
            raise SkilltrainError(
                "no-router", "this router is in no folder", fix="make one with skilltrain index"
            )
        index = now.index
        contents = skills if isinstance(skills, Contents) else index.contents(skills)
        found = write_index(index.folder.parent, index.system, contents, now.models, before=index)
        self.refresh()
        return found

    def refresh(self) -> bool:
        """Take up what has been written into the router's folder since it was opened; whether there was anything.

        Raises SkilltrainError as `load` does; the router then answers as before.
        """
        now = self._now
        if now.index is None or now.index.is_current():
            return False
        newer = Index.open(now.index.folder.parent)
        check_servers(newer.system, self._allow_servers, newer.folder.parent)
        self._now = _open(
            newer, now.models if newer.record.models == now.index.record.models else {}
        )
        return True


def _open(held: Held, models: dict[str, Any]) -> _Opened:
    """The rankers over a pool, and over what an index holds of it; `models` get what has to be opened."""
    stored, router = (held.parts, held.folder.parent) if isinstance(held, Index) else ({}, None)
    if isinstance(held, Index) and not models:
        held.check_models()
    check_rankers(held.system)
    names, parts = dict[str, str](), dict[str, Ranker]()
    counts: Counter[str] = Counter()
    for config in parts_of(held.system.rankers):
        key, name = config.key, config.label
        if key in names:
            continue
        counts[name] += 1
        names[key] = f"{name} {counts[name]}".removesuffix(" 1")
        if not config.is_composed:
            kept = [stored[key]] if key in stored else []
            parts[key] = _remembering(open_model(config, models, router).over(held.skills, *kept))
    return _Opened(held, names, parts, models)


def _remembering(ranker: Any) -> Ranker:
    """The same ranker, which keeps the last tasks' vectors if it makes any: they are asked for again, to say why."""
    if not isinstance(ranker, PoolRanker) or not isinstance(ranker.index, VectorIndex):
        return ranker
    encode = ranker.index.encode
    one = lru_cache(_ASKED)(lambda text: encode([text])[0])
    return replace(
        ranker,
        index=replace(ranker.index, encode=lambda texts: np.stack([one(text) for text in texts])),
    )


def _query(task: str) -> Query:
    text = clean_text(task[:_MAX_CHARS])
    if not any(letter.isprintable() and not letter.isspace() for letter in text):
        raise SkilltrainError("empty-text", "the request is empty")
    return Query("request", text, kind="", origin="", split="")


@lru_cache(_SCREENED)
def _flags(skill: Skill, folder: Path | None) -> tuple[Flag, ...]:
    """The first flag of each rule."""
    flags: dict[str, Flag] = {}
    for flag in screen(skill, folder):
        flags.setdefault(flag.rule, flag)
    return tuple(flags.values())
