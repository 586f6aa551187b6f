"""Stage `calibrate`: fit a router's probabilities on queries that some skill serves, and on others.

Each query is routed twice: over the whole pool, and without the skills that serve it and their
copies. Every answer of the second time is wrong. Further requests that no skill serves come with
the package: small talk, follow-ups, changes of code and general questions. All metrics are by
cross-validation over queries.
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
from skilltrain.data.trigger_evals import UNSERVED_FILE
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_json
from skilltrain.metrics.benchmarks.benchmark import Task, add_copies, check_pool
from skilltrain.metrics.benchmarks.load import load_benchmark, read_unserved
from skilltrain.metrics.bootstrap import share
from skilltrain.serving.answer import Calibration, Calibrator, Logistic, Trace
from skilltrain.serving.index import AllowedServers
from skilltrain.serving.indexing import CALIBRATION_FILE
from skilltrain.serving.router import Router
from skilltrain.stage import Stage, Summary
from skilltrain.tables import read_skills
from skilltrain.terminal import say, track

GENERAL_REQUESTS = Path(__file__).with_name("general_requests.jsonl")
"""Requests that hardly any skill serves, which come with the package."""
_ADVISED_QUERIES = 100  # with fewer, a share of .15 has an interval of more than ±.07
_MAX_REFUSED = 0.15  # of requests that some skill serves: a wrong refusal is the worse error
# Passages of skills may be easier than requests of users. With 176 skills, thresholds that refused
# .05, .10 and .15 of the passages refused .13, .31 and .41 of 300 requests.
_MAX_REFUSED_PASSAGES = 0.05
_MAX_GENERAL_ANSWERED = 0.2  # of general requests
_MAX_RANK = 3  # weights are fitted to these skills; lower ranks are hardly ever right
_L2 = 1e-2  # keeps weights finite if they can separate right answers from wrong ones
_NUM_BINS = 10

CaseKind = Literal["served", "hidden", "general", "unserved"]


class Calibrate(Stage):
    """Teach a router when to answer that no skill fits. Needs queries it was not trained on."""

    example = "router=runs/router queries=runs/queries clusters=runs/clusters out=runs/calibration"
    result = (
        "{num_queries} queries: {answered} answered, {falsely_answered} where no skill fits, and "
        "{general} of general requests; calibration error {calibration_error}"
    )
    next_command = "index calibration={out} out={router}"

    stage: Literal["calibrate"]
    router: InputPath = Field(description="folder of the router")
    queries: InputPath = Field(
        description="folder with the QUERIES and JUDGEMENTS tables, or of a benchmark; at least "
        f"{_ADVISED_QUERIES} queries are advised"
    )
    split: str | None = Field(
        default="dev", description="queries that no model was trained on; null for all"
    )
    max_queries: int | None = Field(
        default=None, ge=1, description="number of queries to draw at random; null for all"
    )
    masked_pool: InputPath | None = Field(
        default=None,
        description="SKILLS without the passages that became queries, as synthesize writes it",
    )
    clusters: InputPath | None = Field(
        default=None, description="CLUSTERS of the pool: copies of gold count as right"
    )
    unserved: InputPath | None = Field(
        default=None,
        description="JSON Lines of further queries (key `query`) that no skill serves; null: "
        f"{UNSERVED_FILE} of the folder `queries`, if it is there",
    )
    answered: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of served tasks to answer: sets the threshold; null refuses at most "
        f"{_MAX_REFUSED} of them, or {_MAX_REFUSED_PASSAGES} with `masked_pool`",
    )
    contained: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="share of served tasks whose likely skills hold a right one",
    )
    folds: int = Field(
        default=5, ge=2, description="parts of the queries for cross-validation, at most"
    )
    seed: Seed = Field(default=0, description="seed of the folds, and of drawing queries")
    allow_servers: AllowedServers = ()
    out: Path = Field(
        description=f"folder to write: {CALIBRATION_FILE}, which the stage index takes in"
    )

    def run(self, out: Path) -> Summary:
        """Write the calibration, and return its metrics.

        Raises:
            SkilltrainError: The router lacks a gold skill, all queries are for the same skills, or
                the router's first skill is never right.
        """
        router = Router.load(self.router, self.allow_servers)
        assert router.index is not None
        record = router.index.record
        tasks = self._read_tasks(router)
        if len(tasks) < _ADVISED_QUERIES:
            advice = f"at least {_ADVISED_QUERIES} are advised"
            say(f"warning: {len(tasks)} queries to calibrate with; {advice}")
        if self.masked_pool is not None:
            router = _without_passages(router, tasks, self.masked_pool)

        # Route all requests. `route_tasks` makes two cases of each query. Both are in one fold.
        cases = route_tasks(router, tasks)
        task_folds = assign_folds(tasks, self.folds, self.seed)
        unserved_cases = route_unserved(router, GENERAL_REQUESTS, "general")
        unserved = self.unserved or self.queries / UNSERVED_FILE
        if unserved.is_file():
            unserved_cases += route_unserved(router, unserved, "unserved")
        unserved_folds = np.arange(len(unserved_cases)) % (task_folds.max() + 1)
        cases += unserved_cases
        folds = np.append(np.repeat(task_folds, 2), unserved_folds)  # [case]

        calibrator = fit_calibrator(cases, self)
        if calibrator.threshold == 0:
            say("warning: the threshold is 0, because the queries are too few for this `answered`")
        metrics = _cross_validate(cases, folds, self)
        calibration = Calibration(
            system=record.rankers,
            models=record.models,
            calibrator=calibrator,
            figures=metrics,
            num_queries=len(tasks),
        ).model_dump(mode="json")
        write_json(out / CALIBRATION_FILE, calibration)
        json_metrics = calibration["figures"]  # `metrics` with values of JSON, such as lists
        return {"num_queries": len(tasks), **json_metrics}

    def _read_tasks(self, router: Router) -> list[Task]:
        """Read the queries, and draw `max_queries` of them in their order."""
        benchmark = check_pool(load_benchmark(self.queries, self.split), router.skills.keys())
        if self.clusters is not None:
            gold_ids = set(_gold_ids(benchmark.tasks))
            benchmark = add_copies(benchmark, copies_of(gold_ids, router.skills, self.clusters))
        tasks = benchmark.tasks
        shuffled = np.random.default_rng(self.seed).permutation(len(tasks))
        positions = shuffled[: self.max_queries].tolist()
        return [tasks[position] for position in sorted(positions)]


class Case(NamedTuple):
    """A routed request.

    Attributes:
        trace: Rankings of the router.
        is_right: [skill] Whether each skill of the final ranking serves the request.
        kind: `served`: a query, with a skill in the pool that serves it. `hidden`: a query, without
            the skills that serve it. `general`: a request of `GENERAL_REQUESTS`. `unserved`: a
            request that the user has found to be served by no skill.
    """

    trace: Trace
    is_right: np.ndarray
    kind: CaseKind

    @property
    def first_is_right(self) -> bool:
        """True if the first skill serves the request."""
        return any(self.is_right[:1])

    @property
    def is_found(self) -> bool:
        """True if one of the first `_MAX_RANK` skills serves the request."""
        return any(self.is_right[:_MAX_RANK])


def _gold_ids(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield the gold skills of all tasks. They may repeat."""
    return chain.from_iterable(task.relevance.gold for task in tasks)


