"""How well a system says that no skill serves a request, and how certain it is of its skills.

A logistic function turns scores into two probabilities: that a certain skill serves a request, and
that any skill does. A request is refused if the second one is below a threshold. Whoever judges a
system uses functions and a threshold that were fitted to the requests of other folds.

Notes:
    - A served request whose skills are not found does not teach when to answer. Its answer would
      not help.
    - An error of calibration over few requests is too high, because chance adds to the difference
      of each bin.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, compress
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float
from pydantic import Field

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.bootstrap import (
    QUANTILES,
    SEED,
    Interval,
    resampled_means,
    separation,
    share,
)

NUM_FOLDS = 5
MAX_REFUSED = 0.15  # of requests that some skill serves: a wrong refusal is the worse error
_MAX_GENERAL_ANSWERED = 0.2  # of general requests
_MAX_RANK = 3  # weights are fitted to these skills; lower ranks are hardly ever right
_LEAST_PROBABILITY = 0.5  # of a predicted skill
_L2 = 1e-2  # keeps weights finite if they can separate right answers from wrong ones
_NUM_BINS = 10
# Limits that keep the sum of weighted features finite.
_MAX_WEIGHT = 1e12
_MAX_INTERCEPT = 1e18

CaseT = TypeVar("CaseT")
FittedT = TypeVar("FittedT")


class Logistic(Config):
    """Logistic function of features that never falls as a feature rises.

    Attributes:
        weights: Weight of each feature.
        intercept: Constant.
    """

    weights: tuple[Annotated[float, Field(ge=0, le=_MAX_WEIGHT)], ...]
    intercept: float = Field(ge=-_MAX_INTERCEPT, le=_MAX_INTERCEPT)

    def probabilities(self, rows: np.ndarray) -> np.ndarray:
        """Return the probability of each row, [row]. `rows` are [row, feature]."""
        logits = rows @ np.array(self.weights) + self.intercept
        return (1 + np.tanh(logits / 2)) / 2  # this form cannot overflow

    def first_probability(self, rows: np.ndarray) -> float:
        """Return the probability of the first row, and 0 without rows."""
        return float(max(self.probabilities(rows[:1]), default=0.0))


class ScoredRequest(NamedTuple):
    """A request, and the skills that a system ranks for it.

    Attributes:
        features: [skill, feature] Features of each skill, the best skill first. A higher feature
            never makes a skill less probable.
        is_right: [skill] Whether each skill serves the request.
        num_gold: Number of skills that the request needs. It is 0 if no skill serves the request.
    """

    features: Float[np.ndarray, "skill feature"]
    is_right: Bool[np.ndarray, " skill"]
    num_gold: int

    @property
    def first_is_right(self) -> bool:
        """True if the first skill serves the request."""
        return any(self.is_right[:1])

    @property
    def is_missed(self) -> bool:
        """True if some skill serves the request, but none of the first `_MAX_RANK` skills does."""
        return self.num_gold > 0 and not any(self.is_right[:_MAX_RANK])


def score_features(scores: Sequence[float]) -> Float[np.ndarray, "skill 2"]:
    """Return the score of each skill of a ranking, and its lead over the best other skill.

    The lead is negative for all skills but the first, and 0 without another skill. For example,
    the scores 3, 2.5 and 1 have the leads .5, -.5 and -2.

    Args:
        scores: Score of each skill, the best first.
    """
    values = np.array(scores, dtype=np.float64)
    # The best other skill is the first one for all skills but the first itself.
    leads = values - values[:1]
    if len(values) > 1:
        leads[0] = values[0] - values[1]
    return np.column_stack([values, leads])


# Fitting -------------------------------------------------------------------------------------


def fit_skill_probability(requests: Sequence[ScoredRequest]) -> Logistic:
    """Fit the probability that a certain skill serves a request, from the first skills."""
    # One row of features and one label for each of the first skills of each request.
    rows = [request.features[:_MAX_RANK] for request in requests]
    labels = [request.is_right[:_MAX_RANK] for request in requests]
    return fit_logistic(np.concatenate(rows), np.concatenate(labels))


def fit_answer_probability(requests: Sequence[ScoredRequest]) -> Logistic:
    """Fit the probability that any skill serves a request, from the features of the first skill."""
    num_features = requests[0].features.shape[1]
    # Leave out requests without ranked skills, which cannot be answered. Also leave out requests
    # whose right skill is not among the first ones (`is_missed`): an answer would not help them.
    used_requests = [item for item in requests if len(item.features) and not item.is_missed]
    rows = [request.features[0] for request in used_requests]
    labels = [request.num_gold > 0 for request in used_requests]
    # Without rows, `reshape` still makes an array with two dimensions: [0, feature].
    return fit_logistic(np.reshape(rows, (len(rows), num_features)), np.array(labels))


def limit_refusals(served: np.ndarray, general: np.ndarray, max_refused: float) -> float:
    """Return the highest threshold that refuses at most `max_refused` of the served requests.

    If this threshold answers too many general requests, it is raised. It stops where `MAX_REFUSED`
    of the served requests are refused.

    Args:
        served: [request] Confidence for requests that some skill serves, the served requests.
        general: [request] Confidence for general requests, which no skill serves.
        max_refused: Share of the served requests, at most `MAX_REFUSED`.
    """
    # Requests whose confidence is below the threshold are refused. The first value here refuses
    # the share `max_refused` of the served requests, the second value the share `MAX_REFUSED`.
    thresholds = np.quantile(served, [max_refused, MAX_REFUSED], method="lower")
    # This threshold answers at most the share `_MAX_GENERAL_ANSWERED` of general requests.
    general_threshold = np.quantile(general, 1 - _MAX_GENERAL_ANSWERED, method="higher")
    # `clip` returns a value between the two thresholds: the nearest to `general_threshold`.
    return float(np.clip(general_threshold, *thresholds))


def fit_logistic(rows: np.ndarray, labels: np.ndarray) -> Logistic:
    """Fit a logistic regression without negative weights.

    A higher feature, such as a score, never makes an answer less probable. So no weight may be
    negative.

    Args:
        rows: [row, feature] Features. A row is a skill that the router ranked for a request.
        labels: [row] Whether each row is positive, such as a right skill.

    Returns:
        Weights and intercept for features that are not scaled.
    """
    from scipy.optimize import minimize

    # Without rows, all skills are equally probable.
    if not len(rows):
        return Logistic(weights=(0.0,) * rows.shape[1], intercept=0.0)

    # Scale the features to mean 0 and variance 1, so that the penalty treats them alike.
    mean = rows.mean(0)  # [feature]
    spread = rows.std(0)  # [feature]
    spread[spread == 0] = 1  # a constant feature becomes 0, without a division by 0
    scaled = (rows - mean) / spread  # [row, feature]
    # The last column belongs to the intercept.
    inputs = np.column_stack([scaled, np.ones(len(rows))])  # [row, feature + intercept]

    no_negative_weight = [(0, None)] * rows.shape[1]
    free_intercept = (None, None)
    # L-BFGS-B is a minimiser that accepts bounds of the weights.
    fitted = minimize(
        _penalized_cross_entropy,
        x0=np.zeros(inputs.shape[1]),
        args=(inputs, labels),
        jac=True,  # the function also returns its gradient
        method="L-BFGS-B",
        bounds=[*no_negative_weight, free_intercept],
    ).x

    # Convert the weights to features that are not scaled: w (x - mean) / spread + b.
    weights = fitted[:-1] / spread
    intercept = float(fitted[-1] - mean @ weights)
    return Logistic(weights=tuple(weights.tolist()), intercept=intercept)


def _penalized_cross_entropy(
    weights: np.ndarray, inputs: np.ndarray, labels: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return the cross-entropy of a logistic regression with an L2 penalty, and its gradient.

    If the features separate the labels perfectly, weights without a penalty grow without bound.

    Args:
        weights: [feature + 1] The last one is the intercept, which has no penalty.
        inputs: [row, feature + 1] Scaled features, and a column of ones for the intercept.
        labels: [row] Whether each row is positive.

    Returns:
        The loss, and its gradient: [feature + 1].
    """
    # For a logit z and a label y of 0 or 1, the cross-entropy is log(1 + e^z) - y z.
    logits = inputs @ weights  # [row]
    positive_logits = logits[labels]  # of the positive rows
    entropy = np.logaddexp(0, logits).mean() - positive_logits.sum() / len(inputs)
    # In this copy of the weights the intercept is 0, so it adds nothing to the penalty.
    penalized_weights = np.append(weights[:-1], 0.0)
    penalty = _L2 / 2 * penalized_weights @ penalized_weights

    probabilities = 1 / (1 + np.exp(-logits))
    errors = probabilities - labels  # [row]
    gradient = inputs.T @ errors / len(inputs) + _L2 * penalized_weights
    return entropy + penalty, gradient


