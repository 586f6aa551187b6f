"""Run rankers one after the other, for evaluation, training, teacher scores and routing.

Notes:
    - A ranker that fuses others has several legs, which are these rankers. Any other ranker is its
      own only leg.
    - Each leg finds spare skills in place of excluded ones.
    - Processes of a distributed run use the rankings of the first one, because rounding could give
      them different rankings.
    - A ranker that asks a chat model has one leg, which holds its counts.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skilltrain.distributed import of_first_rank
from skilltrain.records import Query, Ranker, Ranking, Rankings, Skill
from skilltrain.retrieval.rankers import RankerConfig
from skilltrain.retrieval.vectors import shared_encoding


@dataclass
class OpenRankers:
    """Rankers over one pool. Each is opened when it is first used.

    Attributes:
        skills: The pool.
        opened: Rankers by their `key`, and the networks that rankers share by their source. The
            model in training has the key `OWN`.
    """

    skills: Sequence[Skill]
    opened: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankerRun:
    """The answers of one ranker to all queries.

    Attributes:
        config: Settings of the ranker.
        candidates: Rankings of the previous ranker; None for the first one, which ranks the pool.
        by_leg: Rankings of each leg: of each ranker that is fused, or only of the ranker itself.
        rankings: Rankings of the ranker.
        seconds: Mean time of a query.
        counts: Counts of a ranker that asks a chat model.
    """

    config: RankerConfig
    candidates: Rankings | None
    by_leg: Sequence[Rankings]
    rankings: Rankings
    seconds: float
    counts: Mapping[str, Any]


def run_rankers(
    rankers: Sequence[RankerConfig],
    queries: Sequence[Query],
    candidates: Rankings | None,
    pool: OpenRankers,
    observe: Callable[[RankerRun], object] = lambda run: None,
    excluded_ids: Collection[str] = (),
) -> Rankings:
    """Run rankers one after the other, and return the rankings of the last.

    Each ranker orders the skills that the previous ranker found.

    Args:
        rankers: Settings of the rankers. All have a `keep` (see `with_keeps`).
        queries: The queries.
        candidates: Rankings that the first ranker orders; None to search the pool.
        pool: The pool and its open rankers.
        observe: Called with the answers of each ranker, before the next ranker runs.
        excluded_ids: Ids of skills to leave out of a search.
    """
    rankings = candidates
    for config in rankers:
        run = run_ranker(config, queries, rankings, pool, excluded_ids)
        observe(run)
        rankings = run.rankings
    return rankings or {}


def run_ranker(
    config: RankerConfig,
    queries: Sequence[Query],
    candidates: Rankings | None,
    pool: OpenRankers,
    excluded_ids: Collection[str] = (),
) -> RankerRun:
    """Run one ranker. Its legs are the rankers that it fuses, or only itself.

    A search of the pool returns only skills that match the query in one of the legs, so a ranking
    may be shorter than `keep`. Candidates are ranked even if they do not match.

    Args:
        config: Settings of the ranker, with `keep`.
        queries: The queries.
        candidates: Rankings to order; None to search the pool for skills that match.
        pool: The pool and its open rankers.
        excluded_ids: Ids of skills to leave out of a search.
    """
    legs = [leg.ranker(pool.skills, pool.opened) for leg in config.legs]
    started = time.perf_counter()
    with shared_encoding():  # legs with the same encoder encode the queries once
        by_leg = _rank_legs(config, legs, queries, candidates, excluded_ids)
    # Combine the rankings of the legs, query by query.
    combined: Rankings = {}
    for query in queries:
        leg_rankings = [rankings[query.query_id] for rankings in by_leg]
        ranking = config.combine(leg_rankings)
        if candidates is None:
            ranking = _keep_matching(ranking, config, leg_rankings)
        combined[query.query_id] = ranking
    seconds = (time.perf_counter() - started) / len(queries)

    # All processes of a distributed run take the rankings of the first process, because rounding
    # could give them different rankings.
    combined = of_first_rank(combined)
    counts = getattr(legs[0], "counts", {})  # a ranker that asks a chat model has one leg
    return RankerRun(config, candidates, by_leg, combined, seconds, counts)


def _rank_legs(
    config: RankerConfig,
    legs: Sequence[Ranker],
    queries: Sequence[Query],
    candidates: Rankings | None,
    excluded_ids: Collection[str],
) -> list[Rankings]:
    """Return the rankings of each leg, without excluded skills if there are no candidates.

    Args:
        config: Settings of the ranker.
        legs: The open rankers that it fuses, or only the ranker itself.
        queries: The queries.
        candidates: Rankings to order; None to search the pool.
        excluded_ids: Ids of skills to leave out of a search.
    """
    # Skills are only excluded from a search. Candidates are ranked as they are.
    if candidates is not None:
        excluded_ids = ()

    by_leg = []
    for leg, top_k in zip(legs, config.leg_top_ks(candidates), strict=True):
        # Find spare skills in place of the excluded skills.
        rankings = leg.rank(queries, candidates, top_k + len(excluded_ids))
        if excluded_ids:
            rankings = _leave_out(rankings, excluded_ids, top_k)
        by_leg.append(rankings)
    return by_leg


def _keep_matching(
    ranking: Ranking, config: RankerConfig, leg_rankings: Sequence[Ranking]
) -> Ranking:
    """Return the skills of a ranking that match the query in at least one leg's ranking.

    For example, a skill matches in a lexical ranking if it has a word of the query.

    Args:
        ranking: Ranking of one query, combined from those of the legs.
        config: Settings of the ranker.
        leg_rankings: Ranking of the same query by each leg.
    """
    matching_ids = set()
    for leg_config, leg_ranking in zip(config.legs, leg_rankings, strict=True):
        matching_ids.update(skill_id for skill_id, _ in leg_config.matches(leg_ranking))
    return [pair for pair in ranking if pair[0] in matching_ids]


def with_keeps(rankers: Sequence[RankerConfig], depth: int) -> list[RankerConfig]:
    """Set `keep` of rankers that have none.

    It becomes `depth`, or the largest `keep` of the later rankers if that is more. A ranker must
    find all skills that the later rankers order.

    Args:
        rankers: Settings of a system's rankers, in order.
        depth: Number of skills that the last ranker should return.
    """
    filled = []
    num_needed = max(depth, 1)
    # Begin with the last ranker, so that the needs of the later rankers are known.
    for ranker in reversed(rankers):
        keep = num_needed if ranker.keep is None else ranker.keep
        num_needed = max(num_needed, keep)
        filled.append(ranker.model_copy(update={"keep": keep}))
    return filled[::-1]


def _leave_out(rankings: Rankings, excluded_ids: Collection[str], top_k: int) -> Rankings:
    """Return the `top_k` best skills of each ranking that are not in `excluded_ids`."""
    shorter = {}
    for query_id, ranking in rankings.items():
        shorter[query_id] = [pair for pair in ranking if pair[0] not in excluded_ids][:top_k]
    return shorter
