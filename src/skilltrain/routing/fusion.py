"""Stage `fusion`: the weights of a `fuse` ranker, fitted on queries with gold, and what they are worth.

A weighted sum of normalised scores beats fusing by ranks, and a few queries suffice to find its weights (Bruch, Gai
and Ingber 2022, An Analysis of Fusion Functions for Hybrid Retrieval). Weights are not negative: made-up queries never
name their skill, so that a leg of names would be held against the skill that a real request names.

A leg that was trained on the same queries looks better than it is: data_pipelines/cross_fit.py fits out of fold.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Float64, Int64
from pydantic import Field, model_validator
from pydantic_core import to_jsonable_python

from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Task, check_pool
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.bootstrap import Interval, intervals
from skilltrain.evaluation.metrics import Relevance, parse_measures, per_query
from skilltrain.files import write_json
from skilltrain.records import Query, Ranker, Ranking, Rankings, Skill
from skilltrain.retrieval.cascade import SystemConfig, check_systems, keeps_of
from skilltrain.retrieval.rankers import (
    LEG_KEEP,
    WEIGHTS_FILE,
    FittedWeights,
    Fuse,
    FuseConfig,
    LegConfig,
    leg_name,
    open_ranker,
)
from skilltrain.retrieval.rankings import comparable_scores, weighted
from skilltrain.routing.candidates import plan_ranking
from skilltrain.runs import input_fingerprint
from skilltrain.terminal import say
from skilltrain.version import __version__

MEASURES = parse_measures(("Hit@1", "MRR@10"))
FITTED, EQUAL = "fitted", "equal weights"
CaseT = TypeVar("CaseT")
FittedT = TypeVar("FittedT")
_L2 = 1e-3  # keeps weights finite where few queries can be told apart without error


class FusionConfig(Config):
    """Fit the weights of a `fuse` ranker."""

    stage: Literal["fusion"]
    pool: InputPath = Field(description="SKILLS table, or whatever the stage pool reads")
    queries: InputPath = Field(
        description="folder with the QUERIES and JUDGEMENTS tables, or of a benchmark"
    )
    split: str | None = Field(
        description="fit on the queries of this split, which no leg was trained on; null for all"
    )
    system: SystemConfig = Field(
        description="what ranks; its last ranker is the fuse whose weights are fitted"
    )
    folds: int = Field(default=5, ge=2, description="parts of the queries for cross-validation")
    seed: Seed = Field(default=0, description="seed of the folds")
    out: Path = Field(
        description=f"folder to write: {WEIGHTS_FILE}, which `weights` of a fuse ranker reads"
    )

    @model_validator(mode="after")
    def _ends_with_a_fuse(self) -> "FusionConfig":
        last = self.system.rankers[-1]
        if not isinstance(last, FuseConfig) or last.method != "z" or last.weights is not None:
            raise ValueError(
                "the last ranker of the system must be a fuse of method z, without weights"
            )
        return self


@dataclass(frozen=True)
class Scored:
    """A query's candidates in the order in which they were found, what each leg says of them, and which are gold."""

    skill_ids: list[str]
    scores: Float64[np.ndarray, "leg skill"]
    gold: Bool[np.ndarray, " skill"]

    def ranked(self, weights: Float64[np.ndarray, " leg"]) -> Ranking:
        """The candidates as a fuse ranker of these weights orders them."""
        return weighted(self.skill_ids, self.scores, weights.tolist())


