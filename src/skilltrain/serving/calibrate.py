"""Stage `calibrate`: fit a router's probabilities on queries that some skill serves, and on others.

Each query is routed twice: over the whole pool, and without the skills that serve it and their
copies. Every answer of the second time is wrong. All metrics are by cross-validation over queries.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, compress
from math import floor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
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

_MAX_RANK = 3  # weights are fitted to these skills; lower ranks are hardly ever right
_BELOW_ALL_SCORES = -1e9
_L2 = 1e-2  # keeps weights finite if they can separate right answers from wrong ones
_NUM_BINS = 10


class Calibrate(Stage):
    """Teach a router when to answer that no skill fits. Needs queries it was not trained on."""

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
            gold_ids = set(_gold_ids(benchmark.tasks))
            benchmark = add_copies(benchmark, copies_of(gold_ids, router.skills, self.clusters))

        folds = assign_folds(benchmark.tasks, self.folds, self.seed)
        cases = _route_cases(router, benchmark.tasks)
        calibrator = fit_calibrator(cases, self)

        # `cases` has two cases of each query, one after the other: routed over the pool with its
        # right skills, and over the pool without them. Both are in the fold of the query.
        case_folds = np.repeat(folds, 2)
        metrics = _cross_validate(cases, case_folds, self)
        if self.unserved is not None:
            traces = [router.trace(query.text) for query in read_unserved(self.unserved)]
            metrics["unserved"] = share([calibrator.answers(trace) for trace in traces])

        calibration = Calibration(
            system=record.rankers,
            models=record.models,
            calibrator=calibrator,
            figures=metrics,
            num_queries=len(benchmark.tasks),
        ).model_dump(mode="json")
        write_json(out / CALIBRATION_FILE, calibration)
        json_metrics = calibration["figures"]  # `metrics` with values of JSON, such as lists
        return {"num_queries": len(benchmark.tasks), **json_metrics}


class Case(NamedTuple):
    """A routed query.

    Attributes:
        trace: Rankings of the router.
        is_right: [skill] Whether each skill of the final ranking serves the query.
        is_served: Whether the pool holds a skill that serves the query.
    """

    trace: Trace
    is_right: np.ndarray
    is_served: bool

    @property
    def first_is_right(self) -> bool:
        """Whether the first skill serves the query."""
        return any(self.is_right[:1])


def _gold_ids(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield the gold skills of all tasks. They may repeat."""
    return chain.from_iterable(task.relevance.gold for task in tasks)


def _route_cases(router: Router, tasks: Sequence[Task]) -> list[Case]:
    """Route each query twice: over the whole pool, then without the skills that serve it."""
    cases = []
    for task in track(tasks, "routing", len(tasks)):
        # All skills that serve the query.
        relevance = task.relevance
        right_ids = {*relevance.gold, *relevance.alternatives, *relevance.copies}
        right_ids |= {skill_id for skill_id, gain in relevance.gains.items() if gain > 0}

        for is_served in (True, False):
            excluded_ids = () if is_served else right_ids
            trace = router.trace(task.query.text, without=excluded_ids)
            is_right = [skill_id in right_ids for skill_id, _ in trace.ranking]
            cases.append(Case(trace, np.array(is_right, dtype=bool), is_served))
    return cases


def fit_calibrator(cases: Sequence[Case], config: Calibrate) -> Calibrator:
    """Fit the probabilities of a router, then the limits that are derived from them.

    Args:
        cases: Routed queries. The probabilities are fitted to all queries. The limits are fitted
            only to queries for which the pool has a right skill.
        config: Settings of the stage.

    Raises:
        SkilltrainError: The first skill is never right.
    """
    if not any(case.first_is_right for case in cases):
        problem = "the router's first skill is never right, so there is nothing to calibrate"
        raise SkilltrainError("cannot-calibrate", problem)

    # A row is one of the first skills of a ranking. Lower ranks do not count.
    rankers = tuple(cases[0].trace.rankings_by_ranker)
    features = [case.trace.features(rankers)[:_MAX_RANK] for case in cases]
    labels = [case.is_right[:_MAX_RANK] for case in cases]
    rows = np.concatenate(features)  # [row, feature]
    weights, intercept = fit_logistic(rows, np.concatenate(labels))

    # Begin with limits that refuse no query: the lowest probability of the best skill is 0, no
    # ranker has a lowest score yet (`least`), and a likely skill may be wrong for certain (`miss`).
    unlimited = Calibrator(
        rankers=rankers,
        weights=tuple(weights.tolist()),
        intercept=intercept,
        threshold=0.0,
        least=(),
        miss=1.0,
    )
    served_cases = [case for case in cases if case.is_served]
    return _fit_limits(unlimited, served_cases, config)


