"""Stage `candidates`: the ranked lists of one system, for the reranker to learn from."""

import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.stored_skills import StoredSkills
from skilltrain.routing.systems import SystemConfig, rank_with_systems, rankings_table
from skilltrain.tables import RANKINGS, select_queries, write_table


class CandidatesConfig(Config):
    """Rank the pool for every query, usually with the trained encoder."""

    stage: Literal["candidates"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES table")
    split: str | None = Field(default="train", description="rank for the queries of this split only; null for all")
    system: SystemConfig = Field(description="what ranks: a name, and a first stage (encoder or lexical)")
    depth: int = Field(default=50, ge=1, description="candidates a query")
    out: Path = Field(description="folder to write: RANKINGS")

    def query_texts(self) -> dict[str, str]:
        """query_id → text of what is ranked for."""
        return {query.query_id: query.text for query in select_queries(self.queries, self.split)}


def run_candidates(config: CandidatesConfig, out: Path) -> dict[str, Any]:
    """Write RANKINGS; the counts of queries and rows."""
    queries = config.query_texts()
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=out) as scratch:
        skills = StoredSkills.of_table(config.pool, Path(scratch))
        rankings = rank_with_systems([config.system], queries, skills, config.depth)[config.system.name]
    table = rankings_table(rankings, config.system.name)
    write_table(table, RANKINGS, out)
    return {"num_queries": len(queries), "num_candidates": table.num_rows}
