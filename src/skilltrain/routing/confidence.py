"""How sure a router may be: a calibrator of its scores, a threshold for `no skill fits`, and the size of a likely set.

A skill's probability is a logistic function (Platt, 1999) of a few features, none of which may lower it when it rises.
Within a task only the skill's own score and its lead differ, so that probabilities fall with rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from skilltrain.config import Config

CALIBRATION_FILE = "calibration.json"
_L2 = 1e-2  # keeps weights finite where few answers can be told apart without error
_BINS = 10


@dataclass(frozen=True)
class Evidence:
    """The scores of a task's ranked skills, best first, and by ranker the best score that it gave.

    BM25's is the share of what it gives at most for the task, so that long and short tasks can be compared.
    """

    scores: Sequence[float]
    tops: Mapping[str, float]

    def rows(self, rankers: Sequence[str]) -> Float64[np.ndarray, "skill feature"]:
        """For each skill its score, its lead over the best of the others, and the tops of `rankers`."""
        scores = np.array(self.scores)
        if not len(scores):
            return np.empty((0, 2 + len(rankers)))
        rival = np.where(np.arange(len(scores)) == 0, scores[min(1, len(scores) - 1)], scores[0])
        tops = np.tile([self.tops[name] for name in rankers], (len(scores), 1))
        return np.column_stack([scores, scores - rival, tops])


class Calibrator(Config):
    """Probabilities of a router's answers, and what follows from them.

    `weights` are of score, lead and the tops of `rankers`. A task is answered where the first skill's probability is
    `threshold` at least, and no top is below its `least`: of a task unlike all that skills serve, too, some skill
    stands out among the others. `miss` is the most that 1 - probability may be of a skill in the likely set.
    """

    rankers: tuple[str, ...]
    weights: tuple[float, ...]
    intercept: float
    threshold: float
    least: tuple[float, ...]
    miss: float

    def probabilities(self, evidence: Evidence) -> Float64[np.ndarray, " skill"]:
        """The probability of each ranked skill that it serves the task."""
        logits = evidence.rows(self.rankers) @ np.array(self.weights) + self.intercept
        return (1 + np.tanh(logits / 2)) / 2  # the logistic function, without overflow

    def fits(self, evidence: Evidence) -> bool:
        """Whether any skill serves the task."""
        tops = (evidence.tops[name] for name in self.rankers)
        is_like = all(top >= least for top, least in zip(tops, self.least, strict=True))
        return is_like and bool(max(self.probabilities(evidence), default=-1.0) >= self.threshold)

    def num_likely(self, evidence: Evidence) -> int:
        """How many of the first skills hold one that serves the task, with the chance that was asked for."""
        return int(np.count_nonzero(1 - self.probabilities(evidence) <= self.miss))


class Calibration(Config):
    """What the stage calibrate writes, and an index holds: a calibrator and the rankers and models that it is for.

    `figures` say what calibrators are worth that were fitted in the same way to a part of the queries.
    """

    system: list[dict[str, Any]]
    models: dict[str, str]
    calibrator: Calibrator
    answered: float
    contained: float
    num_queries: int
    figures: dict[str, Any]
    skilltrain: str
    fingerprints: dict[str, str]


def fit_logistic(
    rows: Float64[np.ndarray, "row feature"], labels: Bool[np.ndarray, " row"]
) -> tuple[Float64[np.ndarray, " feature"], float]:
    """(weights ≥ 0, intercept) by which `labels` are likeliest, with a trace of L2 on weights of scaled features."""
    from scipy.optimize import minimize

    mean, spread = rows.mean(0), rows.std(0)
    spread[spread == 0] = 1
    scaled = np.column_stack([(rows - mean) / spread, np.ones(len(rows))])

    def loss(values: Float64[np.ndarray, " feature"]) -> tuple[float, Float64[np.ndarray, " feature"]]:
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

    The (n + 1)(1 - level)-th lowest of n values: split conformal prediction (Vovk et al. 2005; Angelopoulos and Bates
    2021, section 1).
    """
    place = floor((len(values) + 1) * (1 - level) + 1e-9)  # .1 · 10 is a little less than 1
    return float(np.sort(values)[place - 1]) if place else lowest


def calibration_error(probabilities: Float64[np.ndarray, " answer"], is_right: Bool[np.ndarray, " answer"]) -> float:
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
    return [(round(count / len(wrong), 4), round(float(wrong[count - 1]) / count, 4)) for count in counts if count]