def _fit_limits(calibrator: Calibrator, cases: Sequence[Case], config: Calibrate) -> Calibrator:
    """Return the calibrator with its limits `threshold`, `least` and `miss`.

    A query is answered if its best skill has at least the probability `threshold`, and if the best
    score by each ranker is at least this ranker's limit in `least`. A skill is in the likely set if
    its probability to be wrong is at most `miss`.

    Args:
        calibrator: Calibrator with fitted probabilities and without limits.
        cases: Queries that some skill serves.
        config: `answered` is the share of these queries that the router is to answer. `contained`
            is the share of these queries whose likely set is to hold a right skill.
    """
    best_probabilities = []  # of any skill, by query
    best_right_probabilities = []  # of a right skill, by query
    for case in cases:
        probabilities = calibrator.probabilities(case.trace)
        best_probabilities.append(max(probabilities, default=0.0))
        best_right_probabilities.append(max(probabilities[case.is_right], default=0.0))
    # [query, ranker]
    top_scores = np.array([case.trace.top_scores(calibrator.rankers) for case in cases])

    # The share 1 - answered of the queries may be refused. It is divided equally among `threshold`
    # and the limits in `least`.
    num_limits = 1 + len(calibrator.rankers)
    refused_by_each = (1 - config.answered) / num_limits
    reached_share = 1 - refused_by_each  # share of the queries that reach one limit

    # `bound(values, x)` is the limit that the share x of the values reaches.
    threshold = bound(np.array(best_probabilities), reached_share)
    lowest_scores = [bound(scores, reached_share, _BELOW_ALL_SCORES) for scores in top_scores.T]
    lowest_likely_probability = bound(np.array(best_right_probabilities), config.contained)
    return calibrator.model_copy(
        update={
            "threshold": threshold,
            "least": tuple(lowest_scores),
            "miss": 1 - lowest_likely_probability,  # as a probability to be wrong
        }
    )


