"""Stage `candidates`: the ranked lists of one system, for the reranker to learn from."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.read import read_pool
from skilltrain.retrieval.cascade import SystemConfig, rankings_table, run_systems
from skilltrain.tables import RANKINGS, select_queries, write_table


class CandidatesConfig(Config):
    """Rank the pool for every query, usually with the trained encoder."""

    stage: Literal["candidates"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES table")
    split: str | None = Field(default="train", description="rank for the queries of this split only; null for all")
    system: SystemConfig = Field(description="what ranks: a name, and a list of rankers; its last ranking is written")
    depth: int = Field(default=50, ge=1, description="candidates a query")
    out: Path = Field(description="folder to write: RANKINGS")


def run_candidates(config: CandidatesConfig, out: Path) -> dict[str, Any]:
    """Write RANKINGS; the counts of queries and rows."""
    queries = select_queries(config.queries, config.split)
    stages = run_systems([config.system], queries, read_pool(config.pool), config.depth)[config.system.name]
    table = rankings_table(stages[-1:])
    write_table(table, RANKINGS, out)
    return {"num_queries": len(queries), "num_candidates": table.num_rows}
