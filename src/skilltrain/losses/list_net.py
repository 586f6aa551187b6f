"""ListNet: the softmax of the scores against the shares in the gains."""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch, gain_shares


class ListNet(Config):
    """Cross-entropy between each candidate's share in the gains and its share in the softmax of the scores.

    Use: lists with graded gains whose proportions should show in the scores. Equal positives share the softmax,
        where `listwise_ce` lets each stand alone.
    Formula: -sum_i P_i log(e^{s_i/t} / sum_j e^{s_j/t}), P_i = g_i / the sum of gains above 0, 0 for others; with
        target_temperature u, P = softmax(g / u), which tells every grade from the next, rejected from irrelevant.
    Inputs: scores of any range; any gains, one above 0 per query; invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' ListNetLoss is the mean, and its target is the softmax of
        the labels (target_temperature 1 here): one positive among eleven gets 0.214 of it, without it 1.
    Example: scores (0, 0), gains (3, 1): log 2.
    Source: Cao et al. 2007, the top-one probability (definition 6), with the gain itself as its increasing function,
        or its exponential.
    """

    needs_teacher_scores: ClassVar[bool] = False
    name: Literal["list_net"] = "list_net"
    temperature: float = Field(default=1.0, gt=0, description="the scores are divided by it")
    target_temperature: float | None = Field(
        default=None,
        gt=0,
        description="soft targets: softmax of the gains divided by it; null: shares in the gains",
    )

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        if self.target_temperature is None:
            wanted = gain_shares(batch, batch.gains > 0)
        else:
            grades = batch.gains.to(batch.scores) / self.target_temperature
            wanted = torch.softmax(grades.masked_fill(~batch.valid, -torch.inf), 1)
        logs = torch.log_softmax(batch.filled(-torch.inf) / self.temperature, 1)
        return -(wanted * logs.masked_fill(~batch.valid, 0.0)).sum()
