"""Rankings on disk: written by stages, and read as a ranker beside live ones."""

from collections.abc import Collection, Iterator, Mapping, Sequence
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
    answers_new_queries = False
    can_be_expanded = False

    def check(self) -> None:
        for path in self.rankings:
            if not table_path(path, RANKINGS).is_file():
                raise SkilltrainError("missing-table", "no rankings table here", where=path)

    def open(self, opened: dict[str, Any]) -> "Saved":
        """Read the rankings. Raises SkilltrainError for a query that two tables rank."""
        rankings: Rankings = {}
        for path in self.rankings:
            table = read_rankings(path, self.stage)
            repeated = rankings.keys() & table.keys()
            if repeated:
                problem = f"query '{min(repeated)}' is ranked in an earlier table as well"
                raise SkilltrainError("repeated-id", problem, where=path)
            rankings |= table
        return Saved(self.rankings[0], rankings, ())


@dataclass(frozen=True)
class Saved:
    """Rankings by query, the first table that holds them, and the ids of the pool."""

    path: Path
    rankings: Rankings
    pool: Collection[str]

    def over(self, skills: Mapping[str, Skill]) -> "Saved":
        return replace(self, pool=skills.keys())

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Return the first `keep` saved skills of each query, or those among its candidates.

        A query without a saved ranking gets none, with a warning.

        Raises:
            SkilltrainError: The pool lacks a ranked skill.
        """
        rankings: Rankings = {}
        missing: list[str] = []
        for query in queries:
            query_id = query.query_id
            if query_id not in self.rankings:
                missing.append(query_id)
            ranking = self.rankings.get(query_id, [])
            lost = [skill_id for skill_id, _ in ranking if skill_id not in self.pool]
            if lost:
                problem = f"{len(lost)} of its {len(ranking)} ranked skills are not in the pool"
                where = f"{self.path}, query {query_id}"
                raise SkilltrainError("unknown-skill", f"{problem}, first '{lost[0]}'", where=where)
            allowed = self.pool if candidates is None else dict(candidates[query_id])
            rankings[query_id] = [pair for pair in ranking if pair[0] in allowed][:keep]
        if missing:
            count = f"{len(missing)} of {len(queries)} queries, first '{missing[0]}'"
            say(f"warning: {self.path}: no ranking for {count}; they score 0")
        return rankings


def read_rankings(path: Path, stage: str | None) -> Rankings:
    """Read the rankings of a RANKINGS table by query id.

    Raises:
        SkilltrainError: The table lacks `stage`, or has several stages and none is given.
    """
    rows = read_table(path, RANKINGS).to_pylist()
    stages = sorted({row["stage"] for row in rows})
    if stage is None and len(stages) == 1:
        stage = stages[0]
    if stage not in stages:
        problem = f"holds rankings of {len(stages)} stages"
        if stage is not None:
            problem = f"holds no rankings of stage '{stage}'"
        fix = f"give stage=… as one of {', '.join(stages[:8])}"
        raise SkilltrainError("ranking-stage", problem, where=path, fix=fix)
    rankings: Rankings = {}
    for row in sorted(rows, key=lambda row: row["rank"]):
        if row["stage"] == stage:
            rankings.setdefault(row["query_id"], []).append((row["skill_id"], row["score"]))
    return rankings


def rankings_table(by_stage: Mapping[str, Rankings]) -> pa.Table:
    """Return rankings by stage as a RANKINGS table. Ranks count from 1."""

    def rows() -> Iterator[dict[str, Any]]:
        for stage, rankings in by_stage.items():
            for query_id, ranking in rankings.items():
                for rank, (skill_id, score) in enumerate(ranking, 1):
                    pair = {"query_id": query_id, "skill_id": skill_id}
                    yield pair | {"rank": rank, "score": score, "stage": stage}

    return table_from_rows(rows(), RANKINGS)
