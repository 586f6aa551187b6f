"""Losses over pairs of a higher and a lower gain: RankNet, and a teacher's margins."""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from skilltrain.losses.scored_batch import Loss, ScoredBatch, Temperature, find_pairs


class RankNet(Loss):
    """Logistic loss on the margin of every pair of a higher and a lower gain.

    Use: graded lists where only the order counts. Every pair weighs the same.
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
