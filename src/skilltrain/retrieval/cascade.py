"""A system is a list of rankers: the first ranks the pool, each next one orders its candidates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.executor import OpenRankers, RankerRun, run_rankers, with_keeps
from skilltrain.retrieval.rankers import OWN, AnyRanker, parts_of
from skilltrain.terminal import say, without_bars


class SystemConfig(Config):
    """One way to rank the pool for a query."""

    name: str = Field(min_length=1, description="what tables call it")
    rankers: tuple[AnyRanker, ...] = Field(
        min_length=1,
        description="the first ranks the pool, each next one orders what the one before it found",
    )

    @model_validator(mode="after")
    def _starts_with_the_pool(self) -> "SystemConfig":
        for part in self.rankers[0].parts():
            if part.only_orders:
                raise ValueError(
                    f"the first ranker finds skills in the pool; {part.kind} only orders those of another"
                )
        return self


@dataclass(frozen=True)
class RankedStage:
    """The answer of one ranker of a system.

    Attributes:
        name: The system's name for its last ranker, `<system>/<number> <kind>` for the others.
        kind: Kind of the ranker.
        rankings: Its rankings.
        seconds: Mean time of a query when all were ranked together.
        alone: Seconds for each query that was ranked by itself.
        counts: Report of a ranker that asks a chat model.
        num_passed: How many skills the next ranker reads; None for all.
        gpu_bytes: Peak GPU memory of the queries ranked by themselves, models included; 0 for a
            ranker that used none.
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
        """Return the ranked skill ids by query id."""
        return {
            query_id: [skill_id for skill_id, _ in ranking]
            for query_id, ranking in self.rankings.items()
        }

    def only(self, query_ids: Iterable[str]) -> "RankedStage":
        return replace(self, rankings={query_id: self.rankings[query_id] for query_id in query_ids})

    def joined(self, other: "RankedStage") -> "RankedStage":
        """Add the answers of the same ranker to other queries, over another pool."""
        rankings = self.rankings | other.rankings
        seconds = self.seconds * len(self.rankings) + other.seconds * len(other.rankings)
        return replace(
            self,
            rankings=rankings,
            seconds=seconds / len(rankings),
            alone=self.alone + other.alone,
            gpu_bytes=max(self.gpu_bytes, other.gpu_bytes),
        )


