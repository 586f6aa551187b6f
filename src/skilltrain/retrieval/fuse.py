"""Rankings of several rankers, or of several queries, as one: by their scores, made comparable, or by their ranks."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64

from skilltrain.records import Ranking

Method = Literal["z", "rrf"]


def fuse(legs: Sequence[Ranking], weights: Sequence[float], method: Method, rrf_k: int) -> Ranking:
    """All skills that the `legs` found, best first; equal scores stand in the order in which they were found.

    `z` adds each leg's scores, made z-scores over the skills that any leg found, times the leg's weight. A skill that a
    leg did not find gets the lowest score that this leg gave.

    `rrf` adds weight / (rrf_k + rank); a leg adds nothing to a skill that it did not find (Cormack et al., 2009).
    """
    return weighted(*comparable_scores(legs, method, rrf_k), weights)


def comparable_scores(
    legs: Sequence[Ranking], method: Method, rrf_k: int
) -> tuple[list[str], Float64[np.ndarray, "leg skill"]]:
    """All skills that the `legs` found, in the order in which they were found, and what each leg says of each."""
    skill_ids = list(dict.fromkeys(skill_id for leg in legs for skill_id, _ in leg))
    comparable = np.zeros((len(legs), len(skill_ids)))
    if not skill_ids:
        return skill_ids, comparable
    for row, leg in zip(comparable, legs, strict=True):
        if method == "rrf":
            scores = {skill_id: 1 / (rrf_k + rank) for rank, (skill_id, _) in enumerate(leg, 1)}
            row[:] = [scores.get(skill_id, 0.0) for skill_id in skill_ids]
        else:
            scores = dict(leg)
            lowest = min(scores.values(), default=0.0)
            row[:] = _z_scores(np.array([scores.get(skill_id, lowest) for skill_id in skill_ids]))
    return skill_ids, comparable


def weighted(skill_ids: list[str], comparable: Float64[np.ndarray, "leg skill"], weights: Sequence[float]) -> Ranking:
    """The skills by the weighted sum of what the legs say, best first; equal sums keep their order."""
    total = np.zeros(len(skill_ids))
    for row, weight in zip(comparable, weights, strict=True):  # a matrix product may round equal columns unequally
        total += weight * row
    order = np.argsort(-total, kind="stable")
    return [(skill_ids[place], float(total[place])) for place in order]


def _z_scores(scores: Float64[np.ndarray, " skill"]) -> Float64[np.ndarray, " skill"]:
    """`scores` without their unit; zeros where all are alike, for then they tell nothing apart."""
    if scores.max() - scores.min() <= 1e-12 * np.abs(scores).max():
        return np.zeros_like(scores)
    return (scores - scores.mean()) / scores.std()
