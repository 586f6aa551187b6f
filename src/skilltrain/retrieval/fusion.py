"""Several rankings fused into one, by normalised scores or by ranks."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float64
from pydantic import Field, SerializeAsAny, model_validator

from skilltrain.plugins import OneOf
from skilltrain.records import Ranking, Rankings
from skilltrain.retrieval.rankers import Keep, RankerConfig

Method = Literal["z", "rrf"]
RRF_K = 60
"""Usual constant of reciprocal rank fusion (Cormack et al., 2009)."""
LEG_KEEP = 100
"""Number of skills that a leg finds by default. It does not depend on the depth of the system."""


class FuseConfig(RankerConfig):
    """Fuse the rankings of several rankers, by normalised scores or by ranks (see `fuse`)."""

    kind: Literal["fuse"] = "fuse"
    of: tuple[Annotated[SerializeAsAny[RankerConfig], OneOf("ranker", only="can_be_leg")], ...] = (
        Field(min_length=2, description=f"the rankers; without keep one finds {LEG_KEEP}")
    )
    method: Method = Field(
        default="z", description="z: add scores, normalised per query; rrf: add 1/(rrf_k + rank)"
    )
    rrf_k: int = Field(
        default=RRF_K, ge=0, description="the larger, the less the first ranks stand out"
    )
    weights: tuple[float, ...] | None = Field(
        default=None, description="one per ranker; null: all equal"
    )
    keep: Keep = None
    can_be_leg = False
    can_be_expanded = False

    @model_validator(mode="after")
    def _check_weights(self) -> "FuseConfig":
        """Check that there is a weight for each ranker and not all are 0, if weights are given."""
        if self.weights is not None and len(self.weights) != len(self.of):
            raise ValueError(
                f"{len(self.of)} rankers are fused, and there are {len(self.weights)} weights"
            )
        if self.weights and not any(self.weights):
            raise ValueError("all weights are 0")
        return self

    @property
    def components(self) -> tuple[RankerConfig, ...]:
        return self.of

    @property
    def legs(self) -> tuple[RankerConfig, ...]:
        return self.of

    def leg_top_ks(self, candidates: Rankings | None) -> list[int]:
        """Return the number of skills to keep of each leg, a ranker that is fused.

        A leg without `keep` keeps `LEG_KEEP` skills, or all candidates.

        Args:
            candidates: Rankings to order, by query id; None for a search of the pool.
        """
        default = LEG_KEEP
        # The longest list of candidates limits the length of a ranking.
        if candidates is not None:
            default = max(map(len, candidates.values()), default=0)
        return [leg.keep or default for leg in self.of]

    def combine(self, rankings: Sequence[Ranking]) -> Ranking:
        """Fuse the rankings of one query."""
        return fuse(rankings, self.leg_weights(), self.method, self.rrf_k)[: self.keep]

    def with_keep(self, keep: int) -> "FuseConfig":
        legs = tuple(leg.with_keep(keep) for leg in self.of)
        return self.model_copy(update={"of": legs, "keep": keep})

    def with_default_values(self) -> "FuseConfig":
        return self.model_copy(update={"weights": self.leg_weights()})

    def leg_weights(self) -> tuple[float, ...]:
        """Return the weight of each leg."""
        if self.weights:
            return self.weights
        return (1 / len(self.of),) * len(self.of)


def fuse(
    rankings: Sequence[Ranking], weights: Sequence[float], method: Method, rrf_k: int = RRF_K
) -> Ranking:
    """Fuse several rankings of one query into one.

    Args:
        rankings: The rankings.
        weights: Weight of each ranking.
        method: What a ranking adds to the score of a skill. `z` adds weight * z-score. A
            skill that the ranking lacks gets the lowest z-score of the ranking. `rrf` adds
            weight / (rrf_k + rank), and nothing to a skill that the ranking lacks (reciprocal rank
            fusion; Cormack et al., 2009).
        rrf_k: The constant of `rrf`.

    Returns:
        All ranked skills, best first. Ties keep the order in which the rankings list the skills.
    """
    all_pairs = chain.from_iterable(rankings)
    skill_ids = list(dict.fromkeys(skill_id for skill_id, _ in all_pairs))  # without duplicates
    if not skill_ids:
        return []

    # Add one ranking at a time. A matrix product may round the sums of equal skills differently, so
    # that they would not tie.
    totals = np.zeros(len(skill_ids))
    for ranking, weight in zip(rankings, weights, strict=True):
        if method == "z":
            totals += weight * _z_scores(ranking, skill_ids)
        else:
            totals += weight * _reciprocal_ranks(ranking, skill_ids, rrf_k)

    # The minus puts high scores first. A stable sort keeps the order of ties.
    order = np.argsort(-totals, kind="stable")
    return [(skill_ids[position], float(totals[position])) for position in order]


def _reciprocal_ranks(
    ranking: Ranking, skill_ids: Sequence[str], rrf_k: int
) -> Float64[np.ndarray, " skill"]:
    """Return 1 / (rrf_k + rank) of each skill, or 0 if the ranking lacks it."""
    values = {skill_id: 1 / (rrf_k + rank) for rank, (skill_id, _) in enumerate(ranking, 1)}
    return np.array([values.get(skill_id, 0.0) for skill_id in skill_ids])


def _z_scores(ranking: Ranking, skill_ids: Sequence[str]) -> Float64[np.ndarray, " skill"]:
    """Return the z-score of each skill over all of `skill_ids`.

    Skills that the ranking lacks have its lowest score. If all scores are equal but for rounding,
    all z-scores are 0.

    Args:
        ranking: Pairs of a skill id and its score, for one query.
        skill_ids: Ids of the skills in all rankings of this query.
    """
    score_by_id = dict(ranking)
    lowest = min(score_by_id.values(), default=0.0)
    scores = np.array([score_by_id.get(skill_id, lowest) for skill_id in skill_ids])
    # `ptp` is the difference between the highest and the lowest score. If this difference is only a
    # rounding error, the division by the standard deviation would make it large.
    if np.ptp(scores) <= 1e-12 * np.abs(scores).max():
        return np.zeros_like(scores)
    return (scores - scores.mean()) / scores.std()
