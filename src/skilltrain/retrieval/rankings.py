"""Rankings on disk. Stages write them, and a ranker of kind `saved` reads them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from skilltrain.config import InputPaths
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.rankers import Keep, RankerConfig
from skilltrain.tables import RANKINGS, read_table, table_from_rows, table_path
from skilltrain.terminal import say


class SavedConfig(RankerConfig):
    """Rankings that a stage has written (mine, filter, candidates, evaluate)."""

    kind: Literal["saved"] = "saved"
    rankings: InputPaths = Field(
        min_length=1, description="tables or folders, each of its own queries"
    )
    stage: str | None = Field(
        default=None, description="which of a table's rankings; null where it holds one"
    )
    keep: Keep = None
    is_remote = True
    can_be_in_router = False
    can_be_expanded = False
    can_be_interleaved = False

    def check(self) -> None:
        for path in self.rankings:
            if not table_path(path, RANKINGS).is_file():
                raise SkilltrainError("missing-table", "no rankings table here", where=path)

    def open(self, opened: dict[str, Any]) -> "SavedRankings":
        """Read the rankings of all tables. Each table ranks skills for its own queries.

        Args:
            opened: Not used, because there is no model to share.

        Raises:
            SkilltrainError: Two tables rank the same query.
        """
        rankings = {}
        for path in self.rankings:
            new_rankings = read_rankings(path, self.stage)
            repeated_ids = rankings.keys() & new_rankings.keys()
            if repeated_ids:
                problem = f"query '{min(repeated_ids)}' is ranked in an earlier table as well"
                raise SkilltrainError("repeated-id", problem, where=path)
            rankings |= new_rankings
        # `SavedRankings.over` sets the pool.
        return SavedRankings(path=self.rankings[0], rankings=rankings, pool=())


@dataclass(frozen=True)
class SavedRankings:
    """A ranker that returns saved rankings.

    Attributes:
        path: First table, for messages.
        rankings: Saved ranking by query id.
        pool: Ids of the skills in the pool.
    """

    path: Path
    rankings: Rankings
    pool: Collection[str]

    def over(self, skills: Mapping[str, Skill]) -> "SavedRankings":
        return replace(self, pool=skills.keys())

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Return the saved ranking of each query, cut to `keep` skills.

        If there are candidates, skills that are not among them are removed before the cut. A query
        without a saved ranking gets an empty ranking, with a warning.

        Args:
            queries: Queries to rank skills for.
            candidates: Rankings of an earlier ranker by query id; None to use all saved skills.
            keep: Number of skills of each ranking.

        Raises:
            SkilltrainError: The pool lacks a skill of a saved ranking.
        """
        rankings = {}
        for query in queries:
            query_id = query.query_id
            ranking = self.rankings.get(query_id, [])
            unknown_ids = [skill_id for skill_id, _ in ranking if skill_id not in self.pool]
            if unknown_ids:
                count = f"{len(unknown_ids)} of its {len(ranking)} ranked skills"
                problem = f"{count} are not in the pool, first '{unknown_ids[0]}'"
                where = f"{self.path}, query {query_id}"
                raise SkilltrainError("unknown-skill", problem, where=where)
            if candidates is not None:
                candidate_ids = {skill_id for skill_id, _ in candidates[query_id]}
                ranking = [pair for pair in ranking if pair[0] in candidate_ids]
            rankings[query_id] = ranking[:keep]

        unranked = [query.query_id for query in queries if query.query_id not in self.rankings]
        if unranked:
            count = f"{len(unranked)} of {len(queries)} queries, first '{unranked[0]}'"
            say(f"warning: {self.path}: no ranking for {count}; they score 0")
        return rankings


def read_rankings(path: Path, stage: str | None) -> Rankings:
    """Read the rankings of one stage from a RANKINGS table.

    A table may hold the rankings of several stages, such as the rankings of several systems.

    Args:
        path: The table, or its folder.
        stage: Stage to read; None for the only stage of the table.

    Returns:
        Ranking by query id.

    Raises:
        SkilltrainError: The table lacks `stage`, or has several stages and none is given.
    """
    # In the order of ranks, each ranking has its best skill first.
    rows = read_table(path, RANKINGS).sort_by("rank").to_pylist()
    stages = sorted({row["stage"] for row in rows})
    if stage is None and len(stages) == 1:
        stage = stages[0]
    if stage not in stages:
        problem = f"holds rankings of {len(stages)} stages"
        if stage is not None:
            problem = f"holds no rankings of stage '{stage}'"
        fix = f"give stage=… as one of {', '.join(stages[:8])}"
        raise SkilltrainError("ranking-stage", problem, where=path, fix=fix)

    rankings = {}
    for row in rows:
        if row["stage"] == stage:
            pair = (row["skill_id"], row["score"])
            rankings.setdefault(row["query_id"], []).append(pair)
    return rankings


def rankings_table(rankings_by_stage: Mapping[str, Rankings]) -> pa.Table:
    """Make a RANKINGS table, with a row for each stage, query and ranked skill.

    Args:
        rankings_by_stage: Rankings by the name of their stage. The column `rank` counts from 1.
    """
    rows = []
    for stage, rankings in rankings_by_stage.items():
        for query_id, ranking in rankings.items():
            for rank, (skill_id, score) in enumerate(ranking, 1):
                rows.append(
                    {
                        "query_id": query_id,
                        "skill_id": skill_id,
                        "rank": rank,
                        "score": score,
                        "stage": stage,
                    }
                )
    return table_from_rows(rows, RANKINGS)
