"""KL divergence from a teacher's distribution over the list."""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch


class KL(Config):
    """KL divergence of the model's softmax over a list from a teacher's.

    Use: distillation of a whole list from a reranker or an LLM; verdicts play no part.
    Formula: sum_i P_i (log P_i - log Q_i), P = softmax(T / teacher_temperature), Q = softmax(s / temperature).
    Inputs: scores of any range; teacher scores T for every valid candidate; invalid candidates are ignored.
    Returns: the sum over queries; 0 where both agree. sentence-transformers' DistillKLDivLoss is the mean, and
        multiplies by the squared student temperature, which would leave a cosine encoder at 0.05 a 400th of it.
    Example: scores (0, 0), teacher (log 3, 0): 3/4 log 3/2 + 1/4 log 1/2 = 0.130812.
    Source: Hinton et al. 2015; Kullback and Leibler 1951.
    """

    needs_teacher_scores: ClassVar[bool] = True
    name: Literal["kl"] = "kl"
    temperature: float = Field(default=1.0, gt=0, description="the scores are divided by it")
    teacher_temperature: float = Field(default=1.0, gt=0, description="the teacher's scores are divided by it")

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        wanted = batch.teacher().masked_fill(~batch.valid, -torch.inf) / self.teacher_temperature
        shares = torch.softmax(wanted, 1)
        logs = torch.log_softmax(batch.filled(-torch.inf) / self.temperature, 1).masked_fill(~batch.valid, 0.0)
        return (torch.xlogy(shares, shares) - shares * logs).sum()
