"""Answering tasks with skills.

A router has a pool and rankers over it. It is opened once and answers any number of tasks.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from skilltrain.arguments import wrong_argument
from skilltrain.data.pool.read import find_skill_file, read_pool
from skilltrain.data.screening import Flag, screen
from skilltrain.data.screening.findings import inherited_findings, move_findings
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Ranker, Ranking, Skill
from skilltrain.retrieval.cascade import system_of
from skilltrain.retrieval.executor import OpenRankers, RankerRun, run_rankers, with_keeps
from skilltrain.retrieval.lexical import BM25Index
from skilltrain.retrieval.nearest import PoolRanker, VectorIndex
from skilltrain.retrieval.rankers import flatten_rankers, name_rankers
from skilltrain.serving.answer import Answer, Calibrator, Explanation, RoutedSkill, Trace
from skilltrain.serving.filters import Filters
from skilltrain.serving.hub import local_router
from skilltrain.serving.index import Contents, Index, RouterState, check_servers
from skilltrain.serving.indexing import check_rankers, open_model, write_index
from skilltrain.texts import clean_text

_MAX_CHARS = 10_000  # of a task; the rest is not read
_MIN_DEPTH = 20  # at least so many skills are ranked, so that probabilities do not depend on `k`
_NUM_REMEMBERED_FLAGS = 4096  # skills
_NUM_REMEMBERED_VECTORS = 64  # tasks
_MAX_TERMS = 8  # of an explanation


@dataclass(frozen=True)
class _OpenPool:
    """A pool and the rankers over it. An update of the pool replaces all of it but `models`.

    Attributes:
        state: Rankers' settings and skills.
        index: The same as `state` if it was loaded from a router's folder, else None.
        labels: Name of each ranker by its `key`.
        rankers: Rankers over the pool by their `key`, without those that fuse others.
        models: Open models by the rankers' `key`.
    """

    state: RouterState
    index: Index | None
    labels: Mapping[str, str]
    rankers: dict[str, Ranker]
    models: dict[str, Any]

    @property
    def calibrator(self) -> Calibrator | None:
        """Calibrator of the index, if it has one."""
        calibration = self.index.record.calibration if self.index else None
        return calibration.calibrator if calibration else None

    def trace(self, query: Query, k: int, excluded_ids: Collection[str] = ()) -> Trace:
        """Rank the pool for a query, and record the ranking of every ranker.

        Args:
            query: Query to rank for.
            k: Number of skills to rank. At least `_MIN_DEPTH` are ranked.
            excluded_ids: Skills that are left out, as if the pool did not contain them.
        """
        ranking_by_label: dict[str, Ranking] = {}

        def observe(run: RankerRun) -> None:
            """Record the ranking of each leg. A ranker that fuses no others is its own only leg."""
            for leg, rankings in zip(run.config.legs, run.by_leg, strict=True):
                matches = leg.matches(rankings[query.query_id])
                # A leg may run again on a few candidates. Keep its first ranking, of the pool.
                ranking_by_label.setdefault(self.labels[leg.key], matches)

        # Rankers without a setting `keep` keep enough skills for `k`.
        configs = with_keeps(self.state.system.rankers, max(k, _MIN_DEPTH))
        # All rankers are open already, so OpenRankers needs no skills to open them.
        open_rankers = OpenRankers(skills=(), opened=self.rankers)
        rankings = run_rankers(
            configs,
            [query],
            candidates=None,  # the first ranker ranks the whole pool
            pool=open_rankers,
            observe=observe,
            excluded_ids=excluded_ids,
        )
        # The last ranker may return more skills than its `keep`.
        ranking = rankings[query.query_id][: configs[-1].keep]
        return Trace(ranking_by_label, self._highest_bm25_scores(query), ranking)

    def _highest_bm25_scores(self, query: Query) -> dict[str, float]:
        """Return the highest score that is possible for a query, by the label of a BM25 ranker."""
        max_scores: dict[str, float] = {}
        for key, ranker in self.rankers.items():
            if isinstance(ranker, PoolRanker) and isinstance(ranker.index, BM25Index):
                max_scores[self.labels[key]] = ranker.index.highest_possible_score(query.text)
        return max_scores

    def explain(self, query: Query, trace: Trace, skill: Skill) -> Explanation:
        """Explain why a skill was chosen for a query.

        The explanation has the rank and the score by each ranker, the words of the query that the
        skill contains, and the part of its body that is most similar to the query.

        Args:
            query: The query.
            trace: Rankings of all rankers for the query.
            skill: The chosen skill.
        """
        terms: list[str] = []  # from the first BM25 index that has a word of the query
        window: tuple[int, int] | None = None  # from the first vector index with parts of bodies
        for key, ranker in self.rankers.items():
            if not isinstance(ranker, PoolRanker):
                continue  # it has no index that could explain
            index = ranker.index
            position = ranker.position_by_id[skill.skill_id]
            if isinstance(index, BM25Index) and not terms:
                terms = index.matching_words(query.text, position)[:_MAX_TERMS]
            elif isinstance(index, VectorIndex) and window is None:
                # A long body has several chunks, each with a vector. A body with one chunk has no
                # window.
                chunk = index.best_chunk(query.text, position)
                if chunk is not None:
                    window = self.models[key].model.settings.window(skill, chunk)
        return Explanation(trace.ranker_scores(skill.skill_id), tuple(terms), window)

    def routed_skill(
        self, query: Query, trace: Trace, rank: int, probability: float | None
    ) -> RoutedSkill:
        """Return the skill at a rank of the final ranking, with its explanation and flags.

        Args:
            query: The query.
            trace: Rankings of all rankers for the query.
            rank: Rank of the skill, counted from 1.
            probability: Probability that the skill serves the query; None without a calibration.
        """
        skill_id, score = trace.ranking[rank - 1]
        skill = self.state.skills[skill_id]
        path = find_skill_file(skill)
        return RoutedSkill(
            rank,
            skill_id,
            skill.name,
            skill.description,
            path=path,
            folder=path.parent if path else None,
            score=score,
            probability=probability,
            why=self.explain(query, trace, skill),
            flags=self.flags(skill, path),
        )

    def flags(self, skill: Skill, skill_file: Path | None) -> tuple[Flag, ...]:
        """Return the first flag of each rule for a skill, and the finding of a chat model, if any.

        Args:
            skill: The skill.
            skill_file: Its SKILL.md, whose folder is screened too; None if it is unknown.
        """
        finding = self.state.findings.get(skill.skill_id)
        rule_flags = _screen(skill, skill_file)
        return rule_flags if finding is None else (*rule_flags, finding)


class Router:
    """Answers tasks over one pool. Its models stay open. It may be used by many threads."""

    _allow_servers: Collection[str] = ()

    def __init__(self, skills: Any, rankers: Any) -> None:
        """Open rankers over skills. An index opens faster, with `Router.load`.

        Args:
            skills: Folder, file, table or list of skills, as in `read_pool`.
            rankers: Rankers as in a recipe: a list of dicts, their YAML, or only the kind of a
                ranker, such as `lexical`.

        Raises:
            SkilltrainError: There is no skill, a ranker is wrong, or a model is missing.

        Examples:
            >>> Router([{"name": "pdf-merge", "body": "Join PDF files."}], "lexical")
            Router(1 skills; rankers: lexical; not calibrated)
        """
        skills_by_id = {skill.skill_id: skill for skill in read_pool(skills)}
        # Skills may also be given as rows, which have no findings.
        pools = [skills] if isinstance(skills, Path | str) else []
        findings = inherited_findings(skills_by_id.values(), pools)
        state = RouterState(system_of(rankers), skills_by_id, findings)
        self._current = _open(state, models={})

    def __repr__(self) -> str:
        pool = self._current
        rankers = ", ".join(pool.labels.values())
        calibration = "calibrated" if pool.calibrator else "not calibrated"
        return f"Router({len(self.skills)} skills; rankers: {rankers}; {calibration})"

    @classmethod
    def load(cls, folder: Path | str, allow_servers: Collection[str] = ()) -> "Router":
        """Open the router that `fit` or `index` wrote into `folder`.

        Args:
            folder: Folder of the router, or `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION` on the Hub.
            allow_servers: URLs of servers that the router's rankers may send texts to.

        Raises:
            SkilltrainError: There is no router, its files are incomplete or damaged, a model has
                changed, or a ranker uses a server that is not in `allow_servers`.
        """
        index = Index.open(local_router(folder))
        check_servers(index.system, allow_servers, index.folder.parent)
        # `__init__` would read skills and open rankers, so it is not called.
        router = cls.__new__(cls)
        router._allow_servers = allow_servers
        router._current = _open(index, models={})
        return router

    @property
    def skills(self) -> Mapping[str, Skill]:
        """Skills by id, in the order of the pool."""
        return self._current.state.skills

    @property
    def index(self) -> Index | None:
        """The index in the router's folder; None for a router without a folder."""
        return self._current.index

    @property
    def parts(self) -> Mapping[str, Ranker]:
        """Rankers by `key`, to use an encoder or a reranker directly."""
        return self._current.rankers

    @property
    def identity(self) -> str:
        """Hash of the rankers and of their models. It does not change with the skills."""
        pool = self._current
        if pool.index:
            return pool.index.record.identity
        # A router without a folder has no record, and no fingerprints of its models.
        return hashlib.sha256(pool.state.system.model_dump_json().encode()).hexdigest()[:12]

    def flags(self, skill: Skill) -> tuple[Flag, ...]:
        """Return the flags of a skill: the first of each rule, and the finding of a chat model."""
        return self._current.flags(skill, find_skill_file(skill))

    def route(self, task: str, k: int = 5, filters: Filters | None = None) -> Answer:
        """Find the `k` best skills for a task.

        Args:
            task: Task in plain words. Only the first 10,000 characters are read.
            k: Number of skills.
            filters: What a skill must have. None: all skills may be answers.

        Raises:
            SkilltrainError: The task has no visible character, or `k` is below 1.
        """
        if not isinstance(k, int) or k < 1:
            raise wrong_argument("k", "a whole number of at least 1", k)
        pool = self._current  # another thread may replace it
        calibrator = pool.calibrator
        query = _query(task)
        excluded_ids = filters.excluded_ids(pool.state.skills.values()) if filters else ()
        trace = pool.trace(query, k, excluded_ids)
        # A router without a calibration knows no probabilities.
        probabilities: list[float | None] = [None] * len(trace.ranking)
        if calibrator:
            probabilities = calibrator.probabilities(trace).tolist()

        skills = []
        for rank, probability in enumerate(probabilities[:k], 1):  # a trace may have more skills
            skills.append(pool.routed_skill(query, trace, rank, probability))

        has_right_skill = bool(skills)
        num_likely: int | None = None
        if calibrator:
            has_right_skill = calibrator.answers(trace)
            num_likely = calibrator.num_likely(trace)
        return Answer(tuple(skills), fits=has_right_skill, num_likely=num_likely)

    def trace(self, task: str, without: Collection[str] = ()) -> Trace:
        """Rank the pool for a task as if it did not contain the skills with the ids `without`."""
        return self._current.trace(_query(task), _MIN_DEPTH, without)

    def with_skills(self, skills: Sequence[Skill]) -> "Router":
        """Return a router over other skills, in memory only. It shares the models of this one."""
        current = self._current
        skills_by_id = {skill.skill_id: skill for skill in skills}
        # Skills with the same ids may have other texts, which no chat model has read.
        findings = move_findings(current.state.findings, current.state.skills.values(), skills)
        state = RouterState(current.state.system, skills_by_id, findings)
        # `__init__` would open the models again, so it is not called.
        router = Router.__new__(Router)
        router._current = _open(state, current.models)
        return router

    def update(self, skills: Any) -> dict[str, int]:
        """Replace the skills of this router and of its folder. Only new texts are encoded.

        Args:
            skills: All skills, as in `read_pool`, or `Contents` made from `self.index`.

        Returns:
            Counts of all, new, changed and gone skills.

        Raises:
            SkilltrainError: The router has no folder, another process is writing, or another
                process has replaced the index that the `Contents` were made from.
        """
        # `Contents` were made from the index that is open now, so it is not loaded again.
        if not isinstance(skills, Contents):
            self.refresh()
        current = self._current
        index = current.index
        if index is None:
            fix = "make one with skilltrain index"
            raise SkilltrainError("no-router", "this router is in no folder", fix=fix)

        contents = skills if isinstance(skills, Contents) else index.contents(read_pool(skills))
        # The index is a generation, a folder inside the router's folder.
        router_folder = index.folder.parent
        counts = write_index(router_folder, index.system, contents, current.models, previous=index)
        self.refresh()
        return counts

    def refresh(self) -> bool:
        """Load the router's folder again if it has changed. Return whether it has.

        Raises:
            SkilltrainError: As `load`. The router then answers as before.
        """
        pool = self._current
        if pool.index is None or pool.index.is_current():
            return False
        new_index = Index.open(pool.index.folder.parent)
        # The new generation may name other servers than the old one.
        check_servers(new_index.system, self._allow_servers, new_index.folder.parent)
        # Open models can be used again if they are the same.
        has_same_models = new_index.record.models == pool.index.record.models
        self._current = _open(new_index, models=pool.models if has_same_models else {})
        return True


