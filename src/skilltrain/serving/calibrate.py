"""Stage `calibrate`: what a router's scores are worth, on queries that a skill serves and on such that none does.

Each query is routed twice: over the pool as it is, and as if the skills that serve it and their copies were not there,
so that whatever is answered then is wrong. All figures are by cross-validation over the queries.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import floor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from pydantic import Field

from skilltrain.config import InputPath, Seed
from skilltrain.data.near_duplicates import copies_of
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_json
from skilltrain.metrics.benchmarks.benchmark import Task, add_copies, check_pool
from skilltrain.metrics.benchmarks.load import load_benchmark, read_unserved
from skilltrain.metrics.bootstrap import share
from skilltrain.serving.answer import Calibration, Calibrator, Trace
from skilltrain.serving.index import AllowedServers
from skilltrain.serving.indexing import CALIBRATION_FILE
from skilltrain.serving.router import Router
from skilltrain.stage import Stage, Summary
from skilltrain.terminal import track

_FITTED = 3  # skills of a query; further ones are nearly never right, and would only tell that
_ANY = -1e9  # below every score
_L2 = 1e-2  # keeps weights finite where few answers can be told apart without error
_BINS = 10


class Calibrate(Stage):
    """Fit a router's probabilities, and the threshold below which no skill fits."""

    example = "router=runs/router queries=runs/queries clusters=runs/clusters out=runs/calibration"
    result = (
        "{num_queries} queries: {answered} answered, {falsely_answered} where no skill fits; "
        "calibration error {calibration_error}"
    )
    next_command = "index calibration={out} out={router}"

    stage: Literal["calibrate"]
    router: InputPath = Field(description="folder of the router")
    queries: InputPath = Field(
        description="folder with the QUERIES and JUDGEMENTS tables, or of a benchmark"
    )
    split: str | None = Field(
        default="dev", description="queries that no model was trained on; null for all"
    )
    clusters: InputPath | None = Field(
        default=None, description="CLUSTERS of the pool: copies of gold count as right"
    )
    unserved: InputPath | None = Field(
        default=None, description="JSON Lines of queries that no skill serves (`query`)"
    )
    answered: float = Field(
        default=0.9, gt=0, lt=1, description="share of served tasks to answer: sets the threshold"
    )
    contained: float = Field(
        default=0.9, gt=0, lt=1, description="share whose likely set is to hold a right skill"
    )
    folds: int = Field(default=5, ge=2, description="parts of the queries for cross-validation")
    seed: Seed = Field(default=0, description="seed of the folds")
    allow_servers: AllowedServers = ()
    out: Path = Field(
        description=f"folder to write: {CALIBRATION_FILE}, which the stage index takes in"
    )

    def run(self, out: Path) -> Summary:
        """Write the calibration, and return its metrics.

        Raises:
            SkilltrainError: The router lacks a gold skill, there are fewer groups of queries than
                folds, or the router's first skill is never right.
        """
        router = Router.load(self.router, self.allow_servers)
        assert router.index is not None
        record = router.index.record
        benchmark = check_pool(load_benchmark(self.queries, self.split), router.skills.keys())
        if self.clusters is not None:
            gold = {skill_id for task in benchmark.tasks for skill_id in task.relevance.gold}
            benchmark = add_copies(benchmark, copies_of(gold, router.skills, self.clusters))
        folds = assign_folds(benchmark.tasks, self.folds, self.seed)
        cases: list[Case] = []
        for task in track(benchmark.tasks, "routing", len(benchmark.tasks)):
            relevance = task.relevance
            gains = (skill_id for skill_id, gain in relevance.gains.items() if gain > 0)
            right = frozenset([*relevance.gold, *relevance.alternatives, *relevance.copies, *gains])
            for without in ((), right):
                traced = router.trace(task.query.text, without)
                cases.append(
                    Case(
                        traced,
                        tuple(skill_id in right for skill_id, _ in traced.ranking),
                        not without,
                    )
                )
        calibrator = fit_calibrator(cases, self.answered, self.contained)
        figures = _figures(cases, np.repeat(folds, 2), self)
        if self.unserved is not None:
            unserved = read_unserved(self.unserved)
            figures["unserved"] = share(
                [calibrator.fits(router.trace(query.text)) for query in unserved]
            )
        found = {
            "system": record.rankers,
            "models": record.models,
            "calibrator": calibrator,
            "figures": figures,
        }
        calibration = Calibration(**found, num_queries=len(benchmark.tasks)).model_dump(mode="json")
        write_json(out / CALIBRATION_FILE, calibration)
        return {"num_queries": len(benchmark.tasks), **calibration["figures"]}


