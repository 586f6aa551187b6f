"""Listwise cross-entropy: each positive against every candidate of lower gain."""

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch


def contrast(batch: ScoredBatch, temperature: float) -> Float[Tensor, ""]:
    """Sum over queries of -sum_p w_p log(e^{s_p/t} / (e^{s_p/t} + sum_{n: g_n < g_p} e^{s_n/t})), w_p = g_p / sum g.

    With one positive this is the softmax cross-entropy of SkillRouter (eq. 1 and 2). With several, no positive is
    pushed down by another of the same gain.
    """
    scores = batch.scores / temperature
    gains = torch.where(batch.valid, batch.gains, 0.0)
    weights = gains / gains.sum(1, keepdim=True)
    total = scores.new_zeros(())
    for gain in torch.unique(gains[gains > 0]):
        lower = batch.valid & (gains < gain)
        others = scores.masked_fill(~lower, -torch.inf).logsumexp(1, keepdim=True)
        each = torch.nn.functional.softplus(others - scores)
        total = total + torch.where(batch.valid & (gains == gain), weights * each, 0.0).sum()
    return total


class ListwiseCE(Config):
    """Listwise cross-entropy over a query's list.

    Use: the reranker's default; lists of one or more positives among hard negatives.
    Formula: see `contrast`; a softmax over the list at `temperature`.
    Inputs: scores of any range; gains >= 0 with at least one > 0 a query; invalid candidates are ignored.
    Returns: the sum over queries.
    Example: scores (0, 0), gains (1, 0): log 2.
    Source: SkillRouter, section 4.3, equation 2 (temperature 1).
    """

    name: Literal["listwise_ce"] = "listwise_ce"
    temperature: float = Field(default=1.0, gt=0)

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        return contrast(batch, self.temperature)
