"""A system is a list of rankers: the first ranks the pool, each next one orders what the one before it found."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Ranker, Rankings, Skill
from skilltrain.retrieval.api import ApiConfig
from skilltrain.retrieval.rankers import (
    OWN,
    Asking,
    AskingConfig,
    RankerConfig,
    is_own,
    key_of,
    needs_candidates,
    num_read,
    open_ranker,
    parts_of,
)
from skilltrain.retrieval.rankings import SavedConfig
from skilltrain.terminal import say, without_bars

_OLD_KEYS = ("lexical", "encoder", "embeddings", "reranker", "judge")
_NEW_FORM = "rankers: [{kind: dense, source: …}, {kind: rerank, source: …, keep: 20}]"


class SystemConfig(Config):
    """One way to rank the pool for a query."""

    name: str = Field(min_length=1, description="what tables call it")
    rankers: tuple[RankerConfig, ...] = Field(
        min_length=1,
        description="the first ranks the pool, each next one orders what the one before it found",
    )

    @model_validator(mode="before")
    @classmethod
    def _new_form(cls, values: Any) -> Any:
        if (
            isinstance(values, Mapping)
            and "rankers" not in values
            and (old := values.keys() & set(_OLD_KEYS))
        ):
            raise ValueError(f"'{min(old)}' is of the old form; write for example {_NEW_FORM}")
        return values

    @model_validator(mode="after")
    def _starts_with_the_pool(self) -> "SystemConfig":
        if needing := [part.kind for part in parts_of(self.rankers[:1]) if needs_candidates(part)]:
            raise ValueError(
                f"the first ranker finds skills in the pool; {needing[-1]} only orders those of another"
            )
        return self


@dataclass(frozen=True)
class RankedStage:
    """What one ranker of a system answered.

    `name` is the system's for its last ranker, `<system>/<number> <kind>` for those before. `seconds` are those of a
    query when all were ranked together, `alone` those of each query that was asked alone, while at most `gpu_bytes` lay
    on the GPU, models included (0 for a ranker that put nothing there). `counts` is what a ranker that asks a chat
    model has to tell. The ranker after it sees the first `num_passed` skills, or all (None).
    """

    name: str
    kind: str
    rankings: Rankings
    seconds: float
    alone: tuple[float, ...]
    counts: Mapping[str, Any]
    num_passed: int | None = None
    gpu_bytes: int = 0

    def skill_ids(self) -> dict[str, list[str]]:
        return {
            query_id: [skill_id for skill_id, _ in ranking]
            for query_id, ranking in self.rankings.items()
        }

    def only(self, query_ids: Iterable[str]) -> "RankedStage":
        return replace(self, rankings={query_id: self.rankings[query_id] for query_id in query_ids})

    def joined(self, other: "RankedStage") -> "RankedStage":
        """The same ranker's answers over this pool and another; seconds are those of a query, over both."""
        seconds = self.seconds * len(self.rankings) + other.seconds * len(other.rankings)
        rankings = self.rankings | other.rankings
        alone, gpu_bytes = self.alone + other.alone, max(self.gpu_bytes, other.gpu_bytes)
        return replace(
            self,
            rankings=rankings,
            seconds=seconds / len(rankings),
            alone=alone,
            gpu_bytes=gpu_bytes,
        )