class Case(NamedTuple):
    """What a router made of a query, which of the ranked skills are right, and whether the pool holds any."""

    traced: Trace
    right: tuple[bool, ...]
    is_served: bool


def fit_calibrator(cases: Sequence[Case], answered: float, contained: float) -> Calibrator:
    """Probabilities by the first skills of all cases; threshold and likely set by the cases that a skill serves.

    Raises SkilltrainError where the first skill is never right.
    """
    if not any(case.right[:1] == (True,) for case in cases):
        raise SkilltrainError(
            "cannot-calibrate",
            "the router's first skill is never right, so there is nothing to calibrate",
        )
    rankers = tuple(cases[0].traced.rankings_by_ranker)
    rows = np.concatenate([case.traced.features(rankers)[:_FITTED] for case in cases])
    weights, intercept = fit_logistic(
        rows, np.concatenate([case.right[:_FITTED] for case in cases])
    )
    start = {"threshold": 0.0, "least": (), "miss": 1.0}
    found = Calibrator(
        rankers=rankers, weights=tuple(weights.tolist()), intercept=intercept, **start
    )
    served = [case for case in cases if case.is_served]
    level = 1 - (1 - answered) / (
        1 + len(rankers)
    )  # each bound may turn away as many: together, 1 - answered at most
    sure = [found.probabilities(case.traced) for case in served]
    best = [max(one[[*case.right]], default=0.0) for one, case in zip(sure, served, strict=True)]
    limits = {
        "threshold": bound(np.array([max(one, default=0.0) for one in sure]), level),
        "least": tuple(
            bound(of, level, _ANY)
            for of in np.array([case.traced.top_scores(rankers) for case in served]).T
        ),
        "miss": 1 - bound(np.array(best), contained),
    }
    return found.model_copy(update=limits)


def fit_logistic(
    rows: Float64[np.ndarray, "row feature"], labels: Bool[np.ndarray, " row"]
) -> tuple[Float64[np.ndarray, " feature"], float]:
    """(weights ≥ 0, intercept) by which `labels` are likeliest, with a trace of L2 on weights of scaled features."""
    from scipy.optimize import minimize

    mean, spread = rows.mean(0), rows.std(0)
    spread[spread == 0] = 1
    scaled = np.column_stack([(rows - mean) / spread, np.ones(len(rows))])

    def loss(
        values: Float64[np.ndarray, " feature"],
    ) -> tuple[float, Float64[np.ndarray, " feature"]]:
        logits, free = scaled @ values, np.append(values[:-1], 0.0)
        odds = 1 / (1 + np.exp(-logits))
        entropy = np.logaddexp(0, logits).mean() - logits[labels].sum() / len(rows)
        return entropy + _L2 / 2 * free @ free, scaled.T @ (odds - labels) / len(rows) + _L2 * free

    bounds = [(0, None)] * rows.shape[1] + [(None, None)]
    found = minimize(loss, np.zeros(len(bounds)), jac=True, method="L-BFGS-B", bounds=bounds).x
    weights = found[:-1] / spread
    return weights, float(found[-1] - mean @ weights)


def bound(values: Float64[np.ndarray, " query"], level: float, lowest: float = 0.0) -> float:
    """What the value of a new query reaches with a chance of at least `level`; `lowest` where too few tell.

    The (n + 1)(1 - level)-th lowest of n: split conformal prediction (Angelopoulos and Bates 2021, section 1).
    """
    place = floor((len(values) + 1) * (1 - level) + 1e-9)  # .1 · 10 is a little less than 1
    return float(np.sort(values)[place - 1]) if place else lowest