# Cross-validation ----------------------------------------------------------------------------


def assign_folds(tasks: Sequence[Task], num_folds: int, seed: int) -> np.ndarray:
    """Assign queries to folds. Queries for skills of the same author are in the same fold.

    The author is the first part of a skill's id: `anna` of `anna/pdf-merge`. A query for skills of
    several authors links these authors into one group. If this gives fewer groups than folds, only
    queries that share a gold skill form a group. Groups go to the fold with the fewest queries, in
    random order.

    Args:
        tasks: The queries and their gold skills.
        num_folds: Number of folds. With fewer groups, each group is a fold.
        seed: Seed of the order.

    Returns:
        The fold of each query, [query].

    Raises:
        SkilltrainError: Shared gold skills link all queries.
    """
    # Name of the group of each query. Queries with the same name are in the same fold. At first,
    # queries are linked by the authors of their skills. An author is the first folder of an id.
    groups = _linked_groups(tasks, lambda skill_id: skill_id.partition("/")[0])
    if len(set(groups)) < num_folds:
        # `str` leaves a skill id as it is, so queries are linked by skill instead of by author.
        groups = _linked_groups(tasks, str)
    group_sizes = Counter(groups)
    num_folds = min(num_folds, len(group_sizes))
    # Cross-validation needs a fold to fit on and another one to measure.
    if num_folds < 2:
        problem = f"all {len(tasks)} queries are for the same skills"
        fix = "give queries for other skills"
        raise SkilltrainError("cannot-calibrate", problem, fix=fix)

    fold_by_group = _balance_folds(group_sizes, num_folds, seed)
    return np.array([fold_by_group[group] for group in groups])