def fit_logistic(rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """Fit a logistic regression without negative weights.

    Features are scaled to unit variance for the fit, and their weights have a small L2 penalty.

    Args:
        rows: [row, feature] Features.
        labels: [row] Whether each row is positive.

    Returns:
        The weights, [feature], and the intercept.
    """
    from scipy.optimize import minimize

    mean = rows.mean(0)  # [feature]
    spread = rows.std(0)  # [feature]
    spread[spread == 0] = 1
    # [row, feature + 1]; the last column is the intercept's.
    scaled = np.column_stack([(rows - mean) / spread, np.ones(len(rows))])

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the penalized cross-entropy and its gradient at weights and intercept."""
        logits = scaled @ values  # [row]
        positive_logits = logits[labels]  # of the positive rows
        entropy = np.logaddexp(0, logits).mean() - positive_logits.sum() / len(rows)
        penalized_weights = np.append(values[:-1], 0.0)  # the intercept has no penalty
        penalty = _L2 / 2 * penalized_weights @ penalized_weights

        probabilities = 1 / (1 + np.exp(-logits))
        errors = probabilities - labels  # [row]; a label counts as 0 or 1
        gradient = scaled.T @ errors / len(rows) + _L2 * penalized_weights
        return entropy + penalty, gradient

    # No weight is negative. The intercept is free.
    bounds = [(0, None)] * rows.shape[1] + [(None, None)]
    values = minimize(loss, np.zeros(len(bounds)), jac=True, method="L-BFGS-B", bounds=bounds).x

    # Undo the scaling.
    weights = values[:-1] / spread
    return weights, float(values[-1] - mean @ weights)


def bound(values: np.ndarray, level: float, lowest: float = 0.0) -> float:
    """Return the lower bound that the value of a new query reaches with the probability `level`.

    The probability is at least `level`. The bound is the (n + 1)(1 - level)-th lowest of the n
    values. Source: split conformal prediction
    (Angelopoulos and Bates 2021, section 1).

    Args:
        values: [query] Values of earlier queries.
        level: Probability between 0 and 1.
        lowest: Bound if there are too few values for `level`.
    """
    rank = floor((len(values) + 1) * (1 - level) + 1e-9)  # rounding may make .1 · 10 less than 1
    return float(np.sort(values)[rank - 1]) if rank else lowest


def _cross_validate(cases: Sequence[Case], folds: np.ndarray, config: Calibrate) -> dict[str, Any]:
    """Return metrics of calibrators on the cases that they were not fitted on.

    Args:
        cases: Routed queries.
        folds: [case] Fold of each case.
        config: Settings of the stage.

    Returns:
        Metrics by name.

        - Over all cases: `calibration_error` and `risk_coverage`.
        - Over cases that no skill serves: the share that is answered (`falsely_answered`).
        - Over cases that some skill serves: the share whose first skill is right (`right`), the
          share that is answered (`answered`), the share of right first skills among the answered
          cases (`right_if_answered`), the share whose likely set holds a right skill (`contained`),
          and the mean size of the likely set (`num_likely`).
    """
    calibrators = fit_out_of_fold(partial(fit_calibrator, config=config), cases, folds)
    pairs = list(zip(calibrators, [case.trace for case in cases], strict=True))

    # One value for each case.
    served = np.array([case.is_served for case in cases])
    right = np.array([case.first_is_right for case in cases])
    answered = np.array([calibrator.answers(trace) for calibrator, trace in pairs])
    num_likely = np.array([calibrator.num_likely(trace) for calibrator, trace in pairs])
    confidence = np.array(
        [max(calibrator.probabilities(trace), default=0.0) for calibrator, trace in pairs]
    )
    contained = [any(case.is_right[:num]) for case, num in zip(cases, num_likely, strict=True)]

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


def assign_folds(tasks: Sequence[Task], num_folds: int, seed: int) -> np.ndarray:
    """Assign queries to folds. Queries that share a gold skill are in the same fold.

    Groups of such queries go, in an order drawn by `seed`, to the fold with the fewest queries.

    Returns:
        The fold of each query, [query].

    Raises:
        SkilltrainError: There are fewer groups than folds.
    """
    from scipy.cluster.hierarchy import DisjointSet

    # Link the gold skills of each query. Linked skills make a group, named after one of them.
    linked = DisjointSet(_gold_ids(tasks))
    first_ids = [min(task.relevance.gold) for task in tasks]
    for task, first_id in zip(tasks, first_ids, strict=True):
        for skill_id in task.relevance.gold:
            linked.merge(first_id, skill_id)
    groups = [linked[skill_id] for skill_id in first_ids]  # [query]

    num_queries_by_group = Counter(groups)
    if len(num_queries_by_group) < num_folds:
        problem = (
            f"{len(tasks)} queries for {len(num_queries_by_group)} unrelated gold skills cannot be "
            f"cut into {num_folds} folds"
        )
        raise SkilltrainError("cannot-calibrate", problem, fix="give fewer folds, or more queries")

    # Each group goes to the fold that is the smallest so far.
    shuffled_groups = np.random.default_rng(seed).permutation([*num_queries_by_group])
    fold_sizes = np.zeros(num_folds, dtype=np.int64)
    fold_by_group: dict[str, int] = {}
    for group in shuffled_groups.tolist():
        fold = int(fold_sizes.argmin())
        fold_by_group[group] = fold
        fold_sizes[fold] += num_queries_by_group[group]
    return np.array([fold_by_group[group] for group in groups])


def fit_out_of_fold(
    fit: Callable[[Sequence[Case]], Calibrator], cases: Sequence[Case], folds: np.ndarray
) -> list[Calibrator]:
    """Return for each case the calibrator that is fitted to the cases of the other folds.

    Args:
        fit: Fits a calibrator to cases.
        cases: Routed queries.
        folds: [case] Fold of each case, counted from 0.
    """
    calibrators = []
    for fold in range(folds.max() + 1):
        other_cases = list(compress(cases, folds != fold))
        calibrators.append(fit(other_cases))
    return [calibrators[fold] for fold in folds]


def calibration_error(probabilities: np.ndarray, is_right: np.ndarray) -> float:
    """Return the expected calibration error, over ten bins of equally many answers.

    It is the mean difference between confidence and accuracy of the bins (Naeini et al. 2015; bins
    of equal mass: Nixon et al. 2019).

    Args:
        probabilities: [answer] Confidence that each answer is right.
        is_right: [answer] Whether each answer is right.
    """
    num_bins = min(_NUM_BINS, len(probabilities))
    bins = np.array_split(np.argsort(probabilities, kind="stable"), num_bins)
    gaps = [len(rows) * abs(probabilities[rows].mean() - is_right[rows].mean()) for rows in bins]
    return float(sum(gaps) / len(probabilities))


def risk_coverage(probabilities: np.ndarray, is_right: np.ndarray) -> list[tuple[float, float]]:
    """Return the risk at ten levels of coverage (El-Yaniv and Wiener 2010).

    Args:
        probabilities: [answer] Confidence that each answer is right.
        is_right: [answer] Whether each answer is right.

    Returns:
        Pairs of coverage and risk. Coverage is the share of the tasks that are answered, the most
        certain first, and risk is the share of wrong ones among these answers. Levels without an
        answer are left out.
    """
    order = np.argsort(-probabilities, kind="stable")
    num_wrong = np.cumsum(~is_right[order])  # num_wrong[n - 1]: among the n most certain answers
    points = []
    for level in range(1, _NUM_BINS + 1):
        num_answers = round(len(order) * level / _NUM_BINS)
        if num_answers:
            risk = float(num_wrong[num_answers - 1]) / num_answers
            points.append((round(num_answers / len(order), 4), round(risk, 4)))
    return points