class Cascade:
    """Runs systems for the same queries over one pool. A common beginning of two systems runs once.

    The model in training runs anew each time, as does every ranker after it.
    """

    def __init__(self, queries: Sequence[Query], skills: Sequence[Skill], depth: int) -> None:
        if not queries:
            raise SkilltrainError("nothing-to-score", "there is no query to rank for")
        self.queries = queries
        self.depth = depth
        self.pool = OpenRankers(skills)
        self._runs: dict[str, RankerRun] = {}

    def run(self, system: SystemConfig, num_timed: int = 0) -> tuple[RankedStage, ...]:
        """Run all rankers in order and return one stage per ranker.

        The last ranking is cut to `self.depth`. `num_timed` queries are run again one at a time, to
        measure latency. Rankers from the first remote one on are not timed.
        """
        rankers = with_keeps(system.rankers, self.depth)
        remote = [any(part.is_remote for part in ranker.parts()) for ranker in rankers]
        num_local = [*remote, True].index(True)
        if num_timed and num_local < len(rankers):
            start = f", from {rankers[num_local].kind} on" if num_local else ""
            problem = "not timed, for it asks a server or reads rankings from a file"
            say(f"{system.name}{start}: {problem}")

        stages: list[RankedStage] = []

        def add_stage(run: RankerRun) -> None:
            number = len(stages) + 1
            _check_finite(run, f"system {system.name}", number)
            beginning = rankers[:number]
            if not any(part.is_own for part in parts_of(beginning)):
                self._runs[repr(beginning)] = replace(run, by_leg=())
            name = f"{system.name}/{number} {run.config.kind}"
            num_passed = rankers[number].num_read if number < len(rankers) else None
            stage = RankedStage(
                name, run.config.kind, run.rankings, run.seconds, (), run.counts, num_passed
            )
            if number <= num_local and num_timed:
                stage = self._timed(stage, run, num_timed)
            stages.append(stage)

        candidates: Rankings | None = None
        for number in range(1, len(rankers) + 1):
            run = self._runs.get(repr(rankers[:number]))
            if run is None:
                break
            add_stage(run)
            candidates = run.rankings
        run_rankers(rankers[len(stages) :], self.queries, candidates, self.pool, add_stage)
        last = stages.pop()
        cut = {query_id: ranking[: self.depth] for query_id, ranking in last.rankings.items()}
        return (*stages, replace(last, name=system.name, rankings=cut))

    def release(self, later: Iterable[SystemConfig]) -> None:
        """Let go of all models and vectors that no `later` system needs."""
        needed = {OWN}
        for system in later:
            needed |= {part.key for part in parts_of(system.rankers)}
        opened = self.pool.opened
        self.pool.opened = {key: opened[key] for key in opened if key in needed}

    def _timed(self, stage: RankedStage, run: RankerRun, num_timed: int) -> RankedStage:
        """Add latency and GPU memory: run queries one at a time, after one to warm up."""
        runs: list[RankerRun] = []
        gpu_bytes = 0
        with without_bars():
            warm_up = self.queries[0]
            for number, query in enumerate([warm_up, *self.queries[:num_timed]]):
                # A new id, so that no score that a ranker remembers helps.
                alone = replace(query, query_id=f"{stage.name} {number}")
                candidates = run.candidates and {alone.query_id: run.candidates[query.query_id]}
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                allocated = torch.cuda.memory_allocated()
                run_rankers([run.config], [alone], candidates, self.pool, runs.append)
                peak = torch.cuda.max_memory_allocated()
                is_warm_up = number == 0
                if peak > allocated and not is_warm_up:
                    gpu_bytes = max(gpu_bytes, peak)
        latencies = tuple(timed.seconds for timed in runs[1:])
        return replace(stage, alone=latencies, gpu_bytes=gpu_bytes)


def _check_finite(run: RankerRun, where: str, number: int) -> None:
    for ranking in run.rankings.values():
        if not all(math.isfinite(score) for _, score in ranking):
            problem = f"ranker {number}, {run.config.kind}, gave scores that are no numbers"
            raise SkilltrainError("not-a-number", problem, where=where)


def run_systems(
    systems: Sequence[SystemConfig],
    queries: Sequence[Query],
    skills: Sequence[Skill],
    depth: int,
    num_timed: int = 0,
) -> dict[str, tuple[RankedStage, ...]]:
    """Run systems and return the stages of each by its name, the last with `depth` skills.

    Raises SkilltrainError as `check_systems` does, and for an empty pool, before any work.
    """
    check_systems(systems)
    if systems and not skills:
        raise SkilltrainError("empty-pool", "the pool is empty")
    cascade = Cascade(queries, skills, depth)
    stages: dict[str, tuple[RankedStage, ...]] = {}
    for number, system in enumerate(systems, 1):
        say(f"{system.name}: {len(queries)} queries over {len(skills)} skills")
        stages[system.name] = cascade.run(system, num_timed)
        cascade.release(systems[number:])
    return stages


def check_systems(systems: Sequence[SystemConfig], has_own: bool = False) -> None:
    """Raise SkilltrainError for faults that can be known before work.

    With `has_own`, `source: self` is a model in training.
    """
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise SkilltrainError("repeated-name", "two systems have the same name", where="systems")
    for system in systems:
        for part in parts_of(system.rankers):
            if not part.is_own:
                part.check()
            elif not has_own:
                problem = f"source {OWN} is the model in training, and nothing is trained here"
                raise SkilltrainError(
                    "conflicting-settings", problem, where=f"system {system.name}"
                )