def _figures(
    cases: Sequence[Case], folds: Int64[np.ndarray, " case"], config: Calibrate
) -> dict[str, Any]:
    """What calibrators are worth that were fitted on the cases of other folds.

    Calibration error, risk and coverage are over the queries with and without their skills, in equal parts.
    """
    fit = partial(fit_calibrator, answered=config.answered, contained=config.contained)
    rows: list[list[float]] = []
    calibrators = fit_out_of_fold(fit, cases, folds)
    for (traced, right, is_served), calibrator in zip(cases, calibrators, strict=True):
        top, size = (
            max(calibrator.probabilities(traced), default=0.0),
            calibrator.num_likely(traced),
        )
        rows.append(
            [top, size, any(right[:1]), calibrator.fits(traced), any(right[:size]), is_served]
        )
    tops, sizes, *facts = np.array(rows, dtype=np.float64).T
    right, fits, contains, served = (fact > 0 for fact in facts)
    return {
        "right": share(right[served]),
        "answered": share(fits[served]),
        "right_if_answered": share(right[served & fits]),
        "falsely_answered": share(fits[~served]),
        "contained": share(contains[served]),
        "num_likely": float(sizes[served].mean()),
        "calibration_error": calibration_error(tops, right),
        "risk_coverage": risk_coverage(tops, right),
    }


def assign_folds(tasks: Sequence[Task], num_folds: int, seed: int) -> Int64[np.ndarray, " query"]:
    """Return the fold of each query. Queries that share a gold skill are in the same fold.

    Groups of such queries go, in an order drawn by `seed`, to the fold with the fewest queries.

    Raises:
        SkilltrainError: There are fewer groups than folds.
    """
    from scipy.cluster.hierarchy import DisjointSet

    linked = DisjointSet()
    for task in tasks:
        first, *others = task.relevance.gold
        linked.add(first)
        for other in others:
            linked.add(other)
            linked.merge(first, other)
    groups = [linked[min(task.relevance.gold)] for task in tasks]
    sizes = Counter(groups)
    if len(sizes) < num_folds:
        what = (
            f"{len(tasks)} queries for {len(sizes)} unrelated gold skills cannot be cut into "
            f"{num_folds} folds"
        )
        raise SkilltrainError("cannot-calibrate", what, fix="give fewer folds, or more queries")
    names = [*sizes]
    num_queries = np.zeros(num_folds, dtype=np.int64)
    folds: dict[str, int] = {}
    for position in np.random.default_rng(seed).permutation(len(names)).tolist():
        name = names[position]
        folds[name] = int(num_queries.argmin())
        num_queries[folds[name]] += sizes[name]
    return np.array([folds[group] for group in groups], dtype=np.int64)


def fit_out_of_fold(
    fit: Callable[[Sequence[Case]], Calibrator],
    cases: Sequence[Case],
    folds: Int64[np.ndarray, " case"],
) -> list[Calibrator]:
    """Return for each case the calibrator fitted on the cases of the other folds."""
    fitted: list[Calibrator] = []
    for fold in range(folds.max() + 1):
        others = [case for case, own_fold in zip(cases, folds, strict=True) if own_fold != fold]
        fitted.append(fit(others))
    return [fitted[fold] for fold in folds]


def calibration_error(
    probabilities: Float64[np.ndarray, " answer"], is_right: Bool[np.ndarray, " answer"]
) -> float:
    """The expected calibration error: the mean gap of confidence and accuracy over ten bins of equally many answers.

    Source: Naeini et al. 2015, with bins of equal mass (Nixon et al. 2019).
    """
    bins = np.array_split(np.argsort(probabilities, kind="stable"), min(_BINS, len(probabilities)))
    gaps = [len(one) * abs(probabilities[one].mean() - is_right[one].mean()) for one in bins]
    return float(sum(gaps) / len(probabilities))


def risk_coverage(
    probabilities: Float64[np.ndarray, " answer"], is_right: Bool[np.ndarray, " answer"]
) -> list[tuple[float, float]]:
    """(share of tasks that are answered, share of these answers that are wrong), the surest tasks answered first.

    One point for each tenth. Source: El-Yaniv and Wiener 2010.
    """
    wrong = np.cumsum(~is_right[np.argsort(-probabilities, kind="stable")])
    counts = [round(len(wrong) * share / _BINS) for share in range(1, _BINS + 1)]
    return [
        (round(count / len(wrong), 4), round(float(wrong[count - 1]) / count, 4))
        for count in counts
        if count
    ]
