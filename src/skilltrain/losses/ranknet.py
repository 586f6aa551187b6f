"""RankNet: a logistic loss on every pair that the gains order."""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch, find_pairs, mean_over_pairs


class RankNet(Config):
    """Logistic loss on the margin of every pair of a higher and a lower gain.

    Use: graded lists where only the order counts. Every pair weighs the same: see `lambda_rank` for the top places.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of log(1 + e^{-(s_i - s_j)/t}).
    Inputs: scores of any range; at least two gains per query; invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' RankNetLoss takes one mean over the pairs of a whole batch,
        so that long lists weigh more, and by default the logarithm to base 2 (reduction_log "natural" is ours).
    Example: scores (0, 1), gains (1, 0): log(1 + e).
    Source: Burges et al. 2005, section 3, with target probability 1; sigma of later papers is 1/t.
    """

    needs_teacher_scores: ClassVar[bool] = False
    name: Literal["ranknet"] = "ranknet"
    temperature: float = Field(default=1.0, gt=0, description="the scores are divided by it")

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        pairs = find_pairs(batch)
        return mean_over_pairs(batch, pairs, torch.nn.functional.softplus(-pairs.margins() / self.temperature))
