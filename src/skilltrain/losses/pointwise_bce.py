"""Pointwise binary cross-entropy: the ablation that scores every candidate alone."""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch


class PointwiseBCE(Config):
    """Binary cross-entropy on each candidate, averaged over its query's list.

    Use: an ablation; SkillRouter reports it far behind listwise cross-entropy.
    Formula: mean over valid candidates of -[y log sigmoid(s/t) + (1 - y) log(1 - sigmoid(s/t))], y = 1 for positives.
    Inputs: scores are logits (temperature 1), or cosines (a small temperature); any gains, of which only the positives
        count; invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' BinaryCrossEntropyLoss is the mean over all pairs.
    Example: scores (0, 0), gains (1, 0): log 2.
    Source: SkillRouter, section 4.3, equation 3.
    """

    needs_teacher_scores: ClassVar[bool] = False
    name: Literal["pointwise_bce"] = "pointwise_bce"
    temperature: float = Field(default=1.0, gt=0, description="the scores are divided by it")

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        scores = batch.filled(0.0) / self.temperature
        labels = batch.is_positive.to(scores.dtype)
        each = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        return (torch.where(batch.valid, each, 0.0).sum(1) / batch.valid.sum(1).clamp(min=1)).sum()
