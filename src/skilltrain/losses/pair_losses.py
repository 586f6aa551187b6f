"""Losses over pairs of a higher and a lower gain: RankNet, LambdaRank, a margin between grades, a teacher's margins."""

import math
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.losses.scored_batch import Loss, ScoredBatch, Temperature, find_pairs


class RankNet(Loss):
    """Logistic loss on the margin of every pair of a higher and a lower gain.

    Use: graded lists where only the order counts. Every pair weighs the same: see `lambda_rank` for the top places.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of log(1 + e^{-(s_i - s_j)/t}).
    Inputs: scores of any range; at least two gains per query; invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' RankNetLoss takes one mean over the pairs of a whole batch,
        so that long lists weigh more, and by default the logarithm to base 2 (reduction_log "natural" is ours).
    Example: scores (0, 1), gains (1, 0): log(1 + e).
    Source: Burges et al. 2005, section 3, with target probability 1; sigma of later papers is 1/t.
    """

    name: Literal["ranknet"] = "ranknet"
    temperature: Temperature = 1.0

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        pairs = find_pairs(batch)
        return pairs.mean(
            torch.nn.functional.softplus(-pairs.margins(batch.filled(0.0)) / self.temperature)
        )


class Margin(Loss):
    """Hinge loss that wants the scores of two grades as far apart as their gains, times a margin.

    Use: graded lists in which a grade should mean a distance: a rejected skill far below, a useful one just below the
        required. A pair that is far enough apart has no gradient, so easy negatives cost nothing.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of max(0, m (g_i - g_j) - (s_i - s_j)/t).
    Inputs: scores of any range; at least two gains per query; invalid candidates are ignored.
    Returns: the sum over queries. torch's MarginRankingLoss has one margin for all pairs.
    Example: scores (0, 0), gains (1, -0.5), margin 1: 1.5.
    Source: Herbrich et al. 2000 (large margin rank boundaries), with the rescaled margin of Tsochantaridis et al. 2005.
    """

    name: Literal["margin"] = "margin"
    margin: float = Field(
        default=1.0, gt=0, description="wanted distance of scores for gains that lie 1 apart"
    )
    temperature: Temperature = 1.0

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        pairs = find_pairs(batch)
        found = pairs.margins(batch.filled(0.0)) / self.temperature
        return pairs.mean((self.margin * pairs.gaps - found).relu())


class MarginMSE(Loss):
    """Squared difference between the model's and a teacher's margin of each positive over each negative.

    Use: distillation where the teacher may doubt a negative: it then asks for a small margin, or for none.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of ((s_i - s_j)/t - (T_i - T_j))^2.
    Inputs: scores of any range; a cosine margin is 2 at most, so an encoder needs a temperature that reaches the
        teacher's; teacher scores T for every valid candidate; at least two gains per query.
    Returns: the sum over queries. sentence-transformers' MarginMSELoss is the mean, with one positive and t = 1.
    Example: scores (1, 0), teacher (3, 0), gains (1, 0): 4.
    Source: Hofstätter et al. 2020, equation 8.
    """

    needs_teacher_scores: ClassVar[bool] = True
    name: Literal["margin_mse"] = "margin_mse"
    temperature: Temperature = 1.0  # not of the teacher's scores

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        pairs = find_pairs(batch)
        found = pairs.margins(batch.filled(0.0)) / self.temperature
        return pairs.mean((found - pairs.margins(batch.teacher())).square())


class LambdaRank(Loss):
    """Logistic loss on every ordered pair, weighted by how much nDCG changes when the two swap places.

    Use: the top places count most, and gains are graded. The weights depend on the scores' order but carry no
        gradient; equal scores stand in the list's order.
    Formula: sum over a query's pairs (i, j) with g_i > g_j of (r_ij + mu d_ij) (g_i - g_j)/maxDCG log2(1 + e^{-(s_i -
        s_j)/t}), with places p from 1, D(p) = log2(1 + p), r_ij = |1/D(p_i) - 1/D(p_j)|, and d_ij = 1/D(|p_i - p_j|)
        - 1/D(|p_i - p_j| + 1). mu 0 is LambdaRank, mu 10 NDCG-Loss2++.
    Inputs: scores of any range; at least two gains per query; invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' LambdaLoss divides by the number of pairs in the batch,
        which takes the bound on nDCG away, and makes gains 2^label - 1; here the recipe's gains are the gains.
    Example: scores (1, 0), gains (1, 0): (1 - 1/log2(3)) log2(1 + 1/e) = 0.166798.
    Source: Burges 2010 (LambdaRank); Wang et al. 2018 (LambdaLoss), equations 11 to 18.
    """

    name: Literal["lambda_rank"] = "lambda_rank"
    temperature: Temperature = 1.0
    mu: float = Field(default=0.0, ge=0, description="0 is LambdaRank, 10 is NDCG-Loss2++")

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        pairs = find_pairs(batch)
        order = batch.filled(-torch.inf).detach().argsort(dim=1, descending=True, stable=True)
        places = (order.argsort(1) + 1).to(batch.scores)  # from 1; invalid candidates come last
        own, others = places[pairs.row, pairs.column][:, None], places[pairs.row]
        apart = (own - others).abs().clamp(min=1)
        swap = (_discount(own) - _discount(others)).abs()
        weights = swap + self.mu * (_discount(apart) - _discount(apart + 1))
        each = torch.nn.functional.softplus(
            -pairs.margins(batch.filled(0.0)) / self.temperature
        ) / math.log(2)
        worth = pairs.gaps / _best_dcg(batch)[pairs.row][:, None]
        return torch.where(pairs.is_pair, weights * worth * each, 0.0).sum()


def _best_dcg(batch: ScoredBatch) -> Float[Tensor, "query"]:
    """The DCG of the best order; where gains lie below 0, they are counted from the query's lowest."""
    gains = torch.where(batch.valid, batch.gains, 0.0)
    from_lowest = torch.where(batch.valid, gains - gains.amin(1, keepdim=True).clamp(max=0), 0.0)
    ideal = from_lowest.sort(1, descending=True).values
    places = torch.arange(1, ideal.shape[1] + 1).to(batch.scores)
    return (ideal * _discount(places)).sum(1).clamp(min=torch.finfo(batch.scores.dtype).tiny)


def _discount(place: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    return 1 / torch.log2(1 + place)