def _linked_groups(tasks: Sequence[Task], label_of: Callable[[str], str]) -> list[str]:
    """Return a group's name for each query. Queries that share a label share the group.

    For example, queries with the labels {a, b} and {b, c} are in one group.

    Args:
        tasks: The queries and their gold skills.
        label_of: Returns the label of a skill id, such as its author.
    """
    from scipy.cluster.hierarchy import DisjointSet

    labels_by_task: list[list[str]] = []
    for task in tasks:
        labels_by_task.append(sorted(map(label_of, task.relevance.gold)))

    # Each label begins as a set of its own. Merging joins two sets.
    linked_labels = DisjointSet(chain.from_iterable(labels_by_task))
    for labels in labels_by_task:
        for label in labels:
            linked_labels.merge(labels[0], label)
    # A set is named after one of its labels.
    return [linked_labels[labels[0]] for labels in labels_by_task]


def _balance_folds(group_sizes: Counter[str], num_folds: int, seed: int) -> dict[str, int]:
    """Return the fold of each group. In random order, each goes to the smallest fold so far.

    Args:
        group_sizes: Number of queries of each group.
        num_folds: Number of folds.
        seed: Seed of the order.
    """
    shuffled_groups = np.random.default_rng(seed).permutation([*group_sizes])
    fold_sizes = np.zeros(num_folds, dtype=np.int64)
    fold_by_group: dict[str, int] = {}
    for group in shuffled_groups.tolist():
        smallest_fold = int(fold_sizes.argmin())
        fold_by_group[group] = smallest_fold
        fold_sizes[smallest_fold] += group_sizes[group]
    return fold_by_group


