"""Several rankings of one query as one: by their scores, made comparable, or by their ranks alone."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64

from skilltrain.records import Ranking

Scores = Float64[np.ndarray, " skill"]
Method = Literal["z", "max", "minmax", "rrf"]


def fuse(legs: Sequence[Ranking], weights: Sequence[float], method: Method, rrf_k: int) -> Ranking:
    """All skills that the `legs` found, best first; equal scores stand in the order in which they were found.

    `z`, `max` and `minmax` add each leg's scores, made comparable over the skills that any leg found, times the leg's
    weight. A skill that a leg did not find gets the lowest score that this leg gave.

    `rrf` adds weight / (rrf_k + rank); a leg adds nothing to a skill that it did not find (Cormack et al., 2009).
    """
    skill_ids = list(dict.fromkeys(skill_id for leg in legs for skill_id, _ in leg))
    if not skill_ids:
        return []
    total = np.zeros(len(skill_ids))
    for leg, weight in zip(legs, weights, strict=True):
        total += weight * (_by_rank(leg, skill_ids, rrf_k) if method == "rrf" else _by_score(leg, skill_ids, method))
    order = np.argsort(-total, kind="stable")
    return [(skill_ids[place], float(total[place])) for place in order]


def _by_rank(leg: Ranking, skill_ids: Sequence[str], rrf_k: int) -> Scores:
    parts = {skill_id: 1 / (rrf_k + rank) for rank, (skill_id, _) in enumerate(leg, 1)}
    return np.array([parts.get(skill_id, 0.0) for skill_id in skill_ids])


def _by_score(leg: Ranking, skill_ids: Sequence[str], method: Method) -> Scores:
    found = dict(leg)
    lowest = min(found.values(), default=0.0)
    return _NORMALISED[method](np.array([found.get(skill_id, lowest) for skill_id in skill_ids]))


def _z(scores: Scores) -> Scores:
    return _divided(scores - scores.mean(), scores.std())


def _share_of_largest(scores: Scores) -> Scores:
    return _divided(scores, np.abs(scores).max())


def _from_0_to_1(scores: Scores) -> Scores:
    return _divided(scores - scores.min(), scores.max() - scores.min())


def _divided(scores: Scores, size: float) -> Scores:
    """`scores / size`; zeros where all scores are alike, for then they tell nothing apart."""
    alike = scores.max() - scores.min() <= 1e-12 * np.abs(scores).max()
    return np.zeros_like(scores) if alike else scores / size


_NORMALISED: dict[str, Callable[[Scores], Scores]] = {"z": _z, "max": _share_of_largest, "minmax": _from_0_to_1}