def _without_passages(router: Router, tasks: Sequence[Task], masked_pool: Path) -> Router:
    """Return a router whose gold skills lack the passages that became queries.

    With these passages the queries would be far easier than requests of users.

    Args:
        router: Router over the whole skills.
        tasks: Queries and their gold skills.
        masked_pool: SKILLS table without the passages.
    """
    masked_skills = {skill.skill_id: skill for skill in read_skills(masked_pool)}
    skills = dict(router.skills)
    for skill_id in _gold_ids(tasks):
        skills[skill_id] = masked_skills.get(skill_id, skills[skill_id])
    return router.with_skills([*skills.values()])


def route_tasks(router: Router, tasks: Sequence[Task]) -> list[Case]:
    """Route each query twice: over the whole pool, then without the skills that serve it."""
    kinds: tuple[CaseKind, ...] = ("served", "hidden")
    cases: list[Case] = []
    for task in track(tasks, "routing", len(tasks)):
        # All skills that serve the query.
        relevance = task.relevance
        right_ids = {*relevance.gold, *relevance.alternatives, *relevance.copies}
        right_ids |= {skill_id for skill_id, gain in relevance.gains.items() if gain > 0}

        for kind in kinds:
            excluded_ids = right_ids if kind == "hidden" else ()
            trace = router.trace(task.query.text, without=excluded_ids)
            is_right = [skill_id in right_ids for skill_id, _ in trace.ranking]
            cases.append(Case(trace, np.array(is_right, dtype=bool), kind))
    return cases