def _open(state: RouterState, models: dict[str, Any]) -> _OpenPool:
    """Open the rankers over a pool.

    Args:
        state: Rankers' settings and skills.
        models: Open models by the rankers' `key`, which an earlier call for the same router has
            checked. It is empty in the first call. Models that have to be opened are added.
    """
    is_first_opening = not models
    index: Index | None = None
    stored_parts: Mapping[str, Any] = {}  # what rankers have stored about the pool
    router_folder: Path | None = None
    if isinstance(state, Index):  # the state was loaded from a router's folder
        index = state
        stored_parts = index.stored_parts
        router_folder = index.folder.parent
        if is_first_opening:
            index.check_models()
    check_rankers(state.system)

    rankers: dict[str, Ranker] = {}
    for config in flatten_rankers(state.system.rankers):
        key = config.key
        if key in rankers or config.components:
            continue  # it is open already, or it only fuses other rankers
        model = open_model(config, models, router_folder)
        # Stored data, such as vectors, saves encoding the pool again.
        if key in stored_parts:
            ranker = model.over(state.skills, stored_parts[key])
        else:
            ranker = model.over(state.skills)
        rankers[key] = _remember_vectors(ranker)
    labels = name_rankers(state.system.rankers)
    return _OpenPool(state, index, labels, rankers, models)


