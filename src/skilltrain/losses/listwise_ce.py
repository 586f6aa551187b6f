"""Listwise cross-entropy: each positive against every candidate of lower gain."""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch, find_positives, gain_shares


def contrast(
    batch: ScoredBatch, temperature: float, more: Float[Tensor, "positive"] | None = None
) -> Float[Tensor, ""]:
    """Sum over queries of -sum_p w_p log(e^{s_p/t} / (e^{s_p/t} + e^{m_p} + sum_{n: g_n < g_p} e^{s_n/t})).

    w_p = g_p / the positives' sum. `more` (m_p) is what else stands against a positive, as a log of summed
    exponentials. With one positive and nothing more, this is the softmax cross-entropy of SkillRouter (equations 1 and
    2). With several, no positive is pushed down by another of the same gain.
    """
    positives = find_positives(batch)
    others = (positives.other_scores / temperature).masked_fill(~positives.is_pair, -torch.inf).logsumexp(1)
    if more is not None:
        others = torch.stack([others, more]).logsumexp(0)
    weights = gain_shares(batch, batch.is_positive)[positives.row, positives.column]
    return (weights * torch.nn.functional.softplus(others - positives.scores / temperature)).sum()


class ListwiseCE(Config):
    """Listwise cross-entropy over a query's list.

    Use: the reranker's default; lists of one or more positives among hard negatives. Graded gains rank in full:
        a useful skill stands against irrelevant ones and below required ones.
    Formula: see `contrast`; a softmax over the list at `temperature`.
    Inputs: scores of any range; any gains, positives above 0; invalid candidates are ignored. Negatives of two gains
        are told apart only by positives that lie between them: for rejected against irrelevant take a loss of pairs.
    Returns: the sum over queries.
    Example: scores (0, 0), gains (1, 0): log 2.
    Source: SkillRouter, section 4.3, equation 2 (temperature 1); graded lists for rerankers: R3 (Reject-as-Resource).
    """

    needs_teacher_scores: ClassVar[bool] = False
    name: Literal["listwise_ce"] = "listwise_ce"
    temperature: float = Field(default=1.0, gt=0, description="the scores are divided by it")

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        return contrast(batch, self.temperature)