def route_unserved(router: Router, file: Path, kind: CaseKind) -> list[Case]:
    """Route requests of a file that no skill serves."""
    cases: list[Case] = []
    for query in read_unserved(file):
        trace = router.trace(query.text)
        cases.append(Case(trace, np.zeros(len(trace.ranking), dtype=bool), kind))
    return cases


def fit_calibrator(cases: Sequence[Case], config: Calibrate) -> Calibrator:
    """Fit the probabilities of a router, then the limits that are derived from them.

    Args:
        cases: Routed requests.
        config: Settings of the stage.

    Raises:
        SkilltrainError: The first skill is never right.
    """
    if not any(case.first_is_right for case in cases):
        problem = "the router's first skill is never right, so there is nothing to calibrate"
        raise SkilltrainError("cannot-calibrate", problem)

    # Probability that a certain skill serves the request: a row for each of the first skills.
    rankers = tuple(cases[0].trace.rankings_by_ranker)
    rows = [case.trace.features(rankers)[:_MAX_RANK] for case in cases]
    labels = [case.is_right[:_MAX_RANK] for case in cases]
    serves = fit_logistic(np.concatenate(rows), np.concatenate(labels))

    # Probability that any skill does: a row for the first skill. A served query whose skills are
    # not found is left out, because an answer would not help.
    first_rows: list[np.ndarray] = []
    is_served: list[bool] = []
    for case in cases:
        is_missed = case.kind == "served" and not case.is_found
        if case.trace.ranking and not is_missed:
            first_rows.append(case.trace.features(rankers)[0])
            is_served.append(case.kind == "served")
    fits = fit_logistic(np.array(first_rows), np.array(is_served))

    # Begin with limits that refuse no request and no skill.
    unlimited = Calibrator(rankers=rankers, serves=serves, miss=1.0, fits=fits, threshold=0.0)
    return _fit_limits(unlimited, cases, config)


def _fit_limits(calibrator: Calibrator, cases: Sequence[Case], config: Calibrate) -> Calibrator:
    """Return the calibrator with its limits `threshold` and `miss`.

    Args:
        calibrator: Calibrator with fitted probabilities and without limits.
        cases: Routed requests.
        config: `answered` is the share of the served queries that the router is to answer.
            `contained` is the share of them whose likely set is to hold a right skill.
    """
    # Confidence is the probability that any skill serves a request.
    kinds = np.array([case.kind for case in cases])  # [case]
    confidence = np.array([calibrator.fit_probability(case.trace) for case in cases])  # [case]
    is_served = kinds == "served"
    if config.answered is None:
        is_general = ~is_served & (kinds != "hidden")
        max_refused = _MAX_REFUSED_PASSAGES if config.masked_pool else _MAX_REFUSED
        threshold = limit_refusals(confidence[is_served], confidence[is_general], max_refused)
    else:
        threshold = bound(confidence[is_served], config.answered)

    best_right_probabilities: list[float] = []  # [served query]
    for case in compress(cases, is_served):
        right_probabilities = calibrator.probabilities(case.trace)[case.is_right]
        best_right_probabilities.append(max(right_probabilities, default=0.0))
    lowest_likely_probability = bound(np.array(best_right_probabilities), config.contained)
    miss = 1 - lowest_likely_probability  # as a probability to be wrong
    return calibrator.model_copy(update={"threshold": threshold, "miss": miss})


def limit_refusals(served: np.ndarray, general: np.ndarray, max_refused: float) -> float:
    """Return the highest threshold that refuses at most `max_refused` of the served requests.

    If it answers too many general requests, it is raised until it does not, or until it refuses
    `_MAX_REFUSED` of the served requests.

    Args:
        served: [request] Confidence for requests that some skill serves.
        general: [request] Confidence for general requests.
        max_refused: Share of the served requests.
    """
    thresholds = np.quantile(served, [max_refused, _MAX_REFUSED], method="lower")
    general_threshold = np.quantile(general, 1 - _MAX_GENERAL_ANSWERED, method="higher")
    return float(np.clip(general_threshold, *thresholds))


