"""What every loss sees."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of candidates, the gains that a recipe gives to their verdicts, and which of them count.

    Losses return the sum over queries: the trainer divides by the number of queries in the global step, so that
    neither ranks nor accumulation change what a query weighs. Gradients through invalid candidates are exactly zero.
    """

    scores: Float[Tensor, "query candidate"]
    gains: Float[Tensor, "query candidate"]
    valid: Bool[Tensor, "query candidate"]
