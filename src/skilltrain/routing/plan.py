"""What ranking would ask of servers that cost money, told before it is asked."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from skilltrain.data.pool.read import read_pool
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.records import Query, Skill
from skilltrain.retrieval.api import ApiConfig, plan_encoding
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.rankers import key_of, parts_of
from skilltrain.retrieval.select import SelectConfig, plan_select
from skilltrain.routing.candidates import CandidatesConfig
from skilltrain.routing.evaluate import EvaluateConfig, check_use, skills_of
from skilltrain.tables import select_queries


def plan_evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """How much would be ranked, and about what chat models and embeddings servers would take, by system (`--dry-run`).

    Asks nobody. `dollars` are those of all together, None where a price is not known.
    """
    benchmark = load_benchmark(config.benchmark, config.split)
    check_use(config, benchmark)
    pools = [skills_of(config.pool, part) for part in benchmark.parts]
    return _plan(config.systems, [task.query for task in benchmark.tasks], list(chain.from_iterable(pools)))


def plan_candidates(config: CandidatesConfig) -> dict[str, Any]:
    """As `plan_evaluate`, of the one system that ranks."""
    return _plan([config.system], select_queries(config.queries, config.split), read_pool(config.pool))


def _plan(systems: Sequence[SystemConfig], queries: Sequence[Query], skills: Sequence[Skill]) -> dict[str, Any]:
    counts = {"num_queries": len(queries), "num_skills": len(skills), "num_systems": len(systems)}
    asked: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for system in systems:
        for part in parts_of(system.rankers):
            if isinstance(part, SelectConfig):
                asked.setdefault(system.name, {})[part.kind] = plan_select(part, queries, skills)
            elif isinstance(part, ApiConfig) and key_of(part) not in seen:  # what two systems share is asked once
                seen.add(key_of(part))
                asked.setdefault(system.name, {})[part.kind] = plan_encoding(part, skills, queries)
    if not asked:
        return counts
    prices = [cost["dollars"] for costs in asked.values() for cost in costs.values()]
    return counts | {"asked": asked, "dollars": None if None in prices else round(sum(prices), 6)}
