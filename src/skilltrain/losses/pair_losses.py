"""Losses over pairs of a higher and a lower gain: RankNet, and a teacher's margins."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skilltrain.losses.scored_batch import Loss, Needs, ScoredBatch, Temperature


@dataclass(frozen=True)
class GradedPairs:
    """All pairs of a higher and a lower gain among the valid candidates of each query.

    Each judged candidate (gain other than 0) has a row, in which it is compared with all candidates
    of its query. In-batch negatives have no rows, so thousands of them fit in memory. Every pair is
    in one row only.

    Attributes:
        query: Query of each judged candidate.
        column: Its column in the scores.
        gaps: Its gain minus that of the other candidate.
        is_pair: Whether this row has the pair of the two.
        num_queries: Number of queries.
    """

    query: Int[Tensor, "judged"]
    column: Int[Tensor, "judged"]
    gaps: Float[Tensor, "judged candidate"]
    is_pair: Bool[Tensor, "judged candidate"]
    num_queries: int

    def margins(
        self, scores: Float[Tensor, "query candidate"]
    ) -> Float[Tensor, "judged candidate"]:
        """Return the score of each pair's higher gain minus the score of its lower gain."""
        sign = torch.where(self.gaps < 0, -1, 1)  # -1: the judged candidate has the lower gain
        return sign * (scores[self.query, self.column][:, None] - scores[self.query])

    def sum_of_means(self, values: Float[Tensor, "judged candidate"]) -> Float[Tensor, ""]:
        """Return the sum over queries of the mean of `values` over the query's pairs."""
        counts = self.is_pair.sum(1)  # [judged]
        query_counts = counts.new_zeros(self.num_queries).index_add(0, self.query, counts)
        sums = torch.where(self.is_pair, values, 0.0).sum(1)  # [judged]
        return (sums / query_counts[self.query].clamp(min=1)).sum()


def find_pairs(batch: ScoredBatch) -> GradedPairs:
    """Find the pairs of a batch.

    A pair is in the row of its candidate of higher gain. If that gain is 0, the candidate has no
    row, so the pair is in the row of the other one, a rejected candidate.
    """
    query, column = (batch.valid & (batch.gains != 0)).nonzero(as_tuple=True)  # each [judged]
    other_gains = batch.gains[query]  # [judged, candidate]
    gaps = batch.gains[query, column][:, None] - other_gains
    is_rejected_below_zero = (gaps < 0) & (other_gains == 0)
    is_pair = batch.valid[query] & ((gaps > 0) | is_rejected_below_zero)
    return GradedPairs(query, column, gaps, is_pair, len(batch.gains))


class RankNet(Loss):
    """Logistic loss on the margin of every pair of a higher and a lower gain.

    Use: graded lists where only the order counts. Every pair weighs the same.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of log(1 + e^{-(s_i - s_j)/t}).
    Inputs: scores of any range; at least two gains per query; invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' RankNetLoss is one mean over the pairs of
        a whole batch, so long lists have more weight. Its default is the logarithm to base 2; ours
        is its reduction_log "natural".
    Example: scores (0, 1), gains (1, 0): log(1 + e).
    Source: Burges et al. 2005, section 3, with target probability 1; sigma of later papers is 1/t.
    """

    name: Literal["ranknet"] = "ranknet"
    temperature: Temperature = 1.0

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        pairs = find_pairs(batch)
        margins = pairs.margins(batch.filled(0.0)) / self.temperature
        return pairs.sum_of_means(torch.nn.functional.softplus(-margins))


class MarginMSE(Loss):
    """Squared difference between the model's and a teacher's margin in each pair of gains.

    Use: distillation. A teacher that doubts a negative asks for a small margin, or for none.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of ((s_i - s_j)/t - (T_i - T_j))^2.
    Inputs: scores of any range; teacher scores T for every valid candidate; at least two gains per
        query. A cosine margin is at most 2, so an encoder needs a small temperature to reach the
        teacher's margins.
    Returns: the sum over queries. sentence-transformers' MarginMSELoss is the mean, with one
        positive and t = 1.
    Example: scores (1, 0), teacher (3, 0), gains (1, 0): 4.
    Source: Hofstätter et al. 2020, equation 8.
    """

    name: Literal["margin_mse"] = "margin_mse"
    temperature: Temperature = 1.0  # divides only the model's scores

    @property
    def needs(self) -> Needs:
        return Needs(teacher_scores=True)

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        pairs = find_pairs(batch)
        margins = pairs.margins(batch.filled(0.0)) / self.temperature
        return pairs.sum_of_means((margins - pairs.margins(batch.teacher_scores)).square())
