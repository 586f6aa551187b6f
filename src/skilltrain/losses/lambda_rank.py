"""LambdaRank and NDCG-Loss2++: RankNet's pairs, weighted by what they are worth in nDCG."""

import math
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch, find_pairs


class LambdaRank(Config):
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

    needs_teacher_scores: ClassVar[bool] = False
    name: Literal["lambda_rank"] = "lambda_rank"
    temperature: float = Field(default=1.0, gt=0, description="the scores are divided by it")
    mu: float = Field(default=0.0, ge=0, description="0 is LambdaRank, 10 is NDCG-Loss2++")

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        pairs, places = find_pairs(batch), _places(batch)
        own, others = places[pairs.row, pairs.column][:, None], places[pairs.row]
        each = torch.nn.functional.softplus(-pairs.margins() / self.temperature) / math.log(2)
        worth = pairs.gaps() / _best_dcg(batch)[pairs.row][:, None]
        return torch.where(pairs.is_pair, self._weights(own, others) * worth * each, 0.0).sum()

    def _weights(
        self, own: Float[Tensor, "chosen 1"], others: Float[Tensor, "chosen candidate"]
    ) -> Float[Tensor, "chosen candidate"]:
        """What a place is worth to a pair, before the gains."""
        apart = (own - others).abs().clamp(min=1)
        swap = (_discount(own) - _discount(others)).abs()
        return swap + self.mu * (_discount(apart) - _discount(apart + 1))


def _best_dcg(batch: ScoredBatch) -> Float[Tensor, "query"]:
    """The DCG of the best order; where gains lie below 0, they are counted from the query's lowest."""
    gains = torch.where(batch.valid, batch.gains, 0.0)
    from_lowest = torch.where(batch.valid, gains - gains.amin(1, keepdim=True).clamp(max=0), 0.0)
    ideal = from_lowest.sort(1, descending=True).values
    places = torch.arange(1, ideal.shape[1] + 1).to(batch.scores)
    return (ideal * _discount(places)).sum(1).clamp(min=torch.finfo(batch.scores.dtype).tiny)


def _places(batch: ScoredBatch) -> Float[Tensor, "query candidate"]:
    """Place of each candidate by its score, from 1; invalid ones come last."""
    order = batch.filled(-torch.inf).detach().argsort(dim=1, descending=True, stable=True)
    return (order.argsort(1) + 1).to(batch.scores)


def _discount(place: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """1 / log2(1 + place)."""
    return 1 / torch.log2(1 + place)
