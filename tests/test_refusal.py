"""Refused requests, judged by rules of other folds: by hand."""

import numpy as np
import pytest

from skilltrain.metrics.refusal import (
    ScoredRequest,
    cross_validate,
    fit_answer_probability,
    predicts_gold,
    score_features,
)


def request_of(scores, right=(), num_gold=0):
    """Return a request whose ranking has these scores; `right` are positions of right skills."""
    is_right = np.isin(np.arange(len(scores)), right)
    return ScoredRequest(score_features(scores), is_right, num_gold)


def test_features_are_score_and_lead():
    assert score_features([3.0, 2.5, 1.0]).tolist() == [[3, 0.5], [2.5, -0.5], [1, -2]]
    assert score_features([3.0]).tolist() == [[3, 0]]
    assert score_features([]).shape == (0, 2)


SERVED = [request_of([5.0 + number / 10, 1.0], [0], 1) for number in range(20)]
UNSERVED = [request_of([1.0 + number / 10, 0.9]) for number in range(10)]
FOLDS = np.arange(30) % 5


def test_separate_scores_are_refused_rightly():
    row = cross_validate(SERVED + UNSERVED, FOLDS)

    assert (row["answered_unserved"].mean, row["answered_unserved"].n) == (0, 10)
    # The threshold refuses at most 15% of the other folds, so a few of this one.
    assert row["refused_served"].mean <= 0.2
    assert row["exact_set"].mean == 1 - row["refused_served"].mean
    assert row["calibration_error"].mean < 0.1
    assert row["separation"].mean == 1
    assert row["risk_coverage"][-1] == (1, pytest.approx(1 / 3, abs=1e-4))


def test_equal_scores_are_not_told_apart():
    requests = [request_of([1.0, 0.5], [0], 1)] * 20 + [request_of([1.0, 0.5])] * 10

    row = cross_validate(requests, FOLDS)

    assert row["answered_unserved"].mean == 1
    assert row["refused_served"].mean == 0


def test_request_without_ranking_is_refused():
    row = cross_validate([*SERVED, *UNSERVED[1:], request_of([])], FOLDS)

    assert row["answered_unserved"].mean == 0


def test_nothing_ranked_gives_no_probability():
    fits = fit_answer_probability([request_of([]), request_of([], (), 1)])

    assert fits.weights == (0, 0)


@pytest.mark.parametrize(
    ("probabilities", "right", "num_gold", "expected"),
    [
        ([0.9, 0.1], [0], 1, True),
        ([0.2, 0.1], [0], 1, True),  # the first skill is always predicted
        ([0.9, 0.6], [0], 1, False),  # one skill too many
        ([0.9, 0.1], [0, 1], 2, False),  # one skill too few
        ([0.9, 0.6], [0, 1], 2, True),
        ([], [], 1, False),
    ],
)
def test_predicted_skills_are_compared_exactly(probabilities, right, num_gold, expected):
    request = request_of([1.0] * len(probabilities), right, num_gold)

    assert predicts_gold(np.array(probabilities), request) is expected
