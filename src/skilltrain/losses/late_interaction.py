"""Late interaction: InfoNCE on MaxSim, learnt beside the loss on an encoder's cosines."""

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.infonce import InfoNCE
from skilltrain.losses.scored_batch import ScoredBatch


class LateInteraction(Config):
    """A second loss of an encoder, which makes its tokens' vectors a ranker too (`kind: late`).

    Use: an encoder that finds candidates by its vectors and orders them by MaxSim, from the same weights.
    Formula: weight x infonce at a temperature of its own, from queries to skills.
    Inputs: the batch with MaxSim for scores (`max_sim`, in [-1, 1]); BM25's weight is that of the encoder's loss.
    Returns: the sum over queries.
    Example: MaxSim (1, 0), gains (1, 0), temperature 1, weight 0.5: log(1 + 1/e) / 2.
    Source: Khattab and Zaharia 2020 (ColBERT), with InfoNCE's in-batch negatives and no projection.
    """

    weight: float = Field(default=1.0, gt=0, description="what this loss counts for beside the encoder's own")
    temperature: float = Field(default=0.02, gt=0, description="the mean largest cosines are divided by it")

    def __call__(self, batch: ScoredBatch, lexical_weight: float) -> Float[Tensor, ""]:
        """The loss, summed over queries."""
        return self.weight * InfoNCE(temperature=self.temperature, lexical_weight=lexical_weight)(batch)