class Cascade:
    """Runs systems for the same queries over one pool; what two systems begin with in common runs once.

    `opened` keeps models by `key_of`. That of `OWN` is the model in training; what it is part of runs anew each time.
    """

    def __init__(
        self,
        queries: Sequence[Query],
        skills: Sequence[Skill],
        depth: int,
        opened: dict[str, Ranker] | None = None,
    ) -> None:
        if not queries:
            raise SkilltrainError("there is no query to rank for")
        self.queries, self.skills, self.depth = queries, skills, depth
        self._opened = {} if opened is None else opened
        self._answers: dict[str, RankedStage] = {}

    def run(self, system: SystemConfig, num_timed: int = 0) -> tuple[RankedStage, ...]:
        """What each ranker answers, the last cut at the depth; `num_timed` queries are asked again, alone."""
        keeps = keeps_of(system, self.depth)
        times = self._times_alone(system, keeps, num_timed)
        passed = [*map(num_read, system.rankers[1:]), None]
        stages: list[RankedStage] = []
        for number, ((alone, gpu_bytes), num_passed) in enumerate(
            zip(times, passed, strict=True), 1
        ):
            stage = self._answer(system, keeps, number, stages[-1].rankings if stages else None)
            name = f"{system.name}/{number} {stage.kind}"
            stages.append(
                replace(stage, name=name, alone=alone, gpu_bytes=gpu_bytes, num_passed=num_passed)
            )
        cut = {query_id: ranking[: self.depth] for query_id, ranking in stages[-1].rankings.items()}
        return (*stages[:-1], replace(stages[-1], name=system.name, rankings=cut))

    def release(self, later: Iterable[SystemConfig]) -> None:
        """Let go of all models and vectors that no `later` system needs."""
        needed = {OWN} | {key_of(part) for system in later for part in parts_of(system.rankers)}
        self._opened = {key: ranker for key, ranker in self._opened.items() if key in needed}

    def _answer(
        self, system: SystemConfig, keeps: Sequence[int], number: int, before: Rankings | None
    ) -> RankedStage:
        rankers, kind = system.rankers[:number], system.rankers[number - 1].kind
        key = repr(
            [
                ranker.model_copy(update={"keep": n})
                for ranker, n in zip(rankers, keeps, strict=False)
            ]
        )
        if key in self._answers:
            return self._answers[key]
        ranker = open_ranker(rankers[-1], self.skills, self._opened)
        started = time.perf_counter()
        rankings = ranker.rank(self.queries, before, keeps[number - 1])
        seconds = (time.perf_counter() - started) / len(self.queries)
        if not all(math.isfinite(score) for ranking in rankings.values() for _, score in ranking):
            what = f"ranker {number}, {kind}, gave scores that are no numbers"
            raise SkilltrainError(what, where=f"system {system.name}")
        counts = ranker.counts if isinstance(ranker, Asking) else {}
        answer = RankedStage(system.name, kind, rankings, seconds, (), counts)
        if not any(map(is_own, parts_of(rankers))):
            self._answers[key] = answer
        return answer

    def _times_alone(
        self, system: SystemConfig, keeps: Sequence[int], num: int
    ) -> list[tuple[tuple[float, ...], int]]:
        """(seconds, most bytes on the GPU) of each ranker, for each of `num` queries asked alone, after one to warm up.

        Rankers from the first that asks a server or reads a file are not timed. Queries have ids of their own, so that
        no score that is remembered of them helps.
        """
        away = ApiConfig | AskingConfig | SavedConfig
        is_local = [
            not any(isinstance(part, away) for part in parts_of([ranker]))
            for ranker in system.rankers
        ]
        timed = system.rankers[: [*is_local, False].index(False)] if num else ()
        if num and len(timed) < len(system.rankers):
            start = f", from {system.rankers[len(timed)].kind} on" if timed else ""
            say(
                f"{system.name}{start}: not timed, for it asks a server or reads rankings from a file"
            )
        rankers = [open_ranker(ranker, self.skills, self._opened) for ranker in timed]
        measured: list[list[tuple[float, int]]] = [[] for _ in system.rankers]
        with without_bars():
            for number, query in enumerate([self.queries[0], *self.queries[:num]]):
                rankings: Rankings | None = None
                for place, ranker in enumerate(rankers):
                    if torch.cuda.is_available():
                        torch.cuda.reset_peak_memory_stats()
                    before, started = torch.cuda.memory_allocated(), time.perf_counter()
                    rankings = ranker.rank(
                        [replace(query, query_id=f"{system.name} {number}")], rankings, keeps[place]
                    )
                    seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated()
                    measured[place].append((seconds, peak if peak > before else 0))
        return [
            (tuple(s for s, _ in row[1:]), max((used for _, used in row[1:]), default=0))
            for row in measured
        ]


def keeps_of(system: SystemConfig, depth: int) -> list[int]:
    """How many skills each ranker keeps (or orders): as many as are asked for, and as those after it need."""
    keeps: list[int] = []
    for ranker in reversed(system.rankers):
        keeps.append(max(depth, *keeps, 1) if ranker.keep is None else ranker.keep)
    return keeps[::-1]


def run_systems(
    systems: Sequence[SystemConfig],
    queries: Sequence[Query],
    skills: Sequence[Skill],
    depth: int,
    num_timed: int = 0,
) -> dict[str, tuple[RankedStage, ...]]:
    """System name → what each of its rankers answers, the last one with the `depth` best skills of each query.

    Raises SkilltrainError as `check_systems` does, and for an empty pool, before any work.
    """
    check_systems(systems)
    if systems and not skills:
        raise SkilltrainError("the pool is empty")
    cascade = Cascade(queries, skills, depth)
    found: dict[str, tuple[RankedStage, ...]] = {}
    for number, system in enumerate(systems, 1):
        say(f"{system.name}: {len(queries)} queries over {len(skills)} skills")
        found[system.name] = cascade.run(system, num_timed)
        cascade.release(systems[number:])
    return found


def check_systems(systems: Sequence[SystemConfig], has_own: bool = False) -> None:
    """Raise SkilltrainError for what can be known before work; `has_own`: `source: self` is a model in training."""
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise SkilltrainError("two systems have the same name", where="systems")
    for system in systems:
        for part in parts_of(system.rankers):
            if not is_own(part):
                part.check()
            elif not has_own:
                what = f"source {OWN} is the model in training, and nothing is trained here"
                raise SkilltrainError(what, where=f"system {system.name}")
