"""Stages `candidates` and `teacher`: write a system's rankings, or its scores of given lists."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, field_validator

from skilltrain.config import InputPath, PoolPath
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.cascade import SystemConfig, check_systems, run_systems
from skilltrain.retrieval.executor import OpenRankers, run_rankers
from skilltrain.retrieval.rankers import AnyRanker, RankerConfig, flatten_rankers
from skilltrain.retrieval.rankings import rankings_table
from skilltrain.stage import Stage, Summary
from skilltrain.tables import (
    JUDGEMENTS,
    LISTS,
    QUERIES,
    RANKINGS,
    read_lists,
    read_queries,
    read_table,
    select_queries,
    write_table,
)


class Candidates(Stage):
    """Rank the pool for every query, for the reranker to learn from."""

    example = (
        "pool=runs/pool queries=runs/queries system.name=encoder 'system.rankers=[{kind: "
        "dense, source: runs/encoder}]' out=runs/candidates"
    )
    result = "{num_candidates} candidates for {num_queries} queries"
    next_command = (
        "filter pool={pool} queries={queries} rankings={out} judged_positives=keep "
        "encoder.source={base} out={near}/candidates_filtered"
    )

    stage: Literal["candidates"]
    pool: PoolPath
    queries: InputPath = Field(description="folder with the QUERIES table")
    split: str | None = Field(
        default="train", description="rank for the queries of this split only; null for all"
    )
    system: SystemConfig = Field(
        description="a name and a list of rankers; the last ranking is written"
    )
    depth: int = Field(default=50, ge=1, description="candidates per query")
    out: Path = Field(description="folder to write: RANKINGS")

    def run(self, out: Path) -> Summary:
        """Write RANKINGS and return the counts of queries and rows."""
        queries = select_queries(self.queries, self.split)
        stages = run_systems([self.system], queries, read_pool(self.pool), self.depth)
        last = stages[self.system.name][-1]
        table = rankings_table({last.name: last.rankings})
        write_table(table, RANKINGS, out)
        return {"num_queries": len(queries), "num_candidates": table.num_rows}

    def dry_run(self) -> Summary:
        """Count the queries and skills to rank, and estimate the cost."""
        queries = select_queries(self.queries, self.split)
        return estimate_ranking([self.system], queries, read_pool(self.pool))


def estimate_ranking(
    systems: Sequence[SystemConfig], queries: Sequence[Query], skills: Sequence[Skill]
) -> dict[str, Any]:
    """Estimate the work and the cost of ranking, for `--dry-run`. Sends nothing.

    Args:
        systems: Systems to run.
        queries: Queries to rank.
        skills: Skills of the pool.

    Returns:
        Counts. If chat models or embeddings servers take part, also their costs by system and
        ranker (`asked`), and the sum in dollars, which is None if a price is not known.

    Raises:
        SkilltrainError: A system cannot run.
    """
    check_systems(systems)
    counts = {"num_queries": len(queries), "num_skills": len(skills), "num_systems": len(systems)}
    costs_by_system: dict[str, dict[str, Any]] = {}
    dollars = []
    counted_keys = set()  # a key is equal for rankers with the same model and settings
    for system in systems:
        for ranker in flatten_rankers(system.rankers):
            # Systems share embeddings, but each of them asks its chat models anew.
            if ranker.key in counted_keys and not ranker.asks_chat_model:
                continue
            counted_keys.add(ranker.key)
            # A ranker that runs on this machine costs nothing, and returns None.
            cost = ranker.dry_run(queries, skills)
            if cost is None:
                continue
            costs = costs_by_system.setdefault(system.name, {})

            # Append the position among the system's costs if the kind occurs again: `rerank 3`.
            name = ranker.kind
            if name in costs:
                name += f" {len(costs) + 1}"
            costs[name] = cost
            dollars.append(cost["dollars"])
    if not costs_by_system:
        return counts
    # `dollars` holds None for a model whose price is not known.
    total = None if None in dollars else round(sum(dollars), 6)
    return counts | {"asked": costs_by_system, "dollars": total}


class Teacher(Stage):
    """Add teacher scores to training lists, for distillation (kl, margin_mse)."""

    example = (
        "pool=runs/pool lists=runs/encoder_lists 'rankers=[{kind: rerank, source: "
        "runs/reranker}]' out=runs/taught"
    )
    result = "{num_pairs} scores in {num_lists} lists: {score}"
    next_command = "train RECIPE data.pool={pool} data.lists={out} loss.name=kl"

    stage: Literal["teacher"]
    pool: PoolPath
    lists: InputPath = Field(
        description="folder with lists, queries and judgements, as the stage lists writes it"
    )
    rankers: tuple[AnyRanker, ...] = Field(
        min_length=1,
        description="rankers of a system, such as [{kind: rerank, source: runs/reranker}]; each "
        "orders whole lists, and the last one gives the scores",
    )
    out: Path = Field(
        description="folder to write: LISTS with teacher_scores, QUERIES and JUDGEMENTS"
    )

    @field_validator("rankers")
    @classmethod
    def _check_rankers(cls, rankers: tuple[RankerConfig, ...]) -> tuple[RankerConfig, ...]:
        for ranker in rankers:
            if not ranker.gives_scores:
                raise ValueError(f"{ranker.kind} chooses skills and gives no scores to learn from")
        return rankers

    def run(self, out: Path) -> Summary:
        """Write the lists with scores, and return the range of the scores.

        Rankers, the last of which is the teacher, score the skills of each list. A model can then
        be trained to imitate these scores. The range helps to choose `teacher_temperature`.

        Args:
            out: Folder to write the lists to.

        Raises:
            SkilltrainError: A list has no query text, a skill is not in the pool, or a skill gets
                no score.
        """
        for ranker in flatten_rankers(self.rankers):
            ranker.check()
        lists = read_lists(self.lists)
        if not lists:
            raise SkilltrainError("no-list", "holds no list to score", where=self.lists)

        # Check that all queries and skills of the lists are known.
        queries = {query.query_id: query for query in read_queries(self.lists)}
        skills = read_pool(self.pool)
        pool_ids = {skill.skill_id for skill in skills}
        unknown_ids = set()
        for row in lists:
            if row["query_id"] not in queries:
                problem = f"the list of query {row['query_id']!r} has no query text"
                raise SkilltrainError("unknown-query", problem, where=self.lists)
            unknown_ids |= set(row["skill_ids"]) - pool_ids
        if unknown_ids:
            problem = (
                f"{len(unknown_ids)} skill(s) of the lists are not in this pool, "
                f"{min(unknown_ids)!r} among them"
            )
            fix = "give the pool that the lists were made from"
            raise SkilltrainError("unknown-skill", problem, where=self.pool, fix=fix)

        # Score the skills of each list. `scores` has the query id as key.
        skill_ids_by_query = {row["query_id"]: row["skill_ids"] for row in lists}
        list_queries = [queries[query_id] for query_id in skill_ids_by_query]
        scores = member_scores(self.rankers, list_queries, skill_ids_by_query, skills)
        rows = [row | {"teacher_scores": scores[row["query_id"]]} for row in lists]
        write_table(rows, LISTS, out)
        # Copy the other two tables, so that the folder is complete for training.
        for spec in (QUERIES, JUDGEMENTS):
            write_table(read_table(self.lists, spec), spec, out)

        all_scores = list(chain.from_iterable(scores.values()))
        score = {
            "min": round(min(all_scores), 4),
            "mean": round(fmean(all_scores), 4),
            "max": round(max(all_scores), 4),
        }
        return {"num_lists": len(lists), "num_pairs": len(all_scores), "score": score}


def member_scores(
    rankers: Sequence[RankerConfig],
    queries: Sequence[Query],
    members: Mapping[str, Sequence[str]],
    skills: Sequence[Skill],
) -> dict[str, list[float]]:
    """Score given skills of each query with the last of several rankers.

    Args:
        rankers: Rankers in order. Each one ranks all given skills; none is dropped.
        queries: Queries of `members`.
        members: Ids of the given skills by query id.
        skills: Skills of the pool.

    Returns:
        Scores by query id, in the order of the given skills.

    Raises:
        SkilltrainError: A skill gets no score, or a score that is no number.
    """
    # The given skills are the candidates of the first ranker. They have no scores yet, so all get
    # 0.
    candidates: Rankings = {}
    for query_id, skill_ids in members.items():
        candidates[query_id] = [(skill_id, 0.0) for skill_id in skill_ids]
    max_skills = max(map(len, members.values()))
    # A ranker keeps only its best skills. Let it keep as many as the longest list has.
    keeping_rankers = [ranker.with_keep(max_skills) for ranker in rankers]
    rankings = run_rankers(keeping_rankers, queries, candidates, OpenRankers(skills))

    scores = {}
    for query_id, skill_ids in members.items():
        # The last ranker gives the final ranking: pairs of a skill id and a score.
        score_by_id = dict(rankings[query_id])
        for skill_id in skill_ids:
            score = score_by_id.get(skill_id)
            if score is None or not math.isfinite(score):
                result = "no score" if score is None else score
                problem = f"gave skill {skill_id!r} {result}, and a teacher must give a number"
                where = f"ranker {len(rankers)}, {rankers[-1].kind}, query {query_id}"
                raise SkilltrainError("not-a-number", problem, where=where)
        scores[query_id] = [score_by_id[skill_id] for skill_id in skill_ids]
    return scores
