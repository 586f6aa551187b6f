"""MarginMSE: the teacher's margins between positives and negatives, learnt as numbers."""

from dataclasses import replace
from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.scored_batch import ScoredBatch, find_pairs, mean_over_pairs


class MarginMSE(Config):
    """Squared difference between the model's and a teacher's margin of each positive over each negative.

    Use: distillation where the teacher may doubt a negative: it then asks for a small margin, or for none.
    Formula: mean over a query's pairs (i, j) with g_i > g_j of ((s_i - s_j)/t - (T_i - T_j))^2.
    Inputs: scores of any range; a cosine margin is 2 at most, so an encoder needs a temperature that reaches the
        teacher's; teacher scores T for every valid candidate; at least two gains per query.
    Returns: the sum over queries. sentence-transformers' MarginMSELoss is the mean, with one positive and t = 1.
    Example: scores (1, 0), teacher (3, 0), gains (1, 0): 4.
    Source: Hofstätter et al. 2020, equation 8.
    """

    needs_teacher_scores: ClassVar[bool] = True
    name: Literal["margin_mse"] = "margin_mse"
    temperature: float = Field(default=1.0, gt=0, description="the scores, not the teacher's, are divided by it")

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        pairs, teacher = find_pairs(batch), batch.teacher()
        wanted = replace(pairs, scores=teacher[pairs.row, pairs.column], other_scores=teacher[pairs.row]).margins()
        return mean_over_pairs(batch, pairs, (pairs.margins() / self.temperature - wanted).square())