def fit_out_of_fold(
    fit: Callable[[Sequence[CaseT]], FittedT], cases: Sequence[CaseT], folds: np.ndarray
) -> list[FittedT]:
    """Return for each case the calibrator that is fitted to the cases of the other folds.

    So no calibrator is judged on a case that it was fitted on.

    Args:
        fit: Fits a calibrator to cases.
        cases: Requests, such as routed queries.
        folds: [case] Fold of each case, counted from 0.
    """
    calibrators: list[FittedT] = []  # one for each fold
    for fold in range(folds.max() + 1):
        # `compress` keeps the cases for which the condition is true.
        other_cases = list(compress(cases, folds != fold))
        calibrators.append(fit(other_cases))
    return [calibrators[fold] for fold in folds]


class _Rule(NamedTuple):
    """Functions that were fitted to some requests, and the threshold for answers.

    Attributes:
        serves: Probability that a certain skill serves a request.
        fits: Probability that any skill serves a request, from the features of the first skill.
        threshold: Lowest probability of any skill for which a request is answered.
    """

    serves: Logistic
    fits: Logistic
    threshold: float


def _fit_rule(requests: Sequence[ScoredRequest]) -> _Rule:
    """Fit probabilities, and the highest threshold that refuses at most `MAX_REFUSED`."""
    fits = fit_answer_probability(requests)
    served = [fits.first_probability(item.features) for item in requests if item.num_gold]
    threshold = float(np.quantile(served, MAX_REFUSED, method="lower"))
    return _Rule(fit_skill_probability(requests), fits, threshold)


def cross_validate(
    requests: Sequence[ScoredRequest], folds: np.ndarray, seed: int = SEED
) -> dict[str, Any]:
    """Judge how a system refuses requests, by rules that are fitted to the other folds.

    Args:
        requests: Requests with a skill, and requests without one.
        folds: [request] Fold of each request. At least two folds have requests with a skill.
        seed: Seed of the bootstrap.

    Returns:
        Intervals by name. `answered_unserved`: share of the requests without a skill that are
        answered. `refused_served`: share of the others that are refused. `exact_set`: share of the
        others whose predicted skills are the gold skills. `calibration_error`: error of the
        probability that the first skill is right. `separation`: probability that a request with a
        skill has a higher best score than one without. `risk_coverage`: the return value of the
        function `risk_coverage`, in place of an interval.
    """
    # One value for each request.
    answered: list[bool] = []
    exact: list[bool] = []
    confidence: list[float] = []
    best_scores: list[float] = []
    for request, rule in zip(requests, fit_out_of_fold(_fit_rule, requests, folds), strict=True):
        # `rule.fits` is a model of whether any skill serves the request. It reads the first skill.
        fit_probability = rule.fits.first_probability(request.features)
        is_answered = len(request.features) > 0 and fit_probability >= rule.threshold
        # `rule.serves` is a model of whether a certain skill serves the request.
        probabilities = rule.serves.probabilities(request.features)  # [skill]
        answered.append(is_answered)
        exact.append(is_answered and predicts_gold(probabilities, request))
        confidence.append(max(probabilities, default=0.0))
        # Column 0 of the features is the score. The slice `:1` takes the first skill, or no skill
        # if the ranking is empty, and then the best score is -inf.
        best_scores.append(max(request.features[:1, 0], default=-math.inf))

    is_served = np.array([request.num_gold > 0 for request in requests])
    is_right = np.array([request.first_is_right for request in requests])
    served_scores = [*compress(best_scores, is_served)]
    unserved_scores = [*compress(best_scores, ~is_served)]
    return {
        "separation": separation(served_scores, unserved_scores, seed),
        "answered_unserved": share(np.array(answered)[~is_served]),
        "refused_served": share(~np.array(answered)[is_served]),
        "exact_set": share(np.array(exact)[is_served]),
        "calibration_error": calibration_error(np.array(confidence), is_right, seed),
        "risk_coverage": risk_coverage(np.array(confidence), is_right),
    }


