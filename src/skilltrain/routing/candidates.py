"""Stage `candidates`: the ranked lists of one system, for the reranker to learn from; and what ranking would cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.read import read_pool
from skilltrain.llm import cost_of
from skilltrain.records import Query, Skill
from skilltrain.retrieval.api import ApiConfig, plan_encoding
from skilltrain.retrieval.cascade import SystemConfig, rankings_table, run_systems
from skilltrain.retrieval.rankers import AskingConfig, key_of, parts_of
from skilltrain.tables import RANKINGS, select_queries, write_table


class CandidatesConfig(Config):
    """Rank the pool for every query, usually with the trained encoder."""

    stage: Literal["candidates"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES table")
    split: str | None = Field(default="train", description="rank for the queries of this split only; null for all")
    system: SystemConfig = Field(description="what ranks: a name, and a list of rankers; its last ranking is written")
    depth: int = Field(default=50, ge=1, description="candidates per query")
    out: Path = Field(description="folder to write: RANKINGS")


def run_candidates(config: CandidatesConfig, out: Path) -> dict[str, Any]:
    """Write RANKINGS; the counts of queries and rows."""
    queries = select_queries(config.queries, config.split)
    stages = run_systems([config.system], queries, read_pool(config.pool), config.depth)[config.system.name]
    table = rankings_table(stages[-1:])
    write_table(table, RANKINGS, out)
    return {"num_queries": len(queries), "num_candidates": table.num_rows}


def plan_candidates(config: CandidatesConfig) -> dict[str, Any]:
    """What `plan_ranking` says of the system."""
    return plan_ranking([config.system], select_queries(config.queries, config.split), read_pool(config.pool))


def plan_ranking(systems: Sequence[SystemConfig], queries: Sequence[Query], skills: Sequence[Skill]) -> dict[str, Any]:
    """How much would be ranked, and about what chat models and embeddings servers would take, by system (`--dry-run`).

    Asks nobody. `dollars` are those of all together, None where a price is not known.
    """
    counts = {"num_queries": len(queries), "num_skills": len(skills), "num_systems": len(systems)}
    asked: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for system in systems:
        for part in parts_of(system.rankers):
            if isinstance(part, AskingConfig):
                costs = asked.setdefault(system.name, {})
                name = part.kind if part.kind not in costs else f"{part.kind} {len(costs) + 1}"
                costs[name] = cost_of(part.asks(queries, skills))
            elif isinstance(part, ApiConfig) and key_of(part) not in seen:  # what two systems share is asked once
                seen.add(key_of(part))
                asked.setdefault(system.name, {})[part.kind] = plan_encoding(part, skills, queries)
    if not asked:
        return counts
    prices = [cost["dollars"] for costs in asked.values() for cost in costs.values()]
    return counts | {"asked": asked, "dollars": None if None in prices else round(sum(prices), 6)}
