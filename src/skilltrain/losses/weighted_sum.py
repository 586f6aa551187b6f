"""A weighted sum of losses, and the losses inside another loss."""

from collections.abc import Iterator
from dataclasses import astuple
from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.matryoshka import Matryoshka
from skilltrain.losses.scored_batch import Loss, Needs, PartLoss, ScoredBatch, call_loss


class WeightedLoss(Config):
    """A part of a sum: a loss and its weight."""

    loss: PartLoss = Field(description="loss of this part")
    weight: float = Field(default=1.0, ge=0, description="factor of the loss in the sum")


class WeightedSum(Loss):
    """A weighted sum of losses over the same scores.

    Use: to learn from labels and a teacher at once (infonce + kl), or to add a regulariser. The
        log shows the value of each part, before its weight, as `loss/NAME`. For several widths,
        put the sum into `matryoshka`.
    Formula: sum_k w_k loss_k.
    Inputs: those of all parts. A part that needs no teacher scores also gets the candidates without
        a teacher score, such as in-batch negatives.
    Returns: the sum over queries.
    Example: listwise_ce with weight 1 and pointwise_bce with weight 2 at scores (0, 0), gains
        (1, 0): log 2 + 2 log 2.
    Source: Hinton et al. 2015, section 2 (labels and soft targets).
    """

    can_be_part: ClassVar[bool] = False
    name: Literal["sum"] = "sum"
    parts: dict[str, WeightedLoss] = Field(
        min_length=1, description="losses to add, by their names in the log"
    )

    @property
    def needs(self) -> Needs:
        # Each loss has a row, with a flag for each need. The sum has the needs of all its losses.
        flags = [astuple(part.loss.needs) for part in self.parts.values()]
        return Needs(*map(any, zip(*flags, strict=True)))

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """Return the weighted sum, and record the value of each part without its weight.

        Args:
            batch: Scores of the model, with everything that one of the parts reads.
        """
        total = batch.scores.new_zeros(())
        for name, part in self.parts.items():
            # `needs` says what a loss reads, such as teacher scores. A part that reads no teacher
            # scores also gets the candidates without a teacher score.
            value = call_loss(part.loss, batch.for_needs(part.loss.needs))
            batch.record(name, value)
            total = total + part.weight * value
        return total


def flatten_loss(loss: Loss) -> Iterator[Loss]:
    """Yield a loss and all losses inside it."""
    yield loss
    if isinstance(loss, Matryoshka):
        yield from flatten_loss(loss.loss)
    if isinstance(loss, WeightedSum):
        for part in loss.parts.values():
            yield part.loss  # no part contains other losses
