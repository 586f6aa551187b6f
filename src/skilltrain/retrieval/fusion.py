"""Several rankings fused into one, by normalised scores or by ranks."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float64
from pydantic import Field, SerializeAsAny, model_validator

from skilltrain.plugins import OneOf
from skilltrain.records import Ranking, Rankings
from skilltrain.retrieval.rankers import Keep, RankerConfig

Method = Literal["z", "rrf"]
RRF_K = 60
"""The customary constant of reciprocal rank fusion (Cormack et al., 2009)."""
LEG_KEEP = 100
"""Skills that a leg of `fuse` finds where the recipe does not say: the same for any depth of the system."""


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
    is_composed = True

    @model_validator(mode="after")
    def _one_weight_each(self) -> "FuseConfig":
        if self.weights is not None and len(self.weights) != len(self.of):
            raise ValueError(
                f"{len(self.of)} rankers are fused, and there are {len(self.weights)} weights"
            )
        return self

    def parts(self) -> Iterator[RankerConfig]:
        yield self
        yield from self.of

    @property
    def legs(self) -> tuple[RankerConfig, ...]:
        return self.of

    def leg_top_ks(self, candidates: Rankings | None) -> list[int]:
        """Return the legs' own `keep`, else `LEG_KEEP` or the number of candidates."""
        depth = LEG_KEEP
        if candidates is not None:
            depth = max(map(len, candidates.values()), default=0)
        return [leg.keep or depth for leg in self.of]

    def combine(self, rankings: Sequence[Ranking]) -> Ranking:
        """Fuse the rankings of one query."""
        return fuse(rankings, self.leg_weights(), self.method, self.rrf_k)[: self.keep]

    def keeping(self, count: int) -> "FuseConfig":
        legs = tuple(leg.keeping(count) for leg in self.of)
        return self.model_copy(update={"of": legs, "keep": count})

    def written_out(self) -> "FuseConfig":
        return self.model_copy(update={"weights": self.leg_weights()})

    def leg_weights(self) -> tuple[float, ...]:
        """Return one weight per ranker."""
        return self.weights or (1 / len(self.of),) * len(self.of)


def fuse(
    legs: Sequence[Ranking], weights: Sequence[float], method: Method, rrf_k: int = RRF_K
) -> Ranking:
    """Return all skills of the `legs`, best first. Ties keep the order in which they were found.

    Method `z` adds weight * z-score. The z-scores of a leg are over all skills that any leg found;
    a skill that the leg did not find counts with the leg's lowest score. Method `rrf` adds
    weight / (rrf_k + rank), and nothing for a skill not found (Cormack et al., 2009).
    """
    skill_ids: dict[str, None] = {}
    for leg in legs:
        skill_ids.update((skill_id, None) for skill_id, _ in leg)
    if not skill_ids:
        return []
    # One leg at a time: a matrix product may round equal columns differently.
    totals = np.zeros(len(skill_ids))
    for leg, weight in zip(legs, weights, strict=True):
        if method == "rrf":
            leg = [(skill_id, 1 / (rrf_k + rank)) for rank, (skill_id, _) in enumerate(leg, 1)]
        scores = dict(leg)
        lowest = min(scores.values(), default=0.0) if method == "z" else 0.0
        row = np.array([scores.get(skill_id, lowest) for skill_id in skill_ids])
        totals += weight * (_z_scores(row) if method == "z" else row)
    order = np.argsort(-totals, kind="stable")
    fused = [*zip(skill_ids, totals.tolist(), strict=True)]
    return [fused[position] for position in order]


def _z_scores(scores: Float64[np.ndarray, " skill"]) -> Float64[np.ndarray, " skill"]:
    """Normalise `scores`; all 0 if they are equal but for rounding."""
    if np.ptp(scores) <= 1e-12 * np.abs(scores).max():
        return np.zeros_like(scores)
    return (scores - scores.mean()) / scores.std()
