"""Losses over the list of a query: listwise and pointwise cross-entropy, ListNet and KL."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from skilltrain.losses.scored_batch import Loss, Needs, ScoredBatch, Temperature, gain_shares


def contrast(
    batch: ScoredBatch,
    temperature: float,
    log_extra_negatives: Float[Tensor, "positive"] | None = None,
) -> Float[Tensor, ""]:
    """Return the cross-entropy of each positive against the candidates of lower gain.

    Each positive has a softmax of its own, over itself and the candidates of its query that have
    a lower gain. So positives of the same gain do not push each other down. With one positive,
    this is the softmax cross-entropy of SkillRouter (equations 1 and 2).

    The loss of one query, with positives p and other candidates n, is

        -sum_p w_p log(e^{s_p/t} / (e^{s_p/t} + sum_{n: g_n < g_p} e^{s_n/t} + e^{m_p})).

    The weight w_p is the gain of p divided by the gains of all positives of the query. The term
    e^{m_p} stands for further negatives, and is absent without them.

    Args:
        batch: Scores s and gains g.
        temperature: Temperature t.
        log_extra_negatives: m_p, the logsumexp of the further negatives of each positive.

    Returns:
        The sum over queries.
    """
    # Mark the candidates of lower gain. Each positive is a (row, column) of the scores.
    scores = batch.filled(0.0)  # [query, candidate], 0 for invalid candidates
    row, column = batch.is_positive.nonzero(as_tuple=True)  # each [positive]
    gains = batch.gains[row, column][:, None]  # [positive, 1]
    is_lower = batch.valid[row] & (batch.gains[row] < gains)  # [positive, candidate]

    # Sum the negatives of each positive. Candidates that are no negatives add e^-inf, which is 0.
    logits = scores[row] / temperature  # [positive, candidate]
    log_negatives = logits.masked_fill(~is_lower, -torch.inf).logsumexp(1)  # [positive]
    if log_extra_negatives is not None:
        log_negatives = torch.stack([log_negatives, log_extra_negatives]).logsumexp(0)
    return weighted_cross_entropy(log_negatives, batch, scores, temperature)


def weighted_cross_entropy(
    log_negatives: Float[Tensor, "positive"],
    batch: ScoredBatch,
    scores: Float[Tensor, "query candidate"],
    temperature: float,
) -> Float[Tensor, ""]:
    """Return the weighted sum of the cross-entropy of each positive against its negatives.

    The weight of a positive is its share in the gains of its query's positives. So each query with
    positives has the total weight 1.

    Args:
        log_negatives: Logsumexp of each positive's negatives, already divided by `temperature`.
        batch: Gains, and which candidates are positives.
        scores: Scores of all candidates.
        temperature: The scores of the positives are divided by it.
    """
    row, column = batch.is_positive.nonzero(as_tuple=True)  # each [positive]
    weights = gain_shares(batch, batch.is_positive)[row, column]  # [positive]
    differences = log_negatives - scores[row, column] / temperature  # [positive]
    # The loss of one positive is softplus(n - p) = -log(e^p / (e^p + e^n)), with the logit p of
    # the positive and the logsumexp n of its negatives.
    return (weights * torch.nn.functional.softplus(differences)).sum()


class ListwiseCE(Loss):
    """Listwise cross-entropy: each positive of a query against every candidate of lower gain.

    Use: the reranker's default; lists of one or more positives among hard negatives. With graded
        gains, a positive is also ranked above positives of lower gain.
    Formula: see `contrast`; a softmax over the list at `temperature`.
    Inputs: scores of any range; any gains, positives above 0; invalid candidates are ignored.
        Candidates that are not positive are not ranked against each other: for irrelevant above
        rejected, use a loss over pairs.
    Returns: the sum over queries.
    Example: scores (0, 0), gains (1, 0): log 2.
    Source: SkillRouter, section 4.3, equation 2 (temperature 1); graded lists for rerankers: R3
        (Reject-as-Resource).
    """

    name: Literal["listwise_ce"] = "listwise_ce"
    temperature: Temperature = 1.0

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        return contrast(batch, self.temperature)


class PointwiseBCE(Loss):
    """Binary cross-entropy on each candidate alone, averaged over its query's list.

    Use: an ablation; SkillRouter reports it far behind listwise cross-entropy.
    Formula: mean over valid candidates of -[y log sigmoid(s/t) + (1 - y) log(1 - sigmoid(s/t))],
        where y is 1 for positives and 0 for others.
    Inputs: scores are logits (temperature 1), or cosines (a small temperature). Of the gains, only
        the sign counts. Invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' BinaryCrossEntropyLoss is the mean over
        all pairs.
    Example: scores (0, 0), gains (1, 0): log 2.
    Source: SkillRouter, section 4.3, equation 3.
    """

    name: Literal["pointwise_bce"] = "pointwise_bce"
    temperature: Temperature = 1.0

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        scores = batch.filled(0.0) / self.temperature  # [query, candidate]
        labels = batch.is_positive.to(scores.dtype)  # 1 for positives, 0 for others
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            scores, labels, reduction="none"
        )
        sums = torch.where(batch.valid, losses, 0.0).sum(1)  # [query]
        # A query without valid candidates adds 0, and `clamp` avoids a division by 0.
        return (sums / batch.valid.sum(1).clamp(min=1)).sum()


class ListNet(Loss):
    """Cross-entropy between the candidates' shares of the gains and the softmax of the scores.

    Use: lists with graded gains whose proportions should show in the scores. Equal positives share
        the softmax here; with `listwise_ce` they do not compete.
    Formula: -sum_i P_i log(e^{s_i/t} / sum_j e^{s_j/t}). P_i is g_i divided by the sum of the gains
        above 0, and 0 for other candidates. With target_temperature u, P = softmax(g / u), which
        distinguishes all grades, also rejected from irrelevant.
    Inputs: scores of any range; any gains, one above 0 per query; invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' ListNetLoss is the mean, and its target is
        the softmax of the labels (target_temperature 1). For 1 positive among 11 candidates, that
        target is 0.214; with null it is 1.
    Example: scores (0, 0), gains (3, 1): log 2.
    Source: Cao et al. 2007, the top-one probability (definition 6). Its increasing function is the
        gain itself, or with a target_temperature its exponential.
    """

    name: Literal["list_net"] = "list_net"
    temperature: Temperature = 1.0
    target_temperature: float | None = Field(
        default=None,
        gt=0,
        description="soft targets: softmax of the gains divided by it; null: shares in the gains",
    )

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        # The target says which share each candidate should have in the softmax of its query.
        if self.target_temperature is None:
            target = gain_shares(batch, batch.gains > 0)
        else:
            gains = batch.gains.to(batch.scores)
            target = _softmax(gains / self.target_temperature, batch.valid)
        return -(target * _log_softmax(batch, self.temperature)).sum()


class KL(Loss):
    """KL divergence of the model's softmax over a list from a teacher's.

    Use: distillation of a whole list from a reranker or an LLM. Gains do not count.
    Formula: sum_i P_i (log P_i - log Q_i), P = softmax(T / teacher_temperature),
        Q = softmax(s / temperature).
    Inputs: scores of any range; teacher scores T for every valid candidate; invalid candidates are
        ignored.
    Returns: the sum over queries; 0 if both agree. sentence-transformers' DistillKLDivLoss is the
        mean, multiplied by the squared student temperature, which is 1/400 for a cosine encoder
        (temperature 0.05).
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
        target = _softmax(batch.teacher_scores / self.teacher_temperature, batch.valid)
        # sum_i P_i (log P_i - log Q_i). `xlogy` gives 0 for P_i = 0, where P_i log P_i gives NaN.
        return (torch.xlogy(target, target) - target * _log_softmax(batch, self.temperature)).sum()


def _softmax(
    logits: Float[Tensor, "query candidate"], valid: Bool[Tensor, "query candidate"]
) -> Float[Tensor, "query candidate"]:
    """Return the softmax over the valid candidates of each query, and 0 for the others."""
    shares = torch.softmax(logits.masked_fill(~valid, -torch.inf), 1)
    return shares.masked_fill(~valid, 0.0)  # NaN for a query without valid candidates


def _log_softmax(batch: ScoredBatch, temperature: float) -> Float[Tensor, "query candidate"]:
    """Return the log-softmax of the scores of valid candidates, and 0 for the others.

    It is multiplied by a target that is 0 for the others, and 0 times -inf would be NaN.
    """
    log_shares = torch.log_softmax(batch.filled(-torch.inf) / temperature, 1)
    return log_shares.masked_fill(~batch.valid, 0.0)
