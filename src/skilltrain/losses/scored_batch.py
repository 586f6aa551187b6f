"""What every loss sees: scores, gains and who counts; and the positives in them, each with what it is compared with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class SideTerm:
    """Scores between one thing a row and all others of the step, and which of those are its negatives."""

    scores: Float[Tensor, "row other"]
    is_negative: Bool[Tensor, "row other"]

    def strength(self, temperature: float) -> Float[Tensor, "row"]:
        """Log of the sum of e^(score / temperature) over each row's negatives; -inf where it has none."""
        return (self.scores / temperature).masked_fill(~self.is_negative, -torch.inf).logsumexp(1)


@dataclass(frozen=True)
class SideScores:
    """What a symmetric or same-side contrast adds to a batch, for the rows that this rank has.

    A positive is a row of `skill_to_*` for each query that it answers, in the order of `positive_cells`. The others
    are all queries, or all skills, of the step. A row's negatives depend on no other row, so that ranks add up.
    """

    query_to_query: SideTerm
    skill_to_query: SideTerm
    skill_to_skill: SideTerm


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of candidates, the gains that a recipe gives to their verdicts, and which of them count.

    Losses return the sum over queries: the trainer divides by the number of queries in the global step, so that
    neither ranks nor accumulation change what a query weighs. Gradients through invalid candidates are exactly zero.
    Where a loss learns from teacher scores, every valid candidate has one; where it adds `lexical_scores`, every
    candidate. `truncated(dim)` is the same batch scored by the first `dim` coordinates of an encoder's vectors, made
    unit vectors again.
    """

    scores: Float[Tensor, "query candidate"]
    gains: Float[Tensor, "query candidate"]
    valid: Bool[Tensor, "query candidate"]
    teacher_scores: Float[Tensor, "query candidate"] | None = None
    sides: SideScores | None = None
    lexical_scores: Float[Tensor, "query candidate"] | None = None
    truncated: "Callable[[int], ScoredBatch] | None" = None

    def filled(self, filler: float) -> Float[Tensor, "query candidate"]:
        """Scores with `filler` for invalid candidates, whatever theirs are: no gradient reaches them."""
        return self.scores.masked_fill(~self.valid, filler)

    def teacher(self) -> Float[Tensor, "query candidate"]:
        """The teacher's scores, 0 for invalid candidates. A loss that calls this declares `needs_teacher_scores`."""
        assert self.teacher_scores is not None, "the step gives teacher scores to a loss that needs them"
        return self.teacher_scores.to(self.scores).masked_fill(~self.valid, 0.0)


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
