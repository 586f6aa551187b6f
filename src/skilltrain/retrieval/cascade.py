"""Systems. A system is a list of rankers: the first ranks the pool, the others order candidates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field, model_validator
from pydantic_core import to_jsonable_python

from skilltrain.arguments import wrong_argument
from skilltrain.config import Config, parse_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.executor import OpenRankers, RankerRun, run_ranker, with_keeps
from skilltrain.retrieval.rankers import OWN, AnyRanker, RankerConfig, flatten_rankers
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
        """Check that the first ranker, and each ranker that it is made of, can search the pool."""
        for ranker in flatten_rankers(self.rankers[:1]):
            if ranker.only_orders:
                raise ValueError(
                    "the first ranker finds skills in the pool; "
                    f"{ranker.kind} only orders those of another"
                )
        return self


def system_of(rankers: Any) -> SystemConfig:
    """Return rankers of the Python API as a system.

    Args:
        rankers: A ranker, a list of rankers, their YAML, or a system. A ranker is a dict of its
            settings, or only its kind, such as `lexical`. For example, the YAML
            "[lexical, {kind: late, source: MODEL}]" has two rankers.

    Raises:
        SkilltrainError: A ranker is unknown, or has wrong settings.
    """
    if isinstance(rankers, SystemConfig):
        return rankers
    if isinstance(rankers, str):
        rankers = parse_yaml(rankers, "rankers")
    items = rankers if isinstance(rankers, list | tuple) else [rankers]
    configs: list[Any] = []
    for item in items:
        if not isinstance(item, str | dict | RankerConfig):
            raise wrong_argument("rankers", "a list of rankers, each a dict or a name", item)
        configs.append({"kind": item} if isinstance(item, str) else item)
    values = to_jsonable_python(configs, fallback=str)  # paths become texts
    return validate(SystemConfig, {"name": "route", "rankers": values}, "rankers")


@dataclass(frozen=True)
class RankedStage:
    """The answers of one ranker of a system.

    Attributes:
        name: Name of the system for its last ranker, `<system>/<number> <kind>` for the others.
        kind: Kind of the ranker.
        rankings: Its rankings.
        seconds: Mean time of a query when all were ranked together.
        latencies: Seconds of each query that was ranked by itself.
        counts: Counts of a ranker that asks a chat model.
        num_passed: Number of skills that the next ranker looks at; None for all.
        gpu_bytes: Peak GPU memory of the queries ranked by themselves, models included; 0 for a
            ranker that used none.
    """

    name: str
    kind: str
    rankings: Rankings
    seconds: float
    latencies: tuple[float, ...]
    counts: Mapping[str, Any]
    num_passed: int | None = None
    gpu_bytes: int = 0

    def skill_ids(self) -> dict[str, list[str]]:
        """Return the ranked skill ids by query id."""
        ids_by_query = {}
        for query_id, ranking in self.rankings.items():
            ids_by_query[query_id] = [skill_id for skill_id, _ in ranking]
        return ids_by_query

    def only(self, query_ids: Iterable[str]) -> "RankedStage":
        """Return the answers to some queries."""
        return replace(self, rankings={query_id: self.rankings[query_id] for query_id in query_ids})

    def joined(self, other: "RankedStage") -> "RankedStage":
        """Return the answers of both stages, as if one run had given them.

        Args:
            other: Answers of the same ranker to other queries. Their pool may be another one, as in
                a benchmark of several tiers.
        """
        rankings = {**self.rankings, **other.rankings}
        # `seconds` is the mean time of a query. Weight it by the number of queries.
        own_seconds = self.seconds * len(self.rankings)
        other_seconds = other.seconds * len(other.rankings)
        return replace(
            self,
            rankings=rankings,
            seconds=(own_seconds + other_seconds) / len(rankings),
            latencies=self.latencies + other.latencies,
            gpu_bytes=max(self.gpu_bytes, other.gpu_bytes),
        )


class Cascade:
    """Runs systems for the same queries over one pool.

    If two systems begin with the same rankers, these run once. The model in training runs each
    time, and so does every ranker after it.
    """

    def __init__(self, queries: Sequence[Query], skills: Sequence[Skill], depth: int) -> None:
        if not queries:
            raise SkilltrainError("nothing-to-score", "there is no query to rank for")
        self.queries = queries
        self.depth = depth
        self.pool = OpenRankers(skills)
        self._runs: dict[str, RankerRun] = {}  # by the rankers up to this one

    def run(self, system: SystemConfig, num_timed: int = 0) -> tuple[RankedStage, ...]:
        """Run all rankers of a system in order.

        Args:
            system: The system.
            num_timed: Number of queries that are run again, one at a time, to measure latency.
                The first remote ranker and all rankers after it are not timed.

        Returns:
            One stage per ranker. The rankings of the last one are cut to `self.depth`.
        """
        # Rankers without `keep` return as many skills as the later rankers and the depth need.
        rankers = with_keeps(system.rankers, self.depth)

        # Say from which ranker on latency is not measured. The first rankers may be timeable.
        num_timeable = _num_before_remote(rankers)
        if num_timed and num_timeable < len(rankers):
            first_untimed = rankers[num_timeable]
            untimed = f", from {first_untimed.kind} on" if num_timeable else ""
            reason = "not timed, for it asks a server or reads rankings from a file"
            say(f"{system.name}{untimed}: {reason}")

        stages: list[RankedStage] = []
        candidates = None  # the first ranker searches the pool
        earlier_rankers: list[RankerConfig] = []
        for number, ranker in enumerate(rankers, 1):
            ranker_run = self._run_once(ranker, earlier_rankers, candidates, system.name)
            candidates = ranker_run.rankings
            stage = RankedStage(
                name=f"{system.name}/{number} {ranker.kind}",
                kind=ranker.kind,
                rankings=ranker_run.rankings,
                seconds=ranker_run.seconds,
                latencies=(),
                counts=ranker_run.counts,
            )
            later_rankers = rankers[number:]  # `number` counts from 1
            if later_rankers:
                next_ranker = later_rankers[0]
                # The next ranker may look only at the first skills of these rankings.
                stage = replace(stage, num_passed=next_ranker.num_read)
            if num_timed and number <= num_timeable:
                stage = self._add_latencies(stage, ranker_run, num_timed)
            stages.append(stage)
            earlier_rankers.append(ranker)

        # The last ranker gives the rankings of the system, so its stage has the system's name.
        last = stages.pop()
        rankings = {query_id: ranking[: self.depth] for query_id, ranking in last.rankings.items()}
        return (*stages, replace(last, name=system.name, rankings=rankings))

    def _run_once(
        self,
        ranker: RankerConfig,
        earlier_rankers: Sequence[RankerConfig],
        candidates: Rankings | None,
        system_name: str,
    ) -> RankerRun:
        """Run a ranker, or return its earlier run after the same rankers.

        Args:
            ranker: Settings of the ranker.
            earlier_rankers: Rankers that ran before it, in order.
            candidates: Rankings of the last of these; None if there is none.
            system_name: Name of the system for errors.

        Raises:
            SkilltrainError: A score is not finite.
        """
        rankers = [*earlier_rankers, ranker]
        key = repr(rankers)
        if key in self._runs:
            return self._runs[key]

        run = run_ranker(ranker, self.queries, candidates, self.pool)
        for ranking in run.rankings.values():
            if not all(math.isfinite(score) for _, score in ranking):
                problem = f"ranker {len(rankers)}, {ranker.kind}, gave scores that are no numbers"
                raise SkilltrainError("not-a-number", problem, where=f"system {system_name}")

        # Keep the run for later systems. A model in training changes, so that the model and all
        # rankers after it must run again.
        depends_on_training = any(member.is_in_training for member in flatten_rankers(rankers))
        if not depends_on_training:
            # Free the rankings of the single rankers that a fusion combined. Nobody needs them.
            self._runs[key] = replace(run, by_leg=())
        return run

    def _add_latencies(self, stage: RankedStage, run: RankerRun, num_timed: int) -> RankedStage:
        """Measure latencies and GPU memory of a ranker, and add them to its stage.

        The queries run one at a time, after one to warm up.

        Args:
            stage: The stage without latencies.
            run: The run of the ranker for all queries together.
            num_timed: Number of queries to measure.
        """
        latencies: list[float] = []
        gpu_bytes = 0
        with without_bars():
            warm_up = self.queries[0]
            for number, query in enumerate([warm_up, *self.queries[:num_timed]]):
                # Rankers remember scores by query, so give the query a new id.
                renamed = replace(query, query_id=f"{stage.name} {number}")
                candidates = None
                if run.candidates is not None:
                    candidates = {renamed.query_id: run.candidates[query.query_id]}

                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                allocated = torch.cuda.memory_allocated()
                timed_run = run_ranker(run.config, [renamed], candidates, self.pool)
                peak = torch.cuda.max_memory_allocated()  # 0 without a GPU
                if number == 0:  # the warm-up
                    continue
                latencies.append(timed_run.seconds)
                uses_gpu = peak > allocated
                if uses_gpu:
                    gpu_bytes = max(gpu_bytes, peak)
        return replace(stage, latencies=tuple(latencies), gpu_bytes=gpu_bytes)

    def release_unneeded(self, later_systems: Iterable[SystemConfig]) -> None:
        """Free all models and vectors that no later system needs.

        Args:
            later_systems: Systems that are still to run.
        """
        needed_keys: set[str | None] = {OWN}  # the model in training always stays
        for system in later_systems:
            for ranker in flatten_rankers(system.rankers):
                # `opened` has rankers by their keys, and shared networks by their sources.
                needed_keys |= {ranker.key, ranker.model_source}
        opened = self.pool.opened.items()
        self.pool.opened = {key: value for key, value in opened if key in needed_keys}


def _num_before_remote(rankers: Sequence[RankerConfig]) -> int:
    """Return the number of rankers before the first remote one, or of all if none is remote.

    A remote ranker calls a server or reads a file, so that its latency is not measured. A ranker
    that joins others is remote if any of them is.
    """
    for number, ranker in enumerate(rankers):
        if any(member.is_remote for member in flatten_rankers([ranker])):
            return number
    return len(rankers)


def run_systems(
    systems: Sequence[SystemConfig],
    queries: Sequence[Query],
    skills: Sequence[Skill],
    depth: int,
    num_timed: int = 0,
) -> dict[str, tuple[RankedStage, ...]]:
    """Run systems for the same queries over one pool.

    Args:
        systems: The systems.
        queries: The queries.
        skills: The pool.
        depth: Number of skills that the last ranker of a system returns.
        num_timed: Number of queries that are run again to measure latency (see `Cascade.run`).

    Returns:
        The stages of each system by its name.

    Raises:
        SkilltrainError: The pool is empty, or `check_systems` fails. Nothing has run then.
    """
    check_systems(systems)
    if systems and not skills:
        raise SkilltrainError("empty-pool", "the pool is empty")
    # The cascade keeps the runs of rankers that several systems begin with.
    cascade = Cascade(queries, skills, depth)
    stages = {}
    for number, system in enumerate(systems, 1):
        say(f"{system.name}: {len(queries)} queries over {len(skills)} skills")
        stages[system.name] = cascade.run(system, num_timed)
        later_systems = systems[number:]  # `number` counts from 1
        cascade.release_unneeded(later_systems)
    return stages


def check_systems(systems: Sequence[SystemConfig], has_model: bool = False) -> None:
    """Check systems before they run.

    Args:
        systems: The systems.
        has_model: Whether there is a model in training, which `source: self` names.

    Raises:
        SkilltrainError: Two systems have the same name, or a ranker cannot run.
    """
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise SkilltrainError("repeated-name", "two systems have the same name", where="systems")
    for system in systems:
        for ranker in flatten_rankers(system.rankers):
            if not ranker.is_in_training:
                # For example, a check fails if the model or an API key is missing.
                ranker.check()
            elif not has_model:
                problem = f"source {OWN} is the model in training, and nothing is trained here"
                raise SkilltrainError(
                    "conflicting-settings", problem, where=f"system {system.name}"
                )
