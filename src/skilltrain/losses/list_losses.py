"""Losses over a query's whole list: listwise and pointwise cross-entropy, ListNet, and a teacher's distribution."""

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.losses.scored_batch import Loss, Needs, ScoredBatch, Temperature, gain_shares


def contrast(
    batch: ScoredBatch, temperature: float, more: Float[Tensor, "positive"] | None = None
) -> Float[Tensor, ""]:
    """Sum over queries of -sum_p w_p log(e^{s_p/t} / (e^{s_p/t} + e^{m_p} + sum_{n: g_n < g_p} e^{s_n/t})).

    w_p = g_p / the positives' sum. `more` (m_p) is what else stands against a positive, as a log of summed
    exponentials. With one positive and nothing more, this is the softmax cross-entropy of SkillRouter (equations 1 and
    2). With several, no positive is pushed down by another of the same gain.
    """
    scores = batch.filled(0.0)
    row, column = batch.is_positive.nonzero(as_tuple=True)  # [positive]
    is_lower = batch.valid[row] & (batch.gains[row] < batch.gains[row, column][:, None])
    others = (scores[row] / temperature).masked_fill(~is_lower, -torch.inf).logsumexp(1)
    if more is not None:
        others = torch.stack([others, more]).logsumexp(0)
    return weighted_loss(batch, scores, others, temperature)


def weighted_loss(
    batch: ScoredBatch,
    scores: Float[Tensor, "query candidate"],
    others: Float[Tensor, "positive"],
    temperature: float,
) -> Float[Tensor, ""]:
    """Sum the loss of each positive against `others`, logs of summed exponentials, by its share in the gains."""
    row, column = batch.is_positive.nonzero(as_tuple=True)  # [positive]
    weights = gain_shares(batch, batch.is_positive)[row, column]
    margins = others - scores[row, column] / temperature  # [positive]
    return (weights * torch.nn.functional.softplus(margins)).sum()


class ListwiseCE(Loss):
    """Listwise cross-entropy over a query's list: each positive against every candidate of lower gain.

    Use: the reranker's default; lists of one or more positives among hard negatives. Graded gains rank in full:
        a useful skill stands against irrelevant ones and below required ones.
    Formula: see `contrast`; a softmax over the list at `temperature`.
    Inputs: scores of any range; any gains, positives above 0; invalid candidates are ignored. Negatives of two gains
        are told apart only by positives that lie between them: for rejected against irrelevant take a loss of pairs.
    Returns: the sum over queries.
    Example: scores (0, 0), gains (1, 0): log 2.
    Source: SkillRouter, section 4.3, equation 2 (temperature 1); graded lists for rerankers: R3 (Reject-as-Resource).
    """

    name: Literal["listwise_ce"] = "listwise_ce"
    temperature: Temperature = 1.0

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        return contrast(batch, self.temperature)


class PointwiseBCE(Loss):
    """Binary cross-entropy on each candidate alone, averaged over its query's list.

    Use: an ablation; SkillRouter reports it far behind listwise cross-entropy.
    Formula: mean over valid candidates of -[y log sigmoid(s/t) + (1 - y) log(1 - sigmoid(s/t))], y = 1 for positives.
    Inputs: scores are logits (temperature 1), or cosines (a small temperature); any gains, of which only the positives
        count; invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' BinaryCrossEntropyLoss is the mean over all pairs.
    Example: scores (0, 0), gains (1, 0): log 2.
    Source: SkillRouter, section 4.3, equation 3.
    """

    name: Literal["pointwise_bce"] = "pointwise_bce"
    temperature: Temperature = 1.0

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        scores = batch.filled(0.0) / self.temperature
        labels = batch.is_positive.to(scores.dtype)
        each = torch.nn.functional.binary_cross_entropy_with_logits(
            scores, labels, reduction="none"
        )
        return (torch.where(batch.valid, each, 0.0).sum(1) / batch.valid.sum(1).clamp(min=1)).sum()


class ListNet(Loss):
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

    name: Literal["list_net"] = "list_net"
    temperature: Temperature = 1.0
    target_temperature: float | None = Field(
        default=None,
        gt=0,
        description="soft targets: softmax of the gains divided by it; null: shares in the gains",
    )

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        if self.target_temperature is None:
            target = gain_shares(batch, batch.gains > 0)
        else:
            grades = batch.gains.to(batch.scores) / self.target_temperature
            target = torch.softmax(grades.masked_fill(~batch.valid, -torch.inf), 1)
        return -(target * _log_softmax(batch, self.temperature)).sum()


class KL(Loss):
    """KL divergence of the model's softmax over a list from a teacher's.

    Use: distillation of a whole list from a reranker or an LLM; verdicts play no part.
    Formula: sum_i P_i (log P_i - log Q_i), P = softmax(T / teacher_temperature), Q = softmax(s / temperature).
    Inputs: scores of any range; teacher scores T for every valid candidate; invalid candidates are ignored.
    Returns: the sum over queries; 0 where both agree. sentence-transformers' DistillKLDivLoss is the mean, and
        multiplies by the squared student temperature, which would leave a cosine encoder at 0.05 a 400th of it.
    Example: scores (0, 0), teacher (log 3, 0): 3/4 log 3/2 + 1/4 log 1/2 = 0.130812.
    Source: Hinton et al. 2015; Kullback and Leibler 1951.
    """

    name: Literal["kl"] = "kl"
    temperature: Temperature = 1.0
    teacher_temperature: float = Field(
        default=1.0, gt=0, description="the teacher's scores are divided by it"
    )

    @property
    def needs(self) -> Needs:
        return Needs(teacher_scores=True)

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        scores = batch.teacher_scores.masked_fill(~batch.valid, -torch.inf)
        shares = torch.softmax(scores / self.teacher_temperature, 1)
        return (torch.xlogy(shares, shares) - shares * _log_softmax(batch, self.temperature)).sum()


def _log_softmax(batch: ScoredBatch, temperature: float) -> Float[Tensor, "query candidate"]:
    """Log of each valid candidate's share in the softmax of the scores; 0 for the others, which no weight reaches."""
    return torch.log_softmax(batch.filled(-torch.inf) / temperature, 1).masked_fill(
        ~batch.valid, 0.0
    )
