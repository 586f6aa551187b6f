"""Positives and what each is compared with: the form that contrasts and pairwise losses share."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skilltrain.losses.scored_batch import ScoredBatch


@dataclass(frozen=True)
class Positives:
    """Every valid candidate of gain > 0, with the candidates of its query that it should outrank.

    One row per positive, not a square of candidates per query: memory grows with positives x candidates, which
    thousands of in-batch negatives allow.
    """

    row: Int[Tensor, "positive"]
    column: Int[Tensor, "positive"]
    scores: Float[Tensor, "positive"]
    gains: Float[Tensor, "positive"]
    other_scores: Float[Tensor, "positive candidate"]
    other_gains: Float[Tensor, "positive candidate"]
    is_lower: Bool[Tensor, "positive candidate"]

    def margins(self) -> Float[Tensor, "positive candidate"]:
        """How far each positive scores above each candidate."""
        return self.scores[:, None] - self.other_scores


def positive_cells(
    gains: Float[Tensor, "query candidate"], valid: Bool[Tensor, "query candidate"]
) -> tuple[Int[Tensor, "positive"], Int[Tensor, "positive"]]:
    """(row, column) of every valid candidate of gain > 0, row by row."""
    row, column = ((gains > 0) & valid).nonzero(as_tuple=True)
    return row, column


def find_positives(batch: ScoredBatch) -> Positives:
    """The positives of a batch; a candidate is lower if it is valid and of lower gain."""
    row, column = positive_cells(batch.gains, batch.valid)
    scores, gains = batch.filled(0.0), batch.gains
    own, others = gains[row, column], gains[row]
    is_lower = batch.valid[row] & (others < own[:, None])
    return Positives(row, column, scores[row, column], own, scores[row], others, is_lower)


def gain_shares(batch: ScoredBatch) -> Float[Tensor, "query candidate"]:
    """Each valid candidate's share in its query's gains: they sum to 1, or to 0 for a query without a positive."""
    gains = torch.where(batch.valid, batch.gains, 0.0).to(batch.scores)
    return gains / gains.sum(1, keepdim=True).clamp(min=torch.finfo(gains.dtype).tiny)


def mean_over_pairs(
    batch: ScoredBatch, positives: Positives, each: Float[Tensor, "positive candidate"]
) -> Float[Tensor, ""]:
    """Sum over queries of the mean of `each` over the query's pairs (positive, candidate of lower gain)."""
    num_pairs = positives.is_lower.sum(1)
    of_query = torch.zeros(len(batch.scores), dtype=num_pairs.dtype, device=num_pairs.device)
    of_query = of_query.index_add(0, positives.row, num_pairs)
    summed = torch.where(positives.is_lower, each, 0.0).sum(1)
    return (summed / of_query[positives.row].clamp(min=1)).sum()
