"""What ranking would ask of servers that cost money, told before it is asked."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skilltrain.data.stored_skills import StoredSkills
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.retrieval.api_encoder import ApiEncoderSource, plan_encoding
from skilltrain.retrieval.judge import plan_judge
from skilltrain.routing.candidates import CandidatesConfig
from skilltrain.routing.evaluate import EvaluateConfig, check_use, skills_of
from skilltrain.routing.systems import SystemConfig


def plan_evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """How much would be ranked, and about what judges and embeddings APIs would take, by system (`--dry-run`).

    Asks nobody; the pool's texts pass through a temporary file. `dollars` are those of all together, None where a price
    is not known.
    """
    benchmark = load_benchmark(config.benchmark, config.split)
    check_use(config, benchmark)
    queries = {task.query.query_id: task.query.text for task in benchmark.tasks}
    with _scratch() as scratch:
        return _plan(config.systems, queries, skills_of(config.pool, benchmark, scratch))


def plan_candidates(config: CandidatesConfig) -> dict[str, Any]:
    """As `plan_evaluate`, of the one system that ranks."""
    with _scratch() as scratch:
        return _plan((config.system,), config.query_texts(), StoredSkills.of_table(config.pool, scratch))


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="skilltrain-") as folder:
        yield Path(folder)


def _plan(systems: tuple[SystemConfig, ...], queries: dict[str, str], skills: StoredSkills) -> dict[str, Any]:
    counts = {"num_queries": len(queries), "num_skills": len(skills), "num_systems": len(systems)}
    asked = _asked(systems, queries, skills)
    if not asked:
        return counts
    prices = [cost["dollars"] for costs in asked.values() for cost in costs.values()]
    return counts | {"asked": asked, "dollars": None if None in prices else round(sum(prices), 6)}


def _asked(
    systems: tuple[SystemConfig, ...], queries: dict[str, str], skills: StoredSkills
) -> dict[str, dict[str, dict[str, Any]]]:
    """System → part of it → what it would take; a first stage that several systems share is asked for the first."""
    asked: dict[str, dict[str, dict[str, Any]]] = {}
    seen: set[str] = set()
    for system in systems:
        source, costs = system.first_stage, dict[str, dict[str, Any]]()
        if isinstance(source, ApiEncoderSource) and repr(source) not in seen:
            seen.add(repr(source))
            costs["embeddings"] = plan_encoding(source, skills, queries.values())
        if system.judge is not None:
            costs["judge"] = plan_judge(system.judge, queries, skills, system.num_candidates)
        asked |= {system.name: costs} if costs else {}
    return asked
