"""Matryoshka: another loss, at several widths of the vectors at once."""

from typing import Literal

from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.losses.infonce import InfoNCE
from skilltrain.losses.plain import AnyPlainLoss
from skilltrain.losses.scored_batch import ScoredBatch


class Matryoshka(Config):
    """A loss on cosines of the vectors' first coordinates, summed over several widths.

    Use: an encoder whose vectors may be cut short when they are stored. Name the full width too, or it goes
        untrained.
    Formula: sum_d loss(cosines of the first d coordinates, made unit vectors again).
    Inputs: what the inner loss asks for, and vectors at least as wide as the widest of `dims`.
    Returns: the sum over queries. As sentence-transformers' MatryoshkaLoss, of a loss that is a sum.
    Example: query (0.8, 0.6), skills (1, 0) and (0, 1), gains (1, 0), infonce at temperature 1, dims (1,): the first
        skill's cosine becomes 1, the second's 0: log(1 + 1/e).
    Source: Kusupati et al. 2022, equation 1, with normalised representations and weights of 1.
    """

    name: Literal["matryoshka"] = "matryoshka"
    loss: AnyPlainLoss = Field(default=InfoNCE(), description="what is learnt at every width")
    dims: tuple[PositiveInt, ...] = Field(min_length=1, description="widths, the full one among them")

    @property
    def needs_teacher_scores(self) -> bool:
        """Whether the inner loss learns from a teacher."""
        return self.loss.needs_teacher_scores

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries. Raises SkilltrainError for scores that come from no vectors."""
        if batch.truncated is None:
            raise SkilltrainError("only an encoder has vectors to cut short", where="loss.matryoshka")
        parts = [self.loss(batch.truncated(dim)) for dim in self.dims]
        return sum(parts[1:], parts[0])
