"""Losses over pairs of a higher and a lower gain: RankNet, and a teacher's margins."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skilltrain.losses.scored_batch import Loss, Needs, ScoredBatch, Temperature


@dataclass(frozen=True)
class GradedPairs:
    """Every pair of a higher and a lower gain among a query's valid candidates, once.

    Row i pairs the judged candidate at [row[i], column[i]] with all candidates of its query. Memory grows with judged
    times all candidates, not with the square of candidates, which allows thousands of in-batch negatives.
    """

    row: Int[Tensor, "judged"]
    column: Int[Tensor, "judged"]
    gaps: Float[Tensor, "judged candidate"]  # gain of the judged candidate, less that of the other
    is_pair: Bool[Tensor, "judged candidate"]
    num_queries: int

    def margins(
        self, scores: Float[Tensor, "query candidate"]
    ) -> Float[Tensor, "judged candidate"]:
        """Return how far the candidate of higher gain scores above the other one, for each pair."""
        sign = torch.where(self.gaps < 0, -1, 1)
        return sign * (scores[self.row, self.column][:, None] - scores[self.row])

    def sum_of_means(self, values: Float[Tensor, "judged candidate"]) -> Float[Tensor, ""]:
        """Return the sum over queries of the mean of `values` over the query's pairs."""
        counts = self.is_pair.sum(1)  # [judged]
        query_counts = counts.new_zeros(self.num_queries).index_add(0, self.row, counts)
        sums = torch.where(self.is_pair, values, 0.0).sum(1)  # [judged]
        return (sums / query_counts[self.row].clamp(min=1)).sum()


def find_pairs(batch: ScoredBatch) -> GradedPairs:
    """Find the pairs of a batch, those of two negatives included where one of them is rejected.

    Candidates of gain 0 are no rows, because two of them are no pair. A rejected candidate is a row and meets them.
    """
    row, column = (batch.valid & (batch.gains != 0)).nonzero(as_tuple=True)
    others = batch.gains[row]  # [judged, candidate]
    gaps = batch.gains[row, column][:, None] - others
    is_pair = batch.valid[row] & ((gaps > 0) | (gaps < 0) & (others == 0))
    return GradedPairs(row, column, gaps, is_pair, len(batch.gains))


class RankNet(Loss):
    """Logistic loss on the margin of every pair of a higher and a lower gain.

    Use: graded lists where only the order counts. Every pair weighs the same.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of log(1 + e^{-(s_i - s_j)/t}).
    Inputs: scores of any range; at least two gains per query; invalid candidates are ignored.
    Returns: the sum over queries. sentence-transformers' RankNetLoss takes one mean over the pairs of a whole batch,
        so that long lists weigh more, and by default the logarithm to base 2 (reduction_log "natural" is ours).
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
    """Squared difference between the model's and a teacher's margin of each positive over each negative.

    Use: distillation where the teacher may doubt a negative: it then asks for a small margin, or for none.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of ((s_i - s_j)/t - (T_i - T_j))^2.
    Inputs: scores of any range; a cosine margin is 2 at most, so an encoder needs a temperature that reaches the
        teacher's; teacher scores T for every valid candidate; at least two gains per query.
    Returns: the sum over queries. sentence-transformers' MarginMSELoss is the mean, with one positive and t = 1.
    Example: scores (1, 0), teacher (3, 0), gains (1, 0): 4.
    Source: Hofstätter et al. 2020, equation 8.
    """

    name: Literal["margin_mse"] = "margin_mse"
    temperature: Temperature = 1.0  # not of the teacher's scores

    @property
    def needs(self) -> Needs:
        return Needs(teacher_scores=True)

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        pairs = find_pairs(batch)
        margins = pairs.margins(batch.filled(0.0)) / self.temperature
        return pairs.sum_of_means((margins - pairs.margins(batch.teacher_scores)).square())