def run_fusion(config: FusionConfig, out: Path) -> dict[str, Any]:
    """Write the fitted weights; these with the figures, cross-validated, of what they are compared with.

    Raises SkilltrainError for a gold skill outside the pool, fewer groups of queries than folds, and legs that
    `scored_queries` or `fit_weights` refuse.
    """
    skills = read_pool(config.pool)
    benchmark = check_pool(
        load_benchmark(config.queries, config.split), {skill.skill_id for skill in skills}
    )
    tasks = benchmark.tasks
    clusters, folds = folds_of(tasks, config.folds, config.seed)
    legs, found = found_by_legs(config.system, benchmark.queries, skills)
    names = [f"{number} {leg_name(leg)}" for number, leg in enumerate(legs, 1)]
    scored = scored_queries(tasks, names, found)
    weights = fit_weights(scored)
    num_without = sum(not query.gold.any() for query in scored)
    if num_without:
        say(
            f"{num_without} of {len(scored)} queries have no gold skill among what the legs found: not fitted on"
        )
    rankings = dict(zip(names, found, strict=True)) | {FITTED: {}, EQUAL: {}}
    for task, query, elsewhere in zip(
        tasks, scored, fitted_elsewhere(fit_weights, scored, folds), strict=True
    ):
        rankings[FITTED][task.query.query_id] = query.ranked(elsewhere)
        rankings[EQUAL][task.query.query_id] = query.ranked(np.full(len(legs), 1 / len(legs)))
    figures = compare(rankings, benchmark.relevances, clusters)
    fitted = FittedWeights(
        weights=tuple(weights.tolist()),
        legs=tuple(legs),
        num_queries=len(scored),
        num_without_gold=num_without,
        folds=config.folds,
        seed=config.seed,
        figures=to_jsonable_python(figures),
        skilltrain=__version__,
        fingerprints={
            "pool": input_fingerprint(config.pool),
            "queries": input_fingerprint(config.queries),
        },
    )
    write_json(out / WEIGHTS_FILE, fitted.model_dump(mode="json"))
    return {
        "weights": dict(zip(names, weights.round(4).tolist(), strict=True)),
        "num_queries": len(scored),
        "num_groups": len(set(clusters)),
        "num_without_gold": num_without,
        "cross_validated": {
            name: {one: str(value) for one, value in row.items()} for name, row in figures.items()
        },
    }


def plan_fusion(config: FusionConfig) -> dict[str, Any]:
    queries = load_benchmark(config.queries, config.split).queries
    return plan_ranking([config.system], queries, read_pool(config.pool))


def found_by_legs(
    system: SystemConfig, queries: Sequence[Query], skills: Sequence[Skill]
) -> tuple[tuple[LegConfig, ...], list[Rankings]]:
    """The legs of a system's last ranker, and what each of them makes of what the rankers before it find."""
    check_systems([system])
    opened: dict[str, Ranker] = {}
    candidates: Rankings | None = None
    for ranker, keep in zip(system.rankers[:-1], keeps_of(system, LEG_KEEP), strict=False):
        candidates = open_ranker(ranker, skills, opened).rank(queries, candidates, keep)
    fuse = open_ranker(system.rankers[-1], skills, opened)
    assert isinstance(fuse, Fuse)
    return fuse.config.of, fuse.find(queries, candidates)


def scored_queries(
    tasks: Sequence[Task], names: Sequence[str], found: Sequence[Rankings]
) -> list[Scored]:
    """Each query's candidates, scored as `fuse` scores them.

    Raises SkilltrainError for a leg that lacks queries, or whose scores are no numbers or tell no candidates apart.
    """
    for name, rankings in zip(names, found, strict=True):
        if empty := [task.query.query_id for task in tasks if not rankings[task.query.query_id]]:
            what = f"ranks nothing for {len(empty)} of {len(tasks)} queries, first '{empty[0]}'"
            raise SkilltrainError(what, where=f"leg {name}", fix="all legs rank the same queries")
        for query_id, ranking in rankings.items():
            if not np.isfinite([score for _, score in ranking]).all():
                raise SkilltrainError(
                    f"gives query '{query_id}' scores that are no numbers", where=f"leg {name}"
                )
    scored: list[Scored] = []
    for task in tasks:
        skill_ids, scores = comparable_scores([leg[task.query.query_id] for leg in found], "z")
        scored.append(
            Scored(skill_ids, scores, np.array([one in task.relevance.gold for one in skill_ids]))
        )
    for number, name in enumerate(names):
        if not any(query.scores[number].any() for query in scored):
            what = "gives all candidates of a query the same score, so that no weight can be found for it"
            raise SkilltrainError(what, where=f"leg {name}", fix="leave it out")
    return scored


