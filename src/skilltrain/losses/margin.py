"""Margin: a hinge on every pair of a higher and a lower gain, as wide as the gains lie apart."""

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch, find_pairs, mean_over_pairs


class Margin(Config):
    """Hinge loss that wants the scores of two grades as far apart as their gains, times a margin.

    Use: graded lists in which a grade should mean a distance: a rejected skill far below, a useful one just below the
        required. A pair that is far enough apart has no gradient, so easy negatives cost nothing.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of max(0, m (g_i - g_j) - (s_i - s_j)/t).
    Inputs: scores of any range; at least two gains per query; invalid candidates are ignored.
    Returns: the sum over queries. torch's MarginRankingLoss has one margin for all pairs.
    Example: scores (0, 0), gains (1, -0.5), margin 1: 1.5.
    Source: Herbrich et al. 2000 (large margin rank boundaries), with the rescaled margin of Tsochantaridis et al. 2005.
    """

    needs_teacher_scores: ClassVar[bool] = False
    name: Literal["margin"] = "margin"
    margin: float = Field(default=1.0, gt=0, description="wanted distance of scores for gains that lie 1 apart")
    temperature: float = Field(default=1.0, gt=0, description="the scores are divided by it")

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        pairs = find_pairs(batch)
        return mean_over_pairs(batch, pairs, (self.margin * pairs.gaps() - pairs.margins() / self.temperature).relu())