def fit_logistic(rows: np.ndarray, labels: np.ndarray) -> Logistic:
    """Fit a logistic regression without negative weights.

    Features are scaled to unit variance for the fit, and their weights have a small L2 penalty.

    Args:
        rows: [row, feature] Features.
        labels: [row] Whether each row is positive.
    """
    from scipy.optimize import minimize

    mean = rows.mean(0)  # [feature]
    spread = rows.std(0)  # [feature]
    spread[spread == 0] = 1
    # [row, feature + 1]; the last column is the intercept's.
    scaled = np.column_stack([(rows - mean) / spread, np.ones(len(rows))])

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the penalized cross-entropy and its gradient at weights and intercept."""
        # For a logit z and a label y of 0 or 1, the cross-entropy is log(1 + e^z) - y z.
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
    intercept = float(values[-1] - mean @ weights)
    return Logistic(weights=tuple(weights.tolist()), intercept=intercept)


def bound(values: np.ndarray, level: float) -> float:
    """Return a lower bound for the value of a new query, which holds with the probability `level`.

    The probability is at least `level`. The bound is the (n + 1)(1 - level)-th lowest of the n
    values, or 0 if there are too few. Source: split conformal prediction (Angelopoulos and Bates
    2021, section 1).

    Args:
        values: [query] Values of earlier queries.
        level: Probability between 0 and 1.
    """
    rank = floor((len(values) + 1) * (1 - level) + 1e-9)  # rounding may make .1 · 10 less than 1
    return float(np.sort(values)[rank - 1]) if rank else 0.0


def _cross_validate(cases: Sequence[Case], folds: np.ndarray, config: Calibrate) -> dict[str, Any]:
    """Return metrics of calibrators on the cases that they were not fitted on.

    Args:
        cases: Routed requests.
        folds: [case] Fold of each case.
        config: Settings of the stage.

    Returns:
        Metrics by name.

        - Over all cases: `calibration_error` and `risk_coverage`.
        - Shares of wrongly answered requests: of queries whose skills are hidden
          (`falsely_answered`), of general requests (`general`), and of the user's requests that no
          skill serves, if there are any (`unserved`).
        - Over cases that some skill serves: the share whose first skill is right (`right`), the
          share that is answered (`answered`), the share of right first skills among the answered
          cases (`right_if_answered`), the share whose likely set holds a right skill (`contained`),
          and the mean size of the likely set (`num_likely`).
    """
    calibrators = fit_out_of_fold(partial(fit_calibrator, config=config), cases, folds)
    pairs = list(zip(calibrators, cases, strict=True))

    # One value for each case.
    kinds = np.array([case.kind for case in cases])
    right = np.array([case.first_is_right for case in cases])
    answered = np.array([calibrator.answers(case.trace) for calibrator, case in pairs])
    num_likely = np.array([calibrator.num_likely(case.trace) for calibrator, case in pairs])
    confidence = np.array(
        [max(calibrator.probabilities(case.trace), default=0.0) for calibrator, case in pairs]
    )
    contained = [any(case.is_right[:num]) for case, num in zip(cases, num_likely, strict=True)]

    served = kinds == "served"
    metrics = {
        "right": share(right[served]),
        "answered": share(answered[served]),
        "falsely_answered": share(answered[kinds == "hidden"]),
        "general": share(answered[kinds == "general"]),
        "contained": share(np.array(contained)[served]),
        "num_likely": float(num_likely[served].mean()),
        "calibration_error": calibration_error(confidence, right),
        "risk_coverage": risk_coverage(confidence, right),
    }
    if any(served & answered):
        metrics["right_if_answered"] = share(right[served & answered])
    if "unserved" in kinds:
        metrics["unserved"] = share(answered[kinds == "unserved"])
    return metrics


def assign_folds(tasks: Sequence[Task], num_folds: int, seed: int) -> np.ndarray:
    """Assign queries to folds. Queries that share a gold skill are in the same fold.

    Groups of such queries go, in an order drawn by `seed`, to the fold with the fewest queries. If
    there are fewer groups than folds, each group is a fold.

    Returns:
        The fold of each query, [query].

    Raises:
        SkilltrainError: There is only one group.
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
    num_folds = min(num_folds, len(num_queries_by_group))
    if num_folds < 2:
        problem = f"all {len(tasks)} queries are for the same skills"
        fix = "give queries for other skills"
        raise SkilltrainError("cannot-calibrate", problem, fix=fix)

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