def predicts_gold(probabilities: np.ndarray, request: ScoredRequest) -> bool:
    """Return whether the predicted skills are exactly those that a request needs.

    The first skill is predicted, and all others with a probability of at least .5.

    Args:
        probabilities: [skill] Probability of each skill that it serves the request.
        request: The request.
    """
    num_predicted = max(1, int(np.count_nonzero(probabilities >= _LEAST_PROBABILITY)))
    num_right = int(request.is_right[:num_predicted].sum())
    return num_right == num_predicted == request.num_gold


def calibration_error(
    probabilities: np.ndarray, is_right: np.ndarray, seed: int = SEED
) -> Interval:
    """Return the expected calibration error, over ten bins of equally many answers.

    This error is the mean difference between confidence and accuracy of the bins (Naeini et al.
    2015; bins of equal mass: Nixon et al. 2019). Its interval comes from a bootstrap: answers are
    drawn with replacement, and each answer stays in its bin.

    Args:
        probabilities: [answer] Confidence that each answer is right.
        is_right: [answer] Whether each answer is right.
        seed: Seed of the draws.
    """
    num_bins = min(_NUM_BINS, len(probabilities))
    # Each bin holds the positions of its answers, from the least certain answers on.
    bins = np.array_split(np.argsort(probabilities, kind="stable"), num_bins)
    # Confidence minus correctness of each answer, in the column of its bin: [answer, bin].
    differences = np.zeros((len(probabilities), num_bins))
    for number, rows in enumerate(bins):
        differences[rows, number] = probabilities[rows] - is_right[rows]

    # Other bins have 0 in a column. So the mean of the column is the mean difference in its bin,
    # times the share of answers in the bin. The sum over the columns is the weighted mean.
    error = float(np.abs(differences.mean(0)).sum())
    resampled_errors = np.abs(resampled_means(differences, seed=seed)).sum(1)  # [resample]
    low, high = np.quantile(resampled_errors, QUANTILES).tolist()
    # Resampling adds noise to every bin, so resampled errors are often larger than the error. The
    # interval must contain the error, so its lower end is at most the error.
    return Interval(error, min(low, error), high, len(probabilities))


def risk_coverage(probabilities: np.ndarray, is_right: np.ndarray) -> list[tuple[float, float]]:
    """Return the risk at ten levels of coverage (El-Yaniv and Wiener 2010).

    Suppose that the router answers only a share of the tasks: those with the most certain answers.

    Args:
        probabilities: [answer] Confidence that each answer is right.
        is_right: [answer] Whether each answer is right.

    Returns:
        Pairs of coverage (share of answered tasks) and risk (share of wrong answers among them). A
        level without an answer is left out.
    """
    most_certain_first = np.argsort(-probabilities, kind="stable")
    # Wrong answers among the most certain answer, the two most certain ones, and so on.
    num_wrong = np.cumsum(~is_right[most_certain_first])  # [answer]
    num_tasks = len(num_wrong)
    points = []
    for level in range(1, _NUM_BINS + 1):
        num_answers = round(num_tasks * level / _NUM_BINS)
        if num_answers:
            risk = float(num_wrong[num_answers - 1]) / num_answers
            points.append((round(num_answers / num_tasks, 4), round(risk, 4)))
    return points
