"""A loss that trains vectors which may be truncated later."""

from dataclasses import replace
from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor

from skilltrain.losses.infonce import InfoNCE
from skilltrain.losses.scored_batch import Loss, Needs, RerankerLoss, ScoredBatch, call_loss


class Matryoshka(Loss):
    """A loss on cosines of the vectors' first coordinates, summed over several widths.

    Use: an encoder whose vectors may be truncated when they are stored. Only the widths in `dims`
        are trained, so name the full width too.
    Formula: sum_d loss(cosines of the first d coordinates, made unit vectors again).
    Inputs: those of the inner loss, and vectors at least as wide as the widest of `dims`.
    Returns: the sum over queries. It equals sentence-transformers' MatryoshkaLoss of a loss that is
        a sum.
    Example: query (0.8, 0.6), skills (1, 0) and (0, 1), gains (1, 0), infonce at temperature 1,
        dims (1,): the first skill's cosine becomes 1, that of the second 0: log(1 + 1/e).
    Source: Kusupati et al. 2022, equation 1, with normalised representations and weights of 1.
    """

    fits_reranker: ClassVar[bool] = False
    can_be_part: ClassVar[bool] = False
    name: Literal["matryoshka"] = "matryoshka"
    loss: RerankerLoss = Field(default=InfoNCE(), description="what is learnt at every width")
    dims: tuple[PositiveInt, ...] = Field(
        min_length=1, description="widths, the full one among them"
    )

    @property
    def needs(self) -> Needs:
        return replace(self.loss.needs, vectors=True)

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        losses = [call_loss(self.loss, batch.truncated(dim)) for dim in self.dims]
        return sum(losses[1:], losses[0])
