"""Pointwise binary cross-entropy: the ablation that scores every candidate alone."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch


class PointwiseBCE(Config):
    """Binary cross-entropy on each candidate, averaged over its query's list.

    Use: an ablation; SkillRouter reports it far behind listwise cross-entropy.
    Formula: mean over valid candidates of -[y log sigmoid(s) + (1 - y) log(1 - sigmoid(s))] with y = 1 if gain > 0.
    Inputs: scores are logits; gains >= 0; invalid candidates are ignored.
    Returns: the sum over queries.
    Example: scores (0, 0), gains (1, 0): log 2.
    Source: SkillRouter, section 4.3, equation 3.
    """

    name: Literal["pointwise_bce"] = "pointwise_bce"

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        labels = (batch.gains > 0).to(batch.scores.dtype)
        each = torch.nn.functional.binary_cross_entropy_with_logits(batch.scores, labels, reduction="none")
        return (torch.where(batch.valid, each, 0.0).sum(1) / batch.valid.sum(1)).sum()