def _remember_vectors(ranker: Any) -> Ranker:
    """Return the ranker with a cache of the vectors of tasks.

    The explanation of an answer needs the task's vector again, after the ranking.

    Args:
        ranker: A ranker. Without an index of vectors, it is returned as it is.
    """
    if not isinstance(ranker, PoolRanker) or not isinstance(ranker.index, VectorIndex):
        return ranker
    encode = ranker.index.encode  # returns the vectors of texts: [text, dim]

    @lru_cache(_NUM_REMEMBERED_VECTORS)
    def encode_one(text: str) -> np.ndarray:
        # lru_cache keeps the vectors of the last texts, by text.
        return encode([text])[0]

    def encode_all(texts: Sequence[str]) -> np.ndarray:
        return np.stack([encode_one(text) for text in texts])

    # The new ranker and its index differ only in the function `encode`.
    return replace(ranker, index=replace(ranker.index, encode=encode_all))


def _query(task: str) -> Query:
    """Return a task as a query. Only its first characters are read.

    Args:
        task: Task in plain words.

    Raises:
        SkilltrainError: The task is no text, or has no visible character.
    """
    if not isinstance(task, str):
        raise wrong_argument("task", "a text", task)
    text = clean_text(task[:_MAX_CHARS])
    if not any(letter.isprintable() and not letter.isspace() for letter in text):
        raise SkilltrainError("empty-text", "the request is empty")
    # The other fields matter only for queries of a data set.
    return Query("request", text, kind="", origin="", split="")


@lru_cache(_NUM_REMEMBERED_FLAGS)
def _screen(skill: Skill, skill_file: Path | None) -> tuple[Flag, ...]:
    """Screen a skill, and the files beside its SKILL.md. Return the first flag of each rule.

    Results are remembered, because every answer needs the flags of its skills.

    Args:
        skill: The skill.
        skill_file: Its SKILL.md. None: no files beside it are screened.
    """
    flags: dict[str, Flag] = {}
    for flag in screen(skill, skill_file.parent if skill_file else None):
        flags.setdefault(flag.rule, flag)
    return tuple(flags.values())
