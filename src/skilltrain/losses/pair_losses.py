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

    A judged candidate is one with a gain other than 0. Each is compared with all candidates of its
    query. Memory grows with the number of judged times all candidates, not with the square of all
    candidates, which allows thousands of in-batch negatives.

    Attributes:
        query: Query of each judged candidate.
        column: Its column in the scores.
        gaps: Its gain minus that of the other candidate.
        is_pair: Whether both form a pair.
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
        """Return how far the candidate of higher gain scores above the other one, for each pair."""
        sign = torch.where(self.gaps < 0, -1, 1)  # -1: the judged candidate is the lower one
        return sign * (scores[self.query, self.column][:, None] - scores[self.query])

    def sum_of_means(self, values: Float[Tensor, "judged candidate"]) -> Float[Tensor, ""]:
        """Return the sum over queries of the mean of `values` over the query's pairs."""
        counts = self.is_pair.sum(1)  # [judged]
        query_counts = counts.new_zeros(self.num_queries).index_add(0, self.query, counts)
        sums = torch.where(self.is_pair, values, 0.0).sum(1)  # [judged]
        return (sums / query_counts[self.query].clamp(min=1)).sum()


def find_pairs(batch: ScoredBatch) -> GradedPairs:
    """Find the pairs of a batch.

    Most pairs are found from the candidate of higher gain. Candidates of gain 0 are not judged, so
    their pairs with rejected candidates (gain below 0) are found from the rejected one.
    """
    query, column = (batch.valid & (batch.gains != 0)).nonzero(as_tuple=True)
    other_gains = batch.gains[query]  # [judged, candidate]
    gaps = batch.gains[query, column][:, None] - other_gains
    is_below_zero_gain = (gaps < 0) & (other_gains == 0)
    is_pair = batch.valid[query] & ((gaps > 0) | is_below_zero_gain)
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
