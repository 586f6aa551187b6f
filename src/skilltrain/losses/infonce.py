"""InfoNCE: listwise cross-entropy over the step's skills."""

from typing import Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.listwise_ce import contrast
from skilltrain.losses.scored_batch import ScoredBatch


class InfoNCE(Config):
    """InfoNCE over hard and in-batch negatives.

    Use: the encoder's default; the other queries' skills serve as further negatives.
    Formula: `contrast`, the one formula that listwise cross-entropy has too; scores are cosines.
    Inputs: cosines in [-1, 1]; gains >= 0 with one > 0 a query; false negatives in the batch are marked invalid.
    Returns: the sum over queries.
    Example: cosines (1, 0), gains (1, 0), temperature 1: log(1 + 1/e).
    Source: SkillRouter, section 4.2, equation 1 (temperature 0.05).
    """

    name: Literal["infonce"] = "infonce"
    temperature: float = Field(default=0.05, gt=0)

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        return contrast(batch, self.temperature)
