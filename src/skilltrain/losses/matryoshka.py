"""Matryoshka: another loss, at several widths of the vectors at once."""

from typing import Literal

from jaxtyping import Float
from pydantic import Field, model_validator
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
    Formula: sum_d w_d loss(cosines of the first d coordinates, made unit vectors again).
    Inputs: what the inner loss asks for, and vectors at least as wide as the widest of `dims`.
    Returns: the sum over queries. As sentence-transformers' MatryoshkaLoss, of a loss that is a sum.
    Example: query (0.8, 0.6), skills (1, 0) and (0, 1), gains (1, 0), infonce at temperature 1, dims (1,): the first
        skill's cosine becomes 1, the second's 0: log(1 + 1/e).
    Source: Kusupati et al. 2022, equation 1, with normalised representations (weights 1).
    """

    name: Literal["matryoshka"] = "matryoshka"
    loss: AnyPlainLoss = Field(default=InfoNCE(), description="what is learnt at every width")
    dims: tuple[int, ...] = Field(min_length=1, description="widths, the full one among them")
    weights: tuple[float, ...] | None = Field(default=None, description="a weight for each width; null: 1 for all")

    @model_validator(mode="after")
    def _check_widths(self) -> "Matryoshka":
        if min(self.dims) < 1 or len(set(self.dims)) < len(self.dims):
            raise ValueError(f"dims must be different numbers of coordinates, at least 1, found {list(self.dims)}")
        if self.weights is not None:
            if len(self.weights) != len(self.dims):
                raise ValueError(f"there are {len(self.weights)} weights for {len(self.dims)} dims")
            if min(self.weights) <= 0:
                raise ValueError(f"weights must be > 0, found {min(self.weights)}")
        return self

    @property
    def needs_teacher_scores(self) -> bool:
        """Whether the inner loss learns from a teacher."""
        return self.loss.needs_teacher_scores

    @property
    def needs_sides(self) -> bool:
        """Whether the inner loss needs them."""
        return self.loss.needs_sides

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries. Raises SkilltrainError for scores that come from no vectors."""
        if batch.truncated is None:
            raise SkilltrainError("only an encoder has vectors to cut short", where="loss.matryoshka")
        weights = self.weights or (1.0,) * len(self.dims)
        parts = [weight * self.loss(batch.truncated(dim)) for dim, weight in zip(self.dims, weights, strict=True)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