def fit_weights(queries: Sequence[Scored]) -> Float64[np.ndarray, " leg"]:
    """The weights w ≥ 0 that make gold skills likeliest, where a skill's logit is Σ w · score over the legs.

    The mean over queries of the cross-entropy between a softmax over the query's candidates and equal shares of 1 for
    the gold skills among them, plus a trace of ‖w‖². It is convex, so the weights are the only best ones; queries
    without gold among their candidates do not count. Raises SkilltrainError where no query has gold, or where no leg
    ranks gold above others.
    """
    told = [query for query in queries if query.gold.any()]
    if not told:
        raise SkilltrainError(
            f"the legs find no gold skill of {len(queries)} queries, so there is nothing to fit on"
        )
    scores = np.concatenate([query.scores for query in told], axis=1)
    target = np.concatenate([query.gold / query.gold.sum() for query in told])
    sizes = np.array([len(query.gold) for query in told])
    starts = np.cumsum(sizes) - sizes

    def loss(weights: Float64[np.ndarray, " leg"]) -> tuple[float, Float64[np.ndarray, " leg"]]:
        logits = weights @ scores
        largest = np.maximum.reduceat(logits, starts)
        odds = np.exp(logits - np.repeat(largest, sizes))
        sums = np.add.reduceat(odds, starts)
        entropy = (np.log(sums) + largest).sum() - target @ logits
        gradient = scores @ (odds / np.repeat(sums, sizes) - target)
        return entropy / len(told) + _L2 / 2 * weights @ weights, gradient / len(
            told
        ) + _L2 * weights

    from scipy.optimize import minimize

    start = np.full(len(scores), 1 / len(scores))
    options = {"ftol": 1e-12, "gtol": 1e-8}
    found = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=[(0, None)] * len(scores), options=options
    )
    if not found.x.any():
        raise SkilltrainError("no leg ranks gold skills above others, so every weight would be 0")
    return found.x


def folds_of(
    tasks: Sequence[Task], num_folds: int, seed: int
) -> tuple[list[str], Int64[np.ndarray, " query"]]:
    """For each query what names its group, and its fold; queries that share a gold skill are of one group, and fold.

    Groups go, in an order drawn by `seed`, to the fold with the fewest queries. Raises SkilltrainError for fewer groups
    than folds.
    """
    from scipy.cluster.hierarchy import DisjointSet

    golds = [sorted(task.relevance.gold) for task in tasks]
    linked = DisjointSet({skill_id: None for gold in golds for skill_id in gold})
    for first, *others in golds:
        for other in others:
            linked.merge(first, other)
    groups = [str(linked[gold[0]]) for gold in golds]
    counts = Counter(groups)
    names = [*counts]
    if len(names) < num_folds:
        what = f"{len(tasks)} queries for {len(names)} unrelated gold skills cannot be cut into {num_folds} folds"
        raise SkilltrainError(what, fix="give fewer folds, or more queries")
    sizes, fold = np.zeros(num_folds, dtype=np.int64), dict[str, int]()
    for place in np.random.default_rng(seed).permutation(len(names)).tolist():
        fold[names[place]] = int(sizes.argmin())
        sizes[fold[names[place]]] += counts[names[place]]
    return groups, np.array([fold[group] for group in groups], dtype=np.int64)


def fitted_elsewhere(
    fit: Callable[[Sequence[CaseT]], FittedT],
    cases: Sequence[CaseT],
    folds: Int64[np.ndarray, " case"],
) -> list[FittedT]:
    """For each case what `fit` makes of the cases of other folds."""
    others = (
        [case for case, own in zip(cases, folds, strict=True) if own != fold]
        for fold in range(folds.max() + 1)
    )
    fitted = [fit(cases) for cases in others]
    return [fitted[fold] for fold in folds]


def compare(
    rankings: Mapping[str, Rankings], relevances: Mapping[str, Relevance], clusters: Sequence[str]
) -> dict[str, dict[str, Interval]]:
    """System → measure → its mean; and `fitted - SYSTEM` → measure → the mean difference, query by query.

    Queries of one name in `clusters` are drawn together.
    """
    values: dict[str, Float64[np.ndarray, "query measure"]] = {}
    for name, ranked in rankings.items():
        ids = {
            query_id: [skill_id for skill_id, _ in ranking] for query_id, ranking in ranked.items()
        }
        rows = per_query(ids, relevances, MEASURES).values()
        values[name] = np.array([[row[str(measure)] for measure in MEASURES] for row in rows])
    values |= {
        f"{FITTED} - {name}": values[FITTED] - table
        for name, table in values.items()
        if name != FITTED
    }
    return {
        name: dict(zip(map(str, MEASURES), intervals(table, clusters), strict=True))
        for name, table in values.items()
    }
