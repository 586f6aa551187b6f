"""Stage `calibrate`: fit a router's probabilities on queries that some skill serves, and on others.

Each query is routed twice: over the whole pool, and without the skills that serve it and their
copies. Every answer of the second time is wrong. All metrics are by cross-validation over queries.
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

_MAX_RANK = 3  # of skills that weights are fitted to; lower ranks are hardly ever right
_BELOW_ALL_SCORES = -1e9
_L2 = 1e-2  # keeps weights finite if they can separate right answers from wrong ones
_NUM_BINS = 10


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
        default=None, description="JSON Lines of queries (key `query`) that no skill serves"
    )
    answered: float = Field(
        default=0.9, gt=0, lt=1, description="share of served tasks to answer: sets the threshold"
    )
    contained: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="share of served tasks whose likely skills hold a right one",
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
        cases = _route_cases(router, benchmark.tasks)
        calibrator = fit_calibrator(cases, self.answered, self.contained)

        metrics = _cross_validate(cases, np.repeat(folds, 2), self)
        if self.unserved is not None:
            traces = [router.trace(query.text) for query in read_unserved(self.unserved)]
            metrics["unserved"] = share([calibrator.fits(trace) for trace in traces])
        calibration = Calibration(
            system=record.rankers,
            models=record.models,
            calibrator=calibrator,
            figures=metrics,
            num_queries=len(benchmark.tasks),
        ).model_dump(mode="json")
        write_json(out / CALIBRATION_FILE, calibration)
        return {"num_queries": len(benchmark.tasks), **calibration["figures"]}


class Case(NamedTuple):
    """A routed query.

    Attributes:
        trace: Rankings of the router.
        is_right: Whether each skill of the final ranking serves the query.
        is_served: Whether the pool holds a skill that serves the query.
    """

    trace: Trace
    is_right: tuple[bool, ...]
    is_served: bool


def _route_cases(router: Router, tasks: Sequence[Task]) -> list[Case]:
    """Route each query with the skills that serve it, and then without them."""
    cases: list[Case] = []
    for task in track(tasks, "routing", len(tasks)):
        relevance = task.relevance
        right_ids = {*relevance.gold, *relevance.alternatives, *relevance.copies}
        right_ids |= {skill_id for skill_id, gain in relevance.gains.items() if gain > 0}
        for is_served in (True, False):
            trace = router.trace(task.query.text, () if is_served else right_ids)
            is_right = tuple(skill_id in right_ids for skill_id, _ in trace.ranking)
            cases.append(Case(trace, is_right, is_served))
    return cases


def fit_calibrator(cases: Sequence[Case], answered: float, contained: float) -> Calibrator:
    """Fit a calibrator.

    Args:
        cases: All of them are used for the probabilities, and those that a skill serves for the
            threshold and the likely set.
        answered: Share of served tasks that the router is to answer.
        contained: Share of served tasks whose likely set is to hold a right skill.

    Raises:
        SkilltrainError: The first skill is never right.
    """
    if not any(case.is_right[:1] == (True,) for case in cases):
        problem = "the router's first skill is never right, so there is nothing to calibrate"
        raise SkilltrainError("cannot-calibrate", problem)
    rankers = tuple(cases[0].trace.rankings_by_ranker)
    weights, intercept = fit_logistic(
        np.concatenate([case.trace.features(rankers)[:_MAX_RANK] for case in cases]),
        np.concatenate([case.is_right[:_MAX_RANK] for case in cases]),
    )
    # The limits are set below: they depend on the probabilities.
    calibrator = Calibrator(
        rankers=rankers,
        weights=tuple(weights.tolist()),
        intercept=intercept,
        threshold=0.0,
        least=(),
        miss=1.0,
    )

    served = [case for case in cases if case.is_served]
    probabilities = [calibrator.probabilities(case.trace) for case in served]
    best = [max(row, default=0.0) for row in probabilities]
    best_right: list[float] = []
    for row, case in zip(probabilities, served, strict=True):
        best_right.append(max(row[[*case.is_right]], default=0.0))
    top_scores = np.array([case.trace.top_scores(rankers) for case in served])

    # The best probability and each ranker's top score have a bound. All bounds together may turn
    # away the share 1 - answered, and each of them an equal part of it.
    level = 1 - (1 - answered) / (1 + len(rankers))
    limits = {
        "threshold": bound(np.array(best), level),
        "least": tuple(bound(scores, level, _BELOW_ALL_SCORES) for scores in top_scores.T),
        "miss": 1 - bound(np.array(best_right), contained),
    }
    return calibrator.model_copy(update=limits)


def fit_logistic(
    rows: Float64[np.ndarray, "row feature"], labels: Bool[np.ndarray, " row"]
) -> tuple[Float64[np.ndarray, " feature"], float]:
    """Fit a logistic regression without negative weights. Return its weights and its intercept.

    Features are scaled to unit variance for the fit, and their weights have a small L2 penalty.
    """
    from scipy.optimize import minimize

    mean = rows.mean(0)
    spread = rows.std(0)
    spread[spread == 0] = 1
    # The last column is the intercept's.
    scaled = np.column_stack([(rows - mean) / spread, np.ones(len(rows))])

    def loss(
        values: Float64[np.ndarray, " feature"],
    ) -> tuple[float, Float64[np.ndarray, " feature"]]:
        """Return the penalized cross-entropy and its gradient."""
        logits = scaled @ values
        penalized = np.append(values[:-1], 0.0)
        probabilities = 1 / (1 + np.exp(-logits))
        entropy = np.logaddexp(0, logits).mean() - logits[labels].sum() / len(rows)
        gradient = scaled.T @ (probabilities - labels) / len(rows) + _L2 * penalized
        return entropy + _L2 / 2 * penalized @ penalized, gradient

    bounds = [(0, None)] * rows.shape[1] + [(None, None)]
    values = minimize(loss, np.zeros(len(bounds)), jac=True, method="L-BFGS-B", bounds=bounds).x
    weights = values[:-1] / spread
    return weights, float(values[-1] - mean @ weights)


def bound(values: Float64[np.ndarray, " query"], level: float, lowest: float = 0.0) -> float:
    """Return the bound that a new query's value reaches with a probability of at least `level`.

    It is the (n + 1)(1 - level)-th lowest of the n values, or `lowest` if they are too few for
    `level`. Source: split conformal prediction (Angelopoulos and Bates 2021, section 1).
    """
    rank = floor((len(values) + 1) * (1 - level) + 1e-9)  # rounding may make .1 · 10 less than 1
    return float(np.sort(values)[rank - 1]) if rank else lowest


def _cross_validate(
    cases: Sequence[Case], folds: Int64[np.ndarray, " case"], config: Calibrate
) -> dict[str, Any]:
    """Measure calibrators on the cases of folds that they were not fitted on.

    Calibration error, risk and coverage count all cases, and the other metrics only cases that a
    skill serves, except `falsely_answered`, which counts the others.
    """
    fit = partial(fit_calibrator, answered=config.answered, contained=config.contained)
    calibrators = fit_out_of_fold(fit, cases, folds)
    pairs = [*zip(cases, calibrators, strict=True)]
    confidence = np.array([max(c.probabilities(case.trace), default=0.0) for case, c in pairs])
    num_likely = np.array([c.num_likely(case.trace) for case, c in pairs])
    answered = np.array([c.fits(case.trace) for case, c in pairs])
    served = np.array([case.is_served for case in cases])
    right = np.array([any(case.is_right[:1]) for case in cases])
    contained = [any(case.is_right[:size]) for case, size in zip(cases, num_likely, strict=True)]
    return {
        "right": share(right[served]),
        "answered": share(answered[served]),
        "right_if_answered": share(right[served & answered]),
        "falsely_answered": share(answered[~served]),
        "contained": share(np.array(contained)[served]),
        "num_likely": float(num_likely[served].mean()),
        "calibration_error": calibration_error(confidence, right),
        "risk_coverage": risk_coverage(confidence, right),
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
        problem = (
            f"{len(tasks)} queries for {len(sizes)} unrelated gold skills cannot be cut into "
            f"{num_folds} folds"
        )
        raise SkilltrainError("cannot-calibrate", problem, fix="give fewer folds, or more queries")

    names = [*sizes]
    num_queries = np.zeros(num_folds, dtype=np.int64)
    fold_by_group: dict[str, int] = {}
    for position in np.random.default_rng(seed).permutation(len(names)).tolist():
        name = names[position]
        fold_by_group[name] = int(num_queries.argmin())
        num_queries[fold_by_group[name]] += sizes[name]
    return np.array([fold_by_group[group] for group in groups], dtype=np.int64)


def fit_out_of_fold(
    fit: Callable[[Sequence[Case]], Calibrator],
    cases: Sequence[Case],
    folds: Int64[np.ndarray, " case"],
) -> list[Calibrator]:
    """Return for each case the calibrator fitted on the cases of the other folds."""
    calibrators: list[Calibrator] = []
    for fold in range(folds.max() + 1):
        calibrators.append(
            fit([cases[number] for number in np.flatnonzero(folds != fold).tolist()])
        )
    return [calibrators[fold] for fold in folds]


def calibration_error(
    probabilities: Float64[np.ndarray, " answer"], is_right: Bool[np.ndarray, " answer"]
) -> float:
    """Return the expected calibration error, over ten bins of equally many answers.

    It is the mean difference between confidence and accuracy of the bins (Naeini et al. 2015; bins
    of equal mass: Nixon et al. 2019).
    """
    num_bins = min(_NUM_BINS, len(probabilities))
    bins = np.array_split(np.argsort(probabilities, kind="stable"), num_bins)
    gaps = [len(rows) * abs(probabilities[rows].mean() - is_right[rows].mean()) for rows in bins]
    return float(sum(gaps) / len(probabilities))


def risk_coverage(
    probabilities: Float64[np.ndarray, " answer"], is_right: Bool[np.ndarray, " answer"]
) -> list[tuple[float, float]]:
    """Return the risk at ten levels of coverage (El-Yaniv and Wiener 2010).

    Returns:
        The share of tasks that are answered, the most certain first, and the share of these answers
        that are wrong. Levels without an answer are left out.
    """
    num_wrong = np.cumsum(~is_right[np.argsort(-probabilities, kind="stable")])
    points: list[tuple[float, float]] = []
    for tenth in range(1, _NUM_BINS + 1):
        count = round(len(num_wrong) * tenth / _NUM_BINS)
        if count:
            risk = float(num_wrong[count - 1]) / count
            points.append((round(count / len(num_wrong), 4), round(risk, 4)))
    return points
